"""Name maps: the published counts, and a bijection between both sides."""

import numpy as np
import pytest

from ncp_jax.checkpoint.hf_names import BlockSizes
from ncp_jax.checkpoint.hf_ncp_names import NCPSizes, native_map, ncp_olmo3_map, olmo3_map

RELEASED_BLOCK = BlockSizes(width=4096, heads=32, kv_heads=32, ffn=11_008, full_norm=True)
RELEASED = NCPSizes(RELEASED_BLOCK, vocab=100_278, encoder=16, concept=8, decoder=16, segments=32, codes=128)
TINY = NCPSizes(BlockSizes(16, 2, 2, 24, False), vocab=11, encoder=3, concept=2, decoder=2, segments=4, codes=3)
MAPS = {
    "ncp_olmo3": ncp_olmo3_map(TINY),
    "native": native_map(TINY),
    "olmo3": olmo3_map(BlockSizes(16, 4, 2, 24, True), vocab=11, layers=3),
}


@pytest.mark.parametrize(("names", "tensors"), [(ncp_olmo3_map(RELEASED), 842), (native_map(RELEASED), 722)])
def test_released_size(names, tensors):
    assert len(names.tensors) == tensors
    assert names.parameters == 8_938_363_793
    assert sum(int(np.prod(shape)) for shape in names.leaves().values()) == 8_938_363_793


def test_olmo3_7b_size():
    assert olmo3_map(RELEASED_BLOCK, vocab=100_278, layers=32).parameters == 7_298_011_136  # the published model


def test_released_shapes():
    """A few, written down from the released runtime's table."""
    native = {tensor.name: tensor.shape for tensor in native_map(RELEASED).tensors}
    assert native["encoder.layers.15.self_attention.linear_qkv.weight"] == (12_288, 4096)
    assert native["concept_predictor.hlm_block.layers.7.mlp.linear_fc1.weight"] == (22_016, 4096)
    assert native["concept_predictor.concept_read_encoder_routes.0.w1.weight"] == (15, 4096)
    assert native["decoder_read_encoder_routes.0.w2.weight"] == (16, 16)
    assert native["dd_two_route_add.decoder_dds.15.static_a"] == (17,)
    assert native["fusion_norm_alpha"] == ()
    assert native["final_read_concept_gate_logits"] == (16, 2)
    split = {tensor.name: tensor.shape for tensor in ncp_olmo3_map(RELEASED).tensors}
    assert split["model.decoder.layers.0.self_attn.k_proj.weight"] == (4096, 4096)
    assert [name for name in split if not name.startswith("model.")] == ["lm_head.weight"]


@pytest.mark.parametrize("names", MAPS.values(), ids=MAPS)
def test_every_element_has_one_place(names):
    """Number all elements of their tensors; our leaves then hold each number once."""
    count, theirs = 0, {}
    for tensor in names.tensors:
        size = int(np.prod(tensor.shape))
        theirs[tensor.name] = np.arange(count, count + size).reshape(tensor.shape)
        count += size
    leaves = {leaf: np.full(shape, -1) for leaf, shape in names.leaves().items()}
    for tensor in names.tensors:
        for part in tensor.parts:
            leaves[part.leaf][... if part.at is None else part.at] = part.layout.ours(theirs[tensor.name])
    ours = np.concatenate([leaf.reshape(-1) for leaf in leaves.values()])
    np.testing.assert_array_equal(np.sort(ours), np.arange(count))


def test_fused_rows_by_hand():
    """QKV rows of head 1: q 24..31, k 32..39, v 40..47 of [2 heads, (q, k, v), 8]; up rows follow the gate's."""
    tensors = {tensor.name: tensor for tensor in native_map(TINY).tensors}
    qkv = tensors["encoder.layers.0.self_attention.linear_qkv.weight"]
    rows = np.repeat(np.arange(48)[:, None], 16, axis=1)
    for part, first in zip(qkv.parts, (24, 32, 40), strict=True):
        np.testing.assert_array_equal(part.layout.ours(rows)[5, 1], np.arange(first, first + 8))
    gate, up = tensors["decoder.layers.1.mlp.linear_fc1.weight"].parts
    rows = np.repeat(np.arange(48)[:, None], 16, axis=1)
    assert (gate.leaf, up.leaf) == ("decoder/blocks/w_gate", "decoder/blocks/w_up")
    np.testing.assert_array_equal(gate.layout.ours(rows)[3], np.arange(24))
    np.testing.assert_array_equal(up.layout.ours(rows)[3], np.arange(24, 48))


def test_norms_of_both_modes():
    full = {t.name: t for t in olmo3_map(BlockSizes(16, 4, 2, 24, True), 11, 1).tensors}
    assert full["model.layers.0.self_attn.k_norm.weight"].shape == (8,)
    per_head = {t.name: t for t in ncp_olmo3_map(TINY).tensors}
    assert per_head["model.encoder.layers.0.self_attn.q_norm.weight"].shape == (8,)
    assert ncp_olmo3_map(TINY).leaves()["encoder/blocks/q_norm"] == (3, 8)
