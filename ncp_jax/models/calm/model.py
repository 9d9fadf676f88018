"""The CALM language model: chunks of tokens in, samples of the next chunk's latent vector out.

Shapes: B batch, M chunks, k tokens per chunk, D width, l latent size, N samples, e noise size. The autoencoder that
gives targets and turns latents into tokens is no part of it: autoencoder.py.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from ncp_jax.models.calm.config import CalmConfig
from ncp_jax.models.calm.heads import build_head
from ncp_jax.nn.layers import LayerNorm, RMSNorm
from ncp_jax.nn.linear import Linear, Table
from ncp_jax.nn.llama_block import KV, LlamaBlocks, Past, View, llama_stack, llama_unrolled, view


class Calm(nn.Module):
    """Input MLP, LLaMA backbone over chunks, generative head. `dtype` is the compute precision."""

    config: CalmConfig
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        c, s = self.config, self.config.backbone
        if c.input != "continuous":
            self.embed = Table(c.vocab, s.width, self.dtype, c.autoencoder.pad)
            self.input = InputMLP(c.chunk * s.width, s.width)
        if c.input != "discrete":
            self.latent_input = InputMLP(c.autoencoder.latent, s.width)
        self.blocks = LlamaBlocks(s, c.layers)
        self.final_norm = RMSNorm(s.eps)
        self.generator = build_head(c.head, s.width, c.autoencoder.latent)

    def __call__(self, tokens_BMk: Array, latents_BMl: Array | None = None) -> Array:
        """One draw from the head at every chunk with zeros for noise: touches every parameter, for `init`."""
        h_BMD = self.hidden(tokens_BMk, latents_BMl)
        c = self.config
        if c.head.kind == "energy":
            return self.generator(h_BMD, jnp.zeros((1, *h_BMD.shape[:-1], c.head.noise)))
        return self.generator(jnp.zeros((*h_BMD.shape[:-1], c.autoencoder.latent)), jnp.zeros(h_BMD.shape[:-1]), h_BMD)

    def hidden(
        self, tokens_BMk: Array, latents_BMl: Array | None = None, segments_BM: Array | None = None,
        positions_BM: Array | None = None,
    ) -> Array:  # fmt: skip
        """States [B, M, D]; that of chunk m predicts chunk m + 1.

        Latents of the same chunks where config.input asks for them. Segments and positions (in chunks) only for packed
        documents.
        """
        c, packed = self.config, positions_BM is not None
        x_BMD = self.read(tokens_BMk, latents_BMl)
        positions_BM = jnp.arange(x_BMD.shape[1])[None] if positions_BM is None else positions_BM
        see = view(c.backbone, positions_BM, segments_BM if packed else None, self.dtype)
        if c.scan:
            h_BMD = llama_stack(x_BMD, self.blocks(), c.backbone, see)
        else:
            h_BMD = llama_unrolled(x_BMD, self.blocks(), c.backbone, see)[0]
        return self.final_norm(h_BMD)

    def decode(
        self, tokens_BMk: Array, see: View, past: Sequence[Past] | None = None, latents_BMl: Array | None = None
    ) -> tuple[Array, tuple[KV, ...]]:
        """(states, keys and values) of chunks that follow cached ones."""
        x_BMD = self.read(tokens_BMk, latents_BMl)
        h_BMD, kv = llama_unrolled(x_BMD, self.blocks(), self.config.backbone, see, past)
        return self.final_norm(h_BMD), kv

    def read(self, tokens_BMk: Array, latents_BMl: Array | None = None) -> Array:
        """The backbone's input [B, M, D]: of tokens, of latents, or the sum of both."""
        c, parts = self.config, []
        if c.input != "continuous":
            e_BMkD = self.embed(tokens_BMk)
            parts.append(self.input(e_BMkD.reshape(*tokens_BMk.shape[:-1], c.chunk * c.backbone.width)))
        if c.input != "discrete":
            if latents_BMl is None:
                raise ValueError(f"model.input is '{c.input}': give the latents of the chunks beside their tokens")
            parts.append(self.latent_input(latents_BMl.astype(self.dtype)))
        return sum(parts[1:], parts[0])

    def sample(self, h: Array, noise_Ne: Array) -> Array:
        """Energy head: latents [N, ..., l] of states [..., D] and noise [N, ..., e]."""
        return self.generator(h, noise_Ne)

    def transport(self, x_l: Array, t: Array, h: Array) -> Array:
        """Flow or diffusion network at latents [..., l], times [...] and states."""
        return self.generator(x_l, t, h)

    def condition(self, h: Array) -> Any:
        """What the head reads of states [..., D], for `given`: computed once per state, however many samples follow."""
        return self.generator.condition(h)

    def given(self, *arguments: Any) -> Array:
        """`sample` (condition, noise) or `transport` (latents, times, condition) of a head's condition."""
        return self.generator.given(*arguments)


class InputMLP(nn.Module):
    """LayerNorm(W2 silu(W1 x)): what a chunk looks like to the backbone.

    For latents this shape is an assumption: the paper's Table 5 names the variants and not their input layer.
    """

    inputs: int
    width: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = jax.nn.silu(Linear(self.inputs, 2 * self.width, name="in")(x))
        return LayerNorm(self.width, 1e-6, name="norm")(Linear(2 * self.width, self.width, name="out")(x))
