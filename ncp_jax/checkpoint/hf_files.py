"""TensorFiles: a folder of safetensors shards beside their index, read in place.

A safetensors file is 8 bytes of header length, a JSON header (name -> dtype, shape, offsets), then the raw tensors. All
of that is checked when a folder is opened; values stay on disk until a part of a tensor is touched, through a memory
map. Source: the format's specification (huggingface/safetensors, README).
"""

import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ncp_jax.checkpoint.leaves import CheckpointError

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "I64": np.dtype(np.int64), "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16), "I8": np.dtype(np.int8), "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
}  # fmt: skip
HEADER_LIMIT = 100_000_000  # bytes; the format's own bound


class HFError(CheckpointError):
    """A Hugging Face checkpoint that cannot be read, understood or written. The message names place and remedy."""


class StoredTensor(NamedTuple):
    """Where one tensor lies."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte, from the start of the file

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"

    def within(self, memory: mmap.mmap) -> np.ndarray:
        """The tensor as a view of its file's memory map."""
        raw = np.frombuffer(memory, np.uint8, self.bytes, self.offset)
        return raw.view(self.dtype).reshape(self.shape)

    def drop_pages(self, memory: mmap.mmap) -> None:
        """Give back the memory that touching the tensor took; the file keeps its bytes, views stay valid."""
        start = self.offset // mmap.PAGESIZE * mmap.PAGESIZE
        if self.bytes and hasattr(mmap, "MADV_DONTNEED"):
            memory.madvise(mmap.MADV_DONTNEED, start, self.offset + self.bytes - start)


class TensorFiles:
    """The tensors of one folder, read-only. Opening reads headers alone."""

    def __init__(self, folder: str | os.PathLike):
        """Raises HFError for a file that is absent, damaged or unlisted, and for a tensor that is stored twice."""
        self.folder = Path(folder)
        self.tensors: dict[str, StoredTensor] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        index, problems = _read_index(self.folder), []
        for file in _shards(self.folder, index):
            for name, tensor in read_header(file).items():
                other = self.tensors.setdefault(name, tensor)
                if other is not tensor:
                    problems.append(f"duplicate: {name} is {other} in {other.file.name}, {tensor} in {file.name}")
        problems += _index_problems(index, self.tensors)
        if problems:
            raise _disagreement(self.folder, problems)

    def array(self, name: str) -> np.ndarray:
        """A tensor as a view of its file; bytes are read as they are touched."""
        tensor = self.tensors[name]
        if tensor.file not in self._maps:
            with open(tensor.file, "rb") as file:
                self._maps[tensor.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return tensor.within(self._maps[tensor.file])

    def forget(self, name: str) -> None:
        """Give back the memory that reading a tensor took."""
        tensor = self.tensors[name]
        if tensor.file in self._maps:
            tensor.drop_pages(self._maps[tensor.file])


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Name -> place of every tensor of one file. Raises HFError unless the file is whole and consistent."""
    entries, data = _read_entries(file)
    entries.pop("__metadata__", None)
    tensors = {name: _stored(file, name, entry, data) for name, entry in entries.items()}
    end, size = data, file.stat().st_size
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if tensor.offset != end:
            raise _damaged(file, f"tensor {name} begins at byte {tensor.offset}, the one before it ends at {end}")
        end += tensor.bytes
    if end != size:
        raise _damaged(file, f"{'truncated: ' if end > size else ''}it has {size} bytes, its header describes {end}")
    return tensors


def listing(lines: Iterable[str]) -> str:
    """Lines of a message, one per problem; none is left out."""
    return "".join(f"\n  {line}" for line in lines)


def _read_entries(file: Path) -> tuple[dict[str, Any], int]:
    """The header as it stands, and where the data begins."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_LIMIT):
                raise _damaged(file, f"its {size} bytes cannot hold the header of {length} bytes that it announces")
            text = opened.read(length)
    except OSError as error:
        raise HFError(f"cannot read {file}: {error.strerror}") from None
    entries = _json(text, file)
    if not isinstance(entries, dict):
        raise _damaged(file, "its header is no JSON object")
    return entries, 8 + length


def _stored(file: Path, name: str, entry: Any, data: int) -> StoredTensor:
    try:
        code, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise _damaged(file, f"the header entry of {name} is not a dtype, a shape and two offsets")
    if code not in DTYPES:
        raise HFError(f"{file}: tensor {name} has dtype {code}; known are {', '.join(DTYPES)}")
    tensor = StoredTensor(file, DTYPES[code], shape, data + start)
    if tensor.bytes != end - start:
        raise _damaged(file, f"tensor {name} is {tensor}, {tensor.bytes} bytes, but its place has {end - start}")
    return tensor


def _read_index(folder: Path) -> dict[str, str] | None:
    file = folder / INDEX
    if not folder.is_dir():
        raise HFError(f"{folder} is not a folder; give one with config.json and safetensors files")
    if not file.exists():
        return None
    document = _json(file.read_bytes(), file)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise _damaged(file, "it has no 'weight_map' from tensor names to file names")
    outside = sorted({shard for shard in weight_map.values() if Path(shard).name != shard})
    if outside:
        raise HFError(f"{file} points outside its folder: {', '.join(outside)}")
    return weight_map


def _shards(folder: Path, index: dict[str, str] | None) -> list[Path]:
    there = sorted(path.name for path in folder.glob("*.safetensors"))
    if index is None:
        if len(there) == 1:
            return [folder / there[0]]
        what = f"{len(there)} safetensors files but no {INDEX}" if there else "no safetensors file"
        raise HFError(f"{folder} has {what}; fetch the whole checkpoint")
    named = set(index.values())
    problems = [f"missing file: {shard}, named by {INDEX}" for shard in sorted(named - set(there))]
    problems += [f"missing from {INDEX}: {shard}" for shard in there if shard not in named]
    if problems:
        raise _disagreement(folder, problems)
    return [folder / shard for shard in sorted(named)]


def _index_problems(index: dict[str, str] | None, tensors: Mapping[str, StoredTensor]) -> list[str]:
    if index is None:
        return []
    lines = [f"missing: {name}, which {INDEX} places in {index[name]}" for name in index if name not in tensors]
    for name, tensor in tensors.items():
        if index.get(name) != tensor.file.name:
            lines.append(f"unlisted: {name} {tensor} is in {tensor.file.name}, {INDEX} says {index.get(name)}")
    return lines


def _json(text: bytes, file: Path) -> Any:
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
        raise _damaged(file, f"no JSON where JSON should be ({error})") from None


def _disagreement(folder: Path, problems: list[str]) -> HFError:
    return HFError(f"{folder}: its index and its files disagree; fetch the whole checkpoint again{listing(problems)}")


def _damaged(file: Path, what: str) -> HFError:
    return HFError(f"{file} is damaged: {what}; fetch it again")
