"""The fields of the released NCP-ArchPreview's config.json, as tables.

Source: the contract of the released runtime (ncp-olmo-eval 0.1.1): what it demands, and with which value.
"""

import re
from typing import Any

IDENTITY: dict[str, dict[str, Any]] = {
    "ncp_olmo3": {
        "architectures": ["NCPOlmo3ForCausalLM"], "model_type": "ncp_olmo3",
        "auto_map": {"AutoModelForCausalLM": "modeling_ncp_olmo3.NCPOlmo3ForCausalLM"},
        "weight_key_format": "huggingface_state_dict",
    },
    "native": {
        "architectures": ["ConceptLMV22VQForCausalLM"], "model_type": "conceptlm_v22_vq",
        "weight_key_format": "native_megatron_state_dict",
    },
}  # fmt: skip
KEY_FORMATS = (
    "huggingface_state_dict", "hf_state_dict", "native_hf_state_dict", "ncp_olmo3_hf_state_dict",
    "native_megatron_state_dict",
)  # fmt: skip
# The one graph that is published: other values mean other tensors or other equations.
PINNED: dict[str, Any] = {
    "conceptlm_backbone": "olmo3", "qk_layernorm": True, "conceptlm_chunk_merge_method": "meanpooling",
    "conceptlm_layer_norm_option": "normed_add", "conceptlm_v21_dd_self_dd_mode": "dd",
    "conceptlm_v21_dd_encoder_self_dd": True, "conceptlm_v21_dd_encoder_self_dd_every_n_layers": 1,
    "conceptlm_v21_dd_encoder_self_dd_hidden_size": 0, "conceptlm_v21_dd_encoder_self_dd_use_layernorm": False,
    "conceptlm_v21_dd_concept_self_dd": True, "conceptlm_v21_dd_concept_self_dd_every_n_layers": 1,
    "conceptlm_v21_dd_concept_self_dd_hidden_size": 0, "conceptlm_v21_dd_concept_self_dd_use_layernorm": False,
    "conceptlm_v21_dd_two_route_add": True, "conceptlm_v21_dd_two_route_add_concept_source": "final",
    "conceptlm_v21_dd_two_route_add_enable_raw_concept_route": False,
    "conceptlm_v21_dd_two_route_add_enable_final_concept_route": True,
    "conceptlm_v21_dd_two_route_add_every_n_layers": 1, "conceptlm_v21_dd_two_route_add_decoder_hidden_size": 0,
    "conceptlm_v21_dd_two_route_add_concept_hidden_size": 0,
    "conceptlm_v21_dd_two_route_add_disable_decoder_dd": False,
    "conceptlm_v21_dd_two_route_add_decoder_use_layernorm": False,
    "conceptlm_v21_dd_two_route_add_decoder_use_softmax": True,
    "conceptlm_v21_dd_two_route_add_concept_use_layernorm": True,
    "conceptlm_v21_enable_concept_read_encoder": True, "conceptlm_v21_enable_decoder_read_encoder": True,
    "conceptlm_v21_enable_decoder_read_concept": True, "conceptlm_v21_residual_flow_route_hidden_size": 0,
    "conceptlm_v21_residual_flow_route_use_softmax": True, "conceptlm_v21_residual_flow_source_use_layernorm": True,
    "conceptlm_v21_residual_flow_shared_source_norm": True, "conceptlm_v21_final_read_concept_gate": True,
}  # fmt: skip
# Need not be there; if they are, they have these values.
PINNED_IF_PRESENT: dict[str, Any] = {
    "rotary_percent": 1.0, "rotary_interleaved": False, "tie_word_embeddings": False, "hidden_act": "silu",
    "normalization": "RMSNorm", "attention_bias": False, "add_bias_linear": False, "add_qkv_bias": False,
    "use_rope_scaling": False, "apply_layernorm_1p": False, "conceptlm_v22_vq_detach_hlm_target": True,
    "conceptlm_v21_concept_read_encoder_first_n": -1, "conceptlm_v21_decoder_read_encoder_first_n": -1,
}  # fmt: skip
# Of a new run's first values or of its losses, or read only under a pinned switch; nothing here depends on them.
UNUSED = (
    "conceptlm_v21_final_read_concept_gate_init_final", "conceptlm_v21_final_read_concept_gate_target",
    "conceptlm_v21_final_read_concept_gate_reg_weight", "conceptlm_hlm_loss_weight", "conceptlm_v22_vq_loss_weight",
    "rope_scaling_factor",
)  # fmt: skip
YARN_FIELDS = (
    "yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow",
    "yarn_mscale", "yarn_mscale_all_dim", "yarn_correction_range_round_to_int", "yarn_full_attn_layers_only",
)  # fmt: skip
MIX = {"raw_logits": "raw_logits", "softmax": "softmax", "hard_top1": "hard"}
OBJECTIVE = {"mse": "mse", "ce": "code_ce"}
QK_NORM = {"full_hidden": "full", "per_head": "per_head"}
# Of the hundreds of settings in a native export's side file, those that its config.json may lack.
SIDE_FIELDS = re.compile(
    r"^conceptlm_|rope|rotary|yarn|window|sliding|^position_embedding_type$|^qk_|^layernorm_epsilon$|^num_layers$"
    r"|^hidden_size$|^ffn_hidden_size$|^num_attention_heads$|^num_query_groups$|^kv_channels$|^vocab_size$"
    r"|^max_sequence_length$|^weight_key_format$"
)
