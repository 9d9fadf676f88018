# shellcheck shell=bash
# Environment of a training process on TPU v5e. See v4.sh for how these files work and what they leave out.

flags=(
    # The pass that hides collectives behind computation, and all-gathers as one of the kinds that it may hide: with
    # parameters sharded over fsdp they are most of the traffic. Suggested for v5e in openxla/xla
    # docs/flags_guidance.md; AI-Hypercomputer/maxtext src/maxtext/configs/tpu/v5e/{llama2_7b,32b}.sh.
    --xla_enable_async_all_gather=true
    --xla_tpu_enable_async_collective_fusion=true
    --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true
    # One collective may be hidden behind several operations, and on the one TensorCore that this chip has.
    # docs.jax.dev/en/latest/xla_flags.html; maxtext, same files.
    --xla_tpu_enable_async_collective_fusion_multiple_steps=true
    --xla_tpu_overlap_compute_collective_tc=true
    # Several slices: gradients cross the data-centre network beside the backward pass. docs.jax.dev, same page;
    # maxtext, same files.
    --xla_tpu_enable_data_parallel_all_reduce_opt=true
    --xla_tpu_data_parallel_opt_different_sized_ops=true
)
export LIBTPU_INIT_ARGS="${flags[*]}${LIBTPU_INIT_ARGS:+ $LIBTPU_INIT_ARGS}"
unset flags
export JAX_PLATFORMS="${JAX_PLATFORMS:-tpu,cpu}" # fail rather than train on the CPU; see v4.sh
