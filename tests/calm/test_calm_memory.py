"""Memory of the energy loss at the paper's size: N = 8, M = 100, l = 128, 8192 tokens, the 12-layer ablation model."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ncp_jax.models.calm.call import call
from ncp_jax.models.calm.model import Calm
from ncp_jax.models.calm.presets import calm
from ncp_jax.ops.energy import energy
from ncp_jax.parallel.rules import unboxed

CONFIG = calm("S")
TOKENS = 8192
M = TOKENS // CONFIG.chunk
N, L, D = CONFIG.head.samples, CONFIG.autoencoder.latent, CONFIG.backbone.width


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def kept(f, *arguments) -> int:
    """Bytes that wait for the backward pass of f, arguments included."""
    pull = jax.eval_shape(lambda *a: jax.vjp(f, *a)[1], *arguments)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))


@pytest.fixture(scope="module")
def shapes():
    params = jax.eval_shape(
        lambda key: unboxed(Calm(CONFIG).init(key, jnp.zeros((1, 1, 4), int)))["params"], jax.random.key(0)
    )
    return params, jax.ShapeDtypeStruct((1, M, CONFIG.chunk), jnp.int32)


def backbone(model):
    return lambda params, tokens: call(model, params, "hidden", tokens)


def energy_loss(x, mean, keys):
    return energy(x, mean, jnp.exp(mean), keys, CONFIG.head.draws, 1.0).loss.sum()


def test_the_loss_peaks_far_below_the_backbone(shapes):
    """Compiled: the backbone's gradient against that of the loss. One array [N, M, P, l] would be 840 MB."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    sample, target = floats(N, 1, M - 1, L), floats(1, M - 1, L)
    ours = jax.jit(jax.grad(energy_loss)).lower(sample, target, keys).compile().memory_analysis().temp_size_in_bytes
    whole = jax.jit(jax.grad(lambda p, t: backbone(Calm(CONFIG))(p, t).sum())).lower(*shapes).compile()
    assert ours < 0.05 * whole.memory_analysis().temp_size_in_bytes
    assert ours < 15 * N * (M - 1) * L * 4


def test_the_loss_keeps_a_gradient_and_the_samples():
    keys, target = jax.random.split(jax.random.key(0), 1), jnp.zeros((1, M - 1, L))
    found = kept(lambda x: energy_loss(x, target, keys), floats(N, 1, M - 1, L))
    assert found <= 2.1 * N * (M - 1) * L * 4


def test_what_the_head_keeps(shapes):
    """N samples per position weigh about as much as 12 layers without attention scores, which fused kernels never
    hold; `remat` drops the insides of the head's blocks."""
    params, tokens = shapes
    arguments = params, floats(1, M - 1, D), floats(N, 1, M - 1, CONFIG.head.noise)

    def head(remat):
        model = Calm(dataclasses.replace(CONFIG, head=dataclasses.replace(CONFIG.head, remat=remat)))
        return kept(lambda p, h, e: call(model, p, "sample", h, e), *arguments)

    scores = 2 * CONFIG.layers * CONFIG.backbone.heads * M * M * 4  # of each layer, before and after the softmax
    layers = kept(backbone(Calm(CONFIG)), params, tokens) - scores
    assert head(remat=False) < 1.5 * layers
    assert head(remat=True) < 0.5 * layers
