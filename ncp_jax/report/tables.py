"""Tables of a report: one row per run for the reader, every number as CSV for other programs."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from ncp_jax.report.runs import Run, number
from ncp_jax.report.text import duration, fixed, power, short

Row = dict[str, str]


def summary_rows(runs: Sequence[Run]) -> list[Row]:
    """Heading -> printed value, for each run. What summary.json lacks is taken from the metrics."""
    return [_summary_row(figures(run)) | {"_run": run.name} for run in runs]


def figures(run: Run) -> dict[str, float | None]:
    """The numbers that characterise a run; None where they are unknown."""
    _, held_out = run.series("eval", "bits_per_byte")
    _, speed = run.series("train", "tokens_per_second")
    known = {key: number(value) for key, value in run.summary.items()}
    last = run.records["train"][-1] if run.records["train"] else {}
    guesses = {
        "best_bits_per_byte": min(held_out, default=None),
        "bits_per_byte": held_out[-1] if held_out else None,
        "loss/ntp": number(run.last("eval", "loss/ntp")),
        "tokens": number(last.get("tokens")),
        "seconds": number(last.get("seconds")),
        "step": number(last.get("step")),
        "tokens_per_second": sorted(speed)[len(speed) // 2] if speed else None,
    }
    names = [*guesses, "best_step", "parameters", "non_embedding_parameters", "flops_per_token"]
    return {name: known[name] if known.get(name) is not None else guesses.get(name) for name in names}


def write_csv(runs: Sequence[Run], out: Path) -> list[Path]:
    """summary.csv, train.csv, eval.csv, diagnostics.csv; lists are JSON in their cell."""
    tables = {"summary": [{"run": run.name, "task": run.summary.get("task"), **figures(run)} for run in runs]}
    for kind in ("train", "eval", "diagnostics"):
        tables[kind] = [{"run": run.name, **record} for run in runs for record in run.records[kind]]
    return [_write(out / f"{name}.csv", rows) for name, rows in tables.items() if rows]


def _summary_row(known: dict[str, float | None]) -> Row:
    return {
        "Best bits/byte": fixed(known["best_bits_per_byte"]),
        "Last bits/byte": fixed(known["bits_per_byte"]),
        "NTP loss": fixed(known["loss/ntp"], 3),
        "Parameters": short(known["parameters"]),
        "Without embeddings": short(known["non_embedding_parameters"]),
        "FLOPs per token": power(known["flops_per_token"]),
        "Tokens": short(known["tokens"]),
        "Tokens/s": short(known["tokens_per_second"]),
        "Time": duration(known["seconds"]),
    }


def _write(file: Path, rows: list[dict]) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row if name != "kind"))
    with open(file, "w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, names, extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: json.dumps(v) if isinstance(v, (list, dict)) else v for k, v in row.items()})
    return file
