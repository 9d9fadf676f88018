"""The autoencoder against the official module: posterior, reconstruction, losses and gradients with recorded noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calm_golden import Tensors, as_chunks, autoencoder_config, autoencoder_params, fields
from golden_files import load

from ncp_jax.models.calm import reconstruction
from ncp_jax.models.calm.autoencoder import Autoencoder, Posterior

FILES = ("k4", "k2", "k3_v9", "k1_v5", "k8")


@pytest.fixture(scope="module", params=FILES)
def given(request):
    golden = load(f"calm_ae_{request.param}")
    c = autoencoder_config(fields(golden))
    return golden, c, Autoencoder(c), autoencoder_params(Tensors(golden), c)


def close(ours, theirs, tolerance=1e-4):
    np.testing.assert_allclose(np.asarray(ours).reshape(theirs.shape), theirs, atol=tolerance, rtol=0)


def test_forward(given):
    golden, c, model, params = given
    ids, normal = golden["input_ids"], golden["eval_eps"]

    @jax.jit
    def run(params):
        found = as_chunks(ids, c.chunk)
        posterior = model.apply({"params": params}, found.tokens_BMk, method="encode")
        sampled = posterior.sample(normal.reshape(posterior.mean.shape))

        def logits(z):
            return model.apply({"params": params}, z, method="logits")

        evaluated = reconstruction.evaluation_sums(c, model, params, found, normal.reshape(posterior.mean.shape))
        return (
            posterior, logits(posterior.mean), logits(golden["given_latent"]), logits(sampled),
            evaluated["reconstruction"] / ids.size,
        )  # fmt: skip

    posterior, from_mean, from_given, from_sample, loss = run(params)
    close(posterior.mean, golden["mean"])
    close(posterior.log_std, golden["log_std"])
    close(from_mean, golden["decoder_logits_mean"])
    close(from_given, golden["decoder_logits_given"])
    close(from_sample, golden["eval_logits"])
    np.testing.assert_allclose(loss, golden["eval_loss"], rtol=1e-3)


def test_kl(given):
    golden, c, _, _ = given
    kl = reconstruction.kl_per_dimension(Posterior(golden["mean"], golden["log_std"]))
    close(kl, golden["kl_per_dim"])
    close(jnp.maximum(kl, c.kl_floor).sum(axis=-1), golden["kl_clamped_patch"])


@pytest.mark.parametrize(("which", "rate"), [("train_nodrop", 0.0), ("train_drop", 0.15)])
def test_training_loss_and_gradients(given, which, rate):
    golden, _, _, params = given
    c = autoencoder_config(fields(golden), token_dropout=rate, latent_dropout=rate)
    model, found = Autoencoder(c), as_chunks(golden["input_ids"], c.chunk)
    shape = found.tokens_BMk.shape[:2]
    noise = reconstruction.Noise(
        jnp.asarray(golden[f"{which}_token_rand"] > rate).reshape(found.tokens_BMk.shape),
        golden[f"{which}_eps"].reshape(*shape, c.latent),
        jnp.asarray(golden[f"{which}_latent_keep"] > 0).reshape(*shape, c.latent),
    )
    np.testing.assert_array_equal(
        np.where(noise.keep_BMk, found.tokens_BMk, c.mask).reshape(-1, c.chunk),
        golden[f"{which}_masked_ids"],
    )

    @jax.jit
    def loss(params):
        sums, weights = reconstruction.sums(c, model, params, found, noise), reconstruction.weights(c, found)
        means = {term: sums[term] / weights[term] for term in sums}
        return sum(factor * means[term] for term, factor in reconstruction.coefficients(c).items()), means

    (total, means), grads = jax.value_and_grad(loss, has_aux=True)(params)
    np.testing.assert_allclose(means["reconstruction"], golden[f"{which}_ce"], rtol=1e-3)
    np.testing.assert_allclose(means["kl"], golden[f"{which}_kl"], rtol=1e-3)
    np.testing.assert_allclose(total, golden[f"{which}_total_loss"], rtol=1e-3)
    theirs = Tensors(golden, f"{which}_grad/")
    close(grads["embed"]["table"], theirs("encoder.embed_tokens.weight"), 2e-3)
    close(grads["encoder"]["blocks"]["w_gate"][0].T, theirs("encoder.encoder_layers.0.mlp.gate_proj.weight"), 2e-3)
    close(grads["encoder"]["latent"]["bias"], theirs("encoder.hidden_to_latent.bias"), 2e-3)
    close(grads["encoder"]["squeeze"]["kernel"].T, theirs("encoder.squeeze_layer.weight"), 2e-3)
    close(grads["decoder"]["expand"]["bias"], theirs("decoder.expand_layer.bias"), 2e-3)
    close(grads["decoder"]["norm"]["scale"], theirs("decoder.norm.weight"), 2e-3)
