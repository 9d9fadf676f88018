"""From a trained run to text: the best checkpoint is kept, chosen and sampled from."""

import json
import re
import shutil

import numpy as np
import pytest
from tiny_runs import assert_bit_equal, bigram, final_state, run_config, write_text

from ncp_jax.checkpoint.leaves import flatten
from ncp_jax.checkpoint.store import CheckpointStore
from ncp_jax.cli.main import main
from ncp_jax.config import ConfigError
from ncp_jax.data.prepare import Options, prepare
from ncp_jax.train import loaded, loop
from ncp_jax.train.loaded import load_run
from ncp_jax.train.loop import train


@pytest.fixture
def worsening(corpus, tmp_path, monkeypatch):
    """A run whose held-out loss is lowest at step 8 of 20: evaluated every 4, saved at the end or when it is best."""
    losses = iter([3.0, 2.0, 2.5, 2.4, 2.3])
    real = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", lambda *args: real(*args) | {"bits_per_byte": next(losses)})
    changes = ("evaluation.every=4", "checkpoint.every_steps=null", "checkpoint.keep=1")
    return train(run_config(corpus, tmp_path, "olmo3", *changes), bigram()), tmp_path


def test_the_best_is_kept_beside_the_newest(worsening):
    summary, workdir = worsening
    store = CheckpointStore(workdir / "checkpoints")
    assert (store.steps(), store.best_step()) == ([8, 20], 8)
    assert (summary["best_step"], summary["best_bits_per_byte"]) == (8, 2.0)


def test_a_run_is_loaded_at_the_step_that_is_asked_for(worsening):
    _, workdir = worsening
    for asked, step in (("best", 8), ("latest", 20), ("8", 8), (20, 20)):
        found = load_run(workdir, asked, task=bigram())
        assert found.step == step
        stored = {name: value for name, value in final_state(workdir, step).items() if name.startswith("train/params/")}
        ours = {f"train/params/{name}": np.asarray(value) for name, value in flatten(found.params).items()}
        assert_bit_equal(ours, stored)
    with pytest.raises(ConfigError, match="no checkpoint of step 9; give best, latest, or one of 8, 20"):
        load_run(workdir, "9", task=bigram())
    with pytest.raises(ConfigError, match="no checkpoint of step newest; give best"):
        load_run(workdir, "newest", task=bigram())


def test_keep_best_off(corpus, tmp_path):
    changes = ("evaluation.every=4", "checkpoint.every_steps=null", "checkpoint.keep=1", "evaluation.keep_best=false")
    train(run_config(corpus, tmp_path, "olmo3", *changes), bigram())
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [20]


def test_sample_continues_a_prompt(ncp_run, tmp_path, capsys, monkeypatch):
    """Twice the same, the second time from a copy of the directory alone: its corpus is not needed any more."""
    arguments = ["the whale", "--tokens", "20", "--step", "best", "--seed", "3"]
    assert main(["sample", str(ncp_run), *arguments]) == 0
    text = capsys.readouterr().out
    assert text.startswith("the whale")
    assert len(text) > len("the whale") + 5

    shutil.copytree(ncp_run, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    config = json.loads((tmp_path / "moved/config.json").read_text())
    config["config"]["data"]["mixture"][0]["path"] = "gone"
    (tmp_path / "moved/config.json").write_text(json.dumps(config))
    assert main(["sample", "moved", *arguments]) == 0
    assert capsys.readouterr().out == text


def test_an_unusual_end_of_text_token_is_remembered(corpus, tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text((corpus / "tokenizer.json").read_text().replace("<|endoftext|>", "<stop>"))
    options = Options(out=str(tmp_path / "c"), tokenizer=str(tokenizer), eos="<stop>", val_fraction=0.2)
    prepare([str(write_text(tmp_path / "text.jsonl"))], options)
    train(run_config(tmp_path / "c", tmp_path / "run", "olmo3", "train.steps=5"), bigram())
    assert load_run(tmp_path / "run", task=bigram()).tokenizer.eos_name == "<stop>"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", ""], "the prompt is empty; give at least one character"),
        (["RUN", "x", "--tokens", "0"], "asked for 0 new tokens; ask for at least 1"),
        (["RUN", "x", "--top-p", "1.5"], r"top-p 1.5 is not in \(0, 1\]"),
        (["RUN", "x", "--top-k", "0"], "top-k 0 keeps no token"),
        (["RUN", "x", "--temperature", "-1"], "temperature -1.0 is not a number from 0"),
        (["RUN", "x", "--step", "7"], "no checkpoint of step 7; give best, latest, or one of"),
        (["nowhere", "x"], "nowhere has no config.json; is it a run directory made by 'ncp-jax train'?"),
    ],
)
def test_sample_refusals(ncp_run, capsys, arguments, message):
    assert main(["sample", *(str(ncp_run) if part == "RUN" else part for part in arguments)]) == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err), captured.err
    assert captured.out == ""


def test_a_task_without_logits_cannot_be_sampled(worsening, capsys, monkeypatch):
    monkeypatch.setattr(loaded, "build_task", lambda *args: bigram())
    assert main(["sample", str(worsening[1]), "x"]) == 2
    assert "holds a 'bigram', which gives no token logits" in capsys.readouterr().err
