"""Noise: no key serves twice, rows draw alike on every mesh and in every batch, and draws have their laws."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_calm_tasks import AE, HEADS, K, T, config, started

from ncp_jax.models.calm import losses, reconstruction
from ncp_jax.models.calm.call import call
from ncp_jax.models.calm.model import Calm
from ncp_jax.models.calm.noise import row_keys
from ncp_jax.models.calm.sampling import keyed_latents

B, M = 8, T // K


def step_key(seed, step, micro):
    """As train/step.py makes it."""
    start = jax.random.fold_in(jax.random.key(seed), 1)
    return jax.random.fold_in(jax.random.fold_in(start, step), micro)


def test_keys_never_coincide():
    """Over seeds, steps, micro-batches, rows, purposes and draws: every key is another."""

    @jax.jit
    def keys(seed, step, micro):
        rows = [row_keys(step_key(seed, step, micro), B, purpose) for purpose in range(6)]
        draws = jax.vmap(lambda key: jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(20)))(rows[1])
        return jnp.concatenate([jax.random.key_data(k).reshape(-1, 2) for k in (*rows, draws)])

    parts = [keys(*where) for where in itertools.product((0, 1), (0, 1, 2), (0, 1))]
    found = np.concatenate(parts)
    assert len(np.unique(found, axis=0)) == len(found) == 12 * B * (6 + 20)


@pytest.mark.parametrize("kind", HEADS)
def test_every_number_is_drawn_once(kind):
    """Over steps, micro-batches, rows (hence devices), samples and positions; integer times may repeat."""
    c = config(kind, input="both")
    noise = [losses.draw_noise(c, step_key(0, step, micro), (B, M)) for step in (0, 1) for micro in (0, 1)]
    for name in ("head", "target", "input"):
        values = [getattr(one, name) for one in noise]
        if jnp.issubdtype(values[0].dtype, jax.dtypes.prng_key):
            values = [jax.random.key_data(v)[:, 0] for v in values]
        numbers = np.concatenate([np.asarray(v).ravel() for v in values])
        assert len(np.unique(numbers)) > 0.998 * len(numbers), name  # f32 uniforms have 2^23 values


def test_a_row_draws_the_same_in_every_mesh():
    """Rows of eight devices: the noise of one program over all, and each device's part is another."""
    c = config()
    mesh = jax.make_mesh((8,), ("data",))
    draw = jax.jit(lambda key: losses.draw_noise(c, key, (B, M)).head)
    spread = jax.jit(
        lambda key: losses.draw_noise(c, key, (B, M)).head,
        out_shardings=jax.sharding.NamedSharding(mesh, jax.P(None, "data")),
    )(step_key(0, 0, 0))
    np.testing.assert_array_equal(spread, draw(step_key(0, 0, 0)))
    parts = [np.asarray(shard.data) for shard in spread.addressable_shards]
    assert len({part.tobytes() for part in parts}) == 8


def test_rates_and_laws():
    c = config()
    noise = losses.draw_noise(c, jax.random.key(0), (64, 33))
    assert noise.head.shape == (4, 64, 32, 5)
    assert -0.5 <= noise.head.min() < -0.49
    assert 0.49 < noise.head.max() < 0.5
    drawn = reconstruction.draw_noise(AE, jax.random.key(0), (256, 64))
    assert float(drawn.keep_BMk.mean()) == pytest.approx(0.85, abs=0.01)
    assert float(drawn.keep_BMl.mean()) == pytest.approx(0.85, abs=0.01)
    assert float(drawn.normal_BMl.std()) == pytest.approx(1, abs=0.01)
    agree = (drawn.keep_BMk[..., 0] == drawn.keep_BMl[..., 0]).mean()
    assert float(agree) == pytest.approx(0.85**2 + 0.15**2, abs=0.02)  # masks and dropout are independent


@pytest.mark.parametrize("kind", HEADS)
def test_samples_of_every_head(kind):
    """Shapes, one key per sample and position, all different, whatever the batch."""
    c = config(kind)
    params = jax.tree.map(lambda a: a + 0.1 * jnp.cos(jnp.arange(a.size)).reshape(a.shape), started(f"calm_{kind}")[0])
    h = jax.random.normal(jax.random.key(1), (2, 3, c.backbone.width))
    keys = jax.random.split(jax.random.key(2), (5, 2, 3))

    @jax.jit
    def draw(params, h, keys):
        return keyed_latents(c, Calm(c), params, call(Calm(c), params, "condition", h), keys)

    z = draw(params, h, keys)
    assert z.shape == (5, 2, 3, AE.latent)
    assert jnp.isfinite(z).all()
    assert len(np.unique(np.asarray(z).reshape(-1, AE.latent), axis=0)) == 30
    alone = draw(params, h[1:], keys[:, 1:])
    np.testing.assert_allclose(alone, z[:, 1:], atol=1e-4)
