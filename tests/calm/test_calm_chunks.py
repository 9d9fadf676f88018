"""Rows as chunks: what counts, where end-of-text tokens and pads go, which chunk predicts which."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ncp_jax.models.calm.chunks import chunks

EOS, PAD = 7, 9


def stream(tokens, real=None):
    tokens = jnp.asarray([tokens])
    real = jnp.ones_like(tokens, bool) if real is None else jnp.asarray([real], bool)
    return {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1), "real": real, "scored": real}


def packed(documents, length, k):
    """A row as data/packing.py makes it for families that read their end-of-text tokens."""
    tokens, targets, segments, positions = (np.zeros((1, length), np.int32) for _ in range(4))
    place = 0
    for number, ids in enumerate(documents, 1):
        here = slice(place, place + len(ids) + 1)
        tokens[0, here], targets[0, here] = [*ids, EOS], [*ids[1:], EOS, 0]
        segments[0, here] = number
        positions[0, place:] = np.arange(length - place)
        place += (len(ids) // k + 1) * k
    real = segments > 0
    named = {"tokens": tokens, "targets": targets, "real": real, "scored": real, "segments": segments}
    return {name: jnp.asarray(value) for name, value in (named | {"positions": positions}).items()}


def test_streams_straddle_documents():
    found = chunks(stream([1, 2, EOS, 3, 4, 5]), 2, None)
    np.testing.assert_array_equal(found.tokens_BMk[0], [[1, 2], [EOS, 3], [4, 5]])
    np.testing.assert_array_equal(found.pairs_BP, [[True, True]])
    assert found.positions_BM is None


@pytest.mark.parametrize("pad", [None, PAD])
def test_a_stream_that_ends_within_a_chunk(pad):
    found = chunks(stream([1, 2, 3, 0, 0, 0], [1, 1, 1, 0, 0, 0]), 2, pad)
    np.testing.assert_array_equal(found.segments_BM, [[1, 0, 0]])
    np.testing.assert_array_equal(found.pairs_BP, [[False, False]])


def test_documents_end_with_their_token_and_pads():
    batch = packed([[1, 2, 3, 4, 5], [6, 6], [8, 8, 8, 8]], 20, 4)
    found = chunks(batch, 4, PAD)
    np.testing.assert_array_equal(
        found.tokens_BMk[0],
        [[1, 2, 3, 4], [5, EOS, PAD, PAD], [6, 6, EOS, PAD], [8, 8, 8, 8], [EOS, PAD, PAD, PAD]],
    )
    np.testing.assert_array_equal(found.segments_BM, [[1, 1, 2, 3, 3]])
    np.testing.assert_array_equal(found.positions_BM, [[0, 1, 0, 0, 1]])
    np.testing.assert_array_equal(found.pairs_BP, [[True, False, False, True]])
    np.testing.assert_array_equal(found.real_BMk[0, 1], [True, True, False, False])


def test_without_a_pad_chunks_that_are_not_full_do_not_count():
    found = chunks(packed([[1, 2, 3], [6]], 8, 2), 2, None)
    np.testing.assert_array_equal(found.tokens_BMk[0, :3], [[1, 2], [3, EOS], [6, EOS]])
    np.testing.assert_array_equal(found.segments_BM, [[1, 1, 2, 0]])
    found = chunks(packed([[1, 2, 3, 4, 5]], 8, 4), 4, None)
    np.testing.assert_array_equal(found.segments_BM, [[1, 0]])


def test_a_padded_row_of_nothing_counts_nothing():
    batch = packed([], 8, 2)
    found = jax.jit(lambda b: chunks(b, 2, PAD))(batch)
    assert found.segments_BM.sum() == 0
    assert not found.pairs_BP.any()
