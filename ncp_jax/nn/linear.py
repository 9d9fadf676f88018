"""Linear maps with bias and token tables, normally distributed at the start: the small pieces of the CALM family.

Shapes: D width, V vocabulary. Every matrix of that family starts as N(0, 0.02^2), cut nowhere.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array, lax

from ncp_jax.nn.layers import Initializer, param

NORMAL = nn.initializers.normal(0.02)  # initializer_range of the official configs


class Linear(nn.Module):
    """x @ kernel + bias, in x's dtype. `axes` are the logical names of the kernel's two axes.

    Only the input axis is split by default: these matrices are small beside a backbone's, and a width that stays whole
    needs no exchange between devices (see nn/block.py whole_width).
    """

    inputs: int
    outputs: int
    axes: tuple[str | None, str | None] = ("embed", None)
    initial: Initializer = NORMAL
    precision: lax.Precision | None = None  # None: the platform's, which on a TPU is bf16 for f32 inputs

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = param(self, "kernel", self.initial, [self.inputs, self.outputs], self.axes)
        bias = param(self, "bias", nn.initializers.zeros, [self.outputs], ["norm"])
        return jnp.matmul(x, kernel.astype(x.dtype), precision=self.precision) + bias.astype(x.dtype)


class Table(nn.Module):
    """Token table [V, D]. The row of `pad` starts at zero and is never trained (torch's padding_idx)."""

    vocab: int
    width: int
    dtype: jnp.dtype
    pad: int | None = None

    def setup(self):
        def init(key, shape, dtype):
            table_VD = NORMAL(key, shape, dtype)
            return table_VD if self.pad is None else table_VD.at[self.pad].set(0)

        self.table = param(self, "table", init, [self.vocab, self.width], ["vocab", "embed"])

    def __call__(self, tokens: Array) -> Array:
        table_VD = nn.with_logical_constraint(self.table.astype(self.dtype), ("vocab", "features"))
        e = jnp.take(table_VD, tokens, axis=0)
        return e if self.pad is None else jnp.where((tokens == self.pad)[..., None], lax.stop_gradient(e), e)
