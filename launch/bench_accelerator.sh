#!/usr/bin/env bash
# The whole comparison on one accelerator host, within ten minutes: a plain transformer, NCP's concept path, its routes
# within towers, all routes; 190M and 1B parameters; Muon and AdamW; decoding. One JSON line a figure.
#
#   launch/bench_accelerator.sh [--out FILE] [KEY=VALUE...]
#
#   --out FILE        also append the lines to FILE
#   --sizes LIST      of configs/speed.py; default: 190m,1b. nano is one for a CPU
#   --arms LIST       of configs/speed.py, compared with the first; default: vanilla,concept,irc,routes
#   --steps N         timed steps of each; default 20
#   --rows N          rows of a batch, a multiple of all chips; default 16
#   --tokens N        tokens of a row; default 2048
#   --decode N        tokens generated in each row; default 64
#   --seconds N       for everything; default 600. What is then left over is named in a line that says "skipped"
#   --print           show the commands, one a line, and run nothing
#
# KEY=VALUE pairs change every config. The environment has ncp_jax[gpu] or ncp_jax[tpu]; on a TPU VM, run it on one
# host. Compiled programs are kept in JAX_COMPILATION_CACHE_DIR, so that a second run times more in the same minutes.
# Not run on an accelerator yet; tests/launch runs it at tiny size on a CPU.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=launch/tpu.sh
source "$HERE/tpu.sh"
cd "$HERE/.."
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/ncp_jax/compiled}"

main() {
    opt_out="" opt_sizes=190m,1b opt_arms=vanilla,concept,irc,routes opt_steps=20 opt_rows=16 opt_tokens=2048
    opt_decode=64 opt_seconds=600 opt_print=""
    read_options "out sizes arms steps rows tokens decode seconds" "print" "$@"
    [[ "$opt_seconds" =~ ^[1-9][0-9]*$ ]] || fail "--seconds must be a whole number from 1, got '$opt_seconds'"
    need ncp-jax "pip install -c constraints.txt -e '.[gpu]', or '.[tpu]'"
    IFS=, read -ra sizes <<<"$opt_sizes"
    IFS=, read -ra arms <<<"$opt_arms"
    # The most wanted first: what does not fit into the time is at the end.
    local size ends="${arms[0]}"
    [ ${#arms[@]} -eq 1 ] || ends+=" ${arms[-1]}"
    for size in "${sizes[@]}"; do
        measure "$size" "${arms[*]}" --steps "$opt_steps" optim.optimizer=muon
    done
    for size in "${sizes[@]}"; do
        measure "$size" "${arms[*]}" --decode "$opt_decode"
    done
    for size in "${sizes[@]}"; do
        measure "$size" "$ends" --steps "$opt_steps" optim.optimizer=adamw
    done
}

# measure SIZE ARMS WORDS...: some arms of one size, one after the other, as JSON lines. The machine is quiet and its
# memory small: no two are held at once, and what is known when the time is over is kept.
measure() {
    local size="$1" arm left code=0 call=(ncp-jax bench)
    for arm in $2; do
        [ ${#call[@]} -eq 2 ] || call+=(--vs)
        call+=("configs/speed.py:${size}_$arm")
    done
    call+=("${@:3}" --alone --json - "train.batch=$opt_rows" "data.sequence=$opt_tokens" "${words[@]}")
    if [ -n "$opt_print" ]; then
        quoted "${call[@]}"
        return
    fi
    left=$((opt_seconds - SECONDS))
    if [ "$left" -le 0 ]; then
        skipped "$opt_seconds s are over" "${call[@]}"
        return
    fi
    timeout "$left" "${call[@]}" | tee -a "${opt_out:-/dev/null}" || code=$?
    # 124: the time is over. Whatever else failed must not cost the rest.
    [ "$code" -eq 0 ] || skipped "exit status $code" "${call[@]}"
}

# skipped REASON WORDS...: a line that says what was not timed, and why.
skipped() {
    local command
    command="$(quoted "${@:2}")"
    command="${command//\\/\\\\}"
    printf '{"skipped": "%s", "reason": "%s"}\n' "${command//\"/\\\"}" "$1" | tee -a "${opt_out:-/dev/null}"
}

main "$@"
