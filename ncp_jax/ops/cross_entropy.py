"""Fused linear head and cross-entropy: logits exist for one slice of tokens at a time, forward and backward.

Shapes: B batch, T tokens, D width, V vocabulary, n = B T.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class TokenLoss(NamedTuple):
    """Sums over scored tokens, f32: divide by the global count of scored tokens."""

    nll: Array  # nats
    z: Array  # squared log-partition


def linear_cross_entropy(
    x_BTD: Array, head_DV: Array, target_BT: Array, scored_BT: Array, slice_tokens: int | None = None
) -> TokenLoss:
    """Cross-entropy of x @ head against targets, summed over scored positions.

    Matmul inputs in x's dtype, sums in at least f32. With `slice_tokens`, slices run one after another and are
    recomputed in the backward pass; a last slice is filled up with unscored tokens.
    """
    D = x_BTD.shape[-1]
    x_nD, target_n, scored_n = x_BTD.reshape(-1, D), target_BT.reshape(-1), scored_BT.reshape(-1)
    head_DV = head_DV.astype(x_BTD.dtype)
    if slice_tokens is None or slice_tokens >= x_nD.shape[0]:
        return _slice_loss(x_nD, head_DV, target_n, scored_n)
    count = -(-x_nD.shape[0] // slice_tokens)
    pad = count * slice_tokens - x_nD.shape[0]
    x_nD, target_n, scored_n = (jnp.pad(a, [(0, pad)] + [(0, 0)] * (a.ndim - 1)) for a in (x_nD, target_n, scored_n))

    def body(total: TokenLoss, part) -> tuple[TokenLoss, None]:
        return jax.tree.map(jnp.add, total, jax.checkpoint(_slice_loss)(part[0], head_DV, *part[1:])), None

    parts = [a.reshape(count, slice_tokens, *a.shape[1:]) for a in (x_nD, target_n, scored_n)]
    zero = jnp.zeros((), jnp.promote_types(x_BTD.dtype, jnp.float32))
    return lax.scan(body, TokenLoss(zero, zero), parts)[0]


def _slice_loss(x_nD: Array, head_DV: Array, target_n: Array, scored_n: Array) -> TokenLoss:
    wide = jnp.promote_types(x_nD.dtype, jnp.float32)
    logit_nV = jnp.matmul(x_nD, head_DV, preferred_element_type=wide)
    log_partition_n = jax.nn.logsumexp(logit_nV, axis=-1)
    at_target_n = jnp.take_along_axis(logit_nV, target_n[:, None], axis=-1)[:, 0]

    def scored_sum(value_n: Array) -> Array:  # where, not times: NaN * 0 is NaN
        return jnp.where(scored_n, value_n, 0).sum(dtype=wide)

    return TokenLoss(scored_sum(log_partition_n - at_target_n), scored_sum(log_partition_n**2))
