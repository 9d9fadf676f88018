"""The energy score: closed forms, propriety, gradients where distances vanish, memory."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ncp_jax.ops.energy import between_samples, check_exponent, distance, energy, over_points

L = 4


def plain(x, y, beta):
    """The loss as the paper writes it, with everything in memory."""
    N = len(x)
    gap = jnp.linalg.norm(x[:, None] - y[None], axis=-1) ** beta
    pairs = sum(jnp.linalg.norm(x[i] - x[k], axis=-1) ** beta for i in range(N) for k in range(N) if i != k)
    return 2 * gap.mean(axis=(0, 1)) - pairs / (N * (N - 1))


@pytest.mark.parametrize(("N", "M"), [(2, 1), (8, 7), (5, 8)])
@pytest.mark.parametrize("beta", [0.5, 1.5])
def test_values_and_gradients_of_the_plain_formula(N, M, beta):
    keys = jax.random.split(jax.random.key(0), 4)
    x, eps = jax.random.normal(keys[0], (N, 3, L)), jax.random.normal(keys[1], (M, 3, L))
    mean, std = jax.random.normal(keys[2], (3, L)), jnp.exp(jax.random.normal(keys[3], (3, L)))
    ours, gradient = jax.jit(jax.value_and_grad(lambda x: energy(x, mean, std, eps, M, beta).loss.sum()))(x)
    theirs, expected = jax.value_and_grad(lambda x: plain(x, mean + std * eps, beta).sum())(x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_forward_derivative_is_that_of_backward():
    keys = jax.random.split(jax.random.key(1), 3)
    x, dx, eps = (jax.random.normal(key, (4, 2, L)) for key in keys)

    def loss(x):
        return energy(x, jnp.zeros((2, L)), jnp.ones((2, L)), eps, 4, 1.0).loss.sum()

    forward = jax.jit(lambda: jax.jvp(loss, (x,), (dx,))[1])()
    np.testing.assert_allclose(forward, jnp.vdot(jax.grad(loss)(x), dx), rtol=1e-5)


@pytest.mark.parametrize("beta", [0.5, 0.75, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_gradients_are_finite_when_all_samples_coincide(beta, spread):
    """As at the first step; spread 0: they coincide with every target as well."""
    gradient = jax.jit(
        jax.grad(lambda x: energy(x, jnp.zeros((3, L)), jnp.full((3, L), spread), jax.random.split(
            jax.random.key(0), 3), 5, beta).loss.sum())
    )(jnp.zeros((6, 3, L)))  # fmt: skip
    assert jnp.isfinite(gradient).all()
    assert bool((gradient == 0).all()) == (spread == 0)


def test_distance_of_equal_points_has_no_gradient():
    for beta in (0.5, 1.0, 2.0):
        gradient = jax.grad(lambda a, b=beta: distance(a, jnp.ones(L), b))(jnp.ones(L))
        np.testing.assert_array_equal(gradient, np.zeros(L))


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _losses(N, M, beta, positions, sigma, shift):
    keys = jax.random.split(jax.random.key(N * 1000 + M))
    x = shift + sigma * jax.random.normal(keys[0], (N, positions, L))
    targets = jax.random.split(keys[1], positions)
    return energy(x, jnp.zeros((positions, L)), jnp.ones((positions, L)), targets, M, beta).loss


def sampled_loss(N, M, beta, sigma=1.0, positions=4096, shift=0.0):
    """(mean, standard error) of the loss over positions: model N(shift, sigma^2), target N(0, 1)."""

    loss = np.asarray(_losses(N, M, beta, positions, sigma, shift), np.float64)
    return loss.mean(), loss.std() / math.sqrt(positions)


@pytest.mark.parametrize(("N", "M"), [(2, 1), (2, 16), (4, 4), (8, 1), (12, 100)])
def test_expectation_depends_neither_on_samples_nor_on_draws(N, M):
    """x, y ~ N(0, I_l), beta = 1: E loss = E|y - y'| = 2 Gamma((l + 1) / 2) / Gamma(l / 2)."""
    expected = 2 * math.gamma((L + 1) / 2) / math.gamma(L / 2)
    mean, error = sampled_loss(N, M, 1.0)
    assert abs(mean - expected) < 4 * error
    assert error < 0.03


def test_expectation_at_two_is_known_for_any_model():
    """beta = 2: E loss = 2 |mean gap|^2 + 2 tr(target covariance): the model's own variance drops out."""
    for N, sigma in ((2, 0.3), (8, 1.7)):
        mean, error = sampled_loss(N, 4, 2.0, sigma=sigma, shift=0.5)
        assert abs(mean - (2 * L * 0.25 + 2 * L)) < 4 * error


def test_two_sided_identity_at_two():
    """beta = 2, exactly: 2 |x - y|^2 between means, plus 2 v_y - 2 v_x / (N - 1)."""
    x, y = (jax.random.normal(jax.random.key(i), (n, 1, L)) for i, n in ((0, 5), (1, 7)))
    found = energy(x, jnp.zeros((1, L)), jnp.ones((1, L)), y, 7, 2.0).loss[0]
    vx, vy = (float(v.var(axis=0).sum()) for v in (x, y))
    gap = float(((x.mean(0) - y.mean(0)) ** 2).sum())
    assert float(found) == pytest.approx(2 * gap + 2 * vy - 2 * vx / 4, rel=1e-5)


def test_the_true_spread_is_best_below_two():
    for beta in (0.75, 1.5):
        losses = {sigma: sampled_loss(8, 8, beta, sigma)[0] for sigma in (0.5, 1.0, 2.0)}
        assert losses[1.0] < losses[0.5] - 0.02
        assert losses[1.0] < losses[2.0] - 0.02


def test_the_diagonal_is_left_out():
    x = jnp.zeros((2, 1, 1)).at[1].set(3.0)
    assert float(between_samples(x, 1.0)[0]) == 3.0
    assert float(between_samples(jnp.arange(5.0)[:, None, None], 1.0)[0]) == 2.0  # mean of |i - k|, i != k


def test_exact_score_of_points_is_the_sampled_one_in_expectation():
    """Proper on small distributions: no other weights score better than the target's."""
    points, q = jax.random.normal(jax.random.key(0), (4, L)), jnp.array([0.5, 0.3, 0.15, 0.05])

    @partial(jax.jit, static_argnums=1)
    def expected(p, beta):
        return sum(q[i] * over_points(p, points, points[i], beta).loss for i in range(4))

    for beta in (0.5, 1.0, 1.5):
        gradient = jax.grad(expected)(q, beta)
        np.testing.assert_allclose(gradient, gradient.mean(), atol=1e-5)  # stationary on the simplex
        for key in jax.random.split(jax.random.key(1), 5):
            assert expected(jax.random.dirichlet(key, jnp.ones(4)), beta) > expected(q, beta)


def test_over_points_agrees_with_samples():
    points, p, c = jax.random.normal(jax.random.key(0), (3, L)), jnp.array([0.6, 0.3, 0.1]), jnp.ones(L)
    index = jax.random.choice(jax.random.key(1), 3, (2, 40_000), p=p)
    sampled = energy(points[index], jnp.ones((40_000, L)), jnp.zeros((40_000, L)), jnp.zeros((1, 1, L)), 1, 1.0).loss
    error = float(sampled.std()) / 200
    assert abs(float(sampled.mean() - over_points(p, points, c, 1.0).loss)) < 4 * error


@pytest.mark.parametrize("beta", [0.0, -1.0, 2.5])
def test_improper_exponents(beta):
    with pytest.raises(ValueError, match=rf"exponent beta is {beta}; it must lie in \(0, 2\]"):
        check_exponent(beta)


def test_one_sample_is_refused():
    with pytest.raises(ValueError, match="needs at least 2, got 1"):
        between_samples(jnp.zeros((1, 3, L)), 1.0)


def peak(N, M, positions, l):
    """Bytes that the compiled loss and gradient need beside their arguments and results."""
    x = jax.ShapeDtypeStruct((N, 1, positions, l), jnp.float32)
    mean = jax.ShapeDtypeStruct((1, positions, l), jnp.float32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))

    def loss(x, mean, std, keys):
        return energy(x, mean, std, keys, M, 1.0).loss.sum()

    return jax.jit(jax.value_and_grad(loss)).lower(x, mean, mean, keys).compile().memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_draws():
    few, many = (peak(8, M, 256, 32) for M in (8, 100))
    assert many < 1.05 * few
    assert many < 0.25 * (8 * 100 * 256 * 32 * 4)  # a quarter of one array [N, M, P, l]
