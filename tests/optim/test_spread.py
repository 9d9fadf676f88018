"""Layer-parallel Newton–Schulz against the leaf rule, on meshes of one to eight devices, and what the program moves."""

import functools
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ncp_jax.optim.build import build
from ncp_jax.optim.config import OptimConfig, ScheduleConfig
from ncp_jax.optim.leaves import TRANSFORMER_RULES, LeafError, leaf_table
from ncp_jax.optim.muon import Matrix, leaf_by_leaf, newton_schulz
from ncp_jax.optim.spread import copy_axes, layer_parallel, layout

AXES = ("data", "fsdp", "tensor", "seq")
D, F, L = 48, 96, 3
STEPS = 2  # what moves does not depend on it
RULE = partial(newton_schulz, steps=STEPS)
# Two towers: square leaves of two orientations, wide and tall ones.
LEAVES: dict[str, tuple[tuple[int, ...], P]] = {
    "encoder/wq": ((L, D, 4, 12), P(None, "fsdp", "tensor")),
    "encoder/wk": ((L, D, 2, 12), P(None, "fsdp", "tensor")),  # two key heads for four query heads: another stack
    "encoder/wo": ((L, 4, 12, D), P(None, "tensor", None, "fsdp")),
    "encoder/w_gate": ((L, D, F), P(None, "fsdp", "tensor")),
    "encoder/w_down": ((L, F, D), P(None, "tensor", "fsdp")),
    "decoder/wq": ((2, D, 4, 12), P(None, "fsdp", "tensor")),
    "decoder/w_up": ((2, D, F), P(None, "fsdp", "tensor")),
}
MESHES = [(1, 1, 1, 1), (1, 2, 1, 1), (1, 3, 1, 1), (4, 1, 1, 1), (1, 5, 1, 1), (1, 3, 2, 1), (1, 8, 1, 1),
          (2, 4, 1, 1), (2, 2, 2, 1), (1, 2, 2, 2)]  # fmt: skip
MATRICES = {
    name: {
        "wo": Matrix((1, 2), (3,), (0,)), "wq": Matrix((1,), (2, 3), (0,)), "wk": Matrix((1,), (2, 3), (0,)),
    }.get(name.split("/")[1], Matrix((1,), (2,), (0,)))
    for name in LEAVES
}  # fmt: skip
GRADIENTS = {
    name: np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    for seed, (name, (shape, _)) in enumerate(LEAVES.items())
}
GRADIENTS["encoder/wq"][1] = 0


def mesh_of(shape):
    devices = jax.devices()[: math.prod(shape)]
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * 4)


def placed(mesh):
    """Shardings, as parallel/rules.py would give them: an axis that does not divide stays whole."""
    found = {}
    for name, (shape, spec) in LEAVES.items():
        fits = [
            axis if axis and size % mesh.shape[axis] == 0 else None for size, axis in zip(shape, spec, strict=False)
        ]
        found[name] = NamedSharding(mesh, P(*fits))
    return found


def compiled(function, mesh, shardings, arrays=GRADIENTS):
    abstract = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[n]) for n, x in arrays.items()}
    with jax.set_mesh(mesh):
        return jax.jit(function, out_shardings=shardings).lower(abstract).compile()


def moved(program):
    """Numbers that come out of each kind of collective on one device."""
    found: dict[str, int] = {}
    kinds = "all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter"
    for line in program.as_text().splitlines():
        match = re.search(rf"= (.*?) ({kinds})(?:-start)?\(", line)
        if match:
            sizes = [math.prod(map(int, s.split(","))) for s in re.findall(r"f(?:32|64)\[([\d,]+)\]", match[1])]
            found[match[2]] = found.get(match[2], 0) + sum(sizes)
    return found


def assert_close(ours, expected, tolerance):
    for name, value in expected.items():
        assert np.linalg.norm(np.asarray(ours[name]) - value) <= tolerance * np.linalg.norm(value), name


@functools.cache
def wide_precision():
    """Gradients in float64, where rounding cannot hide a wrong move, and their directions."""
    gradients = {name: x.astype(np.float64) for name, x in GRADIENTS.items()}
    return gradients, jax.tree.map(np.asarray, jax.jit(leaf_by_leaf(MATRICES, RULE))(gradients))


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_values_and_traffic(shape):
    mesh = mesh_of(shape)
    shardings = placed(mesh)
    with jax.enable_x64(True):
        gradients, expected = wide_precision()
        program = compiled(layer_parallel(MATRICES, shardings, STEPS), mesh, shardings, gradients)
        ours = program(jax.device_put(gradients, shardings))
    assert_close(ours, expected, 1e-14)
    assert not np.asarray(ours["encoder/wq"])[1].any()
    assert {name: x.sharding.spec for name, x in ours.items()} == {n: s.spec for n, s in shardings.items()}
    # A stack travels in and out once per split side; what devices hold copies of is gathered once. Nothing else moves.
    sizes = mesh.shape
    sides = (sizes["fsdp"] > 1 and D % sizes["fsdp"] == 0) + (sizes["tensor"] > 1)
    copied = sizes["data"] * sizes["seq"] > 1 or D % sizes["fsdp"] > 0
    traffic = moved(program)
    assert traffic.keys() == {kind for kind, holds in (("all-to-all", sides), ("all-gather", copied)) if holds}
    # 8 matrices of 48 x 48, 3 of 24 x 48 and 8 of 48 x 96, in stacks padded by fewer matrices than there are devices.
    most = (7 + mesh.size) * (D * D + D * F) + (2 + mesh.size) * D * D // 2
    assert traffic.get("all-to-all", 0) <= 2 * sides * most / (sizes["fsdp"] * sizes["tensor"])


def test_bfloat16_is_the_leaf_rule_to_its_own_rounding():
    mesh = mesh_of((1, 2, 2, 1))
    shardings = placed(mesh)
    rule = leaf_by_leaf(MATRICES, partial(RULE, dtype=jnp.bfloat16))
    program = compiled(layer_parallel(MATRICES, shardings, STEPS, jnp.bfloat16), mesh, shardings)
    ours = program(jax.device_put(GRADIENTS, shardings))
    assert {x.dtype.name for x in ours.values()} == {"float32"}
    assert_close(ours, jax.jit(rule)(GRADIENTS), 2e-2)


@pytest.mark.parametrize(
    ("shape", "spec", "matrix"),
    [
        ((3, 16, 4, 8), P(None, "fsdp", "tensor"), Matrix((1,), (3,), (0, 2))),  # every head a matrix: heads are split
        ((16, 8), P("fsdp", "tensor"), Matrix((0,), (1,))),  # one matrix for eight devices
        ((5, 16, 2, 8), P(None, None, None, "fsdp"), Matrix((1,), (2, 3), (0,))),  # cut along a side's second axis
        ((2, 8, 16), P("tensor", ("data", "fsdp")), Matrix((1,), (2,), (0,))),  # segments split, a side over two axes
        ((2, 8, 8), P(None, "tensor", ("data", "fsdp")), Matrix((1,), (2,), (0,))),
    ],
    ids=str,
)
def test_odd_leaves(shape, spec, matrix):
    mesh = mesh_of((2, 2, 2, 1))
    x = {"x": np.random.default_rng(1).normal(size=shape).astype(np.float32)}
    shardings = {"x": NamedSharding(mesh, spec)}
    program = compiled(layer_parallel({"x": matrix}, shardings, STEPS), mesh, shardings, x)
    expected = jax.jit(leaf_by_leaf({"x": matrix}, RULE))(x)
    assert_close(program(jax.device_put(x, shardings)), jax.tree.map(np.asarray, expected), 1e-6)


def test_leaves_of_one_shape_share_a_stack():
    mesh = mesh_of((1, 4, 2, 1))
    keys = {name: layout(LEAVES[name][0], MATRICES[name], s).key for name, s in placed(mesh).items()}
    squares, wide = {"encoder/wq", "encoder/wo", "decoder/wq"}, {"encoder/w_gate", "encoder/w_down", "decoder/w_up"}
    for stack in (squares, wide):
        assert len({keys[name] for name in stack}) == 1
    assert len(set(keys.values())) == 3


@pytest.mark.parametrize(
    ("count", "used", "axes"),
    [
        (160, ("fsdp",), ("seq", "data")),
        (16, ("fsdp",), ("seq",)),  # one each on 16 devices; 32 would still leave one
        (8, ("fsdp",), ()),  # one each already
        (8, (), ("seq", "fsdp")),
        (1, (), ()),
    ],
)
def test_copies_share_the_work_where_that_helps(count, used, axes):
    mesh = jax.sharding.AbstractMesh((2, 8, 1, 2), AXES, axis_types=(AxisType.Auto,) * 4)
    assert copy_axes(count, mesh, used) == axes


def optimizer_step(mesh, newton_schulz_layout, abstract=True):
    """(parameters after one step of the whole optimizer, what it moved), with parameters that know their shardings."""
    config = OptimConfig(
        muon_learning_rate=1.0, muon_weight_decay=0.0, newton_schulz_layout=newton_schulz_layout,
        newton_schulz_steps=STEPS, schedule=ScheduleConfig(kind="constant", warmup=0),
    )  # fmt: skip
    shardings = placed(mesh)
    known = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[n]) for n, x in GRADIENTS.items()}
    tx = build(config, leaf_table(known, TRANSFORMER_RULES, config), known if abstract else GRADIENTS, 10, 1)

    def step(gradients):
        params = jax.tree.map(jnp.zeros_like, gradients)
        return optax.apply_updates(params, tx.update(gradients, tx.init(params), params)[0])

    program = compiled(step, mesh, shardings)
    return jax.tree.map(np.asarray, program(jax.device_put(GRADIENTS, shardings))), moved(program)


def test_the_whole_optimizer_spreads_by_itself_where_there_are_devices():
    mesh = mesh_of((1, 8, 1, 1))
    (ours, traffic), (expected, gathered) = optimizer_step(mesh, "auto"), optimizer_step(mesh, "leaf")
    assert_close(ours, expected, 1e-6)
    assert traffic.keys() == {"all-to-all", "all-reduce"}  # the gradient's norm
    assert traffic["all-reduce"] < 100
    assert gathered["all-gather"] > 5 * traffic["all-to-all"]


def test_one_device_keeps_the_leaf_rule():
    mesh = mesh_of((1, 1, 1, 1))
    jax.tree.map(np.testing.assert_array_equal, optimizer_step(mesh, "auto")[0], optimizer_step(mesh, "leaf")[0])
    assert_close(optimizer_step(mesh, "layers")[0], optimizer_step(mesh, "leaf")[0], 1e-6)


def test_unknown_shardings():
    mesh = mesh_of((1, 8, 1, 1))
    with pytest.raises(LeafError, match="newton_schulz_layout 'layers' needs to know"):
        optimizer_step(mesh, "layers", abstract=False)
    assert "all-gather" in optimizer_step(mesh, "auto", abstract=False)[1]
