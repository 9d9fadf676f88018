"""Metrics: what a run writes down, and what the ordinary step does not have to compute for it."""

import json
import math
import time

import jax
import pytest
from tiny_runs import MODELS, bigram, records, run_config

from ncp_jax.models.flops import non_embedding_parameters, total_parameters, training_flops_per_token
from ncp_jax.optim.config import OptimConfig
from ncp_jax.optim.leaves import leaf_table
from ncp_jax.parallel.rules import unboxed
from ncp_jax.report.runs import load
from ncp_jax.train.families import build_task
from ncp_jax.train.loop import Trainer, train
from ncp_jax.train.step import abstract_params
from ncp_jax.train.throughput import Clock, progress_line

WHERE = {"kind", "step", "tokens", "seconds"}
TERMS = {"loss/ntp", "loss/ncp", "loss/vq"}


def test_train_records(ncp_run):
    found = records(ncp_run, "train")
    assert [record["step"] for record in found] == list(range(1, 21))
    expected = WHERE | TERMS | {
        "loss", "bits_per_byte", "gradient_norm", "learning_rate/adamw", "tokens_per_second", "mfu",
    }  # fmt: skip
    for record in found:
        assert set(record) == expected
        assert record["tokens"] == record["step"] * 16 * 16
        # ncp_nano's weights are 0.1; these models take 1.
        assert record["loss"] == pytest.approx(sum(record[term] for term in TERMS), rel=1e-5)
    assert found[0]["tokens_per_second"] is None  # one step has no speed
    assert found[4]["tokens_per_second"] > 0
    assert found[4]["mfu"] is None  # the peak of a CPU is unknown
    seconds = [record["seconds"] for record in found]
    assert seconds == sorted(seconds)


def test_muon_has_its_own_rate(olmo3_runs):
    found = records(olmo3_runs.straight, "train")
    for record in found:
        assert record["learning_rate/muon"] == pytest.approx(2 * record["learning_rate/adamw"])
        assert TERMS & set(record) == {"loss/ntp"}
    assert found[0]["learning_rate/muon"] == pytest.approx(0.02 / 4)  # the first step is not spent at rate 0
    assert found[-1]["learning_rate/muon"] == pytest.approx(0.1 * 0.02)  # the documented end value


def test_first_and_last_step_are_logged_besides_every_nth(corpus, tmp_path):
    said: list[str] = []
    train(run_config(corpus, tmp_path, "olmo3", "train.log_every=8"), bigram(), said.append)
    assert [record["step"] for record in records(tmp_path, "train")] == [1, 8, 16, 20]
    shown = [line.split()[1] for line in said if line.startswith("step") and "/20" in line]
    assert shown == ["1/20", "8/20", "16/20", "20/20"]


def test_evaluation_records(ncp_run):
    found = records(ncp_run, "eval")
    assert [record["step"] for record in found] == [10, 20]
    for record in found:
        assert set(record) == WHERE | TERMS | {"bits_per_byte", "scored_tokens", "bytes", "best"}
        nats = record["loss/ntp"] * record["scored_tokens"]
        assert record["bits_per_byte"] == pytest.approx(nats / math.log(2) / record["bytes"], rel=1e-9)
    assert [record["best"] for record in found] == [True, found[1]["bits_per_byte"] < found[0]["bits_per_byte"]]


def test_diagnostic_records(ncp_run):
    (record,) = records(ncp_run, "diagnostics")
    assert record["step"] == 20
    task = build_task(MODELS["ncp"], 16)
    roles = {leaf.role for leaf in leaf_table(unboxed(abstract_params(task)[0]), task.leaf_rules, OptimConfig())}
    routes = {  # sources of each layer
        "routes/encoder": [2, 3], "routes/concept": [2], "routes/decoder": [2], "routes/concept_from_encoder": [1],
        "routes/decoder_from_encoder": [2], "routes/decoder_from_concept": [1], "gates": [2],
    }  # fmt: skip
    assert {name: [len(layer) for layer in record[name]] for name in routes} == routes
    assert [len(record[f"codes/{name}"]) for name in ("perplexity", "used", "dead")] == [4, 4, 4]
    assert all(0 <= share <= 1 for share in record["codes/used"])
    assert all(1 <= value <= 8 for value in record["codes/perplexity"])
    assert sum(record["gates"][0]) == pytest.approx(1)
    for prefix in ("gradient_norm/", "parameter_norm/"):
        assert {name.removeprefix(prefix) for name in record if name.startswith(prefix)} == roles
    assert "loss" not in record
    norms = [value for name, value in record.items() if name.startswith("gradient_norm/")]
    assert math.hypot(*norms) == pytest.approx(records(ncp_run, "train")[-1]["gradient_norm"], rel=1e-5)


def test_diagnostics_are_another_executable(corpus):
    """An ordinary step's program holds no statistics, and has no more outputs than its scalars."""
    config = run_config(corpus, "unused", "olmo3")
    trainer = Trainer(config, build_task(config.model, 16), print, jax.devices()[:1])
    batch = {"bytes": jax.ShapeDtypeStruct((8,), "int32")}
    for name in ("tokens", "targets", "segments", "positions"):
        batch[name] = jax.ShapeDtypeStruct((8, 16), "int32")
    for name in ("real", "scored"):
        batch[name] = jax.ShapeDtypeStruct((8, 16), "bool")
    texts, metrics = {}, {}
    with jax.set_mesh(trainer.mesh):
        for diagnose in (False, True):
            traced = trainer.train_step.trace(trainer.like[0], None, batch, diagnose=diagnose)
            metrics[diagnose] = traced.out_info[1]
            texts[diagnose] = traced.lower().as_text(debug_info=True)
    assert set(metrics[False]) == {"loss/ntp", "loss", "bits_per_byte", "gradient_norm", "bad"}
    assert set(metrics[True]) > set(metrics[False])
    assert '"_diagnostics"' in texts[True]  # the function's name is in the source locations
    assert '"_diagnostics"' not in texts[False]


def test_summary(ncp_run):
    summary, last = json.loads((ncp_run / "summary.json").read_text()), records(ncp_run, "eval")[-1]
    config = run_config("unused", "unused", "ncp")
    assert {name: summary[name] for name in ("name", "task", "finished", "step", "tokens")} == {
        "name": "tiny_ncp", "task": "ncp", "finished": True, "step": 20, "tokens": 20 * 256,
    }  # fmt: skip
    assert summary["identity"] == json.loads((ncp_run / "config.json").read_text())["identity"]
    for name in ("loss/ntp", "bits_per_byte"):
        assert summary[name] == last[name]
    best = min(records(ncp_run, "eval"), key=lambda record: record["bits_per_byte"])
    assert (summary["best_step"], summary["best_bits_per_byte"]) == (best["step"], best["bits_per_byte"])
    assert summary["parameters"] == total_parameters(config.model)
    assert summary["non_embedding_parameters"] == non_embedding_parameters(config.model)
    assert summary["flops_per_token"] == training_flops_per_token(config.model, 16)


def test_the_report_reads_all_of_it(ncp_run):
    run = load(ncp_run)
    assert {kind: len(found) for kind, found in run.records.items()} == {
        "train": 20, "eval": 2, "diagnostics": 1, "skipped": 0,
    }  # fmt: skip
    assert run.notes == []


def test_speed_leaves_compilation_and_evaluation_out():
    clock = Clock(0.0, tokens_per_step=100, flops_per_token=1.0, devices=1)
    clock.mark(1)
    assert clock.tokens_per_second is None
    time.sleep(0.02)
    clock.mark(2)
    assert 100 < clock.tokens_per_second <= 100 / 0.02
    clock.pause()
    assert clock.tokens_per_second is None
    assert clock.mfu is None


def test_progress_line():
    record = {
        "step": 10, "loss": 2.0, "bits_per_byte": 1.5, "learning_rate/adamw": 1e-3, "learning_rate/muon": 2e-2,
        "tokens_per_second": 12345.6, "mfu": 0.4321,
    }  # fmt: skip
    assert progress_line(record, 1000, 3725.0) == (
        "step   10/1000 | loss 2.0000 | 1.500 bits/byte | lr adamw 1.00e-03, muon 2.00e-02 | 12,346 tok/s | MFU 43.2% "
        "| 1:02:05 left"
    )
