"""Segment experiments: interventions are exact, per-segment parts sum to the model's losses, transforms agree."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_for_tests import random_params

from ncp_jax.diagnostics.segments import (
    Segment,
    code_counts,
    fixed,
    get_segments,
    lesion_masks,
    mean_cosine,
    observe,
    paired_effect,
    predict,
    row_sums,
    scaled,
    set_segments,
    squared_error,
    term_gradients,
)
from ncp_jax.models.ncp.config import Concept, NCPConfig, paper
from ncp_jax.models.ncp.losses import nearest_codes
from ncp_jax.models.ncp.model import NCP
from ncp_jax.nn.backbone import Backbone
from ncp_jax.ops.quantise import usage
from ncp_jax.train.families import build_task
from ncp_jax.train.task import objective

MIXES = ("raw_logits", "softmax", "hard")
S, N, W, D, K, T, VOCAB = 4, 5, 3, 12, 4, 24, 30
BACKBONE = Backbone(width=D, heads=2, ffn=16, window=16, rope_theta=1e4)
SIZES = {"vocab": VOCAB, "encoder_layers": 2, "concept_layers": 1, "decoder_layers": 1}
RELEASED = NCPConfig(backbone=BACKBONE, concept=Concept(chunk=K, segments=S, codes=N, window=16), **SIZES)
PAPER = paper(backbone=BACKBONE, segments=S, codes=N, **SIZES)


@pytest.fixture(scope="module")
def params():
    return random_params(NCP(RELEASED))


@pytest.fixture(scope="module")
def batch():
    """Four rows: one ends within a chunk, one is empty, two are whole."""
    rng = np.random.default_rng(1)
    real = np.arange(T) < np.array([T, 14, 0, T])[:, None]
    draw = partial(rng.integers, 0, VOCAB, (4, T))
    return {"tokens": jnp.asarray(draw()), "targets": jnp.asarray(draw()), "real": jnp.asarray(real),
            "scored": jnp.asarray(real), "bytes": jnp.asarray(real.sum(1))}  # fmt: skip


@pytest.fixture(scope="module")
def packed(batch):
    """Two documents per row, the second starting on a chunk."""
    second = jnp.arange(T) >= 8
    segments = jnp.where(batch["real"], 1 + second, 0)
    return batch | {"segments": segments, "positions": jnp.broadcast_to(jnp.arange(T) - 8 * second, (4, T))}


def one_segment(seed: int = 0) -> tuple[Segment, jax.Array]:
    rng = np.random.default_rng(seed)
    kernel, bias, codes, state = (jnp.asarray(rng.normal(size=s)) for s in ((D, N), (N,), (N, W), (7, D)))
    return Segment(kernel, bias, codes), state


def test_segments_go_back_where_they_came_from(params):
    again = set_segments(params, get_segments(params))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    assert all(new is old for new, old in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True))
    assert get_segments(params).codes_NW.shape == (S, N, W)
    doubled = set_segments(params, jax.tree.map(lambda a: 2 * a, get_segments(params)))
    changed = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, new), old in zip(jax.tree_util.tree_leaves_with_path(doubled), jax.tree.leaves(params), strict=True)
        if new is not old
    ]
    assert sorted(changed) == ["concept/codebook/codes", "concept/heads/bias", "concept/heads/kernel"]


@pytest.mark.parametrize("how", MIXES)
def test_scaling_the_codes_scales_the_prediction(how):
    segment, state = one_segment()
    np.testing.assert_allclose(
        predict(scaled(segment, 0.3), state, how), 0.3 * predict(segment, state, how), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("how", MIXES)
def test_a_fixed_segment_predicts_its_value_unless_kept(how):
    segment, state = one_segment()
    value = jnp.array([1.5, -2.0, 0.25])
    np.testing.assert_allclose(predict(fixed(segment, False, value), state, how), np.tile(value, (7, 1)), rtol=1e-6)
    np.testing.assert_array_equal(predict(fixed(segment, True, value), state, how), predict(segment, state, how))


@pytest.mark.parametrize("how", MIXES)
def test_a_lesion_changes_its_segment_of_the_prediction_and_nothing_before_it(params, batch, how):
    config = dataclasses.replace(RELEASED, concept=dataclasses.replace(RELEASED.concept, mix=how))

    @jax.jit
    @jax.vmap
    def hidden(keep_S):
        lesioned = set_segments(params, jax.vmap(scaled)(get_segments(params), keep_S))
        return NCP(config).apply({"params": lesioned}, batch["tokens"])

    found = hidden(lesion_masks(S))
    predicted = np.asarray(found.predicted_BMD).reshape(S + 1, 4, T // K, S, W)
    assert np.abs(predicted[0]).min(axis=(0, 1, 3)).max() > 0
    for s in range(S):
        others = np.arange(S) != s
        assert not predicted[s + 1][:, :, s].any()
        np.testing.assert_array_equal(predicted[s + 1][:, :, others], predicted[0][:, :, others])
        np.testing.assert_array_equal(found.logits_BMSN[s + 1], found.logits_BMSN[0])
        np.testing.assert_array_equal(found.concepts_BMD[s + 1], found.concepts_BMD[0])
        assert (np.abs(found.out_BTD[s + 1] - found.out_BTD[0]) > 1e-4).any()


def test_the_mask_has_one_experiment_per_row():
    np.testing.assert_array_equal(lesion_masks(3), [[1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 0]])


@pytest.mark.parametrize(
    ("config", "rows"),
    [(RELEASED, "batch"), (RELEASED, "packed"), (PAPER, "packed")],
    ids=["released", "released-packed", "paper-packed"],
)
def test_errors_and_counts_of_all_segments_are_those_of_the_model(config, rows, request):
    batch, params, task = request.getfixturevalue(rows), random_params(NCP(config)), build_task(config, T)
    documents, segments = batch.get("segments", batch["real"].astype(int)), get_segments(params)

    @jax.jit
    def passes(params):
        hidden = NCP(config).apply({"params": params}, batch["tokens"], documents, batch.get("positions"))
        return observe(config, params, batch), hidden, task.loss(params, None, batch, jax.random.key(0))

    concepts, hidden, whole = passes(params)
    error_S = jax.vmap(partial(squared_error, how=config.concept.mix), in_axes=(0, None, 0, None))(
        segments, concepts.state_nD, concepts.target_SnW, concepts.paired_n
    )
    pairs = int(task.weights(batch)["ncp"]) // (D if config.loss.ncp_reduction == "mean" else 1)
    np.testing.assert_allclose(error_S.sum(), whole["ncp"], rtol=1e-5)
    assert concepts.paired_n.sum() == pairs < concepts.real_n.sum()

    count_SN = jax.vmap(code_counts, in_axes=(0, 0, None))(segments, concepts.own_SnW, concepts.real_n)
    code_BMS = nearest_codes(config, hidden.concepts_BMD, segments.codes_NW)
    np.testing.assert_array_equal(count_SN, usage(code_BMS, hidden.concept_segments_BM > 0, N))
    assert count_SN.sum() == S * concepts.real_n.sum()


@pytest.mark.parametrize("at_once", [3, 16])
def test_rows_sum_to_the_batch_however_many_run_at_once(params, batch, at_once):
    task = build_task(RELEASED, T)

    @jax.jit
    def both(params):
        return row_sums(task, params, None, batch, at_once), task.loss(params, None, batch, jax.random.key(0))

    rows, whole = both(params)
    assert rows["ntp"].shape == (4,)
    assert rows["ntp"][2] == 0  # the empty row
    for term in ("ntp", "ncp", "vq"):
        np.testing.assert_allclose(rows[term].sum(), whole[term], rtol=1e-5)


def test_gradients_of_the_terms_sum_to_that_of_the_objective(params, batch):
    task = build_task(RELEASED, T)

    def loss(params):
        return objective(task, task.loss(params, None, batch, jax.random.key(0)), task.weights(batch))

    parts = jax.jit(lambda params: term_gradients(task, params, None, batch, at_once=2))(params)
    expected = get_segments(jax.jit(jax.grad(loss))(params))
    for name in Segment._fields:
        total = sum(getattr(parts[term], name) for term in parts)
        np.testing.assert_allclose(total, getattr(expected, name), rtol=1e-4, atol=1e-6)
    assert not parts["vq"].kernel_DN.any()
    assert not parts["vq"].bias_N.any()
    assert all(gradient.codes_NW.any() for gradient in parts.values())


def slopes(config: NCPConfig, params, batch) -> np.ndarray:
    task, segments = build_task(config, T), get_segments(params)

    def nats(scale_S):
        changed = set_segments(params, jax.vmap(scaled)(segments, scale_S))
        return row_sums(task, changed, None, batch)["ntp"].sum()

    slope = jax.vmap(lambda direction_S: jax.jvp(nats, (jnp.ones(S),), (direction_S,))[1])
    return np.asarray(jax.jit(slope)(jnp.eye(S)))


def test_slopes_sum_to_zero_where_every_reader_norms_the_prediction(params, batch):
    """Euler: with normed fusion the loss is homogeneous of degree 0 in the prediction; with plain addition not."""
    released, plain = slopes(RELEASED, params, batch), slopes(PAPER, random_params(NCP(PAPER)), batch)
    assert abs(released.sum()) < 1e-3 * np.abs(released).sum()
    assert abs(plain.sum()) > 1e-2 * np.abs(plain).sum()


def test_cosines_are_averaged_over_counted_positions():
    east, north, west, none = np.array([[3.0, 0], [0, 2], [-1, 0], [0, 0]])
    gradient = jnp.asarray([[east, east, east], [west, north, none], [none, none, north]])  # [S, n, D]
    found = mean_cosine(gradient, jnp.array([True, True, False]))
    np.testing.assert_allclose(found, [[1, -0.5, 0], [-0.5, 1, 0], [0, 0, 0]], atol=1e-6)


def test_paired_effects_leave_uncounted_rows_out():
    changed, unchanged = jnp.array([3.0, 5.0, 9.0, 4.0]), jnp.array([1.0, 1.0, 9.0, jnp.nan])
    found = paired_effect(changed, unchanged, jnp.array([True, True, True, False]))
    difference = np.array([2.0, 4.0, 0.0])
    np.testing.assert_allclose(found.total, 6)
    np.testing.assert_allclose(found.error, np.sqrt(3) * difference.std(ddof=1), rtol=1e-6)
