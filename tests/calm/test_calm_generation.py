"""Generation by chunks: cached states, official draws, laws by enumeration, what ends a row, batches."""

import copy
import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calm_golden import ENERGY_FILES, Tensors, autoencoder_params, calm_config, calm_params
from golden_files import load
from scipy import stats

from ncp_jax.config import ConfigError
from ncp_jax.generate.calm import CalmEngine, sampler
from ncp_jax.generate.temperature import Tempered, Tempering, vote
from ncp_jax.models.calm import cached, sampling
from ncp_jax.models.calm.autoencoder import Autoencoder
from ncp_jax.models.calm.call import call
from ncp_jax.models.calm.config import AutoencoderConfig, CalmConfig, DiffusionHead, EnergyHead, FlowHead
from ncp_jax.models.calm.model import Calm
from ncp_jax.nn.llama_block import LlamaBackbone
from ncp_jax.parallel.rules import unboxed

VOCAB, K, PAD, EOS = 7, 2, 6, 0
BACKBONE = LlamaBackbone(16, 4, 24, kv_heads=2)
# One number of noise: the law of a chunk is an integral over a line, and can be written down.
HEADS = {"energy": EnergyHead(2, 1), "flow": FlowHead(1, 4, 3), "diffusion": DiffusionHead(1, 4, 5)}
T1 = Tempering(1.0)


def config(head="energy", reads="discrete", chunk=K) -> CalmConfig:
    return CalmConfig(1, BACKBONE, AutoencoderConfig(VOCAB, chunk, 12, 20, 6, pad=PAD), head=HEADS[head], input=reads)


@functools.cache
def numbers(c: CalmConfig, seed: int):
    latents = None if c.input == "discrete" else jnp.zeros((1, 1, c.autoencoder.latent))
    tokens = jnp.zeros((1, 1, c.chunk), jnp.int32)
    modules = (Calm(c), (tokens, latents)), (Autoencoder(c.autoencoder), (tokens,))
    shapes = [unboxed(jax.eval_shape(m.init, jax.random.key(0), *given))["params"] for m, given in modules]
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: rng.normal(size=a.shape) * 2 / np.sqrt(a.shape[0]), shapes)


def random_pair(c: CalmConfig, seed: int = 52):
    """(parameters, frozen), every leaf random. The seed is one whose law after PROMPT has many outcomes and gaps."""
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.result_type(float)), numbers(c, seed))


def made(c: CalmConfig, capacity=40, **options) -> CalmEngine:
    return CalmEngine(Calm(c), *random_pair(c), capacity=capacity, **options)


@pytest.fixture(scope="module")
def engine():
    return made(config())


@pytest.fixture(scope="module")
def conditioned():
    return made(config(), partial="condition")


# --- states ---


@pytest.mark.parametrize("reads", ["discrete", "continuous", "both"])
def test_cached_states_are_the_uncached_ones(reads):
    """Row r is cut after r chunks: all cuts at once, so rows stand at different lengths; in pieces of four."""
    M, c = 7, config(reads=reads)
    with jax.enable_x64(True):
        model, (params, frozen) = Calm(c, jnp.float64), random_pair(c)
        ids = np.random.default_rng(3).integers(0, VOCAB, (M + 1, M, K)).astype(np.int32)

        @jax.jit
        def uncached():
            latents = call(Autoencoder(c.autoencoder, jnp.float64), frozen, "encode", ids).mean
            return call(model, params, "hidden", ids, latents)

        whole = np.asarray(uncached())
        extend = jax.jit(lambda *given: cached.extend(model, params, frozen, *given))
        cache, states = cached.empty_cache(model, M + 1, M), [[] for _ in range(M + 1)]
        first = np.arange(M + 1)
        for done, counts in ((np.zeros(M + 1, int), first), (first, M - first)):
            for start in range(0, M, 4):
                take = np.clip(counts - start, 0, 4)
                part = np.zeros((M + 1, 4, K), np.int32)
                for row, n in enumerate(take):
                    part[row, :n] = ids[row, done[row] + start : done[row] + start + n]
                found, cache = extend(cache, part, take)
                for row, n in enumerate(take):
                    states[row].append(np.asarray(found)[row, :n])
        assert cache.length_B.tolist() == [M] * (M + 1)
        for row in range(M + 1):
            np.testing.assert_allclose(np.concatenate(states[row]), whole[row], atol=1e-9, rtol=0, err_msg=f"cut {row}")


@pytest.mark.parametrize("head", HEADS)
def test_a_condition_and_noise_are_a_sample(head):
    """The decode layout and the split head give what the trained form gives for the same noise."""
    c = config(head)
    model, (params, frozen) = Calm(c), random_pair(c)
    laid_out = CalmEngine(model, params, frozen, capacity=2).params.model
    h_BD = jax.random.normal(jax.random.key(1), (3, 16))
    keys_NB = jax.random.split(jax.random.key(2), (4, 3))

    @jax.jit
    def draw(laid_out, params):
        ours = sampling.keyed_latents(c, model, laid_out, call(model, laid_out, "condition", h_BD), keys_NB)
        theirs = [sampling.draw_latents(c, model, params, h_BD[b, None], keys_NB[:1, b], 1) for b in range(3)]
        return ours, jnp.stack(theirs)[:, 0, 0]

    ours, theirs = draw(laid_out, params)
    np.testing.assert_allclose(ours[0], theirs, rtol=1e-3, atol=1e-4)
    assert ours.shape == (4, 3, 6)
    assert len(np.unique(np.asarray(ours).round(5).reshape(12, 6), axis=0)) == 12


@pytest.mark.parametrize(("head", "reads"), [("flow", "continuous"), ("diffusion", "both")])
def test_the_loop_without_a_cache(head, reads):
    """Chunk by chunk by the trained functions, each from the tokens so far and the documented key."""
    c = config(head, reads)
    model, autoencoder, (params, frozen) = Calm(c), Autoencoder(c.autoencoder), random_pair(c)

    @jax.jit
    def following(tokens_1Mk, length, key):
        latents = call(autoencoder, frozen, "encode", tokens_1Mk).mean
        h_11D = call(model, params, "hidden", tokens_1Mk, latents)[:, length - 1][:, None]
        z = sampling.draw_latents(c, model, params, h_11D, key[None], 1)
        return call(autoencoder, frozen, "logits", z[0, 0, 0]).argmax(-1)

    tokens = np.zeros((1, 6, K), np.int32)
    tokens[0, :2] = np.reshape(PROMPT, (2, K))
    for index in range(4):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 0), index), 0)
        tokens[0, 2 + index] = following(tokens, 2 + index, key)
    expected = [token for token in tokens[0, 2:].ravel().tolist() if token != PAD]
    assert made(c).generate([PROMPT], max_new=4 * K, how=T1, seed=7)[0].tokens == expected


# --- against the official loop ---


class Ids:
    """A tokenizer that is not asked for words."""

    def __init__(self, eos, size):
        self.eos, self.size = eos, size

    def decode(self, ids):
        return ""


@pytest.mark.parametrize("name", ENERGY_FILES)
def test_the_official_loop_draw_for_draw(name, monkeypatch):
    """Prompts filled up with pads, recorded noise under the documented keys: as the official loop does.

    The official rows keep what follows an end-of-text token in its chunk; ours end before that token.
    """
    golden = load(f"calm_energy_{name}")
    c, fields = calm_config(golden), json.loads(str(golden["config_json"]))
    noise_iBe = golden["gen_T1_noise_u01"] - 0.5
    steps, rows = noise_iBe.shape[:2]
    root = jax.random.key(5)
    known = [
        jax.random.key_data(jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(root, row), step), 0))
        for step, row in itertools.product(range(steps), range(rows))
    ]

    def recorded(key, shape):
        place = (jnp.stack(known) == jax.random.key_data(key)).all(axis=-1)
        return jnp.where(place.any(), jnp.asarray(noise_iBe).reshape(-1, *shape)[place.argmax()], jnp.nan)

    monkeypatch.setattr(sampling, "_uniform", recorded)
    params, frozen = calm_params(Tensors(golden), c), autoencoder_params(Tensors(golden, "w/ae_model."), c.autoencoder)
    params, frozen = jax.tree.map(jnp.asarray, (params, frozen))
    eos, pad, prompts = fields["eos_token_id"], fields["pad_token_id"], golden["gen_T1_prompt"]
    engine = CalmEngine(Calm(c), params, frozen, capacity=64, tokenizer=Ids(eos, c.vocab), partial="pad")
    found = engine.generate(prompts.tolist(), max_new=steps * c.chunk, how=T1, seed=5)
    for prompt, ours, theirs in zip(prompts, found, golden["gen_T1_out"], strict=True):
        start = prompt[prompt != pad].tolist()
        said = theirs[theirs != pad].tolist()
        assert said[: len(start)] == start
        said = said[len(start) :]
        assert ours.tokens == (said[: said.index(eos)] if eos in said else said)
        assert ours.reason == ("end" if eos in said else "length")
        assert eos not in said or len(said) - said.index(eos) <= c.chunk


# --- laws ---


def law_after(engine: CalmEngine, prompt) -> np.ndarray:
    """Probability of every chunk after a prompt of whole chunks, [V, V], by integrating over the noise."""
    model, tokens = engine.model, np.asarray(prompt, np.int32).reshape(1, -1, K)
    grid = (np.arange(20_000) + 0.5) / 20_000 - 0.5

    @jax.jit
    def spelt(params):
        condition = condition_after(model, params, tokens)
        latents = call(model, params.model, "given", condition, jnp.asarray(grid, jnp.float32)[:, None, None])
        h = call(Autoencoder(model.config.autoencoder), params.frozen, "decode", latents)
        return sampler(model, params).spell(h.reshape(-1, h.shape[-1])).reshape(-1, K)

    first, second = np.asarray(spelt(engine.params)).T
    return np.bincount(first * VOCAB + second, minlength=VOCAB**2).reshape(VOCAB, VOCAB) / len(grid)


def condition_after(model, params, tokens_BMk):
    """What the head reads of the last chunk's state."""
    count = jnp.full(len(tokens_BMk), tokens_BMk.shape[1])
    cache = cached.empty_cache(model, len(tokens_BMk), tokens_BMk.shape[1])
    state_BMD, _ = cached.extend(model, params.model, params.frozen, cache, tokens_BMk, count)
    return call(model, params.model, "condition", state_BMD[:, -1])


def check(seen, law):
    """Chi-square of counts [X], outcomes expected fewer than five times taken together."""
    seen, expected = np.asarray(seen, float), law / law.sum() * np.sum(seen)
    assert seen[law < 1e-6].sum() <= 2  # what the grid did not see
    rare = expected < 5
    keep = [*zip(seen[~rare], expected[~rare], strict=True)]
    if expected[rare].sum() > 0.5:
        keep.append((seen[rare].sum(), expected[rare].sum()))
    seen, expected = np.array(keep).T
    assert len(seen) > 2, "a law of one outcome tests nothing"
    assert stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-4


PROMPT = [1, 2, 3, 4]
ROWS = 1500


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_chunk_has_its_tempered_law(engine, temperature):
    law = law_after(engine, PROMPT) ** (1 / temperature)
    found = engine.generate([PROMPT] * ROWS, max_new=K, how=Tempering(temperature, at_once=4))
    chunks = np.array([one.tokens + [PAD] * (K - len(one.tokens)) for one in found])
    law, seen = _without_pads(law), np.zeros((VOCAB, VOCAB))
    np.add.at(seen, tuple(chunks.T), 1)
    check(seen.ravel(), law.ravel())
    assert engine.work.exact == engine.work.chunks == ROWS


def _without_pads(law):
    """Chunks as they are shown: pads are left out, wherever they stood."""
    shown = law.copy()
    shown[:PAD, PAD] += law[PAD, :PAD]
    shown[PAD, :PAD] = 0
    return shown


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_begun_chunk_has_its_conditional_law(conditioned, temperature):
    """The prompt's fifth token begins the third chunk: the new one follows P(chunk)^(1/T) among those that begin so."""
    whole = law_after(conditioned, PROMPT)
    begun = int(np.argmax((whole > 0.01).sum(axis=1)))
    assert 0.05 < whole[begun].sum() < 0.6  # neither rare nor certain
    how = Tempering(temperature, at_once=16)
    found = conditioned.generate([[*PROMPT, begun]] * ROWS, max_new=1, how=how)
    seen = np.bincount([one.tokens[0] if one.tokens else PAD for one in found], minlength=VOCAB)
    check(seen, whole[begun] ** (1 / temperature))
    assert conditioned.work.exact == ROWS
    assert conditioned.work.draws / ROWS > 0.8 / whole[begun].sum()


def test_a_beginning_that_never_comes_is_put_right(conditioned):
    whole = law_after(conditioned, PROMPT)
    never = int(np.argmin(whole.sum(axis=1)))
    assert whole[never].sum() == 0
    how = Tempering(1.0, max_draws=20, at_once=8, candidates=10)
    found = conditioned.generate([[*PROMPT, never]] * 8, max_new=1, how=how)
    assert conditioned.work == (8, 8 * 30, 0)
    follows = np.flatnonzero(whole.sum(axis=0))  # of a chunk drawn as it is, beginning apart
    assert {token for one in found for token in one.tokens} <= set(follows.tolist())


def test_votes_are_lazy_and_no_different(engine):
    """A vote that spells chunks out only as far as they are shared chooses as one that spells out all."""
    tokens, keys = np.tile(np.reshape(PROMPT, (1, 2, K)), (50, 1, 1)), jax.random.split(jax.random.key(0), 50)

    @jax.jit
    def both(params, keys):
        condition, lazy = condition_after(engine.model, params, tokens), sampler(engine.model, params)

        def plain(condition, keys_NB):
            h = lazy.draw(condition, keys_NB)
            return lazy.spell(h.reshape(-1, h.shape[-1])).reshape(h.shape[:3])

        return [
            [vote(one, condition, keys, 1 / n, candidates=N, at_once=5).tokens_BK for one in (lazy, plain)]
            for n, N in ((2, 3), (3, 20))
        ]

    for ours, theirs in both(engine.params, keys):
        np.testing.assert_array_equal(ours, theirs)


# --- rows ---


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
    with pytest.raises(ConfigError, match="the tokenizer has 9 ids, the model knows 7"):
        CalmEngine(Calm(c), {}, {}, capacity=8, tokenizer=Ids(0, 9))
