"""The training loop: resume, step, look, save. Nothing here knows which family it trains.

The metrics of step n are read after step n + 1 was dispatched, so the device never waits for the host.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ncp_jax.checkpoint.store import CheckpointStore
from ncp_jax.config import ConfigError, to_dict
from ncp_jax.data.pipeline import train_batches
from ncp_jax.data.store import TokenStore
from ncp_jax.optim.build import build
from ncp_jax.optim.leaves import Leaf, leaf_table
from ncp_jax.optim.schedules import learning_rates
from ncp_jax.parallel.mesh import check_batch, make_mesh
from ncp_jax.parallel.rules import activation_rules, unboxed
from ncp_jax.train.evaluation import HeldOut, evaluate, to_device, with_bytes
from ncp_jax.train.families import build_task
from ncp_jax.train.rundir import RunDirectory, versions
from ncp_jax.train.run_config import RunConfig
from ncp_jax.train.step import (
    Guard,
    TrainState,
    abstract_params,
    abstract_state,
    init_state,
    make_eval_step,
    make_train_step,
)
from ncp_jax.train.task import Task
from ncp_jax.train.throughput import Clock, progress_line


class BadStep(RuntimeError):
    """A step that must not be trained on. The message names the step and what was wrong."""


@dataclass
class Progress:
    """What a resumed process must know besides the train state; stored with every checkpoint."""

    step: int = 0
    seconds: float = 0.0
    best_bits_per_byte: float | None = None
    best_step: int | None = None
    last_evaluation: dict = field(default_factory=dict)


def compute_dtype(precision: str) -> Any:
    """auto: bfloat16 where matmul units like it, float32 on CPU."""
    if precision == "auto":
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return jnp.dtype(precision)


def train(config: RunConfig, task: Task | None = None, say: Callable[[str], None] = print) -> dict:
    """Train to the end of the config, from wherever its run directory stands. Returns the summary.

    Args:
        task: what to train; by default the family of config.model.
        say: gets progress lines.
    Raises ConfigError (and its kin) before any device step, BadStep, CheckpointError.
    """
    task = task or build_task(config.model, config.data.sequence, compute_dtype(config.train.precision))
    run = RunDirectory(config.directory)
    with run.locked():
        return Trainer(config, task, run, say).run()


class Trainer:
    """One run in one process: all that `train` needs between its first and last step."""

    def __init__(self, config: RunConfig, task: Task, run: RunDirectory, say: Callable[[str], None]):
        self.config, self.task, self.directory, self.say = config, task, run, say
        self.total = config.total_steps
        self.mesh = make_mesh(config.mesh)
        check_batch(config.train.batch, config.train.micro_batches, self.mesh)
        self.held_out = HeldOut(
            config.data, split=config.evaluation.split, batch=config.evaluation.batch or config.train.batch,
            rows=config.evaluation.rows, chunk=task.chunk, vocab=task.vocab,
        )  # fmt: skip
        self.token_bytes = TokenStore.open(config.data.mixture[0].store).token_bytes
        run.write_config(config)

        params = unboxed(abstract_params(task)[0])
        self.leaves = leaf_table(params, task.leaf_rules, config.optim)
        self.tx = build(config.optim, self.leaves, params, self.total, config.tokens_per_step)
        self.like = abstract_state(task, self.tx, self.mesh)
        guard = Guard(config.train.on_bad_step == "skip", config.train.gradient_ceiling)
        step = make_train_step(task, self.tx, config.train.micro_batches, guard, self.leaves)
        self.train_step = jax.jit(step, donate_argnums=0, static_argnames="diagnose", out_shardings=(
            jax.tree.map(lambda a: a.sharding, self.like[0]), None))  # fmt: skip
        self.eval_step = jax.jit(make_eval_step(task))
        self.checkpoints = CheckpointStore(
            str(run.checkpoints), keep=config.checkpoint.keep, asynchronous=config.checkpoint.asynchronous,
            best=config.evaluation.keep_best, timeout_seconds=config.checkpoint.timeout_seconds,
        )  # fmt: skip
        self.stop_signal: int | None = None

    def run(self) -> dict:
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(activation_rules()), self.checkpoints, self._signals():
            state, frozen, self.progress = self._resolve_state()
            self.clock = Clock(self.progress.seconds, self.config.tokens_per_step, self.task.flops_per_token)
            if self.progress.step >= self.total:
                self.say(f"{self.directory.path}: all {self.total} steps are done; raise train.steps to go on")
                return self._summary(state)
            state = self._steps(state, frozen)
            return self._summary(state)

    def _resolve_state(self) -> tuple[TrainState, Any, Progress]:
        abstract, abstract_frozen = self.like
        # 1. This run's own newest checkpoint.
        step = self.checkpoints.latest()
        if step is not None:
            meta = self.checkpoints.meta(step)
            both = self.checkpoints.restore(
                step, {"train": abstract, "frozen": abstract_frozen}, config=to_dict(self.config)
            )
            self.directory.forget_after(step)
            self.say(f"resuming {self.directory.path} at step {step}")
            return both["train"], both["frozen"], Progress(**meta["progress"])
        self.directory.forget_after(-1)
        state, frozen = init_state(self.task, self.tx, self.config.train.seed, self.like)
        # 2. The weights of another run.
        if self.config.init_from is not None:
            state = TrainState(state.step, self._weights_of(self.config.init_from), state.opt_state, state.key)
        # 3. Fresh initial values.
        return state, frozen, Progress()

    def _weights_of(self, source) -> Any:
        other = CheckpointStore(f"{source.run}/checkpoints")
        step = {"latest": other.latest(), "best": other.best_step()}.get(source.step, source.step)
        if step is None:
            raise ConfigError(f"init_from.run '{source.run}' has no {source.step} checkpoint under checkpoints/")
        restored = other.restore_subtree(step, ["train/params"], {"train": {"params": self.like[0].params}})
        self.say(f"weights of {source.run}, step {step}")
        return restored["train"]["params"]

    def _steps(self, state: TrainState, frozen: Any) -> TrainState:
        config, progress = self.config, self.progress
        batches = train_batches(
            config.data, vocab=self.task.vocab, chunk=self.task.chunk, global_batch=config.train.batch,
            start_step=progress.step, process_index=jax.process_index(), process_count=jax.process_count(),
        )  # fmt: skip
        pending: tuple[int, bool, dict] | None = None
        saved_at, saved_seconds = progress.step, self.clock.seconds
        with contextlib.closing(batches):
            while progress.step < self.total:
                # Dispatch this step, then read the one before.
                batch = to_device(with_bytes(next(batches), self.token_bytes), self.mesh)
                diagnose = _due(config.train.diagnose_every, progress.step + 1, self.total)
                state, metrics = self.train_step(state, frozen, batch, diagnose=diagnose)
                progress.step += 1
                self._read(pending)
                pending = (progress.step, diagnose, metrics)
                self.checkpoints.check()

                step, last = progress.step, progress.step == self.total
                stopping = self.stop_signal is not None
                evaluating = _due(config.evaluation.every, step, self.total) or last
                overdue = config.checkpoint.every_minutes and (
                    self.clock.seconds - saved_seconds > 60 * config.checkpoint.every_minutes
                )
                saving = last or stopping or overdue or _due(config.checkpoint.every_steps, step, self.total)
                if not (evaluating or saving):
                    continue
                # What is evaluated or saved must be known to be sound: read this step too.
                self._read(pending)
                pending = None
                best = self._evaluate(state, frozen) if evaluating and not stopping else False
                if saving or (best and config.evaluation.keep_best):
                    self._save(state, frozen, best)
                    saved_at, saved_seconds = step, self.clock.seconds
                self.clock.pause()
                if stopping:
                    name = signal.Signals(self.stop_signal).name
                    self.checkpoints.wait()
                    self.say(f"{name}: saved step {saved_at}; the same command continues from there")
                    sys.exit(0)
        return state

    def _read(self, pending: tuple[int, bool, dict] | None) -> None:
        """Metrics of one finished step: check, log, print."""
        if pending is None:
            return
        step, diagnosed, metrics = pending
        metrics = jax.device_get(metrics)
        self.clock.mark(step)
        if metrics.pop("bad"):
            self._bad(step, metrics)
        record = {"kind": "train", **self._where(step)}
        scalars = {name: float(value) for name, value in metrics.items() if _is_loss(name)}
        if step % self.config.train.log_every == 0 or step in (1, self.total):
            rates = learning_rates(self.config.optim, self.total, self.config.tokens_per_step, step - 1)
            record |= scalars | {f"learning_rate/{name}": float(rate) for name, rate in rates.items()}
            record |= {"tokens_per_second": self.clock.tokens_per_second, "mfu": self.clock.mfu}
            self._log(record)
            self.say(
                progress_line(record, self.total, self.clock.remaining(step, self.total), self.task.flops_convention)
            )
        if diagnosed:
            rest = {name: _plain(value) for name, value in metrics.items() if not _is_loss(name)}
            self._log({"kind": "diagnostics", **self._where(step), **rest})

    def _bad(self, step: int, metrics: dict) -> None:
        terms = {name: float(value) for name, value in metrics.items() if _is_loss(name)}
        broken = [name for name, value in terms.items() if not np.isfinite(value)] or ["gradient_norm"]
        what = f"step {step}: {', '.join(f'{name} = {terms[name]:g}' for name in broken)}"
        if self.config.train.on_bad_step == "skip":
            self.say(f"{what}; the step was skipped")
            self._log({"kind": "skipped", **self._where(step), **{name: str(terms[name]) for name in broken}})
            return
        latest = self.checkpoints.latest()
        keep = f"checkpoint {latest} is sound" if latest is not None else "no checkpoint was written yet"
        raise BadStep(
            f"{what}; {keep}. Lower the learning rate, set train.gradient_ceiling, or train.on_bad_step=skip"
        )

    def _evaluate(self, state: TrainState, frozen: Any) -> bool:
        """Log an evaluation; True if bits per byte are the lowest so far."""
        progress, found = self.progress, evaluate(self.eval_step, state.params, frozen, self.held_out, self.mesh)
        value = found.get("bits_per_byte")
        best = value is not None and (progress.best_bits_per_byte is None or value < progress.best_bits_per_byte)
        if best:
            progress.best_bits_per_byte, progress.best_step = value, progress.step
        progress.last_evaluation = found
        self._log({"kind": "eval", **self._where(progress.step), **found, "best": best})
        losses = " | ".join(f"{name} {number:.4f}" for name, number in found.items() if name.startswith("loss/"))
        bits = f" | {value:.4f} bits/byte{' (best)' if best else ''}" if value is not None else ""
        self.say(f"step {progress.step} held out | {losses}{bits}")
        return best

    def _save(self, state: TrainState, frozen: Any, best: bool) -> None:
        self.progress.seconds = self.clock.seconds
        meta = {"config": to_dict(self.config), "progress": vars(self.progress), "versions": versions()}
        self.checkpoints.save(self.progress.step, {"train": state, "frozen": frozen}, meta, best=best)

    def _summary(self, state: TrainState) -> dict:
        progress, params = self.progress, jax.tree.leaves(state.params)
        table = {leaf.path: leaf.size for leaf in self.leaves}
        outer = sum(size for path, size in table.items() if path.startswith(("embed/", "head/")))
        summary = {
            "name": self.config.name, "task": self.task.name, "step": progress.step,
            "tokens": progress.step * self.config.tokens_per_step,
            "best_bits_per_byte": progress.best_bits_per_byte, "best_step": progress.best_step,
            **progress.last_evaluation,
            "parameters": sum(leaf.size for leaf in params), "non_embedding_parameters": sum(table.values()) - outer,
            "flops_per_token": self.task.flops_per_token, "flops_convention": self.task.flops_convention,
            "seconds": progress.seconds,
            "tokens_per_second": progress.step * self.config.tokens_per_step / max(progress.seconds, 1e-9),
        }  # fmt: skip
        self.directory.write_summary(summary)
        return summary

    def _where(self, step: int) -> dict:
        return {"step": step, "tokens": step * self.config.tokens_per_step, "seconds": round(self.clock.seconds, 3)}

    def _log(self, record: dict) -> None:
        if jax.process_index() == 0:
            self.directory.log(record)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT ask for a checkpoint and an orderly end; a second one ends at once."""

        def ask(number, _frame):
            if self.stop_signal is not None:
                raise KeyboardInterrupt
            self.stop_signal = number

        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _due(every: int | None, step: int, total: int) -> bool:
    return every is not None and step % every == 0


def _is_loss(name: str) -> bool:
    return name.startswith("loss") or name in ("gradient_norm", "bits_per_byte")


def _plain(value: Any) -> Any:
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else np.asarray(value).tolist()


__all__ = ["BadStep", "Leaf", "Progress", "Trainer", "compute_dtype", "train"]
