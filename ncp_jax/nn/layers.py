"""Norms and tables of weights: the small pieces that own parameters.

Every parameter is born with logical axis names; `parallel/rules.py` turns names into shardings. Shapes: D width,
V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ncp_jax.nn.gather import looked_up

Initializer = Callable[..., Array]


def truncated_normal(std: float) -> Initializer:
    """Normal cut at three standard deviations: `scaled_truncated_normal` of the training fork."""
    return nn.initializers.truncated_normal(stddev=std, lower=-3.0, upper=3.0)


def base_std(width: int) -> float:
    """sqrt(2 / (5 D)): standard deviation of every hidden matrix at the start."""
    return (2 / (5 * width)) ** 0.5


def param(module: nn.Module, name: str, init: Initializer, shape: Sequence[int], axes: Sequence[str | None]) -> Array:
    """A float32 master parameter with logical axis names."""
    value: Any = module.param(name, nn.with_logical_partitioning(init, tuple(axes)), tuple(shape), jnp.float32)
    return value  # unboxed: Linen strips the axis names


def stacked_param(
    module: nn.Module, name: str, init: Initializer, layers: int, shape: Sequence[int], axes: Sequence[str | None]
) -> Any:
    """A parameter of L layers, [L, *shape]; or the tuple of L arrays that stands in its place for decoding.

    nn/block.py one_array_per_layer says why.
    """
    given: Any = module.get_variable("params", name) if module.has_variable("params", name) else None
    return given if isinstance(given, tuple) else param(module, name, init, [layers, *shape], ["layers", *axes])


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """scale * x / sqrt(mean(x^2) + eps) over the last `scale.ndim` axes; statistics and product in at least f32."""
    wide_x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    axes = tuple(range(-scale.ndim, 0))
    inverse = jax.lax.rsqrt((wide_x**2).mean(axis=axes, keepdims=True) + eps)
    return (wide_x * inverse * scale).astype(x.dtype)


def layer_norm(x_BTD: Array, scale_D: Array, bias_D: Array, eps: float) -> Array:
    """LayerNorm with bias and biased variance; statistics in at least f32."""
    wide_x = x_BTD.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))
    centred = wide_x - wide_x.mean(axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    return (centred * inverse * scale_D + bias_D).astype(x_BTD.dtype)


class RMSNorm(nn.Module):
    """RMS norm over the width."""

    eps: float

    @nn.compact
    def __call__(self, x_BTD: Array) -> Array:
        return rms_norm(x_BTD, param(self, "scale", nn.initializers.ones, x_BTD.shape[-1:], ["norm"]), self.eps)


class LayerNorm(nn.Module):
    """LayerNorm over the width. Its value at the zero vector is its bias."""

    width: int
    eps: float

    def setup(self):
        self.scale = param(self, "scale", nn.initializers.ones, [self.width], ["norm"])
        self.bias = param(self, "bias", nn.initializers.zeros, [self.width], ["norm"])

    def __call__(self, x_BTD: Array) -> Array:
        return layer_norm(x_BTD, self.scale, self.bias, self.eps)

    def at_zero(self) -> Array:
        return self.bias


class Embed(nn.Module):
    """Token table [V, D], no scaling."""

    vocab: int
    width: int
    std: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens_BT: Array) -> Array:
        table_VD = param(self, "table", truncated_normal(self.std), [self.vocab, self.width], ["vocab", "embed"])
        return looked_up(table_VD, tokens_BT, self.dtype)


class Head(nn.Module):
    """Output matrix [D, V], untied, no bias. The loss multiplies by it; training never has all logits."""

    vocab: int
    width: int
    std: float

    @nn.compact
    def __call__(self) -> Array:
        return param(self, "kernel", truncated_normal(self.std), [self.width, self.vocab], ["embed", "vocab"])


def head_split() -> PartitionSpec | None:
    """Mesh axes of rows, tokens and vocabulary, as the fused head and cross-entropy asks for them."""
    return nn.logical_to_mesh_axes(("batch", "sequence", "vocab"))
