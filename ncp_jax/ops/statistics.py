"""Statistics of code usage.

Shapes: S segments, N codes.
"""

import jax.numpy as jnp
from jax import Array


def perplexity(count_SN: Array) -> Array:
    """exp(entropy) of each segment's usage, [S] f32: N when all codes are used alike, 1 when one is (or none)."""
    share_SN = count_SN / jnp.maximum(count_SN.sum(axis=-1, keepdims=True), 1)
    entropy_S = -jnp.where(share_SN > 0, share_SN * jnp.log(jnp.where(share_SN > 0, share_SN, 1)), 0).sum(axis=-1)
    return jnp.exp(entropy_S)
