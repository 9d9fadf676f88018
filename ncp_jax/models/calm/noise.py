"""Keys of the CALM family's noise: no two rows, purposes or draws share one.

The key of a step and micro-batch (train/step.py) is split over the rows of that batch, then folded with a purpose,
then, for targets, with the number of a draw. Rows lie on different devices, so devices never draw alike either.
Replicas with equal noise, which the official data-parallel ranks have, would see fewer samples than they pay for.
"""

import jax
from jax import Array

HEAD, TARGET, INPUT, TIME, TOKENS, LATENT = range(6)  # purposes


def row_keys(key: Array, rows: int, purpose: int) -> Array:
    """One key per row, [B]."""
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(jax.random.split(key, rows), purpose)
