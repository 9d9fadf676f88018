"""Figures and their protocol: published position counts, sampler and probabilities agree, reports say how."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import VOCAB, exact_parts, model, rows, sampler

from ncp_jax.config import ConfigError
from ncp_jax.evaluate.blocks import BlockSampler, score_blocks
from ncp_jax.evaluate.brier import compare, summarise
from ncp_jax.evaluate.brier_rows import block_starts, cut, token_starts
from ncp_jax.evaluate.next_token import score_next_token
from ncp_jax.ops.scoring import ScoreError

WIKITEXT = 289_083  # Llama-3 tokens of the official evaluation file, 62 documents


@pytest.mark.parametrize(
    ("block", "chunk", "count", "positions"),
    [(8192, 4, 35, 71_645), (16384, 8, 17, 34_799), (2048, None, 141, 288_204)],
)
def test_positions_of_the_published_protocol(block, chunk, count, positions):
    found = cut([np.zeros(WIKITEXT, np.int32)], block)
    starts = token_starts(block) if chunk is None else block_starts(block, chunk)
    assert len(found.tokens_NT) == count
    assert count * len(starts) == positions


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("estimator", ["all", "official"])
def test_samples_estimate_the_exact_parts(chunk, estimator):
    """Unbiased at every K: averaged over positions, against the closed form of the same positions."""
    text = rows(documents=15 if chunk < 3 else 40)  # long blocks start, and agree, seldom
    scores = score_blocks(sampler(chunk), text, samples=6, batch=75, at_once=512, estimator=estimator, seed=1)
    dropped = estimator == "official" and chunk < 4
    assert len(np.unique(scores.start_P)) == len(block_starts(48, chunk)) - dropped
    for found, exact in zip(
        (scores.accuracy_Pn, scores.collision_Pn), exact_parts(text, scores.row_P, scores.start_P), strict=True
    ):
        noise = (found - exact).std(axis=0) / np.sqrt(len(found))
        assert (abs((found - exact).mean(axis=0)) < 3.3 * noise).all()


def test_sampling_a_model_scores_as_its_probabilities_do():
    """Same positions, same law: the paired difference is noise, and its error says how much."""
    text = rows()
    sampled = score_blocks(sampler(4), text, samples=8, batch=20, seed=2)
    exact = score_next_token(model(), text, starts="blocks", chunk=4, batch=20, at_once=64, seed=2)
    gap = compare(sampled, exact)
    assert gap.status == "ok"
    assert abs(gap.value) < 3 * gap.error
    poor = score_next_token(model("poor"), text, starts="blocks", chunk=4, batch=20, at_once=64)
    worse = compare(exact, poor)
    assert worse.value > 3 * worse.error
    assert worse.error < summarise(exact).brierlm.error  # what both find hard cancels
    assert compare(exact, exact) == (0.0, 0.0, "ok")


def test_all_samples_are_better_than_two():
    text = rows()
    errors = {}
    for name, samples in (("two", 2), ("all", 8)):
        scores = score_blocks(sampler(4), text, samples=samples, batch=20)
        accuracy, collision = exact_parts(text, scores.row_P, scores.start_P)
        errors[name] = (scores.brier_Pn - 2 * accuracy + collision).std(axis=0)
    assert (errors["all"] < 0.7 * errors["two"]).all()


@pytest.mark.parametrize("chunk", [2, 4])
def test_batching_changes_nothing(chunk):
    text = rows(documents=2, length=60, block=20)
    found = [score_blocks(sampler(chunk), text, samples=3, batch=b, at_once=a, seed=5) for b, a in ((1, 64), (5, 3))]
    for other in found[1:]:
        assert np.array_equal(other.brier_Pn, found[0].brier_Pn)
    assert not np.array_equal(
        score_blocks(sampler(chunk), text, samples=3, batch=5, seed=6).brier_Pn, found[0].brier_Pn
    )


def test_contexts_one_by_one_are_the_whole_row():
    """A sampler without `everywhere` is asked about each block by itself, with what the row says before it."""
    text = rows(documents=2, length=60, block=24)

    def greedy(context, keys_Rp):
        tokens_pT, length_p = context
        last_p = jnp.take_along_axis(tokens_pT, length_p[:, None] - 1, axis=1)
        return jnp.broadcast_to((last_p + jnp.arange(1, 3)) % VOCAB, (*keys_Rp.shape, 2))

    def everywhere(tokens_BT, keys_RB):
        last_BM1 = tokens_BT[:, 1:-1:2, None]
        blocks = (last_BM1 + jnp.arange(1, 3)) % VOCAB
        return jnp.broadcast_to(blocks, (keys_RB.shape[0], *blocks.shape))

    box = BlockSampler(2, VOCAB, greedy, everywhere)
    whole, alone = (score_blocks(b, text, samples=2, batch=3) for b in (box, box._replace(everywhere=None)))
    assert np.array_equal(whole.brier_Pn, alone.brier_Pn)
    assert (whole.collision_Pn == 1).all()  # without randomness all samples agree, also along paths


def test_padding_is_never_scored():
    documents = [np.arange(n) % VOCAB for n in (4, 5, 9, 30)]
    text = cut(documents, 16, "documents")
    scores = score_next_token(model(), text, batch=2)
    assert [int((scores.document_P == d).sum()) for d in range(4)] == [0, 1, 5, 12 + 10]
    blocks = score_blocks(sampler(4), text, samples=2)
    assert [int((blocks.document_P == d).sum()) for d in range(4)] == [0, 0, 1, 3 + 2]
    alone = score_next_token(model(), cut([documents[2], np.zeros(7, int)], 16, "official"))
    ours = scores.brier_Pn[scores.document_P == 2]
    np.testing.assert_allclose(ours[:, 0], alone.brier_Pn[:5, 0], rtol=1e-6)


def test_positions_belong_to_the_document_that_they_predict():
    text = cut([np.zeros(7, int), np.ones(9, int)], 16)
    scores = score_next_token(model(), text)
    assert scores.start_P[scores.document_P == 1].tolist() == [7, 8, 9, 10, 11, 12]


def test_a_report_says_how():
    named = {"name": "bigram", "tokenizer": "letters", "dtype": "float32"}
    found = summarise(score_blocks(sampler(4, **named), rows(), samples=4, batch=20, seed=9))
    shown = str(found)
    for part in ("bigram", "letters", "4 samples per block", "seed 9", "60 rows of 48 tokens", "official packing",
                 "blocks of 4", "first 4", "660 positions in 12 clusters", "Brier-4", "±"):  # fmt: skip
        assert part in shown
    stored = json.loads(json.dumps(found.to_dict()))
    assert stored["protocol"]["chunk"] == 4
    assert stored["brierlm"]["value"] == pytest.approx(found.brierlm.value)
    assert found.brierlm_official == pytest.approx(found.brierlm.value / 100)
    exact = summarise(score_next_token(model(), rows(), batch=20))
    assert "probabilities" in str(exact)
    assert "every token" in str(exact)
    by_row = summarise(score_blocks(sampler(4), rows(), samples=4, batch=20, seed=9), cluster="row")
    assert by_row.clusters == 60
    assert by_row.brier_n == pytest.approx(found.brier_n)


def test_figures_that_do_not_exist_say_why():
    wrong = score_blocks(sampler(4, "wrong"), rows(), samples=2, batch=20)
    found = summarise(wrong)
    assert found.brierlm.value is None
    assert str(found).startswith("BrierLM: none (Brier-1 = -")
    assert found.brierlm_official > 0.5  # four negatives: what the official aggregate makes of it
    gap = compare(score_blocks(sampler(4), rows(), samples=2, batch=20), wrong)
    assert gap.value is None
    assert gap.status.startswith("block sampler: Brier-1 = -")
    one = summarise(score_next_token(model(), rows(documents=1), batch=20))
    assert one.error_n is None
    assert one.brierlm.status.startswith("no error: all positions lie in one document")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda: cut([np.zeros(30, int)], 48), ScoreError, "30 tokens in 1 documents and a block is 48"),
        (lambda: cut([np.zeros(4, int)], 48, "documents"), ScoreError, "the longest has 4"),
        (lambda: cut([np.zeros(30, int)], 4), ConfigError, "use 5 or more"),
        (lambda: score_blocks(sampler(5), rows()), ConfigError, "nearest: 45 or 50"),
        (lambda: score_blocks(sampler(4), cut([np.zeros(8, int)], 4 + 4), samples=1), ConfigError, "at least 2"),
        (lambda: block_starts(4, 4), ConfigError, "use at least 8 tokens"),
        (lambda: block_starts(4, 2), ConfigError, "use at least 6 tokens"),
        (lambda: score_blocks(sampler(4), cut([np.full(48, 9)], 48)), ScoreError, "row 0, token 0 has id 9"),
        (lambda: score_blocks(sampler(2)._replace(chunk=4), rows(), batch=2), ConfigError, "expected (8, 2, 11, 4)"),
        (lambda: score_blocks(sampler(4), rows(), batch=0), ConfigError, "a batch of 0 rows"),
        (lambda: score_next_token(model(chunk=5), rows()), ConfigError, "reads chunks of 5; nearest: 45 or 50"),
        (lambda: score_next_token(model(), rows(), starts="blocks"), ConfigError, "for example chunk=4"),
        (lambda: score_next_token(model(), cut([np.full(48, -1)], 48)), ScoreError, "id -1"),
    ],
)
def test_impossible_requests(change, error, message):
    with pytest.raises(error) as caught:
        change()
    assert message in str(caught.value)


def test_only_like_is_compared_with_like():
    text = rows(documents=3)
    blocks = score_blocks(sampler(4), text, samples=2, batch=20)
    with pytest.raises(ScoreError, match="every token of 48-token rows; score the same rows"):
        compare(blocks, score_next_token(model(), text, batch=20))
    with pytest.raises(ScoreError, match=r"tokenizers differ \(unnamed, other\)"):
        compare(blocks, score_blocks(sampler(4, tokenizer="other"), text, samples=2, batch=20))
    with pytest.raises(ScoreError, match="cluster"):
        compare(*(score_next_token(model(), rows(documents=1), batch=20, seed=s) for s in (0, 1)))


def test_keys_of_samples_never_coincide():
    """Every (row, sample) of a pass and every (row, start, step, sample) of a path has a key of its own."""
    seen = []

    def after(context, keys_Rp):
        seen.append(np.asarray(jax.random.key_data(keys_Rp)).reshape(-1, 2))
        return jnp.zeros((*keys_Rp.shape, 1), int)

    def everywhere(tokens_BT, keys_RB):
        seen.append(np.asarray(jax.random.key_data(keys_RB)).reshape(-1, 2))
        return jnp.zeros((*keys_RB.shape, tokens_BT.shape[1] - 1, 1), int)

    score_blocks(BlockSampler(1, 1, after, everywhere), cut([np.zeros(32, int)], 8), samples=2, batch=2, at_once=1)
    keys = np.concatenate(seen)
    assert len(keys) == 2 * 4 + 2 * 4 * 4 * 3
    assert len(np.unique(keys, axis=0)) == len(keys)
