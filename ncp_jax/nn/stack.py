"""Towers: how layers follow one another, plain (scanned) or routed (unrolled).

Shapes: B batch, T tokens, D width, L layers. A plain stack scans over super-blocks of `full_every` layers (three
windowed, one full), so each layer's mask is static; a remainder follows unrolled. A routed tower keeps every layer's
output: through autodiff of a scan that costs O(L^2) memory, so it is unrolled on the same stacked weights, or scanned
with a backward pass of its own (nn/routed_scan.py).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax import Array, lax

from ncp_jax.nn.backbone import Backbone
from ncp_jax.nn.block import KV, Sight, Weights, cast_matrices, layer_of, remat_block
from ncp_jax.nn.gather import gathered_late

Mixer = Callable[[int, Sequence[Array], Array], Array]  # (layer, history oldest first, update) -> routed state
Cross = Callable[[int, Array], Array]  # (layer, routed state) -> with what other towers add
Past = Sequence[KV] | None


class Tower(NamedTuple):
    """A tower's outputs: the last routed state, every layer's raw output, every layer's keys and values."""

    h_BTD: Array
    raw: tuple[Array, ...]
    kv: tuple[KV, ...]


def plain_stack(h_BTD: Array, weights: Weights, s: Backbone, see: Sight) -> Array:
    """Run all layers in sequence."""
    weights = cast_matrices(weights, h_BTD.dtype)
    run, L = remat_block(s), len(weights["wq"])
    period = 1 if s.window is None else s.full_every
    whole = L // period if L // period > 1 else 0

    def super_block(h_BTD: Array, w: Weights) -> tuple[Array, None]:
        for i in range(period):
            h_BTD, _, _ = run(h_BTD, layer_of(w, i), s, s.is_full(i), see)
        return h_BTD, None

    if whole:
        grouped = jax.tree.map(lambda a: a[: whole * period].reshape(whole, period, *a.shape[1:]), weights)
        h_BTD, _ = lax.scan(super_block, h_BTD, grouped)
    for i in range(whole * period, L):
        h_BTD, _, _ = run(h_BTD, layer_of(weights, i), s, s.is_full(i), see)
    return h_BTD


def unrolled_stack(h_BTD: Array, weights: Weights, s: Backbone, see: Sight, past: Past = None) -> Tower:
    """Slow twin of `plain_stack`: the same layers, written out; with a cache, the only form."""
    return routed_tower(h_BTD, weights, s, see, lambda _, history, __: history[-1], lambda _, h: h, past)


def routed_tower(
    h_BTD: Array, weights: Weights, s: Backbone, see: Sight, mix: Mixer, cross: Cross, past: Past = None
) -> Tower:
    """Run all layers, routing after each.

    The history that `mix` sees is the tower's input followed by raw outputs; routed states never enter it. `past`
    holds each layer's keys and values of earlier tokens.
    """
    weights = cast_matrices(weights, h_BTD.dtype)
    run, history, kv = remat_block(s), [h_BTD], []
    w = [layer_of(weights, layer) for layer in range(len(weights["wq"]))]
    for layer in range(len(w)):
        with jax.named_scope(f"layer_{layer}"):
            if layer + 1 < len(w):
                h_BTD, w[layer + 1] = gathered_late(h_BTD, w[layer + 1])
            earlier = None if past is None else past[layer]
            out_BTD, update_BTD, new = run(h_BTD, w[layer], s, s.is_full(layer), see, earlier)
            history.append(out_BTD)
            kv.append(new)
            h_BTD = cross(layer, mix(layer, history, update_BTD))
    return Tower(h_BTD, tuple(history[1:]), tuple(kv))
