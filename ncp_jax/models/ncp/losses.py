"""NTP, NCP and VQ as (sum, weight) pairs, and the coefficients that combine them.

Shapes: B batch, T tokens, M concepts, D width, S segments, N codes, W = D/S. The objective is
sum_i coefficient_i * sum_i / weight_i with weights of the whole global batch. Gradients: VQ reaches the codes alone;
the NCP target is detached while the history that predicts it is not; the NTP gradient passes through the injected
concept into heads and codes (report Eq. 21-24; training fork,
pretrain_conceptlm_v22_vq.py). The objective `energy` is ours: CALM's loss (arXiv 2510.27688, Eq. 8-10) on a codebook.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from ncp_jax.models.ncp.config import NCPConfig
from ncp_jax.models.ncp.model import Hidden
from ncp_jax.nn.layers import head_split
from ncp_jax.ops.chunking import chunk_segments
from ncp_jax.ops.cross_entropy import linear_cross_entropy
from ncp_jax.ops.energy import over_points
from ncp_jax.ops.quantise import code_error, nearest, over_segments, split_segments

Terms = dict[str, Array]


def coefficients(c: NCPConfig, sequence: int) -> dict[str, float]:
    """Weight of each term. `per_token` divides the auxiliaries by the row length once more, as the training fork did
    with one 8192-token row per micro-batch."""
    aux = 1 / sequence if c.loss.aux_weighting == "per_token" else 1.0
    return {"ntp": 1.0, "ncp": c.loss.ncp_weight * aux, "vq": c.loss.vq_weight * aux} | (
        {"z": c.loss.z_loss} if c.loss.z_loss else {}
    )


def weights(c: NCPConfig, scored_BT: Array, segments_BT: Array) -> Terms:
    """What each term's sum is divided by, f32; depends on masks alone.

    Counted in int32, multiplied in f32: a million concepts, one batch of the 9B run, times a width of 4096 is more
    than an int32 holds.
    """
    D, S = c.backbone.width, c.concept.segments
    concept_BM = chunk_segments(segments_BT, c.chunk)
    concepts, pairs, tokens = (
        mask.sum().astype(jnp.float32) for mask in (concept_BM > 0, _pairs(concept_BM), scored_BT)
    )
    per_pair = {"mean": D, "sum": 1, "per_segment": S}[c.loss.ncp_reduction]
    by_segment = c.loss.concept_objective != "mse"
    return {
        "ntp": tokens,
        "ncp": pairs * (S if by_segment else per_pair),
        "vq": concepts * {"mean": D, "sum": S}[c.loss.vq_reduction],
    } | ({"z": tokens} if c.loss.z_loss else {})


def sums(c: NCPConfig, hidden: Hidden, params: dict, targets_BT: Array, scored_BT: Array) -> Terms:
    """The sums of all terms over one batch."""
    head_DV, codes_SNW = params["head"]["kernel"], params["concept"]["codebook"]["codes"]
    token = linear_cross_entropy(
        hidden.out_BTD, head_DV, targets_BT, scored_BT, c.loss.head_chunk,
        z_gradient=c.loss.z_loss > 0, split=head_split(),
    )  # fmt: skip
    code_BMS = nearest_codes(c, hidden.concepts_BMD, codes_SNW)
    return {
        "ntp": token.nll,
        "ncp": _concept_sum(c, hidden, codes_SNW, code_BMS),
        "vq": _vq_sum(c, hidden, codes_SNW, code_BMS),
    } | ({"z": token.z} if c.loss.z_loss else {})


def nearest_codes(c: NCPConfig, concepts_BMD: Array, codes_SNW: Array) -> Array:
    """Code ids [B, M, S]. No gradient."""
    c_BMSW = split_segments(lax.stop_gradient(concepts_BMD), c.concept.segments)
    return over_segments(nearest)(c_BMSW, lax.stop_gradient(codes_SNW))


def concept_energy(c: NCPConfig, hidden: Hidden, codes_SNW: Array) -> Array:
    """Energy of each head's law against the next concept's segment, [B, M-1, S] in at least f32.

    pi = softmax(head logits), whatever the mix; 2 sum_n pi_n |e_n - c|^b - sum_nm pi_n pi_m |e_n - e_m|^b, exact: no
    sampling. Strictly proper for the marginal law of each segment on the codebook (distinct codes, b < 2): where the
    next segment is a code of law q, the expectation is lowest at pi = q and nowhere else. At b = 2 it knows the mean
    alone. Not proper for the joint law of segments: their energies add, so nothing here sees how they depend on one
    another. For targets off the codebook the minimum is the law on codes that is nearest to theirs in energy distance.
    Gradients: none into the target; into the codes if loss.energy_trains_codes. Weight: 1 per pair and segment, like
    code_ce.
    """
    target_BMSW = split_segments(lax.stop_gradient(hidden.concepts_BMD[:, 1:]), c.concept.segments)
    points_SNW = codes_SNW if c.loss.energy_trains_codes else lax.stop_gradient(codes_SNW)

    def one_segment(p_N: Array, points_NW: Array, target_W: Array) -> Array:
        return over_points(p_N, points_NW, target_W, c.loss.energy_beta).loss

    p_BMSN = jax.nn.softmax(_wide(hidden.logits_BMSN[:, :-1]))
    return over_segments(one_segment)(p_BMSN, points_SNW, target_BMSW)


def _concept_sum(c: NCPConfig, hidden: Hidden, codes_SNW: Array, code_BMS: Array) -> Array:
    pair_BM = _pairs(hidden.concept_segments_BM)
    if pair_BM.shape[1] == 0:
        return jnp.zeros((), jnp.float32)
    if c.loss.concept_objective == "energy":
        error_BM = concept_energy(c, hidden, codes_SNW).sum(axis=-1)
    elif c.loss.concept_objective == "code_ce":
        logits_BMSN = hidden.logits_BMSN[:, :-1]
        log_p_BMSN = jax.nn.log_softmax(_wide(logits_BMSN))
        error_BM = -jnp.take_along_axis(log_p_BMSN, code_BMS[:, 1:, :, None], axis=-1).sum(axis=(2, 3))
    else:
        target_BMD = lax.stop_gradient(_wide(hidden.concepts_BMD[:, 1:]))
        error_BM = ((_wide(hidden.predicted_BMD[:, :-1]) - target_BMD) ** 2).sum(axis=-1)
    return jnp.where(pair_BM, error_BM, 0).sum()


def _vq_sum(c: NCPConfig, hidden: Hidden, codes_SNW: Array, code_BMS: Array) -> Array:
    """Codebook error. The commitment share has no gradient (its input is detached); it only raises the value."""
    c_BMSW = split_segments(hidden.concepts_BMD, c.concept.segments)
    error_BM = over_segments(code_error)(c_BMSW, codes_SNW, code_BMS).sum(axis=-1)
    total = jnp.where(hidden.concept_segments_BM > 0, error_BM, 0).sum()
    return total + c.loss.commitment * lax.stop_gradient(total)


def _pairs(concept_BM: Array) -> Array:
    """[B, M-1]: concept m predicts concept m + 1 of the same segment."""
    return (concept_BM[:, 1:] > 0) & (concept_BM[:, :-1] == concept_BM[:, 1:])


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
