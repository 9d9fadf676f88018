"""Torch files: what torch wrote is read without it; whatever else a pickle asks for is refused, and never done."""

import os
import pickle
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from golden_files import GOLDEN
from safetensors.numpy import save_file
from torch_files import ORDERED_DICT, number, tensor, text, write_torch, write_zip

from ncp_jax.checkpoint.hf_files import TensorFiles
from ncp_jax.checkpoint.hf_tensor import HFError
from ncp_jax.checkpoint.hf_torch import CONVERT, read_torch

A = np.arange(12, dtype=np.float32).reshape(3, 4)
TINY = GOLDEN / "torch_tiny.bin"  # the state dict of a module, and views of one tensor, saved by torch 2.13


def opened(folder: Path, named: dict[str, np.ndarray]) -> TensorFiles:
    write_torch(folder / "pytorch_model.bin", named)
    return TensorFiles(folder)


def refused(folder: Path, content: bytes | None = None) -> str:
    """What is said of a file, with other content if given."""
    file = folder / "pytorch_model.bin"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(HFError) as caught:
        read_torch(file)
    assert str(file) in str(caught.value)
    return str(caught.value)


def pickled(folder: Path, program: bytes) -> str:
    """What is said of an archive with this pickle."""
    write_zip(folder / "pytorch_model.bin", {"data.pkl": program, "data/0": bytes(48), "version": b"3\n"})
    return refused(folder)


def test_reads_what_torch_wrote(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(TINY.read_bytes())
    files = TensorFiles(tmp_path)
    expected = {
        "embed.weight": A, "head.weight": A, "transposed": A.T, "corner": A[1:, 2:], "shared": A,
        "f16": np.arange(5, dtype=np.float16) / 2, "scalar": np.float32(7), "count": np.int64(3),
        "bf16": (np.arange(6, dtype=np.float32).reshape(2, 3) / 2).astype(ml_dtypes.bfloat16),
    }  # fmt: skip
    assert files.tensors.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(files.array(name), value, err_msg=name, strict=True)
    assert files.tensors["embed.weight"] == files.tensors["head.weight"]  # tied: one place
    assert files.tensors["transposed"].offset == files.tensors["shared"].offset


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64])
def test_every_dtype_and_layout(tmp_path, dtype):
    base = A.astype(dtype)
    views = {
        "whole": base,
        "rows": base[1:],
        "columns": base[:, 1::2],
        "flipped": base.T,
        "cell": base[2:, 3:].reshape(()),
    }
    views |= {"empty": base[:0], "cube": base.reshape(3, 2, 2).transpose(2, 0, 1)}
    files = opened(tmp_path, views)
    for name, value in views.items():
        np.testing.assert_array_equal(files.array(name), value, err_msg=name, strict=True)
    view = files.array("flipped")
    files.forget("flipped")
    np.testing.assert_array_equal(view, base.T)


def test_tensors_stay_in_the_file(tmp_path):
    files = opened(tmp_path, {"a": A, "b": A.T})
    with open(tmp_path / "pytorch_model.bin", "r+b") as other:
        other.seek(files.tensors["a"].offset)
        other.write(np.float32(99).tobytes())
    assert files.array("a")[0, 0] == 99
    with pytest.raises(ValueError, match="read-only"):
        files.array("b")[0, 0] = 1


def test_shards_are_found_by_their_index(tmp_path):
    for number_, (name, value) in enumerate({"a": A, "b": A + 1}.items(), 1):
        write_torch(tmp_path / f"pytorch_model-{number_}-of-2.bin", {name: value})
    index = tmp_path / "pytorch_model.bin.index.json"
    with pytest.raises(HFError, match=r"2 pytorch_model.bin files but no pytorch_model.bin.index.json"):
        TensorFiles(tmp_path)
    index.write_text('{"weight_map": {"a": "pytorch_model-1-of-2.bin", "b": "pytorch_model-2-of-2.bin"}}')
    np.testing.assert_array_equal(TensorFiles(tmp_path).array("b"), A + 1)
    index.write_text('{"weight_map": {"a": "pytorch_model-1-of-2.bin", "b": "pytorch_model-3-of-2.bin"}}')
    with pytest.raises(HFError, match=r"missing file: pytorch_model-3-of-2.bin"):
        TensorFiles(tmp_path)


def test_safetensors_come_first(tmp_path):
    """So that a converted checkpoint can stay beside its source; other .bin files are not the model's."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"nonsense")
    (tmp_path / "training_args.bin").write_bytes(b"nonsense")
    save_file({"a": A}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(TensorFiles(tmp_path).array("a"), A)


# ---- pickles that want something


class Shell:
    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_a_command_in_a_pickle_is_named_and_not_run(tmp_path, protocol):
    program = pickle.dumps({"a": Shell(f"touch {tmp_path / 'ran'}")}, protocol)
    message = pickled(tmp_path, program)
    assert not (tmp_path / "ran").exists()
    assert ("asks for posix.system" if protocol else "uses the opcode") in message  # 0 is older than torch
    assert CONVERT in message
    assert "weights_only=True" in CONVERT


STORAGE = b"ctorch\nFloatStorage\n"
DICT = b"}" + text("a")  # ... value, then SETITEM and STOP
PROGRAMS = {
    "another global": (b"cbuiltins\neval\n" + text("1+1") + b"\x85R.", "asks for builtins.eval"),
    "a global of torch": (b"ctorch.hub\nload\n.", "asks for torch.hub.load"),
    "a dotted name": (b"ccollections\nOrderedDict.fromkeys\n.", "asks for collections.OrderedDict.fromkeys"),
    "a changed function": (b"ctorch._utils\n_rebuild_tensor_v2\n}" + text("x") + number(1) + b"sb.", "tries to change"),
    "a called storage": (STORAGE + b")R.", "calls the type of a storage"),
    "an instance": (b"\x80\x02(ios\nsystem\n.", "uses the opcode INST"),
    "an extension": (b"\x82\x01.", "uses the opcode EXT1"),
    "a large memo": (b"}r\xff\xff\xff\x7f.", "uses the opcode LONG_BINPUT"),
    "no storage": (DICT + b"(" + text("module") + STORAGE + b"tQs.", "refers to something that is no storage"),
    "no dict": (b"N.", "holds no dict"),
    "nested tensors": (b"}" + text("state_dict") + b"}s.", "its entry 'state_dict' is no named tensor"),
    "a number for a name": (b"}" + number(1) + tensor("float32", "0", 12, 0, (12,), (1,)) + b"s.", "its entry 1 "),
    "half a pickle": (b"\x80\x02}", "describes no tensors"),
    "no pickle": (b"\xfe\xfe", "describes no tensors"),
    "a wrong call": (b"ctorch._utils\n_rebuild_tensor_v2\n)R.", "describes no tensors"),
    "a missing storage": (DICT + tensor("float32", "7", 12, 0, (12,), (1,)) + b"s.", "lies in storage 7, which is not"),
    "too long": (DICT + tensor("float32", "0", 12, 0, (13,), (1,)) + b"s.", r"ends beyond the 48 bytes"),
    "too far": (DICT + tensor("float32", "0", 12, 11, (2,), (1,)) + b"s.", "ends beyond the 48 bytes"),
    "too wide": (DICT + tensor("float32", "0", 12, 0, (2, 2), (11, 1)) + b"s.", "ends beyond the 48 bytes"),
    "backwards": (DICT + tensor("float32", "0", 12, 11, (12,), (-1,)) + b"s.", "as many strides"),
    "strides amiss": (DICT + tensor("float32", "0", 12, 0, (3, 4), (1,)) + b"s.", "as many strides"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_pickles_that_are_no_state_dict(tmp_path, name):
    program, message = PROGRAMS[name]
    assert message in pickled(tmp_path, program)


def test_attributes_of_a_state_dict_are_passed_over(tmp_path):
    entry = b"(" + text("a") + tensor("float32", "0", 12, 0, (3, 4), (4, 1)) + b"u"
    metadata = b"}" + text("_metadata") + ORDERED_DICT + b"sb"
    write_zip(tmp_path / "pytorch_model.bin", {"data.pkl": ORDERED_DICT + entry + metadata + b".", "data/0": bytes(48)})
    assert list(read_torch(tmp_path / "pytorch_model.bin")) == ["a"]


# ---- archives


def test_damaged_archives(tmp_path):
    whole = TINY.read_bytes()
    assert "damaged: as a zip archive" in refused(tmp_path, whole[:-100])
    assert "damaged: as a zip archive" in refused(tmp_path, whole[: len(whole) // 2])
    assert "no zip archive" in refused(tmp_path, b"")
    assert "no zip archive" in refused(tmp_path, pickle.dumps(0x1950A86A20F9469CFC6C, 2))  # begins a file before 1.6
    place = whole.index(b"embed.weight")
    assert "Bad CRC-32" in refused(tmp_path, whole[:place] + b"X" + whole[place + 1 :])
    place = whole.index(b"PK\x03\x04", whole.index(b"byteorder"))
    assert "not where the archive's list says" in refused(tmp_path, whole[:place] + b"XX" + whole[place + 2 :])


def test_archives_that_cannot_be_read_in_place(tmp_path):
    file = tmp_path / "pytorch_model.bin"
    write_torch(file, {"a": A}, byteorder=b"big")
    assert "not little-endian" in refused(tmp_path)
    with zipfile.ZipFile(file) as archive:
        contents = {name.removeprefix("pytorch_model/"): archive.read(name) for name in archive.namelist()}
    write_zip(file, contents, zipfile.ZIP_DEFLATED)
    message = refused(tmp_path)
    assert "is compressed" in message
    assert CONVERT in message
    write_zip(file, {"version": b"3\n"})
    assert "0 members */data.pkl" in refused(tmp_path)
    file.unlink()
    with pytest.raises(HFError, match="cannot read"):
        read_torch(file)
