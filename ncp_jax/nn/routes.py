"""Residual routes as modules: IRC within a tower, CRC between towers, re-injection of the concept.

Shapes: B batch, T positions, D width, n sources, L decoder layers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from ncp_jax.nn.layers import layer_norm, param
from ncp_jax.ops.routing import cross_weights, depth_weights, mixture


class DepthLeaves(NamedTuple):
    """Parameters of a depth route over n candidates."""

    static_n: Array
    w1_Dn: Array
    w2_nn: Array


class CrossLeaves(NamedTuple):
    """Parameters of a cross route over n sources."""

    diagonal_D: Array
    w1_Dn: Array
    w2_nn: Array


class ReinjectLeaves(NamedTuple):
    """Parameters of a re-injection."""

    scale_D: Array
    bias_D: Array
    diagonal_D: Array


class DepthRoute(nn.Module):
    """IRC after one layer: a weighted sum of the tower's input and raw outputs so far (report Eq. 14-18).

    Starts as the newest state; under softmax, as softmax([0, ..., 0, 1]) (training fork), which is far from it.
    """

    softmax: bool

    @nn.compact
    def leaves(self, D: int, n: int) -> DepthLeaves:
        """The parameters alone, for a tower that is scanned (nn/routed_scan.py)."""
        static_n = param(self, "static", lambda *_: jnp.zeros(n).at[-1].set(1.0), [n], ["sources"])
        return DepthLeaves(static_n, *_router(self, D, n))

    def __call__(self, router_BTD: Array, history: Sequence[Array]) -> Array:
        static_n, w1_Dn, w2_nn = self.leaves(router_BTD.shape[-1], len(history))
        dtype = router_BTD.dtype
        weight_BTn = depth_weights(
            router_BTD, static_n.astype(dtype), w1_Dn.astype(dtype), w2_nn.astype(dtype), self.softmax
        )
        self.sow("intermediates", "weights", weight_BTn)
        return mixture(weight_BTn, history)


class CrossRoute(nn.Module):
    """CRC after one layer: what to add from another tower's layers, already normed (report Eq. 19-20)."""

    start: float  # initial diagonal

    @nn.compact
    def leaves(self, D: int, n: int) -> CrossLeaves:
        """The parameters alone."""
        diagonal_D = param(self, "diagonal", nn.initializers.constant(self.start), [D], ["norm"])
        return CrossLeaves(diagonal_D, *_router(self, D, n))

    def __call__(self, state_BTD: Array, sources: Sequence[Array]) -> Array:
        diagonal_D, w1_Dn, w2_nn = self.leaves(state_BTD.shape[-1], len(sources))
        dtype = state_BTD.dtype
        weight_BTn = cross_weights(state_BTD, w1_Dn.astype(dtype), w2_nn.astype(dtype))
        self.sow("intermediates", "weights", weight_BTn)
        return diagonal_D.astype(dtype) * mixture(weight_BTn, sources)


class Reinject(nn.Module):
    """The predicted concept once more, normed and scaled: (what concepts add, what a token without one gets)."""

    start: float  # initial diagonal
    eps: float

    @nn.compact
    def leaves(self, D: int) -> ReinjectLeaves:
        """The parameters alone."""
        scale_D = param(self, "norm_scale", nn.initializers.ones, [D], ["norm"])
        bias_D = param(self, "norm_bias", nn.initializers.zeros, [D], ["norm"])
        return ReinjectLeaves(
            scale_D, bias_D, param(self, "diagonal", nn.initializers.constant(self.start), [D], ["norm"])
        )

    def __call__(self, predicted_BMD: Array) -> tuple[Array, Array]:
        scale_D, bias_D, diagonal_D = self.leaves(predicted_BMD.shape[-1])
        diagonal_D, at_zero_D = diagonal_D.astype(predicted_BMD.dtype), bias_D.astype(predicted_BMD.dtype)
        return diagonal_D * layer_norm(predicted_BMD, scale_D, bias_D, self.eps), diagonal_D * at_zero_D


def _router(module: nn.Module, D: int, n: int) -> tuple[Array, Array]:
    """W1 ~ N(0, 1/sqrt(D)), W2 = 0: the router is silent at the start (training fork)."""
    w1_Dn = param(module, "w1", nn.initializers.normal(D**-0.5), [D, n], ["norm", "sources"])
    return w1_Dn, param(module, "w2", nn.initializers.zeros, [n, n], ["sources", None])
