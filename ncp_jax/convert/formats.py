"""Formats: the published forms of our models, each a config.json and a name map.

ncp_olmo3         NCP-ArchPreview as released: 842 tensors           NCPOlmo3ForCausalLM
native            the same model as its training code saves it: 722  ConceptLMV22VQForCausalLM
olmo3             OLMo-3, for transformers                           Olmo3ForCausalLM
calm_autoencoder  the autoencoder of CALM                            Autoencoder
calm              CALM with its frozen autoencoder                   Energy-, Flow-, DiffusionTransformer
llama             CALM's baseline, for transformers                  LlamaForCausalLM
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ncp_jax.checkpoint.hf_calm_names import AutoencoderSizes, CalmSizes, autoencoder_map, calm_map, llama_map
from ncp_jax.checkpoint.hf_names import BlockSizes, NameMap
from ncp_jax.checkpoint.hf_ncp_names import NCPSizes, native_map, ncp_olmo3_map, olmo3_map
from ncp_jax.config import ConfigError
from ncp_jax.convert import calm_config, llama_config, ncp_fields
from ncp_jax.convert.fields import REQUIRED, Fields
from ncp_jax.convert.ncp_config import read_ncp, write_ncp
from ncp_jax.convert.olmo3_config import IDENTITY as OLMO3_IDENTITY
from ncp_jax.convert.olmo3_config import read_olmo3, write_olmo3
from ncp_jax.models.calm.config import AutoencoderConfig, CalmConfig
from ncp_jax.models.llama import LlamaConfig
from ncp_jax.models.ncp.config import NCPConfig
from ncp_jax.models.olmo3 import Olmo3Config
from ncp_jax.nn.backbone import Backbone
from ncp_jax.nn.llama_block import LlamaBackbone

Model = NCPConfig | Olmo3Config | AutoencoderConfig | CalmConfig | LlamaConfig
FORMATS = ("ncp_olmo3", "native", "olmo3", "calm_autoencoder", "calm", "llama")
OF_KIND = {  # formats of each family, the released one first; a CALM run can export its frozen autoencoder alone
    "ncp": ("ncp_olmo3", "native"), "olmo3": ("olmo3",), "calm_autoencoder": ("calm_autoencoder",),
    "calm": ("calm", "calm_autoencoder"), "llama": ("llama",),
}  # fmt: skip
READERS: Mapping[str, Callable[[Fields], Model]] = {
    "ncp_olmo3": read_ncp, "native": read_ncp, "olmo3": read_olmo3, "llama": llama_config.read_llama,
}  # fmt: skip
IDENTITIES = {**ncp_fields.IDENTITY, "olmo3": OLMO3_IDENTITY, "llama": llama_config.IDENTITY}
# Their architecture identifies the CALM family: transformers leaves model_type out of what it saves.
ARCHITECTURES = {calm_config.AUTOENCODER: "calm_autoencoder", **dict.fromkeys(calm_config.HEADS.values(), "calm")}
SIDE_FILE = "training_config.yaml"  # some native exports keep their concept fields here: name: {value: ...}
FUSED = "linear_qkv.weight"  # only the native names have it


class SpecialIds(NamedTuple):
    """Ids of a model's special tokens; None where it has none. The first of `eos` ends a document."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None


class Published(NamedTuple):
    """What a published config.json says."""

    model: Model
    format: str
    ids: SpecialIds
    positions: int  # longest sequence, in tokens


def read_config(folder: str | os.PathLike, ignore: Iterable[str] = ()) -> Published:
    """Read config.json, and what stands beside it. Raises ConfigError with everything that is wrong.

    ignore: unknown fields that the caller vouches for. For a CALM language model the tensors' headers are read, too,
    which may raise HFError.
    """
    folder = Path(folder)
    values = _read_json(folder / "config.json")
    if values is None:
        raise ConfigError(f"{folder} has no config.json; give the folder of a published checkpoint")
    format = _identify(folder, values)
    values, problems = _with_side_file(folder, values) if format in ncp_fields.IDENTITY else (values, [])
    fields = Fields(values, str(folder / "config.json"))
    fields.problems += problems
    fields.ignore(ignore)
    limits = [fields.integer(name, default=None) for name in ("max_sequence_length", "max_position_embeddings")]
    fallback = calm_config.POSITIONS if format in ARCHITECTURES.values() else REQUIRED
    positions = limits[0] or limits[1] or fields.integer("max_position_embeddings", default=fallback)
    ids = _special_ids(fields, _read_json(folder / "generation_config.json") or {})
    model = _read_model(folder, format, fields, ids)
    return Published(model, format, ids, positions * (model.chunk if format == "calm" else 1))


def write_config(model: Model, format: str, ids: SpecialIds, positions: int, dtype: str) -> dict[str, Any]:
    """config.json of a model. Raises ConfigError for a model that the format cannot hold."""
    check_format(model, format)
    match model:
        case NCPConfig():
            fields = write_ncp(model, format, positions)
        case Olmo3Config():
            fields = write_olmo3(model, positions)
        case LlamaConfig():
            fields = llama_config.write_llama(model, positions)
        case AutoencoderConfig():
            fields, ids = calm_config.write_autoencoder(model, positions), ids._replace(pad=model.pad)
        case CalmConfig():
            fields, ids = calm_config.write_calm(model, positions), ids._replace(pad=model.autoencoder.pad)
    return fields | token_fields(ids) | {"torch_dtype": dtype}


def read_ids(folder: str | Path) -> SpecialIds:
    """Special tokens of a published config.json alone."""
    fields = Fields(_read_json(Path(folder) / "config.json") or {}, str(Path(folder) / "config.json"))
    return _special_ids(fields, _read_json(Path(folder) / "generation_config.json") or {})


def token_fields(ids: SpecialIds) -> dict[str, Any]:
    """The special tokens, written out: absent ones would get the defaults of a class."""
    eos: Any = ids.eos[0] if len(ids.eos) == 1 else list(ids.eos) or None
    return {"bos_token_id": ids.bos, "eos_token_id": eos, "pad_token_id": ids.pad}


def check_format(model: Model, format: str) -> None:
    """Raise ConfigError for a format of another family."""
    fitting = formats_of(model)
    if format not in fitting:
        raise ConfigError(f"format '{format}' cannot hold a model of kind '{model.kind}'; use {' or '.join(fitting)}")


def formats_of(model: Any) -> tuple[str, ...]:
    """Formats of a model's family, the released one first. Raises ConfigError for a family that has none."""
    if model.kind not in OF_KIND:
        raise ConfigError(f"a model of kind '{model.kind}' has no published format here; {' and '.join(OF_KIND)} have")
    return OF_KIND[model.kind]


def left_out(model: Model) -> tuple[str, ...]:
    """Settings of its training that an export does not keep, as `name: ours -> what a reader will assume`."""
    return calm_config.left_out(model) if isinstance(model, AutoencoderConfig | CalmConfig) else ()


def name_map(model: Model, format: str) -> NameMap:
    """The tensors of a model in a format."""
    match model:
        case AutoencoderConfig():
            return autoencoder_map(_autoencoder_sizes(model))
        case CalmConfig():
            noise = model.head.noise if model.head.kind == "energy" else 0
            return calm_map(
                CalmSizes(
                    _block_sizes(model.backbone), model.layers, _autoencoder_sizes(model.autoencoder), model.head.kind,
                    model.head.blocks, noise,
                )
            )  # fmt: skip
        case LlamaConfig():
            return llama_map(_block_sizes(model.backbone), model.vocab, model.layers)
        case Olmo3Config():
            return olmo3_map(_block_sizes(model.backbone), model.vocab, model.layers)
        case NCPConfig():
            sizes = NCPSizes(
                _block_sizes(model.backbone), model.vocab, model.encoder_layers, model.concept_layers,
                model.decoder_layers, model.concept.segments, model.concept.codes,
            )  # fmt: skip
            return native_map(sizes) if format == "native" else ncp_olmo3_map(sizes)


def stored_format(published: Published, names: Iterable[str]) -> str:
    """Format of the tensors, which tell it more surely than the config does: wrappers mix the two (official loader)."""
    if published.format not in ncp_fields.IDENTITY:
        return published.format
    return "native" if any(name.endswith(FUSED) for name in names) else "ncp_olmo3"


def _identify(folder: Path, values: Mapping[str, Any]) -> str:
    architectures, kind = values.get("architectures"), values.get("model_type")
    listed = architectures if isinstance(architectures, list) else []
    for format, identity in IDENTITIES.items():
        if kind == identity["model_type"] and identity["architectures"][0] in listed:
            return format
    calm = {ARCHITECTURES[name] for name in listed if name in ARCHITECTURES}
    if len(calm) == 1:
        return calm.pop()
    if not listed and kind in calm_config.HEADS:
        return "calm"
    known = "; ".join(f"{identity['model_type']} with {identity['architectures']}" for identity in IDENTITIES.values())
    raise ConfigError(
        f"{folder}/config.json is of model_type {kind!r} with architectures {architectures!r}; known are: {known}; "
        f"of any model_type: {', '.join(ARCHITECTURES)}"
    )


def _read_model(folder: Path, format: str, fields: Fields, ids: SpecialIds) -> Model:
    if format == "calm_autoencoder":
        return calm_config.read_autoencoder(fields, ids.pad)
    if format == "calm":
        return calm_config.read_calm(fields, ids.pad, calm_config.stored_shape(folder))
    return READERS[format](fields)


def _block_sizes(s: Backbone | LlamaBackbone) -> BlockSizes:
    return BlockSizes(s.width, s.heads, s.kv, s.ffn, isinstance(s, Backbone) and s.qk_norm == "full")


def _autoencoder_sizes(c: AutoencoderConfig) -> AutoencoderSizes:
    return AutoencoderSizes(c.vocab, c.chunk, c.width, c.ffn, c.latent, c.encoder_layers, c.decoder_layers)


def _with_side_file(folder: Path, values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(config.json with the fields that it lacks from the side file, where both disagree)."""
    file = folder / SIDE_FILE
    if not file.exists():
        return values, []
    try:
        document = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML ({' '.join(str(error).split())}); fetch it again") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{file} holds no fields; it should read 'name: {{value: ...}}'")
    side = {
        name: entry["value"] for name, entry in document.items()
        if isinstance(entry, dict) and "value" in entry and ncp_fields.SIDE_FIELDS.search(str(name))
    }  # fmt: skip
    problems = [
        f"{name} is {values[name]!r} here and {value!r} in {SIDE_FILE}"
        for name, value in side.items()
        if values.get(name) not in (None, value) and value is not None
    ]
    return side | {name: value for name, value in values.items() if value is not None or name not in side}, problems


def _special_ids(fields: Fields, generation: Mapping[str, Any]) -> SpecialIds:
    found = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = fields.raw(name, default=generation.get(name))
        ids = tuple(value) if isinstance(value, list) else () if value is None else (value,)
        if not all(type(index) is int and index >= 0 for index in ids) or (len(ids) > 1 and name != "eos_token_id"):
            fields.wrong(name, value, "must be a token id, or null")
            ids = ()
        found[name] = ids
    bos, pad = (next(iter(found[name]), None) for name in ("bos_token_id", "pad_token_id"))
    return SpecialIds(bos, found["eos_token_id"], pad)


def _read_json(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        document = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON ({error}); fetch it again") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{file} holds no JSON object; fetch it again")
    return document
