"""Golden files of the official CALM modules: their configs and weights in our names."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from golden_files import load

from ncp_jax.models.calm.chunks import Chunks
from ncp_jax.models.calm.config import AutoencoderConfig, CalmConfig, DiffusionHead, EnergyHead, FlowHead
from ncp_jax.models.llama import LlamaConfig
from ncp_jax.nn.llama_block import LlamaBackbone

ENERGY_FILES = ("k4", "k4_gqa_b125", "k2", "k3_v9", "k1_v5", "k8")
ATTENTION = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
MLP = {"w_gate": "mlp.gate_proj", "w_up": "mlp.up_proj", "w_down": "mlp.down_proj"}


class Tensors:
    """Tensors of a file under a prefix, by official name: weights, or gradients."""

    def __init__(self, golden, prefix: str = "w/"):
        self.golden, self.prefix = golden, prefix

    def __call__(self, name: str) -> np.ndarray:
        return self.golden[self.prefix + name]

    def under(self, prefix: str) -> "Tensors":
        return Tensors(self.golden, self.prefix + prefix)


def fields(golden) -> dict:
    return json.loads(str(golden["config_json"]))


def as_chunks(ids: np.ndarray, k: int) -> Chunks:
    """Rows of a stream."""
    tokens = jnp.asarray(ids.reshape(len(ids), -1, k))
    return Chunks(tokens, jnp.ones_like(tokens, bool), jnp.ones(tokens.shape[:2], jnp.int32), None)


def linear(get: Tensors, name: str) -> dict:
    return {"kernel": get(f"{name}.weight").T, "bias": get(f"{name}.bias")}


def norm(get: Tensors, name: str) -> dict:
    return {"scale": get(f"{name}.weight"), "bias": get(f"{name}.bias")}


def stack(values) -> jax.Array:
    return jnp.stack(list(values))


# --- autoencoder ---


def autoencoder_config(f: dict, **changes) -> AutoencoderConfig:
    """The official loss counts pads."""
    return AutoencoderConfig(
        vocab=f["vocab_size"], chunk=f["patch_size"], width=f["hidden_size"], ffn=f["intermediate_size"],
        latent=f["latent_size"], encoder_layers=f["num_encoder_layers"], decoder_layers=f["num_decoder_layers"],
        pad=f["pad_token_id"], score_pads=True, **changes,
    )  # fmt: skip


def autoencoder_params(get: Tensors, c: AutoencoderConfig) -> dict:
    def blocks(prefix: str, layers: int) -> dict:
        found = {
            ours: stack(get(f"{prefix}.{i}.{theirs}.weight").T for i in range(layers)) for ours, theirs in MLP.items()
        }
        return found | {"mlp_norm": stack(get(f"{prefix}.{i}.layernorm.weight") for i in range(layers))}

    return {
        "embed": {"table": get("encoder.embed_tokens.weight")},
        "encoder": {
            "blocks": blocks("encoder.encoder_layers", c.encoder_layers),
            "squeeze": linear(get, "encoder.squeeze_layer"),
            "norm": {"scale": get("encoder.norm.weight")},
            "latent": linear(get, "encoder.hidden_to_latent"),
        },
        "decoder": {
            "latent": linear(get, "decoder.latent_to_hidden"),
            "blocks": blocks("decoder.decoder_layers", c.decoder_layers),
            "expand": linear(get, "decoder.expand_layer"),
            "norm": {"scale": get("decoder.norm.weight")},
        },
    }


# --- language models ---


def backbone(f: dict) -> LlamaBackbone:
    return LlamaBackbone(
        width=f["hidden_size"], heads=f["num_attention_heads"], kv_heads=f["num_key_value_heads"],
        ffn=f["intermediate_size"],
    )  # fmt: skip


def llama_blocks(get: Tensors, s: LlamaBackbone, layers: int) -> dict:
    D, h = s.width, s.head_dim
    shapes = {"wq": (D, s.heads, h), "wk": (D, s.kv, h), "wv": (D, s.kv, h), "wo": (s.heads, h, D)}

    def weight(i: int, name: str) -> np.ndarray:
        return get(f"layers.{i}.{name}.weight")

    found = {
        ours: stack(weight(i, f"self_attn.{theirs}").T.reshape(shapes[ours]) for i in range(layers))
        for ours, theirs in ATTENTION.items()
    }
    found |= {ours: stack(weight(i, theirs).T for i in range(layers)) for ours, theirs in MLP.items()}
    return found | {
        "attention_norm": stack(weight(i, "input_layernorm") for i in range(layers)),
        "mlp_norm": stack(weight(i, "post_attention_layernorm") for i in range(layers)),
    }


def calm_config(golden, kind: str = "energy", **changes) -> CalmConfig:
    """The language model of a file; its autoencoder (official defaults: 2 layers) as its own golden file says."""
    f = fields(golden)
    heads = {
        "energy": lambda: EnergyHead(f["num_mlp_layers"], f["noise_size"], f["num_samples"], 100, f["beta"]),
        "flow": lambda: FlowHead(f["num_mlp_layers"]),
        "diffusion": lambda: DiffusionHead(f["num_mlp_layers"]),
    }
    name = f["ae_path"].rpartition("/")[2]
    ae = autoencoder_config(fields(load(f"calm_{name}")))
    return CalmConfig(f["num_hidden_layers"], backbone(f), ae, head=heads[kind](), **changes)


def calm_params(get: Tensors, c: CalmConfig) -> dict:
    generator = _energy_head(get.under("mlp_generator."), c) if c.head.kind == "energy" else _transport(get, c)
    return {
        "embed": {"table": get("transformer.embed_tokens.weight")},
        "input": {
            "in": linear(get, "embed_proj.0"),
            "out": linear(get, "embed_proj.2"),
            "norm": norm(get, "embed_proj.3"),
        },
        "blocks": llama_blocks(get.under("transformer."), c.backbone, c.layers),
        "final_norm": {"scale": get("transformer.norm.weight")},
        "generator": generator,
    }


def _energy_head(get: Tensors, c: CalmConfig) -> dict:
    parts = {
        "norm_scale": "in_ln.weight", "norm_bias": "in_ln.bias", "w1": "linears.0.weight", "b1": "linears.0.bias",
        "w2": "linears.2.weight", "b2": "linears.2.bias", "w3": "linears.4.weight", "b3": "linears.4.bias",
        "w_down": "down_proj.weight", "b_down": "down_proj.bias",
    }  # fmt: skip
    blocks = {
        ours: stack(get(f"mlp_blocks.{i}.{theirs}").T for i in range(c.head.blocks)) for ours, theirs in parts.items()
    }
    return {
        "noise": linear(get, "noise_embd"),
        "noise_norm": norm(get, "norm_noise"),
        "hidden": linear(get, "hidden_embd"),
        "hidden_norm": norm(get, "norm_hidden"),
        "blocks": blocks,
        "out_norm": norm(get, "final_layer.in_ln"),
        "out1": linear(get, "final_layer.linears.0"),
        "out2": linear(get, "final_layer.linears.2"),
    }


def _transport(get: Tensors, c: CalmConfig) -> dict:
    net = get.under("generative_head.net.")

    def block(i: int) -> dict:
        name = f"res_blocks.{i}"
        return {
            "modulation": linear(net, f"{name}.adaLN_modulation.1"),
            "norm": norm(net, f"{name}.in_ln"),
            "mlp1": linear(net, f"{name}.mlp.0"),
            "mlp2": linear(net, f"{name}.mlp.2"),
        }

    return {
        "time1": linear(net, "time_embed.mlp.0"),
        "time2": linear(net, "time_embed.mlp.2"),
        "state": linear(net, "cond_embed"),
        "input": linear(net, "input_proj"),
        "out_modulation": linear(net, "final_layer.adaLN_modulation.1"),
        "out": linear(net, "final_layer.linear"),
    } | {f"block_{i}": block(i) for i in range(c.head.blocks)}


def llama(golden) -> tuple[LlamaConfig, dict]:
    f, get = fields(golden), Tensors(golden)
    config = LlamaConfig(f["vocab_size"], f["num_hidden_layers"], backbone(f))
    return config, {
        "embed": {"table": get("model.embed_tokens.weight")},
        "head": {"kernel": get("lm_head.weight").T},
        "blocks": llama_blocks(get.under("model."), config.backbone, config.layers),
        "final_norm": {"scale": get("model.norm.weight")},
    }
