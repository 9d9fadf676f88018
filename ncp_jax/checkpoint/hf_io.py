"""Between tensor files and parameter trees: one tensor at a time, onto any sharding, nothing unaccounted for.

Host memory: twice one tensor, its pages and a copy in our layout, or that copy and the transfer's. A large leaf is
assembled where it lives, slice by slice; leaves up to BUFFER_BYTES are assembled on the host, which spares a
compilation for each of their shapes.
"""

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ncp_jax.checkpoint.hf_copies import check_copies
from ncp_jax.checkpoint.hf_files import TensorFiles
from ncp_jax.checkpoint.hf_names import NameMap, Part, Shape, Tensor
from ncp_jax.checkpoint.hf_tensor import HFError, HFMismatch, listing
from ncp_jax.checkpoint.hf_writer import TensorWriter
from ncp_jax.checkpoint.leaves import CheckpointMismatch

BUFFER_BYTES = 32 << 20
READABLE = ("bfloat16", "float16", "float32")  # float64 would be cut, integers and float8 need scales that are not here
# No weights: bookkeeping of transformer-engine; what follows from the base of RoPE, in files of old transformers.
IGNORED = ("._extra_state", ".rotary_emb.inv_freq")
ALIGNMENT = 64  # bytes; XLA's
BLOCK_BYTES = 4 << 20  # of one task of a copy that reorders axes


class Written(NamedTuple):
    """What an export did."""

    tensors: int
    parameters: int  # copies count once
    rounded: tuple[str, ...]  # tensors with values that the written dtype could not hold
    left_out: tuple[str, ...] = ()  # settings that the format has no field for


def match(names: NameMap, files: TensorFiles) -> dict[str, str]:
    """The map's name of each tensor -> its name in the files, which may stand under other dotted prefixes.

    Copies are in it where they are in the files; a tensor without a place of its own has its copy's. Raises HFMismatch
    that lists every missing, unexpected, duplicate and mis-shaped tensor, HFError for dtypes that no weights have.
    """
    expected = names.shapes
    cores = {name.removeprefix(names.root): name for name in expected}
    found: dict[str, str] = {}
    lines = []
    for stored, place in sorted(files.tensors.items()):
        if stored.endswith(IGNORED):
            continue
        name, held = _resolve(stored, cores), f"{stored} {_text(place.shape)}"
        if name is None:
            lines.append(f"unexpected: {held}, no tensor of this model")
        elif name in found:
            other = f"{found[name]} {_text(files.tensors[found[name]].shape)}"
            lines.append(f"duplicate: {other} and {held} are both {name} {_text(expected[name])}")
        else:
            found[name] = stored
            if place.shape != expected[name]:
                needed = _text(expected[name])
                lines.append(f"shape: {stored} is {_text(place.shape)}, the configuration needs {needed}")
    found |= {name: found[copy] for copy, name in names.copies if copy in found and name not in found}
    lines += [f"missing: {t.name} {_text(t.shape)}, absent here" for t in names.tensors if t.name not in found]
    if lines:
        raise HFMismatch(
            f"{files.folder} does not hold the model of its config.json ({names.format}): {len(lines)} tensors differ"
            f"{listing(sorted(lines))}"
        )
    _check_dtypes(files, dict.fromkeys(found.values()))
    return found


def load_leaves(
    names: NameMap,
    files: TensorFiles,
    shardings: Mapping[str, Sharding],
    dtype: Any = jnp.float32,
    buffer_bytes: int = BUFFER_BYTES,
) -> dict[str, jax.Array]:
    """Our leaves as device arrays, each on its sharding. Every process of a multi-host run calls this alike.

    dtype: of all leaves, or a mapping from leaf to dtype.
    Raises like `match`, and HFMismatch where two copies of one tensor differ.
    """
    found = match(names, files)
    check_copies(names, files, found)
    parts = _parts_by_leaf(names)
    leaves = {}
    for leaf, shape in names.leaves().items():
        kind = np.dtype(dtype[leaf] if isinstance(dtype, Mapping) else dtype)
        assemble = _on_host if math.prod(shape) * kind.itemsize <= buffer_bytes else _on_device
        pieces = [_Piece(files, found[tensor.name], part) for tensor, part in parts[leaf]]
        leaves[leaf] = assemble(shape, kind, shardings[leaf], pieces)
    return leaves


def save_leaves(names: NameMap, writer: TensorWriter, batches: Iterable[Mapping[str, Any]]) -> Written:
    """Fill a new checkpoint from `batches` of leaves (numpy or jax arrays); each batch is dropped before the next.

    Raises CheckpointMismatch for leaves that are missing, unknown or of another shape.
    """
    parts, shapes = _parts_by_leaf(names), names.leaves()
    rounded: set[str] = set()
    done: set[str] = set()
    for batch in batches:
        for leaf, array in batch.items():
            if leaf not in shapes or tuple(array.shape) != shapes[leaf]:
                raise CheckpointMismatch(
                    f"leaf {leaf} {list(array.shape)} does not fit format {names.format}, which has "
                    f"{list(shapes[leaf]) if leaf in shapes else 'no such leaf'}"
                )
            rounded |= _fill(writer, parts[leaf], array)
        done |= batch.keys()
        del batch, array  # the next batch needs their room
    if missing := sorted(shapes.keys() - done):
        raise CheckpointMismatch(f"format {names.format} needs leaves that are not there: {', '.join(missing)}")
    for copy, name in names.copies:
        writer.array(copy)[...] = writer.array(name)
        writer.forget(copy)
        writer.forget(name)
    writer.finish()
    return Written(len(names.shapes), names.parameters, tuple(sorted(rounded)))


def _fill(writer: TensorWriter, parts: Iterable[tuple[Tensor, Part]], array: Any) -> set[str]:
    """Write one leaf; the names of tensors that lost bits."""
    rounded = set()
    for tensor, part in parts:
        value = np.asarray(array if part.at is None else array[part.at])
        if _copy(part.layout.ours(writer.array(tensor.name)), value):
            rounded.add(tensor.name)
        writer.forget(tensor.name)
    return rounded


def _resolve(stored: str, cores: Mapping[str, str]) -> str | None:
    """The expected name that is `stored` without some leading dotted parts, the longest first (official loader)."""
    words = stored.split(".")
    for start in range(len(words)):
        name = cores.get(".".join(words[start:]))
        if name is not None:
            return name
    return None


def _check_dtypes(files: TensorFiles, stored: Iterable[str]) -> None:
    strange = [f"{name} {files.tensors[name]}" for name in stored if files.tensors[name].dtype.name not in READABLE]
    if strange:
        raise HFError(
            f"{files.folder}: {len(strange)} tensors are neither {', '.join(READABLE[:-1])} nor {READABLE[-1]}; "
            f"convert or dequantise them first{listing(strange)}"
        )


def _parts_by_leaf(names: NameMap) -> dict[str, list[tuple[Tensor, Part]]]:
    parts: dict[str, list[tuple[Tensor, Part]]] = {}
    for tensor in names.tensors:
        for part in tensor.parts:
            parts.setdefault(part.leaf, []).append((tensor, part))
    return parts


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A slice of a leaf, still in its file."""

    files: TensorFiles
    stored: str
    part: Part

    def read(self, wanted: Iterable[Any]) -> dict[str, np.ndarray]:
        """Contiguous copies of parts of the slice, by `str` of the part; then the file's pages are given back."""
        view = self.part.layout.ours(self.files.array(self.stored))
        copies: dict[str, np.ndarray] = {}
        for index in wanted:  # devices that hold the same values share one copy
            if str(index) not in copies:
                copies[str(index)] = _aligned(view[index].shape, view.dtype)
                _copy(copies[str(index)], view[index])
        self.files.forget(self.stored)
        return copies


def _on_host(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding, pieces: list[_Piece]) -> jax.Array:
    whole = np.empty(shape, dtype)
    for piece in pieces:
        (values,) = piece.read([()]).values()
        whole[... if piece.part.at is None else piece.part.at] = values
    return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])


def _on_device(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding, pieces: list[_Piece]) -> jax.Array:
    """Slices travel in their stored dtype; each is waited for, so that no second copy of one lies on the host."""
    leaf = None
    for piece in pieces:
        if piece.part.at is None:
            raw = _put(piece, sharding)
            leaf = raw.astype(dtype)
        else:
            raw = _put(piece, _entry_sharding(sharding))
            leaf = jnp.zeros(shape, dtype, device=sharding) if leaf is None else leaf
            leaf = _set_entry(leaf, raw, piece.part.at, sharding)
        jax.block_until_ready(leaf)
    assert leaf is not None  # a leaf has parts
    return leaf


def _put(piece: _Piece, sharding: Sharding) -> jax.Array:
    shape = piece.part.layout.shape
    places = sharding.addressable_devices_indices_map(shape)
    copies = piece.read(places.values())
    arrays = [jax.device_put(copies[str(index)], device) for device, index in places.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


@partial(jax.jit, donate_argnums=0, static_argnames="sharding")
def _set_entry(leaf: jax.Array, entry: jax.Array, index: jax.Array, sharding: Sharding) -> jax.Array:
    new = jax.lax.dynamic_update_index_in_dim(leaf, entry.astype(leaf.dtype), index, 0)
    return jax.lax.with_sharding_constraint(new, sharding)


def _entry_sharding(sharding: Sharding) -> Sharding:
    """Of one entry on the first axis."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding  # one device


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised, on a boundary from which the CPU backend takes an array as it is, without a copy of its own."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _copy(into: np.ndarray, source: np.ndarray) -> bool:
    """Copy values between equal shapes, any strides, on all cores; whether the target's dtype could not hold some."""
    if into.ndim == 0:
        into, source = into.reshape(1), source.reshape(1)
    rows = max(1, BLOCK_BYTES * into.shape[0] // max(source.nbytes, 1))

    def block(start: int) -> bool:
        values = source[start : start + rows]
        new = values.astype(into.dtype, copy=False)
        # As integers: numpy moves their bits without Python's lock.
        _bits(into)[start : start + rows] = _bits(new)
        return new.dtype != values.dtype and bool((new.astype(values.dtype) != values).any())

    starts = range(0, into.shape[0], rows)
    if len(starts) <= 1:
        return any(map(block, starts))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return any(list(pool.map(block, starts)))


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")


def _text(shape: Shape) -> str:
    return str(list(shape))
