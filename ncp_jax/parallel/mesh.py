"""The device mesh: four named axes, the same on one CPU and on a pod.

data: replicas (across slices); fsdp: parameters and batch; tensor: heads and feed-forward; seq: tokens of a row.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ncp_jax.config import ConfigError, frozen

AXES = ("data", "fsdp", "tensor", "seq")
BATCH_AXES = ("data", "fsdp")


@frozen
class MeshConfig:
    """Devices along each axis; -1, allowed once, takes what is left."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    seq: int = 1

    def __post_init__(self):
        sizes = [self.data, self.fsdp, self.tensor, self.seq]
        if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
            raise ConfigError(f"mesh {self.describe()}: sizes are positive, and at most one may be -1 (what is left)")

    def describe(self) -> str:
        return " x ".join(f"{axis}={getattr(self, axis)}" for axis in AXES)

    def shape(self, devices: int) -> tuple[int, ...]:
        """Sizes of all axes for a number of devices. Raises ConfigError if they do not multiply to it."""
        sizes = [getattr(self, axis) for axis in AXES]
        known = math.prod(size for size in sizes if size != -1)
        if -1 in sizes and devices % known == 0:
            sizes[sizes.index(-1)] = devices // known
        if math.prod(sizes) != devices:
            lower = devices // known * known
            raise ConfigError(
                f"mesh {self.describe()} does not multiply to {devices} devices: the fixed axes make {known}; "
                f"it would fit {' or '.join(str(n) for n in (lower, lower + known) if n)} devices, or set one axis to -1"
            )
        return tuple(sizes)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over all devices, or those given."""
    devices = jax.devices() if devices is None else devices
    shape = config.shape(len(devices))
    # Auto: Linen's logical constraints are hints to the partitioner; explicit axes would reject them.
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def check_batch(rows: int, micro_batches: int, mesh: Mesh) -> None:
    """Raise ConfigError unless every micro-batch divides over the batch axes of the mesh."""
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    step = shards * micro_batches
    if rows % step:
        lower = rows // step * step
        legal = " or ".join(str(n) for n in (lower, lower + step) if n)
        raise ConfigError(
            f"train.batch {rows} does not divide over data x fsdp = {shards} devices x {micro_batches} micro-batches "
            f"= {step}; nearest legal train.batch: {legal}"
        )
