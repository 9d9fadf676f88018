# shellcheck shell=bash
# Sourced by tpu_vm.sh, babysit.sh, worker.sh and the scripts under gke/: options, quoting, and what a TPU type is.

TYPES="v4-N and v5p-N with N TensorCores (8, 16, 32, 64, or a multiple of 128);
v5e-N, also written v5litepod-N, and v6e-N with N chips (1, 4, 8, 16, 32, 64, 128, 256)"

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

# One shell line that means exactly these words: what Python's shlex.join would write.
quoted() {
    local LC_ALL=C line="" word quote="'" escaped="'\"'\"'"
    for word in "$@"; do
        case "$word" in
            "" | *[!A-Za-z0-9_@%+=:,./-]*) word="'${word//"$quote"/"$escaped"}'" ;;
        esac
        line+="${line:+ }$word"
    done
    printf '%s\n' "$line"
}

# Runs a command; with --print shows it instead.
perform() {
    if [ -n "${opt_print:-}" ]; then quoted "$@"; else "$@"; fi
}

# Fails unless a program is there to be run. $2: how to get it.
need() {
    [ -n "${opt_print:-}" ] || command -v "$1" >/dev/null ||
        fail "$1 not found; $2. With --print this script only shows its commands, and needs nothing"
}

# read_options VALUED SWITCHES WORDS...: every --some-option goes to opt_some_option, other words to words.
# Options may stand anywhere before a lone --.
read_options() {
    local valued=" $1 " switches=" $2 " word option value names
    read -ra names <<<"$1 $2"
    shift 2
    words=()
    while [ $# -gt 0 ]; do
        word="$1"
        shift
        case "$word" in
            --)
                words+=("$@")
                return
                ;;
            --*) ;;
            *)
                words+=("$word")
                continue
                ;;
        esac
        option="${word%%=*}"
        option="${option#--}"
        if [[ "$valued" == *" $option "* ]]; then
            if [[ "$word" == *=* ]]; then
                value="${word#*=}"
            else
                [ $# -gt 0 ] || fail "--$option needs a value"
                value="$1"
                shift
            fi
        elif [[ "$switches" == *" $option "* && "$word" != *=* ]]; then
            value=yes
        else
            fail "unknown option '$word'; options:$(printf ' --%s' "${names[@]}")"
        fi
        printf -v "opt_${option//-/_}" '%s' "$value"
    done
}

# Fails unless $1 can name a cloud resource, as $2. 40 characters leave room for suffixes of slices and pods.
check_name() {
    [[ "$1" =~ ^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$ ]] ||
        fail "$2 '$1' must be lower-case letters, digits and hyphens, at most 40, and begin with a letter"
}

# read_type TYPE: sets generation, accelerator (Google's name), chips, hosts (VMs of a slice), version (TPU VM image).
# Sizes and hosts: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}. Images: docs.cloud.google.com/tpu/docs/runtimes.
# shellcheck disable=SC2034  # what it sets is for those who source this file
read_type() {
    local size="${1##*-}"
    generation="${1%-*}"
    [ "$generation" != v5litepod ] || generation=v5e
    [[ "$size" =~ ^[1-9][0-9]*$ ]] || fail "unknown type '$1'; types are $TYPES"
    case "$generation" in
        v4 | v5p)
            case "$size" in
                8 | 16 | 32 | 64) ;;
                *) [ $((size % 128)) -eq 0 ] || fail "no slice '$1'; types are $TYPES" ;;
            esac
            chips=$((size / 2)) hosts=$((size / 8))
            ;;
        v5e | v6e)
            case "$size" in
                1 | 4 | 8) hosts=1 ;;
                16 | 32 | 64 | 128 | 256) hosts=$((size / 4)) ;;
                *) fail "no slice '$1'; types are $TYPES" ;;
            esac
            chips="$size"
            ;;
        *) fail "unknown type '$1'; types are $TYPES" ;;
    esac
    accelerator="$generation-$size"
    case "$generation" in
        v4) version=tpu-ubuntu2204-base ;;
        v5e) version=v2-alpha-tpuv5-lite accelerator="v5litepod-$size" ;;
        v5p) version=v2-alpha-tpuv5 ;;
        v6e) version=v2-alpha-tpuv6e ;;
    esac
}

# check_zone GENERATION ZONE: fails, naming the zones, unless one is known to have the generation.
# docs.cloud.google.com/tpu/docs/regions-zones, as far as we found it; europe-west4-b: MaxText's v5p scripts.
check_zone() {
    local zones
    case "$1" in
        v4) zones="us-central2-b" ;;
        v5e) zones="us-central1-a us-south1-a us-west1-c us-west4-a" ;;
        v5p) zones="us-central1-a us-east5-a europe-west4-b" ;;
        v6e) zones="us-central1-b us-east1-d us-east5-a us-east5-b europe-west4-a" ;;
    esac
    [[ " $zones " == *" $2 "* ]] ||
        fail "zone '$2' is not one where we know $1 to be: $zones. If Google has opened another, add --any-zone"
}
