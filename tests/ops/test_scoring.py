"""Scores of samples: the recorded official figures, exact expectations by enumeration, errors that cover."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import load

from ncp_jax.ops.scoring import (
    ScoreError,
    brier_lm,
    chain,
    clustered_covariance,
    geometric_mean,
    influence,
    leader_rate,
    match_rate,
    official_aggregate,
    pair_rate,
    prefix_match,
    sample_parts,
)

P, Q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.4, 0.3, 0.2, 0.1])


def parts_of(samples, target):
    return sample_parts(jnp.asarray(samples), jnp.asarray(target))


def flat(golden, name):
    preds, target = golden[f"{name}/preds"], golden[f"{name}/targets"]
    return preds.reshape(8, -1, preds.shape[-1]), target.reshape(-1, target.shape[-1])


@pytest.mark.parametrize("name", ["k4", "k8"])
def test_the_official_figures(name):
    golden = load("calm_brier")
    preds, target = flat(golden, name)
    found = parts_of(preds[:2], target)
    brier = np.asarray(found.brier, np.float64)
    assert np.array_equal(brier, golden[f"{name}/per_position"].reshape(-1, 4))
    np.testing.assert_allclose(brier.mean(0), golden[f"{name}/official"], atol=1e-7)
    acc = [np.asarray(match_rate(preds[r : r + 1], target))[:, :4].mean(0) for r in (0, 1)]
    np.testing.assert_allclose(acc, [golden[f"{name}/acc1"], golden[f"{name}/acc2"]], atol=1e-7)
    np.testing.assert_allclose(np.asarray(found.collision).mean(0), golden[f"{name}/coll"], atol=1e-7)
    np.testing.assert_allclose(np.asarray(parts_of(preds, target).brier).mean(0), golden[f"{name}/U_R8"], atol=1e-7)


@pytest.mark.parametrize("name", ["k4", "k8"])
def test_recorded_covariances_and_brierlm(name):
    golden = load("calm_brier")
    brier = golden[f"{name}/per_position"]
    rows = np.repeat(np.arange(len(brier)), brier.shape[1])
    flat_brier = brier.reshape(-1, 4)
    np.testing.assert_allclose(clustered_covariance(flat_brier, rows), golden[f"{name}/cluster_cov_by_row"], rtol=1e-7)
    iid = clustered_covariance(flat_brier, np.arange(len(flat_brier)))
    np.testing.assert_allclose(iid, golden[f"{name}/iid_cov"], rtol=1e-7)
    found = brier_lm(flat_brier.mean(0), iid)
    assert found.status == "ok"
    assert found.value == pytest.approx(golden[f"{name}/brierlm_x100"], rel=1e-7)
    assert found.error == pytest.approx(golden[f"{name}/brierlm_se_iid_x100"], rel=1e-7)


def test_the_official_aggregate_lets_pairs_of_negatives_pass_and_ours_does_not():
    golden = load("calm_brier")
    found = [official_aggregate(row) for row in golden["agg_in"]]
    np.testing.assert_allclose(found, golden["agg_official"], rtol=1e-6)
    always_wrong = brier_lm(golden["agg_in"][1])
    assert always_wrong.value is None
    assert all(f"Brier-{n} = -1" in always_wrong.status for n in (1, 2, 3, 4))
    assert "Brier-3 = -0.01, Brier-4 = -0.002 not positive" in brier_lm(golden["agg_in"][2]).status
    assert brier_lm(np.zeros(4)).value is None
    assert brier_lm(np.full(4, np.nan)).value is None


def test_expectation_and_propriety_by_enumeration():
    """E e = 2 sum PQ - sum P^2 exactly, whatever R; at most sum Q^2, at P = Q alone."""
    rng = np.random.default_rng(0)
    outcomes, samples = 3, 3
    table = np.array(list(itertools.product(range(outcomes), repeat=samples + 1)))  # all draws and targets
    words = rng.integers(0, 9, (outcomes, 4))
    words[:, 0] = np.arange(outcomes)  # outcomes differ from the first token on, so that all n-grams have one law
    found = np.asarray(parts_of(words[table[:, :samples].T], words[table[:, samples]]).brier, np.float64)
    for seed in range(20):
        q = np.random.default_rng(seed).dirichlet(np.ones(outcomes))
        best = q @ q
        for p in (q, rng.dirichlet(np.ones(outcomes)), np.eye(outcomes)[0]):
            weight = np.prod(p[table[:, :samples]], axis=1) * q[table[:, samples]]
            expected = 2 * p @ q - p @ p
            np.testing.assert_allclose(weight @ found, expected, atol=1e-6)
            assert expected <= best + 1e-12
            assert best - expected == pytest.approx(((p - q) ** 2).sum(), abs=1e-12)


def draw(p, shape, seed):
    return jnp.asarray(np.random.default_rng(seed).choice(len(p), size=shape, p=p))


def test_moments_of_two_draws():
    """With a = sum PQ, c = sum P^2, t = sum P^2 Q: E e = 2a - c = 0.285 and E e^2 = 2a + c - 2t, variance 0.670275."""
    a, c, t = P @ Q, P @ P, P**2 @ Q
    assert 2 * a - c == pytest.approx(0.285)
    assert 2 * a + c - 2 * t - 0.285**2 == pytest.approx(0.670275)
    count = 100_000
    found = np.asarray(parts_of(draw(P, (2, count, 4), 1), draw(Q, (count, 4), 2)).brier, np.float64)[:, 0]
    assert abs(found.mean() - 0.285) < 3 * np.sqrt(0.670275 / count)
    fourth = ((found - 0.285) ** 4).mean()
    assert abs(found.var() - 0.670275) < 3 * np.sqrt((fourth - 0.670275**2) / count)


@pytest.mark.parametrize("samples", [2, 8])
def test_brierlm_of_independent_tokens(samples):
    """Four independent tokens: B_n = 2 a^n - c^n in closed form."""
    a, c = P @ Q, P @ P
    exact = np.array([2 * a**n - c**n for n in (1, 2, 3, 4)])
    count = 100_000
    value = np.asarray(parts_of(draw(P, (samples, count, 4), 3), draw(Q, (count, 4), 4)).brier, np.float64)
    covariance = clustered_covariance(value, np.arange(count))
    assert (abs(value.mean(0) - exact) < 3 * np.sqrt(np.diag(covariance))).all()
    found = brier_lm(value.mean(0), covariance)
    assert abs(found.value - 100 * np.prod(exact) ** 0.25) < 3 * found.error
    assert abs(found.bias) < found.error
    if samples == 8:  # all samples: less noise than the official two
        two = np.asarray(parts_of(draw(P, (2, count, 4), 3), draw(Q, (count, 4), 4)).brier)
        assert (value.var(0) < 0.8 * two.var(0)).all()


def test_three_targets_of_a_known_law():
    """E3 of the failure cases: p = (.5, .3, .2) scores 2 p_y - sum p^2 = 0.62, 0.22, 0.02."""
    p, count = np.array([0.5, 0.3, 0.2]), 100_000
    samples = jnp.repeat(draw(p, (2, count, 1), 5), 4, axis=-1)
    for y, expected in enumerate((0.62, 0.22, 0.02)):
        found = np.asarray(parts_of(samples, jnp.full((count, 4), y)).brier, np.float64)[:, 0]
        assert abs(found.mean() - expected) < 3 * found.std() / np.sqrt(count)


def simulate(rng, clusters, size):
    """Positions of one cluster share how well the model knows them: e_n falls with n, all correlated."""
    skill_G1 = rng.beta(2, 2, (clusters, 1))
    right_Gp4 = np.cumprod(rng.random((clusters, size, 4)) < skill_G1[..., None], axis=-1)
    collides_Gp4 = np.cumprod(rng.random((clusters, size, 4)) < 0.5, axis=-1)
    return (2 * right_Gp4 - collides_Gp4).reshape(-1, 4).astype(float)


def test_error_bars_cover():
    """95 % intervals by cluster hold the true BrierLM 95 times in 100; those of independent positions do not."""
    moment = np.cumprod([(2 + k) / (4 + k) for k in range(4)])  # E skill^n of Beta(2, 2)
    truth = 100 * np.prod(2 * moment - 0.5 ** np.arange(1, 5)) ** 0.25
    rng, clusters, size, trials = np.random.default_rng(0), 60, 40, 600
    cluster = np.repeat(np.arange(clusters), size)
    hits, naive, values, errors, biases = 0, 0, [], [], []
    for _ in range(trials):
        value = simulate(rng, clusters, size)
        found = brier_lm(value.mean(0), clustered_covariance(value, cluster))
        plain = brier_lm(value.mean(0), clustered_covariance(value, np.arange(len(value))))
        hits += abs(found.value - truth) < 1.96 * found.error
        naive += abs(found.value - truth) < 1.96 * plain.error
        values.append(found.value), errors.append(found.error), biases.append(found.bias)
    assert 0.92 < hits / trials < 0.975
    assert naive / trials < 0.8
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.08)
    # The geometric mean of unbiased components is biased downwards, by what `bias` says.
    noise = np.std(values) / np.sqrt(trials)
    assert abs(np.mean(values) - truth - np.mean(biases)) < 3 * noise
    assert np.mean(biases) < 0


def test_chained_blocks_are_the_long_block():
    """Rates of a two-token block twice over, of indicators: the cumulative matches of four tokens."""
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 2, (2, 500, 4))
    match = np.asarray(prefix_match(a.reshape(-1, 2, 2), b.reshape(-1, 2, 2)), float)
    assert np.array_equal(chain(jnp.asarray(match), jnp.asarray(match[..., -1])), prefix_match(a, b))
    three = np.asarray(prefix_match(rng.integers(0, 2, (9, 2, 3)), rng.integers(0, 2, (9, 2, 3))), float)
    assert chain(jnp.asarray(three), jnp.asarray(three[..., -1])).shape == (9, 4)


def test_pairs_are_all_pairs():
    samples = np.random.default_rng(2).integers(0, 2, (5, 30, 4))
    pairs = [np.asarray(prefix_match(samples[r], samples[q])) for r, q in itertools.combinations(range(5), 2)]
    np.testing.assert_allclose(pair_rate(jnp.asarray(samples)), np.mean(pairs, axis=0), rtol=1e-6)
    led = [np.asarray(prefix_match(samples[0], samples[q]))[:, -1] for q in range(1, 5)]
    np.testing.assert_allclose(leader_rate(jnp.asarray(samples)), np.mean(led, axis=0), rtol=1e-6)


def test_influence_gives_the_delta_method():
    value = simulate(np.random.default_rng(3), 50, 20)
    cluster = np.repeat(np.arange(50), 20)
    moved = influence(value)
    assert moved.mean() == pytest.approx(0, abs=1e-9)
    error = np.sqrt(clustered_covariance(moved[:, None], cluster)[0, 0])
    assert error == pytest.approx(brier_lm(value.mean(0), clustered_covariance(value, cluster)).error, rel=1e-9)


def test_what_cannot_be_scored():
    with pytest.raises(ScoreError, match="at least 2 samples per position, got 1"):
        pair_rate(jnp.zeros((1, 3, 4), int))
    with pytest.raises(ScoreError, match="blocks of 2 tokens"):
        sample_parts(jnp.zeros((2, 3, 2), int), jnp.zeros((3, 2), int))
    with pytest.raises(ScoreError, match=r"1 cluster\(s\) among 5 positions"):
        clustered_covariance(np.ones((5, 4)), np.zeros(5))
    with pytest.raises(ScoreError, match="Brier-4 = 0 not positive"):
        influence(np.zeros((5, 4)))
    weak = brier_lm(np.array([0.2, 0.1, 0.05, 0.01]), np.diag([1e-6, 1e-6, 1e-6, 1e-4]))
    assert weak.value is not None
    assert weak.status.startswith("unreliable: Brier-4 = 0.01 (standard error 0.01) within 2")
    assert geometric_mean(np.array([0.4, 0.2, 0.1, 0.0])) == 0


def test_scoring_compiles():
    samples, target = jnp.zeros((3, 6, 4), int), jnp.zeros((6, 4), int)
    found = jax.jit(sample_parts)(samples, target)
    assert np.array_equal(found.brier, np.ones((6, 4)))
