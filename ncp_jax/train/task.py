"""A Task: all that the trainer knows of a model. One loop trains every family through this seam.

Shapes: B batch, T tokens. A batch is a dict of arrays [B, T]: `tokens`, `targets` int32, `real`, `scored` bool; packed
documents add `segments` and `positions` int32; `bytes` int32 [B] counts the text bytes of the scored targets.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
from jax import Array

from ncp_jax.optim.leaves import TRANSFORMER_RULES, LeafRule

Params = Any
Batch = Mapping[str, Array]
Sums = dict[str, Array]


class FrozenSource(Protocol):
    """Where frozen parameters come from."""

    def check(self) -> None:
        """Raise ConfigError, before anything is computed, if they cannot be had."""

    def load(self, like: Params, run: Path) -> Params:
        """The parameters, on the shardings of `like`, for the run in directory `run`."""


@dataclass(frozen=True)
class Task:
    """A model, its loss, its FLOPs and its metrics.

    init(rng) -> (trainable, frozen): parameters, boxed with logical axis names. `frozen` is sharded like them, never
        donated, never seen by the optimizer; None if there is nothing frozen.
    weights(batch) -> what each term's sum is divided by; depends on masks alone, so that it can be summed over the
        whole global batch before the first micro-batch.
    loss(trainable, frozen, batch, rng) -> the sum of each term over the batch.
    held_out(trainable, frozen, batch) -> (sums, weights) of an evaluation: no dropout, fixed noise; it may have more
        terms than training. A term named with a slash, such as `tokens/mean`, is logged as it is, others as a loss.
        None: loss and weights, with one key.
    coefficients: the factor of each term in the objective, sum_i coefficient_i * sum_i / weight_i.
    diagnose(trainable, frozen, batch) -> named statistics, computed only on diagnostic steps.
    forward(trainable, frozen, tokens_BT) -> logits [B, T, V], for sampling.
    source: where the frozen parameters of a new run come from; None: from `init`.
    reads_ends: packed documents hold their end-of-text token as an input; otherwise it is a target alone.
    """

    name: str
    chunk: int  # rows are a multiple of this many tokens
    vocab: int  # ids of the input
    coefficients: Mapping[str, float]
    init: Callable[[Array], tuple[Params, Params]]
    weights: Callable[[Batch], Sums]
    loss: Callable[[Params, Params, Batch, Array], Sums]
    forward: Callable[[Params, Params, Array], Array] | None = None
    diagnose: Callable[[Params, Params, Batch], dict[str, Array]] | None = None
    held_out: Callable[[Params, Params, Batch], tuple[Sums, Sums]] | None = None
    source: "FrozenSource | None" = None
    reads_ends: bool = False
    parameters: Mapping[str, int] = field(default_factory=dict)  # trainable ones by group, from the config
    flops_per_token: float = 0.0  # of a training step, forward and backward
    flops_convention: str = ""
    leaf_rules: tuple[LeafRule, ...] = TRANSFORMER_RULES
    notes: Mapping[str, str] = field(default_factory=dict)  # shown by --dry-run


def objective(task: Task, sums: Sums, weights: Sums) -> Array:
    """The scalar to minimise. A term without any position contributes 0."""
    parts = [factor * mean(sums[term], weights[term]) for term, factor in task.coefficients.items()]
    return sum(parts[1:], parts[0])


def criterion(task: Task) -> str:
    """The figure of an evaluation that says which checkpoint is the best: the lowest."""
    return "bits_per_byte" if "ntp" in task.coefficients else "loss"


def mean(total: Array, weight: Array) -> Array:
    """total / weight, 0 where the weight is 0."""
    return jax.numpy.where(weight > 0, total / jax.numpy.maximum(weight, 1), 0)
