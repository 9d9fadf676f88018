"""Muon against optax.contrib, a per-matrix NumPy loop, and the values its definition implies."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers, muon

from ncp_jax.optim.muon import QUINTIC, Matrix, moonlight, newton_schulz, on_matrices, scale_by_muon, spectral

RNG = np.random.default_rng(0)
PLAIN = Matrix((0,), (1,))
STACKED = Matrix((1,), (2,), (0,))


def normal(*shape, dtype=np.float32):
    return RNG.normal(size=shape).astype(dtype)


def slow_direction(m_IO, steps=5):
    """One matrix in float64, straight from the definition."""
    a, b, c = QUINTIC
    x = np.asarray(m_IO, np.float64) / np.linalg.norm(m_IO)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def one_step(gradients, matrices, **options):
    tx = scale_by_muon(matrices, options.pop("factor", moonlight), **options)
    updates, _ = jax.jit(tx.update)(gradients, tx.init(gradients))
    return updates


@pytest.mark.parametrize("nesterov", [False, True])
def test_slow_twin_over_steps(nesterov):
    shapes = {"stack": (2, 6, 9), "tall": (8, 3)}
    matrices = {"stack": STACKED, "tall": PLAIN}
    tx = scale_by_muon(matrices, moonlight, momentum=0.9, nesterov=nesterov)
    update = jax.jit(tx.update)
    state = tx.init({name: jnp.zeros(shape) for name, shape in shapes.items()})
    slow = {name: np.zeros(shape) for name, shape in shapes.items()}
    for _ in range(4):
        gradients = {name: normal(*shape) for name, shape in shapes.items()}
        updates, state = update(jax.tree.map(jnp.asarray, gradients), state)
        for name, g in gradients.items():
            slow[name] = 0.9 * slow[name] + g
            ahead = g + 0.9 * slow[name] if nesterov else slow[name]
            flat = ahead.reshape(-1, *ahead.shape[-2:])
            expected = [0.2 * np.sqrt(max(m.shape)) * slow_direction(m) for m in flat]
            np.testing.assert_allclose(updates[name], np.reshape(expected, ahead.shape), atol=2e-5)


def test_parity_with_optax():
    """Without Nesterov the two differ by a scalar on the momentum alone, which the direction forgets."""
    params = {"stack": jnp.asarray(normal(3, 8, 5)), "attention": jnp.asarray(normal(2, 6, 4, 3))}
    numbers = {"stack": MuonDimensionNumbers(1, 2), "attention": MuonDimensionNumbers(1, (2, 3))}
    theirs = muon(0.1, nesterov=False, weight_decay=0.2, consistent_rms=0.2, muon_weight_dimension_numbers=numbers)
    matrices = {"stack": STACKED, "attention": Matrix((1,), (2, 3), (0,))}
    ours = optax.chain(
        scale_by_muon(matrices, moonlight, nesterov=False), optax.add_decayed_weights(0.2), optax.scale(-0.1)
    )
    our_update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
    p, q, s, t = params, params, ours.init(params), theirs.init(params)
    for _ in range(3):
        gradients = jax.tree.map(lambda x: jnp.asarray(normal(*x.shape)), params)
        u, s = our_update(gradients, s, p)
        v, t = their_update(gradients, t, q)
        p, q = optax.apply_updates(p, u), optax.apply_updates(q, v)
    for name in params:
        np.testing.assert_allclose(p[name], q[name], atol=1e-5)


def test_scanned_is_unscanned():
    stack = normal(3, 16, 24)
    scanned = one_step({"w": jnp.asarray(stack)}, {"w": STACKED})["w"]
    for layer in range(3):
        alone = one_step({"w": jnp.asarray(stack[layer])}, {"w": PLAIN})["w"]
        np.testing.assert_allclose(scanned[layer], alone, atol=1e-5)


def test_factor_is_a_product_with_the_larger_side():
    assert moonlight(1024, 4096) == moonlight(4096, 1024) == pytest.approx(12.8)
    assert spectral(1024, 4096) == spectral(4096, 1024) == 64.0
    assert spectral(16, 9, scale=0.2) == pytest.approx(moonlight(16, 9))


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((128, 512), PLAIN),
        ((512, 128), PLAIN),
        ((128, 8, 16), Matrix((0,), (1, 2))),
        ((8, 16, 128), Matrix((0, 1), (2,))),
        ((2, 512, 128), STACKED),
    ],
)
def test_rms_of_the_update(shape, matrix):
    gradient = normal(*shape)
    update = one_step({"w": jnp.asarray(gradient)}, {"w": matrix}, momentum=0.0)["w"]
    assert 0.165 < float(jnp.sqrt(jnp.mean(update**2))) < 0.205
    unit = one_step({"w": jnp.asarray(gradient)}, {"w": matrix}, momentum=0.0, factor=spectral)["w"]
    np.testing.assert_allclose(unit, 5 * update, rtol=1e-4)


def test_attention_kernels_are_their_flattened_form():
    wq, wo = normal(12, 3, 4), normal(3, 4, 12)
    matrices = {"wq": Matrix((0,), (1, 2)), "wo": Matrix((0, 1), (2,))}
    updates = one_step({"wq": jnp.asarray(wq), "wo": jnp.asarray(wo)}, matrices)
    flat = one_step({"wq": wq.reshape(12, 12), "wo": wo.reshape(12, 12)}, {"wq": PLAIN, "wo": PLAIN})
    np.testing.assert_allclose(updates["wq"], flat["wq"].reshape(12, 3, 4), atol=1e-6)
    np.testing.assert_allclose(updates["wo"], flat["wo"].reshape(3, 4, 12), atol=1e-6)


def test_heads_as_matrices():
    wq = normal(12, 3, 4)
    update = one_step({"wq": jnp.asarray(wq)}, {"wq": Matrix((0,), (2,), (1,))})["wq"]
    for head in range(3):
        alone = one_step({"w": jnp.asarray(wq[:, head])}, {"w": PLAIN})["w"]
        # One batched product or three: five iterations spread the difference in rounding.
        np.testing.assert_allclose(update[:, head], alone, atol=3e-5)


def test_projections_do_not_suppress_each_other():
    gradients = {name: jnp.asarray(scale * normal(16, 16)) for name, scale in (("q", 1), ("k", 0.1), ("v", 0.01))}
    updates = one_step(gradients, dict.fromkeys(gradients, PLAIN), factor=lambda i, o: 1.0)
    for name in gradients:
        assert 3.3 < float(jnp.linalg.norm(updates[name])) < 4.3


def test_spectrum_is_flat():
    singular = np.linalg.svd(newton_schulz(jnp.asarray(normal(1, 64, 256))), compute_uv=False)
    assert singular.min() > 0.65
    assert singular.max() < 1.2
    raw = np.linalg.svd(normal(64, 256), compute_uv=False)
    assert raw.max() / raw.min() > 1.3 * singular.max() / singular.min()


def test_bfloat16_iteration_is_as_flat_and_keeps_the_dtype():
    x = jnp.asarray(normal(2, 32, 96))
    y = newton_schulz(x, dtype=jnp.bfloat16)
    singular = np.linalg.svd(y, compute_uv=False)
    assert y.dtype == jnp.float32
    assert singular.min() > 0.6
    assert singular.max() < 1.25


@pytest.mark.parametrize("length", [1e-30, 1.0, 1e30])
def test_direction_forgets_the_length_of_the_gradient(length):
    x = normal(1, 6, 10)
    np.testing.assert_allclose(newton_schulz(jnp.asarray(length * x, jnp.float32))[0], slow_direction(x[0]), atol=1e-5)


def test_zero_matrix_stays_zero_beside_others():
    x = jnp.asarray(np.stack([np.zeros((4, 6)), normal(4, 6)]))
    y = newton_schulz(x)
    assert not y[0].any()
    assert np.isfinite(y).all()
    assert y[1].any()


def test_float64():
    with jax.enable_x64(True):
        x = normal(2, 7, 5, dtype=np.float64)
        tx = scale_by_muon({"w": STACKED}, spectral, momentum=0.9)
        updates, state = tx.update({"w": jnp.asarray(x)}, tx.init({"w": jnp.asarray(x)}))
        assert updates["w"].dtype == state.momentum["w"].dtype == jnp.float64
        for z in range(2):
            np.testing.assert_allclose(updates["w"][z], np.sqrt(7) * slow_direction(x[z]), atol=1e-9)


def test_momentum_of_narrow_leaves_is_float32():
    state = scale_by_muon({"w": PLAIN}, moonlight).init({"w": jnp.zeros((2, 3), jnp.bfloat16)})
    assert state.momentum["w"].dtype == jnp.float32


def test_on_matrices_restores_any_order_of_axes():
    x = jnp.asarray(normal(2, 3, 4, 5))
    for matrix in (Matrix((1,), (2, 3), (0,)), Matrix((3,), (0,), (1, 2)), Matrix((2, 0), (1,), (3,))):
        np.testing.assert_array_equal(on_matrices(lambda m: 2 * m, x, matrix), 2 * x)
        norms = on_matrices(
            lambda m: jnp.broadcast_to(jnp.linalg.norm(m, axis=(1, 2), keepdims=True), m.shape), x, matrix
        )
        axes = matrix.in_axes + matrix.out_axes
        np.testing.assert_allclose(norms, np.broadcast_to(np.sqrt((x**2).sum(axes, keepdims=True)), x.shape), rtol=1e-5)
