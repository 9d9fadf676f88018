"""The losses of a CALM language model as (sum, weight) pairs, and the noise that they draw.

Shapes: B batch, M chunks, P = M - 1 predicted chunks, l latent size, N samples, e noise size. The objective is
sum_i coefficient_i * sum_i / weight_i with weights of the whole global batch. Source: arXiv 2510.27688 Eq. 10; the
official code takes the mean over chunks where the paper writes a sum, and so do we.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ncp_jax.models.calm.autoencoder import Autoencoder, Posterior
from ncp_jax.models.calm.call import call
from ncp_jax.models.calm.chunks import Chunks
from ncp_jax.models.calm.config import CalmConfig, DiffusionHead, EnergyHead, FlowHead
from ncp_jax.models.calm.model import Calm
from ncp_jax.models.calm.noise import HEAD, INPUT, TARGET, TIME, row_keys
from ncp_jax.ops.energy import energy
from ncp_jax.ops.transport import cosine_schedule, diffusion_error, flow_error

Terms = dict[str, Array]
Params = Any


def coefficients(c: CalmConfig) -> dict[str, float]:
    """Weight of each term in the objective; terms that are only logged are absent."""
    return {
        "energy": {"energy": 1.0},
        "flow": {"flow": 1.0},
        "diffusion": {"diffusion_noise": 1.0, "diffusion_variance": 1.0},
    }[c.head.kind]


def weights(c: CalmConfig, found: Chunks) -> Terms:
    """Predicted chunks; for flow and diffusion times N, since each sample is a row of its own."""
    pairs = found.pairs_BP.sum()
    if c.head.kind == "energy":
        return {"energy": pairs, "fidelity": pairs, "diversity": pairs}
    return dict.fromkeys(coefficients(c), pairs * c.head.samples)


class Noise(NamedTuple):
    """What one pass of the language model draws."""

    head: Array  # energy: uniform [N, B, P, e]; flow, diffusion: normal [N, B, P, l]
    target: Array  # energy: keys [B], or normals [draws, B, P, l]; flow, diffusion: normal [N, B, P, l]
    time: Array  # flow: uniform [N, B, P]; diffusion: int [N, B, P]; energy: empty
    input: Array | None  # normal [B, M, l] where the backbone reads latents, else None


def draw_noise(c: CalmConfig, key: Array, shape: tuple[int, int]) -> Noise:
    """Noise of a pass over [B, M] chunks."""
    (B, M), head, l = shape, c.head, c.autoencoder.latent
    N, P = head.samples, M - 1

    def rows(purpose: int, draw, rows_axis: int = 1) -> Array:
        return jax.vmap(draw, out_axes=rows_axis)(row_keys(key, B, purpose))

    inputs = None if c.input == "discrete" else rows(INPUT, lambda k: jax.random.normal(k, (M, l)), 0)
    if head.kind == "energy":
        uniform = rows(HEAD, lambda k: jax.random.uniform(k, (N, P, head.noise), minval=-0.5, maxval=0.5))
        return Noise(uniform, row_keys(key, B, TARGET), jnp.zeros(0), inputs)

    def times(k: Array) -> Array:
        return jax.random.uniform(k, (N, P)) if head.kind == "flow" else jax.random.randint(k, (N, P), 0, 1000)

    def normal(k: Array) -> Array:
        return jax.random.normal(k, (N, P, l))

    return Noise(rows(HEAD, normal), rows(TARGET, normal), rows(TIME, times), inputs)


def sums(
    c: CalmConfig, model: Calm, autoencoder: Autoencoder, params: Params, frozen: Params, found: Chunks, noise: Noise
) -> Terms:
    """The sums of all terms over one batch. `frozen` (the autoencoder's parameters) gets no gradient.

    Energy: `energy` is minimised; `fidelity` (2 E|x - y|^b) and `diversity` (E|x - x'|^b) are its halves.
    """
    posterior = targets(c, autoencoder, frozen, found)
    h_BPD = states(c, model, params, posterior, found, noise)[:, :-1]
    following = Posterior(*(a[:, 1:] for a in posterior))
    if isinstance(c.head, EnergyHead):
        terms = _energy(c.head, model, params, h_BPD, following, noise)
    else:
        terms = _transport(c.head, model, params, h_BPD, following, noise)
    return {name: jnp.where(found.pairs_BP, value, 0).sum() for name, value in terms.items()}


def targets(c: CalmConfig, autoencoder: Autoencoder, frozen: Params, found: Chunks) -> Posterior:
    """Posterior of every chunk, without gradient; no spread where the autoencoder was trained without."""
    posterior = call(autoencoder, lax.stop_gradient(frozen), "encode", found.tokens_BMk)
    if c.autoencoder.posterior == "mean":
        posterior = Posterior(posterior.mean, jnp.full_like(posterior.log_std, -jnp.inf))
    return Posterior(*lax.stop_gradient(posterior))


def states(c: CalmConfig, model: Calm, params: Params, posterior: Posterior, found: Chunks, noise: Noise) -> Array:
    """Backbone states [B, M, D] of every chunk."""
    latents = None if noise.input is None else posterior.sample(noise.input)
    return call(model, params, "hidden", found.tokens_BMk, latents, found.segments_BM, found.positions_BM)


def _energy(head: EnergyHead, model: Calm, params: Params, h_BPD: Array, following: Posterior, noise: Noise) -> Terms:
    x_NBPl = call(model, params, "sample", h_BPD, noise.head)
    std = jnp.exp(following.log_std)
    found = energy(x_NBPl, following.mean, std, noise.target, head.draws, head.beta)
    return {"energy": found.loss, "fidelity": found.fidelity, "diversity": found.diversity}


def _transport(
    head: FlowHead | DiffusionHead, model: Calm, params: Params, h_BPD: Array, following: Posterior, noise: Noise
) -> Terms:
    def network(x: Array, t: Array) -> Array:
        return call(model, params, "transport", x, t, h_BPD)

    z_NBPl = following.sample(noise.target)
    if head.kind == "flow":
        return {"flow": flow_error(network, z_NBPl, noise.time, noise.head)}
    guessed, bound = diffusion_error(network, cosine_schedule(), z_NBPl, noise.time, noise.head)
    return {"diffusion_noise": guessed, "diffusion_variance": bound}
