# shellcheck shell=bash
# Sourced by env/*.sh: XLA flags that several generations share, and how the environment gets them.
# shellcheck disable=SC2034  # the lists are for those who source this file

# Parameter all-gathers run behind computation: with parameters sharded over fsdp they are most of the traffic. One may
# hide behind several operations, also on the one TensorCore that some chips have.
# docs.jax.dev/en/latest/xla_flags.html; AI-Hypercomputer/maxtext src/maxtext/configs/tpu/{v5e,v5p,v6e} and
# CF_FOR_ALL_GATHER in its benchmarks/xla_flags_library.py.
HIDE_GATHERS=(
    --xla_enable_async_all_gather=true
    --xla_tpu_enable_async_collective_fusion=true
    --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true
    --xla_tpu_enable_async_collective_fusion_multiple_steps=true
    --xla_tpu_overlap_compute_collective_tc=true
)
# Several slices: the gradient all-reduce over the data-centre network runs beside the backward pass, for tensors of
# different sizes too (may need more memory). Same page of docs.jax.dev; DATA_PARALLEL_OVERLAP in maxtext's library.
HIDE_GRADIENTS=(
    --xla_tpu_enable_data_parallel_all_reduce_opt=true
    --xla_tpu_data_parallel_opt_different_sized_ops=true
)

# export_flags FLAGS...: to libtpu; flags already in LIBTPU_INIT_ARGS come last and win. Leaves nothing else behind.
export_flags() {
    export LIBTPU_INIT_ARGS="$*${LIBTPU_INIT_ARGS:+ $LIBTPU_INIT_ARGS}"
    # A host whose TPU does not start must fail, not train on its CPU: every platform named here must initialise, and
    # the first is the default. jax-ml/jax jax/_src/config.py, jax_platforms.
    export JAX_PLATFORMS="${JAX_PLATFORMS:-tpu,cpu}"
    unset flags HIDE_GATHERS HIDE_GRADIENTS
    unset -f export_flags
}
