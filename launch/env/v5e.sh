# shellcheck shell=bash
# Environment of a training process on TPU v5e. See v4.sh for how these files work and what they leave out.
# shellcheck source=launch/flags.sh
source "$(dirname "${BASH_SOURCE[0]}")/../flags.sh"

flags=(
    # Suggested for v5e in openxla/xla docs/flags_guidance.md; AI-Hypercomputer/maxtext
    # src/maxtext/configs/tpu/v5e/{llama2_7b,32b}.sh.
    "${HIDE_GATHERS[@]}"
    "${HIDE_GRADIENTS[@]}"
)
export_flags "${flags[@]}"
