"""The cache of LLaMA blocks: a slot for every position, since every layer sees all that came before.

Shapes: B rows, n new positions, C slots, K key-value heads, h head size. Rows may stand at different lengths. What a
slot beyond a row's length holds is never seen: whatever comes there is written before anything looks.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ncp_jax.nn.block import KV
from ncp_jax.nn.llama_block import LlamaBackbone, Slots, View
from ncp_jax.ops.rope import inverse_frequencies, rope_table


class LlamaCache(NamedTuple):
    """Keys and values of every layer, [B, C, K, h], and how many positions each row has read."""

    length_B: Array
    layers: tuple[KV, ...]


def empty_llama_cache(s: LlamaBackbone, layers: int, batch: int, capacity: int, dtype) -> LlamaCache:
    """A cache of length 0 for up to `capacity` positions."""
    shape = (batch, capacity, s.kv, s.head_dim)
    return LlamaCache(
        jnp.zeros(batch, jnp.int32), tuple(KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers))
    )


def open_slots(cache: LlamaCache, s: LlamaBackbone, n: int, dtype) -> tuple[View, tuple[Slots, ...]]:
    """What n new positions per row see, and each layer's slots, for a model's `decode`.

    Positions beyond the capacity find no slot; the caller sees to it that none of them counts.
    """
    position_Bn = cache.length_B[:, None] + jnp.arange(n)
    mask_BnC = jnp.arange(cache.layers[0].k.shape[1]) <= position_Bn[:, :, None]
    rope = rope_table(position_Bn, inverse_frequencies(s.head_dim, s.rope_theta), 1.0, dtype)
    return View(mask_BnC, rope), tuple(Slots(kv, position_Bn) for kv in cache.layers)


def cut(cache: LlamaCache, length_B: Array) -> LlamaCache:
    """The cache as it was at `length` positions, however far back."""
    return cache._replace(length_B=jnp.minimum(length_B, cache.length_B))
