"""The search for a layout: rows per chip x remat x mesh, pruned by the estimate, the best few compiled."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ncp_jax.config import ConfigError
from ncp_jax.parallel.mesh import MeshConfig
from ncp_jax.plan.chips import Slice
from ncp_jax.plan.estimate import Estimate, estimate
from ncp_jax.train.run_config import RunConfig

MOST_COMPILED = 5
ROWS = (1, 2, 4, 8, 16)  # per chip
TENSOR = (1, 2, 4)
REMAT = ("none", "dots", "block")
# The estimate may be a third too high: a layout is dropped only where it exceeds the chip by more.
SLACK = 1.33


class Candidate(NamedTuple):
    """A layout and what is estimated of it."""

    config: RunConfig
    estimate: Estimate

    @property
    def tokens_per_second(self) -> float:
        return self.config.tokens_per_step / self.estimate.step

    def describe(self) -> str:
        remat = getattr(getattr(self.config.model, "backbone", None), "remat", "none")
        return f"{self.config.train.batch} rows, {self.config.mesh.describe()}, remat {remat}"


def candidates(config: RunConfig, where: Slice) -> list[Candidate]:
    """Layouts that may fit, fastest first by the estimate; those that cannot divide are left out."""
    found = []
    for layout in _layouts(config, where):
        try:
            guess = estimate(layout, where)
        except ConfigError:
            continue
        if guess.peak < SLACK * where.chip.hbm:
            found.append(Candidate(layout, guess))
    return sorted(found, key=lambda c: (-c.tokens_per_second, c.estimate.peak))[: 4 * MOST_COMPILED]


def pareto(
    points: list[tuple[float, float]], better: Callable[[float, float], bool] = lambda a, b: a >= b
) -> list[int]:
    """Indices of (speed, memory) points that no other beats in both: faster and smaller."""
    keep = []
    for i, (speed, memory) in enumerate(points):
        beaten = any(
            better(s, speed) and m <= memory and (s, m) != (speed, memory) for j, (s, m) in enumerate(points) if j != i
        )
        if not beaten:
            keep.append(i)
    return keep


def _layouts(config: RunConfig, where: Slice) -> Iterator[RunConfig]:
    backbone = getattr(config.model, "backbone", None)
    remats = REMAT if hasattr(backbone, "remat") else (None,)
    for tensor, rows, remat in itertools.product(TENSOR, ROWS, remats):
        if where.chips % (tensor * where.slices):
            continue
        shards = where.chips // tensor
        model = config.model
        if remat is not None:
            model = dataclasses.replace(model, backbone=dataclasses.replace(backbone, remat=remat))  # type: ignore[arg-type,type-var]
        mesh = MeshConfig(data=where.slices, fsdp=-1, tensor=tensor)
        train = dataclasses.replace(config.train, batch=rows * shards, micro_batches=1)
        evaluation = dataclasses.replace(config.evaluation, batch=rows * shards)
        yield dataclasses.replace(config, model=model, mesh=mesh, train=train, evaluation=evaluation)
