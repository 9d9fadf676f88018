"""Name maps of the CALM family: the recorded names and shapes, the published sizes, a bijection."""

import json

import numpy as np
import pytest
from calm_checkpoints import published_tensors
from golden_files import load

from ncp_jax.checkpoint.hf_calm_names import AutoencoderSizes, CalmSizes, autoencoder_map, calm_map, llama_map
from ncp_jax.checkpoint.hf_names import BlockSizes

V = 128_257
AE = AutoencoderSizes(V, chunk=4, width=512, ffn=1280, latent=128, encoder_layers=2, decoder_layers=2)
TINY_AE = AutoencoderSizes(67, chunk=4, width=32, ffn=48, latent=8, encoder_layers=2, decoder_layers=2)
SMALL = BlockSizes(24, 2, 2, 32)
MAPS = {
    "ae_k4": autoencoder_map(TINY_AE),
    "energy_k4": calm_map(CalmSizes(BlockSizes(32, 4, 4, 48), 2, TINY_AE, "energy", 2, 6)),
    "energy_k4_gqa_b125": calm_map(CalmSizes(BlockSizes(32, 4, 2, 48), 2, TINY_AE, "energy", 2, 6)),
    "flow": calm_map(CalmSizes(SMALL, 2, TINY_AE, "flow", 2, 0)),
    "diffusion": calm_map(CalmSizes(SMALL, 2, TINY_AE, "diffusion", 2, 0)),
    "ar_v67": llama_map(BlockSizes(32, 4, 4, 48), 67, 2),
}


@pytest.mark.parametrize("name", MAPS)
def test_names_and_shapes_are_the_recorded_ones(name):
    """`ckpt_keys` lists a whole state dict; the transport heads and LLaMA were recorded without it."""
    golden = load(f"calm_{name}")
    if "ckpt_keys" in golden.files:
        recorded = {key: tuple(shape) for key, shape in json.loads(str(golden["ckpt_keys"])).items()}
    else:
        recorded = {key: value.shape for key, value in published_tensors(name).items()}
    assert MAPS[name].shapes == recorded


@pytest.mark.parametrize(
    ("width", "ffn", "published"), [(1024, 2752, 371_732_608), (1536, 4096, 735_332_480), (2560, 6880, 1_829_795_968)]
)
def test_published_sizes(width, ffn, published):
    """CALM-M, -L, -XL: 371M, 735M, 1.82B without the autoencoder's 75.8M."""
    names = calm_map(CalmSizes(BlockSizes(width, 16, 16, ffn), 16, AE, "energy", 4, 64))
    assert autoencoder_map(AE).parameters == 75_832_064
    assert names.parameters == published + 75_832_064
    assert sum(int(np.prod(shape)) for shape in names.leaves().values()) == names.parameters


def test_baseline_sizes():
    assert llama_map(BlockSizes(768, 16, 16, 2048), V, 12).parameters == 281_956_608
    assert llama_map(BlockSizes(1536, 16, 16, 4128), V, 16).parameters == 849_400_320


@pytest.mark.parametrize("name", MAPS)
def test_every_element_has_one_place(name):
    """Number all elements of their tensors; our leaves then hold each number once."""
    count, leaves = 0, {leaf: np.full(shape, -1) for leaf, shape in MAPS[name].leaves().items()}
    for tensor in MAPS[name].tensors:
        size = int(np.prod(tensor.shape))
        theirs, count = np.arange(count, count + size).reshape(tensor.shape), count + size
        for part in tensor.parts:
            leaves[part.leaf][... if part.at is None else part.at] = part.layout.ours(theirs)
    ours = np.concatenate([leaf.reshape(-1) for leaf in leaves.values()])
    np.testing.assert_array_equal(np.sort(ours), np.arange(count))


def test_copies_are_the_tied_weights():
    energy = dict(MAPS["energy_k4"].copies)
    assert energy.pop("ae_model.decoder.lm_head_weight") == "ae_model.encoder.embed_tokens.weight"
    assert all(copy.replace("generative_head.", "mlp_generator.") == name for copy, name in energy.items())
    assert len(energy) == 34
    assert len(MAPS["flow"].copies) == 1
    assert MAPS["ar_v67"].copies == ()
