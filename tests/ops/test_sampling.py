"""Filters and draws against counting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from ncp_jax.ops.sampling import draw, filtered

P = np.array([0.5, 0.3, 0.15, 0.05])


def kept(logits, **how):
    return int(np.isfinite(filtered(jnp.asarray(logits)[None], **how)).sum())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("top_p", "count"), [(1e-8, 1), (1e-3, 1), (0.5, 1), (0.6, 2), (0.85, 3), (0.96, 4), (1.0, 4)])
def test_the_nucleus_is_the_smallest_set_that_reaches_p(top_p, count, dtype):
    if dtype == jnp.bfloat16 and top_p == 0.5:
        return  # bf16 logits put the first token just below 0.5
    assert kept(jnp.log(P).astype(dtype), top_p=top_p) == count


def test_a_tie_at_p_may_keep_one_more():
    assert kept(jnp.log(P), top_p=0.8) in (2, 3)  # 0.5 + 0.3 in floats


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_filters_go_by_probability_not_by_place(order):
    logits = jnp.log(P)[jnp.asarray(order)][None]
    survives = np.isfinite(filtered(logits, top_p=0.75))[0]
    assert {order[i] for i in np.flatnonzero(survives)} == {0, 1}
    survives = np.isfinite(filtered(logits, top_k=3))[0]
    assert {order[i] for i in np.flatnonzero(survives)} == {0, 1, 2}
    survives = np.isfinite(filtered(logits, min_p=0.2))[0]
    assert {order[i] for i in np.flatnonzero(survives)} == {0, 1, 2}  # 0.15 >= 0.2 * 0.5 > 0.05


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, P),
        ({"top_p": 1.0}, P),
        ({"top_k": 2}, np.array([0.625, 0.375, 0, 0])),
        ({"top_p": 0.7}, np.array([0.625, 0.375, 0, 0])),
    ],
)
def test_draws_follow_the_filtered_distribution(how, expected):
    draws = draw(jnp.tile(jnp.log(P), (4000, 1)), jax.random.key(0), 1.0, **how)
    count = np.bincount(draws, minlength=4)
    assert count[expected == 0].sum() == 0
    assert chisquare(count[expected > 0], 4000 * expected[expected > 0]).pvalue > 1e-3


def test_temperature():
    draws = draw(jnp.tile(jnp.log(P), (4000, 1)), jax.random.key(1), 0.5)
    sharp = P**2 / (P**2).sum()
    assert chisquare(np.bincount(draws, minlength=4), 4000 * sharp).pvalue > 1e-3
    assert (draw(jnp.tile(jnp.log(P), (5, 1)), jax.random.key(2), 0.0) == 0).all()


def test_bf16_logits_are_drawn_from_in_float32():
    """The noise is added in float32: a draw from bf16 logits follows the softmax of those logits."""
    logits = jnp.log(P).astype(jnp.bfloat16)
    exact = np.exp(np.asarray(logits, np.float64))
    count = np.bincount(draw(jnp.tile(logits, (4000, 1)), jax.random.key(3), 1.0), minlength=4)
    assert chisquare(count, 4000 * exact / exact.sum()).pvalue > 1e-3
