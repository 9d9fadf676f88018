"""Caches for decoding: rings of slots that know which position each slot holds.

Shapes: B rows, n new positions, C slots, K key-value heads, h head size. Position p lies in slot p % C; a slot that
holds nothing has position -1. Rows may stand at different lengths. A ring that reaches W positions back and has
W + R slots can be cut back exactly by up to R positions: what was overwritten was already out of reach.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ncp_jax.nn.backbone import Backbone
from ncp_jax.nn.block import KV, Sight, rope_tables
from ncp_jax.ops.attention import visible


class Ring(NamedTuple):
    """Slots of one or more arrays [B, C, ...], filled together, and the position that each holds [B, C]."""

    positions_BC: Array
    slots: tuple[Array, ...]


def empty_ring(batch: int, capacity: int, shapes: list[tuple[int, ...]], dtype) -> Ring:
    """A ring that holds nothing; `shapes` are those of one position."""
    slots = tuple(jnp.zeros((batch, capacity, *shape), dtype) for shape in shapes)
    return Ring(jnp.full((batch, capacity), -1, jnp.int32), slots)


def write(ring: Ring, new: tuple[Array, ...], start_B: Array, count_B: Array) -> Ring:
    """Append the first `count` of n new positions, from `start` on. More than C of them keep their last C."""
    B, C = ring.positions_BC.shape
    step_n = jnp.arange(new[0].shape[1])
    keep_Bn = (step_n < count_B[:, None]) & (step_n >= count_B[:, None] - C)
    position_Bn = start_B[:, None] + step_n
    slot_Bn = jnp.where(keep_Bn, position_Bn % C, C)  # slot C does not exist: dropped
    row_B1 = jnp.arange(B)[:, None]

    def put(slots: Array, values: Array) -> Array:
        return slots.at[row_B1, slot_Bn].set(values.astype(slots.dtype), mode="drop")

    return Ring(put(ring.positions_BC, position_Bn), tuple(map(put, ring.slots, new)))


def forget(ring: Ring, length_B: Array) -> Ring:
    """Drop every position from `length` on."""
    return ring._replace(positions_BC=jnp.where(ring.positions_BC < length_B[:, None], ring.positions_BC, -1))


class TowerCache(NamedTuple):
    """Keys and values of a tower: one ring for its windowed layers, one for its full ones; two arrays a layer."""

    window: Ring
    full: Ring


def empty_tower(s: Backbone, layers: int, batch: int, capacity: int, rollback: int, dtype) -> TowerCache:
    """Full layers hold `capacity` positions, windowed ones no more than they can see plus `rollback`."""
    shape, full_layers = (s.kv, s.head_dim), sum(s.is_full(layer) for layer in range(layers))
    reach = capacity if s.window is None else min(s.window + rollback, capacity)
    return TowerCache(
        empty_ring(batch, reach, [shape] * (2 * (layers - full_layers)), dtype),
        empty_ring(batch, capacity, [shape] * (2 * full_layers), dtype),
    )


def past_of(cache: TowerCache, s: Backbone) -> list[KV]:
    """Each layer's cached keys and values, in layer order."""
    layers = (len(cache.window.slots) + len(cache.full.slots)) // 2
    rings = {True: iter(cache.full.slots), False: iter(cache.window.slots)}
    return [KV(next(ring), next(ring)) for ring in (rings[s.is_full(layer)] for layer in range(layers))]


def extend_tower(cache: TowerCache, s: Backbone, kv: tuple[KV, ...], start_B: Array, count_B: Array) -> TowerCache:
    """Append each layer's new keys and values."""
    new: dict[bool, list[Array]] = {True: [], False: []}
    for layer, pair in enumerate(kv):
        new[s.is_full(layer)] += pair
    rings = {True: cache.full, False: cache.window}
    written = {
        kind: write(ring, tuple(new[kind]), start_B, count_B) if new[kind] else ring for kind, ring in rings.items()
    }
    return TowerCache(written[False], written[True])


def forget_tower(cache: TowerCache, length_B: Array) -> TowerCache:
    """Drop every position from `length` on."""
    return TowerCache(forget(cache.window, length_B), forget(cache.full, length_B))


def cached_sight(s: Backbone, cache: TowerCache, positions_Bn: Array, real_Bn: Array, dtype) -> Sight:
    """Masks over [cached slots, new positions] and rotary tables of the new ones. `real` marks new ones that count."""
    one_Bn = jnp.ones_like(positions_Bn)

    def mask(ring: Ring, window: int | None) -> Array:
        keys_BJ = jnp.concatenate([ring.positions_BC, positions_Bn], axis=1)
        held_BJ = jnp.concatenate([ring.positions_BC >= 0, real_Bn], axis=1).astype(jnp.int32)
        return visible(positions_Bn, keys_BJ, window, one_Bn, held_BJ)

    return Sight(mask(cache.window, s.window), mask(cache.full, None), *rope_tables(s, positions_Bn, dtype))


def joined(past: list[KV], new: list[tuple[KV, ...]]) -> list[KV]:
    """Cached keys and values followed by those of positions computed since, layer by layer."""
    return [
        jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *layer) for layer in zip(past, *new, strict=True)
    ]
