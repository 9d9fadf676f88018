"""The journal of a run: what each step found, as lines of metrics.jsonl and as lines for whoever watches."""

import signal
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ncp_jax.optim.schedules import learning_rates
from ncp_jax.train.run_config import RunConfig
from ncp_jax.train.rundir import RunDirectory
from ncp_jax.train.throughput import Clock, progress_line

Say = Callable[[str], None]


class Journal:
    """Writes records and progress lines. Metrics arrive as host arrays, by name."""

    def __init__(self, config: RunConfig, directory: RunDirectory, clock: Clock, say: Say):
        self._config, self._directory, self._clock, self._say = config, directory, clock, say

    def train(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log and show an ordinary step, if it is one of those that are logged."""
        config, total = self._config, self._config.total_steps
        if step % config.train.log_every and step not in (1, total):
            return
        record = self._record("train", step) | _watched(metrics)
        rates = learning_rates(config.optim, total, config.tokens_per_step, step - 1)
        record |= {name: float(rate) for name, rate in rates.items()}
        record |= {"tokens_per_second": self._clock.tokens_per_second, "mfu": self._clock.mfu}
        self._directory.log(record)
        self._say(progress_line(record, total, self._clock.remaining(step, total)))

    def diagnostics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log what a diagnostic step found beyond an ordinary one."""
        rest = {name: _plain(value) for name, value in metrics.items() if name not in _watched(metrics)}
        self._directory.log(self._record("diagnostics", step) | rest)

    def skipped(self, step: int, what: str) -> None:
        """Log and show that a step changed nothing."""
        self._directory.log(self._record("skipped", step) | {"reason": what})
        self._say(f"step {step}: {what}; the step was skipped")

    def evaluation(self, step: int, found: dict[str, float], best: bool) -> None:
        """Log and show an evaluation."""
        self._directory.log(self._record("eval", step) | found | {"best": best})
        parts = [f"step {step:>{len(str(self._config.total_steps))}} held out"]
        shown = [name for kind in ("loss", "tokens/", "chunks/") for name in found if name.startswith(kind)]
        parts += [f"{name} {found[name]:.4f}" for name in shown]
        if "bits_per_byte" in found:
            parts.append(f"{found['bits_per_byte']:.4f} bits/byte")
        self._say(" | ".join(parts) + (" (best)" if best else ""))

    def saved(self, step: int, number: int | None) -> None:
        """Show that a run was saved because of a signal, here or at another process."""
        name = "another process was asked to stop" if number is None else signal.Signals(number).name
        self._say(f"{name}: saved step {step}; the same command continues from there")

    def _record(self, kind: str, step: int) -> dict[str, Any]:
        tokens = step * self._config.tokens_per_step
        return {"kind": kind, "step": step, "tokens": tokens, "seconds": round(self._clock.seconds, 3)}


def complaint(metrics: Mapping[str, Any], ceiling: float | None) -> str:
    """What made a step bad: every term that is not finite, or else the norm above the ceiling."""
    found = _watched(metrics)
    broken = [f"{name} = {value:g}" for name, value in found.items() if not np.isfinite(value)]
    return ", ".join(broken) or f"gradient_norm = {found['gradient_norm']:g} is above train.gradient_ceiling {ceiling}"


def _watched(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The scalars of every step: terms first, then their sum and what follows from it."""
    terms = [name for name in metrics if name.startswith("loss/")]
    names = [*terms, "loss", "bits_per_byte", "gradient_norm"]
    return {name: float(metrics[name]) for name in names if name in metrics}


def _plain(value: Any) -> Any:
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else np.asarray(value).tolist()
