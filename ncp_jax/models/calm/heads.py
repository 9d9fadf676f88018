"""Generative heads: from a backbone state to samples of the next latent vector.

Shapes: N samples, `...` axes of positions, D width, e noise size, l latent size, L blocks. Every LayerNorm has
eps 1e-6. Source: arXiv 2510.27688 Section 3.3.3; official modeling_energy.py, modeling_flow.py, modeling_diffusion.py.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from ncp_jax.models.calm.config import DiffusionHead, EnergyHead, FlowHead
from ncp_jax.nn.layers import Initializer, LayerNorm, layer_norm, param
from ncp_jax.nn.linear import NORMAL, Linear
from ncp_jax.ops.transport import time_features

EPS = 1e-6
TIME_FEATURES = 256
XAVIER = nn.initializers.xavier_uniform()
ZEROS = nn.initializers.zeros


class EnergySampler(nn.Module):
    """One-step sampler: state and noise in, latent out."""

    head: EnergyHead
    width: int
    latent: int

    @nn.compact
    def __call__(self, h_D: Array, noise_Ne: Array) -> Array:
        """Latents [N, ..., l], in h's dtype, of states [..., D] and noise [N, ..., e].

        All samples of a position share its state: the half of each block that reads it alone is computed once.
        """
        D = self.width
        x_ND = LayerNorm(D, EPS, name="noise_norm")(
            Linear(self.head.noise, D, name="noise")(noise_Ne.astype(h_D.dtype))
        )
        c_D = LayerNorm(D, EPS, name="hidden_norm")(Linear(D, D, name="hidden")(h_D))
        blocks = jax.tree.map(lambda a: a.astype(h_D.dtype), EnergyBlocks(self.head.blocks, D, name="blocks")())
        run = jax.checkpoint(energy_block) if self.head.remat else energy_block
        for layer in range(self.head.blocks):
            x_ND = run(x_ND, c_D, {name: value[layer] for name, value in blocks.items()})
        x_ND = jax.nn.silu(Linear(D, D, name="out1")(LayerNorm(D, EPS, name="out_norm")(x_ND)))
        # Zero at the start, so that all samples of a position coincide there.
        return Linear(D, self.latent, initial=ZEROS, name="out2")(x_ND)


class EnergyBlocks(nn.Module):
    """Weights of L blocks, stacked on the first axis. The first D rows of w1 read the sample, the others the state."""

    layers: int
    width: int

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        D = self.width

        def stacked(name: str, init: Initializer, shape: list[int]) -> Array:
            axes = ["embed", None] if len(shape) == 2 else ["norm"]
            return param(self, name, init, [self.layers, *shape], ["layers", *axes])

        return {
            "norm_scale": stacked("norm_scale", nn.initializers.ones, [D]),
            "norm_bias": stacked("norm_bias", ZEROS, [D]),
            "w1": stacked("w1", NORMAL, [2 * D, D]),
            "b1": stacked("b1", ZEROS, [D]),
            "w2": stacked("w2", NORMAL, [D, D]),
            "b2": stacked("b2", ZEROS, [D]),
            "w3": stacked("w3", NORMAL, [D, 2 * D]),
            "b3": stacked("b3", ZEROS, [2 * D]),
            "w_down": stacked("w_down", NORMAL, [D, D]),
            "b_down": stacked("b_down", ZEROS, [D]),
        }


def energy_block(x_ND: Array, c_D: Array, w: dict[str, Array]) -> Array:
    """x + W_down(silu(g) * u) with (g, u) = W3 silu(W2 silu(W1 [LayerNorm(x); c])). The residual is not normed."""
    D = x_ND.shape[-1]
    n_ND = layer_norm(x_ND, w["norm_scale"], w["norm_bias"], EPS)
    t_ND = jax.nn.silu(n_ND @ w["w1"][:D] + (c_D @ w["w1"][D:] + w["b1"]))
    t_ND = jax.nn.silu(t_ND @ w["w2"] + w["b2"])
    gate_ND, up_ND = jnp.split(t_ND @ w["w3"] + w["b3"], 2, axis=-1)
    return x_ND + (jax.nn.silu(gate_ND) * up_ND) @ w["w_down"] + w["b_down"]


class TransportNet(nn.Module):
    """The network of flow and diffusion: an MLP on (latent, time), modulated by the state."""

    head: FlowHead | DiffusionHead
    width: int
    latent: int

    @nn.compact
    def __call__(self, x_l: Array, t: Array, h_D: Array) -> Array:
        """Velocity [..., l] (flow), or noise and variance share [..., 2l] (diffusion), in h's dtype.

        x [..., l], times [...] as floats or ints, states [..., D] that broadcast against x.
        """
        D, dtype = self.width, h_D.dtype
        outputs = self.latent * (2 if self.head.kind == "diffusion" else 1)
        time = Linear(TIME_FEATURES, D, name="time1")(time_features(t).astype(dtype))
        time = Linear(D, D, name="time2")(jax.nn.silu(time))
        y = jax.nn.silu(time + Linear(D, D, initial=XAVIER, name="state")(h_D))
        x = Linear(self.latent, D, initial=XAVIER, name="input")(x_l.astype(dtype))
        for block in range(self.head.blocks):
            x = TransportBlock(D, name=f"block_{block}")(x, y)
        shift, scale = jnp.split(Linear(D, 2 * D, initial=ZEROS, name="out_modulation")(y), 2, axis=-1)
        x = layer_norm(x, jnp.ones(D), jnp.zeros(D), EPS) * (1 + scale) + shift
        return Linear(D, outputs, initial=ZEROS, name="out")(x)


class TransportBlock(nn.Module):
    """x + gate * MLP(LayerNorm(x) (1 + scale) + shift); the modulation starts at zero, so the block at identity."""

    width: int

    @nn.compact
    def __call__(self, x: Array, y: Array) -> Array:
        D = self.width
        shift, scale, gate = jnp.split(Linear(D, 3 * D, initial=ZEROS, name="modulation")(y), 3, axis=-1)
        n = LayerNorm(D, EPS, name="norm")(x) * (1 + scale) + shift
        n = Linear(D, D, initial=XAVIER, name="mlp1")(n)
        return x + gate * Linear(D, D, initial=XAVIER, name="mlp2")(jax.nn.silu(n))


def build_head(head: Any, width: int, latent: int) -> nn.Module:
    """The module of a head's config."""
    kind = EnergySampler if head.kind == "energy" else TransportNet
    return kind(head, width, latent)
