# shellcheck shell=bash
# Environment of a training process on TPU v6e (Trillium). See v4.sh for how these files work and what they leave out.

flags=(
    # On-chip memory that one operation may use, in KiB; the rest prefetches for later ones. 96 MiB is MaxText's value
    # for dense, compute-bound models (DENSE_VMEM_LIMIT_FLAG in AI-Hypercomputer/maxtext
    # benchmarks/xla_flags_library.py), against a default of 16 MiB (openxla/xla docs/flags_guidance.md).
    --xla_tpu_scoped_vmem_limit_kib=98304
    # Parameter all-gathers run behind computation, over several operations if need be: CF_FOR_ALL_GATHER in the same
    # file, used in maxtext src/maxtext/configs/tpu/v6e/llama2_7b_4096.sh; docs.jax.dev/en/latest/xla_flags.html.
    --xla_enable_async_all_gather=true
    --xla_tpu_enable_async_collective_fusion=true
    --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true
    --xla_tpu_enable_async_collective_fusion_multiple_steps=true
    --xla_tpu_overlap_compute_collective_tc=true
    # Several slices: gradients cross the data-centre network beside the backward pass. DATA_PARALLEL_OVERLAP in
    # maxtext's library.
    --xla_tpu_enable_data_parallel_all_reduce_opt=true
    --xla_tpu_data_parallel_opt_different_sized_ops=true
)
export LIBTPU_INIT_ARGS="${flags[*]}${LIBTPU_INIT_ARGS:+ $LIBTPU_INIT_ARGS}"
unset flags
export JAX_PLATFORMS="${JAX_PLATFORMS:-tpu,cpu}" # fail rather than train on the CPU; see v4.sh
