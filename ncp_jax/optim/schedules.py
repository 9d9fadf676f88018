"""Learning-rate schedule: a multiple of the peak for each step, the same shape for both optimizer groups.

Steps are indices from 0: the update that completes step n uses index n - 1. With w warm-up steps, a cycle that ends
after `end` steps and descends over its last d steps, and final fraction f, the multiple at index s is

    s < w                 (s + 1) / w                                   the first step is not spent at rate 0
    otherwise             t = max(0, s + 1 - (end - d)) / d             0 before the descent, 1 at its last step
        cosine            f + (1 - f) (1 + cos(pi t)) / 2               one cycle, d = end - w
        wsd, wsd_s        1 - (1 - f) t
        constant          1                                             d = 0

so index end - 1 has exactly f. `wsd_s` returns to the peak at once after a milestone, from the decayed weights
(arXiv 2410.05192: WSD-Simplified). Past the end of the schedule the last value stays.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ncp_jax.config import ConfigError, frozen
from ncp_jax.optim.config import OptimConfig, ScheduleConfig, Span


@frozen
class Plan:
    """A schedule in whole steps."""

    kind: str
    warmup: int
    ends: tuple[int, ...]  # steps completed when each cycle ends; the last is the schedule's length
    decays: tuple[int, ...]  # steps of descent before each end
    final_fraction: float
    notes: tuple[str, ...] = ()  # one sentence per rounding, for the reader of a dry run


def plan(config: ScheduleConfig, total_steps: int, tokens_per_step: int) -> Plan:
    """Resolve spans into steps. Fractions and tokens are rounded to the nearest step (halves up); notes say where.

    Raises ConfigError where warm-up and descents do not fit, with the arithmetic.
    """
    if total_steps < 1 or tokens_per_step < 1:
        raise ConfigError(
            f"a schedule of {total_steps} steps of {tokens_per_step} tokens is empty; give 1 or more of both"
        )
    notes: list[str] = []

    def steps(name: str, span: Span, whole: int) -> int:
        exact = span * whole if 0 < span < 1 else span / (tokens_per_step if config.unit == "tokens" else 1)
        rounded = math.floor(exact + 0.5)
        if rounded != exact:
            what = f"{span} of {whole} steps" if 0 < span < 1 else f"{span} tokens / {tokens_per_step} tokens per step"
            notes.append(f"schedule.{name} {what} = {exact:.2f} steps, rounded to {rounded}")
        return rounded

    total = steps("horizon", config.horizon, total_steps) if config.horizon else total_steps
    warmup = steps("warmup", config.warmup, total)
    ends = (*(steps("milestones", value, total) for value in config.milestones), total)
    _check_ends(ends, total)
    lengths = [end - start for start, end in itertools.pairwise((0, *ends))]
    if config.kind == "cosine":
        decays = [total - warmup]
    elif config.kind == "constant":
        decays = [0]
    else:  # a descent that rounds to nothing would never reach its end value
        decays = [max(1, steps("decay", config.decay, length)) for length in lengths]
    _check_fit(config.kind, warmup, lengths, decays)
    return Plan(config.kind, warmup, ends, tuple(decays), config.final_fraction, tuple(notes))


def multiple(schedule: Plan, step: Any) -> Any:
    """Multiple of the peak at index `step`: a float for a Python int, an array for an array (traced ones too)."""
    if not isinstance(step, jax.Array):
        return float(_multiple(schedule, int(step), np))
    return _multiple(schedule, step, jnp)


def learning_rate(schedule: Plan, peak: float) -> Callable[[Any], Any]:
    """Optax schedule of one group: index -> peak x multiple."""
    return lambda step: peak * multiple(schedule, step)


def learning_rates(config: OptimConfig, total_steps: int, tokens_per_step: int, step: Any) -> dict[str, Any]:
    """Rates of both groups at index `step`, under the names of metrics.jsonl. Muon's only where Muon is in use."""
    factor = multiple(plan(config.schedule, total_steps, tokens_per_step), step)
    rates = {"learning_rate/adamw": config.adam_learning_rate * factor}
    if config.optimizer == "muon":
        rates["learning_rate/muon"] = config.muon_learning_rate * factor
    return rates


def _multiple(schedule: Plan, step: Any, xp: Any) -> Any:
    last = schedule.ends[-1] - 1
    step = xp.clip(step, 0, last)
    ends, decays = xp.asarray(schedule.ends), xp.asarray(schedule.decays)
    cycle = xp.searchsorted(ends, step, side="right")
    end, decay = ends[cycle], decays[cycle]
    # Integers up to here: a float32 index would lose single steps beyond 2^24.
    t = xp.maximum(0, step + 1 - (end - decay)) / xp.maximum(decay, 1)
    depth = (1 - xp.cos(xp.pi * t)) / 2 if schedule.kind == "cosine" else t
    descent = 1 - (1 - schedule.final_fraction) * depth
    return xp.where(step < schedule.warmup, (step + 1) / max(schedule.warmup, 1), descent)


def _check_ends(ends: tuple[int, ...], total: int) -> None:
    if any(later <= earlier for earlier, later in itertools.pairwise((0, *ends))):
        raise ConfigError(
            f"schedule.milestones end cycles after steps {list(ends[:-1])}, not increasing between 1 and {total - 1} "
            f"for a schedule of {total} steps; drop the milestones beyond it, or use fractions such as 0.25"
        )


def _check_fit(kind: str, warmup: int, lengths: list[int], decays: list[int]) -> None:
    if warmup >= lengths[0] and kind != "constant":
        raise ConfigError(
            f"schedule.warmup takes {warmup} of the first {lengths[0]} steps and leaves none to descend; "
            f"use at most {lengths[0] - 1}, or a fraction such as 0.05"
        )
    for cycle, (length, decay) in enumerate(zip(lengths, decays, strict=True)):
        room = length - (warmup if cycle == 0 else 0)
        if decay > room:
            raise ConfigError(
                f"schedule.decay takes {decay} steps of cycle {cycle}, which has {length} steps"
                f"{f', {warmup} of them warm-up' if cycle == 0 else ''}: {room} are free; use at most {room}"
            )
