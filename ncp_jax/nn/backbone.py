"""The OLMo-3 backbone as a table of numbers: what every tower of this project is built from."""

import dataclasses
from typing import Literal

from ncp_jax.config import ConfigError, frozen


@frozen
class Yarn:
    """YaRN long-context scaling, for full-attention layers alone, as in OLMo-3 (arXiv 2309.00071)."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 0.1 ln(factor) + 1
    round_to_int: bool = True  # correction range rounded outward to whole dimensions


@frozen
class Backbone:
    """Sizes and choices of an OLMo-3 post-norm block, shared by all towers of a model."""

    width: int
    heads: int
    ffn: int
    kv_heads: int | None = None  # None: as many as heads
    qk_norm: Literal["full", "per_head"] = "full"  # RMS over the full width, or over each head
    window: int | None = 4096  # visible keys of a windowed layer, the query's own included; None: all layers full
    full_every: int = 4  # layer l (from 1) is full when l % full_every == 0
    rope_theta: float = 500_000.0
    yarn: Yarn | None = None
    eps: float = 1e-6  # every norm, RMS and LayerNorm
    remat: Literal["none", "block", "dots"] = "none"  # nn/block.py REMAT
    # How attention is computed, not what. auto: splash on a TPU, else the reference | reference: ops/attention.py |
    # splash: the TPU kernel, ops/splash.py | interpreted: that kernel step by step on any platform, slow, for tests
    attention: Literal["auto", "reference", "splash", "interpreted"] = "auto"

    def __post_init__(self):
        if self.width % self.heads:
            raise ConfigError(
                f"backbone.width {self.width} does not divide into {self.heads} heads; nearest legal width: "
                f"{self.width // self.heads * self.heads} or {(self.width // self.heads + 1) * self.heads}"
            )
        if (self.width // self.heads) % 2:
            raise ConfigError(f"backbone.width / heads = {self.head_dim} is odd; RoPE needs an even head size")
        if self.heads % self.kv:
            raise ConfigError(f"backbone.heads {self.heads} is not a multiple of kv_heads {self.kv}")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"backbone.window {self.window} must be at least 1 (the query itself), or null for full")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    def on(self, platform: str | None) -> "Backbone":
        """This backbone with its attention chosen for a platform, as JAX names them; None: for any.

        Raises ConfigError for a kernel that the platform does not have.
        """
        if self.attention == "splash" and platform not in ("tpu", None):
            raise ConfigError(
                f"backbone.attention 'splash' is a TPU kernel, and this runs on '{platform}'; choose auto, which takes "
                "the reference here, or interpreted to test the kernel slowly"
            )
        if self.attention in ("auto", "splash"):
            return dataclasses.replace(self, attention="splash" if platform == "tpu" else "reference")
        return self

    def is_full(self, layer: int) -> bool:
        """Whether layer `layer` (from 0, numbered within its tower) attends without a window."""
        return self.window is None or (layer + 1) % self.full_every == 0
