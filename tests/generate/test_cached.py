"""Cached decoding against the uncached forward: every length, every way of cutting, rolled back or not."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_for_tests import VOCAB, K, presets, random_params

from ncp_jax.config import ConfigError
from ncp_jax.generate.decoder import decoder_of, prefill, roll_back
from ncp_jax.models.llama import Llama, LlamaConfig
from ncp_jax.models.ncp.model import NCP
from ncp_jax.models.ncp.towers import Injection
from ncp_jax.models.olmo3 import Olmo3, Olmo3Config
from ncp_jax.nn.block import sight
from ncp_jax.nn.llama_block import LlamaBackbone
from ncp_jax.ops.chunking import available, chunk_mean, concept_index

W = 5  # window of the test models
LENGTH = 3 * W + 2
PIECE = 4  # one compiled width serves every way of cutting


def models() -> dict:
    backbone = presets()["released"].backbone
    return {
        "released": lambda dtype: NCP(presets()["released"], dtype),
        "paper": lambda dtype: NCP(presets()["paper"], dtype),
        "olmo3": lambda dtype: Olmo3(Olmo3Config(vocab=VOCAB, layers=3, backbone=backbone), dtype),
        "llama": lambda dtype: Llama(LlamaConfig(VOCAB, 2, LlamaBackbone(16, 4, 24, kv_heads=2)), dtype),
    }


class Setup:
    """A random model, its uncached states on a batch of rows, and its compiled cached functions."""

    def __init__(self, name: str, wide: bool, rows: int, history: str = "encoder", rollback: int = 17):
        with jax.enable_x64(wide):
            self.dtype = jnp.result_type(float)
            self.model = models()[name](self.dtype)
            self.params = random_params(self.model)
            self.ids = np.random.default_rng(3).integers(0, VOCAB, (rows, LENGTH)).astype(np.int32)
            self.decoder = decoder_of(self.model, LENGTH + 3, rollback=rollback, history=history)
            self.extend = jax.jit(self.decoder.extend, static_argnums=4)
            forward = jax.jit(lambda p, i: self.model.apply({"params": p}, i).out_BTD)
            self.full = np.asarray(forward(self.params, self.ids))
        self.wide, self.tolerance = wide, 1e-9 if wide else 5e-4

    def read(self, cache, tokens_Bn: np.ndarray, count_B: np.ndarray, prompt: bool = True):
        """Append ragged tokens in pieces of PIECE: (states of each row's own tokens, cache)."""
        states = [[] for _ in count_B]
        for start in range(0, max(int(count_B.max()), 1), PIECE):
            part = np.zeros((len(count_B), PIECE), np.int32)
            taken = np.clip(count_B - start, 0, PIECE)
            part[:, : tokens_Bn[:, start : start + PIECE].shape[1]] = tokens_Bn[:, start : start + PIECE]
            out, cache = self.extend(self.params, cache, part, taken, prompt)
            for row, own in enumerate(states):
                own.append(np.asarray(out)[row, : taken[row]])
        return [np.concatenate(own) for own in states], cache


@pytest.fixture(
    scope="module", params=itertools.product(["released", "paper", "olmo3", "llama"], [True, False]), ids=str
)
def setup(request):
    return Setup(*request.param, rows=LENGTH + 1)


def test_every_split_in_two(setup):
    """Row r is cut after r tokens: all cuts at once, so rows also stand at different chunk offsets."""
    with jax.enable_x64(setup.wide):
        first = np.arange(LENGTH + 1)
        cache = setup.decoder.empty(LENGTH + 1)
        head, cache = setup.read(cache, setup.ids, first)
        rest = np.zeros_like(setup.ids)
        for row, n in enumerate(first):
            rest[row, : LENGTH - n] = setup.ids[row, n:]
        tail, cache = setup.read(cache, rest, LENGTH - first)
        for row in range(LENGTH + 1):
            ours = np.concatenate([head[row], tail[row]])
            np.testing.assert_allclose(ours, setup.full[row], atol=setup.tolerance, rtol=0, err_msg=f"cut at {row}")
        assert np.asarray(cache.length_B).tolist() == [LENGTH] * (LENGTH + 1)


def test_random_splits(setup):
    """Each row takes 0 to 4 tokens at a time, at random: some 200 ways of cutting over the module's models."""
    rng = np.random.default_rng(5)
    with jax.enable_x64(setup.wide):
        for _ in range(2):
            cache, done = setup.decoder.empty(LENGTH + 1), np.zeros(LENGTH + 1, int)
            while (done < LENGTH).any():
                take = np.minimum(rng.integers(0, PIECE + 1, LENGTH + 1), LENGTH - done)
                part = np.zeros((LENGTH + 1, PIECE), np.int32)
                for row, n in enumerate(take):
                    part[row, :n] = setup.ids[row, done[row] : done[row] + n]
                out, cache = setup.extend(setup.params, cache, part, take, True)
                for row, n in enumerate(take):
                    theirs = setup.full[row, done[row] : done[row] + n]
                    np.testing.assert_allclose(np.asarray(out)[row, :n], theirs, atol=setup.tolerance, rtol=0)
                done += take


@pytest.mark.parametrize(
    ("name", "history"),
    [*itertools.product(["released", "paper"], ["encoder", "predicted"]), ("olmo3", "encoder"), ("llama", "encoder")],
)
def test_rolling_back_is_never_having_gone(name, history):
    """For every prompt length P in 0..2k and every j in 0..16: read P + 17, go back to P + j, read on."""
    pairs = list(itertools.product(range(2 * K + 1), range(17)))
    setup = Setup(name, True, rows=1, history=history)
    with jax.enable_x64(True):
        rng = np.random.default_rng(7)
        B, ahead, after = len(pairs), 17, 6
        P, j = (np.array(column) for column in zip(*pairs, strict=True))
        decoder = decoder_of(setup.model, 2 * K + ahead + after + 1, history=history)
        setup.extend = jax.jit(decoder.extend, static_argnums=4)
        prompt = rng.integers(0, VOCAB, (B, 2 * K)).astype(np.int32)
        draft = rng.integers(0, VOCAB, (B, ahead)).astype(np.int32)
        rest = rng.integers(0, VOCAB, (B, after)).astype(np.int32)
        _, start = setup.read(decoder.empty(B), prompt, P)
        _, far = setup.read(start, draft, np.full(B, ahead), prompt=False)
        back = roll_back(decoder, far, P + j)
        _, near = setup.read(start, draft, j, prompt=False)
        ours, ours_cache = setup.read(back, rest, np.full(B, after), prompt=False)
        theirs, theirs_cache = setup.read(near, rest, np.full(B, after), prompt=False)
        for row, pair in enumerate(pairs):
            np.testing.assert_allclose(ours[row], theirs[row], atol=1e-9, rtol=0, err_msg=f"P, j = {pair}")
        assert (np.asarray(ours_cache.length_B) == np.asarray(theirs_cache.length_B)).all()


@pytest.mark.parametrize("name", ["released", "paper"])
def test_predicted_history_is_the_loop_over_chunks(name):
    """Against the definition: chunk by chunk, uncached, its own predictions are read after the prompt."""
    with jax.enable_x64(True):
        setup = Setup(name, True, rows=3, history="predicted")
        for prompt in (2, K, 2 * K + 1, 3 * K - 1):
            cache = setup.decoder.empty(3)
            head, cache = setup.read(cache, setup.ids, np.full(3, prompt))
            tail, cache = setup.read(cache, setup.ids[:, prompt:], np.full(3, LENGTH - prompt), prompt=False)
            ours = np.stack([np.concatenate(pair) for pair in zip(head, tail, strict=True)])
            np.testing.assert_allclose(ours, predicted_loop(setup, prompt), atol=1e-9, rtol=0)
        assert np.abs(ours - setup.full).max() > 1e-3  # and it is not the encoder history


def predicted_loop(setup: Setup, prompt: int) -> np.ndarray:
    model, params, c = setup.model, {"params": setup.params}, setup.model.config
    positions, ones = jnp.arange(LENGTH)[None], jnp.ones((3, LENGTH), int)
    see = sight(c.backbone, positions, None, setup.dtype)
    encoder = model.apply(params, setup.ids, see, method="encode")
    real = model.apply(params, chunk_mean(encoder.h_BTD, K), method="norm_concept")
    sources = model.apply(params, encoder.raw, method="concept_sources")
    rows = [real[:, m] for m in range(max(prompt // K, 1))]
    while True:
        m = len(rows)
        see_concepts = sight(c.concept_backbone, jnp.arange(m)[None], None, setup.dtype)
        concept = model.apply(
            params, jnp.stack(rows, axis=1), [s[:, :m] for s in sources], see_concepts, method="conceive"
        )
        if m == LENGTH // K:
            break
        rows.append(concept.predicted_BMD[:, -1])
    index = concept_index(LENGTH, K, c.concept.shift)
    inject = Injection(index, available(index, jnp.ones((3, m), int), ones))
    return np.asarray(model.apply(params, encoder, see, concept, inject, method="decode")[0])


def test_prefill_gives_each_prompts_last_state():
    setup = Setup("released", False, rows=3)
    prompts = [setup.ids[0, :3].tolist(), setup.ids[1, :11].tolist(), setup.ids[2, :17].tolist()]
    for piece in (1, 3, 8, 64):
        cache, last = prefill(setup.decoder, setup.extend, setup.params, prompts, piece)
        expected = np.stack([setup.full[row, len(prompt) - 1] for row, prompt in enumerate(prompts)])
        np.testing.assert_allclose(last, expected, atol=5e-4)
        assert np.asarray(cache.length_B).tolist() == [3, 11, 17]


def test_a_full_layer_remembers_what_a_window_forgets():
    """One cache group per kind of layer: the first token still matters five windows later, through the full layer."""
    backbone = dataclasses.replace(presets()["released"].backbone, window=2, full_every=2)
    model = Olmo3(Olmo3Config(vocab=VOCAB, layers=2, backbone=backbone))
    decoder, params = decoder_of(model, 12), random_params(model)
    ids = np.tile(np.arange(10, dtype=np.int32), (2, 1))
    ids[1, 0] = 20
    out, _ = decoder.extend(params, decoder.empty(2), ids[:, :9], np.full(2, 9), True)
    _, cache = decoder.extend(params, decoder.empty(2), ids[:, :9], np.full(2, 9), True)
    out, _ = decoder.extend(params, cache, ids[:, 9:], np.ones(2, int), False)
    assert np.abs(out[0] - out[1]).max() > 1e-6


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompts"),
        ([[1], []], "prompt 1 is empty"),
        ([[1, VOCAB]], "token 1 has id 40"),
        ([[1] * 21], "holds 20"),
    ],
)
def test_bad_prompts_are_refused_before_any_step(prompts, message):
    setup = Setup("olmo3", False, rows=1)
    with pytest.raises(ConfigError, match=message):
        prefill(setup.decoder, setup.extend, setup.params, prompts, 8)


def test_rolling_back_too_far_is_refused():
    setup = Setup("olmo3", False, rows=1, rollback=3)
    _, cache = setup.read(setup.decoder.empty(1), setup.ids, np.array([10]))
    roll_back(setup.decoder, cache, [7])
    for length in (6, 11):
        with pytest.raises(ConfigError, match=f"cannot go to {length}"):
            roll_back(setup.decoder, cache, [length])
