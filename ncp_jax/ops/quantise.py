"""Product quantisation, written for ONE segment; `over_segments` maps any of it over the S segments.

Shapes: D width, S segments, W = D/S segment width, N codes. Distances, mixtures' sums and losses in at least f32.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

Mix = Literal["raw_logits", "softmax", "hard"]


def nearest(c_W: Array, codes_NW: Array) -> Array:
    """Index of the closest code, argmin_n |c - e_n|^2. Report Eq. 4.

    The squared difference is summed as it stands: |c|^2 - 2ce + |e|^2 cancels where codes lie close together, and
    a TPU would multiply in bf16. No matmul unit is used; at 8 B it is 3 GFLOP per 8192 tokens of some 60,000.
    """
    wide = jnp.promote_types(c_W.dtype, jnp.float32)
    return jnp.argmin(((c_W.astype(wide) - codes_NW.astype(wide)) ** 2).sum(axis=-1), axis=-1)


def mix(logits_N: Array, codes_NW: Array, how: Mix) -> Array:
    """Predicted segment [W] from head logits. Report Eq. 9-10 is `softmax`; the released checkpoints are `raw_logits`.

    `hard` takes the top code; its gradient reaches the codes alone.
    """
    wide = jnp.promote_types(logits_N.dtype, jnp.float32)
    if how == "hard":
        return codes_NW[jnp.argmax(logits_N)].astype(logits_N.dtype)
    weight_N = jax.nn.softmax(logits_N.astype(wide)).astype(logits_N.dtype) if how == "softmax" else logits_N
    return weight_N @ codes_NW.astype(logits_N.dtype)


def code_error(c_W: Array, codes_NW: Array, code: Array) -> Array:
    """Squared distance of the detached segment to its code: the gradient reaches that code alone. Report Eq. 21."""
    wide = jnp.promote_types(c_W.dtype, jnp.float32)
    return ((lax.stop_gradient(c_W).astype(wide) - codes_NW[code].astype(wide)) ** 2).sum()


def split_segments(c_D: Array, S: int) -> Array:
    """[..., D] -> [..., S, W]."""
    return c_D.reshape(*c_D.shape[:-1], S, -1)


def join_segments(c_SW: Array) -> Array:
    """[..., S, W] -> [..., D]."""
    return c_SW.reshape(*c_SW.shape[:-2], -1)


def over_segments(one_segment: Callable[..., Array]) -> Callable[..., Array]:
    """Map `f(x, codes_NW, ...)` over segments and over two leading axes of everything but the codes.

    x [B, M, S, ...], codes [S, N, W], further arguments [B, M, S, ...] -> [B, M, S, ...].
    """

    def mapped(x_BMS: Array, codes_SNW: Array, *rest: Array) -> Array:
        segments = jax.vmap(one_segment)
        rows = jax.vmap(segments, in_axes=(0, None) + (0,) * len(rest))
        return jax.vmap(rows, in_axes=(0, None) + (0,) * len(rest))(x_BMS, codes_SNW, *rest)

    return mapped


def usage(code_BMS: Array, counted_BM: Array, N: int) -> Array:
    """How often each code was nearest among counted chunks, [S, N] f32. Sums over the global batch."""
    one_hot_BMSN = jax.nn.one_hot(code_BMS, N) * counted_BM[:, :, None, None]
    return one_hot_BMSN.sum(axis=(0, 1))
