"""Routes over stacked states, forward and backward, layer by layer: what a scanned tower calls (nn/routed_scan.py).

Shapes: L layers, N = L + 1 candidates of a depth route, S sources of a cross route, B batch, T tokens, M = T/k
concepts, D width. The same sums as ops/routing.py, with three changes that leave the value alone:
1. A tower's outputs are one array [L, B, T, D]; layer l mixes its input and the first l + 1 of them, and no more.
2. LayerNorm of a cross route's sources is folded: sum_s p_s LN(A_s) = scale (sum_s p_s r_s A_s - sum_s p_s r_s m_s)
   + bias, for softmax weights (sum_s p_s = 1) and per-token mean m and inverse deviation r, made once per source. So
   no normed copy of a source exists. A token without a concept has m = r = 0, which leaves the bias.
3. Cotangents of cross sources wait for the end of the tower and are gathered at once:
   dA_s = r_s sum_l p_ls gain_l dz_l, with dz_l = dh_l + da_l W1_l^T made again from small arrays.

Why: per chip the routes are bound by HBM. One token and layer of a cross route over S sources costs S D multiply-adds
and 2 S D bytes in bfloat16, one FLOP per byte against some 200 that a chip could do, so its time is the bytes it reads.
ops/route_bytes.py counts them: 1.5 times the least for the kernels of ops/route_kernels.py; unrolled code compiles to
2.5 times (LOG.md).

This file: one tile's mathematics, which kernels and twins share, and the twins in plain jnp.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ncp_jax.ops.chunking import chunk_mean
from ncp_jax.ops.route_shapes import (
    At,
    Cross,
    Crosses,
    Depth,
    Inject,
    Masks,
    Outside,
    Reads,
    Shift,
    Sources,
    Statistics,
    Summary,
    Trace,
)

# One tile of tokens, or all: leading dimensions are free, everything at least float32.


def depth_weights(y: Array, p: Depth, count: Any, softmax: bool) -> Array:
    """Weights over N candidates of which the first `count` exist (report Eq. 15-16)."""
    w = p.static_N + router_hidden(_inner(y, p.w1_ND)) @ p.w2_NN
    exists = lax.broadcasted_iota(jnp.int32, w.shape, w.ndim - 1) < count
    if softmax:
        return jax.nn.softmax(jnp.where(exists, w, -jnp.inf), axis=-1)
    return jnp.where(exists, w, 0)


def router_hidden(a: Array) -> Array:
    """Exact GELU, written out for kernels: x Phi(x)."""
    return 0.5 * a * (1 + lax.erf(a * 0.5**0.5))


def _inner(y: Array, w_SD: Array) -> Array:
    """Inner products with the rows of w, [..., S]."""
    return lax.dot_general(y, w_SD, (((y.ndim - 1,), (1,)), ((), ())))


class Read(NamedTuple):
    """How a tile reads a group of sources: `mix` weights them [..., S], `inner` multiplies x with each, [..., S]."""

    mean: Array
    inverse: Array
    biased: Array | float
    mix: Callable[[Array], Array]
    inner: Callable[[Array], Array]


def cross_weights(z: Array, w1_SD: Array, w2_SS: Array, nudge: Array | float = 0.0) -> Array:
    """Softmax weights of a cross route (report Eq. 19). `nudge` is zero; it has the hidden layer's gradient."""
    return jax.nn.softmax(router_hidden(_inner(z, w1_SD) + nudge) @ w2_SS, axis=-1)


def mixed_of(weight: Array, read: Read) -> Array:
    """sum_s p_s (A_s - m_s) r_s."""
    scaled = weight * read.inverse
    return read.mix(scaled) - (scaled * read.mean).sum(axis=-1, keepdims=True)


def cross_tile(z: Array, crosses: Crosses, injected: Array | None, biased: Array, *reads: Read | None) -> list[Array]:
    """Re-injection, CRC from the encoder, CRC from the concepts: the state before each route, and the last."""
    states = [z]
    if crosses.inject is not None:
        assert injected is not None
        z = z + crosses.inject.gain_D * injected + crosses.inject.offset_D * biased
    for p, read in zip((crosses.encoder, crosses.concept), reads, strict=True):
        states.append(z)
        if p is not None and read is not None:
            mixed = mixed_of(cross_weights(z, p.w1_SD, p.w2_SS), read)
            z = z + p.gain_D * mixed + p.offset_D * read.biased
    return [*states, z]


def cross_tile_backward(
    dh: Array, z: Array, crosses: Crosses, injected: Array | None, biased: Array, *reads: Read | None
) -> tuple[Array, Crosses, Statistics, Trace]:
    """(dz, d parameters, d statistics, what the gather needs). The sources are constants here."""
    before = cross_tile(z, crosses, injected, biased, reads[0], None)
    found: list[Any] = [(None, None, (None, None)), (None, None, (None, None))]
    for number, p in ((1, crosses.concept), (0, crosses.encoder)):
        read = reads[number]
        if p is not None and read is not None:
            dh, *found[number] = _route_backward(dh, before[1 + number], p, read)
    d_inject = None
    if crosses.inject is not None and injected is not None:
        d_inject = Inject(
            _over_tokens(dh * injected, crosses.inject.gain_D), _over_tokens(dh * biased, crosses.inject.offset_D)
        )
    (d_encoder, of_encoder, kept), (d_concept, of_concept, kept_too) = found
    return dh, Crosses(d_inject, d_encoder, d_concept), Statistics(of_encoder, of_concept), Trace(*kept, *kept_too)


def _route_backward(dh: Array, z: Array, p: Cross, read: Read):
    """(dz, d parameters, d statistics, (weights, d hidden layer)) of one cross route."""
    nudge = jnp.zeros_like(read.inverse)
    weight, back = jax.vjp(cross_weights, z, p.w1_SD, p.w2_SS, nudge)
    gained = p.gain_D * dh
    # d of each p_s r_s; the offset's share is the same for all s, and a softmax ignores it.
    d_scaled = read.inner(gained) - read.mean * gained.sum(axis=-1, keepdims=True)
    d_mean = -weight * read.inverse * gained.sum(axis=-1, keepdims=True)
    dz, dw1, dw2, d_hidden = back(read.inverse * d_scaled)
    d = Cross(_over_tokens(dh * mixed_of(weight, read), p.gain_D), _over_tokens(dh * read.biased, p.offset_D), dw1, dw2)
    return dh + dz, d, (d_mean, weight * d_scaled), (weight, d_hidden)


def _over_tokens(x: Array, like: Array) -> Array:
    return x.sum(axis=tuple(range(x.ndim - 1)), keepdims=True).reshape(like.shape)


# The twins: all tokens as one tile.


def depth_forward(
    at: At, input_BTD: Array, raw: Array, update_BTD: Array | None, p: Depth, softmax: bool, summary: Summary | None
) -> tuple[Array, Array, Any]:
    """(routed state, weights [B, T, N], `summarised` output) of one layer.

    `update_BTD`: what the router reads; None: the layer's output.
    """

    def layer(index: int, raw: Array, update: Array | None, p: Depth) -> tuple[Array, Array]:
        y_BTD = raw[index] if update is None else update
        weight_BTN = depth_weights(wide(y_BTD), jax.tree.map(wide, p), index + 2, softmax)
        states = [input_BTD, *(raw[j] for j in range(index + 1))]
        return weighted(weight_BTN, states).astype(raw.dtype), weight_BTN

    return *at.switch(layer, raw, update_BTD, p), summarised(raw[at.index], summary)


def summarised(out_BTD: Array, summary: Summary | None) -> tuple[tuple[Array, Array] | None, Array | None]:
    """(mean and inverse deviation [B, T], chunk means [B, M, D]) of a layer's output, as far as wanted."""
    if summary is None:
        return None, None
    mean, inverse = moments(out_BTD, summary.eps)
    return (mean[..., 0], inverse[..., 0]), None if summary.k is None else chunk_mean(out_BTD, summary.k)


def depth_backward(
    at: At,
    input_BTD: Array,
    raw: Array,
    update_BTD: Array | None,
    p: Depth,
    softmax: bool,
    dz: Array,
    weights: Array,
    outside: Outside | None,
    k: int,
) -> tuple[Array, Array | None, Depth]:
    """(d output of this layer, d update if the router reads it, d parameters).

    `dz` [L, B, T, D] holds the cotangents of routed states from this layer on, `weights` [L, B, T, N] the weights of
    all. `update_BTD`: what the router read; None: the layer's output.
    """

    def layer(index: int, raw: Array, update: Array | None, p: Depth, dz: Array, weights: Array, outside):
        own_BTD, N, out_BTD = wide(dz[index]), p.static_N.shape[0], raw[index]
        inner = [(own_BTD * wide(x)).sum(axis=-1) for x in (input_BTD, *(raw[j] for j in range(index + 1)))]
        dw_BTN = jnp.stack(inner + [jnp.zeros_like(inner[0])] * (N - len(inner)), axis=-1)
        args = jax.tree.map(wide, (out_BTD if update is None else update, p))
        _, back = jax.vjp(lambda y, p: depth_weights(y, p, index + 2, softmax), *args)
        dy, dp = back(dw_BTN)
        d_out = later_cotangent(index, dz, weights) + from_outside(index, out_BTD, outside, k)
        if update is None:
            return (d_out + dy).astype(raw.dtype), None, dp
        return d_out.astype(raw.dtype), dy.astype(raw.dtype), dp

    return at.switch(layer, raw, update_BTD, p, dz, weights, outside)


def from_outside(index: Any, out_BTD: Array, outside: Outside | None, k: int) -> Array | float:
    """The cotangent of layer `index`'s output from other towers, in at least float32; chunks of k tokens."""
    if outside is None:
        return 0.0
    slope, offset = outside.slope_LBT[index][..., None], outside.offset_LBT[index][..., None]
    total = wide(outside.raw[index]) + offset + slope * wide(out_BTD)
    if outside.pooled is not None:
        T = out_BTD.shape[1]
        each = jnp.repeat(wide(outside.pooled[index]) / k, k, axis=1)[:, :T]
        total += jnp.pad(each, ((0, 0), (0, T - each.shape[1]), (0, 0)))
    return total


def later_cotangent(index: int, dz: Array, weights: Array) -> Array:
    """Cotangent of output `index` (-1: the tower's input) through the mixtures of its own and later layers."""
    first = max(index, 0)
    column = jnp.stack([weights[l, ..., index + 1] for l in range(first, len(dz))], axis=-1)
    return weighted(column, [dz[l] for l in range(first, len(dz))])


def prepare(z_BTD: Array, crosses: Crosses, reads: Reads, masks: Masks, shift: Shift) -> Masks:
    """Nothing to make once per tower; kernels have something."""
    return masks


def cross_forward(z_BTD: Array, crosses: Crosses, reads: Reads, masks: Masks, shift: Shift) -> Array:
    """The state after one layer's re-injection and cross routes."""
    tile = cross_tile(wide(z_BTD), jax.tree.map(wide, crosses), *_whole(reads, masks, shift))
    return tile[-1].astype(z_BTD.dtype)


def cross_backward(dh_BTD: Array, z_BTD: Array, crosses: Crosses, reads: Reads, masks: Masks, shift: Shift):
    """(dz, d parameters, d statistics of the sources, trace) of one layer."""
    given = wide(z_BTD), jax.tree.map(wide, crosses)
    dz, *more = cross_tile_backward(wide(dh_BTD), *given, *_whole(reads, masks, shift))
    return dz.astype(z_BTD.dtype), *more


def cross_gather(dh: Array, trace: Any, crosses: Any, reads: Reads, masks: Masks, shift: Shift) -> Reads:
    """Cotangents of what all layers read, statistics left out (None): dh [L, B, T, D], trace and crosses stacked."""
    L, dtype = len(dh), dh.dtype
    after = [wide(dh[l]) for l in range(L)]  # of the state after the concept's route, then before it, and so on
    d_encoder, d_concept, d_injected = None, None, None
    if reads.concept is not None:
        d_concept = _gather_concepts(after, trace.concept_weight, crosses.concept, reads.concept, shift)
        after = _before(after, trace.concept_router, crosses.concept)
    if reads.encoder is not None:
        scaled = trace.encoder_weight * reads.encoder.inverse_BTS
        gained = [after[l] * crosses.encoder.gain_D[l] for l in range(L)]
        columns = [jnp.moveaxis(scaled[..., s], 0, -1) for s in range(len(reads.encoder.states))]
        d_encoder = jnp.stack([weighted(column, gained).astype(dtype) for column in columns])
        after = _before(after, trace.encoder_router, crosses.encoder)
    if reads.injected is not None:
        total = jnp.stack([after[l] * crosses.inject.gain_D[l] for l in range(L)]).sum(axis=0)
        d_injected = fold(total * masks.available_BT1, reads.injected.shape, shift).astype(dtype)
    return Reads(d_injected, _states_only(d_encoder), _states_only(d_concept))


def _gather_concepts(after: list[Array], weight: Array, p: Cross, read: Sources, shift: Shift) -> Array:
    scaled = weight * read.inverse_BTS
    gained = [after[l] * p.gain_D[l] for l in range(len(after))]
    columns = [jnp.moveaxis(scaled[..., s], 0, -1) for s in range(len(read.states))]
    folded = [fold(weighted(column, gained), read.states.shape[1:], shift) for column in columns]
    return jnp.stack(folded).astype(read.states.dtype)


def _before(after: list[Array], router: Array, p: Cross) -> list[Array]:
    """Cotangents before a route, from those after it and of its router's hidden layer."""
    return [after[l] + router[l] @ wide(p.w1_SD[l]) for l in range(len(after))]


def _states_only(d_states: Array | None) -> Any:
    return None if d_states is None else Sources(d_states, None, None)  # type: ignore[arg-type]


def _whole(reads: Reads, masks: Masks, shift: Shift):
    """The reads of `cross_tile` for all tokens."""
    injected, encoder, concept = None, None, None
    T = masks.available_BT1.shape[1]
    if reads.injected is not None:
        injected = wide(expand(reads.injected, T, shift)) * masks.available_BT1
    if reads.encoder is not None:
        encoder = read_of(list(reads.encoder.states), reads.encoder.mean_BTS, reads.encoder.inverse_BTS, 1.0)
    if reads.concept is not None:
        repeated = [expand(c_BMD, T, shift) for c_BMD in reads.concept.states]
        concept = read_of(repeated, reads.concept.mean_BTS, reads.concept.inverse_BTS, masks.biased_BT1)
    return injected, masks.biased_BT1, encoder, concept


def read_of(states: Sequence[Any], mean: Array, inverse: Array, biased: Array | float) -> Read:
    """Reads of states that are indexable by [...]: arrays, or a kernel's references."""

    def inner(x: Array) -> Array:
        return jnp.concatenate([(x * wide(state[...])).sum(axis=-1, keepdims=True) for state in states], axis=-1)

    return Read(wide(mean), wide(inverse), biased, lambda weight: weighted(weight, states), inner)


def weighted(weight: Array, states: Sequence[Any]) -> Array:
    """sum_s weight_s states_s in at least float32; weight [..., S]."""
    total = weight[..., :1] * wide(states[0][...])
    for s in range(1, len(states)):
        total += weight[..., s : s + 1] * wide(states[s][...])
    return total


def expand(c_BMD: Array, length: int, shift: Shift) -> Array:
    """Each token's concept, zero before the first: ops/chunking.py `shift_and_repeat` without its gather."""
    padded = jnp.pad(c_BMD, ((0, 0), (1, 0), (0, 0)))
    return jnp.repeat(padded, shift.k, axis=1)[:, int(shift.early) :][:, :length]


def fold(d_BTD: Array, shape: tuple[int, ...], shift: Shift) -> Array:
    """The transpose of `expand`."""
    length = d_BTD.shape[1]
    (d,) = jax.linear_transpose(lambda c: expand(c, length, shift), jax.ShapeDtypeStruct(shape, d_BTD.dtype))(d_BTD)
    return d


def moments(x: Array, eps: float) -> tuple[Array, Array]:
    """Mean and inverse deviation over the width, [..., 1] in at least float32: LayerNorm's statistics."""
    x = wide(x)
    mean = x.mean(axis=-1, keepdims=True)
    return mean, lax.rsqrt(((x - mean) ** 2).mean(axis=-1, keepdims=True) + eps)


def wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
