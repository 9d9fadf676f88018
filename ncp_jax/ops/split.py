"""How one dimension of an array is split over the devices of a mesh, for code that talks to devices itself."""

import math
from typing import Any

from jax.sharding import AbstractMesh


def dividing(mesh: AbstractMesh, axes: Any, size: int) -> Any:
    """The mesh axes of a dimension; None if they split nothing, or if it does not divide over them."""
    devices = devices_along(mesh, axes)
    return None if devices == 1 or size % devices else axes


def devices_along(mesh: AbstractMesh, axes: Any) -> int:
    """Devices along mesh axes: None, a name, or several names."""
    return 1 if mesh.empty else math.prod(mesh.shape[name] for name in names_of(axes))


def names_of(*entries: Any) -> tuple[str, ...]:
    """The axis names in entries of a PartitionSpec."""
    return tuple(name for entry in entries for name in ((entry,) if isinstance(entry, str) else entry or ()))
