"""Route mixtures against autodiff of the plain formula: twins and kernels, forward and backward."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ncp_jax.nn.layers import layer_norm
from ncp_jax.ops import chunking, route_mix, routing
from ncp_jax.ops.route_kernels import Kernels
from ncp_jax.ops.route_shapes import At, Cross, Crosses, Depth, Inject, Masks, Outside, Reads, Shift, Sources, Summary

L, B, T, D, K = 3, 2, 24, 16, 4
M, N, EPS = T // K, L + 1, 1e-6
FORMS = {"twin": route_mix, "kernel": Kernels(interpret=True)}


def normal(key: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(key), shape)


def close(ours, theirs, tolerance: float):
    def one(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(jnp.abs(b).max())))

    jax.tree.map(one, ours, theirs)


class Case(NamedTuple):
    """A depth route: which layer, how weighted, what its router reads."""

    layer: int
    softmax: bool
    update: bool
    outside: bool


CASES = [
    Case(0, True, False, True),
    Case(1, False, True, True),
    Case(2, True, True, False),
    Case(2, False, False, True),
]


def depth_plain(x, raw, update, p: Depth, layer: int, softmax: bool):
    """ops/routing.py on the layer's own leaves."""
    n = layer + 2
    y = raw[layer] if update is None else update
    leaves = p.static_N[:n], p.w1_ND[:n].T, p.w2_NN[:n, :n]
    return routing.mixture(routing.depth_weights(y, *leaves, softmax), [x, *raw[: layer + 1]])


def depth_inputs(case: Case):
    update = normal(2, B, T, D) if case.update else None
    exists = jnp.arange(N) < case.layer + 2  # towers fill leaves up with zeros
    both = exists[:, None] & exists
    p = Depth(normal(3, N) * exists, normal(4, N, D) * exists[:, None], normal(5, N, N) * both)
    return normal(0, B, T, D), normal(1, L, B, T, D), update, p


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_depth_route(case, form):
    """Forward, and the cotangents that reach one layer's output and parameters: through later layers too."""
    x, raw, update, p = depth_inputs(case)
    at, ops = At(case.layer, (case.layer,)), FORMS[form]
    dz, weights = normal(6, L, B, T, D), normal(7, L, B, T, N)
    pooled = normal(8, L, B, M, D)
    outside = Outside(normal(9, L, B, T, D), pooled, normal(10, L, B, T), normal(11, L, B, T)) if case.outside else None

    def plain(out, update, p):
        raw_now = raw.at[case.layer].set(out)
        z = depth_plain(x, raw_now, update, p, case.layer, case.softmax)
        total = (z * dz[case.layer]).sum()
        for later in range(case.layer + 1, L):
            total += (weights[later, ..., case.layer + 1, None] * out * dz[later]).sum()
        if outside is not None:
            total += (outside.raw[case.layer] * out).sum() + (chunking.chunk_mean(out, K) * pooled[case.layer]).sum()
            line = outside.offset_LBT[case.layer] * out.sum(-1) + outside.slope_LBT[case.layer] * (out**2).sum(-1) / 2
            total += line.sum()
        return total, z

    grads, z = jax.grad(plain, (0, 1, 2) if case.update else (0, 2), has_aux=True)(raw[case.layer], update, p)
    forward = functools.partial(ops.depth_forward, at, softmax=case.softmax, summary=Summary(EPS, K))
    ours_z, weight, ours_summary = jax.jit(forward)(x, raw, update, p)
    out = raw[case.layer]
    statistics = out.mean(axis=-1), (out.var(axis=-1) + EPS) ** -0.5
    close((ours_z, ours_summary), (z, (statistics, chunking.chunk_mean(out, K))), 1e-5)
    weights = weights.at[case.layer].set(weight)
    run = jax.jit(functools.partial(ops.depth_backward, at, softmax=case.softmax, k=K))
    d_out, d_update, dp = run(x, raw, update, p, dz=dz, weights=weights, outside=outside)
    close((d_out, d_update, dp) if case.update else (d_out, dp), grads, 1e-4)


class Routes(NamedTuple):
    """Which cross routes there are."""

    inject: bool
    encoder: bool
    concept: bool
    early: bool = True
    keep_bias: bool = True


SUBSETS = [Routes(True, True, True), Routes(True, True, True, False, False), Routes(False, True, False),
           Routes(True, False, True, True, False)]  # fmt: skip
SE, SC = 3, 2


def cross_inputs(routes: Routes):
    """(parameters stacked over layers, sources, norms, availability)."""

    def cross(key: int, S: int) -> Cross:
        return Cross(normal(key, L, D), normal(key + 1, L, D), normal(key + 2, L, S, D), normal(key + 3, L, S, S))

    crosses = Crosses(
        Inject(normal(20, L, D), normal(21, L, D)) if routes.inject else None,
        cross(22, SE) if routes.encoder else None, cross(26, SC) if routes.concept else None,
    )  # fmt: skip
    sources = normal(30, B, M, D), 2 + normal(31, SE, B, T, D), 1 + normal(32, SC, B, M, D)
    available = chunking.available(
        chunking.concept_index(T, K, routes.early), jnp.ones((B, M), int), jnp.ones((B, T), int).at[1, 9:14].set(2)
    )
    return crosses, sources, available[..., None].astype(jnp.float32)


def reads_of(routes: Routes, sources, masks: Masks, shift: Shift) -> Reads:
    """Statistics made as models make them; differentiable."""
    x, encoder, concept = sources

    def moments(states):
        return (jnp.moveaxis(part[..., 0], 0, -1) for part in route_mix.moments(states, EPS))

    at_tokens = [route_mix.expand(part, T, shift) * masks.available_BT1 for part in moments(concept)]
    return Reads(
        x if routes.inject else None, Sources(encoder, *moments(encoder)) if routes.encoder else None,
        Sources(concept, *at_tokens) if routes.concept else None,
    )  # fmt: skip


def cross_plain(z, crosses: Crosses, sources, routes: Routes, masks: Masks):
    """Sources normed and repeated, then ops/routing.py, one layer's parameters."""
    x, encoder, concept = sources
    index, one, none = chunking.concept_index(T, K, routes.early), jnp.ones(D), jnp.zeros(D)

    def at_tokens(c):
        return chunking.shift_and_repeat(c, index, masks.available_BT1[..., 0] > 0)

    def route(z, p: Cross, normed, biased):
        mixed = routing.mixture(routing.cross_weights(z, p.w1_SD.T, p.w2_SS), normed)
        return z + p.gain_D * mixed + p.offset_D * biased

    if crosses.inject is not None:
        z = z + crosses.inject.gain_D * at_tokens(x) + crosses.inject.offset_D * masks.biased_BT1
    if crosses.encoder is not None:
        z = route(z, crosses.encoder, [layer_norm(a, one, none, EPS) for a in encoder], 1.0)
    if crosses.concept is not None:
        z = route(z, crosses.concept, [at_tokens(layer_norm(c, one, none, EPS)) for c in concept], masks.biased_BT1)
    return z


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("routes", SUBSETS, ids=str)
def test_cross_routes(routes, form):
    """All layers on states of their own: the gather sums over them, statistics' cotangents join by autodiff."""
    ops, shift = FORMS[form], Shift(K, routes.early)
    crosses, sources, available = cross_inputs(routes)
    masks = Masks(available, jnp.ones_like(available) if routes.keep_bias else available)
    z, dh = normal(40, L, B, T, D), normal(41, L, B, T, D)

    def plain(z, crosses, sources):
        each = [cross_plain(z[l], _layer(crosses, l), sources, routes, masks) for l in range(L)]
        return (jnp.stack(each) * dh).sum(), jnp.stack(each)

    grads, states = jax.jit(jax.grad(plain, (0, 1, 2), has_aux=True))(z, crosses, sources)

    def ours(z, crosses, sources):
        reads, back = jax.vjp(lambda sources: reads_of(routes, sources, masks, shift), sources)
        states, found = [], []
        for l in range(L):
            p = _layer(crosses, l)
            states.append(ops.cross_forward(z[l], p, reads, masks, shift))
            found.append(ops.cross_backward(dh[l], z[l], p, reads, masks, shift))
        dz, d_crosses, statistics, trace = jax.tree.map(lambda *parts: jnp.stack(parts), *found)
        d = ops.cross_gather(dh, trace, crosses, reads, masks, shift)
        encoder, concept = (
            None if source is None else Sources(source.states, *(part.sum(axis=0) for part in pair))
            for source, pair in ((d.encoder, statistics.encoder), (d.concept, statistics.concept))
        )
        return jnp.stack(states), (dz, d_crosses, *back(Reads(d.injected, encoder, concept)))

    our_states, our_grads = jax.jit(ours)(z, crosses, sources)
    close(our_states, states, 1e-5)
    close(our_grads, grads, 1e-4)


def _layer(crosses: Crosses, l: int) -> Crosses:
    return jax.tree.map(lambda a: a[l], crosses)


def test_a_wrong_bound_is_seen():
    """One state too few changes the sum: the comparison above would notice."""
    x, raw, update, p = depth_inputs(CASES[3])
    right = route_mix.depth_forward(At(2, (2,)), x, raw, update, p, False, None)[0]
    for ops in FORMS.values():
        wrong = ops.depth_forward(At(1, (1,)), x, raw, raw[2], p, False, None)[0]
        assert float(jnp.abs(wrong - right).max()) > 0.1
