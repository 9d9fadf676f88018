"""The mesh: sizes, what divides over it, and which rows each process feeds."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from ncp_jax.config import ConfigError
from ncp_jax.parallel.mesh import AXES, MeshConfig, arrange, check_rows, check_sequence, make_mesh, row_slices


@pytest.mark.parametrize(
    ("sizes", "devices", "shape"),
    [
        ({}, 8, (1, 8, 1, 1)),
        ({}, 1, (1, 1, 1, 1)),
        ({"data": 2, "tensor": 2}, 8, (2, 2, 2, 1)),
        ({"data": -1, "fsdp": 2}, 8, (4, 2, 1, 1)),
        ({"fsdp": 1, "seq": 2}, 2, (1, 1, 1, 2)),
    ],
)
def test_sizes(sizes, devices, shape):
    assert MeshConfig(**sizes).shape(devices) == shape
    assert make_mesh(MeshConfig(**sizes), jax.devices()[:devices]).devices.shape == shape


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 3}, r"the fixed axes make 3; it would fit 6 or 9 devices, or set one axis to -1"),
        ({"data": 16, "fsdp": 1}, r"does not multiply to 8 devices: the fixed axes make 16; it would fit 16 devices"),
        ({"fsdp": 4}, r"the fixed axes make 4; it would fit 8 or 12 devices"),
    ],
)
def test_sizes_that_do_not_multiply(sizes, message):
    with pytest.raises(ConfigError, match=message):
        MeshConfig(**sizes).shape(8)


@pytest.mark.parametrize("sizes", [{"data": 0}, {"tensor": -2}, {"data": -1, "fsdp": -1}])
def test_sizes_that_mean_nothing(sizes):
    with pytest.raises(ConfigError, match=r"sizes are positive, and at most one may be -1"):
        MeshConfig(**sizes)


def test_rows_and_tokens_must_divide():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, seq=2))
    check_rows(8, mesh, micro_batches=2)
    check_sequence(16, 4, mesh)
    with pytest.raises(ConfigError, match=r"train.batch 6 .* = 4 devices; nearest legal train.batch: 4 or 8"):
        check_rows(6, mesh)
    with pytest.raises(ConfigError, match=r"train.batch 12 .* = 4 devices x 2 micro-batches = 8; .*: 8 or 16"):
        check_rows(12, mesh, micro_batches=2)
    with pytest.raises(ConfigError, match=r"data.sequence 12 .* seq = 2 devices in chunks of 4; .*: 8 or 16"):
        check_sequence(12, 4, mesh)


@dataclass(frozen=True)
class Wired:
    """A device of a slice that is not there."""

    id: int
    process_index: int
    platform: str = "cpu"


def test_each_process_feeds_the_rows_of_its_devices(monkeypatch):
    """Two rows of devices per process, in whatever order; with a tensor axis across processes, both feed the same."""
    order = [0, 2, 1, 0, 2, 1]
    mesh = Mesh(np.array([Wired(index, process) for index, process in enumerate(order)]).reshape(1, 6, 1, 1), AXES)
    assert fed(mesh, 3, monkeypatch) == [(0, 3), (2, 5), (1, 4)]
    mesh = Mesh(np.array([Wired(index, process) for index, process in enumerate(order)]).reshape(1, 3, 2, 1), AXES)
    assert fed(mesh, 3, monkeypatch) == [(0, 1), (1, 2), (0, 2)]


def fed(mesh: Mesh, processes: int, monkeypatch) -> list[tuple[int, ...]]:
    found = []
    for process in range(processes):
        monkeypatch.setattr(jax, "process_index", lambda: process)  # noqa: B023
        row_slices.cache_clear()
        slices, count = row_slices(mesh)
        assert count == mesh.shape["data"] * mesh.shape["fsdp"]
        found.append(slices)
    row_slices.cache_clear()
    return found


def test_one_process_feeds_everything():
    assert row_slices(make_mesh(MeshConfig(data=2, tensor=2))) == ((0, 1, 2, 3), 4)


def test_devices_that_are_no_tpus_keep_their_order():
    assert arrange(MeshConfig(fsdp=4, tensor=2), jax.devices()).flatten().tolist() == jax.devices()
