"""StoredTensor: where one tensor lies in a file, whatever the file's format; and the errors of reading such files."""

import json
import math
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ncp_jax.checkpoint.leaves import CheckpointError, CheckpointMismatch


class HFError(CheckpointError):
    """A Hugging Face checkpoint that cannot be read, understood or written. The message names place and remedy."""


class HFMismatch(CheckpointMismatch, HFError):
    """A checkpoint whose tensors are not the tensors of its configuration."""


class StoredTensor(NamedTuple):
    """Where one tensor lies."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte, from the start of the file
    strides: tuple[int, ...] | None = None  # in elements; None: row after row, without gaps

    @property
    def bytes(self) -> int:
        """From its first to its last element."""
        if self.strides is None or 0 in self.shape:
            return math.prod(self.shape) * self.dtype.itemsize
        return (1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"

    def within(self, memory: mmap.mmap) -> np.ndarray:
        """The tensor as a view of its file's memory map."""
        values = np.frombuffer(memory, np.uint8, self.bytes, self.offset).view(self.dtype)
        if self.strides is None or 0 in self.shape:
            return values.reshape(self.shape)
        steps = [step * self.dtype.itemsize for step in self.strides]
        return np.lib.stride_tricks.as_strided(values, self.shape, steps, writeable=values.flags.writeable)

    def drop_pages(self, memory: mmap.mmap) -> None:
        """Give back the memory that touching the tensor took; the file keeps its bytes, views stay valid."""
        start = self.offset // mmap.PAGESIZE * mmap.PAGESIZE
        if self.bytes and hasattr(mmap, "MADV_DONTNEED"):
            memory.madvise(mmap.MADV_DONTNEED, start, self.offset + self.bytes - start)


def listing(lines: Iterable[str]) -> str:
    """Lines of a message, one per problem; none is left out."""
    return "".join(f"\n  {line}" for line in lines)


def damaged(file: Path, what: str) -> HFError:
    """The error for a file that is not as its writer left it."""
    return HFError(f"{file} is damaged: {what}; fetch it again")


def parse_json(text: bytes, file: Path) -> Any:
    """JSON in which no name stands twice. Raises HFError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise HFError(f"{file} lists twice (duplicate): {', '.join(twice)}; fetch it again")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except HFError:
        raise
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"no JSON where JSON should be ({error})") from None
