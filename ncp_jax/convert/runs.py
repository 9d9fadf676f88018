"""Run directories from published checkpoints, and back.

An imported run is an ordinary one at step 0: it can be sampled, evaluated, and named by `init_from`. It was trained on
nothing that we have, so its config's data and schedule are placeholders; a run that continues it brings its own. The
autoencoder of a CALM language model comes out of the same files and goes where training would have put it: RUN/frozen.
"""

import dataclasses
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ncp_jax.checkpoint.hf_calm_names import FROZEN
from ncp_jax.checkpoint.hf_copies import check_copies
from ncp_jax.checkpoint.hf_files import TensorFiles
from ncp_jax.checkpoint.hf_io import Written, match
from ncp_jax.checkpoint.leaves import flatten, nest
from ncp_jax.checkpoint.store import CheckpointStore
from ncp_jax.config import ConfigError, from_dict, to_dict
from ncp_jax.convert import formats, tokenizers
from ncp_jax.convert.formats import Model, Published, SpecialIds
from ncp_jax.convert.pretrained import DTYPES, Export, load_published, save_batches
from ncp_jax.data.config import DataConfig, Source
from ncp_jax.data.tokenizer import Tokenizer
from ncp_jax.models.calm.config import AutoencoderConfig, CalmConfig
from ncp_jax.optim.config import OptimConfig
from ncp_jax.parallel.mesh import MeshConfig, make_mesh
from ncp_jax.train.run_config import RunConfig, TrainConfig
from ncp_jax.train.rundir import RunDirectory, RunDirectoryError, read_json, versions
from ncp_jax.train.start import FROZEN_STEP, Progress, choose_step, save_frozen

KEPT = "huggingface"  # RUN/huggingface: the imported config.json and the companions of the tokenizer
CONFIGS = ("config.json", "generation_config.json", formats.SIDE_FILE)
NO_DATA = "imported-weights"  # data.mixture of an imported run: a path that is none
BATCH_BYTES = 256 << 20  # an export restores leaves together up to this size; a larger one comes alone


@dataclasses.dataclass(frozen=True)
class Import:
    """How a published checkpoint becomes a run directory."""

    dtype: str = "float32"  # of the stored parameters; bfloat16 halves the space, float32 can be trained on
    tokenizer: str | None = None  # a tokenizer.json elsewhere; 'none': weights alone
    ignore: tuple[str, ...] = ()  # unknown config.json fields that the user vouches for
    allow_unused_ids: bool = False  # a vocabulary that is padded beyond the tokenizer's ids
    mesh: MeshConfig = MeshConfig()  # devices that hold the parameters on their way


class Imported(NamedTuple):
    """What an import did."""

    model: Model
    format: str
    tensors: int
    parameters: int


def import_run(folder: str | Path, run: str | Path, how: Import = Import()) -> Imported:
    """Make a run directory, with one checkpoint at step 0, from a published checkpoint.

    Raises ConfigError for a config, a tokenizer or a directory that cannot be used, CheckpointError for bad tensors.
    """
    if how.dtype not in DTYPES:
        raise ConfigError(f"dtype '{how.dtype}' is not one of {', '.join(DTYPES)}")
    folder = Path(folder)
    published = formats.read_config(folder, how.ignore)
    tokenizer = tokenizers.read_tokenizer(folder, published.model, published.ids, how.tokenizer, how.allow_unused_ids)
    eos = _eos(published, tokenizer)
    directory = RunDirectory(run, writes=jax.process_index() == 0)
    _check_empty(directory.path)
    with directory.locked():
        files = TensorFiles(folder)
        format = formats.stored_format(published, files.tensors)
        names = formats.name_map(published.model, format)
        params = load_published(folder, published, _mesh(how.mesh), jnp.dtype(how.dtype)).params
        frozen = params.pop(FROZEN) if isinstance(published.model, CalmConfig) else None
        config = placeholder_config(directory.path.name, published)
        progress = Progress(frozen=save_frozen(directory.frozen, frozen, config))
        meta = {"config": to_dict(config), "progress": dataclasses.asdict(progress), "versions": versions()}
        with CheckpointStore(str(directory.checkpoints), asynchronous=False) as store:
            store.save(0, {"train": {"params": params}}, meta | {"imported": {"format": format, "from": folder.name}})
        _keep(folder, directory.path / KEPT)
        directory.write_config(config, tokenizer.content if tokenizer else None, eos)
    return Imported(published.model, format, len(names.shapes), names.parameters)


def export_run(
    run: str | Path, folder: str | Path, format: str | None = None, dtype: str = "bfloat16", step: str | int = "best"
) -> Written:
    """Write a run's parameters as a published checkpoint.

    step: best (the newest where none is marked), latest, or a number.
    Raises ConfigError for a directory that is no run or a model that the format cannot hold, CheckpointError for a
    checkpoint that cannot be read or a disk that refuses.
    """
    run = Path(run)
    if jax.process_count() > 1:
        raise ConfigError(f"an export runs in one process, here are {jax.process_count()}; run it on one host")
    config, eos = _read_run(run)
    store = CheckpointStore(f"{run}/checkpoints")
    ids, files = _tokenizer_of(run, config, eos)
    how = Export(format, dtype, ids, config.data.sequence, files)
    return save_batches(folder, config.model, _parameters(run, store, choose_step(store, step, run), how, config), how)


def placeholder_config(name: str, published: Published) -> RunConfig:
    """The config of a run that was never trained here: its model is real, its data and schedule are not."""
    chunk = published.model.chunk
    data = DataConfig(
        mixture=(Source(NO_DATA),), sequence=max(published.positions // chunk, 1) * chunk, packing="concat"
    )
    return RunConfig(
        name=name, model=published.model, data=data, optim=OptimConfig(), train=TrainConfig(batch=1, steps=1)
    )


def describe(folder: str | Path, ignore: Iterable[str] = ()) -> list[str]:
    """What a published checkpoint or a run directory holds, as lines. Raises like import_run and export_run."""
    folder = Path(folder)
    return _describe_run(folder) if (folder / "checkpoints").is_dir() else _describe_published(folder, ignore)


def _describe_run(run: Path) -> list[str]:
    model = _read_run(run)[0].model
    fitting = formats.formats_of(model)
    steps = CheckpointStore(f"{run}/checkpoints").steps()
    try:
        formats.write_config(model, fitting[0], SpecialIds(), 1, DTYPES[0])
        exports = f"exports as: {', '.join(fitting)}"
    except ConfigError as error:
        exports = f"exports as nothing: {error}"
    return [
        f"run directory: {model.kind}, vocabulary {model.vocab:,}, width {_width(model):,}",
        f"checkpoints: {', '.join(map(str, steps)) or 'none'}",
        exports,
    ]


def _describe_published(folder: Path, ignore: Iterable[str]) -> list[str]:
    published, files = formats.read_config(folder, ignore), TensorFiles(folder)
    format = formats.stored_format(published, files.tensors)
    names = formats.name_map(published.model, format)
    check_copies(names, files, match(names, files))
    dtypes = sorted({tensor.dtype.name for tensor in files.tensors.values()})
    shards = {tensor.file for tensor in files.tensors.values()}
    size = sum(tensor.bytes for tensor in files.tensors.values())
    return [
        f"{format}: {len(names.shapes)} tensors, {names.parameters:,} parameters, all names and shapes as expected",
        f"{size / 1e9:.2f} GB of {', '.join(dtypes)} in {len(shards)} file(s)",
        f"vocabulary {published.model.vocab:,}, special tokens {published.ids._asdict()}",
    ]


def _width(model: Model) -> int:
    return model.width if isinstance(model, AutoencoderConfig) else model.backbone.width


def _eos(published: Published, tokenizer: Tokenizer | None) -> int:
    if tokenizer is not None:
        return tokenizer.eos
    if not published.ids.eos:
        raise ConfigError("neither config.json nor a tokenizer says which id ends a text; give --tokenizer FILE")
    return published.ids.eos[0]


def _check_empty(path: Path) -> None:
    used = [name for name in ("config.json", "checkpoints", "frozen", "metrics.jsonl") if (path / name).exists()]
    if used:
        raise RunDirectoryError(f"{path} holds {', '.join(used)} already; choose another run directory, or remove it")


def _mesh(config: MeshConfig) -> Mesh | None:
    return make_mesh(config) if jax.device_count() > 1 else None


def _keep(folder: Path, kept: Path) -> None:
    if jax.process_index() == 0:
        kept.mkdir(parents=True, exist_ok=True)
        for name in (*CONFIGS, *tokenizers.COMPANIONS):
            if (folder / name).exists():
                shutil.copyfile(folder / name, kept / name)


def _read_run(run: Path) -> tuple[RunConfig, int]:
    stored = read_json(run / "config.json")
    if stored is None:
        raise ConfigError(f"{run} has no config.json; is it a run directory, of 'ncp-jax train' or 'convert import'?")
    return from_dict(RunConfig, stored["config"]), stored["eos"]


def _tokenizer_of(run: Path, config: RunConfig, eos: int) -> tuple[SpecialIds, dict[str, bytes]]:
    """(special tokens, tokenizer files by name) of a run; the files are empty if it has no tokenizer."""
    kept = run / KEPT
    ids = formats.read_ids(kept) if (kept / "config.json").exists() else None
    tokenizer = tokenizers.of_run(run, eos)
    if tokenizer is None:
        return ids or SpecialIds(eos=(eos,)), {}
    tokenizers.check_size(tokenizer, config.model, allow_unused_ids=True)
    ids = ids or tokenizers.own_ids(tokenizer)
    files = tokenizers.companions(kept) or tokenizers.own_companions(tokenizer, ids, config.data.sequence)
    return ids, {tokenizers.FILE: tokenizer.content, **files}


def _parameters(
    run: Path, store: CheckpointStore, step: int, how: Export, config: RunConfig
) -> Iterator[Mapping[str, Any]]:
    """Leaves of a run, a few at a time: those that were trained, if the format has them, then the frozen ones."""
    if not isinstance(config.model, CalmConfig):
        yield from _batches(store, step, "train/params/")
        return
    if how.format != "calm_autoencoder":
        yield from _batches(store, step, "train/params/")
    for batch in _batches(CheckpointStore(str(run / "frozen")), FROZEN_STEP, ""):
        yield {f"{FROZEN}/{leaf}": array for leaf, array in batch.items()}


def _batches(store: CheckpointStore, step: int, root: str) -> Iterator[Mapping[str, Any]]:
    """The leaves of a checkpoint whose names begin with `root`, which is cut off."""
    group: dict[str, Any] = {}
    for name, abstract in flatten(store.abstract(step)).items():
        if not name.startswith(root):
            continue
        if group and sum(_bytes(other) for other in group.values()) + _bytes(abstract) > BATCH_BYTES:
            yield _restored(store, step, group, root)
            group = {}
        group[name] = abstract
    yield _restored(store, step, group, root)


def _restored(store: CheckpointStore, step: int, group: Mapping[str, Any], root: str) -> Mapping[str, Any]:
    leaves = flatten(store.restore_subtree(step, list(group), nest(group)))
    return {name.removeprefix(root): leaf for name, leaf in leaves.items()}


def _bytes(abstract: Any) -> int:
    return abstract.size * abstract.dtype.itemsize
