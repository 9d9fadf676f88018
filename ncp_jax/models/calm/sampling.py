"""Samples of the next latent vector from any head: the black-box sampler that scores and temperatures build on.

Shapes: B rows, `...` further axes of positions, D width, l latent size, N samples.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ncp_jax.models.calm.call import call
from ncp_jax.models.calm.config import CalmConfig, DiffusionHead, FlowHead
from ncp_jax.models.calm.model import Calm
from ncp_jax.ops.transport import Network, cosine_schedule, diffusion_sample, flow_sample, respaced


def draw_latents(c: CalmConfig, model: Calm, params, h: Array, keys_B: Array, samples: int) -> Array:
    """`samples` independent latents for each state [B, ..., D]: [N, B, ..., l], in at least f32.

    Every row draws from its own key, whatever the batch around it.
    """

    def rows(draw) -> Array:
        return jax.vmap(draw, out_axes=1)(keys_B)

    wide, inner, l = jnp.promote_types(h.dtype, jnp.float32), h.shape[1:-1], c.autoencoder.latent
    if c.head.kind == "energy":
        shape = (samples, *inner, c.head.noise)
        noise = rows(lambda key: _uniform(key, shape))
        return call(model, params, "sample", h, noise).astype(wide)

    def network(x: Array, t: Array) -> Array:
        return call(model, params, "transport", x, t, h)

    def normal(step: Array | int) -> Array:
        return rows(lambda key: jax.random.normal(jax.random.fold_in(key, step), (samples, *inner, l), wide))

    return _transported(c.head, network, normal)


def keyed_latents(c: CalmConfig, model: Calm, params, condition: Any, keys_NB: Array) -> Array:
    """One latent per key, [N, B, l], in at least f32, after the B states whose `condition` (Calm.condition) this is."""

    def each(draw) -> Array:
        return jax.vmap(jax.vmap(draw))(keys_NB)

    wide = jnp.promote_types(jax.tree.leaves(condition)[0].dtype, jnp.float32)
    if c.head.kind == "energy":
        noise = each(lambda key: _uniform(key, (c.head.noise,)))
        return call(model, params, "given", condition, noise).astype(wide)

    def network(x_NBl: Array, t_NB: Array) -> Array:
        return call(model, params, "given", x_NBl, t_NB[:1], condition)  # all samples stand at one time

    def normal(step: Array | int) -> Array:
        return each(lambda key: jax.random.normal(jax.random.fold_in(key, step), (c.autoencoder.latent,), wide))

    return _transported(c.head, network, normal)


def _uniform(key: Array, shape: tuple[int, ...]) -> Array:
    return jax.random.uniform(key, shape, minval=-0.5, maxval=0.5)


def _transported(head: FlowHead | DiffusionHead, network: Network, normal: Callable[[Array | int], Array]) -> Array:
    """From noise to latents by the solver of a head; `normal(step)` draws what a step needs."""
    if head.kind == "flow":
        return flow_sample(network, normal(0), head.steps, head.solver)
    schedule = respaced(cosine_schedule(), head.steps)
    return diffusion_sample(network, schedule, normal(0), lambda t: normal(t + 1))
