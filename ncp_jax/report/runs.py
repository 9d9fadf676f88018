"""Run: what one run directory recorded, read from metrics.jsonl, summary.json and config.json.

Reading is forgiving, since a report is most wanted after a crash: what is missing or damaged becomes a note.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ncp_jax.config import ConfigError

KINDS = ("train", "eval", "diagnostics", "skipped")


class ReportError(ConfigError):
    """Runs that cannot be reported. The message names the path and the remedy."""


@dataclasses.dataclass
class Run:
    """One run. `records` maps a kind to its lines, in order of steps, one per step."""

    name: str
    path: Path
    records: dict[str, list[dict]]
    summary: dict
    document: dict  # config.json: config, identity, versions, git
    yardsticks: dict[str, float]  # bits per byte of something that needs no training, by name
    notes: list[str]
    brierlm: list[dict] = dataclasses.field(default_factory=list)  # RUN/eval/brierlm_*.json, by step

    @property
    def config(self) -> dict:
        return self.document.get("config") or {}

    def keys(self, kind: str) -> list[str]:
        """Names that any record of a kind holds, in order of first appearance."""
        return list(dict.fromkeys(key for record in self.records[kind] for key in record))

    def series(self, kind: str, key: str) -> tuple[list[float], list[float]]:
        """(tokens seen, value) of every record of a kind that holds a finite number under `key`."""
        found = [(r, number(r.get(key))) for r in self.records[kind]]
        pairs = [(float(r.get("tokens", r["step"])), value) for r, value in found if value is not None]
        return [x for x, _ in pairs], [y for _, y in pairs]

    def last(self, kind: str, key: str) -> Any:
        """The newest value under `key`, None if there is none."""
        return next((r[key] for r in reversed(self.records[kind]) if r.get(key) is not None), None)


def load_all(paths: Iterable[str | Path]) -> list[Run]:
    """The runs of several directories, with names that tell them apart. Raises ReportError if nothing can be shown."""
    folders = list(dict.fromkeys(Path(path).resolve() for path in paths))
    runs = [load(folder) for folder in folders]
    if not any(run.summary or any(run.records.values()) for run in runs):
        listed = ", ".join(str(folder) for folder in folders)
        raise ReportError(f"nothing to report: {listed} holds no metrics yet; train first, with ncp-jax train")
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = f"{run.path.parent.name}/{run.path.name}"
    return runs


def load(path: str | Path) -> Run:
    """One run directory. Raises ReportError if it does not exist or is no run directory."""
    path = Path(path)
    if not path.is_dir():
        raise ReportError(f"no run directory {path}; give the workdir of a run")
    if not any((path / name).exists() for name in ("metrics.jsonl", "summary.json", "config.json")):
        raise ReportError(f"{path} is no run directory: it has no config.json, metrics.jsonl or summary.json")
    notes: list[str] = []
    document, summary = (_read_object(path / name, notes) for name in ("config.json", "summary.json"))
    yardsticks = _read_object(path / "yardsticks.json", notes, wanted=False)
    records = _read_metrics(path / "metrics.jsonl", notes)
    if records["skipped"]:
        notes.append(f"{len(records['skipped'])} steps were skipped because a loss was not finite")
    return Run(
        name=str(summary.get("name") or (document.get("config") or {}).get("name") or path.name),
        path=path,
        records=records,
        summary=summary,
        document=document,
        yardsticks={name: value for name, value in yardsticks.items() if number(value) is not None},
        notes=notes,
        brierlm=_read_scores(path / "eval", notes),
    )


def number(value: Any) -> float | None:
    """The finite number that `value` is, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _read_object(file: Path, notes: list[str], wanted: bool = True) -> dict:
    if not file.exists():
        if wanted:
            notes.append(f"{file.name} is missing")
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        notes.append(f"{file.name} is damaged ({error})")
        return {}
    return content if isinstance(content, dict) else {}


def _read_scores(folder: Path, notes: list[str]) -> list[dict]:
    found = [_read_object(file, notes) for file in sorted(folder.glob("brierlm_*.json"))]
    sound = [score for score in found if isinstance(score.get("step"), int) and isinstance(score.get("brierlm"), dict)]
    return sorted(sound, key=lambda score: score["step"])


def _read_metrics(file: Path, notes: list[str]) -> dict[str, list[dict]]:
    """Records by kind. Of two records of one step the later counts: a resumed run repeats steps."""
    by_step: dict[str, dict[int, dict]] = {kind: {} for kind in KINDS}
    if not file.exists():
        notes.append("metrics.jsonl is missing")
        return {kind: [] for kind in KINDS}
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    bad = []
    for position, line in enumerate(lines, 1):
        record = _parse(line)
        if record is None:
            bad += [position] if line.strip() else []
        elif record["kind"] in by_step:
            by_step[record["kind"]][record["step"]] = record
    if bad == [len(lines)]:
        notes.append("the last line of metrics.jsonl is half-written, as after a crash; it is left out")
    elif bad:
        notes.append(f"metrics.jsonl: {len(bad)} lines cannot be read, the first is line {bad[0]}; they are left out")
    return {kind: [steps[step] for step in sorted(steps)] for kind, steps in by_step.items()}


def _parse(line: str) -> dict | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    sound = isinstance(record, dict) and isinstance(record.get("step"), int) and isinstance(record.get("kind"), str)
    return record if sound else None
