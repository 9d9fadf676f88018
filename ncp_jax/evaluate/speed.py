"""Decoding speed: seconds per generated token of one config, or of several in turn, with random weights and prompts.

Configs take turns token by token, as in train/bench.py, whose figures of training these complete.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ncp_jax.config import ConfigError
from ncp_jax.generate.engine import Engine
from ncp_jax.generate.sampling import Sampling
from ncp_jax.parallel.rules import unboxed
from ncp_jax.train.families import build_model, build_task
from ncp_jax.train.loop import compute_dtype
from ncp_jax.train.run_config import RunConfig


class Decoded(NamedTuple):
    """One config's figures. Seconds per token of all rows together; the first token's include reading the prompts."""

    name: str
    median: float
    fastest: float
    slowest: float
    tokens_per_second: float  # of all rows
    first_token_seconds: float
    rows: int
    prompt: int  # tokens
    new: int
    peak_bytes: int | None  # None: the backend does not say


def bench_decoding(configs: Sequence[RunConfig], new: int, say: Callable[[str], None] = print) -> list[Decoded]:
    """`new` tokens after prompts that fill the rest of data.sequence, train.batch rows at once, on one device.

    Parameters are in the dtype of matrix products, as a served model's would be. Raises ConfigError for a family that
    has no token probabilities, or no room for a prompt.
    """
    runners = []
    for config in configs:
        say(f"compiling {config.name}")
        runners.append(_Decoding(config, new))
    for _ in range(new):
        for runner in runners:
            runner.step()
    return [runner.measured() for runner in runners]


class _Decoding:
    """A config's engine in the middle of a batch of rows."""

    def __init__(self, config: RunConfig, new: int):
        self.config, self.new, self.rows = config, new, config.train.batch
        self.prompt = config.data.sequence - new
        self.seconds: list[float] = []
        self.events: Iterator[Any] = iter(())
        if new < 2 or self.prompt < 1:
            raise ConfigError(
                f"--decode {new}: from 2 to {config.data.sequence - 1} tokens, so that data.sequence "
                f"{config.data.sequence} leaves room for a prompt"
            )
        engine = _engine(config)
        ids = np.random.default_rng(0).integers(1, config.model.vocab, (self.rows, self.prompt))
        prompts = [row.tolist() for row in ids]
        for count in (2, new):  # the first compiles
            self.events = engine.stream(prompts, max_new=count, how=Sampling(temperature=0))
            began = time.perf_counter()
            self._token()
            self.first_token = time.perf_counter() - began
            if count == 2:
                self._token()
        self.drawn = 1

    def step(self) -> None:
        if self.drawn == self.new:
            return
        began = time.perf_counter()
        self._token()
        self.seconds.append(time.perf_counter() - began)
        self.drawn += 1

    def measured(self) -> Decoded:
        median = statistics.median(self.seconds)
        memory = jax.local_devices()[0].memory_stats() or {}
        return Decoded(
            self.config.name, median, min(self.seconds), max(self.seconds), self.rows / median, self.first_token,
            self.rows, self.prompt, self.new, memory.get("peak_bytes_in_use"),
        )  # fmt: skip

    def _token(self) -> None:
        """One more token of every row."""
        _take(self.events, self.rows)


def _take(events: Iterator[Any], count: int) -> None:
    for _ in range(count):
        next(events)


def _engine(config: RunConfig) -> Engine:
    dtype = compute_dtype(config.train.precision)
    task = build_task(config.model, config.data.sequence, dtype)
    if task.forward is None:
        raise ConfigError(f"{config.name} is a '{task.name}': --decode times models with token probabilities")

    def create() -> Any:
        params = unboxed(task.init(jax.random.key(config.train.seed))[0])
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    return Engine(build_model(config.model, dtype), jax.jit(create)(), capacity=config.data.sequence)
