#!/usr/bin/env bash
# One host of a TPU slice: its environment, its disk, its part of the run. tpu_vm.sh calls this on all hosts at once.
#
#   launch/worker.sh setup --extras tpu
#   launch/worker.sh start --generation v5p [--bucket gs://NAME/FOLDER] -- CONFIG [KEY=VALUE...]
#   launch/worker.sh status | running | logs [--follow] | stop
#
# Its notes on the run lie in .run/: arguments, attempt and pid (of the shell and of the run), exit, train.log.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=launch/tpu.sh
source "$HERE/tpu.sh"
cd "$HERE/.."

PYTHON_VERSION=3.11 # the one that constraints.txt was tested with
NOTES=.run
STOPPED=143 # launch/pod.py: the run saved and ended in order, before its last step
SAVE_SECONDS=1800 # longer than a checkpoint may take (checkpoint.timeout_seconds)

main() {
    local command="${1:-}"
    opt_extras=tpu opt_generation="" opt_bucket="" opt_follow=""
    read_options "extras generation bucket" "follow" "${@:2}"
    case "$command" in
        setup | start | status | running | logs | stop | attempt) "$command" ;;
        *) fail "unknown command '$command'; commands are setup, start, status, running, logs, stop" ;;
    esac
}

setup() {
    # shellcheck source=launch/environment.sh
    source "$HERE/environment.sh"
    # An image's own Python may be too old: Ubuntu 22.04 has 3.10. uv brings one, without root.
    PYTHON="$(find_python 2>/dev/null)" || PYTHON="$(fetch_python)"
    export PYTHON
    use_environment "$opt_extras"
}

fetch_python() {
    python3 -m pip install --quiet --user uv >&2
    python3 -m uv python install --quiet "$PYTHON_VERSION" >&2
    python3 -m uv python find "$PYTHON_VERSION"
}

# Begins or continues the run, in the background: it outlives the connection that started it.
start() {
    local wanted
    [ ${#words[@]} -gt 0 ] || fail "start needs a CONFIG after --"
    [ -f "$HERE/env/$opt_generation.sh" ] ||
        fail "no launch/env/$opt_generation.sh; give --generation v4, v5e, v5p or v6e"
    [ -x .venv/bin/python ] || fail "no environment on $HOSTNAME; run setup first"
    wanted="$(quoted "$opt_generation" "${words[@]}")"
    if running; then
        [ "$(cat "$NOTES/arguments")" = "$wanted" ] ||
            fail "$HOSTNAME is running something else: $(cat "$NOTES/arguments"). Stop it first"
        echo "already running on $HOSTNAME"
        return
    fi
    [ -z "$opt_bucket" ] || mount_bucket
    mkdir -p "$NOTES"
    rm -f "$NOTES/exit" "$NOTES/pid" "$NOTES/attempt"
    echo "$wanted" >"$NOTES/arguments"
    printf '== %s %s\n' "$(date -u +%FT%TZ)" "$wanted" >>"$NOTES/train.log"
    setsid nohup bash "$HERE/worker.sh" attempt --generation "$opt_generation" -- "${words[@]}" \
        >>"$NOTES/train.log" 2>&1 </dev/null &
    for _ in {1..100}; do # the pid appears within milliseconds
        [ ! -s "$NOTES/pid" ] || break
        sleep 0.1
    done
    echo "started on $HOSTNAME"
}

# The run itself, waited for.
attempt() {
    local code=0
    echo $$ >"$NOTES/attempt"
    # shellcheck source=launch/env/v4.sh
    source "$HERE/env/$opt_generation.sh"
    PATH="$PWD/.venv/bin:$PATH" .venv/bin/python launch/pod.py "${words[@]}" &
    echo $! >"$NOTES/pid"
    wait $! || code=$?
    echo "$code" >"$NOTES/exit"
}

# Is a run going? Its shell lives from before the run begins until its exit status is written. A pid may belong to
# another process since a reboot.
running() {
    [ -s "$NOTES/pid" ] && [ -s "$NOTES/attempt" ] && [ ! -f "$NOTES/exit" ] &&
        grep -q worker.sh "/proc/$(cat "$NOTES/attempt")/cmdline" 2>/dev/null
}

# "worker HOST STATE": bare, idle, running PID, finished, stopped, failed CODE, or lost (the host went down).
status() {
    local state code
    if [ ! -x .venv/bin/ncp-jax ]; then
        state=bare
    elif running; then
        state="running $(cat "$NOTES/pid")"
    elif [ -f "$NOTES/exit" ]; then
        code="$(cat "$NOTES/exit")"
        case "$code" in
            0) state=finished ;;
            "$STOPPED") state=stopped ;;
            *) state="failed $code" ;;
        esac
    elif [ -f "$NOTES/arguments" ]; then
        state=lost
    else
        state=idle
    fi
    echo "worker $HOSTNAME $state"
    [ ! -f "$NOTES/train.log" ] || tail -n 1 "$NOTES/train.log" | sed 's/^/    /'
}

logs() {
    [ -f "$NOTES/train.log" ] || fail "no log on $HOSTNAME: nothing was started here"
    tail -n 100 ${opt_follow:+-F} "$NOTES/train.log"
}

stop() {
    local waited=0
    if ! running; then
        echo "nothing runs on $HOSTNAME"
        return
    fi
    kill -TERM "$(cat "$NOTES/pid")"
    while running; do
        [ "$waited" -lt $((SAVE_SECONDS * 5)) ] || fail "still running on $HOSTNAME after $SAVE_SECONDS s"
        sleep 0.2
        waited=$((waited + 1))
    done
    status
}

# The bucket becomes runs/ on every host, so that they write one run directory and the next slice finds it again.
mount_bucket() {
    local bucket="${opt_bucket#gs://}" folder=""
    [[ "$bucket" != */* ]] || folder="${bucket#*/}"
    bucket="${bucket%%/*}"
    mkdir -p runs
    ! mountpoint -q runs || return 0
    command -v gcsfuse >/dev/null || install_gcsfuse
    # No metadata cache: each host must see at once what the others wrote, and what they had not yet; on large machines
    # the default is to cache for ever (GoogleCloudPlatform/gcsfuse docs/semantics.md). Checkpoints appear by renaming
    # a folder: one step only in a bucket with hierarchical namespace (docs.cloud.google.com/storage/docs/hns-overview).
    gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 \
        ${folder:+--only-dir="$folder"} "$bucket" runs
}

# docs.cloud.google.com/storage/docs/cloud-storage-fuse/install
install_gcsfuse() {
    local key=/usr/share/keyrings/cloud.google.asc source=https://packages.cloud.google.com/apt
    curl -fsSL "$source/doc/apt-key.gpg" | sudo tee "$key" >/dev/null
    echo "deb [signed-by=$key] $source gcsfuse-$(lsb_release -c -s) main" |
        sudo tee /etc/apt/sources.list.d/gcsfuse.list
    sudo apt-get update -qq
    sudo apt-get install -y -qq gcsfuse
}

main "$@"
