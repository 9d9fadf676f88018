"""The start of a process: its state comes from the run's newest checkpoint, from another run, or from a seed.

RUN/checkpoints holds the train state, step by step; RUN/frozen holds the frozen parameters, written once.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import optax

from ncp_jax.checkpoint.leaves import checksums, flatten
from ncp_jax.checkpoint.store import CheckpointError, CheckpointStore
from ncp_jax.config import ConfigError, to_dict
from ncp_jax.train.run_config import InitFrom, RunConfig
from ncp_jax.train.rundir import RunDirectory, check_same, versions
from ncp_jax.train.step import TrainState, init_state
from ncp_jax.train.task import Params, Task

FROZEN_STEP = 0  # the only one in RUN/frozen


@dataclass
class Progress:
    """What a resumed process must know besides the train state; stored with every checkpoint."""

    step: int = 0
    seconds: float = 0.0
    best: float | None = None  # of the Task's criterion
    best_step: int | None = None
    evaluation: dict = field(default_factory=dict)  # the newest
    evaluated_step: int | None = None
    frozen: str | None = None  # hash of the frozen parameters' values


class Start(NamedTuple):
    """Where a process begins, and in words where from."""

    state: TrainState
    frozen: Params
    progress: Progress
    origin: str


class Saves:
    """The checkpoints of one run: the train state as often as asked, what is frozen once."""

    def __init__(self, directory: RunDirectory, config: RunConfig):
        c = config.checkpoint
        self._directory, self._config = directory, config
        self.store = CheckpointStore(
            str(directory.checkpoints), keep=c.keep, asynchronous=c.asynchronous, best=config.evaluation.keep_best,
            timeout_seconds=c.timeout_seconds,
        )  # fmt: skip

    def check_source(self, task: Task) -> None:
        """Raise ConfigError if this run is to begin from a checkpoint that is not there."""
        if self.store.latest() is not None:
            return
        if self._config.init_from is not None:
            _source(self._config.init_from)
        if task.source is not None:
            task.source.check()

    def save(self, state: TrainState, progress: Progress, best: bool = False) -> None:
        """Save, or mark a saved step as the best. Returns when the state may be donated."""
        meta = {"config": to_dict(self._config), "progress": asdict(progress), "versions": versions()}
        self.store.save(progress.step, {"train": state}, meta, best=best)

    def begin(
        self, task: Task, tx: optax.GradientTransformation, like: tuple[TrainState, Params], step: int | None
    ) -> Start:
        """State, frozen parameters and progress: of checkpoint `step`, or else new.

        Raises RunDirectoryError for another experiment's checkpoint, CheckpointError for one that cannot be used.
        """
        if step is not None:
            return self._resume(like, step)
        seed, source = self._config.train.seed, self._config.init_from
        state, frozen = init_state(task, tx, seed, like)
        origin = f"initial values (seed {seed})"
        if source is not None:
            params, number = weights_of(source, like[0].params, self._directory.path)
            state = TrainState(state.step, params, state.opt_state, state.key)
            origin = f"the weights of {source.run}, step {number}"
        if task.source is not None:
            frozen = task.source.load(like[1], self._directory.path)
        frozen = self._keep_frozen(frozen, like[1])
        return Start(state, frozen, Progress(frozen=_hash(frozen)), origin)

    def _resume(self, like: tuple[TrainState, Params], step: int) -> Start:
        meta = self.store.meta(step)
        check_same(self._config, meta["config"], f"checkpoint {self.store.directory / str(step)}", self._directory.path)
        progress = Progress(**meta["progress"])
        frozen = load_frozen(self._directory.frozen, like[1])
        if _hash(frozen) != progress.frozen:
            raise CheckpointError(
                f"{self._directory.frozen} holds other values ({_hash(frozen)}) than checkpoint {step} was trained "
                f"with ({progress.frozen}); restore the original"
            )
        restored = self.store.restore(step, {"train": like[0]}, config=to_dict(self._config))
        return Start(restored["train"], frozen, progress, f"checkpoint {step}")

    def _keep_frozen(self, frozen: Params, like: Params) -> Params:
        """Frozen parameters as the run first had them."""
        if frozen is None:
            return None
        store = CheckpointStore(str(self._directory.frozen))
        if FROZEN_STEP in store.steps():
            return store.restore(FROZEN_STEP, like)
        save_frozen(self._directory.frozen, frozen, self._config)
        return frozen


def weights_of(source: InitFrom, like: Params, ours: Path, name: str = "init_from.run") -> tuple[Params, int]:
    """Parameters of another run, on the shardings of `like`, and their step. `ours`: the run that wants them; `name`:
    the field that asked.

    Raises ConfigError where both tokenizers are known and differ, CheckpointMismatch for parameters of other shapes.
    """
    store, step = _source(source, name)
    tokenizers = [path / "tokenizer.json" for path in (Path(source.run), ours)]
    if all(path.exists() for path in tokenizers) and len({path.read_bytes() for path in tokenizers}) > 1:
        raise ConfigError(
            f"{name} {source.run} was trained with another tokenizer than this run's data; its embeddings mean other "
            f"text. Prepare the data with {tokenizers[0]}"
        )
    return store.restore_subtree(step, ["train/params"], {"train": {"params": like}})["train"]["params"], step


def choose_step(store: CheckpointStore, step: str | int, run: str | Path, name: str = "run") -> int:
    """A stored step: a number, latest, or best (the newest where none is marked). Raises ConfigError."""
    steps = store.steps()
    if not steps:
        raise ConfigError(f"{name} {run} has no checkpoint under checkpoints/; train it first, or correct the path")
    if step == "latest":
        return steps[-1]
    if step == "best":
        return store.best_step() or steps[-1]
    if str(step).isdigit() and int(step) in steps:
        return int(step)
    raise ConfigError(
        f"{name} {run} has no checkpoint of step {step}; give best, latest, or one of {', '.join(map(str, steps))}"
    )


def load_frozen(directory: Path, like: Params) -> Params:
    """The frozen parameters in RUN/frozen; None if the Task has none."""
    return None if like is None else CheckpointStore(str(directory)).restore(FROZEN_STEP, like)


def save_frozen(directory: Path, frozen: Params, config: RunConfig) -> str | None:
    """Write frozen parameters to RUN/frozen, if there are any; the hash by which Progress names them."""
    if frozen is not None:
        with CheckpointStore(str(directory), keep=1, asynchronous=False, best=False) as store:
            store.save(FROZEN_STEP, frozen, {"config": to_dict(config)})
    return _hash(frozen)


def _source(source: InitFrom, name: str = "init_from.run") -> tuple[CheckpointStore, int]:
    store = CheckpointStore(f"{source.run}/checkpoints")
    return store, choose_step(store, source.step, source.run, name)


def _hash(frozen: Any) -> str | None:
    """Twelve hex digits of the values of all leaves; the same on every mesh."""
    if frozen is None:
        return None
    return hashlib.sha256(json.dumps(checksums(flatten(frozen))).encode()).hexdigest()[:12]
