#!/usr/bin/env bash
# Submits a training run through xpk, on a cluster that xpk made (github.com/AI-Hypercomputer/xpk, pip install xpk).
#
#   launch/gke/xpk.sh NAME CONFIG [KEY=VALUE...] --cluster C --type v5p-32 --image IMAGE --storage S [--print]
#
#   --storage S       a storage of the cluster (xpk storage attach) mounted at /app/runs, where all hosts write
#   --slices N        default 1; with more, set mesh.data=N    --restarts N      default 50
#   --project ID, --zone ZONE                                  --spot, --print
#
# Stop it in order: xpk workload delete --workload NAME --cluster C. The same command again continues.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=launch/tpu.sh
source "$HERE/../tpu.sh"

GRACE=1800 # seconds; checkpoint.timeout_seconds is 1200 by default

main() {
    local call train
    opt_type="${NCP_TPU_TYPE:-}" opt_zone="${NCP_TPU_ZONE:-}" opt_project="${NCP_TPU_PROJECT:-}" opt_cluster=""
    opt_image="" opt_storage="" opt_slices=1 opt_restarts=50 opt_spot="" opt_print=""
    read_options "type zone project cluster image storage slices restarts" "spot print" "$@"
    [ ${#words[@]} -ge 2 ] || fail "give a NAME and a CONFIG; the head of this file tells more"
    check_name "${words[0]}" "the run's name"
    [ -n "$opt_type" ] || fail "give --type (or set NCP_TPU_TYPE); types are $TYPES"
    [ -n "$opt_cluster" ] || fail "give --cluster; 'xpk cluster list' names them"
    [ -n "$opt_image" ] || fail "give --image, made with launch/gke/Dockerfile and pushed where the cluster can read it"
    [[ -n "$opt_storage" || " ${words[*]:2}" == *" workdir="* ]] ||
        fail "give --storage, or workdir=PATH on a disk that all hosts mount: they write one run directory"
    read_type "$opt_type"
    call=(xpk workload create --workload="${words[0]}" --cluster="$opt_cluster" --tpu-type="$accelerator"
        --num-slices="$opt_slices" --docker-image="$opt_image" --max-restarts="$opt_restarts"
        --termination-grace-period-seconds="$GRACE")
    [ -z "$opt_storage" ] || call+=(--storage="$opt_storage")
    [ -z "$opt_project" ] || call+=(--project="$opt_project")
    [ -z "$opt_zone" ] || call+=(--zone="$opt_zone")
    [ -z "$opt_spot" ] || call+=(--spot)
    # exec: xpk sends SIGTERM to the one process that it starts, and that must be Python. xpk restarts statuses of 128
    # and above, so a stopped run (143, launch/pod.py) goes on; it does not restart 1 and 2, which are errors of ours.
    train="exec python launch/pod.py $(quoted "${words[@]:1}")"
    call+=(--command="cd /app && source launch/env/$generation.sh && $train")
    need xpk "pip install xpk"
    perform "${call[@]}"
}

main "$@"
