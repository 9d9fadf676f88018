"""Leaf tables: names, comparison, checksums."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ncp_jax.checkpoint import leaves
from ncp_jax.checkpoint.leaves import CheckpointError, Leaf

Moments = collections.namedtuple("Moments", "mu nu")


def test_names_follow_dicts_tuples_and_named_tuples():
    tree = {"params": {"wq": 1}, "opt_state": (Moments({"wq": 2}, None), ()), "step": 3}
    assert leaves.flatten(tree) == {"params/wq": 1, "opt_state/0/mu/wq": 2, "step": 3}
    assert leaves.unflatten_like(tree, leaves.flatten(tree)) == tree
    assert leaves.nest({"a/b": 1, "a/c/d": 2}) == {"a": {"b": 1, "c": {"d": 2}}}


def test_colliding_names_are_refused():
    with pytest.raises(CheckpointError, match="a/b"):
        leaves.flatten({"a/b": 1, "a": {"b": 2}})


@pytest.mark.parametrize("leaf", [3, jax.random.key(0)])
def test_only_plain_arrays_are_leaves(leaf):
    with pytest.raises(CheckpointError, match="'x'"):
        leaves.describe({"x": leaf})


def test_compare_names_every_kind_of_difference():
    stored = {"a": Leaf((2,), "float32"), "b": Leaf((2,), "float32"), "c": Leaf((2,), "float32")}
    ours = {"a": Leaf((3,), "float32"), "b": Leaf((2,), "bfloat16"), "d": Leaf((), "int32")}
    text = "\n".join(leaves.compare(ours, stored))
    for part in ("missing from the checkpoint: d", "only in the checkpoint: c", "float32[3]", "bfloat16[2]"):
        assert part in text
    assert leaves.compare(ours, ours) == []


def test_fingerprint_sees_names_shapes_and_dtypes_alone():
    base = {"a": Leaf((2,), "float32", 1)}
    assert leaves.fingerprint(base) == leaves.fingerprint({"a": Leaf((2,), "float32", 99)})
    others = [{"b": base["a"]}, {"a": Leaf((2, 1), "float32")}, {"a": Leaf((2,), "bfloat16")}]
    assert len({leaves.fingerprint(table) for table in [base, *others]}) == 4


def test_explain_mismatch_lists_config_fields():
    text = leaves.explain_mismatch({"model": {"layers": 4, "width": 8}}, {"model": {"layers": 5, "width": 8}})
    assert "model.layers: 4 -> 5" in text
    assert "width" not in text
    assert "equal" in leaves.explain_mismatch({"a": 1}, {"a": 1})


def by_hand(words: list[int]) -> int:
    """The documented sum in Python integers."""
    total = 0
    for i, word in enumerate(words):
        scattered = i * leaves.GOLDEN % 2**32
        total += word * ((scattered ^ (scattered >> 15)) | 1)
    return total % 2**32


HOW = [lambda x: leaves.checksums({"x": x})["x"], lambda x: int(leaves._device_checksum(x))]


@pytest.mark.parametrize("checksum", HOW, ids=["host", "device"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint32", "int8", "bool"])
def test_checksum_is_the_documented_sum_and_sees_any_change(dtype, checksum):
    values = np.random.default_rng(0).normal(size=(5, 3, 2)) * 3
    array = jnp.asarray(values > 0 if dtype == "bool" else values).astype(dtype)
    words = np.asarray(array).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])
    assert checksum(array) == by_hand(words.ravel().tolist())
    changed = array.at[1, 2, 1].set(array[1, 2, 1] == 0)
    assert len({checksum(array), checksum(jnp.flip(array, 0)), checksum(changed)}) == 3


@pytest.mark.parametrize("checksum", HOW, ids=["host", "device"])
def test_checksum_of_eight_byte_and_scalar_leaves(checksum):
    with jax.enable_x64(True):
        for array in (jnp.asarray([1.5, -2.25, 3e300]), jnp.asarray([1 + 2j, 3e-9j]), jnp.asarray(0.1)):
            assert checksum(array) == by_hand(np.asarray(array).reshape(-1).view(np.uint32).tolist())
    assert checksum(jnp.int32(7)) == 7


def test_exchanged_shards_of_round_values_change_the_checksum():
    array = jnp.concatenate([jnp.full(1 << 16, 1.0), jnp.full(1 << 16, 2.0)])
    sums = leaves.checksums({"a": array, "b": jnp.flip(array)})
    assert sums["a"] != sums["b"]
