"""Bytes that a kernel's blocks move between HBM and VMEM, counted from its grid and BlockSpecs."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

LANES, SUBLANE_BYTES = 128, 32  # a TPU's HBM tile: 8 rows of 128 for 4-byte values, 16 for 2-byte values


class Operand(NamedTuple):
    """An array of a kernel, or its shape and dtype; its block; the block's index from (*program, *scalars)."""

    value: Any
    block: tuple[int, ...]
    at: Callable[..., tuple[Any, ...]]


def moved_bytes(grid: Sequence[int], operands: Sequence[Operand], scalars: Sequence[int] = ()) -> int:
    """Bytes moved by one call: a block moves whenever its index differs from the program's before, as Pallas pipelines.

    Blocks count as they lie in HBM, their last two dimensions filled up to whole tiles.
    """
    total = 0
    for operand in operands:
        moves, last = 0, None
        for program in itertools.product(*map(range, grid)):
            index = operand.at(*program, *scalars)
            moves, last = moves + (index != last), index
        total += moves * _block_bytes(operand)
    return total


def _block_bytes(operand: Operand) -> int:
    size = jnp.dtype(operand.value.dtype).itemsize
    *outer, rows, columns = operand.block
    rows_filled = min(_up(rows, SUBLANE_BYTES // size), _up(operand.value.shape[-2], SUBLANE_BYTES // size))
    return math.prod(outer) * rows_filled * _up(columns, LANES) * size


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def ideal_states(encoder: int, concept: int, decoder: int, k: int) -> float:
    """States (one [B, T, D] array at token rate) that the routes must read: each layer's sources once forward and once
    backward; the concept tower and concept sources at 1/k."""
    own = _candidates(encoder) + _candidates(decoder) + _candidates(concept) / k
    cross = encoder * decoder + concept * decoder / k + (encoder - 1) * concept / k
    return 2 * (own + cross + decoder / k)  # and the injected concept


def kernel_states(encoder: int, concept: int, decoder: int, k: int) -> dict[str, float]:
    """States that the kernel form moves, by part: kernels as their block mappings do, without per-token scalars and
    parameters (1 to 2 % at a width of 4096); `copies` and `around` are what XLA does between them.

    copies: a kernel's result is written once more, into its stack. around: chunk means cut to the layers that are read,
    with their statistics; the cotangent of a tower's input; cotangents at the edges of tiles.
    """
    rate = 1 / k
    towers = ((encoder, 1.0, 1 + rate), (concept, rate, 1.0), (decoder, 1.0, 0.0))  # layers, rate, from outside
    read = decoder * (encoder + (concept + 1) * rate) + concept * (encoder - 1) * rate
    crossing = decoder + concept * rate
    return {
        "depth_forward": sum(r * (_candidates(L) + L) for L, r, _ in towers) + rate * encoder,  # chunk means
        "depth_backward": sum(
            r * (_candidates(L) + sum(max(L - 1 - l, 1) for l in range(L)) + (2 + outside) * L)
            for L, r, outside in towers
        ),
        "cross_forward": read + 2 * crossing,
        "cross_backward": read + 3 * crossing,
        "cross_gather": decoder + encoder + (concept + 1) * rate + rate * (concept + encoder - 1),
        "copies": 4 * crossing,
        "around": 3 * rate * (encoder - 1)
        + sum(r * (L + 2) for L, r, _ in towers) + 2 * (concept + 1) * rate,
    }  # fmt: skip


def _candidates(layers: int) -> float:
    """States that the depth routes of a tower mix: 2 after its first layer, layers + 1 after its last."""
    return sum(layer + 2 for layer in range(layers))
