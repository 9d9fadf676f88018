"""Muon as an Optax transform on stacked leaves: momentum, then each matrix replaced by a near-orthogonal one.

Which axes of a leaf form its matrix comes from the leaf table (optim/leaves.py), by path, never from `ndim`.
Shapes: Z all batch axes of a leaf flattened (layers, segments, heads), I fan-in, O fan-out.
Sources: Muon (github.com/KellerJordan/Muon), Moonlight (arXiv 2502.16982).
"""

import math
from collections.abc import Callable, Mapping, Sequence
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
Directions = Callable[[Mapping[str, jax.Array]], Mapping[str, jax.Array]]  # all leaves by path -> orthogonalised


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
    directions: Directions | None = None,
) -> optax.GradientTransformation:
    """Gradients -> factor(fan_in, fan_out) x orthogonalised momentum, before decay and learning rate.

    M <- momentum M + G; the matrix that is orthogonalised is M, or G + momentum M with `nesterov`. No bias
    correction: the orthogonalised direction does not depend on the length of its input.

    Args:
        matrices: matrix axes by '/'-joined path; every leaf that arrives here needs an entry (KeyError otherwise).
        factor: length of the update by matrix shape: `moonlight` or `spectral`.
        directions: all leaves -> each matrix orthogonalised alone; default `leaf_by_leaf` with `newton_schulz`. The
            seam for optim/spread.py, which moves matrices between devices.
    """
    orthogonal = directions or leaf_by_leaf(matrices, newton_schulz)

    def init(params):
        return MuonState(jax.tree.map(lambda p: jnp.zeros(p.shape, at_least_f32(p.dtype)), params))

    def update(updates, state, params=None):
        del params
        moments = jax.tree.map(lambda m, g: momentum * m + g.astype(m.dtype), state.momentum, updates)
        ahead = jax.tree.map(lambda m, g: momentum * m + g.astype(m.dtype), moments, updates) if nesterov else moments
        leaves, structure = jax.tree_util.tree_flatten_with_path(ahead)
        named = {path_name(path): x for path, x in leaves}
        found = orthogonal(named)
        scaled = [factor(*matrices[name].fans(x.shape)) * found[name] for name, x in named.items()]
        return jax.tree.unflatten(structure, scaled), MuonState(moments)

    return optax.GradientTransformation(init, update)


def leaf_by_leaf(matrices: Mapping[str, Matrix], orthogonalise: Orthogonalise) -> Directions:
    """Each leaf on its own, where it lies: [Z, I, O] -> [Z, I, O], each matrix alone."""
    return lambda leaves: {name: on_matrices(orthogonalise, x, matrices[name]) for name, x in leaves.items()}


def newton_schulz(x_ZIO: jax.Array, steps: int = 5, dtype: Any = None) -> jax.Array:
    """U V^T of each matrix U S V^T, roughly: singular values end near 1, whatever the length of the input.

    Iterates X <- a X + (b A + c A^2) X with A = X X^T on the smaller side. A zero matrix stays zero.

    Args:
        steps: iterations; five leave singular values in about [0.68, 1.13] for a well-conditioned matrix.
        dtype: of the iteration; default float32 or wider at full precision. bfloat16 is what Muon was tuned with.
    Returns the dtype of the input.
    """
    work = working_dtype(x_ZIO.dtype, dtype)
    tall = x_ZIO.shape[-2] > x_ZIO.shape[-1]
    x = jnp.swapaxes(x_ZIO, -1, -2) if tall else x_ZIO
    x = iterate(unit(x.astype(at_least_f32(x.dtype))).astype(work), steps)
    x = jnp.swapaxes(x, -1, -2) if tall else x
    return x.astype(x_ZIO.dtype)


def unit(x_ZIO: jax.Array, axes: Sequence[str] = ()) -> jax.Array:
    """Each matrix divided by its Frobenius norm, where `axes` are the mesh axes over which a matrix is split.

    No epsilon: dividing by the largest entry first keeps the squares of a tiny gradient from underflowing, makes the
    norm at least 1, and leaves a zero matrix zero.
    """
    names = tuple(axes)
    largest = jnp.max(jnp.abs(x_ZIO), axis=(-2, -1), keepdims=True)
    largest = jax.lax.pmax(largest, names) if names else largest
    x_ZIO = x_ZIO / jnp.where(largest > 0, largest, 1)
    square = jnp.sum(jnp.square(x_ZIO), axis=(-2, -1), keepdims=True)
    square = jax.lax.psum(square, names) if names else square
    return x_ZIO / jnp.maximum(jnp.sqrt(square), 1)


def iterate(x_ZIO: jax.Array, steps: int) -> jax.Array:
    """The quintic on unit matrices with I <= O, in their dtype."""
    a, b, c = QUINTIC
    # A float32 matmul on TPU is one bf16 pass by default; asking for float32 here means float32.
    precision = None if x_ZIO.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    for _ in range(steps):
        gram = jnp.matmul(x_ZIO, jnp.swapaxes(x_ZIO, -1, -2), precision=precision)
        poly = b * gram + c * jnp.matmul(gram, gram, precision=precision)
        x_ZIO = a * x_ZIO + jnp.matmul(poly, x_ZIO, precision=precision)
    return x_ZIO


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


def working_dtype(leaf: Any, asked: Any) -> jnp.dtype:
    """Dtype of the iteration: the one asked for, else float32 or wider."""
    return jnp.dtype(asked if asked is not None else at_least_f32(leaf))
