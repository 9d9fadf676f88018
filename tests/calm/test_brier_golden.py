"""Scores and votes of the official models, draw for draw, through the models of this package."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calm_golden import ENERGY_FILES, Tensors, autoencoder_params, calm_config, calm_params, llama
from golden_files import load

from ncp_jax.evaluate.blocks import BlockSampler, score_blocks
from ncp_jax.evaluate.brier import summarise
from ncp_jax.evaluate.brier_rows import cut
from ncp_jax.evaluate.next_token import NextToken, score_next_token
from ncp_jax.generate.temperature import vote_weights
from ncp_jax.models.calm.autoencoder import Autoencoder
from ncp_jax.models.calm.call import call
from ncp_jax.models.calm.model import Calm
from ncp_jax.models.llama import Llama


def recorded_pairs(draws, rows: int, length: int):
    """The official order: starts one after another, all rows together, until all rows differ.

    A start that gets so far draws a fourth pair, which no figure depends on.
    """
    pairs, call_number = {}, 0
    for start in range(1, length - 3):
        alive = np.ones(rows, bool)
        for step in range(4):
            pairs |= {(row, start, step): draws[call_number, row] for row in range(rows)}
            alive &= draws[call_number, :, 0] == draws[call_number, :, 1]
            call_number += 1
            if not alive.any():
                break
    assert call_number == len(draws)
    return pairs


@pytest.mark.parametrize("name", ["v67", "v5"])
def test_the_baseline_draw_for_draw(name):
    golden = load(f"calm_ar_{name}")
    config, params = llama(golden)
    ids = golden["input_ids"]
    pairs = recorded_pairs(golden["multinomial_draws"], *ids.shape)
    box = NextToken(jax.jit(lambda ids: call(Llama(config), params, "logits", ids)), config.vocab)

    def draw(step, row_p, start_p, logits_pV):
        return np.stack([pairs[row, start, step] for row, start in zip(row_p, start_p, strict=True)], axis=1)

    scores = score_next_token(box, cut(ids, ids.shape[1]), batch=2, at_once=8, draw=draw)
    np.testing.assert_allclose(scores.brier_Pn.mean(axis=0), golden["brier"], rtol=1e-4, atol=1e-7)
    if name == "v5":
        np.testing.assert_allclose(scores.accuracy_Pn.mean(axis=0), golden["exact_acc"], rtol=1e-4)
        seeds = [score_next_token(box, cut(ids, 14), batch=2, at_once=8, seed=s) for s in range(40)]
        found = np.stack([one.collision_Pn.mean(axis=0) for one in seeds])
        noise = found.std(axis=0) / np.sqrt(len(found))
        assert (abs(found.mean(axis=0) - golden["exact_collision"]) < 3 * noise + 1e-5).all()


@pytest.fixture(scope="module", params=ENERGY_FILES)
def calm(request):
    golden = load(f"calm_energy_{request.param}")
    c = calm_config(golden)
    model, autoencoder = Calm(c), Autoencoder(c.autoencoder)
    params, frozen = calm_params(Tensors(golden), c), autoencoder_params(Tensors(golden, "w/ae_model."), c.autoencoder)

    @jax.jit
    def blocks(h_BD, noise_NBe):
        latent = call(model, params, "sample", h_BD, noise_NBe)
        return jnp.argmax(call(autoencoder, frozen, "logits", latent), axis=-1)

    @jax.jit
    def states(tokens_BMk):
        return call(model, params, "hidden", tokens_BMk)

    return golden, c, blocks, states


def test_block_samples_draw_for_draw(calm):
    """K = 1, 2, 3, 4 and 8: accuracies of the recorded samples, collisions along the recorded path."""
    golden, c, blocks, states = calm
    K, ids = c.chunk, golden["input_ids"]
    drawn = np.stack([golden["brier_pred1"], golden["brier_pred2"]])
    h_BMD = states(ids.reshape(2, -1, K))[:, :-1]
    noise = golden["head_noise"].reshape(c.head.samples, *h_BMD.shape[:2], -1)[:2]
    assert np.array_equal(blocks(h_BMD, noise), drawn)
    calls = [golden[f"brier_noise_{number:03d}"] for number in range(int(golden["brier_noise_calls"]))]
    used = itertools.count()

    def after(context, keys_Rp):
        """Both rows took part in each official call; a context's row is known by its first block."""
        tokens_pT, length_p = (np.asarray(part) for part in context)
        row_p = (tokens_pT[:, None, :K] == ids[:, :K]).all(axis=-1).argmax(axis=1)
        noise_Rpe = calls[next(used)][:, row_p, 0] - 0.5
        h_pMD = states(tokens_pT.reshape(len(tokens_pT), -1, K))
        return blocks(h_pMD[np.arange(len(row_p)), length_p // K - 1], noise_Rpe)

    box = BlockSampler(K, c.autoencoder.vocab, after, lambda *_: drawn)
    scores = score_blocks(box, cut(ids, ids.shape[1]), batch=2, at_once=1, estimator="official")
    assert next(used) == len(calls)
    np.testing.assert_allclose(scores.brier_Pn.mean(axis=0), golden["brier_from_head_out"], atol=1e-6)
    assert summarise(scores).protocol.samples == 2


def test_votes_draw_for_draw(calm):
    golden, _, blocks, _ = calm
    noise_NBe = np.moveaxis(golden["ts_noise_u01"], 1, 0) - 0.5
    candidates_NBK = np.asarray(blocks(golden["ts_hidden"], noise_NBe))
    for row, recorded in enumerate(json.loads(str(golden["ts_choices"]))):
        candidates_NK = candidates_NBK[:, row]
        log_weight_N, order = vote_weights(jnp.asarray(candidates_NK), 2)
        share_N = np.exp(np.asarray(log_weight_N, np.float64)) / int(order)  # times 1/m!, common to all
        total: dict = {}
        for block, share in zip(map(tuple, candidates_NK.tolist()), share_N, strict=True):
            total[block] = total.get(block, 0.0) + share
        expected = {tuple(block): weight for block, weight in zip(recorded["pop"], recorded["weights"], strict=True)}
        assert {block: round(weight, 4) for block, weight in total.items() if weight > 0} == expected
        assert tuple(golden["ts_out"][row].tolist()) in expected
