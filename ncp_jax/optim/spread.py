"""Layer-parallel Newton–Schulz: matrices of one shape from all leaves in one stack, whole matrices on each device.

Left to itself the partitioner keeps every matrix split and gathers it for each product. Here each device sends its
pieces once (all-to-all), holds whole matrices while the iteration runs, and sends the pieces back. The twin is
muon.py's `leaf_by_leaf`; the values are the same.
Shapes: Z matrices of a stack, I and O their sides with I <= O, i and o the parts of a side on one device.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ncp_jax.config import frozen
from ncp_jax.optim.muon import Directions, Matrix, iterate, unit, working_dtype

Axes = tuple[str, ...]  # mesh axes, major first
AnyMesh = Mesh | AbstractMesh


@frozen
class Layout:
    """How one leaf lies on a mesh: what its matrices are split over, and which of its axes make up Z, I and O."""

    spec: tuple[Axes, ...]  # one entry per axis of the leaf
    sides: tuple[tuple[int, ...], tuple[int, ...]]  # axes of the leaf that make up I and O
    batch: tuple[int, ...]
    key: tuple  # leaves with equal keys fit into one stack: sides and their splits, split of the batch axes
    flipped: bool  # I is the leaf's fan-out


def layer_parallel(
    matrices: Mapping[str, Matrix], shardings: Mapping[str, NamedSharding], steps: int = 5, dtype: Any = None
) -> Directions:
    """Directions of all leaves with one all-to-all per stack and split side on the way in, and one on the way out.

    Stacks are padded with zero matrices to a multiple of the devices they are spread over: those that split a matrix,
    and those that hold copies where that leaves fewer matrices for each. A leaf that is split in a way which cuts a
    side anywhere but along its first axis is gathered along it first.

    Args:
        matrices, shardings: by path; the shardings of the parameters, all of one mesh.
        steps, dtype: as in newton_schulz. With bfloat16 the pieces also travel as bfloat16: half the bytes.
    """

    def directions(leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        stacks: dict[tuple, list[str]] = {}
        layouts = {name: layout(x.shape, matrices[name], shardings[name]) for name, x in leaves.items()}
        for name, x in leaves.items():
            stacks.setdefault((x.dtype, *layouts[name].key), []).append(name)
        found: dict[str, jax.Array] = {}
        for names in stacks.values():
            mesh, members = shardings[names[0]].mesh, [layouts[name] for name in names]
            specs = tuple(PartitionSpec(*member.spec) for member in members)
            work = working_dtype(leaves[names[0]].dtype, dtype)
            body = partial(_stack, layouts=members, mesh=mesh, steps=steps, work=work)
            # Copies on replicated axes come out of one all-gather, which the replication check cannot see.
            spread = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
            found |= zip(names, spread(*(leaves[name] for name in names)), strict=True)
        return found

    return directions


def layout(shape: tuple[int, ...], matrix: Matrix, sharding: NamedSharding) -> Layout:
    """The smaller side first; a square matrix is turned so that its first side is split, whatever its leaf calls it."""
    entries = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    named = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]
    spec = [tuple(axis for axis in entry if sharding.mesh.shape[axis] > 1) for entry in named]
    for side in (matrix.in_axes, matrix.out_axes):
        for axis in side[1:]:
            spec[axis] = ()
    sides = [
        (math.prod(shape[axis] for axis in side), spec[side[0]], side) for side in (matrix.in_axes, matrix.out_axes)
    ]
    turned = sorted(sides, key=lambda side: (side[0], not side[1], side[1]))
    batch = tuple(sorted(name for axis in matrix.batch_axes for name in spec[axis]))
    return Layout(
        spec=tuple(spec),
        sides=(turned[0][2], turned[1][2]),
        batch=matrix.batch_axes,
        key=(turned[0][:2], turned[1][:2], batch),
        flipped=turned != sides,
    )


def copy_axes(count: int, mesh: AnyMesh, used: Sequence[str]) -> Axes:
    """Mesh axes that hold copies of a stack, and are worth sharing `count` matrices out over: innermost axes first."""
    chosen: list[str] = []
    devices = _devices(mesh, used)
    for axis in reversed([axis for axis in mesh.axis_names if axis not in used]):
        if -(-count // (devices * mesh.shape[axis])) < -(-count // devices):
            chosen.append(axis)
            devices *= mesh.shape[axis]
    return tuple(chosen)


def _stack(*leaves: jax.Array, layouts: Sequence[Layout], mesh: AnyMesh, steps: int, work: Any) -> tuple:
    """One device's part of one stack: pieces of leaves in, the same pieces of their directions out."""
    views = [_view(x, place) for x, place in zip(leaves, layouts, strict=True)]
    flips = np.repeat([place.flipped for place in layouts], [*map(len, views)])
    pieces = _directions(jnp.concatenate(views), flips, layouts[0].key, mesh, steps, work)
    ends = np.cumsum([*map(len, views)])
    parts = [pieces[end - len(view) : end] for view, end in zip(views, ends, strict=True)]
    return tuple(_unview(y.astype(x.dtype), x, place) for y, x, place in zip(parts, leaves, layouts, strict=True))


def _directions(pieces: jax.Array, flips: np.ndarray, key: tuple, mesh: AnyMesh, steps: int, work: Any) -> jax.Array:
    """[Z, i, o] -> [Z, i, o] in the working dtype. `flips`: which matrices their leaves hold the other way round."""
    (_, in_axes), (_, out_axes), batch = key
    count, narrow = len(pieces), work.itemsize < pieces.dtype.itemsize
    if narrow:  # the norm in full precision, while the entries still have it
        pieces = unit(pieces, in_axes + out_axes).astype(work)
    copies = copy_axes(count, mesh, (*in_axes, *out_axes, *batch))
    order = (*copies, *in_axes, *out_axes)
    devices, shares = _devices(mesh, order), _devices(mesh, copies)
    each = -(-count // devices)
    padding = each * devices - count
    # Kept apart from what moves it: XLA on CPU splits an all-to-all into its parts, and fails on parts that it knows
    # to be zero beside parts that were transposed (different layouts).
    pieces = lax.optimization_barrier(jnp.pad(pieces, ((0, padding), (0, 0), (0, 0))))
    if copies:
        pieces = lax.dynamic_slice_in_dim(pieces, len(pieces) // shares * lax.axis_index(copies), len(pieces) // shares)

    x_ZIO = _move(pieces, in_axes, out_axes)
    mine = lax.dynamic_slice_in_dim(np.pad(flips, (0, padding)), each * lax.axis_index(order) if order else 0, each)
    turn = partial(_turn, flips=mine) if flips.any() else lambda x: x
    x_ZIO = turn(x_ZIO)
    x_ZIO = turn(iterate(x_ZIO if narrow else unit(x_ZIO), steps))
    pieces = _move_back(x_ZIO, in_axes, out_axes)
    return lax.all_gather(pieces, copies, tiled=True) if copies else pieces


def _devices(mesh: AnyMesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _view(x: jax.Array, place: Layout) -> jax.Array:
    """[Z, i, o] of a leaf's local block."""
    sizes = [math.prod(x.shape[axis] for axis in side) for side in place.sides]
    return jnp.transpose(x, _order(place)).reshape(-1, *sizes)


def _unview(y_Zio: jax.Array, like: jax.Array, place: Layout) -> jax.Array:
    order = _order(place)
    return jnp.transpose(
        y_Zio.reshape([like.shape[axis] for axis in order]), [order.index(axis) for axis in range(like.ndim)]
    )


def _order(place: Layout) -> tuple[int, ...]:
    return place.batch + place.sides[0] + place.sides[1]


def _move(pieces: jax.Array, in_axes: Axes, out_axes: Axes) -> jax.Array:
    """[Z, i, o], pieces of all matrices -> [Z/devices, I, O], whole ones."""
    if in_axes:
        pieces = lax.all_to_all(pieces, in_axes, split_axis=0, concat_axis=1, tiled=True)
    if out_axes:
        pieces = lax.all_to_all(pieces, out_axes, split_axis=0, concat_axis=2, tiled=True)
    return pieces


def _move_back(x_ZIO: jax.Array, in_axes: Axes, out_axes: Axes) -> jax.Array:
    if out_axes:
        x_ZIO = lax.all_to_all(x_ZIO, out_axes, split_axis=2, concat_axis=0, tiled=True)
    if in_axes:
        x_ZIO = lax.all_to_all(x_ZIO, in_axes, split_axis=1, concat_axis=0, tiled=True)
    return x_ZIO


def _turn(x_ZIO: jax.Array, flips: jax.Array) -> jax.Array:
    """Square matrices as their leaves hold them, and back: X X^T and X^T X round differently.

    Of other shapes the leaf rule, too, takes the smaller side first.
    """
    if x_ZIO.shape[1] != x_ZIO.shape[2]:
        return x_ZIO
    return jnp.where(flips[:, None, None], jnp.swapaxes(x_ZIO, 1, 2), x_ZIO)
