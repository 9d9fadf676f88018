"""Speed: tokens per second, model FLOPs utilisation, and the one line that shows a run's progress."""

import time
from collections import deque

import jax

# Dense bf16 peak per device, FLOP/s, from the vendors' data sheets. A device that is not listed has no MFU: a wrong
# peak is worse than none.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


class Clock:
    """Wall-clock of a run across restarts, and its recent speed."""

    def __init__(
        self, seconds_before: float, tokens_per_step: int, flops_per_token: float, devices: int, window: int = 20
    ):
        self._start = time.perf_counter() - seconds_before
        self._tokens_per_step, self._flops_per_token = tokens_per_step, flops_per_token
        self._marks: deque[tuple[float, int]] = deque(maxlen=window)
        peak = PEAK_FLOPS.get(jax.devices()[0].device_kind)
        self._peak = None if peak is None else peak * devices

    @property
    def seconds(self) -> float:
        """Since the run began, pauses between processes left out."""
        return time.perf_counter() - self._start

    def mark(self, step: int) -> None:
        """Note that `step` optimizer steps are done."""
        self._marks.append((time.perf_counter(), step))

    def pause(self) -> None:
        """Forget recent marks: what happened since (evaluation, a save) is not training speed."""
        self._marks.clear()

    @property
    def tokens_per_second(self) -> float | None:
        """Over the recent steps; None until two are known."""
        if len(self._marks) < 2:
            return None
        (then, first), (now, last) = self._marks[0], self._marks[-1]
        return (last - first) * self._tokens_per_step / max(now - then, 1e-9)

    @property
    def has_peak(self) -> bool:
        """Whether the devices' peak is known, and with it MFU."""
        return self._peak is not None

    @property
    def mfu(self) -> float | None:
        """Share of the devices' peak; None if their peak is unknown."""
        rate = self.tokens_per_second
        if rate is None or self._peak is None:
            return None
        return rate * self._flops_per_token / self._peak

    def remaining(self, step: int, total: int) -> float | None:
        """Seconds to the last step at the recent speed."""
        rate = self.tokens_per_second
        return None if rate is None else (total - step) * self._tokens_per_step / rate


def progress_line(record: dict, total: int, remaining: float | None) -> str:
    """step | loss | bits per byte | learning rates | tokens/s | MFU | time left."""
    step = record["step"]
    parts = [f"step {step:>{len(str(total))}}/{total}", f"loss {record['loss']:.4f}"]
    if "bits_per_byte" in record:
        parts.append(f"{record['bits_per_byte']:.3f} bits/byte")
    rates = {name: f"{value:.2e}" for name, value in record.items() if name.startswith("learning_rate/")}
    parts.append("lr " + ", ".join(f"{name.removeprefix('learning_rate/')} {rate}" for name, rate in rates.items()))
    if record.get("tokens_per_second"):
        parts.append(f"{record['tokens_per_second']:,.0f} tok/s")
    if record.get("mfu"):
        parts.append(f"MFU {record['mfu']:.1%}")
    if remaining is not None:
        parts.append(f"{duration(remaining)} left")
    return " | ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
