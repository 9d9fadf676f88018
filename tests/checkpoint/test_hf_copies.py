"""Tensors under two names: one of them is enough, two must agree, both are written."""

import jax
import ml_dtypes
import numpy as np
import pytest
from golden_files import write_shards
from jax.sharding import SingleDeviceSharding
from torch_files import write_torch

from ncp_jax.checkpoint import hf_copies
from ncp_jax.checkpoint.hf_calm_names import AutoencoderSizes, autoencoder_map
from ncp_jax.checkpoint.hf_copies import largest_difference
from ncp_jax.checkpoint.hf_files import TensorFiles
from ncp_jax.checkpoint.hf_io import load_leaves, match, save_leaves
from ncp_jax.checkpoint.hf_tensor import HFMismatch
from ncp_jax.checkpoint.hf_writer import TensorWriter

NAMES = autoencoder_map(
    AutoencoderSizes(vocab=11, chunk=2, width=4, ffn=6, latent=3, encoder_layers=2, decoder_layers=2)
)
COPY, TABLE = "decoder.lm_head_weight", "encoder.embed_tokens.weight"
HERE = SingleDeviceSharding(jax.local_devices()[0])


@pytest.fixture
def named():
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in NAMES.shapes.items()} | {
        COPY: np.zeros((11, 4), np.float32)
    }


def loaded(folder, named):
    write_shards(folder, named)
    return load_leaves(NAMES, TensorFiles(folder), dict.fromkeys(NAMES.leaves(), HERE))


@pytest.mark.parametrize("absent", [COPY, TABLE, None])
def test_either_name_is_enough(tmp_path, named, absent):
    named[COPY] = named[TABLE]
    leaves = loaded(tmp_path, {name: value for name, value in named.items() if name != absent})
    np.testing.assert_array_equal(leaves["embed/table"], named[TABLE])


def test_without_both_the_tensor_is_missing(tmp_path, named):
    del named[COPY], named[TABLE]
    with pytest.raises(HFMismatch, match=rf"1 tensors differ\n  missing: {TABLE} \[11, 4\]"):
        loaded(tmp_path, named)


def test_copies_that_differ_are_named_with_their_difference(tmp_path, named):
    named[COPY] = named[TABLE].copy()
    named[COPY][7, 2] += 0.25
    named[COPY][3, 1] -= 0.5
    with pytest.raises(HFMismatch, match=rf"\n  {COPY} differs from {TABLE}: by up to 0.5$"):
        loaded(tmp_path, named)


def test_prefixes_do_not_hide_a_difference(tmp_path, named):
    with pytest.raises(HFMismatch, match=rf"module.{COPY} differs from module.{TABLE}"):
        loaded(tmp_path, {f"module.{name}": value for name, value in named.items()})


def test_a_shared_storage_is_not_read(tmp_path, named, monkeypatch):
    named[COPY] = named[TABLE]
    write_torch(tmp_path / "pytorch_model.bin", named)
    monkeypatch.setattr(hf_copies, "largest_difference", None)
    files = TensorFiles(tmp_path)
    hf_copies.check_copies(NAMES, files, match(NAMES, files))


def test_largest_difference(monkeypatch):
    monkeypatch.setattr(hf_copies, "BLOCK_ELEMENTS", 8)  # two rows at a time
    one = np.arange(20, dtype=np.float32).reshape(5, 4)
    other = one.copy()
    assert largest_difference(one, other) == 0
    other[4, 3] = 18.5
    assert largest_difference(one, other) == 0.5
    assert largest_difference(one.astype(ml_dtypes.bfloat16), one) == 0
    one[0, 0] = np.nan
    assert largest_difference(one, other) == np.inf
    other[0, 0], other[4, 3] = np.nan, 19
    assert largest_difference(one, other) == 0
    assert largest_difference(one[:, 0], other[:, 0]) == 0


def test_both_names_are_written(tmp_path, named):
    named[COPY] = named[TABLE]
    leaves = loaded(tmp_path, named)
    (tmp_path / "new").mkdir()
    written = save_leaves(NAMES, TensorWriter(tmp_path / "new", NAMES.shapes, np.float32), [leaves])
    files = TensorFiles(tmp_path / "new")
    assert written.tensors == len(files.tensors) == len(named)
    assert written.parameters == sum(value.size for name, value in named.items() if name != COPY)
    for name, value in named.items():
        np.testing.assert_array_equal(files.array(name), value, err_msg=name)
