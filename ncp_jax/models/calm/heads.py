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
from ncp_jax.nn.layers import Initializer, LayerNorm, layer_norm, stacked_param
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

    def setup(self):
        D = self.width
        self.noise, self.noise_norm = Linear(self.head.noise, D), LayerNorm(D, EPS)
        self.hidden, self.hidden_norm = Linear(D, D), LayerNorm(D, EPS)
        self.blocks = EnergyBlocks(self.head.blocks, D)
        self.out_norm, self.out1 = LayerNorm(D, EPS), Linear(D, D)
        # Zero at the start, so that all samples of a position coincide there.
        self.out2 = Linear(D, self.latent, initial=ZEROS)

    def __call__(self, h_D: Array, noise_Ne: Array) -> Array:
        """Latents [N, ..., l], in h's dtype, of states [..., D] and noise [N, ..., e].

        All samples of a position share its state: the half of each block that reads it alone is computed once.
        """
        return self.given(self.condition(h_D), noise_Ne)

    def condition(self, h_D: Array) -> tuple[Array, ...]:
        """What each block reads of states [..., D], [..., D] each: all that does not depend on the noise."""
        c_D = self.hidden_norm(self.hidden(h_D))
        return tuple(c_D @ _halves(w["w1"])[1] + w["b1"] for w in self._layers(h_D.dtype))

    def given(self, condition: tuple[Array, ...], noise_Ne: Array) -> Array:
        """Latents of a condition and noise."""
        dtype = condition[0].dtype
        x_ND = self.noise_norm(self.noise(noise_Ne.astype(dtype)))
        run = jax.checkpoint(energy_block) if self.head.remat else energy_block
        for read_D, w in zip(condition, self._layers(dtype), strict=True):
            x_ND = run(x_ND, read_D, w)
        return self.out2(jax.nn.silu(self.out1(self.out_norm(x_ND))))

    def _layers(self, dtype) -> list[dict[str, Any]]:
        blocks = jax.tree.map(lambda a: a.astype(dtype), self.blocks())
        return [{name: value[layer] for name, value in blocks.items()} for layer in range(self.head.blocks)]


class EnergyBlocks(nn.Module):
    """Weights of L blocks, stacked on the first axis (or tuples of L: `one_array_per_block`).

    The first D rows of w1 read the sample, the others the state.
    """

    layers: int
    width: int

    @nn.compact
    def __call__(self) -> dict[str, Any]:
        D = self.width

        def stacked(name: str, init: Initializer, shape: list[int]) -> Any:
            axes = ["embed", None] if len(shape) == 2 else ["norm"]
            return stacked_param(self, name, init, self.layers, shape, axes)

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


def energy_block(x_ND: Array, read_D: Array, w: dict[str, Any]) -> Array:
    """x + W_down(silu(g) * u) with (g, u) = W3 silu(W2 silu(W1 [LayerNorm(x); c])). The residual is not normed.

    `read` is what W1 and its bias make of c.
    """
    n_ND = layer_norm(x_ND, w["norm_scale"], w["norm_bias"], EPS)
    t_ND = jax.nn.silu(n_ND @ _halves(w["w1"])[0] + read_D)
    t_ND = jax.nn.silu(t_ND @ w["w2"] + w["b2"])
    gate_ND, up_ND = jnp.split(t_ND @ w["w3"] + w["b3"], 2, axis=-1)
    return x_ND + (jax.nn.silu(gate_ND) * up_ND) @ w["w_down"] + w["b_down"]


def one_array_per_block(generator: dict[str, Any]) -> dict[str, Any]:
    """An energy head's parameters with each block's weights as arrays of their own, w1 as its two halves.

    For drawing in steps, where slices of a stack would be copied every time: nn/block.py one_array_per_layer.
    """
    if "blocks" not in generator:
        return generator
    blocks = {name: tuple(value) for name, value in generator["blocks"].items()}
    return generator | {"blocks": blocks | {"w1": tuple(_halves(w1) for w1 in blocks["w1"])}}


def _halves(w1: Array | tuple[Array, Array]) -> tuple[Array, Array]:
    """(what reads the sample [D, D], what reads the state [D, D])."""
    return w1 if isinstance(w1, tuple) else (w1[: len(w1) // 2], w1[len(w1) // 2 :])


class TransportNet(nn.Module):
    """The network of flow and diffusion: an MLP on (latent, time), modulated by the state."""

    head: FlowHead | DiffusionHead
    width: int
    latent: int

    def setup(self):
        D = self.width
        self.time1, self.time2 = Linear(TIME_FEATURES, D), Linear(D, D)
        self.state = Linear(D, D, initial=XAVIER)
        self.input = Linear(self.latent, D, initial=XAVIER)
        self.block = [TransportBlock(D) for _ in range(self.head.blocks)]
        self.out_modulation = Linear(D, 2 * D, initial=ZEROS)
        self.out = Linear(D, self.latent * (2 if self.head.kind == "diffusion" else 1), initial=ZEROS)

    def __call__(self, x_l: Array, t: Array, h_D: Array) -> Array:
        """Velocity [..., l] (flow), or noise and variance share [..., 2l] (diffusion), in h's dtype.

        x [..., l], times [...] as floats or ints, states [..., D] that broadcast against x.
        """
        return self.given(x_l, t, self.condition(h_D))

    def condition(self, h_D: Array) -> Array:
        """What the network reads of states [..., D], [..., D]: all that depends on neither latent nor time."""
        return self.state(h_D)

    def given(self, x_l: Array, t: Array, condition_D: Array) -> Array:
        """The same of a condition. Times may have one entry where x has many."""
        D, dtype = self.width, condition_D.dtype
        time = self.time2(jax.nn.silu(self.time1(time_features(t).astype(dtype))))
        y = jax.nn.silu(time + condition_D)
        x = self.input(x_l.astype(dtype))
        for block in self.block:
            x = block(x, y)
        shift, scale = jnp.split(self.out_modulation(y), 2, axis=-1)
        x = layer_norm(x, jnp.ones(D), jnp.zeros(D), EPS) * (1 + scale) + shift
        return self.out(x)


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
