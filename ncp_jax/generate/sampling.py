"""How tokens are drawn: the settings, and the draw for rows with keys of their own.

Shapes: B rows, V vocabulary.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ncp_jax.config import ConfigError
from ncp_jax.ops.sampling import draw


class Sampling(NamedTuple):
    """Settings of a draw. Filters see the tempered distribution (ops/sampling.py)."""

    temperature: float = 0.8  # 0: greedy
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError for what no distribution can have."""
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature {self.temperature} is not a number from 0 (greedy); 1 is the model's own")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top-k {self.top_k} keeps no token; use at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p {self.top_p} is not in (0, 1]")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ConfigError(
                f"min-p {self.min_p} is not in [0, 1]: it is a share of the likeliest token's probability"
            )


def draw_rows(logits_BV: Array, keys_B: Array, how: Sampling) -> Array:
    """One token per row, [B] int32, each with its own key."""
    if how.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def one(logits_V: Array, key: Array) -> Array:
        return draw(logits_V[None], key, how.temperature, how.top_k, how.top_p, how.min_p)[0]

    return jax.vmap(one)(logits_BV, keys_B).astype(jnp.int32)


def row_keys(key: Array, rows: int, index: Array | int) -> Array:
    """A key for draw `index` of each row, [B]: fold_in(fold_in(key, row), index)."""
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), index))(jnp.arange(rows))
