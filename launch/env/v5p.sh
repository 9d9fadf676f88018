# shellcheck shell=bash
# Environment of a training process on TPU v5p. See v4.sh for how these files work and what they leave out.
# All of it is in AI-Hypercomputer/maxtext src/maxtext/configs/tpu/v5p/llama2_7b.sh; what the flags mean is in
# docs.jax.dev/en/latest/xla_flags.html.
# shellcheck source=launch/flags.sh
source "$(dirname "${BASH_SOURCE[0]}")/../flags.sh"

flags=(
    # Parameters are gathered while earlier layers compute.
    "${HIDE_GATHERS[@]}"
    # Assumption: the other way to hide them, fused into matrix products across the two cores, would compete with that.
    --xla_tpu_megacore_fusion_allow_ags=false
    # Neighbour exchanges run asynchronously as well.
    --xla_enable_async_collective_permute=true
    # Several slices: all-gathers of the backward pass start one scan iteration early.
    --xla_tpu_enable_ag_backward_pipelining=true
    "${HIDE_GRADIENTS[@]}"
)
export_flags "${flags[@]}"
