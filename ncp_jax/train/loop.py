"""The training loop: resume, step, look, save. Nothing here knows which family it trains.

The metrics of step n are read after step n + 1 was dispatched, so the device never waits for the host.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ncp_jax.config import identity
from ncp_jax.data.pipeline import train_batches
from ncp_jax.data.store import TokenStore, read_file
from ncp_jax.parallel.mesh import make_mesh, row_slices
from ncp_jax.parallel.rules import activation_rules
from ncp_jax.parallel.watch import Watch
from ncp_jax.train.evaluation import HeldOut, Interrupted, evaluate, to_device, with_bytes
from ncp_jax.train.families import build_task
from ncp_jax.train.journal import Journal, complaint
from ncp_jax.train.program import make_program
from ncp_jax.train.run_config import RunConfig
from ncp_jax.train.rundir import RunDirectory
from ncp_jax.train.start import Saves
from ncp_jax.train.step import TrainState
from ncp_jax.train.task import Task, criterion
from ncp_jax.train.throughput import Clock

# A run that skips this many steps one after another does not recover: it only burns time.
SKIPS_IN_A_ROW = 20

# What a process may wish for, and tells the others with its rows of the next batch. The greater includes the lesser.
NOTHING, SAVE, STOP = 0, 1, 2


class BadStep(RuntimeError):
    """A step that must not be trained on. The message names the step and what was wrong."""


def compute_dtype(precision: str) -> Any:
    """auto: bfloat16 where matmul units like it, float32 on CPU."""
    if precision == "auto":
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return jnp.dtype(precision)


def train(
    config: RunConfig,
    task: Task | None = None,
    say: Callable[[str], None] = print,
    devices: Sequence[jax.Device] | None = None,
) -> dict:
    """Train to the end of the config, from wherever its run directory stands. Returns the summary.

    SIGTERM and SIGINT save a checkpoint and return early: `finished` in the summary says which it was.

    Args:
        task: what to train; by default the family of config.model.
        say: gets progress lines. Of several processes, the first one's.
        devices: by default all.
    Raises ConfigError (and its kin) before any device step, BadStep, CheckpointError, ProcessError.
    """
    with Watch(config.processes, say) as watch:
        task = task or build_task(
            config.model, config.data.sequence, compute_dtype(config.train.precision), jax.default_backend()
        )
        trainer = Trainer(config, task, say, devices, watch)
        with trainer.directory.locked():
            watch.agree("the run's identity", identity(config), "Give every process the same config and overrides")
            summary = trainer.run()
            watch.agree("the last step", summary["step"], "Start all again: they continue from the newest checkpoint")
        return summary


class Trainer:
    """One run in one process: all that `train` needs between its first and last step."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        say: Callable[[str], None],
        devices: Sequence[jax.Device] | None = None,
        watch: Watch | None = None,
    ):
        """Check everything that can be checked without a device step. Writes nothing."""
        self.config, self.task, self.total = config, task, config.total_steps
        self.watch = watch or Watch(config.processes, say)
        self.criterion = criterion(task)
        self.leader = jax.process_index() == 0
        self.say = say if self.leader else lambda line: None
        self.directory = RunDirectory(config.directory, writes=self.leader, background=jax.process_count() > 1)
        self.directory.check_config(config)
        self.mesh = make_mesh(config.mesh, devices)
        program = make_program(config, task, self.mesh)
        self.leaves, self.tx, self.like = program.leaves, program.tx, program.like
        self.train_step, self.eval_step = program.train_step, program.eval_step
        self.tokens = TokenStore.open(config.data.mixture[0].store)
        self.held_out = HeldOut(
            config.data, split=config.evaluation.split, batch=config.evaluation_batch, rows=config.evaluation.rows,
            chunk=task.chunk, vocab=task.vocab, ends=task.reads_ends, slices=row_slices(self.mesh),
        )  # fmt: skip
        self.saves = Saves(self.directory, config)
        self.saves.check_source(task)
        self.stop_signal: int | None = None
        self.wish = NOTHING  # that any process had at the newest step that was read
        self.skips = 0

    def run(self) -> dict:
        """Train, holding the lock of the run directory. Returns the summary."""
        store = self.saves.store
        # Signals outermost: one that comes while the last checkpoint is being written must not end the process.
        with self._signals(), jax.set_mesh(self.mesh), nn.logical_axis_rules(activation_rules()), store:
            first = store.latest()
            self.watch.agree("the newest checkpoint", first, f"Let all hosts mount one disk at {self.directory.path}")
            with contextlib.closing(self._batches(first or 0)) as batches:
                self._write_config()
                state, self.frozen, self.progress, origin = self.saves.begin(self.task, self.tx, self.like, first)
                self.directory.forget_after(self.progress.step if first is not None else -1)
                self.clock = Clock(
                    self.progress.seconds, self.config.tokens_per_step, self.task.flops_per_token, self.mesh.size
                )
                self.journal = Journal(self.config, self.directory, self.clock, self.say)
                self._introduce(origin)
                self._steps(state, batches)
        summary = self._summary()
        self.directory.write_summary(summary)
        return summary

    def _batches(self, step: int):
        config, (indices, count) = self.config, row_slices(self.mesh)
        return train_batches(
            config.data, vocab=self.task.vocab, chunk=self.task.chunk, global_batch=config.train.batch,
            start_step=step, ends=self.task.reads_ends, process_index=indices, process_count=count,
        )  # fmt: skip

    def _write_config(self) -> None:
        tokenizer = read_file(self.config.data.mixture[0].path, "tokenizer.json")
        self.directory.write_config(self.config, tokenizer, self.tokens.manifest.eos)

    def _steps(self, state: TrainState, batches: Iterator[dict[str, np.ndarray]]) -> None:
        config, progress, token_bytes = self.config, self.progress, self.tokens.token_bytes
        pending: tuple[int, bool, dict] | None = None
        saved_seconds = self.clock.seconds
        if self._evaluation_due() and self._evaluate(state):  # the process before this one was stopped at it
            self.saves.save(state, progress, best=True)
        while progress.step < self.total:
            # Dispatch this step, then read the one before.
            rows = with_bytes(next(batches), token_bytes)
            minutes = (self.clock.seconds - saved_seconds) / 60
            batch = to_device(rows | self._wishes(minutes, len(rows["tokens"])), self.mesh)
            diagnose = _due(config.train.diagnose_every, progress.step + 1)
            state, metrics = self.train_step(state, self.frozen, batch, diagnose=diagnose)
            progress.step += 1
            self.watch.step(progress.step)
            if diagnose:
                self.clock.pause()  # the first one compiles
            self._read(pending)
            pending = (progress.step, diagnose, metrics)
            self.saves.store.check()

            wish = self._agreed(minutes)
            stop, save = wish == STOP, wish >= SAVE or self._save_due()
            if not (save or self._evaluation_due()):
                continue
            # What is evaluated or saved must be known to be sound: read this step too.
            self._read(pending)
            pending = None
            best = self._evaluation_due() and not stop and self._evaluate(state)
            if save or (best and config.evaluation.keep_best):
                progress.seconds = saved_seconds = self.clock.seconds
                self.saves.save(state, progress, best)
                self.wish = STOP if self.wish == STOP else NOTHING  # what steps on their way still wished
            self.clock.pause()
            if stop:
                self.saves.store.wait()
                self.journal.saved(progress.step, self.stop_signal)
                break

    def _read(self, pending: tuple[int, bool, dict] | None) -> None:
        """Metrics of one finished step: check, log, print."""
        if pending is None:
            return
        step, diagnosed, metrics = pending
        metrics = jax.device_get(metrics)
        self.wish = max(self.wish, int(metrics.pop("wishes", NOTHING)))
        self.clock.mark(step)
        if metrics.pop("bad"):
            self._bad(step, complaint(metrics, self.config.train.gradient_ceiling))
        else:
            self.skips = 0
        self.journal.train(step, metrics)
        if diagnosed:
            self.journal.diagnostics(step, metrics)

    def _bad(self, step: int, what: str) -> None:
        self.skips += 1
        if self.config.train.on_bad_step == "skip" and self.skips <= SKIPS_IN_A_ROW:
            self.journal.skipped(step, what)
            return
        self.saves.store.wait()
        latest = self.saves.store.latest()
        sound = "no checkpoint was written yet" if latest is None else f"checkpoint {latest} is sound"
        if self.skips > SKIPS_IN_A_ROW:
            raise BadStep(f"step {step}: {what}, as in {SKIPS_IN_A_ROW} steps before; {sound}. Lower the learning rate")
        raise BadStep(
            f"step {step}: {what}; {sound}. The same command with train.on_bad_step=skip continues and leaves such "
            "steps out (train.gradient_ceiling=X also those with a larger gradient); or start anew with a lower "
            "learning rate"
        )

    def _evaluation_due(self) -> bool:
        step = self.progress.step
        due = step == self.total or (step > 0 and _due(self.config.evaluation.every, step))
        return due and self.progress.evaluated_step != step

    def _evaluate(self, state: TrainState) -> bool:
        """Log an evaluation; True if it is the best so far. A signal cuts it short: no result."""
        progress = self.progress
        try:
            found = evaluate(self.eval_step, state.params, self.frozen, self.held_out, self.mesh, self._stopped_alone)
        except Interrupted:
            return False
        if self.criterion == "loss":
            found["loss"] = sum(factor * found[f"loss/{term}"] for term, factor in self.task.coefficients.items())
        value = found[self.criterion]
        best = progress.best is None or value < progress.best
        if best:
            progress.best, progress.best_step = value, progress.step
        progress.evaluation, progress.evaluated_step = found, progress.step
        self.journal.evaluation(progress.step, found, best)
        return best

    def _wish(self, minutes: float) -> int:
        """What this process wants, `minutes` after the last save."""
        if self.stop_signal is not None:
            return STOP
        return SAVE if minutes > (self.config.checkpoint.every_minutes or float("inf")) else NOTHING

    def _wishes(self, minutes: float, rows: int) -> dict[str, np.ndarray]:
        """This process's wish as a part of the batch: signals and clocks differ between processes, steps must not.

        The greatest one comes back with the metrics of the step, from every device, at no cost beyond theirs; each
        process reads it after the same step, so all save and stop together, two steps after the wish.
        """
        return {} if jax.process_count() == 1 else {"wishes": np.full(rows, self._wish(minutes), np.int32)}

    def _agreed(self, minutes: float) -> int:
        """What all processes do now: SAVE, STOP, or NOTHING out of turn."""
        if jax.process_count() == 1:
            return self._wish(minutes)
        return self.wish

    def _save_due(self) -> bool:
        step = self.progress.step
        return _due(self.config.checkpoint.every_steps, step) or step == self.total

    def _stopped_alone(self) -> bool:
        return self.stop_signal is not None and jax.process_count() == 1

    def _introduce(self, origin: str) -> None:
        config, devices = self.config, self.mesh.devices.flatten()
        self.say(f"{config.name} ({identity(config)}) in {self.directory.path}, from {origin}")
        self.say(
            f"{self.task.name}, {sum(leaf.size for leaf in self.leaves):,} parameters; {self.total:,} steps of "
            f"{config.tokens_per_step:,} tokens; {devices.size} x {devices[0].device_kind} "
            f"({', '.join(f'{axis} {size}' for axis, size in self.mesh.shape.items())})"
        )
        if self.clock.has_peak:
            self.say(f"MFU counts {self.task.flops_convention}")
        done = self.progress.step == self.total
        self.say(f"all {self.total:,} steps are done" if done else "compiling; the first step follows")

    def _summary(self) -> dict:
        progress, config = self.progress, self.config
        table = {leaf.path: leaf.size for leaf in self.leaves}
        outer = sum(size for path, size in table.items() if path.startswith(("embed/", "head/")))
        tokens = progress.step * config.tokens_per_step
        return {
            "name": config.name, "identity": identity(config), "task": self.task.name,
            "finished": progress.step == self.total, "step": progress.step, "tokens": tokens,
            "criterion": self.criterion, f"best_{self.criterion}": progress.best, "best_step": progress.best_step,
            **progress.evaluation,
            "parameters": sum(table.values()), "non_embedding_parameters": sum(table.values()) - outer,
            "flops_per_token": self.task.flops_per_token, "flops_convention": self.task.flops_convention,
            "seconds": progress.seconds, "tokens_per_second": tokens / max(progress.seconds, 1e-9),
        }  # fmt: skip

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT ask for a checkpoint and an orderly end; a second one ends at once."""
        if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main thread
            yield
            return

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


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
