"""Killed runs: a straight run, and its twin that SIGKILL ends a few steps after a checkpoint and that then continues.

As a program: `killed_runs.py WORKDIR train CONFIG ...` is `ncp-jax train CONFIG ...`, killed.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from tiny_runs import child_environment, config_file, digest, records, use_devices, watch_batches

from ncp_jax.cli.main import main

# Prefetch reaches beyond the gap between checkpoint and kill; accumulation is on. OLMo-3 trains with Muon.
COMMON = ["train.batch=16", "train.micro_batches=2", "data.prefetch=8", "data.workers=2", "checkpoint.every_steps=10"]
CHANGES = {"olmo3": COMMON, "ncp": [*COMMON, "optim.optimizer=adamw", "train.diagnose_every=20"]}
SAVED_AT, KILLED_AT, DEVICES = 10, 13, 2


class Runs(NamedTuple):
    """Both directories, the digest of each batch by step, and what the kill left."""

    straight: Path
    resumed: Path
    digests: dict[int, int]
    digests_again: dict[int, int]
    steps: list[int]  # in metrics.jsonl
    saved: list[str]  # checkpoints


def straight_and_killed(model: str, corpus: Path, folder: Path) -> Runs:
    """Train twice, once through a kill; the same command each time."""
    command, straight, resumed = train_command(model, corpus, folder), folder / "straight", folder / "resumed"
    digests = _run([*command, f"workdir={straight}"], 0)
    killed = subprocess.run(
        [sys.executable, __file__, str(resumed), *command, f"workdir={resumed}"],
        env=child_environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    steps = [record["step"] for record in records(resumed, "train")]
    saved = [path.name for path in (resumed / "checkpoints").iterdir() if path.name.isdigit()]
    with open(resumed / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 14, "lo')  # half a line, as a kill may leave it
    again = _run([*command, f"workdir={resumed}"], SAVED_AT)
    return Runs(straight, resumed, digests, again, steps, saved)


def train_command(model: str, corpus: Path, folder: Path) -> list[str]:
    return ["train", str(config_file(folder, corpus, model)), *CHANGES[model]]


def _run(command: list[str], first: int) -> dict[int, int]:
    digests: dict[int, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        use_devices(patch.setattr, DEVICES)
        watch_batches(patch.setattr, lambda number, batch: digests.update({first + number: digest(batch)}))
        assert main(command) == 0
    return digests


def _run_and_kill(workdir: Path, command: list[str]) -> None:
    def kill(number: int, batch: dict) -> None:
        if number < KILLED_AT:
            return
        for _ in range(600):  # until the checkpoint, written in the background, is complete
            if (workdir / f"checkpoints/{SAVED_AT}").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.1)

    use_devices(setattr, DEVICES)
    watch_batches(setattr, kill)
    main(command)


if __name__ == "__main__":
    _run_and_kill(Path(sys.argv[1]), sys.argv[2:])
