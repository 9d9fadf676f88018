#!/usr/bin/env bash
# Keeps one run going on a slice that may be taken away: makes the slice again, and starts the same command again.
#
#   launch/babysit.sh NAME CONFIG [KEY=VALUE...] --type v5p-32 --zone us-east5-a --bucket gs://B [options of tpu_vm.sh]
#
#   --interval S          seconds between two looks; default 60
#   --retries N           give up after so many troubles with no quiet half hour among them; default 20
#   --delete-when-done    delete the slice when the run has finished, or when this gives up
#   --print               show the commands of one round that has to do everything, and run nothing
#
# Every round looks anew and takes one step, so it may be stopped and started at any time, and on another machine.
# Exit status: 0 the run has finished; 1 given up; 2 something to mend first.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=launch/tpu.sh
source "$HERE/tpu.sh"

QUIET_SECONDS=1800 # of nothing but good looks: what fails later than that is another trouble
LONGEST_WAIT=1800 # seconds; waits double from one trouble to the next up to this
MEND=2 # exit status of `ncp-jax`: something to mend before the run can go on

# shellcheck disable=SC2034  # pass_on reads some of the options by their names
main() {
    opt_type="${NCP_TPU_TYPE:-}" opt_zone="${NCP_TPU_ZONE:-}" opt_bucket="${NCP_TPU_BUCKET:-}" opt_project=""
    opt_version="" opt_slices="" opt_extras="" opt_spot="" opt_queued="" opt_any_zone="" opt_print=""
    opt_interval=60 opt_retries=20 opt_delete_when_done=""
    read_options "type zone project bucket version slices extras interval retries" \
        "spot queued any-zone delete-when-done print" "$@"
    [ ${#words[@]} -ge 2 ] || fail "give the NAME of a slice and a CONFIG; the head of this file tells more"
    name="${words[0]}"
    [[ "$opt_interval$opt_retries" =~ ^[0-9]+$ ]] || fail "--interval and --retries are whole numbers"
    [ -n "$opt_type" ] || fail "give --type (or set NCP_TPU_TYPE); types are $TYPES"
    [[ -n "$opt_bucket" || " ${words[*]:2}" == *" workdir="* ]] ||
        fail "a new slice has empty disks; give --bucket NAME, or workdir=PATH on a disk that outlives the slice"
    pass_on
    if [ -n "$opt_print" ]; then
        everything
        return
    fi
    need gcloud "install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), then: gcloud auth login"
    export CLOUDSDK_CORE_DISABLE_PROMPTS=1 # nobody is there to answer
    vm create --print >/dev/null # wrong options end here, before any round
    vm run --print "${words[@]:1}" >/dev/null
    troubles=0 quiet=0 uneven=0
    while true; do
        round
        sleep "$(wait_seconds)"
    done
}

# Options of ours that tpu_vm.sh must hear too.
pass_on() {
    local option value
    options=()
    for option in type zone project bucket version slices extras; do
        value="opt_$option"
        [ -z "${!value}" ] || options+=("--$option" "${!value}")
    done
    for option in spot queued any-zone print; do
        value="opt_${option//-/_}"
        [ -z "${!value}" ] || options+=("--$option")
    done
}

# vm COMMAND WORDS...: a command of tpu_vm.sh on this slice.
vm() {
    bash "$HERE/tpu_vm.sh" "$1" "${options[@]}" "$name" "${@:2}"
}

everything() {
    vm state
    vm delete --yes
    vm create
    vm push
    vm setup
    vm run "${words[@]:1}"
    vm status
}

# One look, one step.
round() {
    local state
    if ! state="$(vm state)"; then
        trouble "no answer about the slice"
        return
    fi
    case "$state" in
        READY | ACTIVE) look "$state" ;;
        ABSENT)
            say "$state: creating it"
            vm create || trouble "creating failed"
            ;;
        PREEMPTED | TERMINATED | SUSPENDED | FAILED)
            # Counted, so that a request that Google turns down at once does not go round for ever.
            trouble "$state: deleting what is left"
            vm delete --yes || trouble "deleting failed"
            ;;
        STOPPED | HIDDEN) give_up 1 "$state: someone stopped it; start it, or delete it, then run this again" ;;
        *) say "$state" ;; # on its way up or down
    esac
}

# The slice is there: what does the run do? Decides by all workers together.
look() {
    local workers code all running
    if ! workers="$(vm workers | grep '^worker ')"; then
        trouble "$1, but its workers do not answer"
        return
    fi
    all="$(grep -c . <<<"$workers")"
    running="$(grep -c ' running ' <<<"$workers" || true)"
    code="$(sed -n 's/^worker [^ ]* failed //p' <<<"$workers" | sort -n | tail -n 1)"
    if grep -q ' bare$' <<<"$workers"; then
        say "$1, nothing installed: sending and installing ncp_jax"
        if ! { vm push && vm setup && vm run "${words[@]:1}"; }; then
            trouble "could not get the run going"
        fi
    elif grep -q " failed $MEND\$" <<<"$workers"; then
        give_up 2 "the run ended with status $MEND: mend what its log says (tpu_vm.sh logs $name)"
    elif [ "$running" -eq "$all" ]; then
        calm "$1, $all running"
    elif [ "$running" -gt 0 ] && [ "$uneven" -eq 0 ]; then
        # One worker's end takes the others down within minutes; give it a round.
        uneven=1
        say "$1, $running of $all running"
    elif [ "$running" -gt 0 ]; then
        trouble "$1, still $running of $all running: stopping them"
        uneven=0
        vm stop || true
    elif ! grep -v -q ' finished$' <<<"$workers"; then
        say "$1, the run has finished"
        leave 0
    else
        [ -z "$code" ] || trouble "the run failed with status $code"
        say "$1, nothing running: starting it again"
        vm run "${words[@]:1}" || trouble "could not start it"
    fi
}

# ---- troubles, and when to stop

trouble() {
    troubles=$((troubles + 1)) quiet=0
    say "trouble $troubles of $opt_retries: $*"
    [ "$troubles" -lt "$opt_retries" ] || give_up 1 "too many troubles"
}

calm() {
    quiet=$((quiet + 1)) uneven=0
    [ $((quiet * opt_interval)) -lt "$QUIET_SECONDS" ] || troubles=0
    say "$*"
}

wait_seconds() {
    local seconds="$opt_interval" i
    for ((i = 1; i < troubles && quiet == 0 && seconds < LONGEST_WAIT; i++)); do
        seconds=$((seconds * 2))
    done
    echo $((seconds < LONGEST_WAIT || opt_interval > LONGEST_WAIT ? seconds : LONGEST_WAIT))
}

give_up() {
    say "giving up: ${*:2}"
    leave "$1"
}

leave() {
    if [ -n "$opt_delete_when_done" ]; then
        say "deleting the slice"
        vm delete --yes || say "deleting failed: IT STILL COSTS MONEY"
    else
        say "the slice, if it is there, still costs money: launch/tpu_vm.sh delete $name --zone $opt_zone"
    fi
    exit "$1"
}

say() {
    echo "$(date -u +%FT%TZ) $name: $*"
}

main "$@"
