"""Golden files of the official CALM modules: their configs and weights in our names, by the importer's own maps."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from golden_files import load, tree

from ncp_jax.checkpoint.hf_calm_names import FROZEN_ROOT
from ncp_jax.convert.calm_config import HEADS, AutoencoderShape, read_autoencoder, read_calm
from ncp_jax.convert.fields import Fields
from ncp_jax.convert.formats import name_map
from ncp_jax.convert.llama_config import read_llama
from ncp_jax.models.calm.chunks import Chunks
from ncp_jax.models.calm.config import AutoencoderConfig, CalmConfig
from ncp_jax.models.llama import LlamaConfig

ENERGY_FILES = ("k4", "k4_gqa_b125", "k2", "k3_v9", "k1_v5", "k8")


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


def autoencoder_config(f: dict, **changes) -> AutoencoderConfig:
    """The official loss counts pads."""
    return dataclasses.replace(read_autoencoder(Fields(f, "config_json"), f["pad_token_id"]), **changes)


def autoencoder_params(get: Tensors, c: AutoencoderConfig) -> dict:
    return tree(name_map(c, "calm_autoencoder"), get)


def calm_config(golden, kind: str = "energy", **changes) -> CalmConfig:
    """The language model of a file; its autoencoder as its own golden file says."""
    f = fields(golden)
    ae = fields(load(f"calm_{Path(f['ae_path']).name}"))
    shape = AutoencoderShape(
        ae["hidden_size"], ae["intermediate_size"], ae["num_encoder_layers"], ae["num_decoder_layers"]
    )
    identified = Fields(f | {"architectures": [HEADS[kind]]}, "config_json")
    return dataclasses.replace(read_calm(identified, f["pad_token_id"], shape), **changes)


def calm_params(get: Tensors, c: CalmConfig) -> dict:
    """Without the frozen autoencoder: files of the transport heads do not have it."""
    names = name_map(c, "calm")
    own = tuple(tensor for tensor in names.tensors if not tensor.name.startswith(FROZEN_ROOT))
    return tree(dataclasses.replace(names, tensors=own), get)


def llama(golden) -> tuple[LlamaConfig, dict]:
    config = read_llama(Fields(fields(golden), "config_json"))
    return config, tree(name_map(config, "llama"), Tensors(golden))
