"""Samples of the next latent vector from any head: the black-box sampler that scores and temperatures build on.

Shapes: B rows, `...` further axes of positions, D width, l latent size, N samples.
"""

import jax
import jax.numpy as jnp
from jax import Array

from ncp_jax.models.calm.call import call
from ncp_jax.models.calm.config import CalmConfig
from ncp_jax.models.calm.model import Calm
from ncp_jax.ops.transport import cosine_schedule, diffusion_sample, flow_sample, respaced


def draw_latents(c: CalmConfig, model: Calm, params, h: Array, keys_B: Array, samples: int) -> Array:
    """`samples` independent latents for each state [B, ..., D]: [N, B, ..., l], in at least f32.

    Every row draws from its own key, whatever the batch around it.
    """

    def rows(draw) -> Array:
        return jax.vmap(draw, out_axes=1)(keys_B)

    wide, inner, l = jnp.promote_types(h.dtype, jnp.float32), h.shape[1:-1], c.autoencoder.latent
    if c.head.kind == "energy":
        shape = (samples, *inner, c.head.noise)
        noise = rows(lambda key: jax.random.uniform(key, shape, minval=-0.5, maxval=0.5))
        return call(model, params, "sample", h, noise).astype(wide)

    def network(x: Array, t: Array) -> Array:
        return call(model, params, "transport", x, t, h)

    def normal(step: Array | int) -> Array:
        return rows(lambda key: jax.random.normal(jax.random.fold_in(key, step), (samples, *inner, l), wide))

    if c.head.kind == "flow":
        return flow_sample(network, normal(0), c.head.steps, c.head.solver)
    schedule = respaced(cosine_schedule(), c.head.steps)
    return diffusion_sample(network, schedule, normal(0), lambda t: normal(t + 1))
