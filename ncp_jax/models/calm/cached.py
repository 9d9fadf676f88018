"""A CALM language model with a cache: the same layers, fed a few chunks at a time.

Shapes: B rows, n new chunks, k tokens per chunk, D width, l latent size.
"""

from typing import Any

from jax import Array

from ncp_jax.models.calm.autoencoder import Autoencoder
from ncp_jax.models.calm.call import call
from ncp_jax.models.calm.model import Calm
from ncp_jax.nn.llama_cache import LlamaCache, empty_llama_cache, open_slots


def empty_cache(model: Calm, batch: int, capacity: int) -> LlamaCache:
    """A cache for up to `capacity` chunks."""
    return empty_llama_cache(model.config.backbone, model.config.layers, batch, capacity, model.dtype)


def extend(
    model: Calm, params: Any, frozen: Any, cache: LlamaCache, tokens_Bnk: Array, count_B: Array
) -> tuple[Array, LlamaCache]:
    """Append the first `count` of n chunks to each row: (states [B, n, D], cache). `frozen` is the autoencoder's.

    A model that reads latents gets the posterior's mean of every chunk, of the prompt and of what it drew: an
    assumption, since training feeds it a sample and the paper does not say what generation does.
    States beyond `count` mean nothing. The caller sees to it that no row outgrows its capacity.
    """
    see, slots = open_slots(cache, model.config.backbone, tokens_Bnk.shape[1], model.dtype)
    latents_Bnl = None
    if model.config.input != "discrete":
        latents_Bnl = call(Autoencoder(model.config.autoencoder, model.dtype), frozen, "encode", tokens_Bnk).mean
    h_BnD, layers = call(model, params, "decode", tokens_Bnk, see, slots, latents_Bnl)
    return h_BnD, LlamaCache(cache.length_B + count_B, layers)
