"""Generation by chunks: cached states, official draws, laws by enumeration."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calm_for_tests import HEADS, PAD, PROMPT, T1, VOCAB, K, config, made, random_pair
from calm_golden import ENERGY_FILES, Tensors, autoencoder_params, calm_config, calm_params
from golden_files import load
from scipy import stats

from ncp_jax.generate.calm import CalmEngine, sampler
from ncp_jax.generate.temperature import Tempering, vote
from ncp_jax.models.calm import cached, sampling
from ncp_jax.models.calm.autoencoder import Autoencoder
from ncp_jax.models.calm.call import call
from ncp_jax.models.calm.model import Calm


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
def test_latents_from_weights_laid_out_for_decoding(head):
    """The decode layout gives what the trained form gives for the same keys; every key draws something else."""
    c = config(head)
    model, (params, frozen) = Calm(c), random_pair(c)
    laid_out = CalmEngine(model, params, frozen, capacity=2).params.model
    h_BD = jax.random.normal(jax.random.key(1), (3, 16))
    keys_NB = jax.random.split(jax.random.key(2), (4, 3))

    @jax.jit
    def draw(laid_out, params):
        def latents(params):
            return sampling.keyed_latents(c, model, params, call(model, params, "condition", h_BD), keys_NB)

        return latents(laid_out), latents(params)

    ours, theirs = draw(laid_out, params)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
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
        condition = call(model, params, "condition", call(model, params, "hidden", tokens_1Mk, latents)[:, length - 1])
        z_11l = sampling.keyed_latents(c, model, params, condition, key[None, None])
        return call(autoencoder, frozen, "logits", z_11l[0, 0]).argmax(-1)

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

ROWS = 1500


def law_after(engine: CalmEngine, prompt) -> np.ndarray:
    """Probability of every chunk after a prompt of whole chunks, [V, V], by integrating over the noise."""
    model, tokens = engine.model, np.asarray(prompt, np.int32).reshape(1, -1, K)
    grid = (np.arange(20_000) + 0.5) / 20_000 - 0.5

    @jax.jit
    def spelt(params):
        condition = condition_after(model, params, tokens)
        latents = call(model, params.model, "given", condition, jnp.asarray(grid, jnp.float32)[:, None, None])
        x = call(Autoencoder(model.config.autoencoder), params.frozen, "unfold", latents)
        return sampler(model, params).spell(x.reshape(-1, x.shape[-1])).reshape(-1, K)

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
