# shellcheck shell=bash
# Environment of a training process on TPU v5p. See v4.sh for how these files work and what they leave out.
# All of it is in AI-Hypercomputer/maxtext src/maxtext/configs/tpu/v5p/llama2_7b.sh; what the flags mean is in
# docs.jax.dev/en/latest/xla_flags.html.

flags=(
    # Parameter all-gathers run behind computation, over several operations if need be.
    --xla_enable_async_all_gather=true
    --xla_tpu_enable_async_collective_fusion=true
    --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true
    --xla_tpu_enable_async_collective_fusion_multiple_steps=true
    --xla_tpu_overlap_compute_collective_tc=true
    # Assumption: the other way to hide them, fused into matrix products across the two cores, would compete with that.
    --xla_tpu_megacore_fusion_allow_ags=false
    # Neighbour exchanges run asynchronously as well.
    --xla_enable_async_collective_permute=true
    # Several slices: all-gathers of the backward pass start one scan iteration early, and gradients cross the
    # data-centre network beside it.
    --xla_tpu_enable_ag_backward_pipelining=true
    --xla_tpu_enable_data_parallel_all_reduce_opt=true
    --xla_tpu_data_parallel_opt_different_sized_ops=true
)
export LIBTPU_INIT_ARGS="${flags[*]}${LIBTPU_INIT_ARGS:+ $LIBTPU_INIT_ARGS}"
unset flags
export JAX_PLATFORMS="${JAX_PLATFORMS:-tpu,cpu}" # fail rather than train on the CPU; see v4.sh
