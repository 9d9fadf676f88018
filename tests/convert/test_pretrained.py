"""Published checkpoints there and back: every bit, every format, whole or not at all."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden_files import config_fields, load, native_tensors, publish, tensors, write_shards

from ncp_jax.checkpoint.hf_files import HFError, TensorFiles
from ncp_jax.checkpoint.leaves import CheckpointMismatch, describe, flatten
from ncp_jax.config import ConfigError
from ncp_jax.convert.formats import SpecialIds, name_map
from ncp_jax.convert.pretrained import Export, abstract_params, load_pretrained, save_pretrained
from ncp_jax.parallel.mesh import MeshConfig, make_mesh
from ncp_jax.parallel.rules import unboxed

SOURCES = {"ncp_olmo3": "ncp_raw_perhead", "native": "ncp_native_names", "olmo3": "olmo3_tiny"}


def publish_as(folder, format, dtype=np.float32):
    golden = load(SOURCES[format])
    publish(folder, golden, format)
    write_shards(folder, {name: value.astype(dtype) for name, value in tensors(golden).items()})
    return folder


def contents(folder) -> dict[str, bytes]:
    files = TensorFiles(folder)
    return {name: files.array(name).tobytes() + str(files.tensors[name].shape).encode() for name in files.tensors}


def assert_bit_equal(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("format", SOURCES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_there_and_back_is_bit_equal(tmp_path, format, dtype):
    """Both ways: the parameters, and the files themselves."""
    first = load_pretrained(publish_as(tmp_path / "theirs", format, dtype))
    written = save_pretrained(
        tmp_path / "ours", *first, Export(format, np.dtype(dtype).name, positions=64, shard_bytes=100_000)
    )
    assert written.rounded == ()
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    second = load_pretrained(tmp_path / "ours")
    assert second.config == first.config
    assert_bit_equal(second.params, first.params)


@pytest.mark.parametrize("format", SOURCES)
def test_the_map_covers_the_model(tmp_path, format):
    config, params = load_pretrained(publish_as(tmp_path, format))
    assert describe(flatten(params)) == describe(flatten(unboxed(abstract_params(config))))


def test_the_two_names_of_one_model(tmp_path):
    """Released names in, native names out: what the training code would have saved, fused by hand."""
    golden = load("ncp_raw_full")
    model = load_pretrained(publish(tmp_path / "theirs", golden, "ncp_olmo3"))
    save_pretrained(tmp_path / "ours", *model, Export("native", "float32"))
    fused = native_tensors(tensors(golden), config_fields(golden)["heads"])
    files = TensorFiles(tmp_path / "ours")
    assert files.tensors.keys() == fused.keys()
    for name, value in fused.items():
        np.testing.assert_array_equal(files.array(name), value, err_msg=name)
    assert_bit_equal(load_pretrained(tmp_path / "ours").params, model.params)


def test_native_names_under_the_released_identity(tmp_path):
    """The official loader goes by the tensors' names, whatever weight_key_format says."""
    golden = load("ncp_native_names")
    publish(tmp_path / "native", golden, "native")
    publish(tmp_path / "mixed", golden, "ncp_olmo3")
    assert_bit_equal(load_pretrained(tmp_path / "mixed").params, load_pretrained(tmp_path / "native").params)


def test_onto_a_mesh_and_from_it(tmp_path):
    here = load_pretrained(publish_as(tmp_path / "theirs", "ncp_olmo3"))
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    there = load_pretrained(tmp_path / "theirs", mesh)
    assert_bit_equal(there.params, here.params)
    assert "fsdp" in str(there.params["encoder"]["blocks"]["wq"].sharding.spec)
    save_pretrained(tmp_path / "ours", *there, Export(dtype="float32"))
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


def test_bfloat16_parameters_on_request(tmp_path):
    config, params = load_pretrained(publish_as(tmp_path / "theirs", "olmo3", ml_dtypes.bfloat16), dtype=jnp.bfloat16)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    save_pretrained(tmp_path / "ours", config, params)
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


def test_an_export_says_every_special_token(tmp_path):
    model = load_pretrained(publish_as(tmp_path / "theirs", "olmo3"))
    ids = SpecialIds(eos=(2,), pad=0)
    save_pretrained(tmp_path / "ours", *model, Export(ids=ids, positions=64, tokenizer={"tokenizer.json": b"{}"}))
    config, generation = (
        json.loads((tmp_path / "ours" / name).read_text()) for name in ("config.json", "generation_config.json")
    )
    assert generation == {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    assert generation.items() <= config.items()
    assert (config["sliding_window"], config["tie_word_embeddings"], config["rms_norm_eps"]) == (8, False, 1e-6)
    assert config["layer_types"] == [*["sliding_attention"] * 3, "full_attention"]
    assert (tmp_path / "ours" / "tokenizer.json").read_bytes() == b"{}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_pretrained(publish_as(tmp_path_factory.mktemp("theirs"), "olmo3"))


REFUSED = {
    "format": (Export("native"), ConfigError, "cannot hold a model of kind 'olmo3'"),
    "dtype": (Export(dtype="float16"), ConfigError, "dtype 'float16' is not one of"),
    "eos": (
        Export(ids=SpecialIds(eos=(128,))),
        ConfigError,
        "special token eos has id 128, the model has ids 0 to 127",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_export_leaves_nothing(tmp_path, tiny, case):
    how, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        save_pretrained(tmp_path / "ours", *tiny, how)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_breaks_off_leaves_nothing(tmp_path, tiny):
    with pytest.raises(CheckpointMismatch, match="needs leaves that are not there: final_norm/scale"):
        save_pretrained(tmp_path / "ours", tiny.config, {k: v for k, v in tiny.params.items() if k != "final_norm"})
    larger = dataclasses.replace(tiny.config, vocab=200)
    with pytest.raises(CheckpointMismatch, match=r"embed/table \[128, 64\] .* \[200, 64\]"):
        save_pretrained(tmp_path / "ours", larger, tiny.params)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_never_overwritten(tmp_path, tiny):
    (tmp_path / "ours").mkdir()
    save_pretrained(tmp_path / "ours", *tiny)  # an empty folder is as good as none
    before = contents(tmp_path / "ours")
    with pytest.raises(HFError, match="exists and is not empty"):
        save_pretrained(tmp_path / "ours", *tiny)
    (tmp_path / "file").write_text("")
    with pytest.raises(HFError, match="exists and is not empty"):
        save_pretrained(tmp_path / "file", *tiny)
    with pytest.raises(HFError, match="cannot write"):
        save_pretrained(tmp_path / "file" / "ours", *tiny)
    assert contents(tmp_path / "ours") == before


def test_names_of_an_export_are_the_map(tmp_path, tiny):
    save_pretrained(tmp_path / "ours", *tiny)
    files = TensorFiles(tmp_path / "ours")
    assert list(files.tensors) == [tensor.name for tensor in name_map(tiny.config, "olmo3").tensors]
    assert {tensor.dtype.name for tensor in files.tensors.values()} == {"bfloat16"}
