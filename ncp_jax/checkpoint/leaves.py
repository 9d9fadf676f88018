"""Leaf tables: the names, shapes, dtypes and checksums of a pytree's arrays, and how two tables differ.

A leaf's name is its path joined by '/', for example `params/encoder/blocks/wq` or `opt_state/0/mu/embed/table`.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ncp_jax.config import differences


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What is known about one array without reading it."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int | None = None  # None: only described, never computed

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def empty(self) -> bool:
        return 0 in self.shape


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, found, read or used. The message names the path and the remedy."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint whose leaves are not the leaves that were asked for."""


def flatten(tree: Any) -> dict[str, Any]:
    """Name -> leaf, in tree order. Raises CheckpointError if two leaves share a name."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in named:
            raise CheckpointError(f"two leaves are called '{name}'; a key that contains '/' collides with a nested one")
        named[name] = leaf
    return named


def unflatten_like(tree: Any, named: Mapping[str, Any]) -> Any:
    """The structure of `tree` with its leaves taken from `named`."""
    return jax.tree.unflatten(jax.tree.structure(tree), [named[name] for name in flatten(tree)])


def nest(named: Mapping[str, Any]) -> dict:
    """Nested plain dict: {'a/b': x} -> {'a': {'b': x}}."""
    nested: dict = {}
    for name, leaf in named.items():
        *parents, last = name.split("/")
        here = nested
        for parent in parents:
            here = here.setdefault(parent, {})
        here[last] = leaf
    return nested


def describe(named: Mapping[str, Any]) -> dict[str, Leaf]:
    """Leaf table of arrays or ShapeDtypeStructs, without checksums.

    Raises CheckpointError for a leaf that has no shape and dtype, or is a typed random key: stored keys are raw data.
    """
    table = {}
    for name, leaf in named.items():
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise CheckpointError(
                f"leaf '{name}' is a {type(leaf).__name__}; store arrays, for example jnp.asarray(value)"
            )
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise CheckpointError(
                f"leaf '{name}' is a typed random key ({leaf.dtype}); store jax.random.key_data(key), "
                "and rebuild it with jax.random.wrap_key_data(data)"
            )
        table[name] = Leaf(tuple(leaf.shape), np.dtype(leaf.dtype).name)
    return table


def checksums(named: Mapping[str, jax.Array]) -> dict[str, int]:
    """32-bit checksum of each array's bits; equal on every mesh, device count and platform. Waits for the arrays.

    sum over i of bits_i * weight_i modulo 2^32, i the row-major index. The weights are odd, so that a change of one
    element cannot vanish, and scattered, so that exchanged shards do not vanish either.
    """
    sums = {name: (_host_checksum if _on_this_cpu(array) else _device_checksum)(array) for name, array in named.items()}
    return {name: int(value) for name, value in jax.device_get(sums).items()}


def fingerprint(table: Mapping[str, Leaf]) -> str:
    """Twelve hex digits of names, shapes and dtypes."""
    text = json.dumps(sorted([name, leaf.dtype, *leaf.shape] for name, leaf in table.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def compare(ours: Mapping[str, Leaf], stored: Mapping[str, Leaf]) -> list[str]:
    """One line per leaf that is missing from the checkpoint, unexpected in it, or of another shape or dtype."""
    lines = [f"missing from the checkpoint: {name} {ours[name]}" for name in sorted(ours.keys() - stored.keys())]
    lines += [f"only in the checkpoint: {name} {stored[name]}" for name in sorted(stored.keys() - ours.keys())]
    for name in sorted(ours.keys() & stored.keys()):
        if (ours[name].shape, ours[name].dtype) != (stored[name].shape, stored[name].dtype):
            lines.append(f"differs: {name} is {ours[name]} here, {stored[name]} in the checkpoint")
    return lines


def explain_mismatch(ours: dict, theirs: dict) -> str:
    """The fields in which two resolved configs differ, one per line, as `key: here -> in the checkpoint`."""
    lines = differences(ours, theirs)
    if not lines:
        return "the two configs are equal: the code that builds the state has changed since the checkpoint was written"
    return "config fields that differ (here -> in the checkpoint):\n" + _indent(lines)


def refuse(where: str, lines: list[str], ours: dict | None, theirs: dict | None) -> CheckpointMismatch:
    """The error for a checkpoint whose leaf table differs by `lines`; explains it by configs if both are known."""
    message = f"{where} does not hold this state: {len(lines)} leaves differ\n{_indent(lines, limit=20)}"
    if ours is not None and theirs is not None:
        message += "\n" + explain_mismatch(ours, theirs)
    return CheckpointMismatch(message)


def _indent(lines: Iterable[str], limit: int = 60) -> str:
    lines = list(lines)
    more = [f"... and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n".join("  " + line for line in lines[:limit] + more)


BLOCK = 2**20  # words per step of a checksum
GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: Knuth's multiplicative hash of the index


def _on_this_cpu(array: jax.Array) -> bool:
    return array.is_fully_addressable and all(device.platform == "cpu" for device in array.devices())


def _host_checksum(array: jax.Array) -> int:
    """NumPy, no compilation: a tree has some thirty shapes, and compiling each costs 0.1 s or more."""
    values = np.asarray(array).reshape(-1)
    words = values.view(f"u{min(values.dtype.itemsize, 4)}")
    total = 0
    for start in range(0, words.size, BLOCK):  # in blocks: temporaries of a whole leaf would be four times its size
        block = words[start : start + BLOCK]
        scattered = np.arange(start, start + block.size, dtype=np.uint32) * np.uint32(GOLDEN)
        weights = (scattered ^ (scattered >> np.uint32(15))) | np.uint32(1)
        total += int(np.sum(block * weights, dtype=np.uint64))
    return total % 2**32


@jax.jit
def _device_checksum(array: jax.Array) -> jax.Array:
    """The same where the array lives. No reshape: shards stay where they are."""
    words = _words(array)
    index, stride = jnp.zeros((), jnp.uint32), 1
    for axis in reversed(range(words.ndim)):
        index = index + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    scattered = index * jnp.uint32(GOLDEN)
    weights = (scattered ^ (scattered >> 15)) | jnp.uint32(1)
    return jnp.sum(words * weights, dtype=jnp.uint32)


def _words(array: jax.Array) -> jax.Array:
    """The bits as uint32; an element of 8 bytes becomes two words on a new last axis."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return _words(jnp.stack([array.real, array.imag], axis=-1))
    width = min(array.dtype.itemsize, 4)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width]
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
