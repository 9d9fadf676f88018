"""The fused head: sliced or whole, the same sums and gradients as the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ncp_jax.ops.cross_entropy import linear_cross_entropy

B, T, D, V = 2, 9, 8, 30


@pytest.fixture
def batch():
    key = jax.random.split(jax.random.key(0), 4)
    x, head = jax.random.normal(key[0], (B, T, D)), jax.random.normal(key[1], (D, V))
    return x, head, jax.random.randint(key[2], (B, T), 0, V), jax.random.bernoulli(key[3], 0.7, (B, T))


def plain(x, head, target, scored):
    log_p = jax.nn.log_softmax(x @ head)
    nll = -jnp.take_along_axis(log_p, target[..., None], axis=-1)[..., 0]
    return (nll * scored).sum() + 1e-2 * (jax.nn.logsumexp(x @ head, axis=-1) ** 2 * scored).sum()


def fused(slice_tokens):
    def loss(x, head, target, scored):
        found = linear_cross_entropy(x, head, target, scored, slice_tokens)
        return found.nll + 1e-2 * found.z

    return loss


@pytest.mark.parametrize("slice_tokens", [None, 1, 4, 6, 100])
def test_slices_do_not_matter(batch, slice_tokens):
    ours, theirs = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(*batch) for f in (fused(slice_tokens), plain))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    for a, b in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


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
    for slice_tokens, present in ((None, True), (8, False)):
        step = jax.jit(jax.grad(lambda *a, s=slice_tokens: linear_cross_entropy(*a, s).nll, argnums=(0, 1)))
        text = step.lower(x, head, target, scored).compile().as_text()
        assert (f"[{n},{V}]" in text) is present
