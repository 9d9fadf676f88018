"""Attention: one definition of who sees whom, and the reference computation.

Shapes: B batch, T queries, J keys, H heads, K key-value heads, G = H/K, h head size.
"""

import jax
import jax.numpy as jnp
from jax import Array


def visible(
    query_positions_BT: Array,
    key_positions_BJ: Array,
    window: int | None,
    query_segments_BT: Array | None = None,
    key_segments_BJ: Array | None = None,
) -> Array:
    """Boolean [B, T, J]: query sees key iff 0 <= q - j < window, in the same segment, and the key is no padding.

    `window` counts the query's own key; None is full causal attention. Positions are absolute, segment 0 is padding.
    """
    distance = query_positions_BT[:, :, None] - key_positions_BJ[:, None, :]
    seen = distance >= 0
    if window is not None:
        seen = seen & (distance < window)
    if query_segments_BT is not None and key_segments_BJ is not None:
        same = query_segments_BT[:, :, None] == key_segments_BJ[:, None, :]
        seen = seen & same & (key_segments_BJ[:, None, :] > 0)
    return seen


def attend(q_BTHh: Array, k_BJKh: Array, v_BJKh: Array, mask_BTJ: Array) -> Array:
    """softmax(q k / sqrt(h)) v with grouped key-value heads; scores and softmax in at least f32. [B, T, H, h].

    A query that sees nothing returns 0. Every query must see a key for its gradient to mean anything.
    """
    wide = jnp.promote_types(q_BTHh.dtype, jnp.float32)
    B, T, H, h = q_BTHh.shape
    K = k_BJKh.shape[2]
    q_BTKGh = q_BTHh.reshape(B, T, K, H // K, h)
    score_BKGTJ = jnp.einsum("BTKGh,BJKh->BKGTJ", q_BTKGh, k_BJKh, preferred_element_type=wide) * h**-0.5
    mask_B11TJ = mask_BTJ[:, None, None]
    score_BKGTJ = jnp.where(mask_B11TJ, score_BKGTJ, jnp.finfo(wide).min)
    weight_BKGTJ = jnp.where(mask_B11TJ, jax.nn.softmax(score_BKGTJ, axis=-1), 0)
    out_BTKGh = jnp.einsum("BKGTJ,BJKh->BTKGh", weight_BKGTJ.astype(v_BJKh.dtype), v_BJKh)
    return out_BTKGh.reshape(B, T, H, h)
