"""The three towers as scans: their parameters stacked for nn/routed_scan.py, from the same leaves as unrolled towers.

Shapes: L layers of the tower, N = L + 1, S sources, B batch, T tokens, M concepts, D width. A route's module declares
its leaves here as it does in towers.py, so the parameter tree, names and gradients are the same in both forms. Called
inside the modules of towers.py, whose names are the parameters' parents.
"""

from collections.abc import Sequence
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from ncp_jax.models.ncp.config import IRC, NCPConfig
from ncp_jax.nn.backbone import Backbone
from ncp_jax.nn.block import Sight, Weights, cast_matrices
from ncp_jax.nn.layers import LayerNorm, layer_norm
from ncp_jax.nn.routed_scan import Outputs, Plan, routed_scan
from ncp_jax.nn.routes import CrossRoute, DepthRoute, Reinject
from ncp_jax.nn.stack import Past
from ncp_jax.ops.route_mix import expand, moments
from ncp_jax.ops.route_shapes import Cross, Crosses, Depth, Inject, Masks, Reads, Shift, Sources

Kernels = Literal["none", "kernel", "interpreted"]


def applies(module: nn.Module, c: NCPConfig, past: Past) -> bool:
    """Whether this call is scanned: not where a cache or a diagnosis needs each layer, nor to make initial values."""
    observed = module.is_initializing() or module.is_mutable_collection("intermediates")
    return c.routing.tower != "unrolled" and past is None and not observed


def encoder(c: NCPConfig, h_BTD: Array, weights: Weights, see: Sight) -> Outputs:
    """The token encoder: depth routes alone."""
    plan = _plan(c, c.backbone, c.encoder_layers, c.routing.irc_encoder, pool=c.routing.concept_from_encoder)
    depth = _depth(c, plan)
    return routed_scan(plan, h_BTD, cast_matrices(weights, h_BTD.dtype), depth, Crosses(), Reads(), None, see)


def concept(c: NCPConfig, c_BMD: Array, weights: Weights, pooled: Array, see: Sight) -> Outputs:
    """The concept module before its final norm; `pooled` [E-1, B, M, D]: what it reads of the encoder."""
    plan = _plan(c, c.concept_backbone, c.concept_layers, c.routing.irc_concept)
    crosses, reads, masks = Crosses(), Reads(), None
    if c.routing.concept_from_encoder:
        norm = LayerNorm(c.backbone.width, c.backbone.eps, name="read_encoder_norm")
        crosses = Crosses(encoder=_cross(c, "read_encoder", c.concept_layers, len(pooled), norm))
        reads = Reads(encoder=Sources(pooled, *_statistics(pooled, c.backbone.eps)))
        everyone_BM1 = jnp.ones((*c_BMD.shape[:2], 1), reads.encoder.mean_BTS.dtype)  # type: ignore[union-attr]
        masks = Masks(everyone_BM1, everyone_BM1)
    weights = cast_matrices(weights, c_BMD.dtype)
    return routed_scan(plan, c_BMD, weights, _depth(c, plan), crosses, reads, masks, see)


def decoder(
    c: NCPConfig,
    u_BTD: Array,
    weights: Weights,
    encoder: Outputs,
    concept: Outputs,
    predicted_BMD: Array,
    gate_L2: Array,
    available_BT: Array,
    see: Sight,
) -> Outputs:
    """The token decoder before its final norm. Its layer outputs are nobody's sources."""
    plan = _plan(c, c.backbone, c.decoder_layers, c.routing.irc_decoder, outputs=False)
    dtype = jnp.promote_types(u_BTD.dtype, jnp.float32)
    available_BT1 = available_BT[..., None].astype(dtype)
    keep_bias = c.concept.zero_prefix == "layernorm_bias"
    masks = Masks(available_BT1, jnp.ones_like(available_BT1) if keep_bias else available_BT1)
    crosses, reads = _decoder_reads(c, encoder, concept, predicted_BMD, gate_L2, available_BT1)
    weights = cast_matrices(weights, u_BTD.dtype)
    return routed_scan(plan, u_BTD, weights, _depth(c, plan), crosses, reads, masks, see)


def _decoder_reads(c: NCPConfig, encoder: Outputs, concept: Outputs, predicted_BMD, gate_L2, available_BT1):
    """(parameters, sources) of re-injection and both cross routes, those that the config has."""
    routing, L, D, eps = c.routing, c.decoder_layers, c.backbone.width, c.backbone.eps
    crosses, reads = Crosses(), Reads()
    if c.concept.reinject:
        each = [Reinject(routing.reinject_init, eps, name=f"reinject_{layer}").leaves(D) for layer in range(L)]
        scale_LD, bias_LD, diagonal_LD = (jnp.stack(parts) for parts in zip(*each, strict=True))
        share_LD = gate_L2[:, :1] * diagonal_LD
        crosses = crosses._replace(inject=Inject(share_LD * scale_LD, share_LD * bias_LD))
        reads = reads._replace(injected=layer_norm(predicted_BMD, jnp.ones(D), jnp.zeros(D), eps))
    if routing.decoder_from_encoder:
        encoder_sources = _sources_of(encoder)
        norm = LayerNorm(D, eps, name="read_encoder_norm")
        crosses = crosses._replace(encoder=_cross(c, "read_encoder", L, c.encoder_layers, norm))
        reads = reads._replace(encoder=encoder_sources)
    if routing.decoder_from_concept:
        states, mean_BMS, inverse_BMS = _sources_of(concept)
        norm = LayerNorm(D, eps, name="read_concept_norm")
        crosses = crosses._replace(concept=_cross(c, "read_concept", L, c.concept_layers, norm, gate_L2[:, 1:]))

        def at_tokens(statistic_BMS: Array) -> Array:
            return expand(statistic_BMS, available_BT1.shape[1], _shift(c)) * available_BT1

        reads = reads._replace(concept=Sources(states, at_tokens(mean_BMS), at_tokens(inverse_BMS)))
    return crosses, reads


def _sources_of(tower: Outputs) -> Sources:
    """A tower's outputs as another one's sources, statistics at the rate of the former."""
    assert tower.raw is not None
    assert tower.mean_BTL is not None
    assert tower.inverse_BTL is not None
    return Sources(tower.raw, tower.mean_BTL, tower.inverse_BTL)


def _plan(c: NCPConfig, backbone: Backbone, layers: int, irc: IRC, *, outputs: bool = True, pool: bool = False) -> Plan:
    kernels: Kernels = "none" if c.routing.tower in ("scan", "unrolled") else c.routing.tower  # type: ignore[assignment]
    return Plan(
        backbone, layers, irc, c.routing.irc_input == "output", _shift(c), kernels, outputs, c.chunk if pool else None
    )


def _shift(c: NCPConfig) -> Shift:
    return Shift(c.chunk, c.concept.shift)


def _depth(c: NCPConfig, plan: Plan) -> Depth | None:
    """All depth routes of a tower, filled up to its L + 1 candidates and stacked."""
    if plan.irc == "none":
        return None
    D, N = plan.backbone.width, plan.layers + 1
    filled = []
    for layer in range(plan.layers):
        static_n, w1_Dn, w2_nn = DepthRoute(plan.irc == "softmax", name=f"irc_{layer}").leaves(D, layer + 2)
        more = (0, N - layer - 2)
        filled.append(Depth(jnp.pad(static_n, more), jnp.pad(w1_Dn.T, (more, (0, 0))), jnp.pad(w2_nn, (more, more))))
    return _stacked(filled)


def _cross(c: NCPConfig, name: str, layers: int, sources: int, norm: LayerNorm, share_L1: Array | float = 1.0) -> Cross:
    """All cross routes of a tower to one group of sources, stacked; the sources' norm and the gate folded in."""
    D = c.backbone.width
    each = [CrossRoute(c.routing.crc_init, name=f"{name}_{layer}").leaves(D, sources) for layer in range(layers)]
    diagonal_LD, w1_LDn, w2_Lnn = (jnp.stack(parts) for parts in zip(*each, strict=True))
    share_LD = share_L1 * diagonal_LD
    return Cross(share_LD * norm.scale, share_LD * norm.bias, w1_LDn.swapaxes(1, 2), w2_Lnn)


def _statistics(states: Array, eps: float) -> tuple[Array, Array]:
    """(mean, inverse deviation) of states [S, B, M, D], [B, M, S] each."""
    mean, inverse = moments(states, eps)
    return jnp.moveaxis(mean[..., 0], 0, -1), jnp.moveaxis(inverse[..., 0], 0, -1)


def _stacked(parts: Sequence[Depth]) -> Depth:
    return Depth(*(jnp.stack(leaves) for leaves in zip(*parts, strict=True)))
