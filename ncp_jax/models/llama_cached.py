"""The autoregressive baseline with a cache: the same layers, fed a few tokens at a time.

Shapes: B rows, n new tokens, D width.
"""

from typing import Any

from jax import Array

from ncp_jax.models.llama import Llama
from ncp_jax.nn.llama_cache import LlamaCache, empty_llama_cache, open_slots


def empty_cache(model: Llama, batch: int, capacity: int) -> LlamaCache:
    """A cache for up to `capacity` tokens."""
    return empty_llama_cache(model.config.backbone, model.config.layers, batch, capacity, model.dtype)


def extend(model: Llama, params: dict, cache: LlamaCache, tokens_Bn: Array, count_B: Array) -> tuple[Array, LlamaCache]:
    """Append the first `count` of n tokens to each row: (final states [B, n, D], cache).

    States beyond `count` mean nothing. The caller sees to it that no row outgrows its capacity.
    """
    see, slots = open_slots(cache, model.config.backbone, tokens_Bn.shape[1], model.dtype)
    found: Any = model.apply({"params": params}, tokens_Bn, see, slots, method="decode")
    out_BnD, layers = found
    return out_BnD, LlamaCache(cache.length_B + count_B, layers)
