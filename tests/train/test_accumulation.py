"""Accumulation and evaluation: losses are sums over weights of the whole batch, never means of means."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_runs import MODELS, VOCAB, bigram, run_config

from ncp_jax.config import load
from ncp_jax.parallel.mesh import MeshConfig, make_mesh
from ncp_jax.parallel.rules import unboxed
from ncp_jax.train.evaluation import HeldOut, evaluate
from ncp_jax.train.families import build_task
from ncp_jax.train.step import TrainState, make_eval_step, make_train_step
from ncp_jax.train.task import Task

CONFIGS = Path(__file__).parents[2] / "configs"
B, T = 8, 16
# Real tokens per row. Micro-batch a of A takes rows a, a + A, ...: of four, the last (rows 3 and 7) is fully masked.
UNEVEN = (16, 3, 9, 0, 1, 16, 12, 0)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_ten_tokens_of_loss_one_and_a_hundred_of_three(parts):
    """Together 2.8182, not 2 (huggingface/transformers issue 34191)."""
    toy = Task(
        name="toy", chunk=1, vocab=1, coefficients={"ntp": 1.0}, init=lambda rng: ({"w": jnp.ones(())}, None),
        weights=lambda part: {"ntp": part["tokens"].sum()},
        loss=lambda trained, frozen, part, rng: {"ntp": trained["w"] * (part["cost"] * part["tokens"]).sum()},
    )  # fmt: skip
    batch = {"cost": jnp.float32([1, 3, 1, 3, 0, 0, 0, 0]), "tokens": jnp.int32([6, 60, 4, 40, 0, 0, 0, 0])}
    metrics, gradient = one_step(toy, parts)(batch)
    assert metrics["loss"] == pytest.approx((10 * 1 + 100 * 3) / 110, rel=1e-6)
    assert gradient["w"] == pytest.approx(310 / 110, rel=1e-6)


@pytest.mark.parametrize(("model", "parts"), [("ncp", 4), ("olmo3", 2), ("olmo3", 4)])
def test_accumulation_changes_nothing(model, parts):
    (metrics, gradient), (expected, expected_gradient) = (step_of(model, count)(rows(UNEVEN)) for count in (parts, 1))
    for name in expected:
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-6, err_msg=name)
    norm = optax.global_norm(expected_gradient)
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        assert np.linalg.norm(ours - theirs) <= 2e-6 * norm  # f32 sums in another order: 1.1e-6 was seen


@pytest.mark.parametrize(("model", "parts"), [("ncp", 1), ("ncp", 4), ("olmo3", 4)])
def test_nothing_to_learn_from_is_loss_zero(model, parts):
    metrics, gradient = step_of(model, parts)(rows((0,) * B))
    assert {name: float(value) for name, value in metrics.items()} == dict.fromkeys(metrics, 0.0)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_no_complete_chunk_leaves_the_token_loss_alone():
    metrics, gradient = step_of("ncp", 1)(rows((3, 1, 0, 2, 3, 3, 3, 3)))
    assert metrics["loss/ncp"] == metrics["loss/vq"] == 0
    assert metrics["loss"] == metrics["loss/ntp"] > 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert not np.any(gradient["concept"]["codebook"]["codes"])


def test_masked_rows_do_not_count():
    """Rows without a scored token change neither losses nor gradients, whatever they hold."""
    step, batch = step_of("ncp", 1), rows(UNEVEN)
    other = {**batch, "tokens": np.where(batch["real"], batch["tokens"], 7)}
    (metrics, gradient), (expected, expected_gradient) = step(batch), step(other)
    assert {k: float(v) for k, v in metrics.items()} == {k: float(v) for k, v in expected.items()}
    jax.tree.map(np.testing.assert_array_equal, gradient, expected_gradient)


def test_weights_of_a_large_batch_do_not_overflow():
    """512 rows of 8192 tokens at width 4096, the report's batch: 4.3e9 concept elements, beyond int32."""
    task = build_task(load(CONFIGS / "ncp_archpreview_9b.py").model, 8192)
    all_real = jnp.ones((512, 8192), bool)
    weights = task.weights({"real": all_real, "scored": all_real})
    assert float(weights["ntp"]) == 512 * 8192
    assert float(weights["vq"]) == 512 * 2048 * 4096
    assert float(weights["ncp"]) == 512 * 2047 * 4096


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_evaluation_is_equal_for_all_batch_sizes(corpus, packing):
    config = run_config(corpus, "unused", "olmo3", f"data.packing={packing}")
    task, mesh = bigram(), make_mesh(MeshConfig(), jax.devices()[:1])
    params, frozen = (unboxed(tree) for tree in task.init(jax.random.key(0)))
    step, found = jax.jit(make_eval_step(task)), []
    for size in (1, 3, 7):
        held_out = HeldOut(config.data, split="val", batch=size, rows=None, chunk=1, vocab=VOCAB)
        found.append(evaluate(step, params, frozen, held_out, mesh))
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-6)
    batches = [batch for _, part in held_out for batch in part]
    assert found[0]["scored_tokens"] == sum(int(batch["scored"].sum()) for batch in batches) > 100
    assert found[0]["bytes"] == sum(int(batch["bytes"].sum()) for batch in batches)
    assert found[0]["bits_per_byte"] == pytest.approx(
        found[0]["loss/ntp"] * found[0]["scored_tokens"] / np.log(2) / found[0]["bytes"], rel=1e-12
    )


def rows(lengths: tuple[int, ...]) -> dict[str, np.ndarray]:
    """One document per row, of random tokens; on top of padding, a fifth of the targets is unscored."""
    random = np.random.default_rng(0)
    real = np.arange(T) < np.asarray(lengths)[:, None]
    tokens, targets = (random.integers(0, VOCAB, real.shape).astype(np.int32) for _ in range(2))
    scored = real & (random.random(real.shape) < 0.8)
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), real.shape)
    return {
        "tokens": tokens, "targets": targets, "real": real, "scored": scored, "segments": real.astype(np.int32),
        "positions": positions, "bytes": scored.sum(axis=1).astype(np.int32),
    }  # fmt: skip


@functools.cache
def step_of(model: str, parts: int) -> Any:
    return one_step(build_task(MODELS[model], T), parts)


def one_step(task: Task, parts: int) -> Any:
    """batch -> (metrics, gradient): plain descent with rate 1 from initial values, so the step is the gradient."""
    params, frozen = jax.jit(lambda key: unboxed(task.init(key)))(jax.random.key(0))
    tx = optax.sgd(1.0)
    state = TrainState(jnp.int32(0), params, tx.init(params), jax.random.key_data(jax.random.key(0)))
    step = jax.jit(make_train_step(task, tx, parts))

    def run(batch: dict[str, np.ndarray]):
        after, metrics = step(state, frozen, batch)
        return metrics, jax.tree.map(jnp.subtract, params, after.params)

    return run
