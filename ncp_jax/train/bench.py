"""The benchmark: median step time of one config, or of several in turn in one process, on random tokens.

Configs take turns step by step, so that whatever else the machine does slows all of them alike; ratios are of medians.
"""

import contextlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np

from ncp_jax.parallel.mesh import make_mesh
from ncp_jax.parallel.rules import activation_rules
from ncp_jax.train.evaluation import to_device
from ncp_jax.train.families import build_task
from ncp_jax.train.loop import compute_dtype
from ncp_jax.train.program import Program, make_program
from ncp_jax.train.run_config import RunConfig
from ncp_jax.train.step import init_state
from ncp_jax.train.throughput import PEAK_FLOPS


class Measured(NamedTuple):
    """One config's figures. Seconds per step; FLOP counts by the Task's convention; bytes on one device."""

    name: str
    median: float
    fastest: float
    slowest: float
    tokens_per_second: float
    flops_per_second: float
    mfu: float | None  # None: the device's peak is unknown
    peak_bytes: int | None  # None: the backend does not say
    compile_seconds: float
    loss: float  # of the last step: finite, or the timing means nothing


def bench(configs: Sequence[RunConfig], steps: int, say: Callable[[str], None] = print) -> list[Measured]:
    """`steps` timed steps of each config, in turn, after two untimed ones."""
    runners = []
    for config in configs:
        say(f"compiling {config.name}")
        runners.append(_Runner(config))
    for _ in range(steps):
        for runner in runners:
            runner.step()
    return [runner.measured() for runner in runners]


def machine() -> dict[str, Any]:
    """What the figures hold for."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind, "devices": jax.device_count(), "backend": jax.default_backend(),
        "processor": platform.processor() or platform.machine(), "python": platform.python_version(),
        "jax": jax.__version__,
    }  # fmt: skip


class _Runner:
    """A compiled config with its state on the devices."""

    def __init__(self, config: RunConfig):
        self.config, self.seconds = config, []  # type: ignore[var-annotated]
        dtype = compute_dtype(config.train.precision)
        self.task = build_task(config.model, config.data.sequence, dtype, jax.default_backend())
        self.program: Program = make_program(config, self.task, make_mesh(config.mesh))
        with self._placed():
            self.state, self.frozen = init_state(self.task, self.program.tx, config.train.seed, self.program.like)
            self.batch = to_device(random_batch(config, self.task.vocab), self.program.mesh)
            began = time.perf_counter()
            self._run()
            self.compile_seconds = time.perf_counter() - began
            self._run()

    def step(self) -> None:
        with self._placed():
            began = time.perf_counter()
            self._run()
            self.seconds.append(time.perf_counter() - began)

    def measured(self) -> Measured:
        median, tokens = statistics.median(self.seconds), self.config.tokens_per_step
        flops = self.task.flops_per_token * tokens / median
        peak = PEAK_FLOPS.get(jax.devices()[0].device_kind)
        memory = jax.local_devices()[0].memory_stats() or {}
        return Measured(
            self.config.name, median, min(self.seconds), max(self.seconds), tokens / median, flops,
            None if peak is None else flops / (peak * jax.device_count()), memory.get("peak_bytes_in_use"),
            self.compile_seconds, self.loss,
        )  # fmt: skip

    def _run(self) -> None:
        self.state, metrics = self.program.train_step(self.state, self.frozen, self.batch)
        self.loss = float(metrics["loss"])  # waits for the step

    @contextlib.contextmanager
    def _placed(self) -> Iterator[None]:
        with jax.set_mesh(self.program.mesh), nn.logical_axis_rules(activation_rules()):
            yield


def random_batch(config: RunConfig, vocab: int) -> dict[str, np.ndarray]:
    """Full rows of random tokens; with packed documents, one document per row."""
    B, T = config.train.batch, config.data.sequence
    ids = np.random.default_rng(0).integers(0, vocab, (B, T + 1), dtype=np.int32)
    real = np.ones((B, T), bool)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "real": real, "scored": real.copy()}
    if config.data.packing == "documents":
        positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)).copy()
        batch |= {"segments": np.ones((B, T), np.int32), "positions": positions}
    return batch | {"bytes": np.full(B, 4 * T, np.int32)}  # four bytes per token: only logged
