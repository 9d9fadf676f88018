"""Resume: a run that was killed, or asked to stop, ends bit for bit as one that never was."""

import json
import os
import signal

import pytest
from killed_runs import DEVICES, train_command
from tiny_runs import assert_bit_equal, bigram, final_state, records, run_config, use_devices, watch_batches

from ncp_jax.checkpoint.store import CheckpointStore
from ncp_jax.cli.main import main
from ncp_jax.train import evaluation
from ncp_jax.train.loop import train


@pytest.fixture(params=["ncp_runs", "olmo3_runs"])
def runs(request):
    return request.getfixturevalue(request.param)


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
    assert runs.steps[-1] > 10  # beyond the checkpoint, to be made again
    assert [record["step"] for record in records(runs.resumed, "train")] == list(range(1, 21))
    for kind in ("train", "eval", "diagnostics"):
        ours, theirs = ([timeless(record) for record in records(run, kind)] for run in (runs.resumed, runs.straight))
        assert ours == theirs


def timeless(record: dict) -> dict:
    return {name: value for name, value in record.items() if name not in ("seconds", "tokens_per_second")}


def test_sigterm_saves_and_exits_in_order(olmo3_runs, corpus, tmp_path, monkeypatch, capsys):
    command = [*train_command("olmo3", corpus, tmp_path), f"workdir={tmp_path}/stopped"]
    use_devices(monkeypatch.setattr, DEVICES)
    with monkeypatch.context() as patch:
        watch_batches(patch.setattr, lambda count, batch: os.kill(os.getpid(), signal.SIGTERM) if count == 7 else None)
        assert main(command) == 0
    assert "SIGTERM: saved step 7; the same command continues from there" in capsys.readouterr().out
    assert main(command) == 0
    assert "from checkpoint 7" in capsys.readouterr().out
    assert_bit_equal(final_state(tmp_path / "stopped", 20), final_state(olmo3_runs.straight, 20))


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


def test_a_signal_while_the_last_checkpoint_is_being_written(corpus, tmp_path, monkeypatch):
    close = CheckpointStore.close

    def interrupted(self):
        if self.directory.name == "checkpoints":
            os.kill(os.getpid(), signal.SIGINT)
        close(self)

    monkeypatch.setattr(CheckpointStore, "close", interrupted)
    assert train(run_config(corpus, tmp_path, "olmo3", "train.steps=6"), bigram())["finished"]
    assert final_state(tmp_path, 6)["train/step"] == 6


def test_another_checkpoint_policy_continues_the_same_run(corpus, tmp_path):
    train(run_config(corpus, tmp_path, "olmo3", "evaluation.every=null"), bigram())
    straight = final_state(tmp_path, 20)
    (tmp_path / "checkpoints/20").rename(tmp_path / "away")
    changes = ("checkpoint.every_steps=2", "data.prefetch=0", "train.log_every=3", "evaluation.every=4")
    train(run_config(corpus, tmp_path, "olmo3", *changes), bigram())
    assert_bit_equal(final_state(tmp_path, 20), straight)
