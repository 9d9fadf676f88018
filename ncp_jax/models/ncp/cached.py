"""NCP with a cache: the same three towers, fed a few tokens at a time.

Shapes: B rows, n new tokens, m chunks that may be completed by them, k tokens per chunk, D width. One pure function,
`extend`, serves prefill (many tokens), decoding (one) and verification (a draft). A chunk is pooled from its k stored
rows when its last token arrives; the concept that it yields is there for that same token's decoder.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ncp_jax.models.ncp.model import NCP
from ncp_jax.models.ncp.towers import ConceptStates, Injection
from ncp_jax.nn.cache import (
    Ring,
    TowerCache,
    cached_sight,
    empty_ring,
    empty_tower,
    extend_tower,
    forget,
    forget_tower,
    joined,
    past_of,
    write,
)
from ncp_jax.ops.chunking import chunk_mean

# What the concept module reads of the text that was generated: pooled encoder states of its chunks (the released
# runtime), or its own predictions of them (the report).
History = Literal["encoder", "predicted"]


class Cache(NamedTuple):
    """Everything that the next token needs. One pytree, exactly cut back by `truncate`."""

    length_B: Array
    prompt_B: Array  # tokens whose chunks are read from the encoder under `predicted` history
    encoder: TowerCache
    concept: TowerCache  # at concept rate
    decoder: TowerCache
    rows: Ring  # encoder states by token: the last k - 1 + R, from which chunks are pooled (rows, never sums)
    table: Ring  # concept states by chunk: the last few predictions and layer outputs


def empty_cache(model: NCP, batch: int, capacity: int, rollback: int) -> Cache:
    """A cache for up to `capacity` tokens that can be cut back by up to `rollback` of them."""
    c, dtype = model.config, model.dtype
    chunks, back = -(-capacity // c.chunk), rollback // c.chunk + 2
    row: list[tuple[int, ...]] = [(c.backbone.width,)]
    sources = c.encoder_layers - 1 if c.routing.concept_from_encoder else 0
    return Cache(
        length_B=jnp.zeros(batch, jnp.int32),  # an array of its own: the cache is donated
        prompt_B=jnp.zeros(batch, jnp.int32),
        encoder=empty_tower(c.backbone, c.encoder_layers, batch, capacity, rollback, dtype),
        concept=empty_tower(c.concept_backbone, c.concept_layers, batch, chunks, back, dtype),
        decoder=empty_tower(c.backbone, c.decoder_layers, batch, capacity, rollback, dtype),
        rows=empty_ring(batch, c.chunk - 1 + rollback, row * (1 + sources), dtype),
        table=empty_ring(batch, back + 1, row * (1 + c.concept_layers), dtype),
    )


def extend(
    model: NCP, params: dict, cache: Cache, tokens_Bn: Array, count_B: Array, *, prefill: bool, history: History
) -> tuple[Array, Cache]:
    """Append the first `count` of n tokens to each row: (final states [B, n, D], cache).

    States beyond `count` mean nothing. `prefill` says that these tokens are a prompt's, so that under `predicted`
    history their chunks are read from the encoder. The caller sees to it that no row outgrows its capacity.
    """
    c, k = model.config, model.config.chunk
    start_B, n = cache.length_B, tokens_Bn.shape[1]
    positions_Bn = start_B[:, None] + jnp.arange(n)
    real_Bn = jnp.arange(n) < count_B[:, None]

    # 1. Encode, and keep the rows that an unfinished chunk will need.
    see = cached_sight(c.backbone, cache.encoder, positions_Bn, real_Bn, model.dtype)
    encoder = _part(model, params, "encode", tokens_Bn, see, past_of(cache.encoder, c.backbone))
    sources = encoder.raw[:-1] if c.routing.concept_from_encoder else ()
    new_rows = (encoder.h_BTD, *sources)

    # 2. Pool the chunks that are now complete, and conceive.
    first_B = start_B // k
    completed_B = (start_B + count_B) // k - first_B
    m = (n + k - 1) // k
    pooled = [chunk_mean(rows, k) for rows in _chunk_rows(cache.rows, new_rows, start_B, first_B, m, k)]
    concept = _conceive(model, params, cache, pooled, first_B, completed_B, prefill or history == "encoder")

    # 3. Decode: tokens find their concept among those remembered and those just made.
    place_Bn, available_Bn = _places(cache.table, positions_Bn, first_B, k, c.concept.shift)
    known = [
        jnp.concatenate([old, new], axis=1) for old, new in zip(cache.table.slots, _table_row(concept), strict=True)
    ]
    readable = ConceptStates(tuple(known[1:]), known[0], concept.logits_BMSN, concept.kv)
    see = cached_sight(c.backbone, cache.decoder, positions_Bn, real_Bn, model.dtype)
    inject = Injection(place_Bn, available_Bn)
    out_BnD, decoder = _part(
        model, params, "decode", encoder, see, readable, inject, past_of(cache.decoder, c.backbone)
    )

    length_B = start_B + count_B
    return out_BnD, Cache(
        length_B=length_B,
        prompt_B=length_B if prefill else cache.prompt_B,
        encoder=extend_tower(cache.encoder, c.backbone, encoder.kv, start_B, count_B),
        concept=extend_tower(cache.concept, c.concept_backbone, concept.kv, first_B, completed_B),
        decoder=extend_tower(cache.decoder, c.backbone, decoder.kv, start_B, count_B),
        rows=write(cache.rows, new_rows, start_B, count_B),
        table=write(cache.table, _table_row(concept), first_B, completed_B),
    )


def truncate(model: NCP, cache: Cache, length_B: Array) -> Cache:
    """The cache as it was at `length` tokens. Exact for up to `rollback` tokens back; further is the caller's error."""
    length_B = jnp.minimum(length_B, cache.length_B)
    chunks_B = length_B // model.config.chunk
    return Cache(
        length_B=length_B,
        prompt_B=jnp.minimum(cache.prompt_B, length_B),
        encoder=forget_tower(cache.encoder, length_B),
        concept=forget_tower(cache.concept, chunks_B),
        decoder=forget_tower(cache.decoder, length_B),
        rows=forget(cache.rows, length_B),
        table=forget(cache.table, chunks_B),
    )


def _chunk_rows(rows: Ring, new: Sequence[Array], start_B: Array, first_B: Array, m: int, k: int) -> list[Array]:
    """Rows of chunks first .. first+m-1, [B, m k, D] each: stored ones from the ring, the rest from the new tokens."""
    P = rows.positions_BC.shape[1]
    position_Bp = first_B[:, None] * k + jnp.arange(m * k)
    own_Bp = position_Bp - start_B[:, None]
    place_Bp1 = jnp.where(own_Bp < 0, position_Bp % max(P, 1), jnp.minimum(P + own_Bp, P + new[0].shape[1] - 1))[
        ..., None
    ]
    return [
        jnp.take_along_axis(jnp.concatenate([old, own], axis=1), place_Bp1, axis=1)
        for old, own in zip(rows.slots, new, strict=True)
    ]


def _conceive(
    model: NCP, params: dict, cache: Cache, pooled: list[Array], first_B: Array, completed_B: Array, from_encoder: bool
) -> ConceptStates:
    """Concept states of m chunks, those beyond `completed` meaningless. Skipped where no row completes a chunk."""
    c, m = model.config, pooled[0].shape[1]
    past = past_of(cache.concept, c.concept_backbone)
    position_Bm = first_B[:, None] + jnp.arange(m)
    real_Bm = jnp.arange(m) < completed_B[:, None]
    see = cached_sight(c.concept_backbone, cache.concept, position_Bm, real_Bm, model.dtype)

    def at_once() -> ConceptStates:
        concepts_BmD = _part(model, params, "norm_concept", pooled[0])
        return _part(model, params, "conceive", concepts_BmD, pooled[1:], see, past)

    def one_by_one() -> ConceptStates:
        """Each chunk's input is the prediction made from the one before it (report; `predicted` history)."""
        Q = cache.table.positions_BC.shape[1]
        made: list[ConceptStates] = []
        concepts_BmD = _part(model, params, "norm_concept", pooled[0])
        before_BD = jnp.take_along_axis(cache.table.slots[0], ((first_B - 1) % Q)[:, None, None], axis=1)[:, 0]
        for j in range(m):
            chunk_B = first_B + j
            # Chunk 0 has no prediction: its encoder state stands in (assumption).
            real_B1 = ((chunk_B < cache.prompt_B // c.chunk) | (chunk_B == 0))[:, None]
            input_B1D = jnp.where(real_B1, concepts_BmD[:, j], before_BD)[:, None]
            sources = [source_BmD[:, j : j + 1] for source_BmD in pooled[1:]]
            so_far = joined(past, [states.kv for states in made])
            made.append(_part(model, params, "conceive", input_B1D, sources, _column(see, j, m), so_far))
            before_BD = made[-1].predicted_BMD[:, 0]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *made)

    run = at_once if from_encoder else one_by_one
    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(run))
    return jax.lax.cond((completed_B > 0).any(), run, lambda: nothing)


def _part(model: NCP, params: dict, method: str, *arguments: Any) -> Any:
    """One of the model's parts, applied. Typed Any: `apply` is typed for all that Linen can return."""
    return model.apply({"params": params}, *arguments, method=method)


def _column(see, j: int, m: int):
    """The sight of new position j alone: its query, and the cached and new keys up to itself."""

    def mask(mask_BmJ: Array) -> Array:
        return mask_BmJ[:, j : j + 1, : mask_BmJ.shape[2] - m + j + 1]

    def rope(table: tuple[Array, Array]) -> tuple[Array, Array]:
        return table[0][:, j : j + 1], table[1][:, j : j + 1]

    return see._replace(
        window_mask=mask(see.window_mask), full_mask=mask(see.full_mask),
        window_rope=rope(see.window_rope), full_rope=rope(see.full_rope),
    )  # fmt: skip


def _places(table: Ring, positions_Bn: Array, first_B: Array, k: int, shift: bool) -> tuple[Array, Array]:
    """(place of each token's concept among [table slots, new chunks], whether it has one)."""
    Q = table.positions_BC.shape[1]
    index_Bn = (positions_Bn + int(shift)) // k - 1
    own_Bn = index_Bn - first_B[:, None]
    return jnp.where(own_Bn < 0, index_Bn % Q, Q + own_Bn), index_Bn >= 0


def _table_row(concept: ConceptStates) -> tuple[Array, ...]:
    return concept.predicted_BMD, *concept.raw
