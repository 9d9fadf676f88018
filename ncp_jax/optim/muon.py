"""Muon as an Optax transform on stacked leaves: momentum, then each matrix replaced by a near-orthogonal one.

Which axes of a leaf form its matrix comes from the leaf table (optim/leaves.py), by path, never from `ndim`.
Shapes: Z all batch axes of a leaf flattened (layers, segments, heads), I fan-in, O fan-out.
Sources: Muon (github.com/KellerJordan/Muon), Moonlight (arXiv 2502.16982).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ncp_jax.config import frozen

# Quintic of Keller Jordan's Muon: steepest at 0 among quintics that keep singular values near 1 (about 0.68 to 1.13
# after five steps) instead of converging to 1.
QUINTIC = (3.4445, -4.7750, 2.0315)
MOONLIGHT_RMS = 0.2  # RMS of a typical AdamW update, which Moonlight matches (arXiv 2502.16982, Eq. 4)

Orthogonalise = Callable[[jax.Array], jax.Array]


@frozen
class Matrix:
    """Axes of a leaf, counted from 0: those read by the matrix, those it produces, and the rest."""

    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]
    batch_axes: tuple[int, ...] = ()

    def fans(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Fan-in and fan-out of one matrix of a leaf of this shape."""
        return math.prod(shape[axis] for axis in self.in_axes), math.prod(shape[axis] for axis in self.out_axes)


class MuonState(NamedTuple):
    """Momentum in the shape of each leaf, float32 or wider."""

    momentum: Any


def scale_by_muon(
    matrices: Mapping[str, Matrix],
    factor: Callable[[int, int], float],
    momentum: float = 0.95,
    nesterov: bool = True,
    orthogonalise: Orthogonalise | None = None,
) -> optax.GradientTransformation:
    """Gradients -> factor(fan_in, fan_out) x orthogonalised momentum, before decay and learning rate.

    M <- momentum M + G; the matrix that is orthogonalised is M, or G + momentum M with `nesterov`. No bias
    correction: the orthogonalised direction does not depend on the length of its input.

    Args:
        matrices: matrix axes by '/'-joined path; every leaf that arrives here needs an entry (KeyError otherwise).
        factor: length of the update by matrix shape: `moonlight` or `spectral`.
        orthogonalise: [Z, I, O] -> [Z, I, O], each matrix alone; default `newton_schulz`. The seam for a version
            that shards Z over devices.
    """
    orthogonal = orthogonalise or newton_schulz

    def init(params):
        return MuonState(jax.tree.map(lambda p: jnp.zeros(p.shape, at_least_f32(p.dtype)), params))

    def update(updates, state, params=None):
        del params
        moments = jax.tree.map(lambda m, g: momentum * m + g.astype(m.dtype), state.momentum, updates)
        ahead = jax.tree.map(lambda m, g: momentum * m + g.astype(m.dtype), moments, updates) if nesterov else moments

        def direction(path, x):
            matrix = matrices[path_name(path)]
            return factor(*matrix.fans(x.shape)) * on_matrices(orthogonal, x, matrix)

        return jax.tree_util.tree_map_with_path(direction, ahead), MuonState(moments)

    return optax.GradientTransformation(init, update)


def newton_schulz(x_ZIO: jax.Array, steps: int = 5, dtype: Any = None) -> jax.Array:
    """U V^T of each matrix U S V^T, roughly: singular values end near 1, whatever the length of the input.

    Iterates X <- a X + (b A + c A^2) X with A = X X^T on the smaller side. A zero matrix stays zero.

    Args:
        steps: iterations; five leave singular values in about [0.68, 1.13] for a well-conditioned matrix.
        dtype: of the iteration; default float32 or wider at full precision. bfloat16 is what Muon was tuned with.
    Returns the dtype of the input.
    """
    a, b, c = QUINTIC
    work = jnp.dtype(dtype) if dtype is not None else at_least_f32(x_ZIO.dtype)
    # A float32 matmul on TPU is one bf16 pass by default; asking for float32 here means float32.
    precision = None if work == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    tall = x_ZIO.shape[-2] > x_ZIO.shape[-1]
    x = _unit(x_ZIO.astype(at_least_f32(x_ZIO.dtype))).astype(work)
    x = jnp.swapaxes(x, -1, -2) if tall else x
    for _ in range(steps):
        gram = jnp.matmul(x, jnp.swapaxes(x, -1, -2), precision=precision)
        poly = b * gram + c * jnp.matmul(gram, gram, precision=precision)
        x = a * x + jnp.matmul(poly, x, precision=precision)
    x = jnp.swapaxes(x, -1, -2) if tall else x
    return x.astype(x_ZIO.dtype)


def on_matrices(function: Orthogonalise, x: jax.Array, matrix: Matrix) -> jax.Array:
    """Apply a [Z, I, O] function to a leaf of any shape, and restore the shape."""
    order = matrix.batch_axes + matrix.in_axes + matrix.out_axes
    moved = jnp.transpose(x, order)
    result = function(moved.reshape(-1, *matrix.fans(x.shape))).reshape(moved.shape)
    return jnp.transpose(result, [order.index(axis) for axis in range(x.ndim)])


def moonlight(fan_in: int, fan_out: int) -> float:
    """0.2 sqrt(max(in, out)): the RMS of the update is about 0.2 x learning rate (arXiv 2502.16982, Eq. 4)."""
    return MOONLIGHT_RMS * math.sqrt(max(fan_in, fan_out))


def spectral(fan_in: int, fan_out: int, scale: float = 1.0) -> float:
    """scale x sqrt(max(in, out)): an RMS of about scale x learning rate (Eq. 25, in Megatron's mode of this name)."""
    return scale * math.sqrt(max(fan_in, fan_out))


def path_name(path: Any) -> str:
    """'/'-joined name of a leaf, from a JAX key path."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def at_least_f32(dtype: Any) -> Any:
    """The dtype itself where it is float32 or wider, else float32."""
    return jnp.promote_types(dtype, jnp.float32)


def _unit(x_ZIO: jax.Array) -> jax.Array:
    """Each matrix divided by its Frobenius norm. No epsilon: dividing by the largest entry first keeps the squares
    of a tiny gradient from underflowing, makes the norm at least 1, and leaves a zero matrix zero."""
    largest = jnp.max(jnp.abs(x_ZIO), axis=(-2, -1), keepdims=True)
    x_ZIO = x_ZIO / jnp.where(largest > 0, largest, 1)
    return x_ZIO / jnp.maximum(jnp.linalg.norm(x_ZIO, axis=(-2, -1), keepdims=True), 1)
