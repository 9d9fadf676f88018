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
