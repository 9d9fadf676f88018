"""The device mesh: four named axes, the same on one CPU and on a pod, in the order of the wires between its chips.

data: replicas (across slices); fsdp: parameters and batch; tensor: heads and feed-forward; seq: tokens of a row.
"""

import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ncp_jax.config import ConfigError, frozen, nearest_multiples

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
            raise ConfigError(
                f"mesh {self.describe()} does not multiply to {devices} devices: the fixed axes make {known}; "
                f"it would fit {nearest_multiples(devices, known)} devices, or set one axis to -1"
            )
        return tuple(sizes)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over all devices, or those given. Raises ConfigError for sizes that do not fit them, or their slices."""
    devices = jax.devices() if devices is None else devices
    # Auto: Linen's logical constraints are hints to the partitioner; explicit axes would reject them.
    return Mesh(arrange(config, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arrange(config: MeshConfig, devices: Sequence[jax.Device]) -> np.ndarray:
    """Devices by mesh coordinates.

    TPU chips are neighbours in two or three directions, and an axis is laid along them, so that its collectives go
    round a ring; an axis may take a part of a direction. Slices are joined by the data-centre network: they differ in
    `data` alone, the axis whose traffic is least (gradients, once per step). Other devices keep their order.
    """
    shape, first = config.shape(len(devices)), devices[0]
    if first.platform != "tpu":
        return np.asarray(devices).reshape(shape)
    slices = len({getattr(device, "slice_index", None) for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    data, *inner = shape
    if data % slices:
        raise ConfigError(
            f"mesh {config.describe()}: data = {data} does not divide over {slices} slices, and only data may cross "
            f"the network between them; nearest legal mesh.data: {nearest_multiples(data, slices)}"
        )
    return mesh_utils.create_hybrid_device_mesh(
        (data // slices, *inner), (slices, *[1] * len(inner)), devices, allow_split_physical_axes=True
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def check_rows(rows: int, mesh: Mesh, *, micro_batches: int = 1, name: str = "train.batch") -> None:
    """Raise ConfigError unless `rows` rows divide over the batch axes of the mesh, in every micro-batch."""
    shards = _batch_shards(mesh)
    step = shards * micro_batches
    if rows % step:
        parts = f" x {micro_batches} micro-batches = {step}" if micro_batches > 1 else ""
        raise ConfigError(
            f"{name} {rows} does not divide over data x fsdp = {shards} devices{parts}; "
            f"nearest legal {name}: {nearest_multiples(rows, step)}"
        )


def check_sequence(sequence: int, chunk: int, mesh: Mesh) -> None:
    """Raise ConfigError unless rows of `sequence` tokens divide over the seq axis into whole chunks."""
    shards = mesh.shape["seq"]
    if sequence % (shards * chunk):
        raise ConfigError(
            f"data.sequence {sequence} does not divide over seq = {shards} devices in chunks of {chunk}; "
            f"nearest legal data.sequence: {nearest_multiples(sequence, shards * chunk)}"
        )


@functools.cache
def row_slices(mesh: Mesh) -> tuple[tuple[int, ...], int]:
    """(indices, count): which of `count` equal slices of every batch's rows this process feeds, in rising order.

    They need not be neighbours: the wires decide where in the mesh a process's devices stand. Processes whose devices
    hold the same rows, because a tensor or seq axis spans them, feed the same slices.
    """
    here = jax.process_index()
    shards = mesh.devices.reshape(_batch_shards(mesh), -1)
    mine = [index for index, row in enumerate(shards) if any(device.process_index == here for device in row)]
    return tuple(mine), len(shards)


def _batch_shards(mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
