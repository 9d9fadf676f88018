"""The energy language model against the official one: states, samples, scores, losses and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calm_golden import (
    ENERGY_FILES,
    Tensors,
    as_chunks,
    autoencoder_params,
    calm_config,
    calm_params,
)
from golden_files import load

from ncp_jax.models.calm import losses
from ncp_jax.models.calm.autoencoder import Autoencoder
from ncp_jax.models.calm.call import call
from ncp_jax.models.calm.model import Calm
from ncp_jax.ops.energy import energy

BETAS = (0.75, 1.0, 1.25, 1.75, 2.0)


@pytest.fixture(scope="module", params=ENERGY_FILES)
def given(request):
    golden = load(f"calm_energy_{request.param}")
    c = calm_config(golden)
    frozen = autoencoder_params(Tensors(golden, "w/ae_model."), c.autoencoder)
    return golden, c, calm_params(Tensors(golden), c), frozen


def close(ours, theirs, tolerance=1e-4):
    np.testing.assert_allclose(np.asarray(ours).reshape(theirs.shape), theirs, atol=tolerance, rtol=0)


def test_states_samples_and_targets(given):
    golden, c, params, frozen = given
    found, model = as_chunks(golden["input_ids"], c.chunk), Calm(c)

    @jax.jit
    def run(params, frozen):
        read = call(model, params, "read", found.tokens_BMk)
        unrolled = call(Calm(dataclasses.replace(c, scan=False)), params, "hidden", found.tokens_BMk)[:, :-1]
        h = call(model, params, "hidden", found.tokens_BMk)[:, :-1]
        noise = golden["head_noise"].reshape(c.head.samples, *h.shape[:2], -1)
        posterior = losses.targets(c, Autoencoder(c.autoencoder), frozen, found)
        return read, h, unrolled, call(model, params, "sample", h, noise), posterior

    read, h, unrolled, samples, posterior = run(params, frozen)
    close(read, golden["inputs_embeds_all"])
    close(h, golden["hidden_states"])
    close(unrolled, golden["hidden_states"])
    close(samples, golden["head_out"])
    close(posterior.mean[:, 1:], golden["target_mean"])
    close(posterior.log_std[:, 1:], golden["target_log_std"])


def test_scores_at_every_exponent(given):
    golden, c, _, _ = given

    @jax.jit
    def scores(x, mean, log_std, normals):
        found = [energy(x, mean, jnp.exp(log_std), normals, c.head.draws, beta) for beta in BETAS]
        return [-one.loss for one in found]

    ours = scores(*(golden[name] for name in ("head_out", "target_mean", "target_log_std", "energy_eps")))
    for beta, score in zip(BETAS, ours, strict=True):
        np.testing.assert_allclose(score, golden[f"energy_score_beta{beta}"], rtol=1e-3, atol=1e-4)


@functools.cache
def gradient_of(c):
    """Jitted ((params, frozen), chunks, noise) -> (mean energy, gradients)."""

    def loss(both, found, noise):
        sums = losses.sums(c, Calm(c), Autoencoder(c.autoencoder), *both, found, noise)
        return sums["energy"] / losses.weights(c, found)["energy"]

    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize("which", ["full", "masked"])
def test_loss_and_gradients(given, which):
    """Masked positions take part with a weight of zero, where the official code removes them."""
    golden, c, params, frozen = given
    counted = golden[f"{which}_labels"].reshape(2, -1, c.chunk)[:, :, 0] != -100
    found = as_chunks(golden["input_ids"], c.chunk)._replace(segments_BM=jnp.asarray(counted, jnp.int32))
    pairs = np.asarray(found.pairs_BP)
    assert pairs.sum() == golden[f"{which}_eps"].shape[1]

    def placed(recorded):
        values = np.zeros((len(recorded), *pairs.shape, recorded.shape[-1]), np.float32)
        values[:, pairs] = recorded
        return values

    uniform, normal = placed(golden[f"{which}_noise_u01"] - 0.5), placed(golden[f"{which}_eps"])
    noise = losses.Noise(uniform, normal, jnp.zeros(0), None)

    value, (grads, frozen_grads) = gradient_of(c)((params, frozen), found, noise)
    np.testing.assert_allclose(value, golden[f"{which}_loss"], rtol=1e-3)
    assert all((grad == 0).all() for grad in jax.tree.leaves(frozen_grads))
    theirs = Tensors(golden, f"{which}_grad/")
    close(grads["embed"]["table"], theirs("transformer.embed_tokens.weight"), 2e-3)
    D = c.backbone.width
    close(grads["blocks"]["wq"][0].reshape(D, D).T, theirs("transformer.layers.0.self_attn.q_proj.weight"), 2e-3)
    close(grads["blocks"]["w_down"][1].T, theirs("transformer.layers.1.mlp.down_proj.weight"), 2e-3)
    close(grads["final_norm"]["scale"], theirs("transformer.norm.weight"), 2e-3)
    close(grads["input"]["in"]["kernel"].T, theirs("embed_proj.0.weight"), 2e-3)
    close(grads["input"]["in"]["bias"], theirs("embed_proj.0.bias"), 2e-3)
    close(grads["input"]["norm"]["scale"], theirs("embed_proj.3.weight"), 2e-3)
    close(grads["input"]["norm"]["bias"], theirs("embed_proj.3.bias"), 2e-3)
    head, theirs = grads["generator"], theirs.under("mlp_generator.")
    close(head["noise"]["kernel"].T, theirs("noise_embd.weight"), 2e-3)
    close(head["hidden"]["bias"], theirs("hidden_embd.bias"), 2e-3)
    close(head["blocks"]["w_down"][0].T, theirs("mlp_blocks.0.down_proj.weight"), 2e-3)
    close(head["blocks"]["b_down"][0], theirs("mlp_blocks.0.down_proj.bias"), 2e-3)
    close(head["blocks"]["w1"][1].T, theirs("mlp_blocks.1.linears.0.weight"), 2e-3)
    close(head["out2"]["kernel"].T, theirs("final_layer.linears.2.weight"), 2e-3)
    close(head["out2"]["bias"], theirs("final_layer.linears.2.bias"), 2e-3)
