# shellcheck shell=bash
# Environment of a training process on TPU v4. Sourced by worker.sh and by the GKE jobs; also by hand.
# Each flag has its reason and its source. None has been timed by us: measure before you believe, and leave one out
# to see what it does. Flags already in LIBTPU_INIT_ARGS come last and win.
#
# Left out on purpose: xla_tpu_spmd_rng_bit_generator_unsafe, used by many, would give other random numbers on other
# meshes (docs.jax.dev/en/latest/xla_flags.html); here a run may move to another mesh.

flags=(
    # Parameters are gathered while earlier layers compute. The default from v5 on, not on v4:
    # apple/axlearn axlearn/common/compiler_options.py; AI-Hypercomputer/maxtext src/maxtext/configs/tpu/v4/22b.sh.
    --xla_enable_async_all_gather=true
    # The same for neighbour exchanges, into which the partitioner turns some collectives. axlearn, same file.
    --xla_enable_async_collective_permute=true
    # Several slices: the gradient all-reduce over the data-centre network runs beside the backward pass, for tensors
    # of different sizes too (may need more memory). docs.jax.dev/en/latest/xla_flags.html; DATA_PARALLEL_OVERLAP in
    # maxtext benchmarks/xla_flags_library.py.
    --xla_tpu_enable_data_parallel_all_reduce_opt=true
    --xla_tpu_data_parallel_opt_different_sized_ops=true
)
export LIBTPU_INIT_ARGS="${flags[*]}${LIBTPU_INIT_ARGS:+ $LIBTPU_INIT_ARGS}"
unset flags
# A host whose TPU does not start must fail, not train on its CPU: every platform named here must initialise, and the
# first is the default. jax-ml/jax jax/_src/config.py, jax_platforms.
export JAX_PLATFORMS="${JAX_PLATFORMS:-tpu,cpu}"
