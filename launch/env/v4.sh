# shellcheck shell=bash
# Environment of a training process on TPU v4. Sourced by worker.sh and by the GKE jobs; also by hand, from bash.
# Each flag has its reason and its source, those that generations share in ../flags.sh. None has been timed by us:
# measure before you believe, and leave one out to see what it does.
#
# Left out on purpose: xla_tpu_spmd_rng_bit_generator_unsafe, used by many, would give other random numbers on other
# meshes (docs.jax.dev/en/latest/xla_flags.html); here a run may move to another mesh.
# shellcheck source=launch/flags.sh
source "$(dirname "${BASH_SOURCE[0]}")/../flags.sh"

flags=(
    # Parameters are gathered while earlier layers compute. The default from v5 on, not on v4:
    # apple/axlearn axlearn/common/compiler_options.py; AI-Hypercomputer/maxtext src/maxtext/configs/tpu/v4/22b.sh.
    --xla_enable_async_all_gather=true
    # The same for neighbour exchanges, into which the partitioner turns some collectives. axlearn, same file.
    --xla_enable_async_collective_permute=true
    "${HIDE_GRADIENTS[@]}"
)
export_flags "${flags[@]}"
