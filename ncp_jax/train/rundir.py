"""The run directory: its lock, its config, its metrics and its summary.

    RUN/config.json  metrics.jsonl  summary.json  checkpoints/  report/  eval/  lock
"""

import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ncp_jax.config import ConfigError, differences, identity, to_dict

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorstore", "numpy", "libtpu")


class RunDirectoryError(ConfigError):
    """A run directory that cannot be used. The message names the path and the remedy."""


class RunDirectory:
    """One run's files. Nothing in it is written without the lock."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory. A second process gets an error that names the first. The lock dies with its process."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = open(self.path / "lock", "a+")  # noqa: SIM115  kept open: closing it would release the lock
        except OSError as error:
            raise RunDirectoryError(f"cannot write to run directory {self.path}: {error.strerror}") from None
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
            handle.write(f"process {os.getpid()}")
            handle.flush()
            yield

    def write_config(self, config: Any) -> None:
        """Write config.json, or check the one there: another experiment's directory is refused with the differences."""
        ours, found = identity(config), read_json(self.path / "config.json")
        if found and found["identity"] != ours:
            lines = "\n  ".join(differences(found["config"], to_dict(config)))
            raise RunDirectoryError(
                f"{self.path} holds another experiment ({found['identity']}, this one is {ours}); choose another "
                f"workdir, or undo these changes (there -> here):\n  {lines}"
            )
        document = {"identity": ours, "config": to_dict(config), "versions": versions(), "git": git_state()}
        write_json(self.path / "config.json", document)

    def log(self, record: dict) -> None:
        """Append one line to metrics.jsonl."""
        with open(self.metrics, "a") as file:
            file.write(json.dumps(record) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop metrics of steps after `step`: a resumed run will make them again."""
        if not self.metrics.exists():
            return
        kept = [line for line in self.metrics.read_text().splitlines() if _step_of(line) <= step]
        _replace(self.metrics, "".join(line + "\n" for line in kept))

    def records(self) -> list[dict]:
        """All logged lines; a half-written last one is left out."""
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        return [json.loads(line) for line in lines if _step_of(line) != float("inf")]

    def write_summary(self, summary: dict) -> None:
        write_json(self.path / "summary.json", summary)


def versions() -> dict[str, str]:
    """Versions of the packages a result depends on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any] | None:
    """Commit of the code, and whether it was changed since. None outside a checkout."""
    try:
        here = Path(__file__).parent
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, check=True)
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
    _replace(path, json.dumps(content, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        raise RunDirectoryError(f"cannot write {path}: {error.strerror}; what was there is unchanged") from None


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError):
        return float("inf")
