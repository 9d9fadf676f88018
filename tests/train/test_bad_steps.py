"""Bad steps: a loss that is not finite, or a gradient above the ceiling, stops the run or is left out, in words."""

import numpy as np
import pytest
from tiny_runs import bigram, config_file, final_state, records, run_config, watch_batches

from ncp_jax.checkpoint.store import CheckpointStore
from ncp_jax.cli.main import main
from ncp_jax.train import loop
from ncp_jax.train.loop import SKIPS_IN_A_ROW, BadStep, train


@pytest.fixture
def poison(monkeypatch):
    """poison(step=value, ...): what to add to the loss of each row at a step; every batch carries the array."""

    def inject(values: dict[int, float], start: int = 0) -> None:
        def poisoned(number: int, batch: dict) -> dict:
            return batch | {"poison": np.full(len(batch["tokens"]), values.get(start + number, 0.0), np.float32)}

        monkeypatch.undo()
        watch_batches(monkeypatch.setattr, poisoned)

    return inject


def test_stop_names_step_and_term_and_keeps_the_last_good_checkpoint(corpus, tmp_path, poison):
    config = run_config(corpus, tmp_path, "olmo3")
    poison({7: np.nan})
    with pytest.raises(BadStep, match=r"step 7: loss/ntp = nan, .*; checkpoint 5 is sound.*on_bad_step=skip"):
        train(config, bigram())
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [5]
    assert [record["step"] for record in records(tmp_path, "train")] == [1, 2, 3, 4, 5, 6]
    poison({})
    assert train(config, bigram())["step"] == 20
    losses = [record["loss"] for record in records(tmp_path, "train")]
    assert len(losses) == 20
    assert np.isfinite(losses).all()


def test_a_bad_step_is_never_saved(corpus, tmp_path, poison):
    """Also where the bad step is itself the one to be saved and evaluated."""
    poison({10: np.inf})
    with pytest.raises(BadStep, match=r"step 10: loss/ntp = .*checkpoint 5 is sound"):
        train(run_config(corpus, tmp_path, "olmo3"), bigram())
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [5]
    assert records(tmp_path, "eval") == []


def test_the_command_fails(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "build_task", lambda *args: bigram())
    nan = {"poison": np.full(8, np.nan, "f4")}
    watch_batches(monkeypatch.setattr, lambda number, batch: batch | nan)
    assert main(["train", str(config_file(tmp_path, corpus, "olmo3")), f"workdir={tmp_path}/run"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("ncp-jax train: step 1: loss/ntp = nan")
    assert "no checkpoint was written yet" in said


def test_skip_changes_nothing_but_the_count_and_goes_on(corpus, tmp_path, poison):
    poison({7: np.nan})
    said: list[str] = []
    changes = ("train.on_bad_step=skip", "checkpoint.every_steps=1", "checkpoint.keep=20")
    assert train(run_config(corpus, tmp_path, "olmo3", *changes), bigram(), said.append)["step"] == 20
    before, after, later = (final_state(tmp_path, step) for step in (6, 7, 8))
    moved = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert moved
    assert all(np.issubdtype(before[name].dtype, np.integer) for name in moved)  # step and schedule counters go on
    assert not np.array_equal(after["train/params/embed/table"], later["train/params/embed/table"])
    (record,) = records(tmp_path, "skipped")
    assert record["step"] == 7
    assert record["reason"] == "loss/ntp = nan, loss = nan, bits_per_byte = nan, gradient_norm = nan"
    assert any(line.startswith("step 7: loss/ntp = nan") and line.endswith("the step was skipped") for line in said)
    assert records(tmp_path, "train")[6]["loss"] is None  # valid JSON


def test_a_stopped_run_continues_with_skip(corpus, tmp_path, poison):
    poison({7: np.nan})
    with pytest.raises(BadStep):
        train(run_config(corpus, tmp_path, "olmo3"), bigram())
    poison({7: np.nan}, start=5)
    summary = train(run_config(corpus, tmp_path, "olmo3", "train.on_bad_step=skip"), bigram())
    assert summary["finished"]
    assert [record["step"] for record in records(tmp_path, "skipped")] == [7]


def test_skipping_forever_is_no_training(corpus, tmp_path, poison):
    poison(dict.fromkeys(range(3, 100), np.nan))
    changes = ("train.on_bad_step=skip", "train.steps=40")
    with pytest.raises(BadStep, match=rf"step {3 + SKIPS_IN_A_ROW}: .* as in {SKIPS_IN_A_ROW} steps before"):
        train(run_config(corpus, tmp_path, "olmo3", *changes), bigram())


def test_gradient_ceiling(corpus, tmp_path, poison):
    poison({4: 1e3, 9: 1e3})
    said: list[str] = []
    with pytest.raises(BadStep, match=r"step 4: gradient_norm = \d+\.?\d* is above train.gradient_ceiling 5"):
        train(run_config(corpus, tmp_path / "stop", "olmo3", "train.gradient_ceiling=5"), bigram())
    poison({4: 1e3, 9: 1e3})
    changes = ("train.gradient_ceiling=5", "train.on_bad_step=skip")
    train(run_config(corpus, tmp_path / "skip", "olmo3", *changes), bigram(), said.append)
    assert [record["step"] for record in records(tmp_path / "skip", "skipped")] == [4, 9]
