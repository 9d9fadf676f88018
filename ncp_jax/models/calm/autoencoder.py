"""The autoencoder of chunks: K tokens -> Gaussian over l numbers -> K tokens. No attention, no view of other chunks.

Shapes: B batch, M chunks, k tokens per chunk, D width, F feed-forward width, l latent size, V vocabulary, L layers.
`...` are any axes of chunks. Source: arXiv 2510.27688 Section 2, official modeling_autoencoder.py.
"""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import Array, lax

from ncp_jax.models.calm.config import AutoencoderConfig
from ncp_jax.nn.block import Weights, cast_matrices, layer_of
from ncp_jax.nn.layers import RMSNorm, rms_norm, stacked_param
from ncp_jax.nn.linear import NORMAL, Linear, Table
from ncp_jax.nn.llama_block import gated_mlp


class Posterior(NamedTuple):
    """A diagonal Gaussian over latents, in at least f32. `log_std` is log sigma, not the log variance."""

    mean: Array  # [..., l]
    log_std: Array  # [..., l]

    def sample(self, noise: Array) -> Array:
        """mean + sigma * noise; no clamp on sigma."""
        return self.mean + jnp.exp(self.log_std) * noise


class Autoencoder(nn.Module):
    """Encoder and decoder around one token table. `dtype` is the compute precision of all but the posterior."""

    config: AutoencoderConfig
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        self.embed = Table(self.config.vocab, self.config.width, self.dtype)
        self.encoder = Encoder(self.config)
        self.decoder = Decoder(self.config, self.dtype)

    def __call__(self, tokens_k: Array) -> Array:
        """Logits of the posterior mean's reconstruction, [..., k, V]."""
        return self.logits(self.encode(tokens_k).mean)

    def encode(self, tokens_k: Array) -> Posterior:
        """The posterior of chunks [..., k]."""
        return self.encoder(self.embed(tokens_k))

    def decode(self, z: Array) -> Array:
        """Final states [..., k, D] of latents [..., l]; times the table they are logits."""
        return self.decoder(z)

    def unfold(self, z: Array) -> Array:
        """The first half of `decode`: states [..., k, D] of a chunk's tokens, from here on each on its own."""
        return self.decoder.unfold(z)

    def finish(self, x_D: Array) -> Array:
        """The second half: final states [..., D] of any tokens."""
        return self.decoder.finish(x_D)

    def logits(self, z: Array) -> Array:
        """Token logits [..., k, V] of latents, in at least f32: what sampling takes the argmax of."""
        h_kD = self.decode(z)
        wide = jnp.promote_types(h_kD.dtype, jnp.float32)
        return jnp.einsum("...D,VD->...V", h_kD, self.embed.table.astype(h_kD.dtype), preferred_element_type=wide)


class Encoder(nn.Module):
    """Layers on each token, all tokens of the chunk joined, layers on the chunk, Gaussian."""

    config: AutoencoderConfig

    @nn.compact
    def __call__(self, e_kD: Array) -> Posterior:
        c = self.config
        weights = MlpBlocks(c, c.encoder_layers, name="blocks")()
        x_kD = mlp_stack(e_kD, weights, slice(0, c.encoder_layers // 2), c.eps)
        joined = x_kD.reshape(*x_kD.shape[:-2], c.chunk * c.width)  # token after token
        x_D = Linear(c.chunk * c.width, c.width, name="squeeze")(joined)
        x_D = mlp_stack(x_D, weights, slice(c.encoder_layers // 2, None), c.eps)
        # From here in f32: sigma and the KL's differences of small numbers do not survive bf16.
        x_D = RMSNorm(c.eps, name="norm")(x_D.astype(jnp.promote_types(x_D.dtype, jnp.float32)))
        latent = Linear(c.width, 2 * c.latent, precision=lax.Precision.HIGHEST, name="latent")
        return Posterior(*jnp.split(latent(x_D), 2, axis=-1))


class Decoder(nn.Module):
    """The mirror image: latent, layers on the chunk, spread over its tokens, layers on each token."""

    config: AutoencoderConfig
    dtype: jnp.dtype

    def setup(self):
        c = self.config
        self.blocks = MlpBlocks(c, c.decoder_layers)
        self.latent, self.expand = Linear(c.latent, c.width), Linear(c.width, c.chunk * c.width)
        self.norm = RMSNorm(c.eps)

    def __call__(self, z: Array) -> Array:
        return self.finish(self.unfold(z))

    def unfold(self, z: Array) -> Array:
        c = self.config
        x_D = self.latent(z.astype(self.dtype))
        x_D = self.expand(mlp_stack(x_D, self.blocks(), slice(0, c.decoder_layers // 2), c.eps))
        return x_D.reshape(*x_D.shape[:-1], c.chunk, c.width)

    def finish(self, x_D: Array) -> Array:
        c = self.config
        return self.norm(mlp_stack(x_D, self.blocks(), slice(c.decoder_layers // 2, None), c.eps))


class MlpBlocks(nn.Module):
    """Weights of L residual feed-forward layers, stacked on the first axis (or tuples: nn/layers.py stacked_param)."""

    config: AutoencoderConfig
    layers: int

    @nn.compact
    def __call__(self) -> Weights:
        L, D, F = self.layers, self.config.width, self.config.ffn
        return {
            "mlp_norm": stacked_param(self, "mlp_norm", nn.initializers.ones, L, [D], ["norm"]),
            "w_gate": stacked_param(self, "w_gate", NORMAL, L, [D, F], ["embed", None]),
            "w_up": stacked_param(self, "w_up", NORMAL, L, [D, F], ["embed", None]),
            "w_down": stacked_param(self, "w_down", NORMAL, L, [F, D], ["embed", None]),
        }


def mlp_stack(x: Array, weights: Weights, which: slice, eps: float) -> Array:
    """x + SwiGLU(RMS norm(x)) for each of the layers `which`."""
    weights = cast_matrices(weights, x.dtype)
    for layer in range(*which.indices(len(weights["w_gate"]))):
        w = layer_of(weights, layer)
        x = x + gated_mlp(rms_norm(x, w["mlp_norm"], eps), w)
    return x
