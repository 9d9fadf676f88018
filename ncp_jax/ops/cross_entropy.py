"""Fused linear head and cross-entropy: logits exist for one slice of tokens at a time, on each device for its own.

Left to the partitioner, slices of all tokens would be cut across devices, and every device would compute each of them.
Here each device takes its own rows, gathers the head once, and gives its share of the head's gradient away once.

    matmuls of n x D x V     forward   backward   kept for the backward pass
    autodiff, whole          1         2          logits [n, V]
    autodiff, sliced         1         3          nothing
    this                     3         0          the gradients, of x [n, D] and of the head [D, V]
    this, with z's gradient  6         0          the same, twice

Shapes: B batch, T tokens, D width, V vocabulary, n = B T tokens, of one device or of one slice of them.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from ncp_jax.ops.split import dividing, names_of


class TokenLoss(NamedTuple):
    """Sums over scored tokens, f32: divide by the global count of scored tokens."""

    nll: Array  # nats
    z: Array  # squared log-partition


class _How(NamedTuple):
    """What is static: tokens of a slice, whether z has a gradient, mesh axes of rows, tokens and vocabulary."""

    slice_tokens: int | None
    z_gradient: bool
    rows: Any
    tokens: Any
    vocab: Any
    width: Any  # what the head's gradient is split over when it leaves, by its first side


def linear_cross_entropy(
    x_BTD: Array,
    head_DV: Array,
    target_BT: Array,
    scored_BT: Array,
    slice_tokens: int | None = None,
    z_gradient: bool = False,
    split: PartitionSpec | None = None,
) -> TokenLoss:
    """Cross-entropy of x @ head against targets, summed over scored positions.

    Matmul inputs in x's dtype, sums and the head's gradient in at least f32.

    Args:
        slice_tokens: a device's tokens are taken in slices of so many, a last one filled up; None: all at once.
        z_gradient: whether z will be part of the objective. Without it z is a number alone: no gradient flows
            through it.
        split: mesh axes of rows, tokens and vocabulary, under an ambient mesh of more than one device; None: all whole,
            as is any that does not divide.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = (*target_BT.shape, head_DV.shape[1])
    rows, tokens, vocab = (dividing(mesh, axes, size) for axes, size in zip(split or (None,) * 3, sizes, strict=True))
    # Where parameters are split over devices (FSDP), it is over the innermost axis of the rows.
    width = dividing(mesh, names_of(rows)[-1:] or None, head_DV.shape[0])
    return _fused(_How(slice_tokens, z_gradient, rows, tokens, vocab, width), x_BTD, head_DV, target_BT, scored_BT)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _fused(how: _How, x_BTD: Array, head_DV: Array, target_BT: Array, scored_BT: Array) -> TokenLoss:
    return _on_devices(how, None, x_BTD, head_DV, target_BT, scored_BT)[0]


@_fused.defjvp
def _slope(how: _How, inputs: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[TokenLoss, TokenLoss]:
    """Loss, and its slope along the tangents: linear in them, so that its transpose is the backward pass."""
    one = jnp.ones((), jnp.promote_types(inputs[0].dtype, jnp.float32))

    def along(given: TokenLoss) -> tuple[TokenLoss, Array]:
        loss, *gradients = _on_devices(how, given, *inputs)
        parts = zip(gradients, tangents[:2], strict=True)
        return loss, sum(((g.astype(one.dtype) * t.astype(one.dtype)).sum() for g, t in parts), 0 * one)

    loss, nll_slope = along(TokenLoss(one, 0 * one))
    z_slope = along(TokenLoss(0 * one, one))[1] if how.z_gradient else 0 * one
    return loss, TokenLoss(nll_slope, z_slope)


def _on_devices(how: _How, given: TokenLoss | None, x_BTD: Array, head_DV: Array, target_BT: Array, scored_BT: Array):
    """(loss, gradients of x and of the head for the cotangents `given`, or None twice)."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        alone = how._replace(rows=None, tokens=None, vocab=None, width=None)
        found = _own_tokens(alone, given, x_BTD, head_DV.astype(x_BTD.dtype), target_BT, scored_BT)
        return *found[:2], None if given is None else found[2].astype(head_DV.dtype)
    # Cast, then gathered: the barrier keeps XLA from gathering in full precision.
    cast_DV = lax.optimization_barrier(head_DV.astype(x_BTD.dtype))
    x_spec, head_spec = PartitionSpec(how.rows, how.tokens), PartitionSpec(None, how.vocab)
    gradients = (None, None) if given is None else (x_spec, PartitionSpec(how.width, how.vocab))
    run = jax.shard_map(
        partial(_own_tokens, how), in_specs=(PartitionSpec(), x_spec, head_spec, x_spec, x_spec),
        out_specs=(PartitionSpec(), *gradients), check_vma=False,  # what is summed here is equal on all devices
    )  # fmt: skip
    loss, dx_BTD, dhead_DV = run(given, x_BTD, cast_DV, target_BT, scored_BT)
    return loss, dx_BTD, None if given is None else dhead_DV.astype(head_DV.dtype)


def _own_tokens(how: _How, given: TokenLoss | None, x_BTD: Array, head_DV: Array, target_BT: Array, scored_BT: Array):
    """One device's tokens against its share of the vocabulary; sums over devices at the end."""
    D, n = x_BTD.shape[-1], target_BT.size
    x_nD, target_n, scored_n = x_BTD.reshape(n, D), target_BT.reshape(n), scored_BT.reshape(n)
    one = partial(_slice, how.vocab, given, head_DV)
    if how.slice_tokens is None or how.slice_tokens >= n:
        loss, dx_nD, dhead_DV = one(x_nD, target_n, scored_n)
    else:
        loss, dx_nD, dhead_DV = _in_slices(one, how.slice_tokens, x_nD, head_DV, target_n, scored_n)
    devices = names_of(how.rows, how.tokens)
    loss = jax.tree.map(lambda a: lax.psum(a, devices), loss) if devices else loss
    if given is None:
        return loss, None, None
    return loss, dx_nD.reshape(x_BTD.shape), _summed(how, dhead_DV)


def _in_slices(one: Any, size: int, x_nD: Array, head_DV: Array, target_n: Array, scored_n: Array):
    """`one` slice after another; the head's gradient is added up in full precision."""
    n, D = x_nD.shape
    count = -(-n // size)
    pad = count * size - n
    parts = [jnp.pad(a, [(0, pad)] + [(0, 0)] * (a.ndim - 1)) for a in (x_nD, target_n, scored_n)]
    parts = [a.reshape(count, size, *a.shape[1:]) for a in parts]

    def body(total: Any, part: Any) -> tuple[Any, Array | None]:
        loss, dx_nD, dhead_DV = one(*part)
        return jax.tree.map(jnp.add, total, (loss, dhead_DV)), dx_nD

    shapes = jax.eval_shape(one, *(a[0] for a in parts))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (shapes[0], shapes[2]))
    (loss, dhead_DV), dx_cnD = lax.scan(body, zeros, parts)
    return loss, None if dx_cnD is None else dx_cnD.reshape(-1, D)[:n], dhead_DV


def _slice(vocab: Any, given: TokenLoss | None, head_DV: Array, x_nD: Array, target_n: Array, scored_n: Array):
    """Loss of one slice, and its gradients for the cotangents `given`: d logits = (nll + 2 z lse) p - nll onehot."""
    wide, V = jnp.promote_types(x_nD.dtype, jnp.float32), head_DV.shape[1]
    x_nD = jnp.where(scored_n[:, None], x_nD, 0)  # what is not scored adds nothing, not even NaN times 0
    logit_nV = jnp.matmul(x_nD, head_DV, preferred_element_type=wide)
    most_n, names = logit_nV.max(axis=-1), names_of(vocab)
    most_n = lax.pmax(most_n, names) if names else most_n
    target_n = target_n - (V * lax.axis_index(names) if names else 0)  # among this device's share
    hit_nV = target_n[:, None] == jnp.arange(V)
    p_nV = jnp.exp(logit_nV - most_n[:, None])
    total_n, at_target_n = p_nV.sum(axis=-1), jnp.where(hit_nV, logit_nV, 0).sum(axis=-1)
    if names:
        total_n, at_target_n = lax.psum((total_n, at_target_n), names)
    lse_n = most_n + jnp.log(total_n)
    loss = TokenLoss(*(jnp.where(scored_n, a, 0).sum(dtype=wide) for a in (lse_n - at_target_n, lse_n**2)))
    if given is None:
        return loss, None, None
    dlogit_nV = ((given.nll + 2 * given.z * lse_n) / total_n)[:, None] * p_nV - jnp.where(hit_nV, given.nll, 0)
    dlogit_nV = jnp.where(scored_n[:, None], dlogit_nV, 0).astype(x_nD.dtype)
    dx_nD = jnp.matmul(dlogit_nV, head_DV.T, preferred_element_type=wide)
    dx_nD = (lax.psum(dx_nD, names) if names else dx_nD).astype(x_nD.dtype)
    return loss, dx_nD, jnp.matmul(x_nD.T, dlogit_nV, preferred_element_type=wide)


def _summed(how: _How, dhead_DV: Array) -> Array:
    """Over all devices with other tokens; each keeps the rows of the width that it will update."""
    scattered = names_of(how.width)
    others = tuple(name for name in names_of(how.rows, how.tokens) if name not in scattered)
    dhead_DV = lax.psum(dhead_DV, others) if others else dhead_DV
    return lax.psum_scatter(dhead_DV, scattered, scatter_dimension=0, tiled=True) if scattered else dhead_DV
