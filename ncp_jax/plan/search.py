"""The search for a layout: rows per chip x remat x mesh, pruned by the estimate, the best few compiled."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from ncp_jax.config import ConfigError
from ncp_jax.parallel.mesh import MeshConfig
from ncp_jax.plan.chips import Slice
from ncp_jax.plan.estimate import Estimate, estimate
from ncp_jax.plan.step import Step, step_on
from ncp_jax.train.run_config import RunConfig

MOST_COMPILED = 5
ROWS = (1, 2, 4, 8, 16)  # per chip
TENSOR = (1, 2, 4)
REMAT = ("none", "dots", "block")
# The estimate may be a third too high: a layout is dropped only where it exceeds the chip by more.
SLACK = 1.33


class Candidate(NamedTuple):
    """A layout and what is estimated of it."""

    step: Step
    estimate: Estimate

    @property
    def tokens_per_second(self) -> float:
        return self.step.config.tokens_per_step / self.estimate.step

    def describe(self) -> str:
        config = self.step.config
        remat = getattr(getattr(config.model, "backbone", None), "remat", "none")
        return f"{config.train.batch} rows, {config.mesh.describe()}, remat {remat}"


def candidates(config: RunConfig, where: Slice) -> list[Candidate]:
    """The layouts to look at: those that may fit, fastest first by the estimate. What cannot divide is left out."""
    found = []
    for layout in _layouts(config, where):
        try:
            step = step_on(layout, where, compiler=False)
        except ConfigError:
            continue
        guess = estimate(step)
        if guess.peak < SLACK * where.chip.hbm:
            found.append(Candidate(step, guess))
    return sorted(found, key=lambda c: (-c.tokens_per_second, c.estimate.peak))[:MOST_COMPILED]


def pareto(points: list[tuple[float, float]]) -> list[int]:
    """Indices of (speed, memory) points that no other beats in both: faster and smaller."""

    def beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
        return a != b and a[0] >= b[0] and a[1] <= b[1]

    return [index for index, point in enumerate(points) if not any(beats(other, point) for other in points)]


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
