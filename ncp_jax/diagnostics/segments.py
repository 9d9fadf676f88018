"""Codebook segments as functions: each piece is written for ONE of the S segments, and callers `vmap` it.

An experiment on segments is a parameter tree: `get_segments` takes the S segments out as one pytree with a leading S,
any function of a segment changes them, `set_segments` puts them back. Heads and codes have one effect on the token
loss, the predicted concept, so such a tree intervenes there and nowhere else.

Shapes: B rows, T tokens, M concepts per row, n = B M concept positions, D width, S segments, N codes, W = D/S.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ncp_jax.models.ncp.config import NCPConfig
from ncp_jax.models.ncp.model import NCP
from ncp_jax.ops.quantise import Mix, mix, nearest, split_segments
from ncp_jax.train.task import Batch, Params, Task, mean


class Segment(NamedTuple):
    """What one segment owns; with a leading S on every leaf, what all of them own."""

    kernel_DN: Array  # head
    bias_N: Array
    codes_NW: Array


class Concepts(NamedTuple):
    """The concepts of a batch, one position per chunk. What is measured per segment leads with S."""

    state_nD: Array  # what all heads read
    own_SnW: Array  # the chunk itself: normed chunk mean, the input of VQ
    target_SnW: Array  # the chunk that follows, which the prediction made here should equal
    real_n: Array  # bool: the chunk is a concept
    paired_n: Array  # bool: so is the one that follows, and in the same document


class Effect(NamedTuple):
    """A change of loss summed over rows, and its standard error."""

    total: Array
    error: Array


def get_segments(params: Params) -> Segment:
    """The S segments of NCP parameters: [S, D, N], [S, N], [S, N, W]."""
    heads, codebook = params["concept"]["heads"], params["concept"]["codebook"]
    return Segment(heads["kernel"], heads["bias"], codebook["codes"])


def set_segments(params: Params, segments: Segment) -> Params:
    """NCP parameters with these segments; every other leaf is shared, nothing is copied."""
    concept = params["concept"] | {
        "heads": {"kernel": segments.kernel_DN, "bias": segments.bias_N},
        "codebook": {"codes": segments.codes_NW},
    }
    return {**params, "concept": concept}


def scaled(segment: Segment, scale: Array) -> Segment:
    """One segment whose prediction is `scale` times the old one, whatever the mix: all of them are linear in the codes
    (report Eq. 9-10). 0 removes the prediction; differentiable in `scale`."""
    return segment._replace(codes_NW=scale * segment.codes_NW)


def fixed(segment: Segment, keep: Array, value_W: Array) -> Segment:
    """One segment that predicts `value_W` at every position unless `keep`, whatever the mix.

    The head is made to choose code 0 with weight one, blind to its input, and every code is the value.
    """
    constant = Segment(
        jnp.zeros_like(segment.kernel_DN),
        jax.nn.one_hot(0, segment.bias_N.size, dtype=segment.bias_N.dtype),
        jnp.broadcast_to(value_W, segment.codes_NW.shape).astype(segment.codes_NW.dtype),
    )
    return jax.tree.map(lambda own, other: jnp.where(keep, own, other), segment, constant)


def predict(segment: Segment, state_nD: Array, how: Mix) -> Array:
    """What one segment predicts at each position, [n, W]. Report Eq. 8-10."""
    logits_nN = state_nD @ segment.kernel_DN + segment.bias_N
    return jax.vmap(mix, in_axes=(0, None, None))(logits_nN, segment.codes_NW, how)


def squared_error(segment: Segment, state_nD: Array, target_nW: Array, paired_n: Array, how: Mix) -> Array:
    """One segment's share of the NCP loss: squared error summed over its W dimensions and all pairs. Report Eq. 22."""
    error_n = ((predict(segment, state_nD, how) - lax.stop_gradient(target_nW)) ** 2).sum(axis=-1)
    return jnp.where(paired_n, error_n, 0).sum()


def code_counts(segment: Segment, own_nW: Array, real_n: Array) -> Array:
    """How often each code of one segment is the nearest to a real chunk, [N] f32. Report Eq. 4."""
    code_n = jax.vmap(nearest, in_axes=(0, None))(own_nW, segment.codes_NW)
    return jnp.zeros(segment.bias_N.size).at[code_n].add(real_n.astype(jnp.float32))


def lesion_masks(S: int) -> Array:
    """[S + 1, S] f32, one experiment per row: row 0 keeps every segment (1), row s + 1 takes segment s away (0)."""
    return jnp.concatenate([jnp.ones((1, S)), 1 - jnp.eye(S)])


def observe(config: NCPConfig, params: Params, batch: Batch) -> Concepts:
    """One forward pass, seen from the concept heads. Computes in f32."""
    document_BT = batch.get("segments", batch["real"].astype(jnp.int32))
    hidden, state = NCP(config).apply(
        {"params": params}, batch["tokens"], document_BT, batch.get("positions"), mutable="intermediates"
    )
    document_BM = hidden.concept_segments_BM
    next_BM = jnp.pad(document_BM[:, 1:], [(0, 0), (0, 1)])
    own_BMSW = split_segments(hidden.concepts_BMD, config.concept.segments)
    own_SBMW = jnp.moveaxis(own_BMSW, 2, 0)
    target_SBMW = jnp.pad(own_SBMW[:, :, 1:], [(0, 0), (0, 0), (0, 1), (0, 0)])
    S, W = own_SBMW.shape[0], own_SBMW.shape[-1]
    return Concepts(
        state["intermediates"]["concept"]["final"][0].reshape(-1, S * W),
        own_SBMW.reshape(S, -1, W),
        target_SBMW.reshape(S, -1, W),
        (document_BM > 0).ravel(),
        ((document_BM > 0) & (document_BM == next_BM)).ravel(),
    )


def row_sums(task: Task, params: Params, frozen: Params, batch: Batch, at_once: int = 16) -> dict[str, Array]:
    """The sum of each loss term over each row, [B]; `ntp` in nats.

    `at_once` rows exist at a time, forward and backward, so that many experiments fit into memory side by side.
    """

    @jax.checkpoint
    def one_row(row: Batch) -> dict[str, Array]:
        return task.loss(params, frozen, {name: value[None] for name, value in row.items()}, jax.random.key(0))

    return lax.map(one_row, dict(batch), batch_size=at_once)


def term_gradients(task: Task, params: Params, frozen: Params, batch: Batch, at_once: int = 16) -> dict[str, Segment]:
    """Gradient of each term of the objective, weighted as in training, with respect to all segments.

    One backward pass `vmap`ped over the basis of terms (`jax.jacrev`).
    """
    weights = task.weights(batch)

    def terms(segments: Segment) -> dict[str, Array]:
        sums = row_sums(task, set_segments(params, segments), frozen, batch, at_once)
        return {name: factor * mean(sums[name].sum(), weights[name]) for name, factor in task.coefficients.items()}

    return jax.jacrev(terms)(get_segments(params))


def mean_cosine(gradient_SnD: Array, counted_n: Array) -> Array:
    """Cosine between the gradients of two segments at one position, averaged over counted positions, [S, S].

    +1: both pull the shared state the same way; -1: opposite ways. A zero gradient has cosine 0.
    """
    square_Sn = (gradient_SnD**2).sum(axis=-1)
    counted_Sn = counted_n & (square_Sn > 0)
    unit_SnD = gradient_SnD * jnp.where(counted_Sn, lax.rsqrt(jnp.where(counted_Sn, square_Sn, 1)), 0)[..., None]
    return jnp.einsum("snD,tnD->st", unit_SnD, unit_SnD) / jnp.maximum(counted_n.sum(), 1)


def paired_effect(changed_B: Array, unchanged_B: Array, counted_B: Array) -> Effect:
    """Summed difference of two losses on the same rows. The standard error takes rows as independent draws.

    counted_B bool: rows that hold any scored token.
    """
    count = counted_B.sum()
    difference_B = jnp.where(counted_B, changed_B - unchanged_B, 0)
    average = difference_B.sum() / jnp.maximum(count, 1)
    variance = jnp.where(counted_B, (difference_B - average) ** 2, 0).sum() / jnp.maximum(count - 1, 1)
    return Effect(difference_B.sum(), jnp.sqrt(count * variance))
