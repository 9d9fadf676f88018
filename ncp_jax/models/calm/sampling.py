"""Samples of the next latent vector from any head: the black-box sampler that scores and temperatures build on.

Shapes: N samples, `...` axes of states (rows, positions), l latent size.
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


def keyed_latents(c: CalmConfig, model: Calm, params, condition: Any, keys_N: Array) -> Array:
    """One latent per key [N, ...]: [N, ..., l], in at least f32, after the states [...] whose `condition` this is.

    Each is a function of its key and its state alone. `condition`: of Calm.condition.
    """

    def each(draw) -> Array:
        for _ in range(keys_N.ndim):
            draw = jax.vmap(draw)
        return draw(keys_N)

    wide = jnp.promote_types(jax.tree.leaves(condition)[0].dtype, jnp.float32)
    if c.head.kind == "energy":
        noise = each(lambda key: _uniform(key, (c.head.noise,)))
        return call(model, params, "given", condition, noise).astype(wide)

    def network(x_Nl: Array, t_N: Array) -> Array:
        return call(model, params, "given", x_Nl, t_N[:1], condition)  # all samples stand at one time

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
