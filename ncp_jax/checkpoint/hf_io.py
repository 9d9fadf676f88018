"""Between safetensors folders and parameter trees: one tensor at a time, onto any sharding, nothing unaccounted for.

Host memory: the pages of one tensor, and one copy of it in our layout. A large leaf is assembled where it lives, slice
by slice; leaves below BUFFER_BYTES are assembled on the host, which spares a compilation for each of their shapes.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ncp_jax.checkpoint.hf_files import HFError, StoredTensor, TensorFiles, listing
from ncp_jax.checkpoint.hf_names import NameMap, Part, Tensor
from ncp_jax.checkpoint.hf_writer import TensorWriter
from ncp_jax.checkpoint.leaves import CheckpointMismatch

BUFFER_BYTES = 32 << 20
READABLE = ("bfloat16", "float16", "float32")  # float64 would be cut, integers and float8 need scales that are not here
IGNORED = "._extra_state"  # transformer-engine bookkeeping, no weights
COPY_ROWS = 256  # rows per task of a copy that reorders axes


class HFMismatch(CheckpointMismatch, HFError):
    """A checkpoint whose tensors are not the tensors of its configuration."""


class Written(NamedTuple):
    """What an export did."""

    tensors: int
    parameters: int
    rounded: tuple[str, ...]  # tensors with values that the written dtype could not hold


def match(names: NameMap, files: TensorFiles) -> dict[str, str]:
    """The map's name of each tensor -> its name in the files, which may stand under other dotted prefixes.

    Raises HFMismatch that lists every missing, unexpected, duplicate and mis-shaped tensor, HFError for dtypes that no
    weights have.
    """
    expected = {tensor.name: tensor for tensor in names.tensors}
    cores = {name.removeprefix(names.root): name for name in expected}
    found: dict[str, str] = {}
    lines = []
    for stored, place in files.tensors.items():
        if stored.endswith(IGNORED):
            continue
        name = _resolve(stored, cores)
        if name is None:
            lines.append(f"unexpected: {stored} {_shape(place)}, no tensor of this model")
        elif name in found:
            other = f"{found[name]} {_shape(files.tensors[found[name]])}"
            lines.append(f"duplicate: {other} and {stored} {_shape(place)} are both {name} {_shape(expected[name])}")
        else:
            found[name] = stored
            if place.shape != expected[name].shape:
                lines.append(f"shape: {stored} is {_shape(place)}, the configuration needs {_shape(expected[name])}")
    lines += [f"missing: {name} {_shape(expected[name])}, absent here" for name in expected if name not in found]
    if lines:
        raise HFMismatch(
            f"{files.folder} does not hold the model of its config.json ({names.format}): {len(lines)} tensors differ"
            f"{listing(sorted(lines))}"
        )
    _check_dtypes(files, found.values())
    return found


def load_leaves(
    names: NameMap,
    files: TensorFiles,
    shardings: Mapping[str, Sharding],
    dtype: Any = jnp.float32,
    buffer_bytes: int = BUFFER_BYTES,
) -> dict[str, jax.Array]:
    """Our leaves as device arrays, each on its sharding. Every process of a multi-host run calls this alike.

    Raises like `match`.
    """
    found = match(names, files)
    parts = _parts_by_leaf(names)
    leaves = {}
    for leaf, shape in names.leaves().items():
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        assemble = _on_host if size <= buffer_bytes else _on_device
        pieces = ((part, partial(_view, files, found[tensor.name], part)) for tensor, part in parts[leaf])
        leaves[leaf] = assemble(shape, np.dtype(dtype), shardings[leaf], pieces)
        for tensor, _ in parts[leaf]:
            files.forget(found[tensor.name])
    return leaves


def save_leaves(
    names: NameMap, writer: TensorWriter, batches: Iterable[Mapping[str, Any]], dtype: Any = jnp.bfloat16
) -> Written:
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
            for tensor, part in parts[leaf]:
                value = np.asarray(array if part.at is None else array[part.at])
                written = value.astype(dtype)
                if written.dtype.itemsize < value.dtype.itemsize and (written.astype(value.dtype) != value).any():
                    rounded.add(tensor.name)
                _copy(part.layout.ours(writer.array(tensor.name)), written)
                writer.forget(tensor.name)
            done.add(leaf)
    if missing := sorted(shapes.keys() - done):
        raise CheckpointMismatch(f"format {names.format} needs leaves that are not there: {', '.join(missing)}")
    writer.finish()
    return Written(len(names.tensors), names.parameters, tuple(sorted(rounded)))


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


Pieces = Iterable[tuple[Part, Callable[[], np.ndarray]]]


def _view(files: TensorFiles, stored: str, part: Part) -> np.ndarray:
    return part.layout.ours(files.array(stored))


def _on_host(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding, pieces: Pieces) -> jax.Array:
    whole = np.empty(shape, dtype)
    for part, view in pieces:
        whole[... if part.at is None else part.at] = view()
    return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])


def _on_device(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding, pieces: Pieces) -> jax.Array:
    """Slices travel in their stored dtype; each is waited for, so that no second copy of one lies on the host."""
    leaf = None
    for part, view in pieces:
        if part.at is None:
            return jax.block_until_ready(_put(view(), sharding).astype(dtype))
        leaf = jnp.zeros(shape, dtype, device=sharding) if leaf is None else leaf
        leaf = jax.block_until_ready(_set_entry(leaf, _put(view(), _entry_sharding(sharding)), part.at, sharding))
    assert leaf is not None  # a leaf has parts
    return leaf


def _put(view: np.ndarray, sharding: Sharding) -> jax.Array:
    """A view of a file as a device array. Devices that hold the same values share one copy on the host."""
    copies: dict[str, np.ndarray] = {}

    def local(index) -> np.ndarray:
        key = str(index)
        if key not in copies:
            copies[key] = _contiguous(view[index])
        return copies[key]

    return jax.make_array_from_callback(view.shape, sharding, local)


@partial(jax.jit, donate_argnums=0, static_argnames="sharding")
def _set_entry(leaf: jax.Array, entry: jax.Array, index: jax.Array, sharding: Sharding) -> jax.Array:
    new = jax.lax.dynamic_update_index_in_dim(leaf, entry.astype(leaf.dtype), index, 0)
    return jax.lax.with_sharding_constraint(new, sharding)


def _entry_sharding(sharding: Sharding) -> Sharding:
    """Of one entry on the first axis."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding  # one device


def _contiguous(view: np.ndarray) -> np.ndarray:
    new = np.empty(view.shape, view.dtype)
    _copy(new, view)
    return new


def _copy(into: np.ndarray, source: np.ndarray) -> None:
    """Equal shapes and dtypes, any strides, all cores. Bits are copied as integers, which frees Python's lock."""
    bits = f"u{source.dtype.itemsize}"
    into, source = into.view(bits), source.view(bits)
    if source.ndim == 0 or source.shape[0] <= COPY_ROWS:
        into[...] = source
        return

    def block(start: int) -> None:
        into[start : start + COPY_ROWS] = source[start : start + COPY_ROWS]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(block, range(0, source.shape[0], COPY_ROWS)))


def _shape(tensor: StoredTensor | Tensor) -> str:
    return str(list(tensor.shape))
