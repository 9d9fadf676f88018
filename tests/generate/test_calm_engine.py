"""Generation by chunks as its users see it: batches, what ends a row, prompts as chunks, refusals."""

import copy
import dataclasses

import numpy as np
import pytest
from calm_for_tests import EOS, PAD, PROMPT, T1, VOCAB, config, made

from ncp_jax.config import ConfigError
from ncp_jax.generate.calm import CalmEngine
from ncp_jax.generate.temperature import Tempered, Tempering
from ncp_jax.models.calm.model import Calm


@pytest.fixture(scope="module")
def engine():
    return made(config())


@pytest.fixture(scope="module")
def conditioned():
    return made(config(), partial="condition")


@pytest.mark.parametrize(
    ("kind", "how"),
    [("trim", Tempering(0.6, max_draws=60, candidates=5)), ("condition", Tempering(0.5, "vote", candidates=12))],
    ids=["trim-exact", "condition-vote"],
)
def test_a_row_alone_is_a_row_of_a_batch(engine, conditioned, kind, how):
    one = {"trim": engine, "condition": conditioned}[kind]
    prompts = [[1, 2, 3, 4, 5], [3, 4, 1, 2], [1, 2, 3, 4, 5], [5, 1, 2, 2, 1, 5, 3]]
    together = one.generate(prompts, max_new=9, how=how, seed=3)
    assert one.generate(prompts[:1], max_new=9, how=how, seed=3)[0] == together[0]
    assert one.generate([prompts[0], *prompts[:0:-1]], max_new=9, how=how, seed=3)[0] == together[0]
    assert together[0].tokens != together[2].tokens  # one prompt, two rows, two keys


def test_finished_rows_cost_no_draws(engine):
    how = Tempering(0.5, "vote", candidates=12)
    said = iter([np.array([[1, EOS], [1, 2]]), np.array([[3, 3], [4, 5]]), np.array([[3, 3], [4, 5]])])
    live = []
    spy, real = copy.copy(engine), engine._step
    spy.tokenizer = Letters()

    def step(params, cache, tokens, live_B, *rest):
        found, cache = real(params, cache, tokens, live_B, *rest)
        live.append((live_B.tolist(), found.draws_B.tolist()))
        return found._replace(tokens_BK=next(said)), cache

    spy._step = step
    found = spy.generate([PROMPT, PROMPT], max_new=6, how=how)
    assert live == [([True, True], [12, 12]), ([False, True], [0, 12]), ([False, True], [0, 12])]
    assert [one.tokens for one in found] == [[1], [1, 2, 4, 5, 4, 5]]
    assert spy.work == (4, 48, 0)


class Letters:
    """A tokenizer whose ids spell out letters."""

    eos, size = EOS, VOCAB

    def encode(self, text):
        return [ord(letter) - 96 for letter in text]

    def decode(self, ids):
        return "".join(chr(96 + token) for token in ids)


def scripted(engine, chunks, partial="trim"):
    """An engine that says these chunks whatever it reads."""
    found, said, one = copy.copy(engine), iter(chunks), np.ones(1, int)
    found.tokenizer, found.partial = Letters(), partial
    found._extend = lambda params, cache, *_: cache
    found._step = lambda params, cache, *_: (Tempered(np.array([next(said)]), one, one, one == 1), cache)
    return found


@pytest.mark.parametrize(
    ("prompt", "partial", "chunks", "options", "text", "reason"),
    [
        ("abcd", "trim", [(1, 2), (3, EOS)], {}, "abc", "end"),
        ("abcd", "trim", [(1, EOS), (3, 4)], {}, "a", "end"),
        ("abcd", "trim", [(EOS, 3)], {}, "", "end"),
        ("abcd", "trim", [(1, 2), (3, 4)], {"max_new": 3}, "abc", "length"),  # the last chunk is cut
        ("abcd", "trim", [(1, 2)], {"max_new": 2}, "ab", "length"),
        ("abcd", "trim", [(1, PAD), (PAD, 2), (PAD, PAD)], {"max_new": 5}, "ab", "length"),  # pads count, unseen
        ("abcd", "trim", [(1, 2), (3, 4), (5, EOS)], {"stop": ["cd"]}, "ab", "stop"),
        ("abcd", "trim", [(1, 2), (3, 4), (5, EOS)], {"stop": ["de", "b"]}, "a", "stop"),
        ("abcd", "trim", [(1, 2), (3, 4), (5, EOS)], {"stop": ["ex"]}, "abcde", "end"),
        ("abcde", "trim", [(1, 2), (3, EOS)], {}, "abc", "end"),
        ("abcde", "condition", [(5, 2), (3, EOS)], {}, "bc", "end"),  # the first chunk began with the prompt's e
        ("abcde", "condition", [(5, 2), (3, 4)], {"max_new": 2}, "bc", "length"),
        ("abcde", "condition", [(5, EOS)], {}, "", "end"),
    ],
)
def test_what_ends_a_row(engine, prompt, partial, chunks, options, text, reason):
    options = {"max_new": 20} | options
    found = scripted(engine, chunks, partial).generate([prompt], **options)[0]
    assert (found.text, found.reason) == (text, reason)
    shown = [event.text for event in scripted(engine, chunks, partial).stream([prompt], **options)]
    assert "".join(shown) == text


def test_prompts_as_chunks(engine, conditioned):
    padded = made(config(), partial="pad")
    starts = [one.start(0, [1, 2, 3, 4, 5]) for one in (engine, conditioned, padded)]
    assert [(start.chunks_mK.tolist(), start.begun) for start in starts] == [
        ([[2, 3], [4, 5]], []), ([[1, 2], [3, 4]], [5]), ([[1, 2], [3, 4], [5, PAD]], []),
    ]  # fmt: skip
    assert padded.start(0, [1]).chunks_mK.tolist() == [[1, PAD]]


def test_capacity_is_exact():
    """The cache that holds prompt and text to the token says what a large one says; a token more is refused."""
    small, large = (made(config(), capacity, partial="pad") for capacity in (8, 40))
    assert small.generate([[1, 2, 3, 4, 2]], max_new=3, how=T1) == large.generate([[1, 2, 3, 4, 2]], max_new=3, how=T1)
    with pytest.raises(ConfigError, match="ask for at most 3"):
        small.generate([[1, 2, 3, 4, 2]], max_new=4, how=T1)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1]], {}, "prompt 0 has 1 tokens and a chunk has 2: .* give at least 2 tokens"),
        ([[1, 2], []], {}, "prompt 1 is empty"),
        ([[1, VOCAB]], {}, f"prompt 0, token 1 has id {VOCAB}; the model knows 0..{VOCAB - 1}"),
        (["ab"], {}, "needs a tokenizer"),
        ([[1, 2]], {"stop": ["x"]}, "need a tokenizer"),
        ([[1, 2]], {"max_new": 0}, "ask for at least 1"),
    ],
)
def test_bad_requests(engine, prompts, options, message):
    with pytest.raises(ConfigError, match=message):
        engine.generate(prompts, **({"max_new": 2} | options))


def test_pads_are_asked_for():
    c = config()
    bare = dataclasses.replace(c, autoencoder=dataclasses.replace(c.autoencoder, pad=None))
    with pytest.raises(ConfigError, match=r"model\.autoencoder\.pad is missing"):
        CalmEngine(Calm(bare), {}, {}, capacity=8, partial="pad")
    big = Letters()
    big.size = VOCAB + 2
    with pytest.raises(ConfigError, match="the tokenizer has 9 ids, the model knows 7"):
        CalmEngine(Calm(c), {}, {}, capacity=8, tokenizer=big)
