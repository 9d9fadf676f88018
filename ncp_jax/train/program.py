"""The program of a run on a mesh: leaf table, optimizer, abstract state, jitted steps. Allocates nothing.

The trainer runs it; a plan compiles it for devices that need not exist.
"""

from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from ncp_jax.optim.build import build
from ncp_jax.optim.leaves import Leaf, leaf_table
from ncp_jax.parallel.mesh import check_rows, check_sequence, replicated
from ncp_jax.train.run_config import RunConfig
from ncp_jax.train.step import (
    Guard,
    TrainState,
    abstract_params,
    abstract_state,
    make_eval_step,
    make_train_step,
    placed,
)
from ncp_jax.train.task import Params, Task


class Program(NamedTuple):
    """What a mesh executes. To be traced and called under `jax.set_mesh(mesh)` and the activation rules."""

    mesh: Mesh
    leaves: list[Leaf]
    tx: optax.GradientTransformation
    like: tuple[TrainState, Params]  # state and frozen parameters as ShapeDtypeStructs with their shardings
    train_step: Any  # (state, frozen, batch, diagnose=False) -> (state, metrics); donates the state
    eval_step: Any


def make_program(config: RunConfig, task: Task, mesh: Mesh) -> Program:
    """The program of `config` on `mesh`. Raises ConfigError for rows or tokens that do not divide over it."""
    check_rows(config.train.batch, mesh, micro_batches=config.train.micro_batches)
    check_rows(config.evaluation_batch, mesh, name="evaluation.batch")
    check_sequence(config.data.sequence, task.chunk, mesh)
    params = placed(abstract_params(task)[0], mesh)  # with shardings: Muon shares its matrices out by them
    leaves = leaf_table(params, task.leaf_rules, config.optim)
    tx = build(config.optim, leaves, params, config.total_steps, config.tokens_per_step)
    like = abstract_state(task, tx, mesh)
    guard = Guard(config.train.on_bad_step == "skip", config.train.gradient_ceiling)
    step = make_train_step(task, tx, config.train.micro_batches, guard, leaves)
    same, whole = jax.tree.map(lambda a: a.sharding, like[0]), replicated(mesh)
    return Program(
        mesh, leaves, tx, like,
        jax.jit(step, donate_argnums=0, static_argnames="diagnose", out_shardings=(same, whole)),
        jax.jit(make_eval_step(task), out_shardings=whole),
    )  # fmt: skip
