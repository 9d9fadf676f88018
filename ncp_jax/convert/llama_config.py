"""LlamaConfig from and to the config.json of transformers' LlamaForCausalLM; the block that CALM's backbone shares."""

from collections.abc import Mapping
from typing import Any

from ncp_jax.convert.fields import REQUIRED, Fields
from ncp_jax.convert.rope import read_rope
from ncp_jax.models.llama import LlamaConfig
from ncp_jax.nn.llama_block import LlamaBackbone

IDENTITY: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
THETA, EPS = 10_000.0, 1e-6  # of a config that does not say (transformers, LlamaConfig)
PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}  # the one form of the block


def read_llama(fields: Fields) -> LlamaConfig:
    """Raises ConfigError with every field that is missing, unknown, or says what this model has no form for."""
    fields.exactly({"tie_word_embeddings": False}, required=False)
    vocab, layers = fields.integer("vocab_size"), fields.integer("num_hidden_layers")
    sizes = read_block(fields)
    fields.check()
    return LlamaConfig(vocab, layers, LlamaBackbone(**sizes))


def write_llama(c: LlamaConfig, positions: int) -> dict[str, Any]:
    """Every field that the model depends on; none is left to a default."""
    return {
        **IDENTITY, **write_block(c.backbone), "vocab_size": c.vocab, "num_hidden_layers": c.layers,
        "max_position_embeddings": positions, "tie_word_embeddings": False,
    }  # fmt: skip


def read_block(fields: Fields, defaults: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Fields of LlamaBackbone. `defaults`: sizes of a class whose config need not state them. No `check` yet."""
    defaults = defaults or {}
    width, heads, ffn = (
        fields.integer(name, default=defaults.get(name, REQUIRED))
        for name in ("hidden_size", "num_attention_heads", "intermediate_size")
    )
    kv_heads, head_dim = (fields.integer(name, default=None) for name in ("num_key_value_heads", "head_dim"))
    if head_dim is not None and head_dim * heads != width:
        fields.wrong("head_dim", head_dim, f"must be hidden_size / num_attention_heads = {width / heads:g}")
    fields.exactly(PLAIN, required=False)
    theta, yarn = read_rope(fields, default=THETA)
    if yarn is not None:
        fields.wrong("rope_scaling or rope_parameters", yarn, "must leave RoPE as it is: LLaMA has no YaRN here")
    return {
        "width": width, "heads": heads, "ffn": ffn, "kv_heads": None if kv_heads == heads else kv_heads,
        "rope_theta": theta, "eps": fields.number("rms_norm_eps", default=EPS),
    }  # fmt: skip


def write_block(s: LlamaBackbone) -> dict[str, Any]:
    """The fields of the block, rotary settings in both spellings of transformers."""
    return {
        **PLAIN, "hidden_size": s.width, "intermediate_size": s.ffn, "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv, "head_dim": s.head_dim, "rms_norm_eps": s.eps, "attention_dropout": 0.0,
        "initializer_range": 0.02, "use_cache": True, "pretraining_tp": 1, "rope_theta": s.rope_theta,
        "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": s.rope_theta},
    }  # fmt: skip
