"""Re-injection and cross routes (CRC) as one-pass TPU kernels; the same functions as in ops/route_mix.py.

Shapes: t tokens of a tile, m = t/k concepts of it, n tiles, L layers, S sources, D width; tokens of all rows on one
axis.

All sources of a tile lie side by side in VMEM, because the routers read one another's results. A concept is expanded
there, by a product with zeros and ones; the one before a tile comes in an array of its own, `edge` [n, S, D]. Per-token
scalars travel in one array, since a TPU fills its last dimension up to 128.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from ncp_jax.ops.route_bytes import Operand
from ncp_jax.ops.route_call import F32, by_token, call, exact_dot, placement, whole
from ncp_jax.ops.route_mix import Read, cross_tile, cross_tile_backward, read_of, wide
from ncp_jax.ops.route_shapes import Cross, Crosses

TILE = 64  # tokens; VMEM holds all sources of two tiles, one being fetched
GATHER_WIDTH = 1024  # columns per step of the gather, which holds a tile of all layers and of all sources


class Layout(NamedTuple):
    """Static sizes: encoder and concept sources (0: no such route), re-injection, tile, k, early."""

    encoder: int
    concept: int
    inject: bool
    tile: int
    k: int
    early: int

    @property
    def columns(self) -> list[int]:
        """Where the per-token array is cut: encoder mean, inverse, concept mean, inverse, available, biased."""
        E, C = self.encoder, self.concept
        return [0, E, 2 * E, 2 * E + C, 2 * E + 2 * C, 2 * E + 2 * C + 1, 2 * E + 2 * C + 2]


@dataclass(frozen=True)
class Repeated:
    """A concept source of a tile: indexing it expands it to tokens."""

    rows: Any  # reference [m, D] behind an index
    edge: Any  # reference [1, D]
    layout: Layout

    def __getitem__(self, _: Any) -> Array:
        tile, k, early = self.layout.tile, self.layout.k, self.layout.early
        own = exact_dot(placement(tile, tile // k, k, early, -1), self.rows())
        return own + placement(tile, 1, k, early) * wide(self.edge())


@dataclass(frozen=True)
class Own:
    """A token source of a tile, behind an index."""

    rows: Any

    def __getitem__(self, _: Any) -> Array:
        return self.rows()


def forward(z_tD: Array, given: dict[str, Array], crosses: Crosses, layout: Layout, interpret: bool) -> Array:
    """The state after one layer's routes. `given`: the arrays of `operands`; vectors of `crosses` have one row."""
    leaves, tree = jax.tree.flatten(crosses)
    inputs = {"z": by_token(z_tD, layout.tile)} | operands(given, layout) | _parameters(leaves)
    outputs = {"h": by_token(jax.ShapeDtypeStruct(z_tD.shape, z_tD.dtype), layout.tile)}

    def body(nothing, i, o, scratch):
        h = cross_tile(wide(i["z"][...]), _crosses(i, tree, len(leaves)), *_reads(i, layout))[-1]
        o["h"][...] = h.astype(z_tD.dtype)

    flops = _flops(z_tD, layout)
    return call("cross_forward", body, _grid(z_tD, layout), inputs, outputs, [], _nothing(), [0], flops, interpret)["h"]


def backward(
    dh_tD: Array, z_tD: Array, given: dict[str, Array], crosses: Crosses, layout: Layout, interpret: bool
) -> tuple[Array, Crosses, Array, Array]:
    """(dz, d parameters, d per-token array, trace [tokens, 2 E + 2 C]: weights and d hidden layer of both routes)."""
    leaves, tree = jax.tree.flatten(crosses)
    tokens, D = z_tD.shape
    inputs = {"dh": by_token(dh_tD, layout.tile), "z": by_token(z_tD, layout.tile)}
    inputs |= operands(given, layout) | _parameters(leaves)
    outputs = {
        "dz": by_token(jax.ShapeDtypeStruct((tokens, D), z_tD.dtype), layout.tile),
        "trace": by_token(jax.ShapeDtypeStruct((tokens, max(layout.columns[4], 1)), F32), layout.tile),
        "scalars": by_token(jax.ShapeDtypeStruct((tokens, layout.columns[-1]), F32), layout.tile),
    }
    outputs |= {f"d{n}": whole(jax.ShapeDtypeStruct(leaf.shape, F32), 2) for n, leaf in enumerate(leaves)}

    def body(nothing, i, o, scratch):
        dz, d, statistics, trace = cross_tile_backward(
            wide(i["dh"][...]), wide(i["z"][...]), _crosses(i, tree, len(leaves)), *_reads(i, layout)
        )
        o["dz"][...] = dz.astype(z_tD.dtype)
        _pack(o["trace"], trace)
        _pack(o["scalars"], [part for pair in statistics for part in pair or (None, None)])

        @pl.when(pl.program_id(0) == 0)
        def zero():
            for n in range(len(leaves)):
                o[f"d{n}"][...] = jnp.zeros_like(o[f"d{n}"])

        for n, part in enumerate(jax.tree.leaves(d)):
            o[f"d{n}"][...] += part

    found = call(
        "cross_backward",
        body,
        _grid(z_tD, layout),
        inputs,
        outputs,
        [],
        _nothing(),
        [0],
        3 * _flops(z_tD, layout),
        interpret,
    )
    d = jax.tree.unflatten(tree, [found[f"d{n}"] for n in range(len(leaves))])
    return found["dz"], d, found["scalars"], found["trace"]


def gather(
    dh: Array, trace: Array, scalars_tC: Array, crosses: Crosses, layout: Layout, interpret: bool
) -> dict[str, Array]:
    """Cotangents of all sources, by name as in `operands`; dh [L, tokens, D], crosses stacked."""
    (L, tokens, D), tile, dtype = dh.shape, layout.tile, dh.dtype
    width = GATHER_WIDTH if D % GATHER_WIDTH == 0 else D
    E, C, m, n = layout.encoder, layout.concept, layout.tile // layout.k, tokens // layout.tile
    grid = (D // width, n)
    inputs = {
        "dh": Operand(dh, (L, tile, width), lambda w, i, *_: (0, i, w)),
        "trace": Operand(trace, (L, tile, trace.shape[-1]), lambda w, i, *_: (0, i, 0)),
        "scalars": Operand(scalars_tC, (tile, scalars_tC.shape[-1]), lambda w, i, *_: (i, 0)),
    }
    for name, p in zip(("inject", "encoder", "concept"), crosses, strict=True):
        if p is not None:
            inputs[f"{name}_gain"] = Operand(p.gain_D, (L, width), lambda w, i, *_: (0, w))
        if isinstance(p, Cross):
            S = p.w1_SD.shape[1]
            inputs[f"{name}_w1"] = Operand(p.w1_SD, (L, S, width), lambda w, i, *_: (0, 0, w))
    outputs = {}
    if E:
        like = jax.ShapeDtypeStruct((E, tokens, D), dtype)
        outputs["encoder"] = Operand(like, (E, tile, width), lambda w, i, *_: (0, i, w))
    for name, S in (("concept", C), ("injected", int(layout.inject))):
        if S:
            like = jax.ShapeDtypeStruct((S, n * m, D), dtype)
            outputs[name] = Operand(like, (S, m, width), lambda w, i, *_: (0, i, w))
            edge = jax.ShapeDtypeStruct((n, S, D), dtype)
            outputs[f"{name}_edge"] = Operand(edge, (1, S, width), lambda w, i, *_: (i, 0, w))

    def body(nothing, i, o, scratch):
        _gather_tile(i, o, L, layout)

    flops = 2 * dh.size * (E + C + 2)
    return call("cross_gather", body, grid, inputs, outputs, [], _nothing(), [0], flops, interpret)


def _gather_tile(i: dict[str, Any], o: dict[str, Any], L: int, layout: Layout) -> None:
    E, C, cut = layout.encoder, layout.concept, layout.columns
    after = [wide(i["dh"][l]) for l in range(L)]

    def columns(l: int, start: int, count: int) -> Array:
        return i["trace"][l][:, start : start + count]

    def total(name: str, weight: Sequence[Array]) -> Array:
        parts = [weight[l] * (i[f"{name}_gain"][l : l + 1] * after[l]) for l in range(L)]
        return sum(parts[1:], parts[0])

    def before(name: str, start: int, count: int) -> None:
        for l in range(L):
            after[l] += jnp.dot(columns(l, start, count), wide(i[f"{name}_w1"][l]), preferred_element_type=F32)

    if C:
        for s in range(C):
            inverse = i["scalars"][:, cut[3] + s : cut[3] + s + 1]
            weight = [columns(l, 2 * E + s, 1) * inverse for l in range(L)]
            _fold(total("concept", weight), o, "concept", s, layout)
        before("concept", 2 * E + C, C)
    if E:
        for s in range(E):
            inverse = i["scalars"][:, cut[1] + s : cut[1] + s + 1]
            weight = [columns(l, s, 1) * inverse for l in range(L)]
            o["encoder"][s] = total("encoder", weight).astype(o["encoder"].dtype)
        before("encoder", E, E)
    if layout.inject:
        available = i["scalars"][:, cut[4] : cut[5]]
        _fold(total("inject", [available] * L), o, "injected", 0, layout)


def _fold(x_tD: Array, o: dict[str, Any], name: str, s: int, layout: Layout) -> None:
    """Sum tokens into their concepts, those of the concept before the tile apart."""
    tile, k, early = layout.tile, layout.k, layout.early
    dtype = o[name].dtype
    o[name][s] = exact_dot(placement(tile, tile // k, k, early, -1), x_tD.astype(dtype), 0).astype(dtype)
    edge = (placement(tile, 1, k, early) * x_tD).sum(axis=0, keepdims=True)
    o[f"{name}_edge"][0, s : s + 1] = edge.astype(dtype)


def operands(given: dict[str, Array], layout: Layout) -> dict[str, Operand]:
    """What cross routes read: scalars [tokens, C], encoder [E, tokens, D], concept and injected [C, m n, D], edges."""
    tile, m = layout.tile, layout.tile // layout.k
    found = {"scalars": by_token(given["scalars"], tile)}
    for name in ("encoder", "concept", "injected"):
        if name in given:
            S, _, D = given[name].shape
            rows = tile if name == "encoder" else m
            found[name] = Operand(given[name], (S, rows, D), lambda i, *_: (0, i, 0))
            if name != "encoder":
                found[f"{name}_edge"] = Operand(given[f"{name}_edge"], (1, S, D), lambda i, *_: (i, 0, 0))
    return found


def _reads(i: dict[str, Any], layout: Layout) -> tuple[Array | None, Array, Read | None, Read | None]:
    """The reads of `cross_tile` from a tile's references."""
    cut = layout.columns
    parts = [i["scalars"][:, a:b] for a, b in itertools.pairwise(cut)]
    injected, encoder, concept = None, None, None

    def repeated(name: str, s: int) -> Repeated:
        return Repeated(lambda: i[name][s], lambda: i[f"{name}_edge"][0, s : s + 1], layout)

    if layout.inject:
        injected = repeated("injected", 0)[...] * parts[4]
    if layout.encoder:
        states = [Own(lambda s=s: i["encoder"][s]) for s in range(layout.encoder)]
        encoder = read_of(states, parts[0], parts[1], 1.0)
    if layout.concept:
        concept = read_of([repeated("concept", s) for s in range(layout.concept)], parts[2], parts[3], parts[5])
    return injected, parts[5], encoder, concept


def _pack(ref: Any, parts: Sequence[Array | None]) -> None:
    start = 0
    ref[...] = jnp.zeros_like(ref)
    for part in parts:
        if part is not None:
            ref[:, start : start + part.shape[-1]] = part
            start += part.shape[-1]


def _parameters(leaves: Sequence[Array]) -> dict[str, Operand]:
    return {f"p{n}": whole(leaf, 2) for n, leaf in enumerate(leaves)}


def _crosses(i: dict[str, Any], tree: Any, count: int) -> Crosses:
    return jax.tree.unflatten(tree, [wide(i[f"p{n}"][...]) for n in range(count)])


def rows_of(crosses: Crosses) -> Crosses:
    """Vectors of one layer as one row."""
    return jax.tree.map(lambda x: x[None] if x.ndim == 1 else x, crosses)


def vectors_of(crosses: Crosses, like: Crosses) -> Crosses:
    """The reverse."""
    return jax.tree.map(lambda x, y: x.reshape(y.shape), crosses, like)


def _grid(z_tD: Array, layout: Layout) -> tuple[int]:
    return (z_tD.shape[0] // layout.tile,)


def _flops(z_tD: Array, layout: Layout) -> int:
    """Mixtures and routers: 4 D per token and source."""
    return 4 * z_tD.size * (layout.encoder + layout.concept + 1)


def _nothing() -> Array:
    return jnp.zeros((), jnp.int32)
