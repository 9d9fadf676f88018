"""The run directory: its lock, its config, its tokenizer, its metrics and its summary.

RUN/config.json  tokenizer.json  metrics.jsonl  summary.json  checkpoints/  frozen/  report/  eval/  lock
"""

import fcntl
import json
import math
import os
import queue
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ncp_jax.config import ConfigError, differences, from_dict, identity, science, to_dict

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorstore", "numpy", "libtpu")
ROOT = Path(__file__).parents[2]  # of the checkout
LENGTH = ("train.steps", "train.tokens")


class RunDirectoryError(ConfigError):
    """A run directory that cannot be used. The message names the path and the remedy."""


class RunDirectory:
    """One run's files. Of several processes one writes: with `writes` off, every writing method does nothing."""

    def __init__(self, path: str | Path, writes: bool = True, background: bool = False):
        """`background`: metrics are written by a thread, so that a slow disk here delays no other process."""
        if "://" in str(path):
            raise RunDirectoryError(
                f"workdir '{path}' is a URL; a run directory lies on a local or mounted disk, for example runs/NAME"
            )
        self.path, self._writes = Path(path), writes
        self.checkpoints, self.frozen = self.path / "checkpoints", self.path / "frozen"
        self.metrics = self.path / "metrics.jsonl"
        self._background = _Background(self._append) if background and writes else None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory. A second run gets an error that names the first. The lock dies with its process."""
        if not self._writes:
            yield
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = open(self.path / "lock", "a+")  # noqa: SIM115  kept open: closing it would release the lock
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write to run directory {self.path}: {error.strerror}; choose another workdir"
            ) from None
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                handle.seek(0)
                owner = handle.read().strip() or "another process"
                raise RunDirectoryError(
                    f"run directory {self.path} is in use by {owner}; wait for it, stop it, or choose another workdir"
                ) from None
            handle.truncate(0)
            handle.write(f"process {os.getpid()} on {socket.gethostname()}")
            handle.flush()
            try:
                yield
            finally:
                self.flush()

    def check_config(self, config: Any) -> None:
        """Raise RunDirectoryError with the differences if the directory holds another experiment."""
        found = read_json(self.path / "config.json")
        if found is not None:
            check_same(config, found["config"], f"run directory {self.path}", self.path)

    def write_config(self, config: Any, tokenizer: bytes | None, eos: int) -> None:
        """Write config.json and the tokenizer that text of this run needs, so that the run can be used alone."""
        if not self._writes:
            return
        if tokenizer is not None and not (self.path / "tokenizer.json").exists():
            _replace(self.path / "tokenizer.json", tokenizer)
        document = {"identity": identity(config), "config": to_dict(config), "eos": eos}
        write_json(self.path / "config.json", document | {"versions": versions(), "git": git_state()})

    def log(self, record: dict) -> None:
        """Append one line to metrics.jsonl; numbers that are not finite become null. In the background, an error is the
        next call's."""
        if not self._writes:
            return
        line = json.dumps(_finite(record), allow_nan=False) + "\n"
        if self._background is None:
            self._append(line)
        else:
            self._background.put(line)

    def flush(self) -> None:
        """Return when all metrics are written. Raises as `log`."""
        if self._background is not None:
            self._background.flush()

    def _append(self, line: str) -> None:
        try:
            with open(self.metrics, "a") as file:
                file.write(line)
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write {self.metrics}: {error.strerror}; free space or fix the permissions, then start the "
                "run again: it continues from its newest checkpoint"
            ) from None

    def forget_after(self, step: int) -> None:
        """Drop metrics of steps after `step`, and broken lines: a resumed run will make them again."""
        if not self._writes or not self.metrics.exists():
            return
        kept = [line for line in self.metrics.read_text().splitlines() if _step_of(line) <= step]
        _replace(self.metrics, "".join(line + "\n" for line in kept).encode())

    def write_summary(self, summary: dict) -> None:
        if self._writes:
            write_json(self.path / "summary.json", _finite(summary))


class _Background:
    """Lines that a thread writes, in order. After a failure it writes no more; whoever calls next gets the failure."""

    def __init__(self, write: Callable[[str], None]):
        self._write = write
        self._failure: RunDirectoryError | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._run, name="metrics", daemon=True).start()

    def put(self, line: str) -> None:
        self._check()
        self._lines.put(line)

    def flush(self) -> None:
        self._lines.join()
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _run(self) -> None:
        failed = False
        while True:
            line = self._lines.get()
            try:
                if not failed:
                    self._write(line)
            except RunDirectoryError as error:
                self._failure, failed = error, True
            finally:
                self._lines.task_done()


def check_same(config: Any, stored: dict, where: str, run: Path) -> None:
    """Raise RunDirectoryError unless `stored`, a config found in a place of `run`, is the same experiment."""
    ours = science(to_dict(config))
    try:
        theirs = science(to_dict(from_dict(type(config), stored)))  # fields that are newer than it get their defaults
    except ConfigError:
        theirs = science(stored)
    lines = differences(theirs, ours)
    if not lines:
        return
    changes = "\n  ".join(lines)
    if all(line.startswith(LENGTH) for line in lines):
        raise RunDirectoryError(
            f"{where} holds a run of another length (there -> here):\n  {changes}\n"
            "the learning rate was scheduled to end with the run, so a longer or shorter one is another experiment: "
            f"choose another workdir, and init_from.run={run} to begin with its weights"
        )
    raise RunDirectoryError(
        f"{where} holds another experiment; choose another workdir, or undo these changes (there -> here):\n  {changes}"
    )


def versions() -> dict[str, str]:
    """Versions of the packages a result depends on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_state(root: Path = ROOT) -> dict[str, Any] | None:
    """Commit of the code, and whether it was changed since. None where neither git nor REVISION knows it.

    `root`: the checkout. REVISION holds `git describe --dirty` of where the code came from, if .git was left behind
    (launch/tpu_vm.sh push, launch/gke/Dockerfile).
    """
    revision = root / "REVISION"
    if revision.exists() and not (root / ".git").exists():
        text = revision.read_text().strip()
        return {"commit": text.removesuffix("-dirty"), "changed": text.endswith("-dirty")}
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
        return {"commit": commit.stdout.strip(), "changed": bool(status.stdout.strip())}
    except (OSError, subprocess.CalledProcessError):
        return None


def read_json(path: Path) -> Any:
    """Content of a JSON file, None if there is none. Raises RunDirectoryError if it is damaged."""
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise RunDirectoryError(f"{path} is not valid JSON ({error}); restore it or start in another workdir") from None


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file as a whole or not at all."""
    _replace(path, (json.dumps(content, indent=2) + "\n").encode())


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        raise RunDirectoryError(f"cannot write {path}: {error.strerror}; what was there is unchanged") from None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")
