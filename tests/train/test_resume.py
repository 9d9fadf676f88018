"""Resume: a run that was killed, or asked to stop, ends bit for bit as one that never was."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from tiny_runs import (
    assert_bit_equal,
    bigram,
    child_environment,
    config_file,
    digest,
    final_state,
    records,
    run_config,
    use_devices,
    watch_batches,
)

from ncp_jax.cli.main import main
from ncp_jax.train import evaluation
from ncp_jax.train.loop import train

# Prefetch reaches beyond the gap between checkpoint and kill; accumulation is on.
CHANGES = [
    "train.batch=16", "train.micro_batches=2", "data.prefetch=8", "data.workers=2", "checkpoint.every_steps=10",
    "optim.optimizer=adamw",
]  # fmt: skip
KILLED_AT = 13


class Runs(NamedTuple):
    """A straight run, and one of the same config that was killed and continued; digests of batches by step."""

    straight: Path
    resumed: Path
    digests: dict[int, int]
    digests_again: dict[int, int]
    before: list[int]  # steps in metrics.jsonl, and ...
    saved: list[str]  # ... checkpoints, as the kill left them


@pytest.fixture(scope="module", params=["ncp", "olmo3"])
def runs(request, corpus, tmp_path_factory) -> Runs:
    folder = tmp_path_factory.mktemp(request.param)
    changes = [change for change in CHANGES if request.param == "ncp" or "optim" not in change]  # OLMo-3 has Muon
    command = ["train", str(config_file(folder, corpus, request.param)), *changes]

    def run(workdir: Path, first: int) -> dict[int, int]:
        digests: dict[int, int] = {}
        with pytest.MonkeyPatch.context() as patch:
            use_devices(patch.setattr, 2)
            watch_batches(patch.setattr, lambda n, batch: digests.update({first + n: digest(batch)}))
            assert main([*command, f"workdir={workdir}"]) == 0
        return digests

    straight, resumed = folder / "straight", folder / "resumed"
    digests = run(straight, 0)
    arguments = [__file__, str(resumed), *command, f"workdir={resumed}"]
    killed = subprocess.run([sys.executable, *arguments], env=child_environment(), capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = [record["step"] for record in records(resumed, "train")]
    saved = [path.name for path in (resumed / "checkpoints").iterdir() if path.name.isdigit()]
    with open(resumed / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 14, "lo')  # half a line, as a kill may leave it
    return Runs(straight, resumed, digests, run(resumed, 10), before, saved)


def test_killed_run_continues_bit_for_bit(runs):
    assert runs.saved == ["10"]
    assert_bit_equal(final_state(runs.resumed, 20), final_state(runs.straight, 20))


def test_killed_run_reads_the_batches_that_it_would_have_read(runs):
    assert sorted(runs.digests) == list(range(1, 21))
    assert len(set(runs.digests.values())) == 20
    assert runs.digests_again == {step: value for step, value in runs.digests.items() if step > 10}


def test_what_is_saved_is_all_that_a_step_needs(runs):
    """Parameters, optimizer state, step and RNG: so their equality is the run's."""
    names = final_state(runs.straight, 20)
    assert {name.split("/")[1] for name in names} == {"step", "key", "params", "opt_state"}
    assert names["train/step"] == 20


def test_metrics_have_each_step_once_and_equal_values(runs):
    assert runs.before[-1] > 10  # beyond the checkpoint, to be made again
    assert [record["step"] for record in records(runs.resumed, "train")] == list(range(1, 21))
    for kind in ("train", "eval"):
        ours, theirs = ([_timeless(record) for record in records(run, kind)] for run in (runs.resumed, runs.straight))
        assert ours == theirs


@pytest.mark.parametrize("runs", ["olmo3"], indirect=True)
def test_sigterm_saves_and_exits_in_order(runs, corpus, tmp_path, monkeypatch, capsys):
    command = ["train", str(config_file(tmp_path, corpus, "olmo3")), *CHANGES[:-1], f"workdir={tmp_path}/stopped"]
    use_devices(monkeypatch.setattr, 2)
    with monkeypatch.context() as patch:
        watch_batches(patch.setattr, lambda count, batch: os.kill(os.getpid(), signal.SIGTERM) if count == 7 else None)
        assert main(command) == 0
    assert "SIGTERM: saved step 7; the same command continues from there" in capsys.readouterr().out
    assert main(command) == 0
    assert "from checkpoint 7" in capsys.readouterr().out
    assert_bit_equal(final_state(tmp_path / "stopped", 20), final_state(runs.straight, 20))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_returns_a_summary_that_says_unfinished(corpus, tmp_path, monkeypatch, number):
    before = signal.getsignal(number)
    watch_batches(monkeypatch.setattr, lambda count, batch: os.kill(os.getpid(), number) if count == 7 else None)
    summary = train(run_config(corpus, tmp_path, "olmo3"), bigram())
    assert (summary["finished"], summary["step"]) == (False, 7)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert signal.getsignal(number) is before


def test_a_signal_cuts_the_last_evaluation_short_and_the_next_process_makes_it(corpus, tmp_path, monkeypatch):
    config = run_config(corpus, tmp_path, "olmo3", "train.steps=6", "evaluation.every=null")
    send, original = [True], evaluation.with_bytes

    def with_bytes(batch, token_bytes):
        if send:
            os.kill(os.getpid(), signal.SIGTERM)
            send.clear()
        return original(batch, token_bytes)

    monkeypatch.setattr(evaluation, "with_bytes", with_bytes)
    train(config, bigram())
    assert records(tmp_path, "eval") == []
    said: list[str] = []
    summary = train(config, bigram(), said.append)
    assert summary["best_step"] == 6
    assert [record["step"] for record in records(tmp_path, "eval")] == [6]
    assert "all 6 steps are done" in said
    assert len(records(tmp_path, "train")) == 6


def test_a_second_signal_ends_at_once(corpus, tmp_path, monkeypatch):
    config = run_config(corpus, tmp_path, "olmo3", "train.steps=6")

    def twice(number, batch):
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    watch_batches(monkeypatch.setattr, twice)
    with pytest.raises(KeyboardInterrupt):
        train(config, bigram())
    monkeypatch.undo()
    assert train(config, bigram())["step"] == 6


def test_another_checkpoint_policy_continues_the_same_run(corpus, tmp_path):
    train(run_config(corpus, tmp_path, "olmo3", "evaluation.every=null"), bigram())
    straight = final_state(tmp_path, 20)
    (tmp_path / "checkpoints/20").rename(tmp_path / "away")
    changes = ("checkpoint.every_steps=2", "data.prefetch=0", "train.log_every=3", "evaluation.every=4")
    train(run_config(corpus, tmp_path, "olmo3", *changes), bigram())
    assert_bit_equal(final_state(tmp_path, 20), straight)


def _run_and_kill(workdir: Path, arguments: list[str]) -> None:
    """A run that ends by SIGKILL a few steps after checkpoint 10 is complete."""

    def kill(number: int, batch: dict) -> None:
        if number < KILLED_AT:
            return
        for _ in range(600):
            if (workdir / "checkpoints/10").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.1)

    use_devices(setattr, 2)
    watch_batches(setattr, kill)
    main(arguments)


def _timeless(record: dict) -> dict:
    return {name: value for name, value in record.items() if name not in ("seconds", "tokens_per_second")}


if __name__ == "__main__":
    _run_and_kill(Path(sys.argv[1]), sys.argv[2:])
