"""Settings of the whole suite: eight simulated devices, cheap compilation, float32 that is float32."""

import os

# Before jax is imported. Small programs compile three times as fast without LLVM's optimisation, and another two to
# three times without XLA's fusion emitters; they run as well.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)
