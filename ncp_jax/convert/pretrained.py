"""Published checkpoints in memory: load one onto devices, save parameters as one.

config, params = load_pretrained("NCP-ArchPreview")
logits = NCP(config).apply({"params": params}, tokens, method="logits")

The parameters of a CALM language model hold those of its frozen autoencoder, params["autoencoder"], always in float32:
that is how a run keeps them.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from ncp_jax.checkpoint.hf_calm_names import FROZEN
from ncp_jax.checkpoint.hf_files import TensorFiles
from ncp_jax.checkpoint.hf_io import Written, load_leaves, save_leaves
from ncp_jax.checkpoint.hf_tensor import HFError
from ncp_jax.checkpoint.hf_writer import SHARD_BYTES, TensorWriter
from ncp_jax.checkpoint.leaves import flatten, nest
from ncp_jax.config import ConfigError
from ncp_jax.convert import formats
from ncp_jax.convert.formats import Model, Published, SpecialIds
from ncp_jax.models.calm.config import CalmConfig
from ncp_jax.models.ncp.config import NCPConfig
from ncp_jax.models.olmo3 import Olmo3Config
from ncp_jax.parallel.rules import place, shardings, unboxed
from ncp_jax.train import step
from ncp_jax.train.families import build_task

DTYPES = ("bfloat16", "float32")


class Pretrained(NamedTuple):
    """A loaded checkpoint."""

    config: Model
    params: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Export:
    """How parameters become a published checkpoint."""

    format: str | None = None  # formats.FORMATS; None: the released one of the model's family
    dtype: str = "bfloat16"  # of every tensor, as released; or float32
    ids: SpecialIds = SpecialIds()
    positions: int = 8192  # longest sequence
    tokenizer: Mapping[str, bytes] = dataclasses.field(default_factory=dict)  # its files by name
    shard_bytes: int = SHARD_BYTES


def load_pretrained(
    folder: str | os.PathLike, mesh: Mesh | None = None, dtype: Any = jnp.float32, ignore: Iterable[str] = ()
) -> Pretrained:
    """A published checkpoint, tensor by tensor, straight onto devices.

    Args:
        mesh: devices to spread the parameters over, by the training rules; None: all on the first device.
        dtype: of the parameters; float32 is what training and our run directories use.
        ignore: unknown config.json fields that the caller vouches for.
    Raises ConfigError for a config.json that this model cannot follow, CheckpointError for tensors that are not its.
    """
    return load_published(folder, formats.read_config(folder, ignore), mesh, dtype)


def load_published(folder: str | os.PathLike, published: Published, mesh: Mesh | None, dtype: Any) -> Pretrained:
    """`load_pretrained` after its config.json was read."""
    files = TensorFiles(folder)
    names = formats.name_map(published.model, formats.stored_format(published, files.tensors))
    places = _places(published.model, mesh)
    frozen = f"{FROZEN}/" if isinstance(published.model, CalmConfig) else None
    dtypes = {leaf: jnp.float32 if frozen and leaf.startswith(frozen) else dtype for leaf in places}
    return Pretrained(published.model, nest(load_leaves(names, files, places, dtypes)))


def save_pretrained(folder: str | os.PathLike, config: Model, params: Any, how: Export = Export()) -> Written:
    """Write parameters (numpy or jax arrays, nested as the model has them) as a published checkpoint, whole or not.

    Raises ConfigError for a model that the format cannot hold, CheckpointError for parameters that are not the model's
    or a disk that refuses.
    """
    return save_batches(folder, config, ({leaf: array} for leaf, array in flatten(params).items()), how)


def save_batches(
    folder: str | os.PathLike, config: Model, batches: Iterable[Mapping[str, Any]], how: Export
) -> Written:
    """`save_pretrained` for leaves that come in batches, each dropped before the next is asked for."""
    format = how.format or formats.formats_of(config)[0]
    formats.check_format(config, format)
    if isinstance(config, CalmConfig) and format == "calm_autoencoder":
        config, batches = config.autoencoder, _frozen_alone(batches)
    if how.dtype not in DTYPES:
        raise ConfigError(f"dtype '{how.dtype}' is not one of {', '.join(DTYPES)}")
    _check_ids(config, how.ids)
    y = config.backbone.yarn if isinstance(config, NCPConfig | Olmo3Config) else None
    positions = int(y.factor * y.original_length) if y else how.positions  # YaRN's own length (transformers)
    documents = {
        "config.json": formats.write_config(config, format, how.ids, positions, how.dtype),
        "generation_config.json": formats.token_fields(how.ids),
    }
    names = formats.name_map(config, format)
    with _new_folder(Path(folder)) as new:
        written = save_leaves(names, TensorWriter(new, names.shapes, how.dtype, how.shard_bytes), batches)
        for name, document in documents.items():
            (new / name).write_text(json.dumps(document, indent=2) + "\n")
        for name, content in how.tokenizer.items():
            (new / name).write_bytes(content)
    return written._replace(left_out=formats.left_out(config))


def abstract_params(model: Model) -> Any:
    """Parameters as ShapeDtypeStructs that carry logical axis names."""
    trained, frozen = step.abstract_params(build_task(model, model.chunk))
    return trained if frozen is None else {**trained, FROZEN: frozen}


def _places(model: Model, mesh: Mesh | None) -> dict[str, Any]:
    """Leaf -> sharding."""
    boxed = abstract_params(model)
    if mesh is None:
        return dict.fromkeys(flatten(unboxed(boxed)), SingleDeviceSharding(jax.local_devices()[0]))
    return flatten(shardings(place(boxed, mesh)))


def _frozen_alone(batches: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The leaves of a frozen autoencoder, under its own names."""
    for batch in batches:
        root = f"{FROZEN}/"
        frozen = {leaf.removeprefix(root): array for leaf, array in batch.items() if leaf.startswith(root)}
        if frozen:
            yield frozen


def _check_ids(config: Model, ids: SpecialIds) -> None:
    for name, group in {"bos": (ids.bos,), "eos": ids.eos, "pad": (ids.pad,)}.items():
        for index in group:
            if index is not None and not 0 <= index < config.vocab:
                raise ConfigError(f"special token {name} has id {index}, the model has ids 0 to {config.vocab - 1}")


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` if all goes well, and vanishes if not."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HFError(f"{folder} exists and is not empty; choose another folder, or remove it")
    temporary = folder.parent / f".{folder.name}.part-{os.getpid()}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    except OSError as error:
        raise HFError(f"cannot write {folder}: {error.strerror}; free space or choose another place") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
