# shellcheck shell=bash
# Sourced by the scripts beside it: makes the project's own Python environment in .venv, once, and enters it.
# Usage: use_environment EXTRAS   (for example: use_environment report,test)

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT" || exit 1

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3 python; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    echo "No Python 3.11 to 3.13 found. Install one, or name it: PYTHON=/path/to/python3.11 bash $0" >&2
    return 1
}

use_environment() {
    local extras="$1" environment="${NCP_JAX_VENV:-$ROOT/.venv}" python stamp wanted
    if [ ! -x "$environment/bin/python" ]; then
        python="$(find_python)" || exit 1
        echo "Making $environment with $("$python" --version)"
        if ! "$python" -m venv "$environment"; then
            rm -rf "$environment"
            echo "This Python cannot make environments; on Debian and Ubuntu: apt-get install python3-venv" >&2
            exit 1
        fi
    fi
    # Reinstall only when the requirements or the extras asked for have changed.
    stamp="$environment/.ncp_jax-$extras"
    wanted="$(cat setup.py constraints.txt | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "Installing ncp_jax[$extras] and what it needs (about a minute)"
        "$environment/bin/python" -m pip install --quiet --disable-pip-version-check \
            --constraint constraints.txt --editable ".[$extras]"
        echo "$wanted" >"$stamp"
    fi
    PATH="$environment/bin:$PATH"
    export PATH
}
