"""Rows of tokens as chunks: which ids a chunk holds, which chunks count, and which pairs (chunk, next chunk) do.

Shapes: B batch, T tokens, M = T / k chunks, k tokens per chunk.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ncp_jax.ops.chunking import chunk_positions


class Chunks(NamedTuple):
    """Chunks of a batch. `positions_BM` (chunks, restarting per document) only for packed documents."""

    tokens_BMk: Array
    real_BMk: Array  # bool: no padding
    segments_BM: Array  # document within the row, from 1; 0 marks a chunk that does not count
    positions_BM: Array | None

    @property
    def shape(self) -> tuple[int, int]:
        """(B, M)."""
        B, M = self.segments_BM.shape
        return B, M

    @property
    def pairs_BP(self) -> Array:
        """[B, M-1] bool: chunk m predicts chunk m + 1, both of one document. A document's first is never predicted."""
        here, following = self.segments_BM[:, :-1], self.segments_BM[:, 1:]
        return (here > 0) & (here == following)


def chunks(batch: Mapping[str, Array], k: int, pad: int | None) -> Chunks:
    """The chunks of a batch of rows (keys: train/task.py).

    Streams: chunks straddle documents, as in the official runs; a chunk counts if all of it is real.
    Packed documents: `pad` fills up a document's last chunk, whose end-of-text token is one of the row's tokens (the
    family reads its ends, train/task.py); without a pad id, chunks that are not full do not count.
    """
    tokens_BT, real_BT, packed = batch["tokens"], batch["real"], "segments" in batch
    segments_BT = batch.get("segments", real_BT.astype(jnp.int32))
    if pad is not None:
        tokens_BT = jnp.where(real_BT, tokens_BT, pad)
    tokens_BMk, real_BMk, segments_BMk = (a.reshape(len(a), -1, k) for a in (tokens_BT, real_BT, segments_BT))
    whole_BM = real_BMk[:, :, 0] if packed and pad is not None else real_BMk.all(axis=2)
    segments_BM = jnp.where(whole_BM, segments_BMk[:, :, 0], 0)
    positions_BM = chunk_positions(batch["positions"], k) if packed else None
    return Chunks(tokens_BMk, real_BMk, segments_BM, positions_BM)
