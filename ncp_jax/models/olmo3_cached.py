"""OLMo-3 with a cache: the same layers, fed a few tokens at a time.

Shapes: B rows, n new tokens, D width.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ncp_jax.models.olmo3 import Olmo3
from ncp_jax.nn.cache import TowerCache, cached_sight, empty_tower, extend_tower, forget_tower, past_of


class Cache(NamedTuple):
    """Everything that the next token needs."""

    length_B: Array
    tower: TowerCache


def empty_cache(model: Olmo3, batch: int, capacity: int, rollback: int) -> Cache:
    """A cache for up to `capacity` tokens that can be cut back by up to `rollback` of them."""
    c = model.config
    return Cache(jnp.zeros(batch, jnp.int32), empty_tower(c.backbone, c.layers, batch, capacity, rollback, model.dtype))


def extend(model: Olmo3, params: dict, cache: Cache, tokens_Bn: Array, count_B: Array) -> tuple[Array, Cache]:
    """Append the first `count` of n tokens to each row: (final states [B, n, D], cache).

    States beyond `count` mean nothing. The caller sees to it that no row outgrows its capacity.
    """
    s, start_B = model.config.backbone, cache.length_B
    positions_Bn = start_B[:, None] + jnp.arange(tokens_Bn.shape[1])
    real_Bn = jnp.arange(tokens_Bn.shape[1]) < count_B[:, None]
    see = cached_sight(s, cache.tower, positions_Bn, real_Bn, model.dtype)
    found: Any = model.apply({"params": params}, tokens_Bn, see, past_of(cache.tower, s), method="decode")
    out_BnD, tower = found
    return out_BnD, Cache(start_B + count_B, extend_tower(cache.tower, s, tower.kv, start_B, count_B))


def truncate(cache: Cache, length_B: Array) -> Cache:
    """The cache as it was at `length` tokens. Exact for up to `rollback` tokens back."""
    length_B = jnp.minimum(length_B, cache.length_B)
    return Cache(length_B, forget_tower(cache.tower, length_B))
