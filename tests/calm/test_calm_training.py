"""The CALM family in the trainer: an autoencoder, a language model on its latents, a baseline, and their scores."""

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import VOCAB, assert_bit_equal, final_state, prepare_corpus, records, run_config

from ncp_jax.checkpoint.leaves import flatten
from ncp_jax.cli.main import main
from ncp_jax.config import ConfigError
from ncp_jax.evaluate.brier_runs import block_sampler
from ncp_jax.models.calm.config import AutoencoderConfig, CalmConfig, EnergyHead
from ncp_jax.models.llama import LlamaConfig
from ncp_jax.nn.llama_block import LlamaBackbone
from ncp_jax.train.loaded import load_run
from ncp_jax.train.loop import train

PAD, MASK = VOCAB, VOCAB + 1
AE = AutoencoderConfig(VOCAB + 2, 4, 24, 32, 16, pad=PAD, mask=MASK)
BACKBONE = LlamaBackbone(16, 4, 24)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return prepare_corpus(tmp_path_factory.mktemp("tiny"))


def calm(run, **changes) -> CalmConfig:
    return dataclasses.replace(CalmConfig(1, BACKBONE, AE, str(run), EnergyHead(1, 4, 4, 4)), **changes)


def trained(corpus, folder: Path, model, *changes):
    config = run_config(corpus, folder, "olmo3", "optim.adam_learning_rate=0.01", *changes)
    config = dataclasses.replace(config, name=folder.name, model=model)
    return train(config, say=lambda line: None)


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """(folder, summaries by name): autoencoder, calm, baseline."""
    folder = tmp_path_factory.mktemp("runs")
    found = {"autoencoder": trained(corpus, folder / "autoencoder", AE, "train.steps=60", "evaluation.every=20")}
    found["calm"] = trained(corpus, folder / "calm", calm(folder / "autoencoder"))
    found["baseline"] = trained(corpus, folder / "baseline", LlamaConfig(VOCAB, 1, BACKBONE))
    return folder, found


def test_the_autoencoder_is_evaluated_without_dropout(runs):
    folder, found = runs
    evals = records(folder / "autoencoder", "eval")
    assert {"loss", "loss/reconstruction", "loss/kl", "tokens/mean", "chunks/sample", "dimensions/collapsed"} <= set(
        evals[-1]
    )
    assert evals[-1]["tokens/mean"] > evals[0]["tokens/mean"] > 0
    assert found["autoencoder"]["criterion"] == "loss"
    assert found["autoencoder"]["best_loss"] == min(record["loss"] for record in evals)
    assert evals[-1]["loss"] == pytest.approx(
        4 * evals[-1]["loss/reconstruction"] + 1e-3 * evals[-1]["loss/kl"], rel=1e-6
    )


def test_a_language_model_learns_on_the_trained_latents(runs):
    folder, found = runs
    ours, theirs = load_run(folder / "calm"), load_run(folder / "autoencoder")
    assert_bit_equal(
        *({name: np.asarray(leaf) for name, leaf in flatten(tree).items()} for tree in (ours.frozen, theirs.params))
    )
    evals = records(folder / "calm", "eval")
    assert {"loss", "loss/energy", "loss/fidelity", "loss/diversity"} <= set(evals[-1])
    assert evals[-1]["loss"] < evals[0]["loss"]
    assert "bits_per_byte" not in found["calm"]


def test_a_resumed_run_keeps_its_latents(corpus, runs, tmp_path):
    """As if killed after step 10 of 20, then continued with the autoencoder's run gone: bit for bit the same."""
    folder, _ = runs
    shutil.copytree(folder / "calm", tmp_path / "calm")
    for later in ("15", "20"):
        shutil.rmtree(tmp_path / "calm/checkpoints" / later)
    moved = (folder / "autoencoder").rename(tmp_path / "away")
    try:
        with pytest.raises(ConfigError, match=r"has no config\.json"):
            trained(corpus, tmp_path / "new", calm(folder / "autoencoder"))
        found = trained(corpus, tmp_path / "calm", calm(folder / "autoencoder"))
    finally:
        moved.rename(folder / "autoencoder")
    assert [record["step"] for record in records(tmp_path / "calm", "train")] == list(range(1, 21))
    assert found["step"] == 20
    assert_bit_equal(final_state(tmp_path / "calm", 20), final_state(folder / "calm", 20))


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (lambda run: calm("nowhere"), "Train an autoencoder first, or correct the path"),
        (lambda run: calm(run, autoencoder_run=None), "autoencoder_run is missing: .*train one"),
        (
            lambda run: calm(run, autoencoder=dataclasses.replace(AE, chunk=2)),
            r"model\.autoencoder\.chunk: 2 -> 4; copy its model config",
        ),
        (lambda run: calm(run.parent / "baseline"), "holds a 'llama', not an autoencoder"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused_before_any_step(corpus, runs, tmp_path, model, complaint):
    with pytest.raises(ConfigError, match=complaint):
        trained(corpus, tmp_path / "calm", model(runs[0] / "autoencoder"))
    assert not (tmp_path / "calm" / "config.json").exists()


def test_another_tokenizer_is_refused(runs, tmp_path):
    other = prepare_corpus(tmp_path, seed=7)
    with pytest.raises(ConfigError, match=r"model\.autoencoder_run .* was trained with another tokenizer"):
        trained(other, tmp_path / "calm", calm(runs[0] / "autoencoder"))


def test_all_families_are_scored_at_the_same_places(runs, capsys):
    folder, _ = runs
    names = ["calm", "baseline"]
    assert (
        main(["brierlm", *(str(folder / name) for name in names), "--samples", "4", "--rows", "60", "--step", "latest"])
        == 0
    )
    shown = capsys.readouterr().out
    assert "baseline less calm: " in shown
    figures = {name: json.loads((folder / name / "eval/brierlm_held_out_20.json").read_text()) for name in names}
    for name, found in figures.items():
        assert found["protocol"]["starts"] == "blocks of 4", name
        assert found["positions"] == figures["calm"]["positions"] > 20
        assert found["protocol"]["samples"] == {"calm": 4, "baseline": None}[name]
        assert len(found["error_n"]) == 4
        assert found["brier_n"] == pytest.approx(
            [2 * a - c for a, c in zip(found["accuracy_n"], found["collision_n"], strict=True)]
        )


def test_a_pass_over_rows_draws_what_single_contexts_draw(runs):
    box = block_sampler(load_run(runs[0] / "calm"))
    tokens_BT = jax.random.randint(jax.random.key(0), (2, 16), 0, VOCAB)
    keys_RB = jax.random.split(jax.random.key(1), (6, 2))
    whole_RBMK = np.asarray(box.everywhere(tokens_BT, keys_RB))
    assert whole_RBMK.shape == (6, 2, 3, 4)
    for place in range(3):
        keys_Rp = jax.vmap(jax.vmap(partial(jax.random.fold_in, data=place)))(keys_RB)
        context = tokens_BT.at[:, 4 * (place + 1) :].set(0), jnp.full(2, 4 * (place + 1))
        np.testing.assert_array_equal(box.after(context, keys_Rp), whole_RBMK[:, :, place])
    assert len(np.unique(whole_RBMK.reshape(-1, 4), axis=0)) > 3


def test_brierlm_refuses_what_it_cannot_score(runs, tmp_path, capsys):
    folder, _ = runs
    short = tmp_path / "short.txt"
    short.write_text("the whale")
    for arguments, complaint in [
        ([str(folder / "autoencoder")], "task 'calm_autoencoder' gives no token logits"),
        ([str(folder / "calm"), "--starts", "tokens"], "a block sampler is scored where its blocks start"),
        ([str(folder / "calm"), "--block", "18"], "rows of 18 tokens are no multiple of blocks of 4"),
        ([str(folder / "calm"), "--samples", "1"], "use at least 2"),
        ([str(folder / "calm"), "--text", str(short), "--packing", "official", "--block", "512"], "a block is 512"),
    ]:
        assert main(["brierlm", *arguments]) == 2
        assert complaint in capsys.readouterr().err
