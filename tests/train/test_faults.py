"""Faults: what cannot run says what is wrong, where, and what to do; what was saved before stays as it was."""

import json
import os
import re
import resource
import shutil
import socket
import time

import numpy as np
import pytest
from tiny_runs import assert_bit_equal, bigram, config_file, final_state, records, run_config, watch_batches

from ncp_jax.checkpoint.store import CheckpointSaveError, CheckpointStore
from ncp_jax.cli.main import main
from ncp_jax.data.store import StoreError, TokenWriter
from ncp_jax.train.loop import train
from ncp_jax.train.rundir import RunDirectory, RunDirectoryError


@pytest.fixture
def refused(corpus, tmp_path, capsys):
    """refused(key=value, ...): the message with which `ncp-jax train` refuses a config; nothing is left behind."""

    def message(*changes: str) -> str:
        workdir = tmp_path / "refused"
        status = main(["train", str(config_file(tmp_path, corpus, "ncp")), f"workdir={workdir}", *changes])
        assert status == 2
        assert not workdir.exists()
        said = capsys.readouterr().err
        assert said.startswith("ncp-jax train: ")
        return said.removeprefix("ncp-jax train: ").strip()

    return message


REFUSALS = {
    "train.stepps=3": "unknown config field 'train.stepps'; did you mean 'train.steps'?",
    "modle.vocab=3": "unknown config field 'modle'; did you mean 'model'?",
    "train.steps=many": "config field 'train.steps': .*, got 'many'",
    "train.steps": "override 'train.steps' has no '='; write key=value",
    "train.tokens=100": r"give exactly one of train.steps \(20\) and train.tokens \(100\)",
    "data.sequence=18": "^data.sequence 18 is not a multiple of the chunk size 4; nearest legal .*: 16 or 20",
    "model.backbone.width=34": "^backbone.width 34 does not divide into 4 heads; nearest legal width: 32 or 36$",
    "model.concept.segments=5": "^backbone.width 32 does not divide into concept.segments 5; .*: 2 or 4; .* 30 or 35$",
    "train.batch=12": "^train.batch 12 does not divide over data x fsdp = 8 devices; nearest .* train.batch: 8 or 16$",
    "evaluation.batch=3": "^evaluation.batch 3 does not divide over .* 8 devices; nearest legal evaluation.batch: 8$",
    "train.micro_batches=2": "8 devices x 2 micro-batches = 16; nearest legal train.batch: 16$",
    "mesh.tensor=3": "^mesh data=1 x fsdp=-1 x tensor=3 x seq=1 does not multiply to 8 devices: .* fit 6 or 9 devices",
    "mesh.seq=8": "data.sequence 16 does not divide over seq = 8 devices in chunks of 4; nearest legal .*: 32$",
    "model.vocab=100": "holds ids below 280, the model has 100; set model.vocab to 280 or more",
    "data.mixture=[{path: nowhere}]": "no finished token store at nowhere/train; make one with 'ncp-jax data prepare",
    "evaluation.split=test": "no finished token store at .*/test; make one with",
    "workdir=gs://bucket/run": "workdir 'gs://bucket/run' is a URL; a run directory lies on a local or mounted disk",
    "init_from.run=nowhere": "init_from.run nowhere has no checkpoint under checkpoints/; train it first, or correct",
    "init_from.runn=nowhere": "unknown config field 'init_from.runn'",
    "optim.schedule.warmup=30": "schedule.warmup takes 30 of the first 20 steps .* use at most 19",
}


@pytest.mark.parametrize(("change", "message"), REFUSALS.items(), ids=REFUSALS)
def test_what_cannot_run_is_refused_before_anything_is_written(refused, change, message):
    said = refused(change)
    assert re.search(message, said), said


def test_a_directory_in_use_names_its_owner(corpus, tmp_path, capsys):
    command = ["train", str(config_file(tmp_path, corpus, "olmo3")), f"workdir={tmp_path}/run"]
    with RunDirectory(tmp_path / "run").locked():
        assert main(command) == 2
    said = capsys.readouterr().err
    assert f"run directory {tmp_path}/run is in use by process {os.getpid()} on {socket.gethostname()}" in said
    assert "wait for it, stop it, or choose another workdir" in said
    with RunDirectory(tmp_path / "run").locked():  # released with its process, or here its block
        pass


def test_a_place_that_cannot_be_written(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"cannot write to run directory .*file/run: Not a directory; choose"):
        train(run_config(corpus, tmp_path / "file/run", "olmo3"), bigram())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the failed write, in Orbax's thread
@pytest.mark.parametrize(("limit", "error"), [(8_000, CheckpointSaveError), (1, RunDirectoryError)])
def test_a_full_disk_leaves_the_last_checkpoint(corpus, tmp_path, monkeypatch, limit, error):
    """From step 12 on no file may grow beyond `limit` bytes: first too few for a checkpoint, then for metrics."""
    config, before = run_config(corpus, tmp_path / "full", "olmo3"), resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(number: int, batch: dict) -> None:
        if number == 12:
            while not (tmp_path / "full/checkpoints/10").exists():  # written in the background
                time.sleep(0.05)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))

    with monkeypatch.context() as patch:
        watch_batches(patch.setattr, fill)
        try:
            with pytest.raises(error) as caught:
                train(config, bigram())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert re.search("free space or fix the permissions, then start the run again", str(caught.value))
    assert str(tmp_path / "full") in str(caught.value)
    assert CheckpointStore(tmp_path / "full/checkpoints").steps() == [5, 10]
    train(config, bigram())
    train(run_config(corpus, tmp_path / "straight", "olmo3"), bigram())
    assert_bit_equal(final_state(tmp_path / "full", 20), final_state(tmp_path / "straight", 20))
    assert [record["step"] for record in records(tmp_path / "full", "train")] == list(range(1, 21))


def test_another_experiment_is_refused_with_its_differences(corpus, tmp_path):
    train(run_config(corpus, tmp_path, "olmo3"), bigram())
    kept = (tmp_path / "metrics.jsonl").read_bytes()
    other = run_config(corpus, tmp_path, "olmo3", "optim.adam_learning_rate=0.5", "train.seed=3", "train.log_every=7")
    lines = r"there -> here\):\n  optim.adam_learning_rate: 0.01 -> 0.5\n  train.seed: 0 -> 3$"
    with pytest.raises(RunDirectoryError, match=f"run directory {tmp_path} holds another experiment; .*{lines}"):
        train(other, bigram())
    (tmp_path / "config.json").unlink()  # then the checkpoint itself still knows
    with pytest.raises(RunDirectoryError, match=f"checkpoint {tmp_path}/checkpoints/20 holds another exp.*{lines}"):
        train(other, bigram())
    assert (tmp_path / "metrics.jsonl").read_bytes() == kept


def test_a_finished_run_cannot_be_prolonged(corpus, tmp_path, capsys):
    said: list[str] = []
    first = train(run_config(corpus, tmp_path, "olmo3"), bigram())
    assert train(run_config(corpus, tmp_path, "olmo3"), bigram(), said.append) == first
    assert said[-1] == "all 20 steps are done"
    with pytest.raises(RunDirectoryError) as caught:
        train(run_config(corpus, tmp_path, "olmo3", "train.steps=40"), bigram())
    assert "of another length (there -> here):\n  train.steps: 20 -> 40\n" in str(caught.value)
    assert f"choose another workdir, and init_from.run={tmp_path} to begin with its weights" in str(caught.value)


def test_damaged_config_of_a_run(corpus, tmp_path):
    (tmp_path / "config.json").write_text('{"config": ')
    with pytest.raises(RunDirectoryError, match=r"config.json is not valid JSON .*restore it or start in another"):
        train(run_config(corpus, tmp_path, "olmo3"), bigram())


def test_an_id_outside_the_vocabulary_stops_before_its_step(tmp_path):
    """The manifest says 280 ids, the tokens say otherwise."""
    writer = TokenWriter(tmp_path / "c/train", vocab=300, eos=0, tokenizer="f" * 64, token_bytes=np.ones(300, np.int32))
    writer.append(np.full(400, 299), text_bytes=400, origin="document")
    writer.finish()
    shutil.copytree(tmp_path / "c/train", tmp_path / "c/val")
    for split in ("train", "val"):
        file = tmp_path / "c" / split / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab": 280}))
        np.save(tmp_path / "c" / split / "token_bytes.npy", np.ones(280, np.int32))
    with pytest.raises(StoreError, match=r"id 299 at token \d+ is outside the vocabulary of 280"):
        train(run_config(tmp_path / "c", tmp_path / "run", "olmo3"), bigram())
    assert not (tmp_path / "run/metrics.jsonl").exists()
