"""The Task seam: a dummy task with frozen parameters goes through the trainer untouched."""

import jax
import numpy as np
import pytest
from tiny_runs import assert_bit_equal, bigram, final_state, records, run_config

from ncp_jax.checkpoint.leaves import flatten
from ncp_jax.checkpoint.store import CheckpointError, CheckpointStore
from ncp_jax.train import loop
from ncp_jax.train.loaded import load_run
from ncp_jax.train.loop import Trainer, train

CHANGES = ("mesh.data=2", "mesh.tensor=2", "evaluation.every=null")  # fsdp takes the other two devices


@pytest.fixture
def trained(corpus, tmp_path, monkeypatch):
    """A finished run, the frozen parameters that its steps got, and those it started from."""
    frozen, made = [], Trainer.__init__

    def watching(self, *args):
        made(self, *args)
        step = self.train_step

        def watched(state, given, batch, diagnose):
            frozen.append(given)
            return step(state, given, batch, diagnose=diagnose)

        self.train_step = watched

    monkeypatch.setattr(Trainer, "__init__", watching)
    summary = train(run_config(corpus, tmp_path, "olmo3", *CHANGES), bigram())
    return summary, frozen, tmp_path


def test_frozen_parameters_are_sharded_kept_and_unchanged(trained):
    summary, frozen, workdir = trained
    assert summary["finished"]
    readout = frozen[0]["readout"]
    assert readout.sharding.spec == jax.P("fsdp", "tensor")
    assert all(given["readout"] is readout for given in frozen)
    assert not readout.is_deleted()  # a donated array would be
    key = jax.random.fold_in(jax.random.key(0), 0)
    np.testing.assert_array_equal(readout, bigram().init(key)[1]["readout"].value)
    assert_bit_equal(flatten(load_run(workdir, task=bigram()).frozen), {"readout": np.asarray(readout)})


def test_frozen_parameters_are_neither_optimised_nor_saved_with_each_step(trained):
    _, _, workdir = trained
    names = final_state(workdir, 20)
    assert names["train/params/embed/table"].shape == (280, 8)
    assert not [name for name in names if "readout" in name]
    assert CheckpointStore(f"{workdir}/frozen").steps() == [0]


def test_the_trained_part_learns(trained):
    losses = [record["loss"] for record in records(trained[2], "train")]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.1


def test_a_resumed_run_gets_its_frozen_parameters_back(trained, corpus, tmp_path):
    _, frozen, workdir = trained
    straight = final_state(workdir, 20)
    (workdir / "checkpoints/20").rename(tmp_path / "away")
    said: list[str] = []
    train(run_config(corpus, workdir, "olmo3", *CHANGES), bigram(), said.append)
    assert "from checkpoint 15" in said[0]
    np.testing.assert_array_equal(frozen[-1]["readout"], frozen[0]["readout"])
    assert_bit_equal(final_state(workdir, 20), straight)


def test_other_frozen_values_are_refused(trained, corpus, tmp_path):
    _, frozen, workdir = trained
    (workdir / "checkpoints/20").rename(tmp_path / "away")
    (workdir / "frozen").rename(tmp_path / "old")
    with CheckpointStore(workdir / "frozen") as store:
        store.save(0, {"readout": frozen[0]["readout"] + 1}, {})
    with pytest.raises(CheckpointError, match=r"frozen holds other values .* than checkpoint 15 was trained with"):
        train(run_config(corpus, workdir, "olmo3", *CHANGES), bigram())


def test_metrics_are_read_one_step_late(corpus, tmp_path, monkeypatch):
    """Step n + 1 is dispatched before the metrics of step n are fetched."""
    order: list[str] = []
    fetch, make = jax.device_get, loop.to_device
    monkeypatch.setattr(loop.jax, "device_get", lambda tree: (order.append("read"), fetch(tree))[1])
    monkeypatch.setattr(loop, "to_device", lambda *args: (order.append("feed"), make(*args))[1])
    changes = ("train.steps=4", "evaluation.every=null", "checkpoint.every_steps=null", "optim.schedule.warmup=1")
    train(run_config(corpus, tmp_path, "olmo3", *changes), bigram())
    loop_part = "".join(word[0] for word in order[order.index("feed") :])
    assert loop_part.startswith("ffrfrfrr")
