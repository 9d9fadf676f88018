"""Safetensors folders: what the official package writes is read, ours is read by it, damage has a name."""

import errno
import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from ncp_jax.checkpoint.hf_files import INDEX, HFError, TensorFiles
from ncp_jax.checkpoint.hf_writer import TensorWriter
from ncp_jax.checkpoint.leaves import CheckpointError

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.arange(4).astype(ml_dtypes.bfloat16)
C = np.array(7, np.float32)


@pytest.fixture
def folder(tmp_path):
    """Two shards, by the official package."""
    save_file({"a": A}, tmp_path / "one.safetensors")
    save_file({"b": B, "c": C}, tmp_path / "two.safetensors")
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    return tmp_path


def index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def rewrite(file, change):
    """Change a file's header, and its length field with it."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = change(json.loads(content[8 : 8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def test_reads_what_the_official_package_wrote(folder):
    files = TensorFiles(folder)
    np.testing.assert_array_equal(files.array("a"), A)
    assert files.array("b").tobytes() == B.tobytes()
    assert files.array("c") == 7
    assert files.array("c").shape == ()
    view = files.array("a")
    files.forget("a")
    np.testing.assert_array_equal(view, A)  # views outlive it
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1


def test_one_file_needs_no_index(tmp_path):
    save_file({"a": A}, tmp_path / "anything.safetensors")
    np.testing.assert_array_equal(TensorFiles(tmp_path).array("a"), A)


def test_a_header_of_any_length(folder):
    """The format pads headers to eight bytes; files of other writers may not, so data may lie anywhere."""
    rewrite(folder / "one.safetensors", lambda header: json.dumps(header).encode() + b" " * 3)
    np.testing.assert_array_equal(TensorFiles(folder).array("a"), A)


def test_writes_what_the_official_package_reads(tmp_path):
    shapes = {"a": (2, 3), "b": (4,), "c": (), "d": (5,)}
    writer = TensorWriter(tmp_path, shapes, ml_dtypes.bfloat16, shard_bytes=20)
    for number, name in enumerate(reversed(shapes)):
        writer.array(name)[...] = number
        writer.forget(name)
    writer.finish()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)] + [INDEX]
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert list(weight_map) == list(shapes)
    for name, shard in weight_map.items():
        with safe_open(tmp_path / shard, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
        tensor = load_file(tmp_path / shard)[name]
        assert tensor.shape == shapes[name]
        assert (tensor == 3 - list(shapes).index(name)).all()
    assert TensorFiles(tmp_path).tensors.keys() == shapes.keys()


def test_a_full_disk_is_an_error_before_anything_is_filled(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HFError, match=r"model-00001-of-00001.safetensors: No space left"):
        TensorWriter(tmp_path, {"a": (4,)}, np.float32)


def truncate(folder):
    file = folder / "one.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def shorten_to_nothing(folder):
    (folder / "one.safetensors").write_bytes(b"")


def break_json(folder):
    rewrite(folder / "one.safetensors", lambda header: b'{"a": ')


def lie_about_length(folder):
    content = (folder / "one.safetensors").read_bytes()
    (folder / "one.safetensors").write_bytes((2**60).to_bytes(8, "little") + content[8:])


def lie_about_shape(folder):
    rewrite(folder / "one.safetensors", lambda h: {"a": h["a"] | {"shape": [2, 2]}})


def negative_offset(folder):
    rewrite(folder / "one.safetensors", lambda h: {"a": h["a"] | {"data_offsets": [-4, 20]}})


def overlap(folder):
    rewrite(folder / "two.safetensors", lambda h: h | {"b": h["b"] | {"data_offsets": [0, 8]}, "c": h["c"] | {
        "data_offsets": [0, 4]}})  # fmt: skip


def no_offsets(folder):
    rewrite(folder / "one.safetensors", lambda h: {"a": {"dtype": "F32", "shape": [2, 3]}})


def unknown_dtype(folder):
    rewrite(folder / "one.safetensors", lambda h: {"a": h["a"] | {"dtype": "F4"}})


def remove_shard(folder):
    (folder / "two.safetensors").unlink()


def unlisted_shard(folder):
    save_file({"d": A}, folder / "three.safetensors")


def unlisted_tensor(folder):
    index(folder, {"a": "one.safetensors", "b": "two.safetensors"})


def listed_but_absent(folder):
    index(folder, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors", "d": "one.safetensors"})


def stored_twice(folder):
    save_file({"b": B, "c": C, "a": A[:1].copy()}, folder / "two.safetensors")


def twice_in_one_header(folder):
    rewrite(folder / "one.safetensors", lambda h: ('{"a": %s, "a": %s}' % ((json.dumps(h["a"]),) * 2)).encode())


def index_without_map(folder):
    (folder / INDEX).write_text("{}")


def index_of_nonsense(folder):
    (folder / INDEX).write_text("weights")


def index_elsewhere(folder):
    index(folder, {"a": "../one.safetensors"})


def no_index(folder):
    (folder / INDEX).unlink()


DAMAGE = {
    truncate: r"one.safetensors is damaged: truncated: it has \d+ bytes, its header describes \d+",
    shorten_to_nothing: "one.safetensors is damaged: its 0 bytes",
    break_json: "one.safetensors is damaged: no JSON",
    lie_about_length: "cannot hold the header",
    lie_about_shape: r"tensor a is float32\[2, 2\], 16 bytes, but its place has 24",
    negative_offset: "header entry of a",
    overlap: "begins at byte",
    no_offsets: "header entry of a",
    unknown_dtype: "tensor a has dtype F4",
    remove_shard: "missing file: two.safetensors",
    unlisted_shard: f"missing from {INDEX}: three.safetensors",
    unlisted_tensor: rf"unlisted: c float32\[\] is in two.safetensors, {INDEX} says None",
    listed_but_absent: f"missing: d, which {INDEX} places in one.safetensors",
    stored_twice: r"duplicate: a is float32\[2, 3\] in one.safetensors, float32\[1, 3\] in two.safetensors",
    twice_in_one_header: r"one.safetensors lists twice \(duplicate\): a",
    index_without_map: "no 'weight_map'",
    index_of_nonsense: "no JSON",
    index_elsewhere: "points outside its folder",
    no_index: "2 safetensors files but no",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_has_one_clear_error(folder, damage):
    damage(folder)
    with pytest.raises(CheckpointError, match=DAMAGE[damage]) as caught:
        TensorFiles(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_no_folder_or_nothing_in_it(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(HFError, match=r"not a folder|no safetensors file"):
        TensorFiles(tmp_path / name)
