"""Copies: tensors that a published checkpoint holds under two names, which must have the same values."""

import math
from collections.abc import Mapping

import numpy as np

from ncp_jax.checkpoint.hf_files import TensorFiles
from ncp_jax.checkpoint.hf_names import NameMap
from ncp_jax.checkpoint.hf_tensor import HFMismatch, listing

BLOCK_ELEMENTS = 1 << 22  # compared at a time: what a comparison takes beside the pages of both tensors


def check_copies(names: NameMap, files: TensorFiles, found: Mapping[str, str]) -> None:
    """Raise HFMismatch that lists every two copies with different values.

    found: the names in the files, as `hf_io.match` gives them. Copies that share their bytes are not read.
    """
    lines = []
    for copy, name in names.copies:
        one, other = found[name], found.get(copy)
        if other is None or files.tensors[one] == files.tensors[other]:
            continue
        if difference := largest_difference(files.array(one), files.array(other)):
            lines.append(f"{other} differs from {one}: by up to {difference:.9g}")
        files.forget(one)
        files.forget(other)
    if lines:
        raise HFMismatch(
            f"{files.folder} holds tensors twice, with values that should be equal and are not: it is not clear which "
            f"ones the model has; fetch the checkpoint again{listing(lines)}"
        )


def largest_difference(one: np.ndarray, other: np.ndarray) -> float:
    """Between two arrays of equal shape; 0 where all values are equal, NaN to NaN included; else infinite for NaN."""
    rows = max(1, BLOCK_ELEMENTS // max(math.prod(one.shape[1:]), 1))
    largest = 0.0
    for start in range(0, len(one), rows):
        a, b = (array[start : start + rows].astype(np.float64) for array in (one, other))
        unequal = (a != b) & ~(np.isnan(a) & np.isnan(b))
        if unequal.any():
            largest = max(largest, float(np.nan_to_num(np.abs(a - b)[unequal], nan=np.inf).max()))
    return largest
