"""The fused head: sliced or whole, the same sums and gradients as the plain formula."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ncp_jax.ops.cross_entropy import linear_cross_entropy
from ncp_jax.parallel.mesh import MeshConfig, make_mesh

B, T, D, V = 2, 9, 8, 30


@pytest.fixture
def batch():
    key = jax.random.split(jax.random.key(0), 4)
    x, head = jax.random.normal(key[0], (B, T, D)), jax.random.normal(key[1], (D, V))
    return x, head, jax.random.randint(key[2], (B, T), 0, V), jax.random.bernoulli(key[3], 0.7, (B, T))


def plain(z, x, head, target, scored):
    """The slow twin: whole logits, differentiated by JAX."""
    log_p = jax.nn.log_softmax(x @ head)
    nll = -jnp.take_along_axis(log_p, target[..., None], axis=-1)[..., 0]
    return 3 * (nll * scored).sum() + z * (jax.nn.logsumexp(x @ head, axis=-1) ** 2 * scored).sum()


def fused(z, slice_tokens, split, x, head, target, scored):
    found = linear_cross_entropy(x, head, target, scored, slice_tokens, z_gradient=z > 0, split=split)
    return 3 * found.nll + z * found.z


def same(ours, theirs):
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    for a, b in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def with_gradients(loss, *arguments):
    return jax.jit(jax.value_and_grad(partial(loss, *arguments), argnums=(0, 1)))


@pytest.mark.parametrize("z", [0.0, 1e-2])
@pytest.mark.parametrize("slice_tokens", [None, 1, 4, 6, 100])
def test_slices_do_not_matter(batch, slice_tokens, z):
    same(with_gradients(fused, z, slice_tokens, None)(*batch), with_gradients(plain, z)(*batch))


@pytest.mark.parametrize("z", [0.0, 1e-2])
@pytest.mark.parametrize("slice_tokens", [None, 4])
@pytest.mark.parametrize(
    ("sizes", "split"),
    [
        ((2, 2, 1), PartitionSpec(("data", "fsdp"), "seq", "tensor")),
        ((1, 2, 2), PartitionSpec(("data", "fsdp"), "seq", "tensor")),
        ((1, 4, 2), PartitionSpec("fsdp", None, "tensor")),
        ((1, 8, 1), PartitionSpec("fsdp", None, "tensor")),
    ],
    ids=str,
)
def test_devices_do_not_matter(sizes, split, slice_tokens, z):
    """Rows over data and fsdp, the vocabulary over tensor, tokens over seq; the head's gradient over fsdp."""
    data, fsdp, tensor = sizes
    mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor, seq=8 // (data * fsdp * tensor)))
    key = jax.random.split(jax.random.key(1), 4)
    x, head = jax.random.normal(key[0], (8, 8, D)), jax.random.normal(key[1], (D, V))
    batch = (x, head, jax.random.randint(key[2], (8, 8), 0, V), jax.random.bernoulli(key[3], 0.7, (8, 8)))
    with jax.set_mesh(mesh):
        ours = with_gradients(fused, z, slice_tokens, split)(*batch)
    same(jax.tree.map(np.asarray, ours), with_gradients(plain, z)(*batch))


def test_without_its_gradient_z_is_a_number_alone(batch):
    x, head, target, scored = batch
    slope = jax.grad(lambda x: linear_cross_entropy(x, head, target, scored).z)(x)
    assert not np.asarray(slope).any()


def test_what_is_not_scored_cannot_spoil_the_sum(batch):
    x, head, target, scored = batch
    x = jnp.where(scored[..., None], x, jnp.nan)
    found = linear_cross_entropy(x, head, target, scored)
    assert np.isfinite(found.nll)
    assert linear_cross_entropy(x, head, target, jnp.zeros_like(scored)).nll == 0


def test_sliced_logits_never_exist_whole():
    """No array of all tokens by the whole vocabulary in the program, forward or backward."""
    n, V = 64, 1000
    x, head = jnp.zeros((1, n, 4)), jnp.zeros((4, V))
    target, scored = jnp.zeros((1, n), jnp.int32), jnp.ones((1, n), bool)
    for slice_tokens, z_gradient, present in ((None, False, True), (8, False, False), (8, True, False)):

        def loss(*a, how=(slice_tokens, z_gradient)):
            return sum(linear_cross_entropy(*a, *how))

        text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, head, target, scored).compile().as_text()
        assert (f"[{n},{V}]" in text) is present
