"""The autoencoder's losses as (sum, weight) pairs, the noise that they draw, and its reconstruction statistics.

Shapes: B batch, M chunks, k tokens per chunk, l latent size, D width. The objective is
sum_i coefficient_i * sum_i / weight_i with weights of the whole global batch. Source: arXiv 2510.27688 Eq. 1-4;
official modeling_autoencoder.py.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ncp_jax.models.calm.autoencoder import Autoencoder, Posterior
from ncp_jax.models.calm.call import call
from ncp_jax.models.calm.chunks import Chunks
from ncp_jax.models.calm.config import AutoencoderConfig
from ncp_jax.models.calm.noise import LATENT, TARGET, TOKENS, row_keys
from ncp_jax.nn.layers import head_split
from ncp_jax.ops.cross_entropy import linear_cross_entropy

Terms = dict[str, Array]
Params = Any
LOGITS = 1 << 26  # numbers at one time, 256 MB
COLLAPSED = 0.01  # nats; assumption: the paper counts collapsed dimensions without saying how


class Noise(NamedTuple):
    """What one training pass draws; `keep` false is dropped."""

    keep_BMk: Array
    normal_BMl: Array
    keep_BMl: Array


def coefficients(c: AutoencoderConfig) -> dict[str, float]:
    """K * mean cross-entropy + kl_weight * mean KL of a chunk."""
    return {"reconstruction": float(c.chunk), "kl": c.kl_weight}


def weights(c: AutoencoderConfig, found: Chunks) -> Terms:
    """Tokens that count, chunks that count."""
    return {"reconstruction": _counted_tokens(c, found).sum(), "kl": (found.segments_BM > 0).sum()}


def counts(found: Chunks) -> Terms:
    """Real tokens and chunks: what the statistics are means over."""
    chunks = found.segments_BM > 0
    return {"tokens": (chunks[:, :, None] & found.real_BMk).sum(), "chunks": chunks.sum()}


def draw_noise(c: AutoencoderConfig, key: Array, shape: tuple[int, int]) -> Noise:
    """Noise of a training pass over [B, M] chunks."""
    B, M = shape

    def row(tokens: Array, target: Array, latent: Array) -> tuple[Array, Array, Array]:
        return (
            jax.random.uniform(tokens, (M, c.chunk)) >= c.token_dropout,
            jax.random.normal(target, (M, c.latent)),
            jax.random.uniform(latent, (M, c.latent)) >= c.latent_dropout,
        )

    return Noise(*jax.vmap(row)(*(row_keys(key, B, purpose) for purpose in (TOKENS, TARGET, LATENT))))


def sums(c: AutoencoderConfig, model: Autoencoder, params: Params, found: Chunks, noise: Noise) -> Terms:
    """Sums of cross-entropy over tokens and of floored KL over chunks. Labels are the tokens before masking."""
    masked_BMk = jnp.where(noise.keep_BMk, found.tokens_BMk, c.mask)
    posterior = call(model, params, "encode", masked_BMk)
    z_BMl = posterior.sample(noise.normal_BMl) if c.posterior == "sampled" else posterior.mean
    z_BMl = jnp.where(noise.keep_BMl, z_BMl / (1 - c.latent_dropout), 0)
    kl_BM = jnp.maximum(kl_per_dimension(posterior), c.kl_floor).sum(axis=-1)
    return {
        "reconstruction": _reconstruction(c, model, params, z_BMl, found),
        "kl": jnp.where(found.segments_BM > 0, kl_BM, 0).sum(),
    }


def evaluation_sums(
    c: AutoencoderConfig, model: Autoencoder, params: Params, found: Chunks, normal_BMl: Array
) -> Terms:
    """The same terms without masking and dropout. The official evaluation reports the first, from a sample as well."""
    everything = Noise(jnp.ones_like(found.tokens_BMk, bool), normal_BMl, jnp.ones_like(normal_BMl, bool))
    return sums(dataclasses.replace(c, latent_dropout=0.0), model, params, found, everything)


def statistics(
    c: AutoencoderConfig, model: Autoencoder, params: Params, found: Chunks, normal_BMl: Array
) -> dict[str, Array]:
    """How well chunks come back, from the posterior's mean and from a sample, and what its dimensions do.

    `tokens/*`: share of tokens, pads left out; `chunks/*`: share of chunks with every token right; `sigma/*`: posterior
    standard deviations; `dimensions/collapsed`: how many of the l carry less than COLLAPSED nats on average.
    """
    posterior = call(model, params, "encode", found.tokens_BMk)
    counted_BM, counted_BMk = found.segments_BM > 0, (found.segments_BM > 0)[:, :, None] & found.real_BMk
    result = {}
    for name, z_BMl in (("mean", posterior.mean), ("sample", posterior.sample(normal_BMl))):
        guess_BMk = tokens_of(c, model, params, z_BMl)
        right_BMk = (guess_BMk == found.tokens_BMk) | ~found.real_BMk
        result[f"tokens/{name}"] = mean(right_BMk, counted_BMk)
        result[f"chunks/{name}"] = mean(right_BMk.all(axis=2), counted_BM)
    kl_l = jax.vmap(mean, in_axes=(2, None))(kl_per_dimension(posterior), counted_BM)
    sigma_l = jax.vmap(mean, in_axes=(2, None))(jnp.exp(posterior.log_std), counted_BM)
    return result | {
        "sigma/mean": sigma_l.mean(),
        "sigma/least": sigma_l.min(),
        "sigma/greatest": sigma_l.max(),
        "dimensions/collapsed": (kl_l < COLLAPSED).sum(),
        "kl": kl_l.sum(),
    }


def tokens_of(c: AutoencoderConfig, model: Autoencoder, params: Params, z_BMl: Array) -> Array:
    """The likeliest token at every place, [B, M, k]. Logits exist for a few chunks at a time."""
    B, M, _ = z_BMl.shape
    together = max(1, min(M, LOGITS // (B * c.chunk * c.vocab)))
    guess = lax.map(
        lambda z_Bl: call(model, params, "logits", z_Bl).argmax(-1), z_BMl.swapaxes(0, 1), batch_size=together
    )
    return guess.swapaxes(0, 1)


def mean(value: Array, counted: Array) -> Array:
    """Mean where counted; 0 if nothing is."""
    return jnp.where(counted, value, 0).sum() / jnp.maximum(counted.sum(), 1)


def kl_per_dimension(posterior: Posterior) -> Array:
    """KL of each dimension to N(0, 1), nats, [..., l]: (mean^2 + sigma^2 - 1) / 2 - log sigma."""
    return (posterior.mean**2 + jnp.exp(2 * posterior.log_std) - 1) / 2 - posterior.log_std


def _reconstruction(c: AutoencoderConfig, model: Autoencoder, params: Params, z_BMl: Array, found: Chunks) -> Array:
    h_BMkD = call(model, params, "decode", z_BMl)
    rows = h_BMkD.reshape(len(h_BMkD), -1, c.width)
    labels, counted = (a.reshape(len(a), -1) for a in (found.tokens_BMk, _counted_tokens(c, found)))
    return linear_cross_entropy(rows, params["embed"]["table"].T, labels, counted, c.head_chunk, split=head_split()).nll


def _counted_tokens(c: AutoencoderConfig, found: Chunks) -> Array:
    """[B, M, k] bool."""
    counted_BM1 = (found.segments_BM > 0)[:, :, None]
    everything = jnp.ones_like(found.real_BMk)
    return counted_BM1 & (everything if c.score_pads else found.real_BMk)
