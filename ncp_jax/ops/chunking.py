"""Tokens to chunks and back: mean pooling, and the causal shift that returns concepts to tokens.

Shapes: B batch, T tokens, M = T // k chunks, k tokens per chunk, D width. Chunks are cut from the row's start.
"""

import jax.numpy as jnp
from jax import Array


def chunk_mean(x_BTD: Array, k: int) -> Array:
    """Mean of each full chunk, [B, M, D]; the T - M k tail tokens are left out. Report Eq. 2.

    Summed in at least f32 and rounded once.
    """
    B, T, D = x_BTD.shape
    M = T // k
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    return x_BTD[:, : M * k].reshape(B, M, k, D).mean(axis=2, dtype=wide).astype(x_BTD.dtype)


def chunk_segments(segments_BT: Array, k: int) -> Array:
    """Segment of each chunk, [B, M]: that of its k tokens if they agree and none is padding, else 0 (no concept)."""
    B, T = segments_BT.shape
    s_BMk = segments_BT[:, : T // k * k].reshape(B, T // k, k)
    first = s_BMk[:, :, 0]
    return jnp.where((s_BMk == first[:, :, None]).all(axis=2), first, 0)


def concept_index(length: int, k: int, shift: bool = True) -> Array:
    """Which concept token t receives, int [T]; -1 for none.

    floor((t+1)/k) - 1: the last token of chunk m already receives the prediction made from chunk m (report Eq. 11,
    0-based). `shift=False`: floor(t/k) - 1, one token later.
    """
    return (jnp.arange(length) + int(shift)) // k - 1


def shift_and_repeat(c_BMD: Array, index_T: Array, available_BT: Array, fill: Array | float = 0.0) -> Array:
    """Each token's concept, [B, T, D]; `fill` (a scalar or [D]) where none is available."""
    return jnp.where(available_BT[:, :, None], c_BMD[:, jnp.maximum(index_T, 0)], jnp.asarray(fill, c_BMD.dtype))


def available(index_T: Array, concept_segments_BM: Array, segments_BT: Array) -> Array:
    """[B, T] bool: token t has a concept: its index is not negative and that chunk is a concept of t's own segment.

    A chunk of segment 0 is no concept (see `chunk_segments`).
    """
    segment_BT = concept_segments_BM[:, jnp.maximum(index_T, 0)]
    return (index_T >= 0)[None] & (segment_BT > 0) & (segment_BT == segments_BT)
