# shellcheck shell=bash
# Environment of a training process on TPU v6e (Trillium). See v4.sh for how these files work and what they leave out.
# shellcheck source=launch/flags.sh
source "$(dirname "${BASH_SOURCE[0]}")/../flags.sh"

flags=(
    # On-chip memory that one operation may use, in KiB; the rest prefetches for later ones. 96 MiB is MaxText's value
    # for dense, compute-bound models (DENSE_VMEM_LIMIT_FLAG in AI-Hypercomputer/maxtext
    # benchmarks/xla_flags_library.py), against a default of 16 MiB (openxla/xla docs/flags_guidance.md).
    --xla_tpu_scoped_vmem_limit_kib=98304
    # maxtext src/maxtext/configs/tpu/v6e/llama2_7b_4096.sh.
    "${HIDE_GATHERS[@]}"
    "${HIDE_GRADIENTS[@]}"
)
export_flags "${flags[@]}"
