#!/usr/bin/env bash
# One TPU slice, or several, from creation to deletion: run on your own machine, with the gcloud command line.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=launch/tpu.sh
source "$HERE/tpu.sh"

usage() {
    cat <<'END'
usage: launch/tpu_vm.sh COMMAND NAME [OPTION...]

  create NAME              make the slice
  push NAME                send this working tree, without runs/, corpora/, report/, .venv and .git, to ~/ncp_jax,
                           with its revision in REVISION, which the run's config.json then records
  setup NAME               Python 3.11 or later and ncp_jax[tpu] on every worker
  run NAME CONFIG [KEY=VALUE...]   train on all workers, in the background; the same command again continues
  status NAME              state of the slice and of the run
  logs NAME                end of a worker's log; --worker N, --follow
  stop NAME                SIGTERM to the run: it saves a checkpoint and ends
  delete NAME              delete the slice; asks first, unless --yes
  state NAME, workers NAME the two halves of status, for scripts: one word; one line a worker

  --type TYPE      v5p-32, v5e-16, v6e-8, v4-32...               or NCP_TPU_TYPE
  --zone ZONE      us-east5-a...                                  or NCP_TPU_ZONE
  --project ID     default: gcloud's own                          or NCP_TPU_PROJECT
  --bucket NAME    gs://NAME or gs://NAME/FOLDER, mounted as runs/ on every worker; or NCP_TPU_BUCKET
  --version IMAGE  TPU VM image; default: the one for the generation
  --spot           cheap, may be taken away at any time; see babysit.sh
  --queued         wait in Google's queue instead of failing when there is no capacity
  --slices N       N equal slices joined by the data-centre network; implies --queued
  --worker W       which workers: all (default), 0, 1-3; logs: 0      --node N: which slice, for logs
  --extras LIST    of setup; default: tpu                             --any-zone: pass over the list of zones
  --print          show the commands, one a line, and run nothing

Give --queued or --slices with every command on a slice that was made with it.
END
}

main() {
    [ $# -gt 0 ] || { usage >&2; exit 2; }
    case "$1" in -h | --help | help) usage; exit ;; esac
    command="$1"
    opt_type="${NCP_TPU_TYPE:-}" opt_zone="${NCP_TPU_ZONE:-}" opt_project="${NCP_TPU_PROJECT:-}"
    opt_bucket="${NCP_TPU_BUCKET:-}" opt_version="" opt_slices=1 opt_worker="" opt_node="" opt_extras=tpu
    opt_spot="" opt_queued="" opt_any_zone="" opt_follow="" opt_yes="" opt_print=""
    read_options "type zone project bucket version slices worker node extras" \
        "spot queued any-zone follow yes print" "${@:2}"
    case "$command" in
        create | push | setup | run | status | logs | stop | delete | state | workers) ;;
        *) fail "unknown command '$command'; commands: create push setup run status logs stop delete state workers" ;;
    esac
    [ ${#words[@]} -gt 0 ] || fail "$command needs the NAME of a slice"
    name="${words[0]}" words=("${words[@]:1}")
    [ "$command" = run ] || [ ${#words[@]} -eq 0 ] || fail "$command takes no '${words[0]}'"
    check_name "$name" "the slice's name"
    resolve
    need gcloud "install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), then: gcloud auth login"
    "$command"
}

# Checks what the options say, and turns them into words of gcloud commands.
resolve() {
    local everyone=all
    [ "$command" != logs ] || everyone=0
    [[ "$opt_slices" =~ ^[1-9][0-9]*$ ]] || fail "--slices must be a whole number from 1, got '$opt_slices'"
    [ "$opt_slices" -eq 1 ] || opt_queued=yes
    [ -n "$opt_zone" ] || fail "give --zone (or set NCP_TPU_ZONE); for v5p, for example, us-east5-a"
    if [ -n "$opt_type" ]; then
        read_type "$opt_type"
        [ -n "$opt_any_zone" ] || check_zone "$generation" "$opt_zone"
    elif [ "$command" = create ] || [ "$command" = run ]; then
        fail "give --type (or set NCP_TPU_TYPE); types are $TYPES"
    fi
    place=("$name" --zone="$opt_zone")
    [ -z "$opt_project" ] || place+=(--project="$opt_project")
    if [ -n "$opt_queued" ]; then
        tpus=(gcloud compute tpus queued-resources) state_field=state.state
        targets=(--node="${opt_node:-$everyone}" --worker="${opt_worker:-$everyone}")
    else
        tpus=(gcloud compute tpus tpu-vm) state_field=state
        [ -z "$opt_node" ] || fail "--node is for slices made with --queued or --slices"
        targets=(--worker="${opt_worker:-$everyone}")
    fi
}

create() {
    local call=("${tpus[@]}" create "${place[@]}" --accelerator-type="$accelerator")
    if [ -n "$opt_queued" ]; then
        call+=(--runtime-version="${opt_version:-$version}")
        if [ "$opt_slices" -gt 1 ]; then
            call+=(--node-count="$opt_slices" --node-prefix="$name")
        else
            call+=(--node-id="$name")
        fi
    else
        call+=(--version="${opt_version:-$version}")
    fi
    [ -z "$opt_spot" ] || call+=(--spot)
    perform "${call[@]}"
    [ -z "$opt_queued" ] || advise "queued; it costs nothing until 'status' says ACTIVE"
}

push() {
    local archive="${TMPDIR:-/tmp}/ncp_jax-$name.tar.gz" target="ncp_jax" revision
    # For config.json of runs: the tree arrives without .git. Unknown where there is no git here.
    revision="$(git -C "$HERE/.." describe --always --dirty --abbrev=40 2>/dev/null)" || revision=""
    perform tar -czf "$archive" -C "$(dirname "$HERE")" --exclude=./runs --exclude=./corpora --exclude=./report \
        --exclude=./.git --exclude='./.venv*' --exclude=./.run --exclude='./.*_cache' --exclude=./.hypothesis \
        --exclude='*.egg-info' --exclude=__pycache__ .
    perform "${tpus[@]}" scp "$archive" "$name:ncp_jax.tar.gz" "${place[@]:1}" "${targets[@]}"
    # What the run made stays; what the old tree had and the new one lacks goes. A live run keeps the code it has.
    on_workers "mkdir -p $target && if bash $target/launch/worker.sh running 2>/dev/null; then \
echo 'a run is using the code: stop it first' >&2; exit 1; fi && \
find $target -mindepth 1 -maxdepth 1 ! -name .venv ! -name .run ! -name runs ! -name corpora -exec rm -rf {} + && \
tar -xzf ncp_jax.tar.gz -C $target && rm ncp_jax.tar.gz${revision:+ && echo $(quoted "$revision") >$target/REVISION}"
}

setup() {
    on_workers "bash ncp_jax/launch/worker.sh setup --extras $(quoted "$opt_extras")"
}

run() {
    [ ${#words[@]} -gt 0 ] || fail "run needs a CONFIG, for example: run $name configs/ncp_1b.py mesh.data=2"
    local options=(--generation "$generation")
    if [ -n "$opt_bucket" ]; then
        options+=(--bucket "$opt_bucket")
    elif [ $((hosts * opt_slices)) -gt 1 ] && [[ " ${words[*]:1}" != *" workdir="* ]]; then
        fail "$opt_slices x $opt_type are $((hosts * opt_slices)) hosts that write one run directory; give --bucket" \
            "NAME, or workdir=PATH on a disk that all of them mount"
    fi
    on_workers "bash ncp_jax/launch/worker.sh start $(quoted "${options[@]}" -- "${words[@]}")"
}

status() {
    state
    workers
}

# One line a worker, "worker HOST STATE", with the end of its log below. bare: without code or without environment.
workers() {
    on_workers "if [ -f ncp_jax/launch/worker.sh ]; then bash ncp_jax/launch/worker.sh status; \
else echo worker \$(hostname) bare; fi"
}

logs() {
    on_workers "bash ncp_jax/launch/worker.sh logs${opt_follow:+ --follow}"
}

stop() {
    on_workers "bash ncp_jax/launch/worker.sh stop"
}

delete() {
    local call=("${tpus[@]}" delete "${place[@]}" --quiet) answer=""
    # The queue keeps an entry whose slices are gone; with them, it goes only by force.
    [ -z "$opt_queued" ] || call+=(--force)
    if [ -z "$opt_yes$opt_print" ]; then
        read -r -p "delete $name in $opt_zone, with everything on its disks? [y/N] " answer || true
        [[ "$answer" =~ ^[yY] ]] || fail "nothing deleted"
    fi
    perform "${call[@]}"
}

# A slice that is not there is a state; a question that got no answer is a failure.
state() {
    local call=("${tpus[@]}" describe "${place[@]}" --format="value($state_field)") errors said
    if [ -n "$opt_print" ]; then
        quoted "${call[@]}"
        return
    fi
    errors="$(mktemp)"
    said="$("${call[@]}" 2>"$errors")" || said=""
    if [ -n "$said" ]; then
        echo "$said"
    elif grep -q -i -e NOT_FOUND -e 'was not found' "$errors"; then
        echo ABSENT
    else
        cat "$errors" >&2
        rm -f "$errors"
        return 1
    fi
    rm -f "$errors"
}

on_workers() {
    perform "${tpus[@]}" ssh "${place[@]}" "${targets[@]}" --command="$1"
}

advise() {
    [ -n "$opt_print" ] || echo "$name: $*"
}

main "$@"
