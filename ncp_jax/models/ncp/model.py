"""NCP: token encoder, concept module, token decoder, in the order of the report.

Shapes: B batch, T tokens, M concepts (one per chunk of k tokens), D width, S segments, N codes, W = D/S, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from ncp_jax.models.ncp.config import NCPConfig
from ncp_jax.models.ncp.towers import ConceptModule, ConceptStates, Decoder, Encoder, Injection
from ncp_jax.nn.block import Sight, sight, whole_width
from ncp_jax.nn.layers import Embed, Head, LayerNorm, RMSNorm, base_std
from ncp_jax.nn.routed_scan import Outputs
from ncp_jax.nn.stack import Past, Tower
from ncp_jax.ops.chunking import available, chunk_mean, chunk_positions, chunk_segments, concept_index


class Hidden(NamedTuple):
    """What a forward pass leaves for the losses. Segment 0 marks what is no concept."""

    out_BTD: Array
    concepts_BMD: Array  # normed chunk means: module input, VQ input, NCP target
    concept_segments_BM: Array
    predicted_BMD: Array  # row m predicts concept m + 1
    logits_BMSN: Array


class NCP(nn.Module):
    """The whole model. `dtype` is the compute precision; parameters stay as they are stored."""

    config: NCPConfig
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        c, D = self.config, self.config.backbone.width
        self.embed = Embed(c.vocab, D, base_std(D), self.dtype)
        self.head = Head(c.vocab, D, base_std(D))
        self.encoder = Encoder(c)
        self.concept_norm = _concept_norm(c)
        self.concept = ConceptModule(c)
        self.decoder = Decoder(c)

    def __call__(self, tokens_BT: Array, segments_BT: Array | None = None, positions_BT: Array | None = None) -> Hidden:
        """Hidden states of a batch of rows.

        segments_BT [B, T] int: 0 is padding; alone (no positions) it marks real tokens of `concat` rows, whose
        documents are not told apart. With positions_BT it separates packed documents, each starting on a chunk.
        """
        c, k, T = self.config, self.config.chunk, tokens_BT.shape[1]
        packed = positions_BT is not None
        segments_BT = jnp.ones_like(tokens_BT) if segments_BT is None else segments_BT
        positions_BT = jnp.arange(T)[None] if positions_BT is None else positions_BT
        see_tokens = sight(c.backbone, positions_BT, segments_BT if packed else None, self.dtype)

        # 1. Tokens are encoded.
        encoder = self.encoder(self.embed(tokens_BT), see_tokens)
        self.sow("intermediates", "encoder_raw", encoder.raw)
        self.sow("intermediates", "encoder_hidden", encoder.h_BTD)
        # 2. Chunks of k become concepts.
        pooled_BMD = chunk_mean(encoder.h_BTD, k)
        c_BMD = whole_width(self.concept_norm(pooled_BMD))
        concept_segments_BM = chunk_segments(segments_BT, k)
        self.sow("intermediates", "pooled", pooled_BMD)
        # 3. The next concept is predicted.
        positions_BM = chunk_positions(positions_BT, k)
        see_concepts = sight(c.concept_backbone, positions_BM, concept_segments_BM if packed else None, self.dtype)
        concept = self.concept(c_BMD, self._pooled(encoder), see_concepts)
        self.sow("intermediates", "concept_raw", concept.raw)
        # 4. Predictions return to tokens, shifted so that none sees its own chunk's future.
        index_T = concept_index(T, k, c.concept.shift)
        inject = Injection(index_T, available(index_T, concept_segments_BM, segments_BT))
        self.sow("intermediates", "injected", inject(concept.predicted_BMD))
        # 5. Tokens are decoded.
        out_BTD, _ = self.decoder(encoder, see_tokens, concept, inject)
        self.head()  # declared here, applied by the loss
        return Hidden(out_BTD, c_BMD, concept_segments_BM, concept.predicted_BMD, concept.logits_BMSN)

    def encode(self, tokens_BT: Array, see: Sight, past: Past = None) -> Tower | Outputs:
        """The token encoder alone: one of the three parts that cached decoding calls."""
        return self.encoder(self.embed(tokens_BT), see, past)

    def conceive(self, c_BMD: Array, sources: Sequence[Array], see: Sight, past: Past = None) -> ConceptStates:
        """The concept module alone, on normed concepts."""
        return self.concept(c_BMD, sources, see, past)

    def decode(
        self, encoder: Tower | Outputs, see: Sight, concept: ConceptStates, inject: Injection, past: Past = None
    ) -> tuple[Array, Tower | Outputs]:
        """The token decoder alone: (final states, tower)."""
        return self.decoder(encoder, see, concept, inject, past)

    def norm_concept(self, pooled_BMD: Array) -> Array:
        """Chunk means as the concept module wants them."""
        return self.concept_norm(pooled_BMD)

    def concept_sources(self, encoder_raw: tuple[Array, ...]) -> list[Array]:
        """What the concept module reads of the encoder: chunk means of all layers but the last, its input."""
        if not self.config.routing.concept_from_encoder:
            return []
        return [chunk_mean(raw_BTD, self.config.chunk) for raw_BTD in encoder_raw[:-1]]

    def _pooled(self, encoder: Tower | Outputs) -> Sequence[Array] | Array:
        """`concept_sources` of an encoder of either form."""
        if isinstance(encoder, Tower):
            return self.concept_sources(encoder.raw)
        return encoder.h_BTD[None, :, :0] if encoder.pooled is None else encoder.pooled[:-1]

    def logits(self, tokens_BT: Array, segments_BT: Array | None = None, positions_BT: Array | None = None) -> Array:
        """All token logits [B, T, V] in at least f32: for sampling and tests."""
        out_BTD = self(tokens_BT, segments_BT, positions_BT).out_BTD
        wide = jnp.promote_types(out_BTD.dtype, jnp.float32)
        return jnp.matmul(out_BTD, self.head().astype(out_BTD.dtype), preferred_element_type=wide)


def _concept_norm(c: NCPConfig):
    """Of the pooled chunk. Its parameters live beside the concept module's."""
    if c.concept.norm == "layernorm":
        return LayerNorm(c.backbone.width, c.backbone.eps)
    return RMSNorm(c.backbone.eps) if c.concept.norm == "rms" else lambda x: x
