"""Every switch of the CALM family: the autoencoder of chunks, the language model on its latents, three heads.

K tokens per chunk, l latent size, N samples, M draws. Source: arXiv 2510.27688 and the official configs; defaults are
theirs at K = 4.
"""

from typing import Annotated, Literal

from pydantic import Discriminator

from ncp_jax.config import ConfigError, frozen
from ncp_jax.nn.llama_block import LlamaBackbone
from ncp_jax.ops.energy import check_exponent


@frozen
class AutoencoderConfig:
    """Chunk of K tokens <-> vector of l numbers. Loss: K * cross-entropy + kl_weight * KL."""

    vocab: int
    chunk: int = 4  # K
    width: int = 512
    ffn: int = 1280
    latent: int = 128  # l; the paper takes 32 K
    encoder_layers: int = 2  # half of them before the K tokens are joined, half after
    decoder_layers: int = 2
    token_dropout: float = 0.15  # input tokens replaced by `mask`, in training
    mask: int = 0  # official: ids times 0, which is "!" in Llama 3's vocabulary; ours may end a text with 0
    latent_dropout: float = 0.15
    kl_weight: float = 1e-3
    kl_floor: float = 0.5  # nats per dimension and chunk below which the KL pulls no more; 0: plain KL
    posterior: Literal["sampled", "mean"] = "sampled"  # mean: no noise, a plain autoencoder
    pad: int | None = None  # id that fills up a document's last chunk; None: such chunks are left out
    score_pads: bool = False  # whether reproducing pads counts in the loss (official: yes)
    eps: float = 1e-6
    head_chunk: int | None = None  # tokens per slice of the fused head; None: one slice
    kind: Literal["calm_autoencoder"] = "calm_autoencoder"

    def __post_init__(self):
        for name in ("encoder_layers", "decoder_layers"):
            layers = getattr(self, name)
            if layers < 2 or layers % 2:
                raise ConfigError(
                    f"model.{name} is {layers}; half of the layers run before the chunk is joined and half after, so "
                    f"it must be even: {max(layers // 2 * 2, 2)} or {layers // 2 * 2 + 2}"
                )
        for name in ("token_dropout", "latent_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; a dropout rate lies in [0, 1)")
        for name in ("chunk", "latent"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("pad", "mask"):
            index = getattr(self, name)
            if index is not None and not 0 <= index < self.vocab:
                raise ConfigError(f"model.{name} {index} is no id of a vocabulary of {self.vocab}")


# It stands before its users: a default EnergyHead() is built while this file is still being read.
def _at_least_one(head: object, *names: str) -> None:
    for name in names:
        if getattr(head, name) < 1:
            raise ConfigError(f"model.head.{name} must be at least 1, got {getattr(head, name)}")


@frozen
class EnergyHead:
    """One-step sampler trained by the energy score."""

    blocks: int = 4  # the paper: a quarter of the backbone's layers; the official default is 4 at any depth
    noise: int = 64  # numbers per sample, uniform in [-1/2, 1/2)
    samples: int = 8  # N
    draws: int = 100  # M
    beta: float = 1.0
    remat: bool = False  # recompute each block of the head in the backward pass
    kind: Literal["energy"] = "energy"

    def __post_init__(self):
        try:
            check_exponent(self.beta)
        except ValueError as error:
            raise ConfigError(f"model.head.beta: {error}") from None
        if self.samples < 2:
            raise ConfigError(
                f"model.head.samples is {self.samples}; the energy score compares samples with one another: at least 2"
            )
        _at_least_one(self, "blocks", "noise", "draws")


@frozen
class FlowHead:
    """Flow matching: a velocity field from noise to latents."""

    blocks: int = 4
    samples: int = 8  # (time, noise, target) triples per position
    steps: int = 10  # of the solver; midpoint evaluates the network twice per step
    solver: Literal["midpoint", "euler"] = "midpoint"  # official: 10 midpoint steps; the paper states 100
    kind: Literal["flow"] = "flow"

    def __post_init__(self):
        _at_least_one(self, "blocks", "samples", "steps")


@frozen
class DiffusionHead:
    """Denoising diffusion with learned variance: 1000 steps of a cosine schedule, respaced to `steps` for sampling."""

    blocks: int = 4
    samples: int = 8  # (time, noise, target) triples per position
    steps: int = 100
    kind: Literal["diffusion"] = "diffusion"

    def __post_init__(self):
        _at_least_one(self, "blocks", "samples")
        if not 2 <= self.steps <= 1000:
            raise ConfigError(
                f"model.head.steps is {self.steps}; sampling keeps both ends of a schedule of 1000 steps: 2 to 1000"
            )


Head = Annotated[EnergyHead | FlowHead | DiffusionHead, Discriminator("kind")]


@frozen
class CalmConfig:
    """Chunks -> backbone -> a sampler of the next chunk's latent vector; a frozen autoencoder gives its target.

    `autoencoder` says what the frozen parameters are; `autoencoder_run` is the run directory that they come from.
    """

    layers: int
    backbone: LlamaBackbone
    autoencoder: AutoencoderConfig
    autoencoder_run: str | None = None
    head: Head = EnergyHead()
    input: Literal["discrete", "continuous", "both"] = "discrete"  # what the backbone reads: tokens, latents (Table 5)
    scan: bool = True  # False: layers written out, the slow twin
    kind: Literal["calm"] = "calm"

    def __post_init__(self):
        if self.layers < 1:
            raise ConfigError(f"model.layers must be at least 1, got {self.layers}")

    @property
    def vocab(self) -> int:
        return self.autoencoder.vocab

    @property
    def chunk(self) -> int:
        return self.autoencoder.chunk
