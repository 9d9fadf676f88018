"""Who sees whom, and what softmax makes of it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ncp_jax.ops.attention import attend, visible


def mask(T, J, window, segments=None, offset=0):
    q, k = jnp.arange(T)[None] + offset, jnp.arange(J)[None]
    return np.asarray(visible(q, k, window, segments, segments))[0]


def test_a_window_counts_the_query_itself():
    assert [list(np.flatnonzero(row)) for row in mask(6, 6, 4)] == [
        [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5],
    ]  # fmt: skip


@pytest.mark.parametrize("window", [1, 3, None])
def test_positions_are_absolute(window):
    """A decode chunk of 3 queries against 10 cached keys sees what the same rows of the full mask see."""
    np.testing.assert_array_equal(mask(3, 10, window, offset=7), mask(10, 10, window)[7:])


def test_the_window_holds_without_any_other_mask():
    """Perturbing the first key reaches the last query of a full layer, and not that of a windowed one."""
    T = 16
    q, k, v = (jax.random.normal(jax.random.key(i), (1, T, 2, 8)) for i in range(3))
    moved = k.at[:, 0].add(1.0), v.at[:, 0].add(1.0)
    for window, reached in ((4, False), (1, False), (None, True)):
        allowed = jnp.asarray(mask(T, T, window))[None]
        change = np.abs(attend(q, *moved, allowed) - attend(q, k, v, allowed))[0]
        assert bool(change[15].max() > 0) is reached
        assert change[0].max() > 0


def test_against_a_loop_over_queries_and_heads():
    B, T, H, K, h = 2, 7, 4, 2, 6
    q, k, v = (np.asarray(jax.random.normal(jax.random.key(i), (B, T, n, h))) for i, n in enumerate((H, K, K)))
    segments = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 2, 2, 2, 2, 2]])
    allowed = np.asarray(visible(np.arange(T)[None], np.arange(T)[None], 3, segments, segments))
    expected = np.zeros_like(q)
    for b, t, head in itertools.product(range(B), range(T), range(H)):
        seen = [j for j in range(T) if 0 <= t - j < 3 and segments[b, t] == segments[b, j] and segments[b, j] > 0]
        assert seen == list(np.flatnonzero(allowed[b, t]))
        if seen:
            score = np.array([q[b, t, head] @ k[b, j, head // 2] for j in seen]) / np.sqrt(h)
            weight = np.exp(score - score.max())
            expected[b, t, head] = (weight / weight.sum()) @ v[b, seen, head // 2]
    np.testing.assert_allclose(attend(q, k, v, allowed), expected, atol=1e-5)


def test_a_query_that_sees_nothing_gives_zero_and_no_nan():
    q = jax.random.normal(jax.random.key(0), (1, 2, 1, 4))
    nothing = jnp.zeros((1, 2, 2), bool)
    value, gradient = jax.value_and_grad(lambda x: attend(x, q, q, nothing).sum())(q)
    assert value == 0
    assert np.isfinite(gradient).all()
