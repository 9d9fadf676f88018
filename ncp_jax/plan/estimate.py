"""The analytic estimate of a train step: no compiler, from shapes alone. Memory within a third, by our compiles.

Shapes: T tokens per row, D width, F feed-forward width, V vocabulary. bf16 activations, f32 parameters and state.
"""

import math
from typing import Any, NamedTuple

import jax

from ncp_jax.models.ncp.config import NCPConfig
from ncp_jax.plan.compiled import MATMUL_SHARE
from ncp_jax.plan.step import Step, bytes_per_chip
from ncp_jax.train.run_config import RunConfig

BF16, F32 = 2, 4


class Estimate(NamedTuple):
    """Bytes per chip and seconds per step, without a compiler."""

    arguments: int  # parameters and optimizer state: exact
    gradients: int
    activations: int
    compute: float  # seconds
    ici: float  # seconds, of parameters gathered twice and gradients scattered once

    @property
    def peak(self) -> int:
        return self.arguments + self.gradients + self.activations

    @property
    def step(self) -> float:
        return max(self.compute, self.ici)


def estimate(step: Step) -> Estimate:
    """The estimate of one step."""
    config, where, mesh, state = step.config, step.where, step.program.mesh, step.program.like[0]
    parameters = [(leaf, bytes_per_chip(leaf)) for leaf in jax.tree.leaves(state.params)]
    whole = sum(math.prod(leaf.shape) for leaf, _ in parameters)
    micro_tokens = config.tokens_per_step / where.chips / config.train.micro_batches
    gathered = whole / mesh.shape["tensor"] * (2 * BF16 + BF16) * config.train.micro_batches if where.chips > 1 else 0
    return Estimate(
        sum(size for _, size in step.arguments()), sum(size for _, size in parameters),
        int(micro_tokens * _per_token(config)), step.flops_per_chip / (MATMUL_SHARE * where.chip.flops),
        gathered / where.chip.ici_bandwidth,
    )  # fmt: skip


def _per_token(config: RunConfig) -> float:
    """Bytes of activations per token: what layers keep, one layer at work, one slice of logits."""
    c: Any = config.model
    s = getattr(c, "backbone", None)
    if s is None:  # an autoencoder: a few small layers
        return BF16 * 16 * c.width + F32 * c.vocab
    kept = {"none": 14 * s.width + 3 * s.ffn, "dots": 8 * s.width + 2 * s.ffn}.get(getattr(s, "remat", "none"), s.width)
    states = c.layers * kept
    if isinstance(c, NCPConfig):  # every layer's raw output, and its normed copy for the towers that read it
        states += 2 * c.layers * s.width
    logits = F32 * c.vocab * min(1.0, (getattr(c, "head_chunk", None) or _loss_chunk(c) or 1e9) / config.data.sequence)
    return BF16 * (states + 8 * s.width + 3 * s.ffn) + logits


def _loss_chunk(c: Any) -> int | None:
    return c.loss.head_chunk if isinstance(c, NCPConfig) else None
