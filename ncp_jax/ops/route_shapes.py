"""The shapes of things that routes over stacked states take and give: parameters, sources, cotangents.

Shapes: L layers, N = L + 1 candidates of a depth route, S sources of a cross route, B batch, T tokens, M = T/k
concepts, D width.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import Array, lax


class Depth(NamedTuple):
    """A depth route's parameters (IRC), filled up with zeros to N candidates: the tower's input, then its outputs."""

    static_N: Array
    w1_ND: Array  # on its side: a TPU fills the last dimension up to 128
    w2_NN: Array


class Cross(NamedTuple):
    """A cross route's parameters (CRC): gain = share x diagonal x LN scale, offset = share x diagonal x LN bias."""

    gain_D: Array
    offset_D: Array
    w1_SD: Array
    w2_SS: Array


class Inject(NamedTuple):
    """Re-injection of the normalised concept: gain = share x diagonal x scale, offset = share x diagonal x bias."""

    gain_D: Array
    offset_D: Array


class Crosses(NamedTuple):
    """What one layer adds from other towers, in this order; None: nothing. Stacked [L, ...] for a tower."""

    inject: Inject | None = None
    encoder: Cross | None = None
    concept: Cross | None = None


class Sources(NamedTuple):
    """What a cross route reads: states [S, B, T, D], or [S, B, M, D] at concept rate, and their statistics at the rate
    of the tower that reads."""

    states: Array
    mean_BTS: Array
    inverse_BTS: Array


class Reads(NamedTuple):
    """What all layers of a tower read. `injected`: the predicted concept [B, M, D] at zero mean and unit variance."""

    injected: Array | None = None
    encoder: Sources | None = None
    concept: Sources | None = None


class Masks(NamedTuple):
    """Who has a concept, and who receives the bias where there is none: 0 or 1, [B, T, 1]."""

    available_BT1: Array
    biased_BT1: Array


class Shift(NamedTuple):
    """How concepts return to tokens: k tokens each; at the last token of the chunk, or one later (ops/chunking.py)."""

    k: int
    early: bool


class Trace(NamedTuple):
    """What the gather at a tower's end needs of each layer's cross routes, [..., S] each, or None."""

    encoder_weight: Array | None
    encoder_router: Array | None  # cotangent of the router's hidden layer
    concept_weight: Array | None
    concept_router: Array | None


class Statistics(NamedTuple):
    """Cotangents of the sources' statistics, or None."""

    encoder: tuple[Array, Array] | None
    concept: tuple[Array, Array] | None


class Outside(NamedTuple):
    """What reaches a tower's outputs from other towers: cotangents [L, B, T, D], of chunk means [L, B, M, D] or None,
    and through statistics: of layer l, offset + slope x its output."""

    raw: Array
    pooled: Array | None
    offset_LBT: Array
    slope_LBT: Array


class Summary(NamedTuple):
    """What other towers want to know of a layer's output: statistics with this eps, means of chunks of k (or None)."""

    eps: float
    k: int | None


class At(NamedTuple):
    """A layer: its number, static or traced, and those it can be, equally spaced."""

    index: Any
    choices: Sequence[int]

    def switch(self, function: Callable, *operands: Any) -> Any:
        """`function(layer, *operands)` with a static layer."""
        if isinstance(self.index, int):
            return function(self.index, *operands)
        first, step = self.choices[0], self.choices[1] - self.choices[0]
        branches = [lambda *given, layer=layer: function(layer, *given) for layer in self.choices]
        return lax.switch((self.index - first) // step, branches, *operands)
