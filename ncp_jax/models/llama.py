"""The autoregressive baseline that CALM is compared with: LLaMA blocks, untied head, next-token cross-entropy.

Shapes: B batch, T tokens, D width, V vocabulary. Source: train_ar.py of the official repository (LlamaForCausalLM).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from ncp_jax.config import ConfigError, frozen
from ncp_jax.nn.layers import RMSNorm, param
from ncp_jax.nn.linear import NORMAL, Table
from ncp_jax.nn.llama_block import KV, LlamaBackbone, LlamaBlocks, Past, View, llama_stack, llama_unrolled, view


@frozen
class LlamaConfig:
    """A plain decoder-only transformer with pre-norm blocks."""

    vocab: int
    layers: int
    backbone: LlamaBackbone
    z_loss: float = 0.0
    head_chunk: int | None = None  # tokens per slice of the fused head; None: one slice
    scan: bool = True  # False: layers written out, the slow twin
    kind: Literal["llama"] = "llama"

    def __post_init__(self):
        if self.layers < 1:
            raise ConfigError(f"model.layers must be at least 1, got {self.layers}")

    @property
    def chunk(self) -> int:
        return 1


class Hidden(NamedTuple):
    """What a forward pass leaves for the loss."""

    out_BTD: Array


class LlamaHead(nn.Module):
    """Output matrix [D, V]. The loss multiplies by it."""

    vocab: int
    width: int

    @nn.compact
    def __call__(self) -> Array:
        return param(self, "kernel", NORMAL, [self.width, self.vocab], ["embed", "vocab"])


class Llama(nn.Module):
    """The whole model. `dtype` is the compute precision; parameters stay as they are stored."""

    config: LlamaConfig
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        c, D = self.config, self.config.backbone.width
        self.embed = Table(c.vocab, D, self.dtype)
        self.head = LlamaHead(c.vocab, D)
        self.blocks = LlamaBlocks(c.backbone, c.layers)
        self.final_norm = RMSNorm(c.backbone.eps)

    def __call__(self, tokens_BT: Array, segments_BT: Array | None = None, positions_BT: Array | None = None) -> Hidden:
        """Hidden states. Segments and positions only for packed documents; segment 0 is padding."""
        s, packed = self.config.backbone, positions_BT is not None
        positions_BT = jnp.arange(tokens_BT.shape[1])[None] if positions_BT is None else positions_BT
        see = view(s, positions_BT, segments_BT if packed else None, self.dtype)
        e_BTD, weights = self.embed(tokens_BT), self.blocks()
        if self.config.scan:
            h_BTD = llama_stack(e_BTD, weights, s, see)
        else:
            h_BTD = llama_unrolled(e_BTD, weights, s, see)[0]
        self.head()  # declared here, applied by the loss
        return Hidden(self.final_norm(h_BTD))

    def decode(self, tokens_BT: Array, see: View, past: Sequence[Past] | None = None) -> tuple[Array, tuple[KV, ...]]:
        """(final states, keys and values) of tokens that follow cached ones."""
        h_BTD, kv = llama_unrolled(self.embed(tokens_BT), self.blocks(), self.config.backbone, see, past)
        return self.final_norm(h_BTD), kv

    def logits(self, tokens_BT: Array, segments_BT: Array | None = None, positions_BT: Array | None = None) -> Array:
        """All token logits [B, T, V] in at least f32: for sampling and tests."""
        out_BTD = self(tokens_BT, segments_BT, positions_BT).out_BTD
        wide = jnp.promote_types(out_BTD.dtype, jnp.float32)
        return jnp.matmul(out_BTD, self.head().astype(out_BTD.dtype), preferred_element_type=wide)
