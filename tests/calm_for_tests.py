"""Small CALM models whose laws can be written down, and engines of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ncp_jax.generate.calm import CalmEngine
from ncp_jax.generate.temperature import Tempering
from ncp_jax.models.calm.autoencoder import Autoencoder
from ncp_jax.models.calm.config import AutoencoderConfig, CalmConfig, DiffusionHead, EnergyHead, FlowHead
from ncp_jax.models.calm.model import Calm
from ncp_jax.nn.llama_block import LlamaBackbone
from ncp_jax.parallel.rules import unboxed

VOCAB, K, PAD, EOS = 7, 2, 6, 0
BACKBONE = LlamaBackbone(16, 4, 24, kv_heads=2)
# One number of noise: the law of a chunk is an integral over a line, and can be written down.
HEADS = {"energy": EnergyHead(2, 1), "flow": FlowHead(1, 4, 3), "diffusion": DiffusionHead(1, 4, 5)}
T1 = Tempering(1.0)
PROMPT = [1, 2, 3, 4]


def config(head="energy", reads="discrete", chunk=K) -> CalmConfig:
    return CalmConfig(1, BACKBONE, AutoencoderConfig(VOCAB, chunk, 12, 20, 6, pad=PAD), head=HEADS[head], input=reads)


@functools.cache
def numbers(c: CalmConfig, seed: int):
    latents = None if c.input == "discrete" else jnp.zeros((1, 1, c.autoencoder.latent))
    tokens = jnp.zeros((1, 1, c.chunk), jnp.int32)
    modules = (Calm(c), (tokens, latents)), (Autoencoder(c.autoencoder), (tokens,))
    shapes = [unboxed(jax.eval_shape(m.init, jax.random.key(0), *given))["params"] for m, given in modules]
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: rng.normal(size=a.shape) * 2 / np.sqrt(a.shape[0]), shapes)


def random_pair(c: CalmConfig, seed: int = 52):
    """(parameters, frozen), every leaf random. The seed is one whose law after PROMPT has many outcomes and gaps."""
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.result_type(float)), numbers(c, seed))


def made(c: CalmConfig, capacity=40, **options) -> CalmEngine:
    return CalmEngine(Calm(c), *random_pair(c), capacity=capacity, **options)
