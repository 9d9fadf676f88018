"""Iterative samplers and their losses: flow matching (Euler, midpoint) and denoising diffusion with learned variance.

Shapes: l latent size; `...` any axes of rows. A network is a function (x [..., l], time [...]) -> [..., l]
or [..., 2l].
Sources: official flow and diffusion models of CALM; the latter is improved DDPM (arXiv 2102.09672).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Network = Callable[[Array, Array], Array]
TIME_SCALE = 1000  # networks read whole thousandths of the unit interval


def time_features(t: Array, size: int = 256) -> Array:
    """[..., size]: cosines, then sines, of t / 10000^(j / (size / 2))."""
    frequencies = jnp.asarray(10_000.0 ** (-np.arange(size // 2) / (size // 2)), jnp.float32)
    angles = jnp.asarray(t, jnp.float32)[..., None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def flow_time(t: Array | float) -> Array:
    """What the network reads for t in [0, 1): floor(1000 t), multiplied in float32 as the official code does."""
    return jnp.floor(jnp.asarray(t, jnp.float32) * TIME_SCALE)


def flow_error(network: Network, z: Array, t: Array, noise: Array) -> Array:
    """Squared error of the velocity at (1 - t) noise + t z against z - noise, mean over l. [...] of z [..., l]."""
    at = t[..., None]
    velocity = _wide(network((1 - at) * noise + at * z, flow_time(t)))
    return ((velocity - (z - noise)) ** 2).mean(axis=-1)


def flow_sample(network: Network, noise: Array, steps: int, solver: str) -> Array:
    """Integrate the velocity from noise at t = 0 to t = 1. `midpoint` costs two evaluations per step, `euler` one."""
    size = np.float32(1 / steps)

    def velocity(x: Array, t: Array) -> Array:
        return _wide(network(x, jnp.broadcast_to(flow_time(t), x.shape[:-1])))

    def step(x: Array, t: Array) -> tuple[Array, None]:
        slope = velocity(x, t)
        if solver == "midpoint":
            slope = velocity(x + size / 2 * slope, t + size / 2)
        return x + size * slope, None

    starts = jnp.asarray(np.arange(steps) / steps, jnp.float32)  # divided first: 0.05 must read as 50, not 49
    return lax.scan(step, noise, starts)[0]


class Diffusion(NamedTuple):
    """A noise schedule of S steps, float64 [S], and the time that the network reads at each."""

    betas: np.ndarray
    kept: np.ndarray  # cumulative product of 1 - beta
    times: np.ndarray  # of the unspaced schedule

    @property
    def kept_before(self) -> np.ndarray:
        return np.append(1.0, self.kept[:-1])

    @property
    def posterior_log_variance(self) -> np.ndarray:
        """log variance of q(x_{t-1} | x_t, x_0); at t = 0, where it is -inf, the value of t = 1."""
        variance = self.betas * (1 - self.kept_before) / (1 - self.kept)
        return np.log(np.append(variance[1], variance[1:]))


def cosine_schedule(steps: int = 1000) -> Diffusion:
    """alpha_bar(t) = cos^2((t + 0.008) / 1.008 pi / 2), betas cut at 0.999 (arXiv 2102.09672 Eq. 17)."""

    def kept(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = np.array([min(1 - kept((i + 1) / steps) / kept(i / steps), 0.999) for i in range(steps)])
    return Diffusion(betas, np.cumprod(1 - betas), np.arange(steps))


def respaced(full: Diffusion, steps: int) -> Diffusion:
    """`steps` times of `full`, evenly spaced and both ends kept, with the betas that lead from one to the next."""
    total = len(full.betas)
    if not 2 <= steps <= total:
        raise ValueError(f"a diffusion of {total} steps cannot be respaced to {steps}; choose 2 to {total}")
    times = np.array([round(i * (total - 1) / (steps - 1)) for i in range(steps)])
    kept = full.kept[times]
    return Diffusion(1 - kept / np.append(1.0, kept[:-1]), kept, times)


def diffusion_error(network: Network, schedule: Diffusion, z: Array, t: Array, noise: Array) -> tuple[Array, Array]:
    """(squared error of the predicted noise, variational bound in bits), means over l, [...] of z [..., l] and t int.

    The second trains the variance alone. At t = 0 it is the likelihood of bins of 1/255, an image-domain leftover that
    means nothing for latents but is part of the official loss.
    """
    coefficient = _coefficients(schedule, z.dtype)
    at = {name: value[t][..., None] for name, value in coefficient.items()}
    x = at["signal"] * z + at["noise"] * noise
    guess, share = jnp.split(_wide(network(x, t)), 2, axis=-1)
    mean, log_variance = _step_back(at, x, lax.stop_gradient(guess), share)
    true_mean = at["from_start"] * z + at["from_here"] * x
    later = _gaussian_kl(true_mean, at["posterior"], mean, log_variance).mean(axis=-1)
    first = -_binned_log_likelihood(z, mean, log_variance / 2).mean(axis=-1)
    return ((guess - noise) ** 2).mean(axis=-1), jnp.where(t == 0, first, later) / math.log(2)


def diffusion_sample(network: Network, schedule: Diffusion, start: Array, noise: Callable[[Array], Array]) -> Array:
    """Ancestral sampling from `start` [..., l] at the last step to the first. noise(t) [..., l] serves step t >= 1."""
    coefficient = _coefficients(schedule, start.dtype)

    def step(x: Array, t: Array) -> tuple[Array, None]:
        at = {name: value[t] for name, value in coefficient.items()}
        time = jnp.broadcast_to(jnp.asarray(schedule.times)[t], x.shape[:-1])
        mean, log_variance = _step_back(at, x, *jnp.split(_wide(network(x, time)), 2, axis=-1))
        return mean + jnp.where(t > 0, jnp.exp(log_variance / 2) * noise(t), 0), None

    return lax.scan(step, start, jnp.arange(len(schedule.betas))[::-1])[0]


def _coefficients(s: Diffusion, dtype) -> dict[str, Array]:
    before = s.kept_before
    values = {
        "signal": s.kept**0.5,
        "noise": (1 - s.kept) ** 0.5,
        "start_from_x": s.kept**-0.5,
        "start_from_noise": (1 / s.kept - 1) ** 0.5,
        "from_start": s.betas * before**0.5 / (1 - s.kept),
        "from_here": (1 - before) * (1 - s.betas) ** 0.5 / (1 - s.kept),
        "posterior": s.posterior_log_variance,
        "log_beta": np.log(s.betas),
    }
    wide = jnp.promote_types(dtype, jnp.float32)
    return {name: jnp.asarray(value, wide) for name, value in values.items()}


def _step_back(at: dict[str, Array], x: Array, guess: Array, share: Array) -> tuple[Array, Array]:
    """Mean and log variance of p(x_{t-1} | x_t): the variance lies between the posterior's and beta."""
    start = at["start_from_x"] * x - at["start_from_noise"] * guess
    fraction = (share + 1) / 2
    log_variance = fraction * at["log_beta"] + (1 - fraction) * at["posterior"]
    return at["from_start"] * start + at["from_here"] * x, log_variance


def _gaussian_kl(mean: Array, log_variance: Array, other_mean: Array, other_log_variance: Array) -> Array:
    gap = (mean - other_mean) ** 2 * jnp.exp(-other_log_variance)
    return 0.5 * (other_log_variance - log_variance - 1 + jnp.exp(log_variance - other_log_variance) + gap)


def _binned_log_likelihood(z: Array, mean: Array, log_std: Array) -> Array:
    """log mass of z's bin of width 2/255 on [-1, 1], tails beyond 0.999, under a Gaussian with a tanh-shaped CDF."""
    floor = 1e-12

    def below(x: Array) -> Array:
        y = jnp.exp(-log_std) * (x - mean)
        return 0.5 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))

    upper, lower = below(z + 1 / 255), below(z - 1 / 255)
    mass = jnp.where(z < -0.999, upper, jnp.where(z > 0.999, 1 - lower, upper - lower))
    return jnp.log(jnp.maximum(mass, floor))


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
