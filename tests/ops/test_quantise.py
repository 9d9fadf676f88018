"""One segment's maths, and the product of segments."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ncp_jax.ops.quantise import code_error, join_segments, mix, nearest, over_segments, split_segments, usage
from ncp_jax.ops.statistics import perplexity

S, N, W = 3, 5, 4


@pytest.fixture
def book():
    return np.random.default_rng(0).normal(size=(S, N, W)).astype(np.float32)


@pytest.fixture
def concepts():
    return np.random.default_rng(1).normal(size=(2, 6, S * W)).astype(np.float32)


def codes_of(concepts, book):
    return over_segments(nearest)(split_segments(jnp.asarray(concepts), S), jnp.asarray(book))


def test_nearest_over_segments_is_a_loop_over_segments(book, concepts):
    found = codes_of(concepts, book)
    for b, m, s in itertools.product(range(2), range(6), range(S)):
        piece = concepts[b, m, s * W : (s + 1) * W]
        assert found[b, m, s] == np.argmin(((piece - book[s]) ** 2).sum(-1))


def test_the_product_of_segment_winners_wins_among_all_combinations(book, concepts):
    """argmin per segment = argmin over all N^S concatenations (enumerated for two segments of four codes)."""
    small = book[:2, :4]
    every = np.array([np.concatenate([small[0, i], small[1, j]]) for i in range(4) for j in range(4)])
    for c in concepts.reshape(-1, S * W)[:, : 2 * W]:
        i, j = over_segments(nearest)(split_segments(jnp.asarray(c[None, None]), 2), jnp.asarray(small))[0, 0]
        assert 4 * int(i) + int(j) == np.argmin(((c - every) ** 2).sum(-1))


def test_segment_order_matters_and_joining_undoes_splitting(book, concepts):
    np.testing.assert_array_equal(join_segments(split_segments(jnp.asarray(concepts), S)), concepts)
    chosen = np.take_along_axis(book[None, None], np.asarray(codes_of(concepts, book))[..., None, None], axis=3)[
        ..., 0, :
    ]
    swapped = np.asarray(codes_of(concepts, book[[1, 0, 2]]))
    assert (swapped[..., :2] != np.asarray(codes_of(concepts, book))[..., :2]).any()
    assert join_segments(jnp.asarray(chosen)).shape == concepts.shape


@pytest.mark.parametrize("norm", [1.0, 10.0])
def test_nearest_is_the_float64_search_where_codes_are_close(norm):
    """Codes 1e-3 apart at norm 10: the expanded |c|^2 - 2ce + |e|^2 loses them in bf16, and in f32 at the margin."""
    rng = np.random.default_rng(2)
    centre = rng.normal(size=16)
    centre *= norm / np.linalg.norm(centre)
    book = (centre + 1e-3 * rng.normal(size=(32, 16))).astype(np.float32)
    points = (centre + 1e-3 * rng.normal(size=(1000, 16))).astype(np.float32)
    square = ((points[:, None].astype(np.float64) - book[None].astype(np.float64)) ** 2).sum(-1)
    best = np.sort(square, axis=-1)
    clear = best[:, 1] - best[:, 0] > 1e-8  # squared distances here are of order 1e-5
    with jax.default_matmul_precision("bfloat16"):
        found = jax.vmap(nearest, in_axes=(0, None))(jnp.asarray(points), jnp.asarray(book))
    assert clear.sum() > 100
    np.testing.assert_array_equal(np.asarray(found)[clear], square.argmin(-1)[clear])


def test_mixes(book):
    logits = jnp.asarray([0.5, -1.0, 2.0, 0.0, 0.1])
    codes = jnp.asarray(book[0])
    np.testing.assert_allclose(mix(logits, codes, "raw_logits"), logits @ codes, rtol=1e-6)
    np.testing.assert_allclose(mix(logits, codes, "softmax"), jax.nn.softmax(logits) @ codes, rtol=1e-6)
    np.testing.assert_array_equal(mix(logits, codes, "hard"), codes[2])


def test_the_vq_error_moves_the_chosen_code_alone(book):
    c = jnp.asarray([0.1, 0.2, 0.3, 0.4])
    to_c, to_codes = jax.grad(code_error, argnums=(0, 1))(c, jnp.asarray(book[0]), jnp.asarray(3))
    assert not np.any(to_c)
    assert np.flatnonzero(np.abs(to_codes).max(-1)).tolist() == [3]
    np.testing.assert_allclose(to_codes[3], 2 * (book[0, 3] - c), rtol=1e-6)


def test_usage_counts_real_concepts_only(book, concepts):
    found = codes_of(concepts, book)
    counted = np.array([[True] * 4 + [False] * 2, [True] * 6])
    count = np.asarray(usage(found, jnp.asarray(counted), N))
    assert count.sum(axis=1).tolist() == [10] * S
    for s in range(S):
        np.testing.assert_array_equal(count[s], np.bincount(np.asarray(found)[..., s][counted], minlength=N))


def test_perplexity():
    np.testing.assert_allclose(
        perplexity(jnp.asarray([[5.0, 5, 5, 5], [9, 0, 0, 0], [0, 0, 0, 0]])), [4, 1, 1], rtol=1e-6
    )
