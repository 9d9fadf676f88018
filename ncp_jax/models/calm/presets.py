"""Named models of the paper: sizes S to XL, K = 1, 2, 4, 8, and the ablation arms of Tables 2-5 and Figures 4, 6, 7.

Source: arXiv 2510.27688 Section 7 and the official configs. `vocab` is Llama 3's 128256 ids and one for padding.
"""

import dataclasses
from typing import Any

from ncp_jax.config import ConfigError
from ncp_jax.models.calm.config import AutoencoderConfig, CalmConfig, DiffusionHead, EnergyHead, FlowHead
from ncp_jax.models.llama import LlamaConfig
from ncp_jax.nn.llama_block import LlamaBackbone

VOCAB = 128_257
PAD = 128_256
HEADS = 16
# layers, width, feed-forward width (Section 7.1)
SIZES = {"S": (12, 768, 2048), "M": (16, 1024, 2752), "L": (16, 1536, 4096), "XL": (16, 2560, 6880)}
# The published 849M of Transformer-L needs this width; 4096, which the paper states, gives 847M.
TRANSFORMER_L_FFN = 4128
CHUNKS = (1, 2, 4, 8)
# Dropout of tokens and latents where the latent size is varied (Figure 7).
DROPOUT_OF_LATENT = {32: 0.05, 64: 0.10, 128: 0.15, 256: 0.20}

Arm = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]  # head, autoencoder, head and model changes
ENERGY = "energy"
ARMS: dict[str, Arm] = {
    "default": (ENERGY, {}, {}, {}),
    # Table 2. Assumption: "reconstruction only" has no noise either, since nothing would bound sigma from below.
    "reconstruction_only": (
        ENERGY, {"kl_weight": 0.0, "posterior": "mean", "token_dropout": 0.0, "latent_dropout": 0.0}, {}, {},
    ),
    "plain_kl": (ENERGY, {"kl_floor": 0.0, "token_dropout": 0.0, "latent_dropout": 0.0}, {}, {}),
    "clipped_kl": (ENERGY, {"token_dropout": 0.0, "latent_dropout": 0.0}, {}, {}),
    "clipped_kl_token_dropout": (ENERGY, {"latent_dropout": 0.0}, {}, {}),
    "clipped_kl_latent_dropout": (ENERGY, {"token_dropout": 0.0}, {}, {}),
    # Figure 6 states the range; the inner points are an assumption.
    **{f"kl_weight_{weight:g}": (ENERGY, {"kl_weight": weight}, {}, {}) for weight in (0.0, 1e-4, 1e-3, 1e-2, 1e-1)},
    # Figure 7
    **{
        f"latent_{size}": (ENERGY, {"latent": size, "token_dropout": rate, "latent_dropout": rate}, {}, {})
        for size, rate in DROPOUT_OF_LATENT.items()
    },
    # Table 3
    **{f"samples_{n}": (ENERGY, {}, {"samples": n}, {}) for n in (2, 4, 8, 12)},
    **{f"draws_{m}": (ENERGY, {}, {"draws": m}, {}) for m in (1, 16, 100, 200)},
    # Table 4
    **{f"beta_{beta:g}": (ENERGY, {}, {"beta": beta}, {}) for beta in (0.75, 1.0, 1.25, 1.5, 1.75, 2.0)},
    # Table 5
    **{f"input_{kind}": (ENERGY, {}, {}, {"input": kind}) for kind in ("discrete", "continuous", "both")},
    # Figure 8
    "flow": ("flow", {}, {}, {}),
    "diffusion": ("diffusion", {}, {}, {}),
}  # fmt: skip
HEAD_KINDS = {"energy": EnergyHead, "flow": FlowHead, "diffusion": DiffusionHead}


def autoencoder(chunk: int = 4, vocab: int = VOCAB, pad: int | None = PAD, **changes) -> AutoencoderConfig:
    """The paper's autoencoder for chunks of K tokens: l = 32 K."""
    return dataclasses.replace(AutoencoderConfig(vocab, chunk, latent=32 * chunk, pad=pad), **changes)


def calm(size: str, chunk: int = 4, arm: str = "default", **autoencoder_changes) -> CalmConfig:
    """CALM-M, -L, -XL (or S, the ablations' model) with chunks of K tokens, changed as an arm says.

    The head has a quarter of the backbone's layers. Raises ConfigError for an unknown size or arm.
    """
    kind, of_autoencoder, of_head, of_model = _named(ARMS, arm, "arm")
    layers, backbone = _shape(size)
    ae = autoencoder(chunk, **(of_autoencoder | autoencoder_changes))
    head = HEAD_KINDS[kind](blocks=layers // 4, **of_head)
    return CalmConfig(layers, backbone, ae, head=head, **of_model)


def transformer(size: str, vocab: int = VOCAB) -> LlamaConfig:
    """Transformer-S, -M, -L: the autoregressive baseline."""
    layers, backbone = _shape(size)
    if size == "L":
        backbone = dataclasses.replace(backbone, ffn=TRANSFORMER_L_FFN)
    return LlamaConfig(vocab, layers, backbone)


def _shape(size: str) -> tuple[int, LlamaBackbone]:
    layers, width, ffn = _named(SIZES, size, "size")
    return layers, LlamaBackbone(width, HEADS, ffn)


def _named(table: dict, name: str, what: str):
    if name not in table:
        raise ConfigError(f"CALM has no {what} '{name}'; known: {', '.join(table)}")
    return table[name]
