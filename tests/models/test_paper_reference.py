"""The reference checked on its own: hand-computed values, causality, ragged lengths, derivatives."""

import dataclasses
import math

import numpy as np
import pytest
from paper_parameters import directional_derivative, random_direction, random_parameters, tree_map
from paper_reference import Sizes, code_cross_entropy, forward, losses, ncp_loss, nearest_codes, ntp_loss, vq_loss

SIZES = Sizes(
    vocab=11, width=8, heads=2, ffn=12, encoder_layers=3, concept_layers=2, decoder_layers=3, chunk=4, segments=2,
    codes=3, kv_heads=1, window=3, concept_window=2, full_every=2,
)  # fmt: skip
TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7])
HAND_TOKENS = np.array([0, 1, 1, 0, 1])


@pytest.mark.parametrize("mix", ["softmax", "raw_logits", "hard"])
def test_hand_computed_case(mix):
    """Blocks that add nothing leave the routes, the pooling, the heads, the shift and the fusion to be done on paper.

    With R = 0 every candidate is the module input, so an IRC multiplies it by the sum of its static weights.
    """
    params, sizes = _hand_case(mix)
    out = forward(params, HAND_TOKENS, sizes)
    # Encoder: embeddings (1, 3) and (5, -1), times static sum 2 * 0.5 per two layers = 2 * 0.5.
    np.testing.assert_allclose(out.encoder.states[0][:2], [[2, 6], [10, -2]])
    np.testing.assert_allclose(out.encoder.states[1][:2], [[1, 3], [5, -1]])
    # Chunks of 2: means of tokens (0, 1) and (1, 0); the fifth token makes no concept.
    np.testing.assert_allclose(out.concepts_MD, [[3, 1], [3, 1]])
    # Concept layer: static sum 1; CRC reads the first encoder output, whose chunk mean is (3, 1), normed to (1, -1),
    # scaled by 2, plus bias 1: (3, -1); diagonal (0.5, 1) makes the state (3 + 1.5, 1 - 1).
    np.testing.assert_allclose(out.concept.states[0], [[4.5, 0], [4.5, 0]], atol=1e-5)
    # Heads: zero kernels, biases (0, ln 3) and (ln 3, 0).
    np.testing.assert_allclose(out.probabilities_MSN[0], [[0.25, 0.75], [0.75, 0.25]])
    predicted = {"softmax": [3.25, -0.75], "raw_logits": [4 * math.log(3), -math.log(3)], "hard": [4, -1]}[mix]
    np.testing.assert_allclose(out.predicted_MD, [predicted, predicted])
    # k = 2: nothing for token 0, then row 0 twice, then row 1; the tail keeps row 1.
    np.testing.assert_allclose(out.injected_TD, [[0, 0], predicted, predicted, predicted, predicted])
    # Decoder: (h + b), static sum 1. Token 0 gets h + read_concept's exact zero; the others diagonal 1 * LN(output).
    first, second = np.array([1.0, 3.0]), np.array([5.0, -1.0]) + predicted + [1, -1]
    np.testing.assert_allclose(out.decoder.states[0][:2], [first, second], atol=1e-5)
    expected = [x / math.sqrt((x**2).mean() + 1e-6) @ np.array([[1, 0], [1, 2]]) for x in (first, second)]
    np.testing.assert_allclose(out.logits_TV[:2], expected, atol=1e-5)


def test_losses_by_hand():
    codes_SNW = np.array([[[0.0], [4.0]], [[-1.0], [3.0]]])
    concepts_MD = np.array([[1.0, 1.5], [3.0, -2.0], [4.0, 5.0]])
    assert nearest_codes(concepts_MD, codes_SNW).tolist() == [[0, 1], [1, 0], [1, 1]]
    squares = 1 + 1.5**2 + 1 + 1 + 0 + 4
    assert vq_loss(codes_SNW, concepts_MD, "sum") == pytest.approx(squares / 6)
    assert vq_loss(np.repeat(codes_SNW, 2, 2), np.repeat(concepts_MD, 2, 1), "mean") == pytest.approx(squares / 6)
    predicted_MD = np.array([[2.0, 0.0], [4.0, 4.0], [9.0, 9.0]])  # the last row predicts a chunk that never comes
    for reduction, value in (("sum", (5 + 1) / 2), ("per_segment", 6 / 4), ("mean", 6 / 4)):
        assert ncp_loss(predicted_MD, concepts_MD, 2, reduction) == pytest.approx(value)
    assert ncp_loss(np.zeros((3, 4)), np.ones((3, 4)), 2, "mean") == pytest.approx(1)
    logits_MSN = np.log(np.array([[[0.5, 0.5], [0.8, 0.2]], [[0.1, 0.9], [0.6, 0.4]], [[0.3, 0.7], [0.3, 0.7]]]))
    expected = -np.log([0.5, 0.8, 0.9, 0.4]).mean()
    assert code_cross_entropy(logits_MSN, nearest_codes(concepts_MD, codes_SNW)) == pytest.approx(expected)
    logits_TV = np.log([[0.25, 0.75], [0.5, 0.5], [0.1, 0.9]])
    assert ntp_loss(logits_TV, [1, 0]) == pytest.approx(-np.log([0.75, 0.5]).mean())
    assert ncp_loss(predicted_MD[:1], concepts_MD[:1], 2) == 0
    assert vq_loss(codes_SNW, concepts_MD[:0]) == 0


@pytest.mark.parametrize("position", range(len(TOKENS)))
def test_tokens_change_nothing_before_themselves(position):
    params = random_parameters(np.random.default_rng(0), SIZES)
    changed = TOKENS.copy()
    changed[position] = (changed[position] + 1) % SIZES.vocab
    before, after = (forward(params, tokens, SIZES) for tokens in (TOKENS, changed))
    np.testing.assert_array_equal(before.logits_TV[:position], after.logits_TV[:position])
    assert (before.logits_TV[position] != after.logits_TV[position]).all()
    chunk = position // SIZES.chunk
    np.testing.assert_array_equal(before.predicted_MD[:chunk], after.predicted_MD[:chunk])
    assert (before.predicted_MD[chunk:] != after.predicted_MD[chunk:]).all()


@pytest.mark.parametrize("length", range(1, len(TOKENS) + 1))
def test_every_prefix_gives_the_same_rows(length):
    params = random_parameters(np.random.default_rng(0), SIZES)
    whole, prefix = forward(params, TOKENS, SIZES), forward(params, TOKENS[:length], SIZES)
    assert prefix.predicted_MD.shape == (length // SIZES.chunk, SIZES.width)
    np.testing.assert_allclose(prefix.logits_TV, whole.logits_TV[:length], atol=1e-12)


def test_window_is_w_visible_keys():
    """One windowed encoder layer, IRC off: token i reaches concept-free outputs i .. i+W-1 and no further."""
    sizes = dataclasses.replace(
        SIZES, encoder_layers=1, chunk=len(TOKENS), irc_encoder="none", concept_from_encoder=False, concept_layers=1,
        decoder_layers=1,
    )  # fmt: skip
    params = random_parameters(np.random.default_rng(1), sizes)
    changed = TOKENS.copy()
    changed[2] = 0
    before, after = (forward(params, tokens, sizes).encoder.outputs[0] for tokens in (TOKENS, changed))
    touched = np.flatnonzero((before != after).any(axis=1))
    assert touched.tolist() == [2, 3, 4]


@pytest.mark.parametrize("qk_norm", ["full", "per_head"])
@pytest.mark.parametrize("irc_input", ["update", "output"])
def test_every_leaf_matters(qk_norm, irc_input):
    sizes = dataclasses.replace(SIZES, qk_norm=qk_norm, irc_input=irc_input)
    rng = np.random.default_rng(2)
    params = random_parameters(rng, sizes)
    base = forward(params, TOKENS, sizes).logits_TV
    for path in _paths(params):
        moved = tree_map(np.copy, params)
        leaf = moved
        for key in path[:-1]:
            leaf = leaf[key]
        leaf[path[-1]] = leaf[path[-1]] + 0.1 * rng.normal(size=leaf[path[-1]].shape)
        assert np.abs(forward(moved, TOKENS, sizes).logits_TV - base).max() > 1e-6, path


def test_central_difference_has_second_order_error():
    params, sizes = random_parameters(np.random.default_rng(3), SIZES), SIZES
    direction = random_direction(np.random.default_rng(4), params)
    frozen = forward(params, TOKENS, sizes).concepts_MD

    def total(p):
        return losses(p, TOKENS[:-1], TOKENS[1:], sizes, frozen)["total"]

    coarse, fine, finest = (directional_derivative(total, params, direction, step) for step in (4e-4, 2e-4, 1e-6))
    assert 3 < (coarse - finest) / (fine - finest) < 5


def _hand_case(mix):
    sizes = Sizes(
        vocab=2, width=2, heads=1, ffn=2, encoder_layers=2, concept_layers=1, decoder_layers=1, chunk=2, segments=2,
        codes=2, mix=mix, decoder_from_encoder=False,
    )  # fmt: skip
    params = tree_map(np.zeros_like, random_parameters(np.random.default_rng(0), sizes))
    params["embed"]["table"] = np.array([[1.0, 3.0], [5.0, -1.0]])
    params["head"]["kernel"] = np.array([[1.0, 0.0], [1.0, 2.0]])
    encoder, concept, decoder = params["encoder"], params["concept"], params["decoder"]
    encoder["irc_0"]["static"] = np.array([3.0, -1.0])
    # Second layer: candidates are the input x, its output x, and the second output 2x.
    encoder["irc_1"]["static"] = np.array([0.5, 0.1, 0.2])
    concept["irc_0"]["static"] = np.array([0.25, 0.75])
    concept["read_encoder_norm"] = {"scale": np.full(2, 2.0), "bias": np.ones(2)}
    concept["read_encoder_0"]["diagonal"] = np.array([0.5, 1.0])
    concept["final_norm"]["scale"] = np.ones(2)
    concept["heads"]["bias"] = np.array([[0.0, math.log(3)], [math.log(3), 0.0]])
    concept["codebook"]["codes"] = np.array([[[1.0], [4.0]], [[-1.0], [0.0]]])
    decoder["irc_0"]["static"] = np.array([0.5, 0.5])
    decoder["read_concept_norm"] = {"scale": np.ones(2), "bias": np.zeros(2)}
    decoder["read_concept_0"]["diagonal"] = np.ones(2)
    decoder["final_norm"]["scale"] = np.ones(2)
    return params, sizes


def _paths(tree, prefix=()):
    if not isinstance(tree, dict):
        return [prefix]
    return [path for key in tree for path in _paths(tree[key], (*prefix, key))]
