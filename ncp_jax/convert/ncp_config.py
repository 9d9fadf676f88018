"""NCPConfig from and to the config.json of the released NCP-ArchPreview, in both exports (`ncp_olmo3`, native).

The window is the training kernels': `[4096, 0]` is 4096 keys to the left of the query and its own, 4097 in all.
"""

import math
from typing import Any

from ncp_jax.config import ConfigError
from ncp_jax.convert.fields import Fields
from ncp_jax.convert.ncp_fields import (
    IDENTITY,
    KEY_FORMATS,
    MIX,
    OBJECTIVE,
    PINNED,
    PINNED_IF_PRESENT,
    QK_NORM,
    UNUSED,
    YARN_FIELDS,
)
from ncp_jax.convert.rope import read_rope, yarn_scale
from ncp_jax.models.ncp.config import Concept, Loss, NCPConfig, Routing
from ncp_jax.nn.backbone import Backbone, Yarn


def read_ncp(fields: Fields) -> NCPConfig:
    """Raises ConfigError with every field that is missing, unknown, or says what the released graph is not."""
    fields.exactly(PINNED)
    fields.exactly(PINNED_IF_PRESENT, required=False)
    fields.ignore(UNUSED)
    fields.choice("weight_key_format", known={name: name for name in KEY_FORMATS})
    layers = {
        name: fields.integer(f"conceptlm_{theirs}_layers")
        for name, theirs in (("encoder", "encoder"), ("concept", "special"), ("decoder", "decoder"))
    }
    token_layers = fields.integer("num_layers", "num_hidden_layers")
    if token_layers != layers["encoder"] + layers["decoder"]:
        fields.wrong("num_layers", token_layers, f"must be {layers['encoder']} encoder + {layers['decoder']} decoder")
    backbone, concept_window = _read_backbone(fields)
    concept = {
        "chunk": fields.integer("conceptlm_chunk_size"),
        "segments": fields.integer("conceptlm_v22_vq_num_codebooks"),
        "codes": fields.integer("conceptlm_v22_vq_codebook_size"),
        "mix": fields.choice("conceptlm_v22_vq_merge_mode", known=MIX),
        "shift": fields.choice("conceptlm_shift_feature", known={True: True, False: False}),
        "fusion_init": fields.number("conceptlm_fusion_norm_alpha_init", default=Concept.fusion_init),
        "window": concept_window,
    }
    routing = Routing(
        crc_init=fields.number("conceptlm_v21_residual_flow_beta_init", default=Routing.crc_init),
        reinject_init=fields.number("conceptlm_v21_dd_two_route_add_beta_init", default=Routing.reinject_init),
    )
    loss = Loss(
        commitment=fields.number("conceptlm_v22_vq_commitment_cost", default=Loss.commitment, above=-1.0),
        concept_objective=fields.choice("conceptlm_v22_vq_hlm_loss_type", known=OBJECTIVE, default="mse"),
    )
    vocab = fields.integer("vocab_size")
    fields.check()
    return NCPConfig(
        vocab=vocab, encoder_layers=layers["encoder"], concept_layers=layers["concept"],
        decoder_layers=layers["decoder"], backbone=Backbone(**backbone), concept=Concept(**concept),
        routing=routing, loss=loss,
    )  # fmt: skip


def write_ncp(c: NCPConfig, format: str, positions: int) -> dict[str, Any]:
    """Every field of the contract. Raises ConfigError that lists each setting which the format cannot say.

    The loss is no part of the graph: its weights are not written, and an objective that the training fork does not have
    (energy) has no name, so the optional field that would name it is left out; a reader takes the default, mse.
    """
    s, concept = c.backbone, c.concept
    _check_writable(c)
    # Where every layer is full, the period says so; the window is then never read, and must still be two numbers.
    window, period = (positions, 1) if s.window is None else (s.window - 1, s.full_every)
    mode = "backbone_window" if concept.window == s.window else "full"
    names = {value: name for table in (MIX, OBJECTIVE, QK_NORM) for name, value in table.items()}
    objective = names.get(c.loss.concept_objective)
    return {
        **IDENTITY[format], **PINNED, "hidden_size": s.width, "num_layers": c.encoder_layers + c.decoder_layers,
        "num_hidden_layers": c.encoder_layers + c.decoder_layers, "num_attention_heads": s.heads,
        "num_query_groups": s.heads, "num_key_value_heads": s.heads, "kv_channels": s.head_dim,
        "head_dim": s.head_dim, "ffn_hidden_size": s.ffn, "intermediate_size": s.ffn, "vocab_size": c.vocab,
        "max_sequence_length": positions, "max_position_embeddings": positions, "layernorm_epsilon": s.eps,
        "rms_norm_eps": s.eps, "tie_word_embeddings": False, "hidden_act": "silu",
        "qk_norm_mode": names[s.qk_norm], "qk_norm_weight_size": s.width if s.qk_norm == "full" else s.head_dim,
        "window_size": [window, 0], "window_attn_skip_freq": period, "rotary_base": s.rope_theta,
        "rotary_percent": 1.0, "rotary_interleaved": False, **_write_yarn(s.yarn),
        "conceptlm_encoder_layers": c.encoder_layers, "conceptlm_special_layers": c.concept_layers,
        "conceptlm_decoder_layers": c.decoder_layers, "conceptlm_chunk_size": concept.chunk,
        "conceptlm_shift_feature": concept.shift, "conceptlm_hlm_attention_mode": mode,
        "conceptlm_hlm_ffn_hidden_size": None, "conceptlm_v22_vq_codebook_size": concept.codes,
        "conceptlm_v22_vq_num_codebooks": concept.segments, "conceptlm_v22_vq_merge_mode": names[concept.mix],
        "conceptlm_fusion_norm_alpha_init": concept.fusion_init,
        "conceptlm_v21_residual_flow_beta_init": c.routing.crc_init,
        "conceptlm_v21_dd_two_route_add_beta_init": c.routing.reinject_init,
        "conceptlm_v22_vq_commitment_cost": c.loss.commitment,
        **({"conceptlm_v22_vq_hlm_loss_type": objective} if objective else {}),
    }  # fmt: skip


def _read_backbone(fields: Fields) -> tuple[dict[str, Any], int | None]:
    """(Backbone fields, window of the concept module)."""
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    groups = fields.integer("num_query_groups", "num_key_value_heads")
    if groups != heads:
        fields.wrong("num_query_groups", groups, f"must be num_attention_heads = {heads}")
    head_dim = fields.integer("kv_channels", "head_dim", default=None)
    if head_dim is not None and head_dim * heads != width:
        fields.wrong("kv_channels", head_dim, f"must be hidden_size / num_attention_heads = {width / heads:g}")
    ffn = fields.integer("ffn_hidden_size", "intermediate_size")
    concept_ffn = fields.integer("conceptlm_hlm_ffn_hidden_size", default=None)
    if concept_ffn not in (None, ffn):
        fields.wrong("conceptlm_hlm_ffn_hidden_size", concept_ffn, f"must be null or ffn_hidden_size = {ffn}")
    window = _read_window(fields)
    mode = fields.choice("conceptlm_hlm_attention_mode", known={"backbone_window": True, "full": False})
    theta, yarn = _read_rope(fields)
    backbone = {
        "width": width, "heads": heads, "ffn": ffn, "qk_norm": _read_qk_norm(fields, width, width // heads),
        "window": window, "full_every": fields.integer("window_attn_skip_freq"), "rope_theta": theta, "yarn": yarn,
        "eps": fields.number("layernorm_epsilon", "rms_norm_eps"),
    }  # fmt: skip
    return backbone, window if mode else None


def _read_window(fields: Fields) -> int:
    size = fields.raw("window_size")
    sound = isinstance(size, list) and len(size) == 2 and all(type(n) is int for n in size)
    if not sound or size[0] < 0 or size[1] != 0:
        fields.wrong("window_size", size, "must be [keys to the left, 0]")
        return 1
    return size[0] + 1


def _read_qk_norm(fields: Fields, width: int, head_dim: int) -> str:
    mode = fields.choice("qk_norm_mode", known=QK_NORM, default=None)
    size = fields.integer("qk_norm_weight_size", default=None)
    modes = {width: "full", head_dim: "per_head"}
    if mode is None:
        mode = "full" if size is None else modes.get(size, "")
    wanted = width if mode == "full" else head_dim
    if size not in (None, wanted):
        fields.wrong("qk_norm_weight_size", size, f"must be {width} (full_hidden) or {head_dim} (per_head)")
    return mode


def _read_rope(fields: Fields) -> tuple[float, Yarn | None]:
    """NCP's own yarn_* fields; where transformers' rotary fields stand beside them, both must agree."""
    kind = fields.choice("position_embedding_type", known={"rope": "rope", "yarn": "yarn"})
    theta, other = read_rope(fields, ("rotary_base", "rope_theta"))
    if kind == "rope":
        fields.ignore(YARN_FIELDS)
        if other is not None:
            fields.wrong("position_embedding_type", kind, "contradicts the YaRN of rope_scaling or rope_parameters")
        return theta, None
    fields.exactly({"yarn_full_attn_layers_only": True})
    factor = fields.number("yarn_rotary_scaling_factor", above=0.999)
    mscale, all_dim = (fields.number(name, above=-math.inf) for name in ("yarn_mscale", "yarn_mscale_all_dim"))
    # m(factor, mscale) / m(factor, mscale_all_dim), where a zero weight gives 1.
    scale = yarn_scale(factor, mscale) / yarn_scale(factor, all_dim)
    yarn = Yarn(
        factor=factor,
        original_length=fields.integer("yarn_original_max_position_embeddings"),
        beta_fast=fields.number("yarn_beta_fast"),
        beta_slow=fields.number("yarn_beta_slow"),
        attention_factor=None if scale == yarn_scale(factor, 1.0) else scale,
        round_to_int=fields.choice("yarn_correction_range_round_to_int", known={True: True, False: False}),
    )
    if other not in (None, yarn):
        fields.wrong("yarn_* fields", yarn, f"must agree with rope_scaling or rope_parameters, {other}")
    return theta, yarn


def _write_yarn(y: Yarn | None) -> dict[str, Any]:
    if y is None:
        return {"position_embedding_type": "rope"}
    own = yarn_scale(y.factor, 1.0)
    mscale = 1.0 if y.attention_factor in (None, own) else (y.attention_factor - 1.0) / (own - 1.0)
    values = (y.factor, y.original_length, y.beta_fast, y.beta_slow, mscale, 0.0, y.round_to_int, True)
    return {"position_embedding_type": "yarn", **dict(zip(YARN_FIELDS, values, strict=True))}


def _check_writable(c: NCPConfig) -> None:
    """The released graph, as a table of what its settings must be."""
    s, concept, routing = c.backbone, c.concept, c.routing
    rules = {
        "backbone.kv_heads": (s.kv, s.heads), "concept.norm": (concept.norm, "layernorm"),
        "concept.fusion": (concept.fusion, "normed_add"), "concept.reinject": (concept.reinject, True),
        "concept.zero_prefix": (concept.zero_prefix, "layernorm_bias"),
        "routing.irc_encoder": (routing.irc_encoder, "signed"), "routing.irc_concept": (routing.irc_concept, "signed"),
        "routing.irc_decoder": (routing.irc_decoder, "softmax"), "routing.irc_input": (routing.irc_input, "output"),
        "routing.concept_from_encoder": (routing.concept_from_encoder, True),
        "routing.decoder_from_encoder": (routing.decoder_from_encoder, True),
        "routing.decoder_from_concept": (routing.decoder_from_concept, True),
    }  # fmt: skip
    lines = [f"{name} is {ours!r}, the format has {wanted!r} alone" for name, (ours, wanted) in rules.items()
             if ours != wanted]  # fmt: skip
    if s.yarn and s.yarn.factor <= 1 and s.yarn.attention_factor not in (None, 1.0):
        lines.append(
            f"backbone.yarn.attention_factor is {s.yarn.attention_factor}, at factor 1 the format has 1.0 alone"
        )
    if concept.window not in (s.window, None):
        lines.append(
            f"concept.window is {concept.window}, the format has backbone.window = {s.window} or full attention"
        )
    if lines:
        raise ConfigError("this model is not the released graph, so no published format can hold it:\n  "
                          + "\n  ".join(lines))  # fmt: skip
