"""A routed tower in one custom VJP: a scan over super-blocks whose backward pass knows what to keep.

Shapes: L layers, G super-blocks of P layers, N = L + 1, B batch, T tokens, D width, M = T/k chunks.

The same function as nn/stack.py `routed_tower`, its slow twin. Autodiff of a scan would keep the history once per
layer, O(L^2) memory. Here the history is one buffer [L, B, T, D], written in place; kept besides are each input,
each routed state that a cross route reads, the depth routes' weights and the outputs' statistics. Blocks are run again
in the backward pass, layer by layer (as remat "block" does, whatever the policy); depth routes are not. Cotangents of
outputs are gathered when their layer is reached; those of what cross routes read, at the end.

Layers that attend in full are every P-th, so each layer of a super-block has a static mask; a remainder is unrolled.
"""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from ncp_jax.config import frozen
from ncp_jax.nn.backbone import Backbone
from ncp_jax.nn.block import Sight, Weights, block
from ncp_jax.ops import route_mix
from ncp_jax.ops.route_kernels import Kernels
from ncp_jax.ops.route_mix import wide
from ncp_jax.ops.route_shapes import At, Crosses, Depth, Outside, Reads, Shift, Sources, Statistics, Summary


@frozen
class Plan:
    """What is static about a tower."""

    backbone: Backbone
    layers: int
    irc: str  # signed | softmax | none
    router_reads_output: bool  # else the update
    shift: Shift
    kernels: str = "none"  # none: plain jnp | kernel | interpreted
    outputs: bool = True  # whether other towers read this one's outputs: else none are returned
    pool: int | None = None  # tokens per chunk, if chunk means of the outputs are read

    @property
    def period(self) -> int:
        return 1 if self.backbone.window is None else self.backbone.full_every

    @property
    def groups(self) -> int:
        """Super-blocks that are scanned; none if there is but one."""
        whole = self.layers // self.period
        return whole if whole > 1 else 0

    @property
    def summary(self) -> Summary | None:
        """What is kept of outputs that other towers read."""
        return Summary(self.backbone.eps, self.pool) if self.outputs else None


class Outputs(NamedTuple):
    """A tower's last routed state and, if read, its outputs [L, B, T, D] with statistics [B, T, L] and chunk means."""

    h_BTD: Array
    raw: Array | None = None
    mean_BTL: Array | None = None
    inverse_BTL: Array | None = None
    pooled: Array | None = None  # [L, B, M, D]


class Kept(NamedTuple):
    """Residuals of one layer, or of all, stacked."""

    weight_BTN: Array | None
    moments: tuple[Array, Array] | None
    pooled_BMD: Array | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def routed_scan(
    plan: Plan,
    x_BTD: Array,
    weights: Weights,
    depth: Depth | None,
    crosses: Crosses,
    reads: Reads,
    masks: Any,
    see: Any,
) -> Outputs:
    """Run all layers, routing after each: weights, in the compute dtype, and parameters of routes stacked [L, ...].

    masks: Masks, or None if nothing is at concept rate; see: Sight. Neither has a gradient.
    """
    return _forward(plan, x_BTD, weights, depth, crosses, reads, masks, see)[0]


def _forward(plan: Plan, x_BTD: Array, weights: Weights, depth, crosses: Crosses, reads: Reads, masks, see: Sight):
    has_cross, ops = any(part is not None for part in crosses), _ops(plan)
    buffer = jnp.zeros((plan.layers, *x_BTD.shape), x_BTD.dtype)
    seen = ops.prepare(x_BTD, crosses, reads, masks, plan.shift) if has_cross else None
    carry = (x_BTD, buffer, buffer, buffer if has_cross else None)

    def layer(carry, at: At, within: int, w: Weights, routes) -> tuple[Any, Kept]:
        h_BTD, raw, inputs, mixed = carry
        own, cross = routes
        out_BTD, update_BTD, _ = block(h_BTD, w, plan.backbone, plan.backbone.is_full(within), see)
        raw, inputs = raw.at[at.index].set(out_BTD), inputs.at[at.index].set(h_BTD)
        h_BTD, weight_BTN = out_BTD, None
        if own is not None:
            read = None if plan.router_reads_output else update_BTD
            softmax = plan.irc == "softmax"
            h_BTD, weight_BTN, summary = ops.depth_forward(at, x_BTD, raw, read, own, softmax, plan.summary)
        else:
            summary = route_mix.summarised(out_BTD, plan.summary)
        if has_cross:
            mixed = mixed.at[at.index].set(h_BTD)
            h_BTD = ops.cross_forward(h_BTD, cross, reads, seen, plan.shift)
        return (h_BTD, raw, inputs, mixed), Kept(weight_BTN, *summary)

    (h_BTD, raw, inputs, mixed), kept = _over_layers(plan, layer, carry, weights, (depth, crosses))
    outputs = Outputs(h_BTD)
    if plan.outputs:
        mean_BTL, inverse_BTL = (jnp.moveaxis(part, 0, -1) for part in kept.moments)
        outputs = Outputs(h_BTD, raw, mean_BTL, inverse_BTL, kept.pooled_BMD)
    residuals = x_BTD, weights, depth, crosses, reads, masks, see, raw, inputs, mixed, kept.weight_BTN, kept.moments
    return outputs, residuals


def _backward(plan: Plan, residuals, d: Outputs):
    x_BTD, weights, depth, crosses, reads, masks, see, raw, inputs, mixed, weight, moments = residuals
    has_cross, ops, outside = mixed is not None, _ops(plan), _outside(plan, d, moments)
    buffer = jnp.zeros_like(raw)
    seen = ops.prepare(x_BTD, crosses, reads, masks, plan.shift) if has_cross else None
    carry = (d.h_BTD, buffer, buffer if has_cross else None, _no_statistics(reads))

    def layer(carry, at: At, within: int, w: Weights, given) -> tuple[Any, Any]:
        dh_BTD, dz, dh, d_statistics = carry
        own, cross, l = given[0], given[1], at.index
        run = partial(block, s=plan.backbone, full=plan.backbone.is_full(within), see=see)
        (_, update_BTD), back = jax.vjp(lambda h, w: run(h, w)[:2], inputs[l], w)
        d_cross, trace, d_own = Crosses(), None, None
        if has_cross:
            dh = dh.at[l].set(dh_BTD)
            dh_BTD, d_cross, d_own_statistics, trace = ops.cross_backward(
                dh_BTD, mixed[l], cross, reads, seen, plan.shift
            )
            d_statistics = jax.tree.map(jnp.add, d_statistics, d_own_statistics)
        d_out, d_update = dh_BTD, jnp.zeros_like(dh_BTD)
        if own is not None:
            read = None if plan.router_reads_output else update_BTD
            dz, softmax = dz.at[l].set(dh_BTD), plan.irc == "softmax"
            d_out, d_read, d_own = ops.depth_backward(
                at, x_BTD, raw, read, own, softmax, dz, weight, outside, plan.shift.k
            )
            d_update = d_update if d_read is None else d_read
        elif plan.outputs:
            d_out = (wide(d_out) + route_mix.from_outside(l, raw[l], outside, plan.shift.k)).astype(d_out.dtype)
        dh_BTD, dw = back((d_out, d_update))
        return (dh_BTD, dz, dh, d_statistics), (dw, d_own, d_cross, trace)

    given = (depth, crosses)
    (dx, dz, dh, d_statistics), found = _over_layers(plan, layer, carry, weights, given, reverse=True)
    d_weights, d_depth, d_crosses, trace = found
    if depth is not None:
        dx = (wide(dx) + route_mix.later_cotangent(-1, dz, weight)).astype(dx.dtype)
    d_reads = Reads()
    if has_cross:
        d_reads = ops.cross_gather(dh, trace, crosses, reads, seen, plan.shift)
        d_reads = _with_statistics(d_reads, d_statistics)
    cotangents = (dx, d_weights, d_depth, d_crosses, d_reads)
    primals = (x_BTD, weights, depth, crosses, reads)
    return *jax.tree.map(lambda d, p: d.astype(p.dtype), cotangents, _like(primals, cotangents)), None, None


routed_scan.defvjp(lambda plan, *args: _forward(plan, *args), _backward)


def _over_layers(plan: Plan, layer, carry, weights: Weights, routes, reverse: bool = False):
    """`layer(carry, at, number within the tower modulo P, weights, routes)` over all layers, scanned or written out."""
    P, G, stacked = plan.period, plan.groups, (weights, routes)

    def one(carry, l: int):
        w, r = jax.tree.map(lambda a: a[l], stacked)
        return layer(carry, At(l, (l,)), l, w, r)

    def group(carry, given):
        number, stacked = given
        found: dict[int, Any] = {}
        for i in reversed(range(P)) if reverse else range(P):
            w, r = jax.tree.map(lambda a, i=i: a[i], stacked)
            at = At(number * P + i, range(i, G * P, P))
            carry, found[i] = layer(carry, at, i, w, r)
        return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *(found[i] for i in range(P)))

    def scanned(carry):
        grouped = jax.tree.map(lambda a: a[: G * P].reshape(G, P, *a.shape[1:]), stacked)
        carry, found = lax.scan(group, carry, (jnp.arange(G), grouped), reverse=reverse)
        return carry, [jax.tree.map(lambda a: a.reshape(G * P, *a.shape[2:]), found)]

    def rest(carry):
        found: dict[int, Any] = {}
        numbers = range(G * P, plan.layers)
        for l in reversed(numbers) if reverse else numbers:
            carry, found[l] = one(carry, l)
        return carry, [jax.tree.map(lambda *parts: jnp.stack(parts), *(found[l] for l in numbers))] if found else []

    parts: list[Any] = []
    for run in (rest, scanned) if reverse else (scanned, rest):
        if run is rest or G:
            carry, found = run(carry)
            parts = found + parts if reverse else parts + found
    return carry, jax.tree.map(lambda *each: jnp.concatenate(each), *parts)


def _outside(plan: Plan, d: Any, moments) -> Outside | None:
    """Cotangents of a tower's outputs; through statistics d mean / D - d inverse inverse^3 (x - mean) / D, a line."""
    if not plan.outputs:
        return None
    D, (mean, inverse) = d.raw.shape[-1], moments
    d_mean, d_inverse = (jnp.moveaxis(part, -1, 0) for part in (d.mean_BTL, d.inverse_BTL))
    slope = -d_inverse * inverse**3 / D
    return Outside(d.raw, d.pooled, d_mean / D - slope * mean, slope)


def _with_statistics(d: Reads, statistics) -> Reads:
    def joined(sources: Sources | None, pair) -> Any:
        return None if sources is None else Sources(sources.states, *pair)

    return Reads(d.injected, joined(d.encoder, statistics.encoder), joined(d.concept, statistics.concept))


def _like(primals, cotangents):
    """Primals where there are cotangents."""
    return jax.tree.map(lambda d, p: p, cotangents, primals)


def _no_statistics(reads: Reads) -> Statistics:
    def zeros(sources: Sources | None) -> Any:
        if sources is None:
            return None
        return tuple(jnp.zeros_like(wide(part)) for part in (sources.mean_BTS, sources.inverse_BTS))

    return Statistics(zeros(reads.encoder), zeros(reads.concept))


def _ops(plan: Plan) -> Any:
    """The four functions of routes: twins, or kernels split as activations are."""
    if plan.kernels == "none":
        return route_mix
    rows, tokens = nn.logical_to_mesh_axes(("batch", "sequence")) or (None, None)
    return Kernels(rows, tokens, plan.kernels == "interpreted")
