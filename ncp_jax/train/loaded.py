"""A trained run as others use it: to sample, to evaluate, to look inside."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ncp_jax.checkpoint.leaves import flatten, unflatten_like
from ncp_jax.checkpoint.store import CheckpointStore
from ncp_jax.config import ConfigError, from_dict
from ncp_jax.data.tokenizer import Tokenizer
from ncp_jax.parallel.rules import unboxed
from ncp_jax.train.families import build_task
from ncp_jax.train.run_config import RunConfig
from ncp_jax.train.rundir import read_json
from ncp_jax.train.start import choose_step, load_frozen
from ncp_jax.train.step import abstract_params
from ncp_jax.train.task import Task


class LoadedRun(NamedTuple):
    """A trained run, ready to use: its config, Task, parameters and tokenizer."""

    config: RunConfig
    task: Task
    params: Any
    frozen: Any
    tokenizer: Tokenizer
    step: int


def load_run(directory: str | Path, step: str | int = "best", task: Task | None = None) -> LoadedRun:
    """Config, parameters and tokenizer of a run, on one device, computing in float32.

    Args:
        step: best (the newest where none is marked), latest, or a number.
        task: by default the family of the run's config.
    Raises ConfigError for a directory that is no run or has no such checkpoint, CheckpointError for a damaged one.
    """
    directory = Path(directory)
    stored = read_json(directory / "config.json")
    if stored is None:
        raise ConfigError(f"{directory} has no config.json; is it a run directory made by 'ncp-jax train'?")
    config = from_dict(RunConfig, stored["config"])
    store = CheckpointStore(f"{directory}/checkpoints")
    number = choose_step(store, step, directory)
    task = task or build_task(config.model, config.data.sequence)
    params, frozen = (unboxed(tree) for tree in abstract_params(task))
    params = _in_stored_dtype(params, store.abstract(number)["train"]["params"])
    restored = store.restore_subtree(number, ["train/params"], {"train": {"params": params}})
    frozen, tokenizer = load_frozen(directory / "frozen", frozen), _tokenizer(directory, stored["eos"])
    return LoadedRun(config, task, restored["train"]["params"], frozen, tokenizer, number)


def _in_stored_dtype(params: Any, stored: Any) -> Any:
    """An imported run may hold bfloat16 parameters; training holds float32. Names and shapes are compared later."""
    found = flatten(stored)
    kinds = {
        name: jax.ShapeDtypeStruct(leaf.shape, found[name].dtype if name in found else leaf.dtype)
        for name, leaf in flatten(params).items()
    }
    return unflatten_like(params, kinds)


def _tokenizer(directory: Path, eos: int) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not file.exists():
        raise ConfigError(
            f"{directory} has no tokenizer.json: the store that it was trained on had none beside it; copy it there"
        )
    content = file.read_bytes()
    added = {token["id"]: token["content"] for token in json.loads(content).get("added_tokens", [])}
    return Tokenizer(content, eos=added.get(eos), origin=str(file))
