"""Choosing a token from logits: greedy, temperature, top-k, top-p, min-p.

Shapes: B rows, V vocabulary. Everything in at least f32: bf16 noise would cut off the tail.
"""

import jax
import jax.numpy as jnp
from jax import Array


def filtered(
    logits_BV: Array, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> Array:
    """Logits with every token outside the top k, outside the nucleus, or below min_p of the likeliest, at -inf.

    The nucleus is the smallest set of likeliest tokens with mass >= top_p, at least one token; the one that crosses
    top_p is in it. top_p = 1 changes nothing.
    """
    logits_BV = logits_BV.astype(jnp.promote_types(logits_BV.dtype, jnp.float32))
    if min_p is not None and min_p > 0:
        floor_B1 = logits_BV.max(axis=-1, keepdims=True) + jnp.log(min_p)
        logits_BV = jnp.where(logits_BV < floor_B1, -jnp.inf, logits_BV)
    if top_k is not None and top_k < logits_BV.shape[-1]:
        least_B1 = jnp.sort(logits_BV, axis=-1)[:, -top_k, None]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    if top_p is not None and top_p < 1:
        order_BV = jnp.argsort(-logits_BV, axis=-1)
        p_BV = jnp.take_along_axis(jax.nn.softmax(logits_BV, axis=-1), order_BV, axis=-1)
        before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV  # mass of the likelier tokens
        keep_BV = (before_BV < top_p).at[:, 0].set(True)
        rank_BV = jnp.argsort(order_BV, axis=-1)
        logits_BV = jnp.where(jnp.take_along_axis(keep_BV, rank_BV, axis=-1), logits_BV, -jnp.inf)
    return logits_BV


def draw(
    logits_BV: Array,
    key: Array,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Array:
    """One token id per row, [B]. Temperature 0 is greedy. Filters see the tempered distribution."""
    if temperature == 0:
        return jnp.argmax(logits_BV, axis=-1)
    wide_BV = logits_BV.astype(jnp.promote_types(logits_BV.dtype, jnp.float32))
    kept_BV = filtered(wide_BV / temperature, top_k, top_p, min_p)
    # "high": plain float32 noise ends 17 nats below the top, and rarer tokens would never be drawn.
    return jax.random.categorical(key, kept_BV, axis=-1, mode="high")
