"""Flow and diffusion heads against the official networks, losses and samplers, with every recorded draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calm_golden import Tensors, as_chunks, autoencoder_params, calm_config, calm_params, fields
from golden_files import load

from ncp_jax.models.calm import losses
from ncp_jax.models.calm.autoencoder import Autoencoder
from ncp_jax.models.calm.call import call
from ncp_jax.models.calm.model import Calm
from ncp_jax.ops.transport import (
    cosine_schedule,
    diffusion_error,
    diffusion_sample,
    flow_error,
    flow_sample,
    flow_time,
    respaced,
    time_features,
)

KINDS = ("flow", "diffusion")


@pytest.fixture(scope="module", params=KINDS)
def given(request):
    golden = load(f"calm_{request.param}")
    c = calm_config(golden, request.param)
    return golden, c, Calm(c), calm_params(Tensors(golden), c)


def network_of(model, params, h):
    return lambda x, t: call(model, params, "transport", x, t, h)


def close(ours, theirs, tolerance=1e-4):
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=tolerance, rtol=0)


def test_network_and_row_losses(given):
    golden, c, model, params = given
    z, x, target, t = (golden[name] for name in ("z", "x", "target", "t"))
    names = [name for name in golden.files if name.startswith("loss_draw") and name != "loss_draw_kinds"]
    time, noise = (golden[name] for name in sorted(names))

    @jax.jit
    def run(params):
        network = network_of(model, params, z)
        if c.head.kind == "flow":
            return network(x, flow_time(t)), flow_error(network, target, time, noise)
        return network(x, t), sum(diffusion_error(network, cosine_schedule(), target, time.astype(int), noise))

    out, rows = run(params)
    close(out, golden["net_out"])
    np.testing.assert_allclose(rows, golden["loss_per_row"], rtol=1e-3)


def test_sampler(given):
    golden, c, model, params = given
    recorded = jnp.asarray(golden["sample_noise"])

    @jax.jit
    def run(params):
        network = network_of(model, params, golden["sample_z"])
        if c.head.kind == "flow":
            return flow_sample(network, recorded[0], c.head.steps, c.head.solver)
        steps = c.head.steps
        return diffusion_sample(network, respaced(cosine_schedule(), steps), recorded[0], lambda t: recorded[steps - t])

    close(run(params), golden["sample_out"], 1e-4 * max(1, np.abs(golden["sample_out"]).max()))


def test_full_loss(given):
    golden, c, model, params = given
    ae_golden = load("calm_energy_k4")
    assert fields(ae_golden)["ae_path"] == fields(golden)["ae_path"]
    frozen = autoencoder_params(Tensors(ae_golden, "w/ae_model."), c.autoencoder)
    found = as_chunks(golden["full_input_ids"], c.chunk)
    target, time, noise = (
        golden[name] for name in sorted(n for n in golden.files if n.startswith("full_draw") and "kinds" not in n)
    )
    shape = (c.head.samples, *found.pairs_BP.shape)
    time = time.reshape(shape) if c.head.kind == "flow" else time.reshape(shape).astype(int)
    draws = losses.Noise(
        jnp.asarray(noise.reshape(*shape, -1)), jnp.asarray(target.reshape(*shape, -1)), jnp.asarray(time), None
    )

    @jax.jit
    def loss(params):
        sums = losses.sums(c, model, Autoencoder(c.autoencoder), params, frozen, found, draws)
        weights = losses.weights(c, found)
        return sum(factor * sums[term] / weights[term] for term, factor in losses.coefficients(c).items())

    value, grads = jax.value_and_grad(loss)(params)
    np.testing.assert_allclose(value, golden["full_loss"], rtol=1e-3)
    assert all(jnp.isfinite(grad).all() for grad in jax.tree.leaves(grads))


def test_time_features():
    for name in KINDS:
        golden = load(f"calm_{name}")
        close(time_features(golden["timestep_embedding_t"]), golden["timestep_embedding"])


def test_schedules():
    golden, full = load("calm_diffusion"), cosine_schedule()
    np.testing.assert_allclose(full.betas, golden["train_betas"], rtol=1e-9)
    np.testing.assert_allclose(full.kept, golden["train_alphas_cumprod"], rtol=1e-9)
    spaced = respaced(full, 100)
    np.testing.assert_array_equal(spaced.times, golden["gen_timestep_map"])
    np.testing.assert_allclose(spaced.betas, golden["gen_betas"], rtol=1e-9)
    np.testing.assert_allclose(spaced.posterior_log_variance, golden["gen_post_logvar_clipped"], rtol=1e-9)


@pytest.mark.parametrize("steps", [1, 1001])
def test_impossible_respacing(steps):
    with pytest.raises(ValueError, match=f"cannot be respaced to {steps}"):
        respaced(cosine_schedule(), steps)


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("midpoint", 2)])
def test_solvers_converge_at_their_order(solver, order):
    """dx/dt = x t-free field: x(1) = e x(0). Halving the step divides the error by 2^order."""
    start = jnp.ones((1, 1))
    errors = [abs(float(flow_sample(lambda x, t: x, start, steps, solver)[0, 0]) - np.e) for steps in (8, 16)]
    assert np.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.15)
