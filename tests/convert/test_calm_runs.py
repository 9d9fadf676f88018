"""Goldens of the CALM family as published checkpoints: into run directories, and back, bit for bit."""

import json

import jax
import numpy as np
import pytest
from calm_checkpoints import NAMES, publish_calm, published_fields, published_tensors
from golden_files import load
from test_convert_runs import convert, tokenizer

from ncp_jax.checkpoint.hf_files import TensorFiles
from ncp_jax.checkpoint.hf_tensor import HFError, HFMismatch
from ncp_jax.checkpoint.leaves import describe, flatten
from ncp_jax.checkpoint.store import CheckpointStore
from ncp_jax.config import ConfigError
from ncp_jax.convert.formats import name_map
from ncp_jax.convert.pretrained import abstract_params, load_pretrained, save_pretrained
from ncp_jax.models.calm.autoencoder import Autoencoder
from ncp_jax.models.calm.call import call
from ncp_jax.models.calm.model import Calm
from ncp_jax.models.llama import Llama
from ncp_jax.parallel.rules import unboxed
from ncp_jax.train.loaded import load_run
from ncp_jax.train.rundir import RunDirectoryError, read_json
from ncp_jax.train.start import save_frozen

FORMATS = {"ae_k4": "calm_autoencoder", "energy_k4": "calm", "flow": "calm", "diffusion": "calm", "ar_v67": "llama"}
TABLE, COPY = "ae_model.encoder.embed_tokens.weight", "ae_model.decoder.lm_head_weight"


def publish(folder, name, torch=True, **changes):
    """With a tokenizer: ids 0 to 66, as the goldens have them."""
    publish_calm(folder, name, torch, **changes)
    (folder / "tokenizer.json").write_text(tokenizer(67))
    fields = {"eos_token_id": 65, "pad_token_id": 66} | published_fields(name)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def contents(folder) -> dict[str, bytes]:
    files = TensorFiles(folder)
    return {name: files.array(name).tobytes() + str(files.tensors[name].shape).encode() for name in files.tensors}


@pytest.mark.parametrize("name", NAMES)
def test_both_kinds_of_file_hold_the_same_parameters(tmp_path, name):
    """Loading and the map cover the model; saving gives back the files, names and shapes and bits."""
    model = load_pretrained(publish_calm(tmp_path / "torch", name))
    assert describe(flatten(model.params)) == describe(flatten(unboxed(abstract_params(model.config))))
    other = load_pretrained(publish_calm(tmp_path / "safetensors", name, torch=False))
    assert other.config == model.config
    jax.tree.map(np.testing.assert_array_equal, other.params, model.params)
    published = contents(tmp_path / "torch")
    assert published == contents(tmp_path / "safetensors")
    assert name_map(*model[:1], model.config.kind).shapes == {n: v.shape for n, v in published_tensors(name).items()}


@pytest.mark.parametrize("name", FORMATS)
def test_import_export_import_is_bit_equal(tmp_path, name, capsys):
    folder = publish(tmp_path / "theirs", name)
    convert("import", folder, tmp_path / "run")
    said = capsys.readouterr().out
    assert said.startswith(f"{FORMATS[name]}: {len(published_tensors(name))} tensors, ")
    convert("export", tmp_path / "run", tmp_path / "ours", "--dtype", "float32")
    assert capsys.readouterr().out.partition(" -> ")[0] == said.partition(" -> ")[0].partition(": ")[2]
    assert contents(tmp_path / "ours") == contents(folder)
    convert("import", tmp_path / "ours", tmp_path / "again")
    first, second = load_run(tmp_path / "run"), load_run(tmp_path / "again")
    assert first.config.model == second.config.model
    for one, other in ((first.params, second.params), (first.frozen, second.frozen)):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    ours, theirs = (json.loads((place / "config.json").read_text()) for place in (tmp_path / "ours", folder))
    kept = theirs.keys() - {"ae_path", "noise_size", "beta"}  # the transport heads have neither noise size nor beta
    assert {field: ours[field] for field in kept} == {field: theirs[field] for field in kept}


# ---- an imported run is an ordinary run


def imported(folder, name):
    convert("import", publish(folder / "theirs", name), folder / "run")
    loaded = load_run(folder / "run")
    assert (loaded.step, loaded.tokenizer.eos) == (0, 65)
    return loaded, load(f"calm_{name}")


def close(ours, theirs):
    np.testing.assert_allclose(np.asarray(ours).reshape(theirs.shape), theirs, atol=1e-4, rtol=0)


def test_an_autoencoder(tmp_path):
    loaded, golden = imported(tmp_path, "ae_k4")
    model, tokens = Autoencoder(loaded.config.model), golden["input_ids"].reshape(2, -1, 4)
    assert loaded.frozen is None
    posterior, logits = jax.jit(lambda p: (call(model, p, "encode", tokens), call(model, p, "__call__", tokens)))(
        loaded.params
    )
    close(posterior.mean, golden["mean"])
    close(posterior.log_std, golden["log_std"])
    close(logits, golden["decoder_logits_mean"])


def test_a_language_model_and_its_autoencoder(tmp_path):
    loaded, golden = imported(tmp_path, "energy_k4")
    c, tokens = loaded.config.model, golden["input_ids"].reshape(2, -1, 4)
    assert loaded.config.data.sequence == 2048 * 4
    noise = golden["head_noise"].reshape(8, 2, 7, -1)

    @jax.jit
    def run(params, frozen):
        h = call(Calm(c), params, "hidden", tokens)[:, :-1]
        return h, call(Calm(c), params, "sample", h, noise), call(Autoencoder(c.autoencoder), frozen, "encode", tokens)

    h, samples, posterior = run(loaded.params, loaded.frozen)
    close(h, golden["hidden_states"])
    close(samples, golden["head_out"])
    close(posterior.mean[:, 1:], golden["target_mean"])


def test_the_baseline(tmp_path):
    loaded, golden = imported(tmp_path, "ar_v67")
    model, ids = Llama(loaded.config.model), golden["input_ids"]
    close(jax.jit(lambda p: call(model, p, "logits", ids))(loaded.params), golden["logits"])
    close(jax.jit(lambda p: loaded.task.forward(p, None, ids))(loaded.params), golden["logits"])


# ---- the frozen autoencoder


def test_what_is_frozen_is_kept_and_named_like_a_trained_runs(tmp_path):
    """The hash that a resumed run compares; float32 whatever the parameters are stored in."""
    publish(tmp_path / "theirs", "energy_k4")
    hashes = []
    for dtype in ("float32", "bfloat16"):
        run = tmp_path / dtype
        convert("import", tmp_path / "theirs", run, "--dtype", dtype)
        progress = CheckpointStore(run / "checkpoints").meta(0)["progress"]
        loaded = load_run(run)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params)} == {dtype}
        assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.frozen)} == {"float32"}
        hashes.append(progress["frozen"])
    np.testing.assert_array_equal(loaded.frozen["embed"]["table"], published_tensors("energy_k4")[TABLE])
    assert len(hashes[0]) == 12
    assert hashes[0] == hashes[1] == save_frozen(tmp_path / "again", loaded.frozen, loaded.config)


def test_the_frozen_autoencoder_can_be_exported_alone(tmp_path, capsys):
    """What the official code wants as ae_path, and what a new language model trains on."""
    publish(tmp_path / "theirs", "flow")
    convert("import", tmp_path / "theirs", tmp_path / "run")
    convert("export", tmp_path / "run", tmp_path / "ae", "--format", "calm_autoencoder", "--dtype", "float32")
    theirs = {name.removeprefix("ae_model."): value for name, value in published_tensors("flow").items()}
    ours = TensorFiles(tmp_path / "ae")
    assert len(ours.tensors) == 28
    for name in ours.tensors:
        np.testing.assert_array_equal(ours.array(name), theirs[name], err_msg=name)
    convert("import", tmp_path / "ae", tmp_path / "ae_run")
    calm, autoencoder = load_run(tmp_path / "run"), load_run(tmp_path / "ae_run")
    assert autoencoder.config.model == calm.config.model.autoencoder
    jax.tree.map(np.testing.assert_array_equal, autoencoder.params, calm.frozen)
    config, params = load_pretrained(tmp_path / "theirs")
    save_pretrained(tmp_path / "memory", config.autoencoder, params["autoencoder"])
    assert TensorFiles(tmp_path / "memory").tensors.keys() == ours.tensors.keys()


# ---- what is refused


def test_another_runs_frozen_parameters_are_left_alone(tmp_path):
    (tmp_path / "run" / "frozen").mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match="holds frozen already"):
        convert("import", publish(tmp_path / "theirs", "flow"), tmp_path / "run")


def test_copies_that_differ(tmp_path):
    head = "final_layer.linears.2.bias"
    changes = {f"generative_head.{head}": published_tensors("energy_k4")[f"mlp_generator.{head}"] + np.float32(0.5)}
    folder = publish(tmp_path / "theirs", "energy_k4", **changes)
    for arguments in (["import", folder, tmp_path / "run"], ["inspect", folder]):
        with pytest.raises(
            HFMismatch, match=rf"generative_head.{head} differs from mlp_generator.{head}: by up to 0.5"
        ):
            convert(*arguments)
    assert not (tmp_path / "run" / "config.json").exists()
    changes = {COPY: published_tensors("energy_k4")[COPY] * 2}
    publish(tmp_path / "other", "energy_k4", **changes)
    with pytest.raises(HFMismatch, match=f"{COPY} differs from {TABLE}"):
        load_pretrained(tmp_path / "other")


def test_one_copy_is_enough(tmp_path):
    twins = [name for name in published_tensors("energy_k4") if name.startswith("generative_head.")]
    whole = load_pretrained(publish_calm(tmp_path / "whole", "energy_k4")).params
    for absent in ((TABLE, *twins), (COPY, *(twin.replace("generative_head", "mlp_generator") for twin in twins))):
        folder = publish_calm(tmp_path / absent[0], "energy_k4", **dict.fromkeys(absent))
        jax.tree.map(np.testing.assert_array_equal, load_pretrained(folder).params, whole)


def test_a_language_model_without_its_autoencoder(tmp_path):
    absent = [name for name in published_tensors("flow") if name.startswith("ae_model.")]
    with pytest.raises(HFError, match="without its autoencoder"):
        load_pretrained(publish_calm(tmp_path / "theirs", "flow", **dict.fromkeys(absent)))
    absent = absent[-3]
    with pytest.raises(HFMismatch, match=f"1 tensors differ\n  missing: {absent}"):
        load_pretrained(publish_calm(tmp_path / "part", "flow", **{absent: None}))


def test_an_export_says_what_it_leaves_out(tmp_path, capsys):
    convert("import", publish(tmp_path / "theirs", "ae_k4"), tmp_path / "run")
    change = {"mask": 3, "score_pads": False}
    stored = read_json(tmp_path / "run" / "config.json")
    stored["config"]["model"] |= change
    (tmp_path / "run" / "config.json").write_text(json.dumps(stored))
    capsys.readouterr()
    convert("export", tmp_path / "run", tmp_path / "ours", "--dtype", "float32")
    said = capsys.readouterr().out.splitlines()[1:]
    assert [line.partition("assume): ")[2] for line in said] == ["mask: 3 -> 0", "score_pads: False -> True"]
    stored["config"]["model"]["posterior"] = "mean"
    (tmp_path / "run" / "config.json").write_text(json.dumps(stored))
    convert("inspect", tmp_path / "run")
    assert "exports as nothing: the official layout cannot hold this model" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="posterior: 'mean' -> 'sampled'"):
        convert("export", tmp_path / "run", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_inspect(tmp_path, capsys):
    convert("inspect", publish(tmp_path / "theirs", "energy_k4"))
    lines = capsys.readouterr().out.splitlines()
    tensors = published_tensors("energy_k4")
    assert lines[0].startswith(f"calm: {len(tensors)} tensors, ")
    assert "of float32 in 1 file(s)" in lines[1]
    convert("import", tmp_path / "theirs", tmp_path / "run")
    capsys.readouterr()
    convert("inspect", tmp_path / "run")
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "run directory: calm, vocabulary 67, width 32", "checkpoints: 0", "exports as: calm, calm_autoencoder"
    ]  # fmt: skip
