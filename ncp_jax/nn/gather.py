"""Weights that lie split over devices between uses (FSDP): whole when their layer begins, their gradients split again.

Said outright rather than left to the partitioner, which for some products passes pieces round in a ring and adds up a
whole output for every piece: nearly three times the traffic to memory at the width of the 9B (LOG.md).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from ncp_jax.ops.split import dividing

Weights = dict[str, Any]  # arrays [L, ...], or tuples of L arrays; of one layer, arrays

# The axes of a layer's matrices, named as activations are; `embed` is what FSDP splits.
_AXES = {
    "wq": ("embed", "heads", None),
    "wk": ("embed", "heads", None),
    "wv": ("embed", "heads", None),
    "wo": ("heads", None, "embed"),
    "w_gate": ("embed", "mlp_features"),
    "w_up": ("embed", "mlp_features"),
    "w_down": ("mlp_features", "embed"),
}


def spread() -> bool:
    """Whether more than one device takes part."""
    return jax.sharding.get_abstract_mesh().size > 1


def gathered(w: Weights) -> Weights:
    """One layer's matrices, whole but for what the tensor axis splits."""
    if not spread():
        return w
    return {name: _gathered(_AXES[name], value) if name in _AXES else value for name, value in w.items()}


def all_but_layouts(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy for jax.checkpoint: keep everything but what was laid out anew: whole weights are gathered again."""
    return primitive.name != "sharding_constraint"


def gathered_late(x_BTD: Array, later: Weights) -> tuple[Array, Weights]:
    """A layer's input, and a later layer's weights, not to be gathered before that input is there.

    Else XLA starts the gathers of all unrolled layers at once, and whole weights of every layer lie in memory together.
    """
    return lax.optimization_barrier((x_BTD, later)) if spread() else (x_BTD, later)


def looked_up(table_VD: Array, tokens_BT: Array, dtype: Any) -> Array:
    """Rows of the token table [B, T, D] in `dtype`. Their gradients are added up in at least f32.

    A common token stands in a batch a thousand times; in bfloat16 its gradient would stop growing after a few hundred.
    """
    return nn.with_logical_constraint(_looked_up(dtype, table_VD, tokens_BT), ("batch", "sequence", "features"))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _looked_up(dtype: Any, table_VD: Array, tokens_BT: Array) -> Array:
    cast_VD = table_VD.astype(dtype)
    if spread():  # cast first, not gathered wide
        cast_VD = lax.optimization_barrier(cast_VD)
    return jnp.take(_gathered(("vocab", "embed"), cast_VD), tokens_BT, axis=0)


@_looked_up.defjvp
def _slope(dtype: Any, inputs: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    """The same lookup in the table's slope, not rounded before it: its transpose adds up unrounded gradients."""
    slope_VD, tokens_BT = tangents[0], inputs[1]
    slope_VD = _gathered(("vocab", "embed"), slope_VD.astype(jnp.promote_types(slope_VD.dtype, jnp.float32)))
    return _looked_up(dtype, *inputs), jnp.take(slope_VD, tokens_BT, axis=0).astype(dtype)


def _gathered(axes: Sequence[str | None], w: Array) -> Array:
    """Whole, but for the tensor axis. Its transpose is the way back: gradients summed whole, then split again."""
    # Split once more first: else "whole" spreads backwards, past a layer's remat, and whole weights are what it keeps.
    return _laid_out(_laid_out(w, axes), [None if axis == "embed" else axis for axis in axes])


def _laid_out(x: Array, axes: Sequence[str | None]) -> Array:
    if not spread():
        return x
    mesh = jax.sharding.get_abstract_mesh()
    wanted = nn.logical_to_mesh_axes(axes) or (None,) * x.ndim
    spec = [dividing(mesh, names, size) for names, size in zip(wanted, x.shape, strict=True)]
    return lax.with_sharding_constraint(x, PartitionSpec(*spec))
