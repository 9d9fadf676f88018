"""Depth routes (IRC) as one-pass TPU kernels, forward and backward; the same functions as in ops/route_mix.py.

Shapes: t tokens of a tile, L layers, N = L + 1 candidates, D width; tokens of all rows on one axis.

The grid is (tiles, states). The number of states that exist is a prefetched scalar: blocks beyond it repeat an index,
which moves nothing, and their steps do nothing, so one kernel serves all layers of a scan.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ncp_jax.ops.route_bytes import Operand
from ncp_jax.ops.route_call import F32, by_token, call, clip, column_of, exact_dot, placement, tile_of, whole
from ncp_jax.ops.route_mix import depth_weights, moments, wide
from ncp_jax.ops.route_shapes import At, Depth, Summary

TILE = 256  # tokens; half as many backward, which holds more


def inputs_of(input_tD: Array, raw: Array, update: Array | None, p: Depth) -> dict[str, Any]:
    """What both passes of a depth route read, flat; see `depth_operands`."""
    return {"input": input_tD, "raw": raw, "update": update, "p": p}


def forward(
    count: Array, given: dict[str, Any], at: At, softmax: bool, summary: Summary | None, interpret: bool
) -> dict[str, Array]:
    """Newest state first: the router reads it, and what other towers want to know of it is made."""
    (tokens, D), N, dtype = given["input"].shape, given["raw"].shape[0] + 1, given["raw"].dtype
    k = summary.k if summary is not None and summary.k is not None else 1
    tile = tile_of(tokens, TILE, k, interpret)
    inputs = _depth_operands(given, tile, lambda j, n: clip(n - 2 - j, 0, N - 2))
    outputs = {
        "z": by_token(jax.ShapeDtypeStruct((tokens, D), dtype), tile),
        "weight": by_token(jax.ShapeDtypeStruct((tokens, N), F32), tile),
    }
    if summary is not None:
        outputs["moments"] = by_token(jax.ShapeDtypeStruct((tokens, 2), F32), tile)
        if summary.k is not None:
            outputs["pooled"] = by_token(jax.ShapeDtypeStruct((tokens // k, D), dtype), tile // k)

    def body(n, i, o, scratch):
        total, step = scratch[0], pl.program_id(1)

        @pl.when(step == 0)
        def start():
            y = wide(i["update"][...] if "update" in i else i["raw"][0])
            o["weight"][...] = depth_weights(y, _depth_of(i), n, softmax)
            total[...] = column_of(o["weight"], n - 1) * wide(i["raw"][0])
            if summary is not None:
                o["moments"][:, :1], o["moments"][:, 1:] = moments(i["raw"][0], summary.eps)
            if "pooled" in o:
                chosen = exact_dot(placement(tile, tile // k, k), i["raw"][0], 0)
                o["pooled"][...] = (chosen / k).astype(dtype)

        @pl.when((step > 0) & (step < n - 1))
        def middle():
            total[...] += column_of(o["weight"], n - 1 - step) * wide(i["raw"][0])

        @pl.when(step == n - 1)
        def last():
            o["z"][...] = (total[...] + column_of(o["weight"], 0) * wide(i["input"][...])).astype(o["z"].dtype)

    flops = 2 * tokens * D * 2 * N
    return call(
        "depth_forward", body, (tokens // tile, N), inputs, outputs, [(tile, D)], count, _counts(at), flops, interpret
    )


def backward(
    count: Array, given: dict[str, Any], more: tuple, at: At, softmax: bool, k: int, interpret: bool
) -> dict[str, Array]:
    """States oldest first, for the weights' cotangents, the newest meeting the router; then later layers' dz."""
    dz, column, out_raw, pooled, lines = more
    (tokens, D), L = given["input"].shape, given["raw"].shape[0]
    N, dtype = L + 1, given["raw"].dtype
    tile = tile_of(tokens, TILE // 2, k, interpret)
    inputs = _depth_operands(given, tile, lambda j, n: clip(j - 1, 0, n - 2))
    inputs |= {
        "own": Operand(dz, (1, tile, D), lambda i, j, n: (n - 2, i, 0)),
        "later": Operand(dz, (1, tile, D), lambda i, j, n: (clip(n - 1 + j - N, clip(n - 1, 0, L - 1), L - 1), i, 0)),
        "column": by_token(column, tile),
    }
    if out_raw is not None:
        inputs |= {
            "outside": Operand(out_raw, (1, tile, D), lambda i, j, n: (n - 2, i, 0)), "lines": by_token(lines, tile)
        }  # fmt: skip
    if pooled is not None:
        inputs["pooled"] = Operand(pooled, (1, tile // k, D), lambda i, j, n: (n - 2, i, 0))
    outputs = {"out": by_token(jax.ShapeDtypeStruct((tokens, D), dtype), tile)}
    if given["update"] is not None:
        outputs["dy"] = outputs["out"]
    for name, array in zip(("static", "w1", "w2"), given["p"], strict=True):
        outputs[name] = whole(jax.ShapeDtypeStruct(array.shape, F32), 2)

    def body(n, i, o, scratch):
        total, dw = scratch
        step = pl.program_id(1)

        @pl.when((step == 0) & (pl.program_id(0) == 0))
        def zero():
            for name in ("static", "w1", "w2"):
                o[name][...] = jnp.zeros_like(o[name])

        def inner(candidate, state) -> None:
            product = (wide(i["own"][0]) * wide(state)).sum(axis=-1, keepdims=True)
            dw[...] += jnp.where(lax.broadcasted_iota(jnp.int32, dw.shape, 1) == candidate, product, 0.0)

        @pl.when(step == 0)
        def first():
            dw[...] = jnp.zeros_like(dw)
            inner(0, i["input"][...])

        @pl.when((step > 0) & (step < n))
        def inside():
            inner(step, i["raw"][0])

        @pl.when(step == n - 1)
        def route():
            y = wide(i["update"][...] if "update" in i else i["raw"][0])
            _, back = jax.vjp(lambda y, p: depth_weights(y, p, n, softmax), y, _depth_of(i))
            dy, dp = back(dw[...])
            for name, part in zip(("static", "w1", "w2"), dp, strict=True):
                o[name][...] += part
            own = column_of(i["column"], n - 2) * wide(i["own"][0])
            if "outside" in i:
                own += wide(i["outside"][0]) + i["lines"][:, :1] + i["lines"][:, 1:] * wide(i["raw"][0])
            if "pooled" in i:
                own += exact_dot(placement(tile, tile // k, k), i["pooled"][0]) / k
            if "dy" in o:
                o["dy"][...] = dy.astype(dtype)
                total[...] = own
            else:
                total[...] = own + dy

        later = n - 1 + step - N

        @pl.when((step >= N) & (later < L))
        def add():
            total[...] += column_of(i["column"], later) * wide(i["later"][0])

        @pl.when(step == N + L - 1)
        def write():
            o["out"][...] = total[...].astype(dtype)

    flops = 2 * tokens * D * (2 * N + 3 * N)
    return call(
        "depth_backward",
        body,
        (tokens // tile, N + L),
        inputs,
        outputs,
        [(tile, D), (tile, N)],
        count,
        _counts(at),
        flops,
        interpret,
    )


def _depth_operands(given: dict[str, Any], tile: int, state: Callable[..., Any]) -> dict[str, Operand]:
    """`state(j, n)`: which of `raw` step j reads, of the n - 1 that exist."""
    D = given["input"].shape[-1]
    found = {
        "input": by_token(given["input"], tile),
        "raw": Operand(given["raw"], (1, tile, D), lambda i, j, n: (state(j, n), i, 0)),
    }
    if given["update"] is not None:
        found["update"] = by_token(given["update"], tile)
    return found | {name: whole(array, 2) for name, array in zip(("p_static", "p_w1", "p_w2"), given["p"], strict=True)}


def _depth_of(i: dict[str, Any]) -> Depth:
    return Depth(wide(i["p_static"][...]), wide(i["p_w1"][...]), wide(i["p_w2"][...]))


def count_of(at: At) -> Array:
    """States that the layer mixes: the tower's input and the outputs so far."""
    return jnp.asarray(at.index + 2, jnp.int32)


def _counts(at: At) -> list[int]:
    return [layer + 2 for layer in at.choices]


def rows_of(p: Depth) -> Depth:
    return Depth(p.static_N[None], p.w1_ND, p.w2_NN)
