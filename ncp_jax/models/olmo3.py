"""The OLMo-3 language model: baseline of every comparison, and parity target.

Shapes: B batch, T tokens, D width, V vocabulary, L layers.
"""

from typing import Literal, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from ncp_jax.config import ConfigError, frozen
from ncp_jax.nn.backbone import Backbone
from ncp_jax.nn.block import Blocks, Sight, sight
from ncp_jax.nn.layers import Embed, Head, RMSNorm, base_std
from ncp_jax.nn.stack import Past, Tower, plain_stack, unrolled_stack


@frozen
class Olmo3Config:
    """A plain decoder-only transformer."""

    vocab: int
    layers: int
    backbone: Backbone
    z_loss: float = 0.0
    head_chunk: int | None = None  # tokens per slice of the fused head; None: one slice
    scan: bool = True  # False: layers written out, the slow twin
    kind: Literal["olmo3"] = "olmo3"

    def __post_init__(self):
        if self.layers < 1:
            raise ConfigError(f"model.layers must be at least 1, got {self.layers}")

    @property
    def chunk(self) -> int:
        return 1


class Hidden(NamedTuple):
    """What a forward pass leaves for the loss."""

    out_BTD: Array


class Olmo3(nn.Module):
    """The whole model. `dtype` is the compute precision; parameters stay as they are stored."""

    config: Olmo3Config
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        c, D = self.config, self.config.backbone.width
        self.embed = Embed(c.vocab, D, base_std(D), self.dtype)
        self.head = Head(c.vocab, D, base_std(D))
        self.blocks = Blocks(c.backbone, c.layers, c.layers)
        self.final_norm = RMSNorm(c.backbone.eps)

    def __call__(self, tokens_BT: Array, segments_BT: Array | None = None, positions_BT: Array | None = None) -> Hidden:
        """Hidden states. Segments and positions only for packed documents; segment 0 is padding."""
        c = self.config
        packed = positions_BT is not None
        positions_BT = jnp.arange(tokens_BT.shape[1])[None] if positions_BT is None else positions_BT
        see = sight(c.backbone, positions_BT, segments_BT if packed else None, self.dtype)
        e_BTD, weights = self.embed(tokens_BT), self.blocks()
        if c.scan:
            h_BTD = plain_stack(e_BTD, weights, c.backbone, see)
        else:
            h_BTD = unrolled_stack(e_BTD, weights, c.backbone, see).h_BTD
        out_BTD = self.final_norm(h_BTD)
        self.head()  # declared here, applied by the loss
        return Hidden(out_BTD)

    def decode(self, tokens_BT: Array, see: Sight, past: Past = None) -> tuple[Array, Tower]:
        """(final states, tower) of tokens that follow cached ones."""
        tower = unrolled_stack(self.embed(tokens_BT), self.blocks(), self.config.backbone, see, past)
        return self.final_norm(tower.h_BTD), tower

    def logits(self, tokens_BT: Array, segments_BT: Array | None = None, positions_BT: Array | None = None) -> Array:
        """All token logits [B, T, V] in at least f32: for sampling and tests."""
        out_BTD = self(tokens_BT, segments_BT, positions_BT).out_BTD
        wide = jnp.promote_types(out_BTD.dtype, jnp.float32)
        return jnp.matmul(out_BTD, self.head().astype(out_BTD.dtype), preferred_element_type=wide)
