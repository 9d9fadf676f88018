"""Sharding as two tables: logical axis name -> mesh axes, one for parameters, one for activations.

Modules name axes and know no mesh; everything about placement is here. A mesh axis can serve one dimension of an
array: a second claim is an error in the table. A dimension that does not divide stays whole and is reported.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ncp_jax.config import ConfigError
from ncp_jax.parallel.mesh import BATCH_AXES

Rules = Mapping[str, str | tuple[str, ...] | None]

PARAMETER_RULES: Rules = {
    "layers": None,  # stacked layers are sliced one by one: sharding them would gather each slice
    "embed": "fsdp",
    "heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": "tensor",
    "segments": "tensor",
    "codes": None,
    "segment_width": None,
    "sources": None,
    "norm": None,  # vectors of width D: too small to be worth a gather
}

ACTIVATION_RULES: Rules = {
    "batch": BATCH_AXES,
    "sequence": "seq",
    "features": None,
    "heads": "tensor",
    "mlp_features": "tensor",
    "embed": "fsdp",  # of gradients on their way back to split matrices
    "vocab": "tensor",
}


class Placement(NamedTuple):
    """Where one parameter goes: its sharding, and the dimensions that should have been split but do not divide."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding
    whole: tuple[str, ...]

    @property
    def bytes_per_device(self) -> int:
        return math.prod(self.sharding.shard_shape(self.shape)) * jax.numpy.dtype(self.dtype).itemsize


def is_boxed(value: Any) -> bool:
    return isinstance(value, nn.LogicallyPartitioned)


def unboxed(tree: Any) -> Any:
    """Plain arrays (or ShapeDtypeStructs) without their axis names."""
    return jax.tree.map(lambda box: box.value if is_boxed(box) else box, tree, is_leaf=is_boxed)


def place(boxed: Any, mesh: Mesh, rules: Rules = PARAMETER_RULES) -> Any:
    """A tree of Placements for parameters born with axis names; a leaf without names is replicated."""

    def one(path, box) -> Placement:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        names, value = (box.names, box.value) if is_boxed(box) else ((None,) * box.ndim, box)
        spec, whole = _spec(name, names, value.shape, mesh, rules)
        return Placement(name, tuple(value.shape), value.dtype, NamedSharding(mesh, spec), whole)

    return jax.tree_util.tree_map_with_path(one, boxed, is_leaf=is_boxed)


def placements(tree: Any) -> list[Placement]:
    """The Placements of a tree, flat."""
    return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Placement))


def shardings(tree: Any) -> Any:
    """The NamedShardings of a tree of Placements."""
    return jax.tree.map(lambda p: p.sharding, tree, is_leaf=lambda leaf: isinstance(leaf, Placement))


def format_placements(tree: Any) -> str:
    """The sharding table as text: parameter, shape, spec, bytes per device; then what could not be split.

    Parameters that differ in a layer's number alone share a line, with their count and the bytes of all.
    """
    rows = placements(tree)
    families: dict[tuple, list[Placement]] = {}
    for row in rows:
        name = re.sub(r"(?<=_)\d+(?=/)", "*", row.path)
        families.setdefault((name, row.sharding.spec, len(row.shape)), []).append(row)
    width = max(len(name) for name, _, _ in families)
    lines = [
        f"{name:<{width}} {len(family):>3} x {_sizes(family):<22} {spec!s:<42} {sum(_bytes(family)):>16,} B"
        for (name, spec, _), family in families.items()
    ]
    lines.append(f"parameters per device: {sum(_bytes(rows)):,} B")
    lines += [f"not split: {row.path} {list(row.shape)}: {problem}" for row in rows for problem in row.whole]
    return "\n".join(lines)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp, tokens over seq. Arrays of one dimension use the first part."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, "seq"))


def row_sharding(mesh: Mesh) -> NamedSharding:
    """One value per row."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def activation_rules() -> list[tuple[str, Any]]:
    """The activation table in the form of flax.linen.logical_axis_rules."""
    return list(ACTIVATION_RULES.items())


def _bytes(rows: list[Placement]) -> list[int]:
    return [row.bytes_per_device for row in rows]


def _sizes(rows: list[Placement]) -> str:
    """[128, 2..9] for shapes that differ in one axis."""
    axes = zip(*(row.shape for row in rows), strict=True)
    return f"[{', '.join(f'{min(axis)}..{max(axis)}' if len(set(axis)) > 1 else str(axis[0]) for axis in axes)}]"


def _spec(path: str, names: tuple, shape: tuple[int, ...], mesh: Mesh, rules: Rules) -> tuple[PartitionSpec, tuple]:
    spec: list[Any] = []
    used: dict[str, str] = {}
    whole: list[str] = []
    for name, size in zip(names, shape, strict=True):
        if name is not None and name not in rules:
            raise ConfigError(f"parameter {path} names axis '{name}', which parallel/rules.py does not list")
        axes = rules[name] if name is not None else None
        axes = (axes,) if isinstance(axes, str) else (axes or ())
        for axis in axes:
            if axis in used:
                raise ConfigError(f"parameter {path}: both '{used[axis]}' and '{name}' claim mesh axis '{axis}'")
            used[axis] = str(name)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            whole.append(f"'{name}' of size {size} does not divide over {' x '.join(axes)} = {parts}")
            axes = ()
        spec.append(axes[0] if len(axes) == 1 else (axes or None))
    return PartitionSpec(*spec), tuple(whole)
