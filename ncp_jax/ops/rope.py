"""Rotary position embedding, plain and YaRN-scaled.

Shapes: B batch, T tokens, H heads, h head size. Rotation pairs (i, i + h/2), the half-split convention of OLMo-3.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array


def inverse_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """theta^(-2i/h) for i < h/2, float64 [h/2]."""
    return theta ** (-np.arange(0, head_dim, 2) / head_dim)


def yarn_frequencies(
    head_dim: int,
    theta: float,
    factor: float,
    original_length: int,
    beta_fast: float,
    beta_slow: float,
    round_to_int: bool = True,
) -> np.ndarray:
    """YaRN: dimensions that turn often keep their frequency, slow ones divide it by `factor`. float64 [h/2].

    Source: arXiv 2309.00071 Eq. 17-23; the ramp runs between the dimensions that complete `beta_fast` and
    `beta_slow` turns within `original_length` tokens.
    """

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(beta_fast), dimension_of(beta_slow)
    if round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    plain = inverse_frequencies(head_dim, theta)
    return plain / factor * ramp + plain * (1 - ramp)


def yarn_attention_factor(factor: float) -> float:
    """Scale of the rotary table, 0.1 ln(factor) + 1 (arXiv 2309.00071 Eq. 22)."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_table(positions_BT: Array, frequencies: np.ndarray, scale: float, dtype) -> tuple[Array, Array]:
    """cos and sin [B, T, 1, h/2], computed in at least f32 and kept there."""
    wide = jnp.promote_types(dtype, jnp.float32)
    angle_BTf = positions_BT[..., None].astype(wide) * jnp.asarray(frequencies, wide)
    return jnp.cos(angle_BTf)[:, :, None] * scale, jnp.sin(angle_BTf)[:, :, None] * scale


def rotate(x_BTHh: Array, table: tuple[Array, Array]) -> Array:
    """Rotate queries or keys. Computed in the table's precision, returned in the input's."""
    cos, sin = table
    a, b = jnp.split(x_BTHh.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHh.dtype)
