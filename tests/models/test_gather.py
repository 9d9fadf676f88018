"""Weights gathered for use: the same values and derivatives as without devices, gradients split as their weights."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ncp_jax.nn.block import under_remat
from ncp_jax.nn.gather import gathered, looked_up
from ncp_jax.parallel.mesh import MeshConfig, make_mesh
from ncp_jax.parallel.rules import activation_rules

V, D, F = 24, 16, 8


@pytest.fixture
def mesh():
    made = make_mesh(MeshConfig(fsdp=4, tensor=2))
    with jax.set_mesh(made), nn.logical_axis_rules(activation_rules()):
        yield made


def test_gradients_of_a_common_token_do_not_stop_growing():
    """Two thousand ones, which bfloat16 counts up to 256."""
    tokens = jnp.zeros((1, 2000), jnp.int32)
    slope = jax.grad(lambda table: looked_up(table, tokens, jnp.bfloat16).astype(jnp.float32).sum())(jnp.ones((V, D)))
    np.testing.assert_array_equal(slope[0], 2000)
    np.testing.assert_array_equal(slope[1:], 0)


def test_lookup_on_devices(mesh):
    table, tangent = jax.random.normal(jax.random.key(0), (2, V, D))
    tokens = jax.random.randint(jax.random.key(1), (8, 4), 0, V)
    placed = jax.device_put(table, NamedSharding(mesh, PartitionSpec("tensor", "fsdp")))

    def loss(table):
        return (looked_up(table, tokens, jnp.float32) ** 2).sum()

    slope = jax.jit(jax.grad(loss))(placed)
    np.testing.assert_allclose(slope, jax.grad(lambda table: (table[tokens] ** 2).sum())(table), rtol=1e-6)
    assert slope.sharding.spec == PartitionSpec("tensor", "fsdp")
    forward = jax.jit(lambda a, b: jax.jvp(loss, (a,), (b,))[1])(placed, tangent)
    np.testing.assert_allclose(forward, (slope * tangent).sum(), rtol=1e-5)


def test_weights_on_devices(mesh):
    keys = jax.random.split(jax.random.key(0), 3)
    w, tangent = (jax.random.normal(key, (D, F)) for key in keys[:2])
    x = jax.random.normal(keys[2], (8, D))
    placed = jax.device_put(w, NamedSharding(mesh, PartitionSpec("fsdp", "tensor")))

    def loss(w):
        return jnp.sin(x @ gathered({"w_up": w, "mlp_norm": w})["w_up"]).sum()

    slope = jax.jit(jax.grad(loss))(placed)
    np.testing.assert_allclose(slope, jax.grad(lambda w: jnp.sin(x @ w).sum())(w), atol=1e-5)
    assert slope.sharding.spec == PartitionSpec("fsdp", "tensor")
    forward = jax.jit(lambda a, b: jax.jvp(loss, (a,), (b,))[1])(placed, tangent)
    np.testing.assert_allclose(forward, (slope * tangent).sum(), rtol=1e-4)


def test_no_layer_keeps_gathered_weights(mesh):
    """Of a scan over layers, the backward pass is handed split weights: no stack of whole ones is in the program."""
    layers, width = 6, 64

    def layer(x, w):
        return jnp.sin(x @ gathered({"w_up": w})["w_up"])

    def loss(weights, x):
        run = under_remat(layer, "none", static_argnums=())
        return jax.lax.scan(lambda x, w: (run(x, w), None), x, weights)[0].sum()

    weights = jax.ShapeDtypeStruct(
        (layers, width, width), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "fsdp", "tensor"))
    )
    x = jax.ShapeDtypeStruct((8, width), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    text = jax.jit(jax.grad(loss)).lower(weights, x).compile().as_text()
    assert f"[{layers},{width // 4},{width // 2}]" in text  # split over fsdp and tensor
    assert f"[{layers},{width},{width // 2}]" not in text
