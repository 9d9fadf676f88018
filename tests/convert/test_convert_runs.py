"""Run directories from published checkpoints and back, through the command line."""

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import config_fields, load, ncp_config, publish, tensors
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from ncp_jax.checkpoint.hf_files import TensorFiles
from ncp_jax.checkpoint.leaves import CheckpointError
from ncp_jax.checkpoint.store import CheckpointStore
from ncp_jax.cli import convert as cli
from ncp_jax.config import ConfigError
from ncp_jax.convert.pretrained import abstract_params, load_pretrained
from ncp_jax.convert.runs import KEPT
from ncp_jax.data.store import DataError
from ncp_jax.models.ncp.model import NCP
from ncp_jax.parallel.rules import unboxed
from ncp_jax.train.loaded import load_run
from ncp_jax.train.run_config import InitFrom
from ncp_jax.train.rundir import RunDirectoryError
from ncp_jax.train.start import weights_of

EOS, PAD = 126, 127


def tokenizer(size: int = 128) -> str:
    """Words w0, w1, ... and two special tokens, `size` ids in all."""
    hf = HFTokenizer(models.WordLevel({f"w{i}": i for i in range(size - 2)}, unk_token="w0"))
    hf.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.add_special_tokens([AddedToken("<|endoftext|>", special=True), AddedToken("<|pad|>", special=True)])
    return hf.to_str()


@pytest.fixture
def published(tmp_path):
    """The released golden with a tokenizer, as its authors would publish it."""
    folder = publish(tmp_path / "theirs", load("ncp_raw_full"), "ncp_olmo3")
    change(folder, eos_token_id=EOS, pad_token_id=PAD)
    (folder / "tokenizer.json").write_text(tokenizer())
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "chat": 1}')
    return folder


def change(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def convert(*arguments) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers(dest="command"))
    return cli.run(parser.parse_args(["convert", *map(str, arguments)]))


def stored_params(run, dtype=jnp.float32):
    config = load_pretrained(run.parent / "theirs").config
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), unboxed(abstract_params(config)))
    return CheckpointStore(run / "checkpoints").restore(0, {"train": {"params": like}})["train"]["params"]


def test_an_imported_run_is_an_ordinary_run(tmp_path, published, capsys):
    run, golden = tmp_path / "run", load("ncp_raw_full")
    assert convert("import", published, run) == 0
    assert "ncp_olmo3: 212 tensors, 376,293 parameters" in capsys.readouterr().out
    loaded = load_run(run)
    assert loaded.config.model == ncp_config(config_fields(golden))
    assert (loaded.step, loaded.tokenizer.eos, loaded.config.data.sequence) == (0, EOS, 64)
    forward = jax.jit(lambda params, ids: NCP(loaded.config.model).apply({"params": params}, ids, method="logits"))
    ours = forward(loaded.params, golden["T32/ids"])
    np.testing.assert_allclose(ours, golden["T32/logits"], atol=5e-4, rtol=0)
    weights, step = weights_of(InitFrom(str(run)), loaded.params, tmp_path / "next")  # as init_from does
    assert step == 0
    np.testing.assert_array_equal(weights["embed"]["table"], golden["w/model.embed_tokens.weight"])


@pytest.mark.parametrize(("format", "dtype"), [("ncp_olmo3", "float32"), ("native", "bfloat16")])
def test_import_export_import_is_bit_equal(tmp_path, published, format, dtype, capsys):
    convert("import", published, tmp_path / "run", "--dtype", dtype)
    convert("export", tmp_path / "run", tmp_path / "ours", "--format", format, "--dtype", dtype)
    assert "rounded" not in capsys.readouterr().out
    convert("import", tmp_path / "ours", tmp_path / "again", "--dtype", dtype)
    first, second = (stored_params(tmp_path / name, jnp.dtype(dtype)) for name in ("run", "again"))
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"], config["bos_token_id"]) == (EOS, PAD, None)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # carried as they were
        assert (tmp_path / "ours" / name).read_bytes() == (published / name).read_bytes()


def test_rounding_is_told(tmp_path, published, capsys):
    convert("import", published, tmp_path / "run")
    convert("export", tmp_path / "run", tmp_path / "ours")
    out = capsys.readouterr().out
    assert "212 tensors, 376,293 parameters" in out
    assert "tensors were rounded to bfloat16; --dtype float32 keeps every bit" in out


def test_a_run_that_was_made_here_brings_its_own_tokenizer(tmp_path, published):
    """No published companions: special tokens come from tokenizer.json, and a tokenizer_config.json is made."""
    convert("import", published, tmp_path / "run")
    for file in (tmp_path / "run" / KEPT).iterdir():
        file.unlink()
    convert("export", tmp_path / "run", tmp_path / "ours", "--dtype", "float32")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (EOS, PAD)
    made = json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text())
    assert (made["eos_token"], made["pad_token"]) == ("<|endoftext|>", "<|pad|>")


def test_a_later_checkpoint_beside_its_optimizer(tmp_path, published):
    """What training saves: parameters among other state, at a step that can be chosen."""
    convert("import", published, tmp_path / "run")
    params = jax.tree.map(lambda leaf: leaf + 1, stored_params(tmp_path / "run"))
    state = {"train": {"params": params, "opt_state": jax.tree.map(jnp.zeros_like, params), "step": jnp.int32(5)}}
    with CheckpointStore(tmp_path / "run" / "checkpoints", asynchronous=False) as store:
        store.save(5, state, {}, best=False)
    for step, more in ((0, 0.0), ("latest", 1.0), (5, 1.0)):
        folder = tmp_path / f"ours_{step}"
        convert("export", tmp_path / "run", folder, "--dtype", "float32", "--step", step)
        theirs = load("ncp_raw_full")["w/model.fusion_tok_norm.bias"]
        np.testing.assert_array_equal(
            TensorFiles(folder).array("model.fusion_tok_norm.bias"), theirs + np.float32(more)
        )


def test_olmo3_runs(tmp_path):
    golden = load("olmo3_tiny")
    folder = publish(tmp_path / "theirs", golden, "olmo3")
    convert("import", folder, tmp_path / "run", "--tokenizer", write(tmp_path / "tokenizer.json", tokenizer()))
    convert("export", tmp_path / "run", tmp_path / "ours", "--format", "olmo3", "--dtype", "float32")
    files = TensorFiles(tmp_path / "ours")
    for name, value in tensors(golden).items():
        np.testing.assert_array_equal(files.array(name), value, err_msg=name)


def test_weights_alone(tmp_path, published, capsys):
    (published / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer at .*--tokenizer none for weights alone"):
        convert("import", published, tmp_path / "run")
    convert("import", published, tmp_path / "run", "--tokenizer", "none")
    convert("export", tmp_path / "run", tmp_path / "ours", "--dtype", "float32")
    assert not (tmp_path / "ours" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["eos_token_id"] == EOS


def test_inspect(tmp_path, published, capsys):
    convert("inspect", published)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ncp_olmo3: 212 tensors, 376,293 parameters, all names and shapes as expected"
    assert "of float32 in 2 file(s)" in lines[1]
    convert("import", published, tmp_path / "run")
    capsys.readouterr()
    convert("inspect", tmp_path / "run")
    assert capsys.readouterr().out.splitlines()[1:] == ["checkpoints: 0", "exports as: ncp_olmo3, native"]


# ---- bad input: one clear error each, and no run directory that looks whole


def shrink_tokenizer(folder):
    (folder / "tokenizer.json").write_text(tokenizer(100))
    change(folder, eos_token_id=98, pad_token_id=99)


def grow_tokenizer(folder):
    (folder / "tokenizer.json").write_text(tokenizer(130))
    change(folder, eos_token_id=128, pad_token_id=129)


def other_eos(folder):
    change(folder, eos_token_id=5)


def break_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")


def truncate(folder):
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-7])


def misshape(folder):
    change(folder, conceptlm_v22_vq_codebook_size=9)


def unknown_field(folder):
    change(folder, rope_extra=1)


BAD = {
    shrink_tokenizer: "the model has 128 ids, .* knows 100: .*--allow-unused-ids",
    grow_tokenizer: "has ids up to 129, the model has 128 rows",
    other_eos: "ends a text with id 5, .* with '<|endoftext|>' = 126",
    break_tokenizer: "is not a Hugging Face tokenizer.json",
    truncate: "truncated",
    misshape: r"concept_quantizer.codebook.0 is \[8, 16\], the configuration needs \[9, 16\]",
    unknown_field: "rope_extra is 1",
}


@pytest.mark.parametrize("damage", BAD, ids=lambda damage: damage.__name__)
def test_bad_input(tmp_path, published, damage):
    damage(published)
    with pytest.raises((ConfigError, CheckpointError, DataError), match=BAD[damage].replace("|", r"\|")):
        convert("import", published, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_padded_vocabulary_on_request(tmp_path, published):
    shrink_tokenizer(published)
    convert("import", published, tmp_path / "run", "--allow-unused-ids")
    assert load_run(tmp_path / "run").task.vocab == 128


def test_a_used_directory_is_left_alone(tmp_path, published):
    convert("import", published, tmp_path / "run")
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(RunDirectoryError, match=r"holds config.json, checkpoints already"):
        convert("import", published, tmp_path / "run")
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    with pytest.raises(ConfigError, match=r"no config.json; is it a run directory"):
        convert("export", tmp_path / "nothing", tmp_path / "ours")
    with pytest.raises(ConfigError, match="no checkpoint of step 7"):
        convert("export", tmp_path / "run", tmp_path / "ours", "--step", 7)


def write(file, text):
    file.write_text(text)
    return file
