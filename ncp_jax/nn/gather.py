"""Weights that lie split over devices between uses (FSDP): whole when their layer begins, their gradients split again.

Said outright rather than left to the partitioner, which for some products passes pieces round in a ring and adds up a
whole output for every piece: more traffic to memory, and for a whole model twice the time to compile.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from ncp_jax.ops.split import dividing

Weights = dict[str, Any]  # arrays [L, ...], or tuples of L arrays; of one layer, arrays

GATHERED = "gathered"  # name, for jax.checkpoint, of whole weights
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
    return {
        name: checkpoint_name(_gathered(_AXES[name], value), GATHERED) if name in _AXES else value
        for name, value in w.items()
    }


def gathered_late(x_BTD: Array, later: Weights) -> tuple[Array, Weights]:
    """A layer's input, and a later layer's weights, not to be gathered before that input is there.

    Else XLA starts the gathers of all unrolled layers at once, and whole weights of every layer lie in memory together.
    """
    return lax.optimization_barrier((x_BTD, later)) if spread() else (x_BTD, later)


def looked_up(table_VD: Array, tokens_BT: Array, dtype: Any) -> Array:
    """Rows of the token table [B, T, D] in `dtype`. Their gradients are added up in at least f32.

    A common token stands in a batch a thousand times; in bfloat16 its gradient would stop growing after a few hundred.
    Where neither that nor several devices matter, it is a plain lookup, which forward-mode derivatives pass as well.
    """
    if not spread() and jnp.promote_types(dtype, jnp.float32) == dtype:
        return jnp.take(table_VD.astype(dtype), tokens_BT, axis=0)
    return _looked_up(dtype, table_VD, tokens_BT)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _looked_up(dtype: Any, table_VD: Array, tokens_BT: Array) -> Array:
    cast_VD = table_VD.astype(dtype)
    if spread():  # whole before the lookup, or XLA rematerialises all of it; cast before that, not gathered wide
        cast_VD = _laid_out(lax.optimization_barrier(cast_VD), ("vocab", None))
    return nn.with_logical_constraint(jnp.take(cast_VD, tokens_BT, axis=0), ("batch", "sequence", "features"))


def _lookup_forward(dtype: Any, table_VD: Array, tokens_BT: Array) -> tuple[Array, Any]:
    return _looked_up(dtype, table_VD, tokens_BT), (jnp.zeros((0,), table_VD.dtype), len(table_VD), tokens_BT)


def _lookup_backward(dtype: Any, kept: Any, dx_BTD: Array) -> tuple[Array, None]:
    like, V, tokens_BT = kept
    wide = jnp.promote_types(like.dtype, jnp.float32)
    sum_VD = jnp.zeros((V, dx_BTD.shape[-1]), wide).at[tokens_BT].add(dx_BTD.astype(wide))
    return (_laid_out(_laid_out(sum_VD, ("vocab", None)), ("vocab", "embed")).astype(like.dtype), None)


_looked_up.defvjp(_lookup_forward, _lookup_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(axes: Sequence[str | None], w: Array) -> Array:
    # Split once more first: else "whole" spreads backwards, past a layer's remat, and whole weights are what it keeps.
    return _laid_out(_laid_out(w, axes), _whole(axes))


def _forward(axes: Sequence[str | None], w: Array) -> tuple[Array, None]:
    return _gathered(axes, w), None


def _backward(axes: Sequence[str | None], _: None, dw: Array) -> tuple[Array]:
    return (_laid_out(_laid_out(dw, _whole(axes)), axes),)


_gathered.defvjp(_forward, _backward)


def _whole(axes: Sequence[str | None]) -> list[str | None]:
    return [None if axis == "embed" else axis for axis in axes]


def _laid_out(x: Array, axes: Sequence[str | None]) -> Array:
    if not spread():
        return x
    mesh = jax.sharding.get_abstract_mesh()
    wanted = nn.logical_to_mesh_axes(axes) or (None,) * x.ndim
    spec = [dividing(mesh, names, size) for names, size in zip(wanted, x.shape, strict=True)]
    return lax.with_sharding_constraint(x, PartitionSpec(*spec))
