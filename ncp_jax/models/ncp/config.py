"""Every switch of an NCP model, and the two presets: `released` (public checkpoints) and `paper` (Eq. 1-25)."""

import dataclasses
from typing import Literal

from ncp_jax.config import ConfigError, frozen, nearest_multiples
from ncp_jax.nn.backbone import Backbone
from ncp_jax.ops.energy import check_exponent

IRC = Literal["signed", "softmax", "none"]


@frozen
class Concept:
    """Concept pathway: chunks, codebooks, prediction, injection."""

    chunk: int = 4  # k tokens per concept
    segments: int = 32  # S
    codes: int = 128  # N per segment
    norm: Literal["layernorm", "rms", "none"] = "layernorm"  # of the pooled chunk: module input, VQ input, NCP target
    mix: Literal["raw_logits", "softmax", "hard"] = "raw_logits"  # head output x codebook
    fusion: Literal["normed_add", "add", "scalar_gate"] = "normed_add"  # of the shifted concept into the decoder input
    fusion_init: float = 0.1  # initial scale of normed_add and scalar_gate
    reinject: bool = True  # the same concept again after every decoder layer, gated
    shift: bool = True  # the concept appears at the last token of its chunk; False: one token later
    window: int | None = 4096  # visible concepts of a windowed concept layer; None: all full
    zero_prefix: Literal["layernorm_bias", "zero"] = "layernorm_bias"  # what tokens before the first concept receive


@frozen
class Routing:
    """Residual routes within a tower (IRC) and between towers (CRC)."""

    irc_encoder: IRC = "signed"
    irc_concept: IRC = "signed"
    irc_decoder: IRC = "softmax"
    irc_input: Literal["output", "update"] = "output"  # router reads H+R (released) or R (report Eq. 14)
    concept_from_encoder: bool = True
    decoder_from_encoder: bool = True
    decoder_from_concept: bool = True
    crc_init: float = 0.02  # initial diagonal of every CRC
    reinject_init: float = 0.05  # initial diagonal of the re-injection
    # How routed towers run, not what they compute. unrolled: layer by layer, states as a tuple | scan: one custom VJP
    # (nn/routed_scan.py) | kernel: that, with the TPU kernels of ops/route_kernels.py | interpreted: those step by step
    # on any platform, slow, for tests. Diagnostic steps and cached decoding are always unrolled.
    tower: Literal["unrolled", "scan", "kernel", "interpreted"] = "unrolled"


@frozen
class Loss:
    """Weights and normalisations of NTP + NCP + VQ."""

    ncp_weight: float = 1.0  # alpha
    vq_weight: float = 1.0  # beta
    # Of mse alone: over M*D | Eq. 22: over M | Algorithm 1: over M*S, as code_ce and energy always are.
    ncp_reduction: Literal["mean", "sum", "per_segment"] = "mean"
    vq_reduction: Literal["mean", "sum"] = "mean"  # over M*D | Eq. 21: over M*S
    aux_weighting: Literal["mean", "per_token"] = "mean"  # per_token: divided by T again, as the training fork did
    concept_objective: Literal["mse", "code_ce", "energy"] = "mse"  # what the heads learn of the next concept
    energy_beta: float = 1.0  # exponent of the energy's distances, in (0, 2]; 2 scores means alone
    energy_trains_codes: bool = False  # the energy's gradient reaches the codes too, beside VQ's and NTP's
    commitment: float = 0.25  # gradient-free share of the reported VQ value (the fork reports 1.25 x MSE)
    z_loss: float = 0.0
    head_chunk: int | None = None  # tokens per slice of the fused head; None: one slice

    def __post_init__(self):
        try:
            check_exponent(self.energy_beta)
        except ValueError as error:
            raise ConfigError(f"model.loss.energy_beta: {error}") from None


@frozen
class NCPConfig:
    """Token encoder -> concept module -> token decoder."""

    vocab: int
    encoder_layers: int
    concept_layers: int
    decoder_layers: int
    backbone: Backbone
    concept: Concept = Concept()
    routing: Routing = Routing()
    loss: Loss = Loss()
    kind: Literal["ncp"] = "ncp"

    def __post_init__(self):
        width, segments = self.backbone.width, self.concept.segments
        if width % segments:
            legal = [s for s in range(1, width + 1) if width % s == 0]
            close = sorted(legal, key=lambda s: abs(s - segments))[:2]
            raise ConfigError(
                f"backbone.width {width} does not divide into concept.segments {segments}; "
                f"nearest legal segments: {' or '.join(map(str, sorted(close)))}; "
                f"nearest legal width: {nearest_multiples(width, segments)}"
            )
        for name in ("encoder_layers", "concept_layers", "decoder_layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} must be at least 1, got {getattr(self, name)}")
        if self.routing.concept_from_encoder and self.encoder_layers < 2:
            raise ConfigError(
                "routing.concept_from_encoder reads the first E-1 encoder layers; it needs encoder_layers >= 2"
            )

    def on(self, platform: str | None) -> "NCPConfig":
        """This model with its kernels chosen for a platform, as JAX names them; None: for any.

        Raises ConfigError for a kernel that the platform does not have.
        """
        routing = self.routing
        if routing.tower == "kernel" and platform not in ("tpu", None):
            raise ConfigError(
                f"routing.tower 'kernel' needs a TPU, and this runs on '{platform}'; choose scan, which has the same "
                "backward pass without kernels, unrolled, or interpreted to test the kernels slowly"
            )
        if routing.tower == "kernel" and platform is None:
            routing = dataclasses.replace(routing, tower="scan")
        return dataclasses.replace(self, backbone=self.backbone.on(platform), routing=routing)

    @property
    def layers(self) -> int:
        return self.encoder_layers + self.concept_layers + self.decoder_layers

    @property
    def chunk(self) -> int:
        return self.concept.chunk

    @property
    def concept_backbone(self) -> Backbone:
        return dataclasses.replace(self.backbone, window=self.concept.window)


def released(**sizes) -> NCPConfig:
    """The graph that the public checkpoints compute. `concept`, `loss` override whole groups."""
    return NCPConfig(**sizes)


def paper(*, backbone: Backbone, segments: int, codes: int, **sizes) -> NCPConfig:
    """The report's equations: Eq. 3-24 as printed.

    alpha and beta are undisclosed. Assumption: alpha = 1/D and beta = S/D, which makes the summed losses of Eq. 21-22
    weigh what the released lineage's element-wise means weigh.
    """
    width = backbone.width
    concept = Concept(
        segments=segments, codes=codes, norm="none", mix="softmax", fusion="add", reinject=False,
        window=backbone.window, zero_prefix="zero",
    )  # fmt: skip
    routing = Routing(irc_decoder="signed", irc_input="update")
    loss = Loss(
        ncp_weight=1 / width, vq_weight=segments / width, ncp_reduction="sum", vq_reduction="sum", commitment=0.0,
    )  # fmt: skip
    return NCPConfig(backbone=backbone, concept=concept, routing=routing, loss=loss, **sizes)
