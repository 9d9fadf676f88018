"""The train step to be planned: a config, a slice, and the program of one on the other. Allocates nothing."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from ncp_jax.parallel.mesh import AXES, make_mesh
from ncp_jax.plan.chips import Slice, devices
from ncp_jax.train.families import build_task
from ncp_jax.train.program import Program, make_program
from ncp_jax.train.run_config import RunConfig
from ncp_jax.train.task import Task


class Step(NamedTuple):
    """Built once, estimated and compiled from."""

    config: RunConfig
    where: Slice
    task: Task
    program: Program

    @property
    def flops_per_chip(self) -> float:
        """Executed FLOPs per chip and step: counted ones, and what remat computes again."""
        counted = self.task.flops_per_token * self.config.tokens_per_step / self.where.chips
        return counted * _recomputed(self.config)

    def arguments(self) -> list[tuple[str, int]]:
        """State and frozen parameters: (path, bytes per chip), largest first."""
        found = [
            (jax.tree_util.keystr(path, simple=True, separator="/"), bytes_per_chip(leaf))
            for path, leaf in jax.tree_util.tree_flatten_with_path(self.program.like)[0]
        ]
        return sorted(found, key=lambda pair: -pair[1])


def step_on(config: RunConfig, where: Slice, compiler: bool) -> Step:
    """The train step of `config` on a slice, to be compiled or, without the compiler, to be estimated alone.

    Raises ConfigError where the compiler is wanted and absent, or for sizes that do not divide over the mesh.
    """
    mesh = make_mesh(config.mesh, devices(where)) if compiler else AbstractMesh(config.mesh.shape(where.chips), AXES)
    task = build_task(config.model, config.data.sequence, jnp.bfloat16, platform="tpu")
    return Step(config, where, task, make_program(config, task, mesh))  # type: ignore[arg-type]


def bytes_per_chip(leaf: jax.ShapeDtypeStruct) -> int:
    """Of an array with a sharding."""
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _recomputed(config: RunConfig) -> float:
    """Executed over counted FLOPs: a block that keeps nothing runs its forward pass twice (4/3)."""
    backbone = getattr(config.model, "backbone", None)
    return 4 / 3 if getattr(backbone, "remat", "none") == "block" else 1.0
