"""TensorFiles: the tensor files of one folder beside their index, read in place.

Two kinds: safetensors, and torch's own `pytorch_model.bin`, which is read without torch (hf_torch.py). All headers are
checked when a folder is opened; values stay on disk until a part of a tensor is touched, through a memory map.
"""

import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ncp_jax.checkpoint.hf_safetensors import read_safetensors
from ncp_jax.checkpoint.hf_tensor import HFError, StoredTensor, damaged, listing, parse_json
from ncp_jax.checkpoint.hf_torch import read_torch

INDEX = "model.safetensors.index.json"


class Kind(NamedTuple):
    """A format of tensor files."""

    name: str
    pattern: str  # of their names
    listed: str  # name of the file that lists the shards
    read: Callable[[Path], dict[str, StoredTensor]]


# Where a folder has both, the first is read, as transformers does.
KINDS = (
    Kind("safetensors", "*.safetensors", INDEX, read_safetensors),
    Kind("pytorch_model.bin", "pytorch_model*.bin", "pytorch_model.bin.index.json", read_torch),
)


class TensorFiles:
    """The tensors of one folder, read-only. Opening reads headers alone."""

    def __init__(self, folder: str | os.PathLike):
        """Raises HFError for a file that is absent, damaged or unlisted, and for a tensor that is stored twice."""
        self.folder = Path(folder)
        self.tensors: dict[str, StoredTensor] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        kind = _kind(self.folder)
        index, problems = _read_index(self.folder / kind.listed), []
        for file in _shards(self.folder, kind, index):
            for name, tensor in kind.read(file).items():
                other = self.tensors.setdefault(name, tensor)
                if other is not tensor:
                    problems.append(f"duplicate: {name} is {other} in {other.file.name}, {tensor} in {file.name}")
        problems += _index_problems(kind, index, self.tensors)
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


def _kind(folder: Path) -> Kind:
    if not folder.is_dir():
        raise HFError(f"{folder} is not a folder; give one with config.json and tensor files")
    for kind in KINDS:
        if (folder / kind.listed).exists() or any(folder.glob(kind.pattern)):
            return kind
    absent = " and ".join(f"no {kind.name} file" for kind in KINDS)
    raise HFError(f"{folder} has {absent}; fetch the whole checkpoint")


def _read_index(file: Path) -> dict[str, str] | None:
    if not file.exists():
        return None
    document = parse_json(file.read_bytes(), file)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise damaged(file, "it has no 'weight_map' from tensor names to file names")
    outside = sorted({shard for shard in weight_map.values() if Path(shard).name != shard})
    if outside:
        raise HFError(f"{file} points outside its folder: {', '.join(outside)}")
    return weight_map


def _shards(folder: Path, kind: Kind, index: dict[str, str] | None) -> list[Path]:
    there = sorted(path.name for path in folder.glob(kind.pattern))
    if index is None:
        if len(there) == 1:
            return [folder / there[0]]
        raise HFError(f"{folder} has {len(there)} {kind.name} files but no {kind.listed}; fetch the whole checkpoint")
    named = set(index.values())
    problems = [f"missing file: {shard}, named by {kind.listed}" for shard in sorted(named - set(there))]
    problems += [f"missing from {kind.listed}: {shard}" for shard in there if shard not in named]
    if problems:
        raise _disagreement(folder, problems)
    return [folder / shard for shard in sorted(named)]


def _index_problems(kind: Kind, index: dict[str, str] | None, tensors: Mapping[str, StoredTensor]) -> list[str]:
    if index is None:
        return []
    lines = [f"missing: {name}, which {kind.listed} places in {index[name]}" for name in index if name not in tensors]
    for name, tensor in tensors.items():
        if index.get(name) != tensor.file.name:
            lines.append(f"unlisted: {name} {tensor} is in {tensor.file.name}, {kind.listed} says {index.get(name)}")
    return lines


def _disagreement(folder: Path, problems: list[str]) -> HFError:
    return HFError(f"{folder}: its index and its files disagree; fetch the whole checkpoint again{listing(problems)}")
