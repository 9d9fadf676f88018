"""Residual routes: weights over earlier states, and their mixture.

Shapes: B batch, T positions, D width, n candidate states. States come as a tuple of n arrays [B, T, D], oldest first;
XLA fuses the sum over them, so no [n, B, T, D] array is built.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array


def depth_weights(y_BTD: Array, static_n: Array, w1_Dn: Array, w2_nn: Array, softmax: bool) -> Array:
    """Weights over a tower's own history, [B, T, n] (IRC; report Eq. 15-16).

    Exact GELU and no biases, as in the released runtime's routes.py.
    """
    w_BTn = static_n + _mlp(y_BTD, w1_Dn, w2_nn)
    return _softmax(w_BTn) if softmax else w_BTn


def cross_weights(y_BTD: Array, w1_Dn: Array, w2_nn: Array) -> Array:
    """Softmax weights over another tower's layers, [B, T, n] (CRC; report Eq. 19)."""
    return _softmax(_mlp(y_BTD, w1_Dn, w2_nn))


def mixture(weight_BTn: Array, states: Sequence[Array]) -> Array:
    """Sum of weighted states, [B, T, D], accumulated in at least f32 (report Eq. 18, 20)."""
    wide = jnp.promote_types(weight_BTn.dtype, jnp.float32)
    total = jnp.zeros_like(states[0], dtype=wide)
    for n, state_BTD in enumerate(states):
        total += weight_BTn[..., n, None].astype(wide) * state_BTD.astype(wide)
    return total.astype(states[0].dtype)


def _mlp(y_BTD: Array, w1_Dn: Array, w2_nn: Array) -> Array:
    return jax.nn.gelu(y_BTD @ w1_Dn, approximate=False) @ w2_nn


def _softmax(w_BTn: Array) -> Array:
    wide = jnp.promote_types(w_BTn.dtype, jnp.float32)
    return jax.nn.softmax(w_BTn.astype(wide), axis=-1).astype(w_BTn.dtype)
