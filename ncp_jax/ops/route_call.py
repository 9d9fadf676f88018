"""What the kernels of routes share: one way to call Pallas with a cost that its blocks bear out, and tile arithmetic.

Shapes: t tokens of a tile, m = t/k concepts of it, S sources, D width.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ncp_jax.config import ConfigError
from ncp_jax.ops.route_bytes import Operand, moved_bytes

VMEM = 58 * 2**20  # of 64 MiB on v5p; v5e and v6e have more
F32 = jnp.float32


def flat(x: Array | None) -> Any:
    """[..., B, T, D] -> [..., B T, D]."""
    return None if x is None else x.reshape(*x.shape[:-3], -1, x.shape[-1])


def tile_of(tokens: int, most: int, k: int, interpret: bool) -> int:
    """The largest tile of whole chunks, up to `most`, that divides the tokens. Raises ConfigError if there is none."""
    if tokens % k:
        raise ConfigError(
            f"{tokens} tokens on a device are no whole chunks of {k}, which route kernels need; choose rows of a "
            "multiple of it, or routing.tower=scan"
        )
    tile = k * math.gcd(tokens // k, max(most // k, 1))
    if not interpret and tile % 64:
        raise ConfigError(
            f"{tokens} tokens on a device do not divide into tiles of 64, as the kernels of routing.tower 'kernel' "
            "need; choose rows of a multiple of 64 chunks per device, or routing.tower=scan"
        )
    return tile


def call(
    name: str, body: Callable, grid: tuple[int, ...], inputs: dict[str, Operand], outputs: dict[str, Operand],
    scratch: Sequence[tuple[int, ...]], scalar: Array, likes: Sequence[int], flops: int, interpret: bool,
) -> dict[str, Array]:  # fmt: skip
    """Run `body(scalar, inputs, outputs, scratch)`, refs by name; `name` is the kernel's.

    Its cost is the mean over the values that the scalar can have, `likes`.
    """
    operands = [*inputs.values(), *outputs.values()]
    moved = round(statistics.mean(moved_bytes(grid, operands, (n,)) for n in likes))

    def kernel(scalar_ref, *refs):
        ins, rest = dict(zip(inputs, refs, strict=False)), refs[len(inputs) :]
        body(scalar_ref[0], ins, dict(zip(outputs, rest, strict=False)), rest[len(outputs) :])

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=grid,
        in_specs=[pl.BlockSpec(o.block, _with_scalar(o.at)) for o in inputs.values()],
        out_specs=[pl.BlockSpec(o.block, _with_scalar(o.at)) for o in outputs.values()],
        scratch_shapes=[pltpu.VMEM(shape, F32) for shape in scratch],
    )  # fmt: skip
    run = pl.pallas_call(
        kernel, name=name, grid_spec=spec, out_shape=[o.value for o in outputs.values()], interpret=interpret,
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=moved),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=[pltpu.ARBITRARY] * len(grid), vmem_limit_bytes=VMEM
        ),
    )  # fmt: skip
    return dict(zip(outputs, run(scalar.reshape(1), *(o.value for o in inputs.values())), strict=True))


def placement(tile: int, rows: int, k: int, early: int = 0, first: int = 0) -> Array:
    """Zeros and ones [t, m]: token t reads row (t + early) // k + first."""
    token, row = (lax.broadcasted_iota(jnp.int32, (tile, rows), axis) for axis in (0, 1))
    return (lax.div(token + early, k) + first == row).astype(F32)  # `//` would ask which TPU this is


def exact_dot(choice: Array, x: Array, axis: int = 1) -> Array:
    """choice (zeros and ones) times x over `axis` of choice, in float32; exact for bfloat16 in one pass."""
    if x.dtype == jnp.bfloat16:
        choice, precision = choice.astype(x.dtype), None
    else:
        precision = lax.Precision.HIGHEST
    dims = (((axis,), (0,)), ((), ()))
    return lax.dot_general(choice, x, dims, precision=precision, preferred_element_type=F32)


def by_token(value: Any, tile: int) -> Operand:
    return Operand(value, (tile, value.shape[-1]), lambda i, *_: (i, 0))


def whole(value: Any, axes: int) -> Operand:
    return Operand(value, value.shape, lambda *_: (0,) * axes)


def column_of(ref: Any, index: Any) -> Array:
    """[t, 1]: one column, by a traced number."""
    x = ref[...]
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 1) == index, x, 0.0).sum(axis=-1, keepdims=True)


def _with_scalar(index: Callable) -> Callable:
    return lambda *args: index(*args[:-1], args[-1][0])


def clip(x: Any, low: Any, high: Any) -> Any:
    """Within [low, high], for plain numbers too."""
    if all(isinstance(v, int) for v in (x, low, high)):
        return min(max(x, low), high)
    return jnp.minimum(jnp.maximum(x, low), high)
