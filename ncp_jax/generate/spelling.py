"""Blocks as outlines, spelt out only as far as it matters: for samplers whose draws are cheap and whose words are not.

With a vocabulary of 100,000, turning a drawn latent vector into K tokens costs a hundred times what drawing it does.
Shapes: B rows, N draws, K tokens per block, R tokens or blocks in one list, `...` what outlines one token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

# (context, keys [N, B]) -> int [N, B, K]: one block per key, a function of its key and its row of the context alone.
Draw = Callable[[Any, Array], Array]


class Outlined(NamedTuple):
    """A sampler in two halves."""

    draw: Draw  # returns outlines [N, B, K, ...] of blocks
    spell: Callable[[Array], Array]  # outlines of tokens [R, ...] -> tokens, int [R]


Sample = Draw | Outlined
# The last tokens of a list, if they fill less than half a piece, come in pieces so much smaller: of a vote's second and
# third tokens there are few.
FINER = 4

GoesOn = Callable[[Array], Array]  # tokens so far [N, B, K], -1 where unknown -> whether to go on, bool [N, B]


def outlines(sample: Sample, context: Any, keys_NB: Array) -> Array:
    """What a sampler draws: outlines, or of a plain sampler the tokens themselves."""
    return sample.draw(context, keys_NB) if isinstance(sample, Outlined) else sample(context, keys_NB)


def spelt(sample: Sample, outline_NBK: Array, live_NB: Array, at_once: int, goes_on: GoesOn | None = None) -> Array:
    """Tokens [N, B, K] of outlines, those of about `at_once` blocks at a time.

    -1 stands for what was not looked at: blocks that are not `live`, and the rest of a block where, after a token,
    `goes_on` is false. A plain sampler's tokens are all known.
    """
    if not isinstance(sample, Outlined):
        return outline_NBK
    N, B, K = outline_NBK.shape[:3]
    spell, size = sample.spell, _even(N * B, at_once * K)
    place_K = jnp.arange(K)
    if goes_on is None:
        return _listed(spell, outline_NBK, jnp.broadcast_to(live_NB[..., None], (N, B, K)), size)

    def some(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """The next token of every block that goes on; all of their tokens if they are few."""
        k, tokens_NBK, live_NB = carry
        until = jnp.where(live_NB.sum() * (K - k) <= size, K, k + 1)
        wanted_NBK = live_NB[..., None] & (place_K >= k) & (place_K < until)
        tokens_NBK = jnp.where(wanted_NBK, _listed(spell, outline_NBK, wanted_NBK, size), tokens_NBK)
        return until, tokens_NBK, live_NB & goes_on(tokens_NBK)

    start = jnp.int32(0), jnp.full((N, B, K), -1, jnp.int32), live_NB
    return lax.while_loop(lambda carry: (carry[0] < K) & carry[2].any(), some, start)[1]


def _listed(spell: Callable[[Array], Array], outline_NBK: Array, wanted_NBK: Array, size: int) -> Array:
    """Tokens where wanted, from one list of them and at most `size` at a time; -1 elsewhere."""
    outline_R, wanted_R = outline_NBK.reshape(-1, *outline_NBK.shape[3:]), wanted_NBK.ravel()
    R = len(wanted_R)
    if size >= R:
        return jnp.where(wanted_R, spell(outline_R), -1).astype(jnp.int32).reshape(wanted_NBK.shape)
    # What comes after the last of them is R, which does not exist: nothing is set there.
    order_R, count = jnp.nonzero(wanted_R, size=R + size, fill_value=R)[0], wanted_R.sum()

    def piece(width: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        start, found_R = carry
        item_W = lax.dynamic_slice(order_R, [start], [width])
        token_W = spell(outline_R[item_W]).astype(jnp.int32)
        return start + width, found_R.at[item_W].set(token_W, mode="drop")

    carry, fine = (jnp.int32(0), jnp.full(R, -1, jnp.int32)), -(-size // FINER)
    carry = lax.while_loop(lambda carry: count - carry[0] > size // 2, partial(piece, size), carry)
    carry = lax.while_loop(lambda carry: carry[0] < count, partial(piece, fine), carry)
    return carry[1].reshape(wanted_NBK.shape)


def _even(count: int, size: int) -> int:
    """`size`, or less where `count` makes as many equal pieces."""
    return size if count <= size else -(-count // -(-count // size))
