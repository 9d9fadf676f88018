"""Golden files of the official computations: their configs, and their weights in our names and as published folders."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from ncp_jax.checkpoint.hf_names import NameMap
from ncp_jax.checkpoint.leaves import nest
from ncp_jax.convert.formats import name_map
from ncp_jax.convert.ncp_fields import PINNED
from ncp_jax.models.ncp.config import Concept, NCPConfig
from ncp_jax.models.olmo3 import Olmo3Config
from ncp_jax.nn.backbone import Backbone

GOLDEN = Path(__file__).parent / "golden"
MIX = {"raw_logits": "raw_logits", "softmax": "softmax", "hard_top1": "hard"}


def load(name: str):
    return np.load(GOLDEN / f"{name}.npz")


def tensors(golden) -> dict[str, np.ndarray]:
    return {name.removeprefix("w/"): golden[name] for name in golden.files if name.startswith("w/")}


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


def ncp_params(get, c: NCPConfig, format: str = "ncp_olmo3") -> dict:
    """Our tree from the official names; `get(name)` returns a tensor, traced or not."""
    return tree(name_map(c, format), get)


def olmo3(golden) -> tuple[Olmo3Config, dict]:
    """Config and parameters of the transformers golden."""
    f = config_fields(golden)
    backbone = Backbone(
        width=f["hidden_size"], heads=f["num_attention_heads"], kv_heads=f["num_key_value_heads"],
        ffn=f["intermediate_size"], window=f["sliding_window"], rope_theta=f["rope_theta"], eps=f["rms_norm_eps"],
    )  # fmt: skip
    config = Olmo3Config(vocab=f["vocab_size"], layers=f["num_hidden_layers"], backbone=backbone)
    return config, tree(name_map(config, "olmo3"), tensors(golden).__getitem__)


def publish(folder: Path, golden, format: str, shards: int = 2) -> Path:
    """A golden's weights as the folder that its authors would publish."""
    folder.mkdir(parents=True, exist_ok=True)
    f = config_fields(golden)
    fields = f | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(fields if format == "olmo3" else ncp_fields(f, format)))
    write_shards(folder, tensors(golden), shards)
    return folder


def write_shards(folder: Path, named: dict[str, np.ndarray], shards: int = 2) -> None:
    """Safetensors files and their index, by the official package."""
    names, weight_map = sorted(named), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[number::shards]
        save_file({name: np.array(named[name], order="C") for name in mine}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def ncp_fields(f: dict, format: str = "ncp_olmo3") -> dict:
    """config.json of a golden of the released graph."""
    identity = {
        "ncp_olmo3": ("NCPOlmo3ForCausalLM", "ncp_olmo3", "huggingface_state_dict"),
        "native": ("ConceptLMV22VQForCausalLM", "conceptlm_v22_vq", "native_megatron_state_dict"),
    }[format]
    return PINNED | {
        "architectures": [identity[0]], "model_type": identity[1], "weight_key_format": identity[2],
        "hidden_size": f["hidden"], "num_layers": f["enc"] + f["dec"], "num_attention_heads": f["heads"],
        "num_query_groups": f["heads"], "ffn_hidden_size": f["ffn"], "vocab_size": f["vocab"],
        "max_sequence_length": 64, "layernorm_epsilon": f["eps"], "qk_norm_mode": f["qk_mode"],
        "position_embedding_type": "rope", "rotary_base": f["theta"], "rotary_percent": f["rotary_percent"],
        "rotary_interleaved": False, "window_size": [f["window"], 0], "window_attn_skip_freq": f["skip"],
        "conceptlm_hlm_attention_mode": f["hlm_mode"], "conceptlm_hlm_ffn_hidden_size": None,
        "conceptlm_encoder_layers": f["enc"], "conceptlm_special_layers": f["hlm"],
        "conceptlm_decoder_layers": f["dec"], "conceptlm_chunk_size": f["k"], "conceptlm_shift_feature": f["shift"],
        "conceptlm_v22_vq_codebook_size": f["book_size"], "conceptlm_v22_vq_num_codebooks": f["n_books"],
        "conceptlm_v22_vq_merge_mode": f["merge"],
    }  # fmt: skip


def native_tensors(named: dict[str, np.ndarray], heads: int) -> dict[str, np.ndarray]:
    """Released names -> native names, written independently of the importer's map: rows fused by hand."""
    renamed = {
        "embed_tokens": "embedding.word_embeddings", "lm_head": "output_layer",
        "self_attn.o_proj": "self_attention.linear_proj",
        "self_attn.q_norm": "self_attention.q_layernorm", "self_attn.k_norm": "self_attention.k_layernorm",
        "mlp.down_proj": "mlp.linear_fc2", "decoder.norm": "decoder.final_layernorm",
        "hlm_block.norm": "hlm_block.final_layernorm",
    }  # fmt: skip
    native = {}
    for name, value in named.items():
        new = name.removeprefix("model.")
        if "k_proj" in name or "v_proj" in name or "up_proj" in name:
            continue
        if "q_proj" in name:
            per_head = [np.split(named[name.replace("q_proj", f"{part}_proj")], heads) for part in "qkv"]
            value = np.concatenate([rows for head in zip(*per_head, strict=True) for rows in head])
            new = new.replace("self_attn.q_proj", "self_attention.linear_qkv")
        if "gate_proj" in name:
            value, new = (
                np.concatenate([value, named[name.replace("gate", "up")]]),
                new.replace("gate_proj", "linear_fc1"),
            )
        for theirs, other in renamed.items():
            new = new.replace(theirs, other)
        native[new] = value
    return native


def tree(names: NameMap, get) -> dict:
    """Our tree by the importer's own map, without files: tensors may be traced. `get(name)` returns a tensor."""
    slices: dict[str, dict] = {}
    for tensor in names.tensors:
        for part in tensor.parts:
            slices.setdefault(part.leaf, {})[part.at] = part.layout.ours(get(tensor.name))
    return nest(
        {
            leaf: parts[None] if None in parts else jnp.stack([parts[i] for i in range(len(parts))])
            for leaf, parts in slices.items()
        }
    )
