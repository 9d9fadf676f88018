"""Blocks as outlines, spelt out only as far as it matters: for samplers whose draws are cheap and whose words are not.

With a vocabulary of 100,000, turning a drawn latent vector into K tokens costs a hundred times what drawing it does.
Shapes: B rows, N draws, K tokens per block, R tokens or blocks in one list, `...` what outlines one token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

# (context, keys [N, B]) -> int [N, B, K]: one block per key, a function of its key and its row of the context alone.
Draw = Callable[[Any, Array], Array]


class Outlined(NamedTuple):
    """A sampler in two halves."""

    draw: Draw  # returns outlines [N, B, K, ...] of blocks
    spell: Callable[[Array], Array]  # outlines of tokens [R, ...] -> tokens, int [R]


Sample = Draw | Outlined
GoesOn = Callable[[Array], Array]  # tokens so far [N, B, K], -1 where unknown -> whether to go on, bool [N, B]


def outlines(sample: Sample, context: Any, keys_NB: Array) -> Array:
    """What a sampler draws: outlines, or of a plain sampler the tokens themselves."""
    return sample.draw(context, keys_NB) if isinstance(sample, Outlined) else sample(context, keys_NB)


def spelt(sample: Sample, outline_NBK: Array, live_NB: Array, at_once: int, goes_on: GoesOn | None = None) -> Array:
    """Tokens [N, B, K] of outlines, about `at_once` blocks at a time.

    -1 stands for what was not looked at: blocks that are not `live`, and the rest of a block where, after a token,
    `goes_on` is false. A plain sampler's tokens are all known.
    """
    if not isinstance(sample, Outlined):
        return outline_NBK
    N, B, K = outline_NBK.shape[:3]
    spell = sample.spell

    def blocks(outline_RK: Array) -> Array:
        return spell(outline_RK.reshape(-1, *outline_RK.shape[2:])).reshape(-1, K)

    if goes_on is None:
        return _listed(blocks, outline_NBK, live_NB, at_once)

    def column(k: Array | int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        tokens_NBK, live_NB = carry
        outline_NB = lax.dynamic_index_in_dim(outline_NBK, k, 2, keepdims=False)
        tokens_NBK = tokens_NBK.at[:, :, k].set(_listed(spell, outline_NB, live_NB, at_once * K))
        return tokens_NBK, live_NB & goes_on(tokens_NBK)

    return lax.fori_loop(0, K, column, (jnp.full((N, B, K), -1, jnp.int32), live_NB))[0]


def _listed(f: Callable[[Array], Array], x_NB: Array, live_NB: Array, at_once: int) -> Array:
    """f of the live items [N, B, ...], as one list and `at_once` of them at a time; -1 for the others."""
    x_R, live_R = x_NB.reshape(-1, *x_NB.shape[2:]), live_NB.ravel()
    R = len(live_R)
    at_once = -(-R // -(-R // at_once))  # equal pieces
    if at_once >= R:
        found_R = jnp.where(_rows(live_R, (value_R := f(x_R))), value_R, -1)
        return found_R.astype(jnp.int32).reshape(*live_NB.shape, *found_R.shape[1:])
    order_R = jnp.argsort(~live_R, stable=True)
    count = live_R.sum()
    shape = jax.eval_shape(f, jax.ShapeDtypeStruct((at_once, *x_R.shape[1:]), x_R.dtype)).shape[1:]

    def piece(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        start, found_R = carry
        place_W = start + jnp.arange(at_once)
        item_W = jnp.where(place_W < count, order_R[jnp.minimum(place_W, R - 1)], R)  # R does not exist: dropped
        value_W = f(x_R[jnp.minimum(item_W, R - 1)]).astype(jnp.int32)
        return start + at_once, found_R.at[item_W].set(value_W, mode="drop")

    start = (jnp.int32(0), jnp.full((R, *shape), -1, jnp.int32))
    found_R = lax.while_loop(lambda carry: carry[0] < count, piece, start)[1]
    return found_R.reshape(*live_NB.shape, *shape)


def _rows(flag_R: Array, like: Array) -> Array:
    return flag_R.reshape(flag_R.shape + (1,) * (like.ndim - 1))
