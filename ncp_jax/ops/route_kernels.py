"""The routes of ops/route_mix.py as TPU kernels: each reads every state once per pass.

Shapes: t tokens of a tile, m = t/k concepts of it, L layers, N = L + 1 candidates, S sources, D width. Arrays come as
[..., B, T, D], rows and tokens split over a mesh; a kernel sees its device's tokens as one axis.

A depth route's grid is (tiles, states): the number of states that exist is a prefetched scalar, blocks beyond it repeat
an index, which moves nothing, and their steps do nothing; so one kernel serves all layers of a scan. A cross route's
grid is (tiles,), all sources of a tile side by side in VMEM, because its routers read one another's results. A concept
is expanded in VMEM; the one before a tile comes in an array of its own, `edge`. Per-token scalars travel in one array,
since a TPU fills its last dimension up to 128. Backward mathematics: autodiff of the forward tile, inside the kernel.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from ncp_jax.ops import route_mix
from ncp_jax.ops.route_bytes import Operand, moved_bytes
from ncp_jax.ops.route_mix import At, Depth, Outside, depth_weights, wide
from ncp_jax.ops.splash import _devices, _dividing

DEPTH_TILE, CROSS_TILE = 256, 64  # tokens; a cross route holds all sources of a tile twice, one tile being fetched
VMEM = 58 * 2**20  # of 64 MiB on v5p; v5e and v6e have more
F32 = jnp.float32


class Kernels(NamedTuple):
    """The functions of ops/route_mix.py as kernels. `rows`, `tokens`: mesh axes that split them."""

    rows: Any = None
    tokens: Any = None
    interpret: bool = False

    def depth_forward(
        self, at: At, input_BTD: Array, raw: Array, update_BTD: Array | None, p: Depth, softmax: bool
    ) -> tuple[Array, Array]:
        """As route_mix.depth_forward."""

        def run(count, input_BTD, raw, update, p):
            shape = input_BTD.shape
            given = depth_inputs(flat(input_BTD), flat(raw), flat(update), p, self.interpret)
            out = depth_forward_call(count, given, at, softmax, self.interpret)
            return out["z"].reshape(shape), out["weight"].reshape(*shape[:2], -1)

        split = self._split(input_BTD)
        specs = P(), P(*split), P(None, *split), P(*split), P()
        return self._over_mesh(run, specs, (P(*split), P(*split)))(
            _count(at), input_BTD, raw, update_BTD, _rows(p)
        )

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
            arrays = depth_inputs(flat(input_BTD), flat(raw), flat(update), p, self.interpret)
            more = (flat(dz), flat(column), flat(out_raw), flat(pooled), flat(lines))
            out = depth_backward_call(count, arrays, more, at, softmax, k, self.interpret)
            dp = jax.tree.map(self._summed(split), Depth(out["static"], out["w1"], out["w2"]))
            dy = None if update is None else out["dy"].reshape(shape)
            return out["out"].reshape(shape), dy, dp

        one, many = P(*split), P(None, *split)
        specs = (P(), one, many, one, P(), many, one, many, many, one)
        out, dy, dp = self._over_mesh(run, specs, (one, one, P()))(
            _count(at), input_BTD, raw, update_BTD, _rows(p), dz, column,
            None if outside is None else outside.raw, pooled, lines,
        )  # fmt: skip
        return out, dy, Depth(dp.static_N[0], dp.w1_ND, dp.w2_NN)

    cross_forward = staticmethod(route_mix.cross_forward)
    cross_backward = staticmethod(route_mix.cross_backward)
    cross_gather = staticmethod(route_mix.cross_gather)

    def _split(self, x_BTD: Array) -> tuple[Any, Any]:
        mesh = jax.sharding.get_abstract_mesh()
        return _dividing(mesh, self.rows, x_BTD.shape[0]), _dividing(mesh, self.tokens, x_BTD.shape[1])

    def _summed(self, split: tuple[Any, Any]) -> Callable[[Array], Array]:
        mesh = jax.sharding.get_abstract_mesh()
        axes = [axis for part in split for axis in ((part,) if isinstance(part, str) else part or ())]
        return lambda x: x if mesh.empty or not axes else lax.psum(x, tuple(axes))

    def _over_mesh(self, run: Callable, in_specs: Any, out_specs: Any) -> Callable:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return run
        # A kernel is opaque to the partitioner. check_vma: it does not say over which axes its outputs vary.
        return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def flat(x: Array | None) -> Any:
    """[..., B, T, D] -> [..., B T, D]."""
    return None if x is None else x.reshape(*x.shape[:-3], -1, x.shape[-1])


def tile_of(tokens: int, most: int, k: int, interpret: bool) -> int:
    """The largest tile of whole chunks, up to `most`, that divides the tokens. Raises ValueError for one too small."""
    tile = k * math.gcd(tokens // k, max(most // k, 1))
    if not interpret and tile % 64:
        raise ValueError(
            f"{tokens} tokens on a device do not divide into tiles of 64, as the kernels of routing.tower 'kernel' "
            "need; choose rows of a multiple of 64 chunks per device, or routing.tower=scan"
        )
    return tile


def call(
    body: Callable, grid: tuple[int, ...], inputs: dict[str, Operand], outputs: dict[str, Operand],
    scratch: Sequence[tuple[int, ...]], scalar: Array, like: int, flops: int, interpret: bool,
) -> dict[str, Array]:  # fmt: skip
    """Run `body(scalar, inputs, outputs, scratch)`, refs by name. Cost is estimated for the scalar's value `like`."""
    operands = [*inputs.values(), *outputs.values()]

    def kernel(scalar_ref, *refs):
        names = [*inputs, *outputs]
        found = dict(zip(names, refs, strict=False))
        ins, outs = ({name: found[name] for name in group} for group in (inputs, outputs))
        body(scalar_ref[0], ins, outs, refs[len(names) :])

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=grid,
        in_specs=[pl.BlockSpec(o.block, _with_scalar(o.index)) for o in inputs.values()],
        out_specs=[pl.BlockSpec(o.block, _with_scalar(o.index)) for o in outputs.values()],
        scratch_shapes=[pltpu.VMEM(shape, F32) for shape in scratch],
    )  # fmt: skip
    run = pl.pallas_call(
        kernel, grid_spec=spec, out_shape=[o.value for o in outputs.values()], interpret=interpret,
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=0, bytes_accessed=moved_bytes(grid, operands, (like,))
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * len(grid), vmem_limit_bytes=VMEM
        ),
    )  # fmt: skip
    return dict(zip(outputs, run(scalar.reshape(1), *(o.value for o in inputs.values())), strict=True))


def depth_inputs(input_tD: Array, raw: Array, update: Array | None, p: Depth, interpret: bool) -> dict[str, Any]:
    """What both passes of a depth route read, flat; see `depth_operands`."""
    return {"input": input_tD, "raw": raw, "update": update, "p": p, "interpret": interpret}


def depth_forward_call(count: Array, given: dict[str, Any], at: At, softmax: bool, interpret: bool) -> dict[str, Array]:
    """Newest state first: the router reads it."""
    (tokens, D), N = given["input"].shape, given["raw"].shape[0] + 1
    tile = tile_of(tokens, DEPTH_TILE, 1, interpret)
    inputs = _depth_operands(given, tile, lambda j, n: _clip(n - 2 - j, 0, N - 2))
    outputs = {
        "z": _by_token(jax.ShapeDtypeStruct((tokens, D), given["raw"].dtype), tile),
        "weight": _by_token(jax.ShapeDtypeStruct((tokens, N), F32), tile),
    }

    def body(n, i, o, scratch):
        total, step = scratch[0], pl.program_id(1)

        @pl.when(step == 0)
        def _():
            y = wide(i["update"][...] if "update" in i else i["raw"][0])
            o["weight"][...] = depth_weights(y, _depth_of(i), n, softmax)
            total[...] = _column(o["weight"], n - 1) * wide(i["raw"][0])

        @pl.when((step > 0) & (step < n - 1))
        def _():
            total[...] += _column(o["weight"], n - 1 - step) * wide(i["raw"][0])

        @pl.when(step == n - 1)
        def _():
            o["z"][...] = (total[...] + _column(o["weight"], 0) * wide(i["input"][...])).astype(o["z"].dtype)

    like = _mean_count(at)
    flops = 2 * tokens * D * (like + N)
    return call(body, (tokens // tile, N), inputs, outputs, [(tile, D)], count, like, flops, interpret)


def depth_backward_call(
    count: Array, given: dict[str, Any], more: tuple, at: At, softmax: bool, k: int, interpret: bool
) -> dict[str, Array]:
    """States oldest first, for the weights' cotangents, the newest meeting the router; then later layers' cotangents."""
    dz, column, out_raw, pooled, lines = more
    (tokens, D), L = given["input"].shape, given["raw"].shape[0]
    N, dtype = L + 1, given["raw"].dtype
    tile = tile_of(tokens, DEPTH_TILE // 2, k, interpret)
    inputs = _depth_operands(given, tile, lambda j, n: _clip(j - 1, 0, n - 2))
    inputs |= {
        "own": Operand(dz, (1, tile, D), lambda i, j, n: (n - 2, i, 0)),
        "later": Operand(dz, (1, tile, D), lambda i, j, n: (_clip(n - 1 + j - N, _clip(n - 1, 0, L - 1), L - 1), i, 0)),
        "column": _by_token(column, tile),
    }
    if out_raw is not None:
        inputs |= {
            "outside": Operand(out_raw, (1, tile, D), lambda i, j, n: (n - 2, i, 0)), "lines": _by_token(lines, tile)
        }  # fmt: skip
    if pooled is not None:
        inputs["pooled"] = Operand(pooled, (1, tile // k, D), lambda i, j, n: (n - 2, i, 0))
    outputs = {"out": _by_token(jax.ShapeDtypeStruct((tokens, D), dtype), tile)}
    if given["update"] is not None:
        outputs["dy"] = outputs["out"]
    for name, array in zip(("static", "w1", "w2"), given["p"], strict=True):
        outputs[name] = _whole(jax.ShapeDtypeStruct(array.shape, F32), 2)

    def body(n, i, o, scratch):
        total, dw = scratch
        step = pl.program_id(1)

        @pl.when((step == 0) & (pl.program_id(0) == 0))
        def _():
            for name in ("static", "w1", "w2"):
                o[name][...] = jnp.zeros_like(o[name])

        def inner(candidate, state) -> None:
            product = (wide(i["own"][0]) * wide(state)).sum(axis=-1, keepdims=True)
            dw[...] += jnp.where(lax.broadcasted_iota(jnp.int32, dw.shape, 1) == candidate, product, 0.0)

        @pl.when(step == 0)
        def _():
            dw[...] = jnp.zeros_like(dw)
            inner(0, i["input"][...])

        @pl.when((step > 0) & (step < n))
        def _():
            inner(step, i["raw"][0])

        @pl.when(step == n - 1)
        def _():
            y = wide(i["update"][...] if "update" in i else i["raw"][0])
            _, back = jax.vjp(lambda y, p: depth_weights(y, p, n, softmax), y, _depth_of(i))
            dy, dp = back(dw[...])
            for name, part in zip(("static", "w1", "w2"), dp, strict=True):
                o[name][...] += part
            own = _column(i["column"], n - 2) * wide(i["own"][0])
            if "outside" in i:
                own += wide(i["outside"][0]) + i["lines"][:, :1] + i["lines"][:, 1:] * wide(i["raw"][0])
            if "pooled" in i:
                own += expanded(wide(i["pooled"][0]) / k, tile, k)
            if "dy" in o:
                o["dy"][...] = dy.astype(dtype)
                total[...] = own
            else:
                total[...] = own + dy

        later = n - 1 + step - N

        @pl.when((step >= N) & (later < L))
        def _():
            total[...] += _column(i["column"], later) * wide(i["later"][0])

        @pl.when(step == N + L - 1)
        def _():
            o["out"][...] = total[...].astype(dtype)

    like = _mean_count(at)
    flops = 2 * tokens * D * (2 * N + 3 * N)
    return call(
        body, (tokens // tile, N + L), inputs, outputs, [(tile, D), (tile, N)], count, like, flops, interpret
    )


def expanded(c_mD: Array, tile: int, k: int, early: int = 0) -> Array:
    """Rows repeated k times, by a product with zeros and ones: row (t + early) // k of t; zero beyond."""
    shape = (tile, c_mD.shape[0])
    token, row = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    choice = ((token + early) // k == row).astype(F32)
    return jnp.dot(choice, c_mD, precision=lax.Precision.HIGHEST, preferred_element_type=F32)


def _depth_operands(given: dict[str, Any], tile: int, state: Callable[..., Any]) -> dict[str, Operand]:
    """`state(j, n)`: which of `raw` step j reads, of the n - 1 that exist."""
    D = given["input"].shape[-1]
    found = {
        "input": _by_token(given["input"], tile),
        "raw": Operand(given["raw"], (1, tile, D), lambda i, j, n: (state(j, n), i, 0)),
    }
    if given["update"] is not None:
        found["update"] = _by_token(given["update"], tile)
    return found | {
        name: _whole(array, 2) for name, array in zip(("p_static", "p_w1", "p_w2"), given["p"], strict=True)
    }


def _depth_of(i: dict[str, Any]) -> Depth:
    return Depth(wide(i["p_static"][...]), wide(i["p_w1"][...]), wide(i["p_w2"][...]))


def _by_token(value: Any, tile: int) -> Operand:
    return Operand(value, (tile, value.shape[-1]), lambda i, *_: (i, 0))


def _whole(value: Any, axes: int) -> Operand:
    return Operand(value, value.shape, lambda *_: (0,) * axes)


def _column(ref: Any, index: Any) -> Array:
    """[t, 1]: one column, by a traced number."""
    x = ref[...]
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 1) == index, x, 0.0).sum(axis=-1, keepdims=True)


def _count(at: At) -> Array:
    """States that the layer mixes: the tower's input and the outputs so far."""
    return jnp.asarray(at.index + 2, jnp.int32)


def _mean_count(at: At) -> int:
    return round(sum(at.choices) / len(at.choices)) + 2


def _rows(p: Depth) -> Depth:
    return Depth(p.static_N[None], p.w1_ND, p.w2_NN)


def _with_scalar(index: Callable) -> Callable:
    return lambda *args: index(*args[:-1], args[-1][0])


def _clip(x: Any, low: Any, high: Any) -> Any:
    """Within [low, high], for plain numbers too."""
    if all(isinstance(v, int) for v in (x, low, high)):
        return min(max(x, low), high)
    return jnp.minimum(jnp.maximum(x, low), high)
