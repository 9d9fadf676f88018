"""Tokens to chunks and back: mean pooling, and the causal shift that returns concepts to tokens.

Shapes: B batch, T tokens, M = max(T // k, 1) chunks, k tokens per chunk, D width. Chunks are cut from the row's
start; a row shorter than k is one chunk filled up with padding, which is no concept.
"""

import jax.numpy as jnp
from jax import Array


def chunk_mean(x_BTD: Array, k: int) -> Array:
    """Mean of each full chunk, [B, M, D]; the T - M k tail tokens are left out. Report Eq. 2.

    Summed in at least f32 and rounded once.
    """
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    return _chunks(x_BTD, k).mean(axis=2, dtype=wide).astype(x_BTD.dtype)


def chunk_segments(segments_BT: Array, k: int) -> Array:
    """Segment of each chunk, [B, M]: that of its k tokens if they agree and none is padding, else 0 (no concept)."""
    s_BMk = _chunks(segments_BT, k)
    first_BM = s_BMk[:, :, 0]
    return jnp.where((s_BMk == first_BM[:, :, None]).all(axis=2), first_BM, 0)


def chunk_positions(positions_BT: Array, k: int) -> Array:
    """Position of each chunk within its document, [B, M]: counted in chunks (stride 1, not k)."""
    return _chunks(positions_BT, k)[:, :, 0] // k


def concept_index(length: int, k: int, shift: bool = True) -> Array:
    """Which concept token t receives, int [T]; -1 for none.

    floor((t+1)/k) - 1: the last token of chunk m already receives the prediction made from chunk m (report Eq. 11,
    0-based). `shift=False`: floor(t/k) - 1, one token later.
    """
    return (jnp.arange(length) + int(shift)) // k - 1


def shift_and_repeat(c_BMD: Array, index: Array, available_BT: Array, fill: Array | float = 0.0) -> Array:
    """Each token's concept, [B, T, D]; `fill` (a scalar or [D]) where none is available. `index`: [T] or [B, T]."""
    index = jnp.maximum(index, 0)
    taken_BTD = c_BMD[:, index] if index.ndim == 1 else jnp.take_along_axis(c_BMD, index[:, :, None], axis=1)
    return jnp.where(available_BT[:, :, None], taken_BTD, jnp.asarray(fill, c_BMD.dtype))


def available(index_T: Array, concept_segments_BM: Array, segments_BT: Array) -> Array:
    """[B, T] bool: token t has a concept: its index is not negative and that chunk is a concept of t's own segment.

    A chunk of segment 0 is no concept (see `chunk_segments`).
    """
    segment_BT = concept_segments_BM[:, jnp.maximum(index_T, 0)]
    return (index_T >= 0)[None] & (segment_BT > 0) & (segment_BT == segments_BT)


def _chunks(x: Array, k: int) -> Array:
    """[B, T, ...] -> [B, M, k, ...]."""
    T = x.shape[1]
    if k > T:
        x = jnp.pad(x, [(0, 0), (0, k - T)] + [(0, 0)] * (x.ndim - 2))
    M = max(T // k, 1)
    return x[:, : M * k].reshape(x.shape[0], M, k, *x.shape[2:])
