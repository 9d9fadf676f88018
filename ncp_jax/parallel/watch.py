"""The watch over a run's processes: each says regularly that it lives; the others stop, with a name, when one does not.

A thread writes this process's beat and reads the others'. A process that is gone leaves the others in a collective
that never ends, so the thread prints what it knows and ends the process. A process that fails says why before it
leaves, and the others end with that. A process that is merely slow is only named in the heartbeat line.
"""

import contextlib
import ctypes
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax

from ncp_jax.parallel.processes import ProcessError, ProcessesConfig, Store, coordinator_answers

LONGEST_BEAT = 5.0  # seconds between two beats
BEATS = 4  # in the time after which silence means that a process is gone
LEFT = "left"  # the beat of a process that has ended in order
STAY = 6  # beats for which process 0 waits, at most, until the others know why it ends
FAILED = 1  # exit status: the same command continues

_numbers = itertools.count()


class Watch:
    """A context around a run. With one process it only writes the heartbeat line."""

    def __init__(self, config: ProcessesConfig, say: Callable[[str], None]):
        """`say` gets the heartbeat line; of several processes, that of process 0."""
        self.store = Store(f"ncp_jax/{next(_numbers)}")
        self._config, self._say = config, say if self.store.index == 0 else lambda line: None
        self._step, self._stepped = 0, time.monotonic()
        self._every = min(LONGEST_BEAT, config.silent_seconds / BEATS)
        self._heard: dict[int, tuple[str, float]] = {}  # by process: its newest beat, and when it came
        self._steps: dict[int, int] = {}
        self._lost: list[int] = []
        self._failures: dict[int, float] = {}  # when each was first seen
        self._done, self._ending = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def step(self, step: int) -> None:
        """Note that this process has come to `step`. Costs nothing."""
        self._step, self._stepped = step, time.monotonic()

    def agree(self, what: str, value: object, remedy: str) -> None:
        """Raise ConfigError, at every process, unless all have the same value; ProcessError if one does not come."""
        self.store.agree(what, str(value), self._config.join_seconds, remedy)

    def __enter__(self) -> "Watch":
        self.store.meet(self._config.join_seconds)
        now = time.monotonic()
        self._heard = {process: ("", now) for process in range(self.store.count) if process != self.store.index}
        self._trap = contextlib.ExitStack()
        if self._heard:
            self._trap.enter_context(_on_abort(self._explain_abort))
        if self._heard or self._config.heartbeat_seconds:
            self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is not None and self._heard:
            self._publish(error)
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._heard:
            self._leave(stay=error is not None)
        self._trap.close()

    # ---- the thread

    def _run(self) -> None:
        next_line = time.monotonic() + (self._config.heartbeat_seconds or float("inf"))
        for beat in itertools.count():
            if self._heard:
                self._look(beat)
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + (self._config.heartbeat_seconds or float("inf"))
                self._say(self._line())
            if self._done.wait(self._every if self._heard else max(next_line - time.monotonic(), 0.0)):
                return

    def _look(self, beat: int) -> None:
        """Beat, listen, and end the process if another is gone or has failed."""
        now = time.monotonic()
        try:
            self.store.put("beat", f"{beat} {self._step}")
            beats, failures = self.store.read("beat"), self.store.read("failed")
        except jax.errors.JaxRuntimeError:
            if not self._done.is_set() and not coordinator_answers():
                self._end(f"{self.store.name(0)} does not answer")
            return
        for process, said in beats.items():
            if process in self._heard and said != self._heard[process][0]:
                self._heard[process] = (said, now)
                self._steps[process] = int(said.split()[1]) if said != LEFT else self._steps.get(process, 0)
        for process, reason in failures.items():
            # Most errors come to all processes; each then ends with its own. This is for one that came to one alone.
            if now - self._failures.setdefault(process, now) > 2 * self._every and not self._done.is_set():
                self._end(f"{self.store.name(process)} failed: {reason}")
        gone = self._gone(self._config.silent_seconds)
        if gone and not self._done.is_set():
            self._end(gone)

    def _gone(self, seconds: float) -> str:
        """Those not heard of for so long, in words."""
        now = time.monotonic()
        silent = {process: now - when for process, (said, when) in self._heard.items() if said != LEFT}
        self._lost = [process for process, past in silent.items() if past > seconds]
        return ", ".join(
            f"{self.store.name(process)} has not been heard of for {silent[process]:.0f} s (last at step "
            f"{self._steps.get(process, 0)})" for process in self._lost
        )  # fmt: skip

    def _line(self) -> str:
        """heartbeat: step, seconds since it; and who is behind."""
        since = time.monotonic() - self._stepped
        line = f"heartbeat: step {self._step}, {since:.0f} s since the last"
        behind = min(self._steps, key=lambda process: self._steps[process], default=None)
        if behind is not None and self._steps[behind] < self._step and since > 2 * self._every:  # beats lag
            line += f"; {self.store.name(behind)} is at step {self._steps[behind]}"
        return line

    # ---- the end

    def _publish(self, error: BaseException) -> None:
        """Tell the others why this process ends."""
        if _by_others(error):  # the thread will know who is gone, and end this process
            self._done.wait(self._config.silent_seconds + 2 * self._every)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self.store.put("failed", f"{type(error).__name__}: {error}")

    def _leave(self, stay: bool) -> None:
        """Tell the others that this process ends. Process 0 keeps their store: it stays until they have ended too."""
        deadline = time.monotonic() + STAY * self._every
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self.store.put("beat", LEFT)
            while stay and self.store.index == 0 and time.monotonic() < deadline:
                beats = self.store.read("beat")
                if all(beats.get(process) == LEFT for process in self._heard if process not in self._lost):
                    return
                time.sleep(self._every / BEATS)

    def _end(self, what: str) -> None:
        """Say why, and end the process."""
        with self._ending:  # never given back: one voice, one end
            self._say_end(what)
            self._leave(stay=True)
            end_process(FAILED)

    def _say_end(self, what: str) -> None:
        print(
            f"ncp-jax: {what}; {self.store.name(self.store.index)} stops at step {self._step}. Start all again with "
            "the same command: it continues from the newest checkpoint", file=sys.stderr, flush=True,
        )  # fmt: skip

    def _explain_abort(self) -> None:
        """jax's service aborts this process, from C++: say which process it lost, if one is lost.

        The service may hold its locks here, so nothing is asked of it.
        """
        found = self._gone(2 * self._every)
        if not coordinator_answers():
            found = f"{self.store.name(0)} does not answer"
        if found:
            with self._ending:
                self._say_end(found)
                end_process(FAILED)


def end_process(status: int) -> None:
    """End at once, without the goodbyes for which jax would wait until the other processes say theirs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _by_others(error: BaseException | None) -> bool:
    """Whether an error is, most likely, the sign that another process is gone: a broken collective or barrier."""
    while error is not None:
        if isinstance(error, (jax.errors.JaxRuntimeError, ProcessError)):
            return True
        error = error.__cause__
    return False


@contextlib.contextmanager
def _on_abort(explain: Callable[[], None]) -> Iterator[None]:
    """Call `explain` when this process aborts. If it returns, the process aborts as it would have.

    Python's own handlers run too late for that, after the C++ code has come back, which it never does; hence a C one.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]

    def handle(number: int) -> None:
        libc.signal(number, None)  # SIG_DFL
        explain()

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    before = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGABRT, before)
