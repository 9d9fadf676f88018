"""The goldens of the CALM family as the folders that their authors would publish."""

import json
from pathlib import Path

import numpy as np
from golden_files import config_fields, load, tensors
from safetensors.numpy import save_file
from torch_files import write_torch

from ncp_jax.checkpoint.hf_calm_names import FROZEN_ROOT
from ncp_jax.convert.calm_config import HEADS
from ncp_jax.convert.llama_config import IDENTITY

NAMES = ("ae_k4", "ae_k2", "energy_k4", "energy_k4_gqa_b125", "flow", "diffusion", "ar_v67")


def published_tensors(name: str) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint that a golden was recorded from, duplicates included."""
    named = tensors(load(f"calm_{name}"))
    if name in ("flow", "diffusion"):  # recorded without their autoencoder, which is that of the k4 files
        frozen = tensors(load("calm_energy_k4")).items()
        named |= {other: value for other, value in frozen if other.startswith(FROZEN_ROOT)}
    heads = {n.replace("mlp_generator", "generative_head"): v for n, v in named.items() if "mlp_generator" in n}
    return named | heads


def published_fields(name: str) -> dict:
    """config.json as transformers 4 saves it: without model_type for all but LLaMA."""
    kind = name.partition("_")[0]
    architectures = {"ae": "Autoencoder", "ar": "LlamaForCausalLM"} | HEADS
    extra = IDENTITY if kind == "ar" else {"architectures": [architectures[kind]]}
    return config_fields(load(f"calm_{name}")) | {"max_position_embeddings": 2048, "torch_dtype": "float32"} | extra


def publish_calm(folder: Path, name: str, torch: bool = True, **changes: np.ndarray | None) -> Path:
    """The folder that its authors would publish; tensors changed, or left out where None."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(published_fields(name)))
    named = {n: value for n, value in (published_tensors(name) | changes).items() if value is not None}
    if torch:
        write_torch(folder / "pytorch_model.bin", named)
    else:
        save_file({n: np.array(value, order="C") for n, value in named.items()}, folder / "model.safetensors")
    return folder
