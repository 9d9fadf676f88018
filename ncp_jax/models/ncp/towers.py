"""The three towers of NCP: token encoder, concept module, token decoder.

Shapes: B batch, T tokens, M concepts, D width, S segments, N codes, W = D/S, V vocabulary. Layers are numbered
within their tower. Order after each layer: IRC mix, re-injection, CRC from the encoder, CRC from the concepts; each
reads the state that the one before it left.
"""

from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from ncp_jax.models.ncp import scanned
from ncp_jax.models.ncp.config import IRC, NCPConfig
from ncp_jax.nn.block import KV, Blocks, Sight, whole_width
from ncp_jax.nn.layers import LayerNorm, RMSNorm, base_std, param, truncated_normal
from ncp_jax.nn.routed_scan import Outputs
from ncp_jax.nn.routes import CrossRoute, DepthRoute, Reinject
from ncp_jax.nn.stack import Cross, Mixer, Past, Tower, routed_tower
from ncp_jax.ops.chunking import shift_and_repeat
from ncp_jax.ops.quantise import join_segments, mix, over_segments


class Injection(NamedTuple):
    """Where tokens get their concept from: place [T] or [B, T] among the concepts, and who has one [B, T]."""

    place: Array
    available_BT: Array

    def __call__(self, c_BMD: Array, fill: Array | float = 0.0) -> Array:
        return shift_and_repeat(c_BMD, self.place, self.available_BT, fill)


class ConceptStates(NamedTuple):
    """Concept module outputs: layer outputs, predicted next concepts, head logits, keys and values.

    A scanned module leaves its layer outputs in `scanned`, and no keys and values.
    """

    raw: tuple[Array, ...]
    predicted_BMD: Array
    logits_BMSN: Array
    kv: tuple[KV, ...]
    scanned: Outputs | None = None


class Encoder(nn.Module):
    """Token encoder. No final norm."""

    config: NCPConfig

    @nn.compact
    def __call__(self, h_BTD: Array, see: Sight, past: Past = None) -> Tower | Outputs:
        c = self.config
        weights = Blocks(c.backbone, c.encoder_layers, c.layers, name="blocks")()
        if scanned.applies(self, c, past):
            return scanned.encoder(c, h_BTD, weights, see)
        return routed_tower(h_BTD, weights, c.backbone, see, mixer(c, c.routing.irc_encoder), lambda _, h: h, past)


class ConceptModule(nn.Module):
    """Reads concepts, predicts the next one (report Eq. 7-10).

    `encoder_raw` holds chunk means [B, M, D] of the first E-1 encoder layers (stacked, for a scanned module); the last
    layer's is the module's input.
    """

    config: NCPConfig

    @nn.compact
    def __call__(
        self, c_BMD: Array, encoder_raw: Sequence[Array] | Array, see: Sight, past: Past = None
    ) -> ConceptStates:
        c = self.config
        weights = Blocks(c.backbone, c.concept_layers, c.layers, name="blocks")()
        if scanned.applies(self, c, past):
            outputs = scanned.concept(c, c_BMD, weights, jnp.asarray(encoder_raw), see)
            return ConceptStates((), *self._predict(outputs.h_BTD), (), outputs)
        read = self._read_encoder(list(encoder_raw)) if c.routing.concept_from_encoder else lambda _, h: h
        tower = routed_tower(c_BMD, weights, c.concept_backbone, see, mixer(c, c.routing.irc_concept), read, past)
        self.sow("intermediates", "routed", tower.h_BTD)
        return ConceptStates(tower.raw, *self._predict(tower.h_BTD), tower.kv)

    def _predict(self, h_BMD: Array) -> tuple[Array, Array]:
        """(predicted next concepts, head logits)."""
        c = self.config
        u_BMD = whole_width(RMSNorm(c.backbone.eps, name="final_norm")(h_BMD))
        self.sow("intermediates", "final", u_BMD)
        logits_BMSN = Heads(c, name="heads")(u_BMD)
        codes_SNW = Codebook(c, name="codebook")()

        def one_segment(logits_N: Array, codes_NW: Array) -> Array:
            return mix(logits_N, codes_NW, c.concept.mix)

        return whole_width(join_segments(over_segments(one_segment)(logits_BMSN, codes_SNW))), logits_BMSN

    def _read_encoder(self, encoder_raw: Sequence[Array]) -> Cross:
        c = self.config
        norm = LayerNorm(c.backbone.width, c.backbone.eps, name="read_encoder_norm")
        sources = [norm(raw_BMD) for raw_BMD in encoder_raw]
        return lambda layer, h: h + CrossRoute(c.routing.crc_init, name=f"read_encoder_{layer}")(h, sources)


class Decoder(nn.Module):
    """Token decoder: fuses the shifted concept, then reads encoder and concept layers after every layer."""

    config: NCPConfig

    @nn.compact
    def __call__(
        self, encoder: Tower | Outputs, see: Sight, concept: ConceptStates, inject: Injection, past: Past = None
    ) -> tuple[Array, Tower | Outputs]:
        """(final states [B, T, D], the tower before its final norm)."""
        c = self.config
        weights = Blocks(c.backbone, c.decoder_layers, c.layers, name="blocks")()
        u_BTD = self._fuse(encoder.h_BTD, inject(concept.predicted_BMD), inject)
        self.sow("intermediates", "fused", u_BTD)
        if isinstance(encoder, Outputs):
            assert concept.scanned is not None
            gate_L2 = self._gates()
            outputs = scanned.decoder(
                c, u_BTD, weights, encoder, concept.scanned, concept.predicted_BMD, gate_L2, inject.available_BT, see
            )
            return RMSNorm(c.backbone.eps, name="final_norm")(outputs.h_BTD), outputs
        cross = self._reads(encoder.raw, concept, inject)
        tower = routed_tower(u_BTD, weights, c.backbone, see, mixer(c, c.routing.irc_decoder), cross, past)
        self.sow("intermediates", "raw", tower.raw)
        return RMSNorm(c.backbone.eps, name="final_norm")(tower.h_BTD), tower

    def _fuse(self, h_BTD: Array, b_BTD: Array, inject: Injection) -> Array:
        """Decoder input (report Eq. 12 is `add`; the released graph norms both and scales the concept)."""
        c, D, eps = self.config.concept, self.config.backbone.width, self.config.backbone.eps
        if c.fusion == "add":
            return h_BTD + b_BTD
        scale = param(self, "fusion_scale", nn.initializers.constant(c.fusion_init), [], []).astype(h_BTD.dtype)
        if c.fusion == "scalar_gate":
            return h_BTD + scale * b_BTD
        normed_BTD = LayerNorm(D, eps, name="fusion_concept_norm")(b_BTD)
        if c.zero_prefix == "zero":
            normed_BTD = jnp.where(inject.available_BT[..., None], normed_BTD, 0)
        return LayerNorm(D, eps, name="fusion_token_norm")(h_BTD) + scale * normed_BTD

    def _reads(self, encoder_raw: Sequence[Array], concept: ConceptStates, inject: Injection) -> Cross:
        c, routing, keep_bias = self.config, self.config.routing, self.config.concept.zero_prefix == "layernorm_bias"
        D, eps = c.backbone.width, c.backbone.eps
        gate_L2 = self._gates()
        from_encoder, from_concept = [], []
        if routing.decoder_from_encoder:
            norm = LayerNorm(D, eps, name="read_encoder_norm")
            from_encoder = [norm(raw_BTD) for raw_BTD in encoder_raw]
        if routing.decoder_from_concept:
            norm = LayerNorm(D, eps, name="read_concept_norm")
            # Normed at concept rate, then repeated; a token without a concept gets LN(0), the bias.
            from_concept = [inject(norm(raw_BMD), norm.at_zero() if keep_bias else 0.0) for raw_BMD in concept.raw]

        def cross(layer: int, z_BTD: Array) -> Array:
            if c.concept.reinject:
                added_BMD, at_zero_D = Reinject(routing.reinject_init, eps, name=f"reinject_{layer}")(
                    concept.predicted_BMD
                )
                added_BTD = inject(added_BMD, at_zero_D if keep_bias else 0.0)
                z_BTD = z_BTD + gate_L2[layer, 0].astype(z_BTD.dtype) * added_BTD
            if from_encoder:
                z_BTD = z_BTD + CrossRoute(routing.crc_init, name=f"read_encoder_{layer}")(z_BTD, from_encoder)
            if from_concept:
                read_BTD = CrossRoute(routing.crc_init, name=f"read_concept_{layer}")(z_BTD, from_concept)
                z_BTD = z_BTD + gate_L2[layer, 1].astype(z_BTD.dtype) * read_BTD
            self.sow("intermediates", "routed", z_BTD)
            return z_BTD

        return cross

    def _gates(self) -> Array:
        """Shares of re-injection and concept CRC per layer, [L, 2]; ones where nothing is re-injected."""
        L = self.config.decoder_layers
        if not self.config.concept.reinject:
            return jnp.ones((L, 2))
        logit_L2 = param(self, "gate_logits", nn.initializers.constant(jnp.log(0.5)), [L, 2], ["layers", None])
        gate_L2 = jax.nn.softmax(logit_L2, axis=-1)
        self.sow("intermediates", "gates", gate_L2)
        return gate_L2


class Heads(nn.Module):
    """One linear classifier over N codes per segment, with bias (released runtime, hlm.py)."""

    config: NCPConfig

    @nn.compact
    def __call__(self, u_BMD: Array) -> Array:
        D, S, N = self.config.backbone.width, self.config.concept.segments, self.config.concept.codes
        kernel_SDN = param(self, "kernel", truncated_normal(base_std(D)), [S, D, N], ["segments", "embed", "codes"])
        bias_SN = param(self, "bias", nn.initializers.zeros, [S, N], ["segments", "codes"])
        logits_BMSN = jnp.einsum("BMD,SDN->BMSN", u_BMD, kernel_SDN.astype(u_BMD.dtype))
        return logits_BMSN + bias_SN.astype(u_BMD.dtype)


class Codebook(nn.Module):
    """The product codebook [S, N, W]."""

    config: NCPConfig

    @nn.compact
    def __call__(self) -> Array:
        D, S, N = self.config.backbone.width, self.config.concept.segments, self.config.concept.codes
        axes = ["segments", "codes", "segment_width"]
        return param(self, "codes", truncated_normal(base_std(D)), [S, N, D // S], axes)


def mixer(c: NCPConfig, irc: IRC) -> Mixer:
    """What a layer passes on: its routed history, or its output as it is."""

    def mixed(layer: int, history: Sequence[Array], update_BTD: Array) -> Array:
        if irc == "none":
            return history[-1]
        router_BTD = history[-1] if c.routing.irc_input == "output" else update_BTD
        return DepthRoute(irc == "softmax", name=f"irc_{layer}")(router_BTD, history)

    return mixed
