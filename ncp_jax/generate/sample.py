"""Sampling by full forward passes: the plain reference, one whole pass per token.

Shapes: T tokens so far, V vocabulary.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ncp_jax.checkpoint.store import CheckpointStore
from ncp_jax.config import ConfigError, from_dict
from ncp_jax.data.store import DataError
from ncp_jax.data.tokenizer import Tokenizer
from ncp_jax.ops.sampling import draw
from ncp_jax.parallel.rules import unboxed
from ncp_jax.train.families import build_task
from ncp_jax.train.run_config import RunConfig
from ncp_jax.train.rundir import read_json
from ncp_jax.train.step import abstract_params
from ncp_jax.train.task import Task

# Rows are padded to a multiple of this many tokens, so that a growing text compiles a handful of times.
BUCKET = 64


class LoadedRun(NamedTuple):
    """A trained run, ready to use: its config, Task, parameters and tokenizer."""

    config: RunConfig
    task: Task
    params: Any
    frozen: Any
    tokenizer: Tokenizer
    step: int


class Sampling(NamedTuple):
    """How tokens are drawn."""

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def check(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"temperature {self.temperature} is negative; 0 is greedy, 1 the model's own distribution")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top-k {self.top_k} keeps no token; use at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p {self.top_p} is not in (0, 1]")


def load_run(directory: str | Path, step: str | int = "best") -> LoadedRun:
    """Config, parameters and tokenizer of a run. `step`: best (or the newest if none is marked), latest, or a number."""
    stored = read_json(Path(directory) / "config.json")
    if stored is None:
        raise ConfigError(f"{directory} has no config.json; is it a run directory made by 'ncp-jax train'?")
    config = from_dict(RunConfig, stored["config"])
    checkpoints = CheckpointStore(f"{directory}/checkpoints")
    number = _choose(checkpoints, step, directory)
    task = build_task(config.model, config.data.sequence)
    params, frozen = (unboxed(tree) for tree in abstract_params(task))
    restored = checkpoints.restore_subtree(number, ["train/params"], {"train": {"params": params}})
    if frozen is not None:
        frozen = checkpoints.restore_subtree(number, ["frozen"], {"frozen": frozen})["frozen"]
    tokenizer = Tokenizer.load(f"{config.data.mixture[0].path}/tokenizer.json")
    return LoadedRun(config, task, restored["train"]["params"], frozen, tokenizer, number)


def sample(run: LoadedRun, prompt: str, tokens: int, how: Sampling = Sampling()) -> Iterator[str]:
    """Pieces of text as they are drawn, up to `tokens` tokens or the end-of-text token."""
    how.check()
    if tokens < 1:
        raise ConfigError(f"asked for {tokens} new tokens; ask for at least 1")
    ids = run.tokenizer.encode(prompt)
    if not ids:
        raise ConfigError("the prompt is empty; give at least one character to continue")
    if max(ids) >= run.task.vocab:
        raise DataError(f"prompt token {ids.index(max(ids))} has id {max(ids)}, the model has {run.task.vocab}")
    forward, key, shown = _next_logits(run), jax.random.key(how.seed), 0
    start = len(ids)
    for index in range(tokens):
        logits_V = forward(run.params, run.frozen, *_padded(ids))
        chosen = int(draw(logits_V[None], jax.random.fold_in(key, index), how.temperature, how.top_k, how.top_p)[0])
        if chosen == run.tokenizer.eos:
            break
        ids.append(chosen)
        text = run.tokenizer.decode(ids[start:])
        if not text.endswith("\ufffd"):  # a character is still being spelled
            yield text[shown:]
            shown = len(text)


def _next_logits(run: LoadedRun):
    assert run.task.forward is not None

    @jax.jit
    def next_logits(params, frozen, tokens_1T, last):
        return run.task.forward(params, frozen, tokens_1T)[0, last]

    return next_logits


def _padded(ids: list[int]) -> tuple[np.ndarray, jnp.ndarray]:
    """Causality keeps what follows the last token from mattering, so zeros may."""
    length = -(-len(ids) // BUCKET) * BUCKET
    return np.asarray([ids + [0] * (length - len(ids))], np.int32), jnp.asarray(len(ids) - 1)


def _choose(checkpoints: CheckpointStore, step: str | int, directory: str | Path) -> int:
    steps = checkpoints.steps()
    if not steps:
        raise ConfigError(f"{directory} has no checkpoint yet; train it first")
    if step == "latest":
        return steps[-1]
    if step == "best":
        return checkpoints.best_step() or steps[-1]
    try:
        number = int(step)
    except ValueError:
        raise ConfigError(f"step '{step}' is neither best, latest nor a number") from None
    if number not in steps:
        raise ConfigError(f"{directory} has no checkpoint of step {number}; it has {', '.join(map(str, steps))}")
    return number
