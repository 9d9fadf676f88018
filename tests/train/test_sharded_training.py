"""Sharding: the same training on any mesh, and no array gathered whole by the partitioner for want of a better idea."""

import contextlib
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_runs import run_config

from ncp_jax.checkpoint.leaves import flatten
from ncp_jax.parallel.mesh import AXES, MeshConfig, make_mesh
from ncp_jax.parallel.rules import activation_rules
from ncp_jax.train.evaluation import to_device, with_bytes
from ncp_jax.train.families import build_task
from ncp_jax.train.loop import Trainer
from ncp_jax.train.step import init_state

STEPS, TOLERANCE = 20, 1e-5
COMPLAINT = "Involuntary full rematerialization"  # XLA's, on stderr, where it can only gather an array whole
# data, fsdp, tensor, seq
CASES = [
    ("ncp", (2, 2, 2, 1)), ("ncp", (1, 2, 1, 2)),
    ("olmo3", (2, 1, 1, 1)), ("olmo3", (1, 1, 4, 1)), ("olmo3", (1, 8, 1, 1)), ("olmo3", (2, 2, 2, 1)),
    ("olmo3", (1, 2, 1, 4)),
]  # fmt: skip
# Without clipping the first moment after one step is the gradient, times 1 - b1 for AdamW.
SETTINGS = {
    "ncp": ("optim.optimizer=adamw", "optim.clip=null", "optim.adam_learning_rate=0.003"),  # a code flips at 0.01
    "olmo3": ("optim.clip=null",),
}


class Curve(NamedTuple):
    """The loss of each step, and the first step's gradient by parameter."""

    losses: list[float]
    gradients: dict[str, np.ndarray]


@pytest.mark.parametrize(("model", "mesh"), CASES, ids=str)
def test_a_mesh_changes_nothing(model, mesh, corpus, capfd):
    alone, ours = single_device(model, str(corpus)), train_on(model, mesh, str(corpus))
    assert COMPLAINT not in capfd.readouterr().err
    np.testing.assert_allclose(ours.losses, alone.losses, rtol=TOLERANCE)
    assert alone.losses[-1] < alone.losses[0] - 1
    assert len(alone.gradients) >= {"ncp": 50, "olmo3": 14}[model]
    rounding = 1e-7 * np.linalg.norm([np.linalg.norm(value) for value in alone.gradients.values()])
    for name, expected in alone.gradients.items():
        error = np.linalg.norm(ours.gradients[name] - expected)
        assert error <= TOLERANCE * np.linalg.norm(expected) + rounding, name


@functools.cache
def single_device(model: str, corpus: str) -> Curve:
    return train_on(model, (1, 1, 1, 1), corpus)


def train_on(model: str, mesh: tuple[int, ...], corpus: str) -> Curve:
    trainer = make_trainer(model, mesh, corpus)
    shardings = jax.tree.map(lambda a: a.sharding, trainer.like[0])
    losses, gradients = [], {}
    with inside(trainer) as batches:
        state = jax.device_put(initial_state(model, corpus), shardings)
        for step in range(STEPS):
            batch = to_device(with_bytes(next(batches), trainer.tokens.token_bytes), trainer.mesh)
            state, metrics = trainer.train_step(state, None, batch)
            losses.append(float(metrics["loss"]))
            if step == 0:
                moments = {name: np.asarray(value) for name, value in flatten(state.opt_state).items()}
                gradients = {name: value for name, value in moments.items() if "/mu/" in name or "/momentum/" in name}
    return Curve(losses, gradients)


@functools.cache
def initial_state(model: str, corpus: str) -> Any:
    """Host arrays, made once: their own equality on all meshes is test_initial_values'."""
    trainer = make_trainer(model, (1, 1, 1, 1), corpus)
    with inside(trainer):
        return jax.device_get(init_state(trainer.task, trainer.tx, 0, trainer.like)[0])


def test_xla_complains_where_it_should(capfd):
    """A control for the silence above: this exchange of axes is one that XLA cannot do in pieces."""
    mesh = make_mesh(MeshConfig(data=2, tensor=2))
    before, after = NamedSharding(mesh, P("tensor")), NamedSharding(mesh, P(None, ("fsdp", "tensor")))
    moved = jax.jit(lambda x: jax.lax.with_sharding_constraint(2 * x, after), in_shardings=before)
    moved.lower(jax.ShapeDtypeStruct((32, 32), "float32")).compile()
    assert COMPLAINT in capfd.readouterr().err


def test_initial_values_do_not_depend_on_the_mesh(corpus):
    trainer = make_trainer("olmo3", (2, 2, 2, 1), str(corpus))
    with inside(trainer):
        state = init_state(trainer.task, trainer.tx, 0, trainer.like)[0]
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(initial_state("olmo3", str(corpus))), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs)


def make_trainer(model: str, mesh: tuple[int, ...], corpus: str) -> Trainer:
    sizes = [f"mesh.{axis}={size}" for axis, size in zip(AXES, mesh, strict=True)]
    config = run_config(corpus, "unused", model, *sizes, *SETTINGS[model])
    task = build_task(config.model, config.data.sequence)
    return Trainer(config, task, print, jax.devices()[: int(np.prod(mesh))])


@contextlib.contextmanager
def inside(trainer: Trainer):
    """What Trainer.run sets up around its loop. Nothing is read from the compilation cache, so that XLA speaks."""
    jax.config.update("jax_enable_compilation_cache", False)
    batches = contextlib.closing(trainer._batches(0))
    with jax.set_mesh(trainer.mesh), nn.logical_axis_rules(activation_rules()), batches as rows:
        yield rows
    jax.config.update("jax_enable_compilation_cache", True)
