"""The functions of ops/route_mix.py as TPU kernels (ops/route_depth.py, ops/route_cross.py), over a mesh.

Shapes: L layers, N = L + 1 candidates, S sources, B batch, T tokens, M = T/k concepts, D width. Rows and tokens are
split over a mesh; a kernel sees its device's tokens as one axis. Parameters' cotangents are summed over devices.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from ncp_jax.ops import route_cross, route_depth
from ncp_jax.ops.route_call import flat, tile_of
from ncp_jax.ops.route_shapes import At, Crosses, Depth, Masks, Outside, Reads, Shift, Sources, Statistics, Summary
from ncp_jax.ops.split import devices_along, dividing, names_of


class Kernels(NamedTuple):
    """The functions of ops/route_mix.py as kernels. `rows`, `tokens`: mesh axes that split them."""

    rows: Any = None
    tokens: Any = None
    interpret: bool = False

    def depth_forward(
        self, at: At, input_BTD: Array, raw: Array, update_BTD: Array | None, p: Depth, softmax: bool,
        summary: Summary | None,
    ) -> tuple[Array, Array, Any]:  # fmt: skip
        """As route_mix.depth_forward."""

        def run(count, input_BTD, raw, update, p):
            given = route_depth.inputs_of(flat(input_BTD), flat(raw), flat(update), p)
            out = route_depth.forward(count, given, at, softmax, summary, self.interpret)
            return {name: x.reshape(*input_BTD.shape[:1], -1, x.shape[-1]) for name, x in out.items()}

        one = P(*self._split(input_BTD))
        names = ["z", "weight", *(["moments"] if summary else []), *(["pooled"] if summary and summary.k else [])]
        specs = P(), one, P(None, *one), one, P()
        found = self._over_mesh(run, specs, dict.fromkeys(names, one))(
            route_depth.count_of(at), input_BTD, raw, update_BTD, route_depth.rows_of(p)
        )
        moments = (found["moments"][..., 0], found["moments"][..., 1]) if summary else None
        return found["z"], found["weight"], (moments, found.get("pooled"))

    def depth_backward(
        self, at: At, input_BTD: Array, raw: Array, update_BTD: Array | None, p: Depth, softmax: bool,
        dz: Array, weights: Array, outside: Outside | None, k: int,
    ) -> tuple[Array, Array | None, Depth]:  # fmt: skip
        """As route_mix.depth_backward."""
        split, index = self._split(input_BTD), at.index
        column = jnp.moveaxis(lax.dynamic_index_in_dim(weights, index + 1, -1, keepdims=False), 0, -1)
        lines = None
        if outside is not None:
            lines = jnp.stack([outside.offset_LBT[index], outside.slope_LBT[index]], axis=-1)
        pooled = None if outside is None else outside.pooled

        def run(count, input_BTD, raw, update, p, dz, column, out_raw, pooled, lines):
            shape = input_BTD.shape
            arrays = route_depth.inputs_of(flat(input_BTD), flat(raw), flat(update), p)
            more = (flat(dz), flat(column), flat(out_raw), flat(pooled), flat(lines))
            out = route_depth.backward(count, arrays, more, at, softmax, k, self.interpret)
            dp = jax.tree.map(self._summed(split), Depth(out["static"], out["w1"], out["w2"]))
            dy = None if update is None else out["dy"].reshape(shape)
            return out["out"].reshape(shape), dy, dp

        one, many = P(*split), P(None, *split)
        specs = (P(), one, many, one, P(), many, one, many, many, one)
        out, dy, dp = self._over_mesh(run, specs, (one, one, P()))(
            route_depth.count_of(at), input_BTD, raw, update_BTD, route_depth.rows_of(p), dz, column,
            None if outside is None else outside.raw, pooled, lines,
        )  # fmt: skip
        return out, dy, Depth(dp.static_N[0], dp.w1_ND, dp.w2_NN)

    def prepare(self, z_BTD: Array, crosses: Crosses, reads: Reads, masks: Masks, shift: Shift) -> dict[str, Array]:
        """What the kernels read, made once per tower; the other functions take it for `masks`."""
        return self._given(reads, masks, self._layout(z_BTD, crosses, reads, shift), z_BTD)[0]

    def cross_forward(self, z_BTD: Array, crosses: Crosses, reads: Reads, masks: Any, shift: Shift) -> Array:
        """As route_mix.cross_forward."""
        layout, one = self._layout(z_BTD, crosses, reads, shift), P(*self._split(z_BTD))
        given, specs = self._given(reads, masks, layout, z_BTD)

        def run(z_BTD, given, crosses):
            flat_given = _flat_given(given)
            return route_cross.forward(flat(z_BTD), flat_given, crosses, layout, self.interpret).reshape(z_BTD.shape)

        return self._over_mesh(run, (one, specs, P()), one)(z_BTD, given, route_cross.rows_of(crosses))

    def cross_backward(
        self, dh_BTD: Array, z_BTD: Array, crosses: Crosses, reads: Reads, masks: Any, shift: Shift
    ) -> tuple[Array, Crosses, Statistics, Array]:
        """As route_mix.cross_backward; the trace is one array [B, T, ...]."""
        layout, split = self._layout(z_BTD, crosses, reads, shift), self._split(z_BTD)
        one = P(*split)
        given, specs = self._given(reads, masks, layout, z_BTD)

        def run(dh_BTD, z_BTD, given, crosses):
            flat_given = _flat_given(given)
            dz, d, scalars, trace = route_cross.backward(
                flat(dh_BTD), flat(z_BTD), flat_given, crosses, layout, self.interpret
            )
            by_row = [x.reshape(*z_BTD.shape[:2], -1) for x in (dz, scalars, trace)]
            return by_row[0], jax.tree.map(self._summed(split), d), by_row[1], by_row[2]

        mapped = self._over_mesh(run, (one, one, specs, P()), (one, P(), one, one))
        dz, d, scalars, trace = mapped(dh_BTD, z_BTD, given, route_cross.rows_of(crosses))
        cut = layout.columns
        parts = [scalars[..., a:b] for a, b in itertools.pairwise(cut)]
        statistics = Statistics(
            (parts[0], parts[1]) if layout.encoder else None, (parts[2], parts[3]) if layout.concept else None
        )
        return dz, route_cross.vectors_of(d, crosses), statistics, trace

    def cross_gather(self, dh: Array, trace: Array, crosses: Crosses, reads: Reads, masks: Any, shift: Shift) -> Reads:
        """As route_mix.cross_gather."""
        layout, split = self._layout(dh[0], crosses, reads, shift), self._split(dh[0])
        one, many = P(*split), P(None, *split)
        scalars = self._given(reads, masks, layout, dh[0])[0]["scalars"]
        names = ["encoder"] * bool(layout.encoder)
        for name, present in (("concept", layout.concept), ("injected", layout.inject)):
            names += [name, f"{name}_edge"] if present else []

        def run(dh, trace, scalars, crosses):
            found = route_cross.gather(flat(dh), flat(trace), flat(scalars), crosses, layout, self.interpret)
            B = dh.shape[1]
            return {
                name: x.reshape(B, -1, *x.shape[1:]) if name.endswith("edge") else x.reshape(len(x), B, -1, x.shape[-1])
                for name, x in found.items()
            }

        specs = {name: one if name.endswith("edge") else many for name in names}
        found = self._over_mesh(run, (many, many, one, P()), specs)(dh, trace, scalars, crosses)
        injected = _joined(found, "injected")
        encoder, concept = found.get("encoder"), _joined(found, "concept")
        return Reads(
            None if injected is None else injected[0],
            None if encoder is None else Sources(encoder, None, None),  # type: ignore[arg-type]
            None if concept is None else Sources(concept, None, None),  # type: ignore[arg-type]
        )

    def _layout(self, z_BTD: Array, crosses: Crosses, reads: Reads, shift: Shift) -> route_cross.Layout:
        tokens = z_BTD.shape[1] // devices_along(jax.sharding.get_abstract_mesh(), self._split(z_BTD)[1])
        at_concepts = reads.concept is not None or reads.injected is not None
        k, early = (shift.k, int(shift.early)) if at_concepts else (1, 0)
        encoder, concept = (0 if part is None else len(part.states) for part in (reads.encoder, reads.concept))
        tile = tile_of(tokens, route_cross.TILE, k, self.interpret)
        return route_cross.Layout(encoder, concept, reads.injected is not None, tile, k, early)

    def _given(self, reads: Reads, masks: Any, layout: route_cross.Layout, z_BTD: Array) -> tuple[dict, dict]:
        """(arrays that the kernels read, their specs)."""
        given = masks if isinstance(masks, dict) else _arrays(reads, masks, layout)
        split = self._split(z_BTD)
        alone = ("scalars", "concept_edge", "injected_edge")
        return given, {name: P(*split) if name in alone else P(None, *split) for name in given}

    def _split(self, x_BTD: Array) -> tuple[Any, Any]:
        mesh = jax.sharding.get_abstract_mesh()
        return dividing(mesh, self.rows, x_BTD.shape[0]), dividing(mesh, self.tokens, x_BTD.shape[1])

    def _summed(self, split: tuple[Any, Any]) -> Callable[[Array], Array]:
        axes = names_of(*split)
        return lambda x: lax.psum(x, axes) if axes else x

    def _over_mesh(self, run: Callable, in_specs: Any, out_specs: Any) -> Callable:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return run
        # A kernel is opaque to the partitioner. check_vma: it does not say over which axes its outputs vary.
        return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _arrays(reads: Reads, masks: Masks, layout: route_cross.Layout) -> dict[str, Array]:
    columns = [part for read in (reads.encoder, reads.concept) if read is not None for part in read[1:]]
    given = {"scalars": jnp.concatenate([*columns, masks.available_BT1, masks.biased_BT1], axis=-1)}
    if reads.encoder is not None:
        given["encoder"] = reads.encoder.states
    if reads.concept is not None:
        given["concept"] = reads.concept.states
    if reads.injected is not None:
        given["injected"] = reads.injected[None]
    for name in ("concept", "injected"):
        if name in given:
            given[f"{name}_edge"] = _edges(given[name], layout.tile // layout.k)
    return given


def _flat_given(given: dict[str, Array]) -> dict[str, Array]:
    """Tokens of all rows on one axis; edges [B, n, S, D] -> [B n, S, D]."""
    return {name: x.reshape(-1, *x.shape[2:]) if name.endswith("edge") else flat(x) for name, x in given.items()}


def _edges(states: Array, m: int) -> Array:
    """Of each tile of m concepts the one before it, zero at a row's start: [S, B, M, D] -> [B, M / m, S, D]."""
    S, B, M, D = states.shape
    last = states.reshape(S, B, M // m, m, D)[:, :, :-1, -1]
    return jnp.moveaxis(jnp.pad(last, ((0, 0), (0, 0), (1, 0), (0, 0))), 0, 2)


def _joined(found: dict[str, Array], name: str) -> Array | None:
    """Cotangents at concept rate, with those that arrived at the edges of tiles: the transpose of `_edges`."""
    if name not in found:
        return None
    d, edge = found[name], jnp.moveaxis(found[f"{name}_edge"], 2, 0)
    S, B, M, D = d.shape
    tiles = edge.shape[2]
    return d.reshape(S, B, tiles, M // tiles, D).at[:, :, :-1, -1].add(edge[:, :, 1:]).reshape(d.shape)
