"""Weights of another run: parameters alone are taken over; optimizer, schedule, step and data start anew."""

import numpy as np
import pytest
from tiny_runs import bigram, final_state, prepare_corpus, records, run_config

from ncp_jax.checkpoint.leaves import CheckpointMismatch, flatten
from ncp_jax.config import ConfigError
from ncp_jax.train import start
from ncp_jax.train.loop import train

STAGE_TWO = ("train.steps=6", "optim.schedule.warmup=2", "optim.adam_learning_rate=0.001", "evaluation.every=null")


@pytest.fixture(scope="module")
def parent(corpus, tmp_path_factory):
    """A finished run with checkpoints 5, 10, 15, 20, of which 10 is marked as best."""
    workdir = tmp_path_factory.mktemp("parent")
    train(run_config(corpus, workdir, "olmo3", "evaluation.rows=16"), bigram())
    (workdir / "checkpoints/best.json").write_text('{"steps": [10]}')
    return workdir


@pytest.fixture
def begun(monkeypatch):
    """Host copies of the states that runs began with."""
    states = []
    original = start.Saves.begin

    def begin(self, *args):
        found = original(self, *args)
        states.append({name: np.array(value) for name, value in flatten(found.state).items()})
        return found

    monkeypatch.setattr(start.Saves, "begin", begin)
    return states


@pytest.mark.parametrize(("step", "number"), [("latest", 20), ("best", 10), (15, 15)])
def test_parameters_alone_are_taken_over(corpus, parent, tmp_path, begun, step, number):
    said: list[str] = []
    changes = (f"init_from={{run: {parent}, step: {step}}}", *STAGE_TWO)
    summary = train(run_config(corpus, tmp_path, "olmo3", *changes), bigram(), said.append)
    assert f"from the weights of {parent}, step {number}" in said[0]
    saved = final_state(parent, number)
    (state,) = begun
    assert np.array_equal(state["params/embed/table"], saved["train/params/embed/table"])
    assert state["step"] == 0
    moments = [name for name in state if name.startswith("opt_state/")]
    assert len(moments) >= 3
    assert not any(state[name].any() for name in moments)
    assert summary["step"] == 6
    rates = [record["learning_rate/adamw"] for record in records(tmp_path, "train")]
    assert rates[:3] == pytest.approx([0.0005, 0.001, 0.000868], rel=1e-3)  # its own warm-up and peak


def test_a_new_mixture(corpus, parent, tmp_path, begun):
    other = prepare_corpus(tmp_path, seed=1, tokenizer=corpus / "tokenizer.json")
    mixture = f"data.mixture=[{{path: {corpus}, weight: 1}}, {{path: {other}, weight: 3}}]"
    train(run_config(corpus, tmp_path / "run", "olmo3", f"init_from={{run: {parent}}}", mixture, *STAGE_TWO), bigram())
    (evaluation,) = records(tmp_path / "run", "eval")
    sources = [evaluation[f"bits_per_byte/{source}"] for source in (corpus, other)]
    assert min(sources) < evaluation["bits_per_byte"] < max(sources)


def test_a_continued_run_does_not_need_its_source(corpus, parent, tmp_path):
    config = run_config(corpus, tmp_path / "run", "olmo3", f"init_from={{run: {tmp_path}/source}}", *STAGE_TWO)
    (tmp_path / "source").symlink_to(parent)
    train(config, bigram())
    (tmp_path / "source").unlink()
    assert train(config, bigram())["finished"]


def test_other_shapes_are_refused_by_name(corpus, parent, tmp_path):
    config = run_config(corpus, tmp_path, "olmo3", f"init_from={{run: {parent}}}", *STAGE_TWO)
    with pytest.raises(CheckpointMismatch, match=r"differs: train/params/embed/table is .*280, 16\] here"):
        train(config, bigram(width=16))
    assert not (tmp_path / "checkpoints").exists()


def test_a_step_that_is_not_there(corpus, parent, tmp_path):
    config = run_config(corpus, tmp_path, "olmo3", f"init_from={{run: {parent}, step: 7}}", *STAGE_TWO)
    with pytest.raises(ConfigError, match="has no checkpoint of step 7; give best, latest, or one of 5, 10, 15, 20"):
        train(config, bigram())


def test_another_tokenizer_is_refused(parent, tmp_path):
    other = prepare_corpus(tmp_path, seed=2, documents=30)
    config = run_config(other, tmp_path / "run", "olmo3", f"init_from={{run: {parent}}}", *STAGE_TWO)
    with pytest.raises(ConfigError, match=r"another tokenizer than this run's data; .* Prepare the data with .*\.json"):
        train(config, bigram())
