"""AutoencoderConfig and CalmConfig from and to the config.json of the official CALM classes.

A field that is absent has the default of its class. The official config of a language model says nothing about its
autoencoder but the path that it once had, so the sizes come from the tensors of the same file; assumption: its eps is
the 1e-6 of the official config. The architecture tells which head a model has: transformers 4 drops `model_type` from
what it saves for these classes.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ncp_jax.checkpoint.hf_calm_names import FROZEN_ROOT
from ncp_jax.checkpoint.hf_files import TensorFiles
from ncp_jax.checkpoint.hf_tensor import HFError
from ncp_jax.config import ConfigError, differences, to_dict
from ncp_jax.convert.fields import Fields
from ncp_jax.convert.llama_config import EPS, PLAIN, read_block, write_block
from ncp_jax.models.calm.config import AutoencoderConfig, CalmConfig, DiffusionHead, EnergyHead, FlowHead
from ncp_jax.nn.llama_block import LlamaBackbone
from ncp_jax.train.calm_families import TRAINING_ONLY

AUTOENCODER = "Autoencoder"
HEADS = {"energy": "EnergyTransformer", "flow": "FlowTransformer", "diffusion": "DiffusionTransformer"}
POSITIONS = 2048  # longest sequence of a config that does not say; of a language model in chunks
# Defaults of the official classes.
SIZES = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 2048}
VOCAB, CHUNK, LATENT = 32_000, 4, 128
# Say nothing about what these classes compute: autoencoders tie by hand, ae_path is a place on the authors' disks.
UNUSED = ("tie_word_embeddings", "ae_path")
# Of a LLaMA, which transformers takes an autoencoder for where it is given no config; there is no attention in one.
ATTENTION = (
    "attention_bias", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta", "rope_scaling",
)  # fmt: skip
# Settings that matter to training or to speed alone, and have no field: they do not stop an export.
LOOSE = {
    "calm_autoencoder": ("mask", "score_pads", "head_chunk"),
    "calm": (
        "autoencoder_run", "scan", "backbone.remat", "head.remat", "head.draws",
        *(f"autoencoder.{name}" for name in TRAINING_ONLY),
    ),
}  # fmt: skip
TOLD = {"calm_autoencoder": ("mask:", "score_pads:"), "calm": ("head.draws:",)}  # of those, what an export mentions


class AutoencoderShape(NamedTuple):
    """Sizes of an autoencoder that its language model's config does not state."""

    width: int
    ffn: int
    encoder_layers: int
    decoder_layers: int


def read_autoencoder(fields: Fields, pad: int | None) -> AutoencoderConfig:
    """Raises ConfigError with every field that is unknown, or says what this model has no form for."""
    fields.exactly({name: PLAIN[name] for name in ("hidden_act", "mlp_bias")}, required=False)
    fields.ignore((*UNUSED, *ATTENTION))
    dropout = fields.number("ae_dropout", default=AutoencoderConfig.token_dropout, above=-1.0)
    values = {
        "vocab": fields.integer("vocab_size", default=VOCAB), "chunk": fields.integer("patch_size", default=CHUNK),
        "width": fields.integer("hidden_size", default=512), "ffn": fields.integer("intermediate_size", default=1280),
        "latent": fields.integer("latent_size", default=LATENT),
        "encoder_layers": fields.integer("num_encoder_layers", default=2),
        "decoder_layers": fields.integer("num_decoder_layers", default=2), "token_dropout": dropout,
        "latent_dropout": dropout, "kl_floor": fields.number("kl_clamp", default=0.5, above=-1.0),
        "kl_weight": fields.number("kl_weight", default=1e-3, above=-1.0),
        "eps": fields.number("rms_norm_eps", default=EPS),
    }  # fmt: skip
    fields.check()
    return AutoencoderConfig(**values, pad=pad, score_pads=True)


def write_autoencoder(c: AutoencoderConfig, positions: int) -> dict[str, Any]:
    """Every field of the class. Raises ConfigError for a model that it cannot hold."""
    _check_kept(c)
    return {**_autoencoder_fields(c), "max_position_embeddings": positions}


def read_calm(fields: Fields, pad: int | None, shape: AutoencoderShape) -> CalmConfig:
    """Raises ConfigError with every field that is unknown, or says what this model has no form for."""
    fields.ignore(UNUSED)
    vocab, chunk, latent = (
        fields.integer(name, default=default)
        for name, default in (("vocab_size", VOCAB), ("patch_size", CHUNK), ("latent_size", LATENT))
    )
    layers, sizes = fields.integer("num_hidden_layers", default=12), read_block(fields, SIZES)
    head, settings = _read_head(fields)
    fields.check()
    autoencoder = AutoencoderConfig(vocab, chunk, **shape._asdict(), latent=latent, pad=pad, score_pads=True)
    return CalmConfig(layers, LlamaBackbone(**sizes), autoencoder, head=head(**settings))


def write_calm(c: CalmConfig, positions: int) -> dict[str, Any]:
    """Every field of the class. Raises ConfigError for a model that it cannot hold."""
    _check_kept(c)
    return {**_calm_fields(c), "max_position_embeddings": max(positions // c.chunk, 1)}


def left_out(model: AutoencoderConfig | CalmConfig) -> tuple[str, ...]:
    """Settings of its training that a model's export does not keep, as `name: ours -> what a reader will assume`."""
    told = TOLD[model.kind]
    return tuple(line for line in differences(to_dict(model), to_dict(_read_back(model))) if line.startswith(told))


def stored_shape(folder: Path) -> AutoencoderShape:
    """Sizes of the autoencoder among a language model's tensors. Raises HFError where there is none."""
    shapes = {name.partition(FROZEN_ROOT)[2]: tensor.shape for name, tensor in TensorFiles(folder).tensors.items()}
    gate = shapes.get("encoder.encoder_layers.0.mlp.gate_proj.weight", ())
    layers = {side: _layers(shapes, side) for side in ("encoder", "decoder")}
    if len(gate) != 2 or not all(layers.values()):
        raise HFError(
            f"{folder} holds a CALM language model without its autoencoder ({FROZEN_ROOT}*): nothing could turn its "
            "latents into tokens; fetch the whole checkpoint"
        )
    return AutoencoderShape(gate[1], gate[0], layers["encoder"], layers["decoder"])


def _layers(shapes: Mapping[str, Any], side: str) -> int:
    pattern = re.compile(rf"{side}\.{side}_layers\.(\d+)\.")
    return max((int(match[1]) + 1 for match in map(pattern.match, shapes) if match), default=0)


def _read_head(fields: Fields) -> tuple[type[EnergyHead] | type[FlowHead] | type[DiffusionHead], dict[str, Any]]:
    """(class of the head, its settings)."""
    architectures = fields.raw("architectures", default=[])
    kind = next((kind for kind, name in HEADS.items() if name in architectures), None)
    stated = fields.choice("model_type", known={"": None} | {name: name for name in HEADS}, default=None)
    if kind and stated not in (None, kind):
        fields.wrong("model_type", stated, f"must be '{kind}', the head of {HEADS[kind]}")
    kind = kind or stated or "energy"  # the default of the class
    settings = {
        "blocks": fields.integer("num_mlp_layers", default=4),
        "samples": fields.integer("num_samples", default=8, least=2 if kind == "energy" else 1),
    }
    energy = {"noise": fields.integer("noise_size", default=64), "beta": fields.number("beta", default=1.0)}
    if kind == "energy":
        return EnergyHead, settings | energy
    return FlowHead if kind == "flow" else DiffusionHead, settings


def _autoencoder_fields(c: AutoencoderConfig) -> dict[str, Any]:
    return {
        "architectures": [AUTOENCODER], "vocab_size": c.vocab, "patch_size": c.chunk, "hidden_size": c.width,
        "intermediate_size": c.ffn, "latent_size": c.latent, "num_encoder_layers": c.encoder_layers,
        "num_decoder_layers": c.decoder_layers, "ae_dropout": c.token_dropout, "kl_clamp": c.kl_floor,
        "kl_weight": c.kl_weight, "hidden_act": "silu", "mlp_bias": False, "rms_norm_eps": c.eps,
        "initializer_range": 0.02, "pretraining_tp": 1, "tie_word_embeddings": False,
    }  # fmt: skip


def _calm_fields(c: CalmConfig) -> dict[str, Any]:
    head = c.head
    energy = head if isinstance(head, EnergyHead) else EnergyHead()  # its fields are there whatever the head
    return {
        "architectures": [HEADS[head.kind]], "model_type": head.kind, "ae_path": None, **write_block(c.backbone),
        "vocab_size": c.vocab, "patch_size": c.chunk, "latent_size": c.autoencoder.latent,
        "num_hidden_layers": c.layers, "num_mlp_layers": head.blocks, "num_samples": head.samples,
        "noise_size": energy.noise, "beta": energy.beta, "tie_word_embeddings": False,
    }  # fmt: skip


def _read_back(model: AutoencoderConfig | CalmConfig) -> AutoencoderConfig | CalmConfig:
    """What a reader of the written fields gets."""
    if isinstance(model, AutoencoderConfig):
        return read_autoencoder(Fields(_autoencoder_fields(model), "config.json"), model.pad)
    a = model.autoencoder
    shape = AutoencoderShape(a.width, a.ffn, a.encoder_layers, a.decoder_layers)
    return read_calm(Fields(_calm_fields(model), "config.json"), a.pad, shape)


def _check_kept(model: AutoencoderConfig | CalmConfig) -> None:
    """Raise ConfigError unless a reader of the written fields gets this model, up to LOOSE settings."""
    lines = differences(to_dict(model), to_dict(_read_back(model)))
    lines = [line for line in lines if line.partition(":")[0] not in LOOSE[model.kind]]
    if lines:
        raise ConfigError(
            "the official layout cannot hold this model, since it has no field for these settings (ours -> what it "
            "stands for):" + "".join(f"\n  {line}" for line in lines)
        )
