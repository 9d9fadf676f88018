"""Olmo3Config from and to the config.json of transformers' Olmo3ForCausalLM."""

from collections.abc import Sequence
from typing import Any

from ncp_jax.config import ConfigError
from ncp_jax.convert.fields import Fields
from ncp_jax.convert.rope import LAYER_TYPES, read_rope, write_rope
from ncp_jax.models.olmo3 import Olmo3Config
from ncp_jax.nn.backbone import Backbone

IDENTITY: dict[str, Any] = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
FULL_EVERY = 4  # of a config without layer_types (transformers, Olmo3Config)
SLIDING, FULL = LAYER_TYPES


def read_olmo3(fields: Fields) -> Olmo3Config:
    """Raises ConfigError with every field that is missing, unknown, or says what this model has no form for."""
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers = fields.integer("num_hidden_layers")
    theta, yarn = read_rope(fields)
    window, full_every = _read_window(fields, layers)
    head_dim = fields.integer("head_dim", default=None)
    if head_dim is not None and head_dim * heads != width:
        fields.wrong("head_dim", head_dim, f"must be hidden_size / num_attention_heads = {width / heads:g}")
    fields.exactly({"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}, required=False)
    kv_heads = fields.integer("num_key_value_heads", default=None)
    sizes = {
        "width": width, "heads": heads, "ffn": fields.integer("intermediate_size"),
        "kv_heads": None if kv_heads == heads else kv_heads, "window": window, "full_every": full_every,
        "rope_theta": theta, "yarn": yarn, "eps": fields.number("rms_norm_eps"),
    }  # fmt: skip
    vocab = fields.integer("vocab_size")
    fields.check()
    return Olmo3Config(vocab=vocab, layers=layers, backbone=Backbone(**sizes))


def write_olmo3(c: Olmo3Config, positions: int) -> dict[str, Any]:
    """Every field that the model depends on; none is left to a default. Raises ConfigError for what has no field.

    Where all layers are full, transformers still wants a number for the window: it is the longest sequence.
    """
    s = c.backbone
    if s.qk_norm != "full":
        raise ConfigError(f"backbone.qk_norm is '{s.qk_norm}', Olmo3ForCausalLM has 'full' alone: export is impossible")
    if s.yarn and not s.yarn.round_to_int:
        raise ConfigError(
            "backbone.yarn.round_to_int is false; transformers 5 ignores its counterpart, 'truncate', where rotary "
            "settings stand per layer type, so the exported model would compute something else"
        )
    types = [FULL if s.is_full(layer) else SLIDING for layer in range(c.layers)]
    return {
        **IDENTITY, "vocab_size": c.vocab, "hidden_size": s.width, "intermediate_size": s.ffn,
        "num_hidden_layers": c.layers, "num_attention_heads": s.heads, "num_key_value_heads": s.kv,
        "head_dim": s.head_dim, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
        "rms_norm_eps": s.eps, "tie_word_embeddings": False, "initializer_range": 0.02, "use_cache": True,
        "max_position_embeddings": positions, "sliding_window": s.window or positions, "layer_types": types,
        **write_rope(s),
    }  # fmt: skip


def _read_window(fields: Fields, layers: int) -> tuple[int | None, int]:
    """(visible keys, full_every): transformers counts the query's own key, as we do."""
    types = fields.raw("layer_types", default=None)
    full_every = FULL_EVERY if types is None else _period(fields, types, layers)
    if full_every == 1:
        fields.ignore(["sliding_window"])
        return None, FULL_EVERY
    return fields.integer("sliding_window"), full_every


def _period(fields: Fields, types: Any, layers: int) -> int:
    """n such that layers n, 2n, ... (from 1) are full; above the layer count where none is."""
    for n in (FULL_EVERY, *range(1, layers + 2)):
        if types == [FULL if layer % n == 0 else SLIDING for layer in range(1, layers + 1)]:
            return n
    rule = f"must name {layers} layers, each n-th '{FULL}', the others '{SLIDING}'"
    fields.wrong("layer_types", _short(types), rule)
    return FULL_EVERY


def _short(types: Any) -> Any:
    return [*types[:8], "..."] if isinstance(types, Sequence) and len(types) > 9 else types
