"""Next-token models: all positions at once equal one at a time, whatever the family; collisions against enumeration."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import exact_parts, model, rows
from models_for_tests import BACKBONE, VOCAB, presets, random_params

from ncp_jax.config import ConfigError
from ncp_jax.evaluate.brier import summarise
from ncp_jax.evaluate.brier_rows import cut
from ncp_jax.evaluate.next_token import NextToken, of_task, score_next_token
from ncp_jax.models.ncp.model import NCP
from ncp_jax.models.olmo3 import Olmo3, Olmo3Config
from ncp_jax.train.families import build_task
from ncp_jax.train.task import Task

BLOCK = 8  # two chunks: contexts are read in widths of 4 and 8 tokens
FAMILIES = {"released": NCP, "paper": NCP, "olmo3": Olmo3}


@functools.cache
def family(name: str) -> NextToken:
    config = presets().get(name) or Olmo3Config(vocab=VOCAB, layers=2, backbone=BACKBONE)
    return of_task(build_task(config, BLOCK), random_params(FAMILIES[name](config)))


def likeliest(step, row_p, start_p, logits_pV):
    """Pairs without chance: the two tokens agree unless row, start and step say otherwise."""
    order = np.argsort(-np.asarray(logits_pV), axis=-1)
    return np.stack([order[:, 0], order[np.arange(len(order)), ((row_p + start_p + step) % 4 == 3).astype(int)]])


def one_at_a_time(logits, tokens_NT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both parts by whole forward passes over one context after another, as the official loop goes."""

    def law(context: list[int]) -> np.ndarray:
        padded = np.zeros((2, BLOCK), np.int32)
        padded[0, : len(context)] = context
        row_V = np.asarray(logits(jnp.asarray(padded)), np.float64)[0, len(context) - 1]
        return np.exp(row_V - row_V.max()) / np.exp(row_V - row_V.max()).sum()

    accuracy, collision = [], []
    for row, text in enumerate(tokens_NT.tolist()):
        for start in range(1, len(text) - 3):
            p_4 = [law(text[: start + j])[text[start + j]] for j in range(4)]
            accuracy.append(np.cumprod(p_4))
            context, alive, found = text[:start], 1.0, []
            for step in range(4):
                p_V = law(context)
                found.append(alive * (p_V**2).sum())
                a, b = likeliest(step, np.array([row]), np.array([start]), np.log(p_V)[None])[:, 0]
                context, alive = [*context, int(a)], alive * (a == b)
            collision.append(found)
    return np.array(accuracy), np.array(collision)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_scores_as_one_position_at_a_time(name):
    box = family(name)._replace(logits_at=None)
    tokens_NT = np.random.default_rng(0).integers(0, VOCAB, (2, BLOCK))
    scores = score_next_token(box, cut(tokens_NT, BLOCK), batch=2, at_once=2, draw=likeliest)
    accuracy, collision = one_at_a_time(box.logits, tokens_NT)
    np.testing.assert_allclose(scores.accuracy_Pn, accuracy, rtol=2e-4, atol=1e-9)
    np.testing.assert_allclose(scores.collision_Pn, collision, rtol=2e-4, atol=1e-9)
    assert (collision[:, 3] > 0).any()
    assert (collision[:, 1] == 0).any()
    assert scores.protocol.model == ("olmo3" if name == "olmo3" else "ncp")


def test_logits_at_one_place_are_those_of_the_row():
    box = family("olmo3")
    text = cut(np.random.default_rng(1).integers(0, VOCAB, (2, BLOCK)), BLOCK)
    at, whole = (score_next_token(b, text, batch=2, at_once=4, seed=3) for b in (box, box._replace(logits_at=None)))
    np.testing.assert_allclose(at.brier_Pn, whole.brier_Pn, rtol=1e-5)


def test_closed_forms_of_bigrams():
    """Accuracies and the first collision are exact, the others unbiased."""
    text = rows(documents=20)
    scores = score_next_token(model(), text, batch=100, at_once=512, seed=4)
    accuracy, collision = exact_parts(text, scores.row_P, scores.start_P)
    np.testing.assert_allclose(scores.accuracy_Pn, accuracy, rtol=1e-5)
    np.testing.assert_allclose(scores.collision_Pn[:, 0], collision[:, 0], rtol=1e-5)
    gap = scores.collision_Pn[:, 1:] - collision[:, 1:]
    assert (abs(gap.mean(axis=0)) < 3 * gap.std(axis=0) / np.sqrt(len(gap))).all()


def test_brierlm_falls_within_its_error_of_the_truth():
    """The score of a long text of a known world: sum over its stationary law."""
    from bigrams import BELIEFS, WORLD

    states = np.linalg.matrix_power(WORLD, 200)[0]
    square, reach, right, exact = BELIEFS["fair"] ** 2, np.ones(len(WORLD)), np.ones(len(WORLD)), []
    for _ in range(4):
        reach, right = square @ reach, (WORLD * BELIEFS["fair"]) @ right
        exact.append(states @ (2 * right - reach))
    found = summarise(score_next_token(model(), rows(documents=100), batch=500, at_once=2048))
    assert (abs(np.array(found.brier_n) / 100 - exact) < 3 * np.array(found.error_n) / 100).all()
    assert abs(found.brierlm.value - 100 * np.prod(exact) ** 0.25) < 3 * found.brierlm.error


def test_collisions_of_a_transformer_by_enumeration():
    """Mean over seeds against the sum over all 5^3 continuations of each position."""
    vocab = 5
    config = Olmo3Config(vocab=vocab, layers=1, backbone=dataclasses.replace(BACKBONE, full_every=1))
    params = random_params(Olmo3(config), seed=5)
    params["head"]["kernel"] = 3 * params["head"]["kernel"]
    box = of_task(build_task(config, 8), params)
    text = np.random.default_rng(2).integers(0, vocab, (1, 8))
    paths = np.array(list(itertools.product(range(vocab), repeat=3)))
    exact = []
    for start in range(1, 5):
        after = np.zeros((len(paths), 5 - start), int)
        context = np.concatenate([np.repeat(text[:, :start], len(paths), axis=0), paths, after], axis=1)
        p = np.asarray(jax.nn.softmax(box.logits(jnp.asarray(context)), axis=-1), np.float64)[:, start - 1 : start + 3]
        steps = np.take_along_axis(p[:, :3], paths[..., None], axis=-1)[..., 0]
        reach = np.concatenate([np.ones((len(paths), 1)), np.cumprod(steps**2, axis=1)], axis=1)
        last = (p**2).sum(axis=-1)
        exact.append([(reach[:, n] * last[:, n]).sum() / vocab ** (3 - n) for n in range(4)])
    found = np.stack([score_next_token(box, cut(text, 8), seed=seed).collision_Pn for seed in range(40)])
    noise = found.std(axis=0) / np.sqrt(len(found))
    assert (abs(found.mean(axis=0) - exact) < 3.5 * noise + 1e-6).all()


def test_batching_changes_nothing():
    text = rows(documents=3, length=40, block=20)
    found = [score_next_token(model(), text, batch=b, at_once=a, seed=1) for b, a in ((1, 64), (4, 3))]
    assert np.array_equal(found[0].brier_Pn, found[1].brier_Pn)
    assert not np.array_equal(found[0].brier_Pn, score_next_token(model(), text, batch=1, at_once=64).brier_Pn)


def test_a_task_without_logits_is_refused():
    task = Task("calm", 4, 10, {}, *([None] * 3))
    with pytest.raises(ConfigError, match="'calm' gives no token logits; score a block sampler"):
        of_task(task, {})
