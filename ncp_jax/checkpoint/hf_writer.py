"""TensorWriter: a new folder of safetensors shards and their index, filled in any order."""

import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ncp_jax.checkpoint.hf_files import INDEX
from ncp_jax.checkpoint.hf_safetensors import DTYPES, read_safetensors
from ncp_jax.checkpoint.hf_tensor import HFError, StoredTensor

CODES = {dtype: code for code, dtype in DTYPES.items()}
SHARD_BYTES = 5_000_000_000  # what transformers writes by default


class TensorWriter:
    """A checkpoint whose names, shapes and dtype are known beforehand: its files have their full size at once."""

    def __init__(
        self,
        folder: str | os.PathLike,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: Any,
        shard_bytes: int = SHARD_BYTES,
    ):
        """Raises HFError where the disk refuses or has no room."""
        self.folder, self._dtype = Path(folder), np.dtype(dtype)
        self._maps: dict[Path, mmap.mmap] = {}
        self._tensors: dict[str, StoredTensor] = {}
        groups = _grouped(shapes, self._dtype.itemsize, shard_bytes)
        for number, names in enumerate(groups, 1):
            file = self.folder / f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            self._tensors |= self._create(file, {name: shapes[name] for name in names})
        weight_map = {name: tensor.file.name for name, tensor in self._tensors.items()}
        total = sum(tensor.bytes for tensor in self._tensors.values())
        document = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(document, indent=2) + "\n")

    def array(self, name: str) -> np.ndarray:
        """A tensor as a writable view of its file."""
        return self._tensors[name].within(self._maps[self._tensors[name].file])

    def forget(self, name: str) -> None:
        """Give back the memory that writing a tensor took."""
        self._tensors[name].drop_pages(self._maps[self._tensors[name].file])

    def finish(self) -> None:
        """Return when every byte is on the disk. Raises HFError where the disk refuses."""
        for file, memory in self._maps.items():
            try:
                memory.flush()
            except OSError as error:
                raise _refused(file, error) from None

    def _create(self, file: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
        end = 0
        for name, shape in shapes.items():
            start, end = end, end + math.prod(shape) * self._dtype.itemsize
            header[name] = {"dtype": CODES[self._dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        size = 8 + len(text) + end
        try:
            with open(file, "w+b") as opened:
                opened.write(len(text).to_bytes(8, "little") + text)
                opened.flush()
                _claim(opened.fileno(), size)
                self._maps[file] = mmap.mmap(opened.fileno(), size)
        except OSError as error:
            raise _refused(file, error) from None
        return read_safetensors(file)


def _claim(descriptor: int, size: int) -> None:
    """Give a file its size, and its room on the disk: a map over a hole in a full disk kills without a message."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:  # macOS
        os.truncate(descriptor, size)


def _grouped(shapes: Mapping[str, tuple[int, ...]], itemsize: int, limit: int) -> list[list[str]]:
    """Names in order, cut where a file would grow above `limit` bytes; a larger tensor has a file of its own."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * itemsize
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _refused(file: Path, error: OSError) -> HFError:
    return HFError(f"cannot write {file}: {error.strerror}; free space or choose another place")
