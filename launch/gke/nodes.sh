# shellcheck shell=bash
# Sourced by the scripts beside it, after ../tpu.sh: what GKE calls the nodes of a slice.

# read_nodes TYPE TOPOLOGY: sets what read_type sets, and node_accelerator, topology (TOPOLOGY if that is not empty),
# nodes (of one slice) and node_chips. Names, topologies and four chips a node as in AI-Hypercomputer/xpk
# src/xpk/core/system_characteristics.py.
# shellcheck disable=SC2034,SC2154  # what it sets is for those who source this file; what it reads, from tpu.sh
read_nodes() {
    [ -n "$1" ] || fail "give --type (or set NCP_TPU_TYPE); types are $TYPES"
    read_type "$1"
    topology="$2"
    case "$generation" in
        v4) node_accelerator=tpu-v4-podslice ;;
        v5e) node_accelerator=tpu-v5-lite-podslice ;;
        v5p) node_accelerator=tpu-v5p-slice ;;
        v6e) node_accelerator=tpu-v6e-slice ;;
    esac
    if [ -z "$topology" ]; then
        case "$generation:$chips" in
            v4:4 | v5p:4) topology=2x2x1 ;;
            v4:8 | v5p:8) topology=2x2x2 ;;
            v4:16 | v5p:16) topology=2x2x4 ;;
            v4:32 | v5p:32) topology=2x4x4 ;;
            v4:64 | v5p:64) topology=4x4x4 ;;
            v4:128 | v5p:128) topology=4x4x8 ;;
            v4:256 | v5p:256) topology=4x8x8 ;;
            v4:512 | v5p:512) topology=8x8x8 ;;
            *:1) topology=1x1 ;;
            *:4) topology=2x2 ;;
            *:8) topology=2x4 ;;
            *:16) topology=4x4 ;;
            *:32) topology=4x8 ;;
            v5e:64 | v6e:64) topology=8x8 ;;
            v5e:128 | v6e:128) topology=8x16 ;;
            v5e:256 | v6e:256) topology=16x16 ;;
            *) fail "which way are the $chips chips of '$1' wired? Give --topology AxBxC" ;;
        esac
    fi
    [ "$((${topology//x/*}))" -eq "$chips" ] || fail "topology $topology does not have the $chips chips of $1"
    node_chips=$((chips < 4 ? chips : 4)) nodes=$(((chips + 3) / 4))
}
