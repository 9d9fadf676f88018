"""A Decoder: one model behind one cache interface, whatever its family.

Shapes: B rows, n new tokens, D width. The cache is one pytree. Lengths differ by row.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ncp_jax.config import ConfigError
from ncp_jax.generate.text import check_prompts
from ncp_jax.models import llama_cached, olmo3_cached
from ncp_jax.models.llama import Llama
from ncp_jax.models.ncp import cached as ncp_cached
from ncp_jax.models.ncp.cached import History
from ncp_jax.models.ncp.model import NCP
from ncp_jax.models.olmo3 import Olmo3
from ncp_jax.nn.llama_cache import cut

# A draft of 16 tokens and the token after it: what speculative decoding takes back at most.
ROLLBACK = 17


class Decoder(NamedTuple):
    """Pure functions of (params, cache).

    empty(batch) -> cache of length 0.
    extend(params, cache, tokens_Bn, count_B, prefill) -> (final states [B, n, D], cache): appends the first `count`
        tokens of each row. `prefill`: they are a prompt's.
    truncate(cache, length_B) -> cache: see `roll_back`.
    """

    empty: Callable[[int], Any]
    extend: Callable[[Any, Any, Array, Array, bool], tuple[Array, Any]]
    truncate: Callable[[Any, Array], Any]
    vocab: int
    capacity: int  # tokens per row, prompt included
    rollback: int  # tokens that can be taken back exactly


def decoder_of(
    model: NCP | Olmo3 | Llama, capacity: int, *, rollback: int = ROLLBACK, history: History = "encoder"
) -> Decoder:
    """The Decoder of a model. `history` (NCP): what concepts are made of after the prompt, see models/ncp/cached.py."""
    if capacity < 1 or rollback < 0:
        raise ConfigError(f"a cache needs capacity >= 1 and rollback >= 0, got {capacity} and {rollback}")
    if isinstance(model, NCP):
        return Decoder(
            partial(ncp_cached.empty_cache, model, capacity=capacity, rollback=rollback),
            lambda params, cache, tokens, count, prefill: ncp_cached.extend(
                model, params, cache, tokens, count, prefill=prefill, history=history
            ),
            partial(ncp_cached.truncate, model), model.config.vocab, capacity, rollback,
        )  # fmt: skip
    if isinstance(model, Llama):
        return Decoder(
            partial(llama_cached.empty_cache, model, capacity=capacity),
            lambda params, cache, tokens, count, _: llama_cached.extend(model, params, cache, tokens, count),
            cut, model.config.vocab, capacity, rollback,
        )  # fmt: skip
    return Decoder(
        partial(olmo3_cached.empty_cache, model, capacity=capacity, rollback=rollback),
        lambda params, cache, tokens, count, _: olmo3_cached.extend(model, params, cache, tokens, count),
        olmo3_cached.truncate, model.config.vocab, capacity, rollback,
    )  # fmt: skip


def roll_back(decoder: Decoder, cache: Any, length_B: Any) -> Any:
    """Cut rows back to `length` tokens, exactly as if the rest had never been read.

    Raises ConfigError for a row that would grow, or go further back than decoder.rollback.
    """
    now_B, then_B = np.asarray(cache.length_B), np.asarray(length_B)
    for row, (now, then) in enumerate(zip(now_B, then_B, strict=True)):
        if not max(now - decoder.rollback, 0) <= then <= now:
            raise ConfigError(
                f"row {row} holds {now} tokens and cannot go to {then}: the cache takes back at most "
                f"{decoder.rollback}; make it with a larger rollback"
            )
    return decoder.truncate(cache, jnp.asarray(then_B))


def prefill(decoder: Decoder, extend: Callable, params: Any, prompts: list[list[int]], piece: int) -> tuple[Any, Array]:
    """Read prompts in pieces of up to `piece` tokens: (cache, final state of each prompt's last token [B, D]).

    `extend` is decoder.extend, jitted with its last argument static. Checks ids and lengths before any device step.
    """
    check_prompts(prompts, decoder.vocab, decoder.capacity)
    cache, last_BD = decoder.empty(len(prompts)), None
    for tokens_Bn, count_B in pieces(prompts, piece):
        out_BnD, cache = extend(params, cache, tokens_Bn, count_B, True)
        ends_BD = _last(out_BnD, jnp.asarray(count_B))
        last_BD = ends_BD if last_BD is None else jnp.where(jnp.asarray(count_B > 0)[:, None], ends_BD, last_BD)
    assert last_BD is not None
    return cache, last_BD


def pieces(prompts: Sequence[Any], piece: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Prompts (int [n, ...] each, n >= 0) in parts of up to `piece` items: (part int [B, piece, ...], count [B])."""
    rows = [np.asarray(prompt, np.int32) for prompt in prompts]
    lengths = np.array([len(row) for row in rows])
    # Powers of two, so that prompts of all lengths share a few compiled shapes.
    piece = min(piece, 1 << int(lengths.max() - 1).bit_length()) if lengths.max() > 1 else 1
    for start in range(0, lengths.max(), piece):
        part_Bn = np.zeros((len(rows), piece, *rows[0].shape[1:]), np.int32)
        for row, items in enumerate(rows):
            part = items[start : start + piece]
            part_Bn[row, : len(part)] = part
        yield part_Bn, np.clip(lengths - start, 0, piece)


@jax.jit
def _last(out_BnD: Array, count_B: Array) -> Array:
    return jnp.take_along_axis(out_BnD, jnp.maximum(count_B - 1, 0)[:, None, None], axis=1)[:, 0]
