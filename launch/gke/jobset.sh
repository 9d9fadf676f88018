#!/usr/bin/env bash
# Writes a JobSet that trains on GKE, from jobset.yaml and what you say; it touches no cluster.
#
#   launch/gke/jobset.sh NAME CONFIG [KEY=VALUE...] --type v5p-32 --image IMAGE --bucket gs://B | kubectl apply -f -
#
#   --slices N        default 1; with more, set mesh.data=N    --spot            on spot nodes
#   --account KSA     Kubernetes service account that may write the bucket; default: default
#   --restarts N      default 50                               --topology AxBxC  where we do not know it
#
# Stop it in order: kubectl delete jobset NAME. The same command again continues.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=launch/tpu.sh
source "$HERE/../tpu.sh"
# shellcheck source=launch/gke/nodes.sh
source "$HERE/nodes.sh"

GRACE=1800 # seconds; checkpoint.timeout_seconds is 1200 by default

main() {
    opt_type="${NCP_TPU_TYPE:-}" opt_bucket="${NCP_TPU_BUCKET:-}" opt_image="" opt_slices=1 opt_account=default
    opt_restarts=50 opt_topology="" opt_spot=""
    read_options "type bucket image slices account restarts topology" "spot" "$@"
    [ ${#words[@]} -ge 2 ] || fail "give a NAME and a CONFIG; the head of this file tells more"
    check_name "${words[0]}" "the run's name"
    [ -n "$opt_image" ] || fail "give --image, made with launch/gke/Dockerfile and pushed where the cluster can read it"
    [ -n "$opt_bucket" ] || fail "give --bucket: all hosts write one run directory"
    [[ "$opt_slices" =~ ^[1-9][0-9]*$ && "$opt_restarts" =~ ^[0-9]+$ ]] ||
        fail "--slices and --restarts are whole numbers"
    [[ "${words[*]}$opt_image$opt_bucket$opt_account" != *[[:cntrl:]]* ]] ||
        fail "an argument has a line break or another control character in it, which a JobSet cannot say"
    read_nodes "$opt_type" "$opt_topology"
    render
}

render() {
    local text folder="" bucket="${opt_bucket#gs://}" mount spot=""
    [[ "$bucket" != */* ]] || folder="${bucket#*/}"
    mount="implicit-dirs,metadata-cache:ttl-secs:0,metadata-cache:negative-ttl-secs:0${folder:+,only-dir=$folder}"
    [ -z "$opt_spot" ] || spot='                cloud.google.com/gke-spot: "true"'
    text="$(cat "$HERE/jobset.yaml")"
    fill NAME "$(text_of "${words[0]}")"
    fill RESTARTS "$opt_restarts"
    fill SLICES "$opt_slices"
    fill NODES "$nodes"
    fill GRACE "$GRACE"
    fill ACCOUNT "$(text_of "$opt_account")"
    fill ACCELERATOR "$node_accelerator"
    fill TOPOLOGY "$(text_of "$topology")"
    fill SPOT "$spot"
    fill IMAGE "$(text_of "$opt_image")"
    fill GENERATION "$generation"
    fill CHIPS "$node_chips"
    fill BUCKET "$(text_of "${bucket%%/*}")"
    fill MOUNT "$(text_of "$mount")"
    fill ARGUMENTS "$(arguments)" # last: what a user writes may look like one of ours
    printf '%s\n' "$text"
}

fill() {
    text="${text//"\${$1}"/"$2"}"
}

# A YAML (and JSON) double-quoted text.
text_of() {
    local text="$1"
    text="${text//\\/\\\\}"
    printf '"%s"' "${text//\"/\\\"}"
}

# A list of the run's words. Kubernetes reads $$ as a lone $, and $(NAME) as a variable.
arguments() {
    local word separator="["
    for word in "${words[@]:1}"; do
        printf '%s%s' "$separator" "$(text_of "${word//\$/\$\$}")"
        separator=", "
    done
    printf ']'
}

main "$@"
