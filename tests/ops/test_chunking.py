"""Chunks: pooling, validity, the causal shift."""

import jax.numpy as jnp
import numpy as np
import pytest

from ncp_jax.ops.chunking import available, chunk_mean, chunk_segments, concept_index, shift_and_repeat


def test_pooling_leaves_the_tail_out():
    x = jnp.arange(2 * 7 * 3.0).reshape(2, 7, 3)
    pooled = chunk_mean(x, 3)
    np.testing.assert_allclose(pooled[1, 1], x[1, 3:6].mean(axis=0))
    assert pooled.shape == (2, 2, 3)


def test_pooling_rounds_once():
    x = jnp.asarray([256.0, 1, 1, 1], jnp.bfloat16).reshape(1, 4, 1)
    assert float(chunk_mean(x, 4)[0, 0, 0]) == float(jnp.bfloat16(259 / 4))


def test_a_chunk_is_a_concept_if_its_tokens_are_real_and_of_one_document():
    segments = jnp.asarray([[1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0, 3, 3]])
    assert chunk_segments(segments, 2).tolist() == [[1, 1, 0, 2, 2, 0, 3]]


@pytest.mark.parametrize(
    ("shift", "expected"), [(True, [-1, -1, -1, 0, 0, 0, 0, 1, 1, 1]), (False, [-1, -1, -1, -1, 0, 0, 0, 0, 1, 1])]
)
def test_which_concept_a_token_receives(shift, expected):
    assert concept_index(10, 4, shift).tolist() == expected


def test_tokens_without_a_concept_get_the_fill():
    c = jnp.asarray([[[1.0], [2.0]]])
    index, segments = concept_index(8, 4), jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 2]])
    has = available(index, jnp.asarray([[1, 2]]), segments)
    # Token 3 has its own chunk's; tokens 4-6 would have document 1's, and belong to document 2.
    assert has.tolist() == [[False, False, False, True, False, False, False, True]]
    assert shift_and_repeat(c, index, has, 9.0)[0, :, 0].tolist() == [9, 9, 9, 1, 9, 9, 9, 2]
