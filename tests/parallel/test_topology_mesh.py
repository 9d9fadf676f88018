"""The mesh on TPU slices that are not here: chips of an axis are neighbours, slices differ in data, rows reach all."""

import itertools

import jax
import numpy as np
import pytest

from ncp_jax.config import ConfigError
from ncp_jax.parallel.mesh import MeshConfig, make_mesh, row_slices
from ncp_jax.plan.chips import devices, has_compiler, parse

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs libtpu")

# Sides of the torus; 0: the direction has no link back from its end to its begin.
WRAPS = {"v5e:4x4": (0, 0, 0), "v5p:2x2x4": (0, 0, 4)}


def distance(one, other, wraps: tuple[int, ...]) -> int:
    """Links between two chips."""
    steps = [abs(a - b) for a, b in zip(one.coords, other.coords, strict=True)]
    return sum(min(step, side - step) if side else step for step, side in zip(steps, wraps, strict=True))


def ring(line, wraps: tuple[int, ...]) -> list[int]:
    """Links from each device of a line to the next, and from the last to the first."""
    return [distance(one, other, wraps) for one, other in itertools.pairwise([*line, line[0]])]


@pytest.mark.parametrize("topology", ["v5e:4x4", "v5p:2x2x4"])
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 16}, {"fsdp": 8, "tensor": 2}, {"data": 2, "fsdp": 8}, {"fsdp": 4, "tensor": 4}]
)
def test_every_device_once_and_axes_along_the_wires(topology, sizes):
    mesh, wraps = make_mesh(MeshConfig(**sizes), devices(parse(topology))), WRAPS[topology]
    assert len({device.id for device in mesh.devices.flat}) == 16
    assert tuple(mesh.shape.values()) == MeshConfig(**sizes).shape(16)
    innermost = "tensor" if "tensor" in sizes else "fsdp"
    lines = np.moveaxis(mesh.devices, mesh.axis_names.index(innermost), -1).reshape(-1, sizes[innermost])
    plain = np.asarray(devices(parse(topology))).reshape(lines.shape)
    links = sum(sum(ring(line, wraps)) for line in lines)
    assert links <= sum(sum(ring(line, wraps)) for line in plain)


def test_sixteen_chips_are_one_ring():
    """In the plain order the ring over a 4x4 slice has jumps; here every chip is next to the one before."""
    found = make_mesh(MeshConfig(fsdp=16), devices(parse("v5e:4x4"))).devices.flatten()
    assert ring(found, WRAPS["v5e:4x4"]) == [1] * 16
    assert max(ring(devices(parse("v5e:4x4")), WRAPS["v5e:4x4"])) > 1


@pytest.mark.parametrize(("topology", "sizes"), [
    ("v5e:4x4", {"fsdp": 16}), ("v5p:2x2x4", {"fsdp": 8, "tensor": 2}), ("v5p:2x2x4", {"data": 2}),
])  # fmt: skip
def test_every_row_is_fed_by_the_host_that_holds_it(topology, sizes, monkeypatch):
    mesh, fed = make_mesh(MeshConfig(**sizes), devices(parse(topology))), {}
    for process in range(4):
        monkeypatch.setattr(jax, "process_index", lambda: process)  # noqa: B023
        row_slices.cache_clear()
        slices, count = row_slices(mesh)
        for index in slices:
            fed.setdefault(index, set()).add(process)
    row_slices.cache_clear()
    rows = mesh.devices.reshape(count, -1)
    assert fed == {index: {device.process_index for device in row} for index, row in enumerate(rows)}


@pytest.mark.parametrize(("data", "slices"), [(2, 2), (4, 2)])
def test_slices_differ_in_data_alone(data, slices):
    mesh = make_mesh(MeshConfig(data=data), devices(parse("v5e:4x4", slices)))
    found = np.vectorize(lambda device: device.slice_index)(mesh.devices).reshape(data, -1)
    assert (found == np.repeat(range(slices), data // slices)[:, None]).all()
    assert len({device.id for device in mesh.devices.flat}) == 32


@pytest.mark.parametrize(("data", "message"), [
    (1, r"mesh data=1 x .*: data = 1 does not divide over 2 slices, and only data may cross .*mesh.data: 2"),
])  # fmt: skip
def test_data_that_does_not_divide_over_the_slices(data, message):
    with pytest.raises(ConfigError, match=message):
        make_mesh(MeshConfig(data=data), devices(parse("v5e:4x4", 2)))
