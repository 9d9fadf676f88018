"""Held-out loss and bits per byte over every row of every source's held-out split.

Sums and weights travel separately and are divided once, so neither the batch size nor a ragged last batch matters.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ncp_jax.data.config import DataConfig
from ncp_jax.data.pipeline import evaluation_batches
from ncp_jax.data.store import TokenStore
from ncp_jax.parallel.mesh import row_slices
from ncp_jax.parallel.rules import batch_sharding, row_sharding

HostBatch = dict[str, np.ndarray]


class HeldOut:
    """The held-out stores of a data config, ready to be read again and again."""

    def __init__(
        self, config: DataConfig, *, split: str, batch: int, rows: int | None, chunk: int, vocab: int,
        ends: bool = False, slices: tuple[Sequence[int], int] = ((0,), 1),
    ):  # fmt: skip
        """`batch`: rows over all processes; `slices`: which (indices, count) of equal slices are this process's;
        `ends`: see data/pipeline.py."""
        self._parts = {}
        indices, count = slices
        for source in config.mixture:
            store = TokenStore.open(f"{source.path.rstrip('/')}/{split}")
            batches = evaluation_batches(
                store, config, batch=batch, chunk=chunk, limit=rows, vocab=vocab, ends=ends,
                process_index=indices, process_count=count,
            )  # fmt: skip
            self._parts[source.path] = (batches, store.token_bytes)

    def __iter__(self) -> Iterator[tuple[str, Iterable[HostBatch]]]:
        for name, (batches, token_bytes) in self._parts.items():
            yield name, (with_bytes(batch, token_bytes) for batch in batches)


class Interrupted(Exception):
    """An evaluation was asked to end early; it has no result."""


def evaluate(
    eval_step: Callable, params: Any, frozen: Any, held_out: HeldOut, mesh: Mesh,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:  # fmt: skip
    """Mean of each term (`loss/TERM`, or its own name if it has a slash), `bits_per_byte`, `scored_tokens` and `bytes`;
    bits per byte of several sources also one by one.

    Raises Interrupted as soon as `stop()` holds.
    """
    total: dict[str, float] = defaultdict(float)
    found: dict[str, float] = {}
    sources = list(held_out)
    for name, batches in sources:
        part: dict[str, float] = defaultdict(float)
        for batch in batches:
            if stop():
                raise Interrupted
            sums, weights, size = jax.device_get(eval_step(params, frozen, to_device(batch, mesh)))
            for term in sums:
                part[f"sum/{term}"] += float(sums[term])
                part[f"weight/{term}"] += float(weights[term])
            part["bytes"] += float(size)
        if len(sources) > 1 and "sum/ntp" in part:
            found[f"bits_per_byte/{name}"] = bits_per_byte(part["sum/ntp"], part["bytes"])
        for key, value in part.items():
            total[key] += value
    for key in [key for key in total if key.startswith("sum/")]:
        term = key.removeprefix("sum/")
        name = term if "/" in term else f"loss/{term}"
        found[name] = total[key] / max(total[f"weight/{term}"], 1.0)
    if "sum/ntp" in total:
        found["bits_per_byte"] = bits_per_byte(total["sum/ntp"], total["bytes"])
        found["scored_tokens"] = total["weight/ntp"]
    return found | {"bytes": total["bytes"]}


def bits_per_byte(nats: float, size: float) -> float:
    """Nats over all scored tokens -> bits per byte of their text. End-of-text tokens cost nats and have no bytes."""
    return nats / math.log(2) / max(size, 1.0)


def with_bytes(batch: HostBatch, token_bytes: np.ndarray) -> HostBatch:
    """Add `bytes` [B]: the text bytes that each row's scored targets stand for."""
    size = np.where(batch["scored"], token_bytes[batch["targets"]], 0).sum(axis=1)
    return {**batch, "bytes": size.astype(np.int32)}


def to_device(batch: HostBatch, mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows as part of global arrays."""
    rows, tokens = row_sharding(mesh), batch_sharding(mesh)
    return {
        name: _placed(value, rows if value.ndim == 1 else tokens, *row_slices(mesh)) for name, value in batch.items()
    }


def _placed(local: np.ndarray, sharding: NamedSharding, slices: tuple[int, ...], count: int) -> jax.Array:
    """The global array whose `slices`, of `count`, are `local`."""
    size = len(local) // len(slices)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        """What one device holds: one slice of the rows, and of each the tokens of its seq shard."""
        assert index is not None
        first = slices.index((index[0].start or 0) // size) * size
        return local[(slice(first, first + size), *index[1:])]

    return jax.make_array_from_callback((size * count, *local.shape[1:]), sharding, part)
