"""Golden files of the official computations: their configs and weights in our names."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from ncp_jax.models.ncp.config import Concept, NCPConfig
from ncp_jax.models.olmo3 import Olmo3Config
from ncp_jax.nn.backbone import Backbone

GOLDEN = Path(__file__).parent / "golden"
MIX = {"raw_logits": "raw_logits", "softmax": "softmax", "hard_top1": "hard"}


def load(name: str):
    return np.load(GOLDEN / f"{name}.npz")


def ncp_config(fields: dict, mix: str | None = None) -> NCPConfig:
    """The released graph at golden size. The files state an exclusive left bound where ours counts keys."""
    window = fields["window"] + int(fields["window_inclusive"])
    backbone = Backbone(
        width=fields["hidden"], heads=fields["heads"], ffn=fields["ffn"], window=window, full_every=fields["skip"],
        rope_theta=fields["theta"], eps=fields["eps"],
        qk_norm="per_head" if fields["qk_mode"] == "per_head" else "full",
    )  # fmt: skip
    concept = Concept(
        chunk=fields["k"], segments=fields["n_books"], codes=fields["book_size"], mix=mix or MIX[fields["merge"]],
        shift=fields["shift"], window=fields["window"] + 1,
    )  # fmt: skip
    return NCPConfig(
        vocab=fields["vocab"], encoder_layers=fields["enc"], concept_layers=fields["hlm"],
        decoder_layers=fields["dec"], backbone=backbone, concept=concept,
    )  # fmt: skip


def config_fields(golden) -> dict:
    return json.loads(str(golden["config_json"]))


def blocks(get, prefix: str, layers: int, s: Backbone) -> dict:
    """One tower's stacked weights from per-layer tensors stored [out, in]."""
    D, H, K, h = s.width, s.heads, s.kv, s.head_dim

    def stack(name, change):
        return jnp.stack([change(get(f"{prefix}.layers.{i}.{name}")) for i in range(layers)])

    def norm(heads):
        return lambda w: w.reshape(heads, h) if w.size == heads * h and s.qk_norm == "full" else w

    return {
        "wq": stack("self_attn.q_proj.weight", lambda w: w.T.reshape(D, H, h)),
        "wk": stack("self_attn.k_proj.weight", lambda w: w.T.reshape(D, K, h)),
        "wv": stack("self_attn.v_proj.weight", lambda w: w.T.reshape(D, K, h)),
        "wo": stack("self_attn.o_proj.weight", lambda w: w.T.reshape(H, h, D)),
        "q_norm": stack("self_attn.q_norm.weight", norm(H)),
        "k_norm": stack("self_attn.k_norm.weight", norm(K)),
        "attention_norm": stack("post_attention_layernorm.weight", lambda w: w),
        "w_gate": stack("mlp.gate_proj.weight", jnp.transpose),
        "w_up": stack("mlp.up_proj.weight", jnp.transpose),
        "w_down": stack("mlp.down_proj.weight", jnp.transpose),
        "mlp_norm": stack("post_feedforward_layernorm.weight", lambda w: w),
    }


def ncp_params(get, c: NCPConfig) -> dict:
    """Our tree from the official names; `get(name)` returns a tensor."""
    s, E, C, D = c.backbone, c.encoder_layers, c.concept_layers, c.decoder_layers

    def norm(name, **names):
        return {"scale": get(f"{name}.weight"), "bias": get(f"{name}.bias")}

    def irc(name):
        return {
            "static": get(f"{name}.static_a"),
            "w1": get(f"{name}.w1.weight").T,
            "w2": get(f"{name}.w2.weight").T,
        }

    def crc(name):
        return {
            "diagonal": get(f"{name}.residual_diag"),
            "w1": get(f"{name}.w1.weight").T,
            "w2": get(f"{name}.w2.weight").T,
        }

    def reinject(name):
        return {
            "norm_scale": get(f"{name}.concept_norm.weight"),
            "norm_bias": get(f"{name}.concept_norm.bias"),
            "diagonal": get(f"{name}.final_diag"),
        }

    head, S = "model.concept_predictor", range(c.concept.segments)
    encoder = {"blocks": blocks(get, "model.encoder", E, s)}
    encoder |= {f"irc_{i}": irc(f"model.dd_encoder_self_dd.depth_dds.{i}") for i in range(E)}
    concept = {
        "blocks": blocks(get, f"{head}.hlm_block", C, s),
        "final_norm": {"scale": get(f"{head}.hlm_block.norm.weight")},
        "heads": {
            "kernel": jnp.stack([get(f"{head}.prediction_heads.{i}.weight").T for i in S]),
            "bias": jnp.stack([get(f"{head}.prediction_heads.{i}.bias") for i in S]),
        },
        "codebook": {"codes": jnp.stack([get(f"model.concept_quantizer.codebook.{i}") for i in S])},
        "read_encoder_norm": norm(f"{head}.concept_read_encoder_shared_source_norm"),
    }
    concept |= {f"irc_{i}": irc(f"{head}.concept_self_dd.depth_dds.{i}") for i in range(C)}
    concept |= {f"read_encoder_{i}": crc(f"{head}.concept_read_encoder_routes.{i}") for i in range(C)}
    decoder = {
        "blocks": blocks(get, "model.decoder", D, s),
        "final_norm": {"scale": get("model.decoder.norm.weight")},
        "fusion_token_norm": norm("model.fusion_tok_norm"),
        "fusion_concept_norm": norm("model.fusion_hl_norm"),
        "fusion_scale": get("model.fusion_norm_alpha"),
        "gate_logits": get("model.final_read_concept_gate_logits"),
        "read_encoder_norm": norm("model.decoder_read_encoder_shared_source_norm"),
        "read_concept_norm": norm("model.decoder_read_concept_shared_source_norm"),
    }
    decoder |= {f"irc_{i}": irc(f"model.dd_two_route_add.decoder_dds.{i}") for i in range(D)}
    decoder |= {f"reinject_{i}": reinject(f"model.dd_two_route_add.concept_routes.{i}") for i in range(D)}
    decoder |= {f"read_encoder_{i}": crc(f"model.decoder_read_encoder_routes.{i}") for i in range(D)}
    decoder |= {f"read_concept_{i}": crc(f"model.decoder_read_concept_routes.{i}") for i in range(D)}
    return {
        "embed": {"table": get("model.embed_tokens.weight")},
        "head": {"kernel": get("lm_head.weight").T},
        "concept_norm": norm("model.concept_vq_input_norm"),
        "encoder": encoder,
        "concept": concept,
        "decoder": decoder,
    }


def olmo3(golden) -> tuple[Olmo3Config, dict]:
    """Config and parameters of the transformers golden."""
    f = config_fields(golden)

    def get(name):
        return golden[f"w/{name}"]

    backbone = Backbone(
        width=f["hidden_size"], heads=f["num_attention_heads"], kv_heads=f["num_key_value_heads"],
        ffn=f["intermediate_size"], window=f["sliding_window"], rope_theta=f["rope_theta"], eps=f["rms_norm_eps"],
    )  # fmt: skip
    params = {
        "embed": {"table": get("model.embed_tokens.weight")},
        "head": {"kernel": get("lm_head.weight").T},
        "blocks": blocks(get, "model", f["num_hidden_layers"], backbone),
        "final_norm": {"scale": get("model.norm.weight")},
    }
    return Olmo3Config(vocab=f["vocab_size"], layers=f["num_hidden_layers"], backbone=backbone), params


def native_get(tensors: dict, c: NCPConfig):
    """Official HF names out of native tensors: fused QKV rows are [head, (q, k, v), head size]."""
    s = c.backbone
    fused = {"q_proj": 0, "k_proj": 1, "v_proj": 2}
    plain = {"o_proj": "linear_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
    renamed = {
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "lm_head.weight": "output_layer.weight",
        "model.decoder.norm.weight": "decoder.final_layernorm.weight",
        "model.concept_predictor.hlm_block.norm.weight": "concept_predictor.hlm_block.final_layernorm.weight",
    }

    def get(name: str):
        native = renamed.get(name, name.removeprefix("model."))
        for part, index in fused.items():
            if f"self_attn.{part}" in native:
                qkv = tensors[native.replace(f"self_attn.{part}", "self_attention.linear_qkv")]
                return qkv.reshape(s.heads, 3, s.head_dim, s.width)[:, index].reshape(s.width, s.width)
        for part, other in plain.items():
            native = native.replace(f"self_attn.{part}", f"self_attention.{other}")
        if "mlp.down_proj" in native:
            return tensors[native.replace("down_proj", "linear_fc2")]
        for part, rows in {"gate_proj": slice(0, s.ffn), "up_proj": slice(s.ffn, None)}.items():
            if f"mlp.{part}" in native:
                return tensors[native.replace(part, "linear_fc1")][rows]
        return tensors[native]

    return get
