"""The generate loop: batch equals alone, stops, limits, streaming, keys."""

import jax
import numpy as np
import pytest
from models_for_tests import VOCAB, presets, random_params

from ncp_jax.config import ConfigError
from ncp_jax.data.tokenizer import train_bpe
from ncp_jax.generate.engine import Engine
from ncp_jax.generate.sampling import Sampling
from ncp_jax.models.ncp.model import NCP

GREEDY = Sampling(temperature=0)
TEXT = ["the sea and the ship and the captain of the ship saw the sea", "a whale"]


@pytest.fixture(scope="module")
def model():
    model = NCP(presets()["released"])
    return model, random_params(model)


@pytest.fixture(scope="module")
def engine(model):
    return Engine(*model, capacity=48)


def uncached(model, prompt, count):
    net, params = model
    forward = jax.jit(lambda ids: net.apply({"params": params}, ids, method="logits"))
    ids = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, 48), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(np.argmax(forward(padded)[0, len(ids) - 1])))
    return ids[len(prompt) :]


def test_greedy_batches_are_the_uncached_rows(model, engine):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (3, 11, 20)]
    together = engine.generate(prompts, max_new=24, how=GREEDY)
    for prompt, found in zip(prompts, together, strict=True):
        assert found.tokens == uncached(model, prompt, 24)
        assert found.reason == "length"
        assert engine.generate([prompt], max_new=24, how=GREEDY)[0].tokens == found.tokens


def test_capacity_is_exact(model, engine):
    prompt = [1] * 40
    assert engine.generate([prompt], max_new=8, how=GREEDY)[0].tokens == uncached(model, prompt, 8)
    for more in (9, 20):
        with pytest.raises(ConfigError, match="ask for at most 8"):
            engine.generate([prompt], max_new=more, how=GREEDY)


def test_rows_have_keys_of_their_own(engine):
    how = Sampling(temperature=1.0, seed=3)
    first, second = engine.generate([[1, 2], [1, 2]], max_new=12, how=how)
    assert first.tokens != second.tokens
    assert engine.generate([[1, 2]], max_new=12, how=how)[0].tokens == first.tokens
    assert engine.generate([[1, 2]], max_new=12, how=how._replace(seed=4))[0].tokens != first.tokens


class Script:
    """A tokenizer over the test vocabulary whose ids spell out letters."""

    eos, size = 0, VOCAB

    def encode(self, text):
        return [ord(letter) - 96 for letter in text]

    def decode(self, ids):
        return "".join(chr(96 + token) for token in ids)


def scripted(model, text):
    """An engine that says `text` whatever it reads, then the end-of-text token."""
    engine = Engine(*model, capacity=48, tokenizer=Script())
    said = iter([*Script().encode(text), 0])
    engine._first = lambda *_: np.array([next(said)])
    engine._step = lambda params, cache, *_: (np.array([next(said)]), cache)
    return engine


@pytest.mark.parametrize(
    ("said", "stop", "limit", "text", "reason"),
    [
        ("abcde", (), 20, "abcde", "end"),
        ("abcde", ("cd",), 20, "ab", "stop"),
        ("abcde", ("cd", "b"), 20, "a", "stop"),
        ("abcde", ("zz",), 3, "abc", "length"),
        ("abcde", ("de",), 5, "abc", "stop"),  # a stop string beats the limit that falls on the same token
        ("abcde", ("ex",), 20, "abcde", "end"),  # held back as a possible beginning, then shown
    ],
)
def test_what_ends_a_row(model, said, stop, limit, text, reason):
    found = scripted(model, said).generate(["xyz"], max_new=limit, stop=stop)[0]
    assert (found.text, found.reason) == (text, reason)
    shown = [event.text for event in scripted(model, said).stream(["xyz"], max_new=limit, stop=stop)]
    assert "".join(shown) == text


def test_streamed_pieces_are_whole_characters():
    tokenizer = train_bpe(["über die Brücke, naïve café"] * 3, 300)
    config = presets()["released"]
    import dataclasses

    net = NCP(dataclasses.replace(config, vocab=tokenizer.size))
    engine = Engine(net, random_params(net), capacity=64, tokenizer=tokenizer)
    pieces = [event.text for event in engine.stream(["über"], max_new=40, how=Sampling(temperature=1.0, seed=1))]
    whole = engine.generate(["über"], max_new=40, how=Sampling(temperature=1.0, seed=1))[0]
    assert "".join(pieces) == whole.text == tokenizer.decode(whole.tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new": 0}, "at least 1"),
        ({"how": Sampling(temperature=-1)}, "temperature -1"),
        ({"how": Sampling(top_k=0)}, "top-k 0"),
        ({"how": Sampling(top_p=0.0)}, "top-p 0.0"),
        ({"how": Sampling(min_p=2.0)}, "min-p 2.0"),
        ({"stop": ["x"]}, "need a tokenizer"),
        ({"prompts": ["text"]}, "needs a tokenizer"),
        ({"prompts": [[VOCAB]]}, f"id {VOCAB}"),
    ],
)
def test_bad_requests(engine, change, message):
    with pytest.raises(ConfigError, match=message):
        engine.generate(**({"prompts": [[1]], "max_new": 2} | change))


def test_a_tokenizer_larger_than_the_model_is_refused(model):
    big = Script()
    big.size = VOCAB + 1
    with pytest.raises(ConfigError, match=f"{VOCAB + 1} ids"):
        Engine(*model, capacity=8, tokenizer=big)
