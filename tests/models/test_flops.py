"""FLOPs and parameter counts against published tables, hand counts and initialised models."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ncp_jax.models.flops import (
    CONVENTIONS,
    block_parameters,
    ladder_ffn,
    ladder_flops_per_token,
    non_embedding_parameters,
    parameter_count,
    total_parameters,
    training_flops_by_part,
    training_flops_per_token,
    visible_keys,
)
from ncp_jax.models.ncp.config import Concept, NCPConfig, Routing, paper, released
from ncp_jax.models.ncp.model import NCP
from ncp_jax.models.olmo3 import Olmo3, Olmo3Config
from ncp_jax.nn.backbone import Backbone

BIG = Backbone(width=4096, heads=32, ffn=11008)
BIG_SIZES = {"vocab": 100278, "encoder_layers": 16, "concept_layers": 8, "decoder_layers": 16, "backbone": BIG}
SMALL = Backbone(width=16, heads=4, kv_heads=2, ffn=24, window=3, full_every=2)
SMALL_SIZES = {"vocab": 19, "encoder_layers": 3, "concept_layers": 2, "decoder_layers": 3, "backbone": SMALL}

# Report Table 12 by the reconstructed rule: GFLOP per token, by width and encoder/concept/decoder depth.
LADDER_WIDTHS = (896, 1024, 1152, 1280, 1408, 1536, 1664, 1792, 1920, 2048, 2176)
LADDER = {
    (4, 4, 4): (0.824, 1.033, 1.266, 1.495, 1.771, 2.070, 2.358, 2.700, 3.066, 3.412, 3.820),
    (8, 4, 8): (1.578, 1.977, 2.420, 2.856, 3.380, 3.948, 4.495, 5.145, 5.838, 6.494, 7.270),
    (8, 8, 8): (1.647, 2.067, 2.532, 2.990, 3.543, 4.141, 4.716, 5.401, 6.131, 6.823, 7.641),
}
CELLS = [(depth, *cell) for depth, row in LADDER.items() for cell in zip(LADDER_WIDTHS, row, strict=True)]


def ladder_model(width: int, depth: tuple[int, int, int]) -> NCPConfig:
    backbone = Backbone(width=width, heads=width // 128, ffn=ladder_ffn(width))
    encoder, concept, decoder = depth
    return released(
        vocab=100278, encoder_layers=encoder, concept_layers=concept, decoder_layers=decoder, backbone=backbone
    )


@pytest.mark.parametrize(("depth", "width", "gflops"), CELLS)
def test_ladder_table(depth, width, gflops):
    assert round(ladder_flops_per_token(ladder_model(width, depth), 8192) / 1e9, 3) == gflops


def test_ladder_rows_that_the_report_states():
    """Budget = F_tok * tokens: 1e19 at 1408 and 5.645 B tokens, 1e20 at 1792 and 18.516 B."""
    for budget, width, depth, tokens in ((1e19, 1408, (4, 4, 4), 5.645e9), (1e20, 1792, (8, 8, 8), 18.516e9)):
        assert ladder_flops_per_token(ladder_model(width, depth), 8192) * tokens == pytest.approx(budget, rel=3e-4)


def test_published_shape_by_group():
    assert parameter_count(released(**BIG_SIZES)) == {
        "embedding": 410_738_688,
        "encoder": 3_238_264_832,
        "concept": 1_619_132_416,
        "decoder": 3_238_264_832,
        "final_norms": 8_192,
        "concept_norm": 8_192,
        "prediction_heads": 16_781_312,
        "codebooks": 524_288,
        "irc": 1_429_608,
        "crc": 2_235_144,
        "crc_norms": 24_576,
        "reinjection": 196_608,
        "fusion": 16_385,
        "gates": 32,
        "head": 410_738_688,
    }


def test_published_totals():
    config = released(**BIG_SIZES)
    groups = parameter_count(config)
    assert total_parameters(config) == 8_938_363_793
    assert groups["prediction_heads"] + groups["codebooks"] == 17_305_600  # the report's 17M interface
    assert non_embedding_parameters(config) == 8_938_363_793 - 2 * 100278 * 4096
    assert block_parameters(BIG) == 202_391_552


def test_published_block_units():
    """The report's Table 2: 32 + 8/4 = 34 block units; with attention 33.84, a concept block being 0.2295."""
    config = released(**BIG_SIZES)
    parts = training_flops_by_part(config, 8192)
    block = training_flops_per_token(Olmo3Config(100278, 32, BIG), 8192, head=False) / 32
    assert parts["concept"] / 8 / block == pytest.approx(0.2295, abs=5e-5)
    assert ladder_flops_per_token(config, 8192) / block == pytest.approx(33.84, abs=5e-3)


def test_residual_overhead_of_table_3():
    """+0.024 % for IRC and +0.051 % for IRC and CRC at 1B (assumption: 8/4/7 layers, width 2048, T = 4096)."""
    backbone = Backbone(width=2048, heads=16, ffn=8192, window=None)
    config = released(vocab=100352, encoder_layers=8, concept_layers=4, decoder_layers=7, backbone=backbone)
    config = dataclasses.replace(config, concept=dataclasses.replace(config.concept, window=None))
    no_crc = {"concept_from_encoder": False, "decoder_from_encoder": False, "decoder_from_concept": False}
    for routing, percent in ((Routing(**no_crc), 0.024), (Routing(), 0.051)):
        parts = training_flops_by_part(dataclasses.replace(config, routing=routing), 4096)
        plain = sum(parts[name] for name in ("encoder", "concept", "decoder", "head"))
        assert round(100 * parts["routes"] / plain, 3) == percent


def test_table_8_of_the_report():
    """3B, 150 B tokens: 16 plain layers 3.245e21 FLOPs, NCP 8/4/7 3.227e21 (all layers full, T = 8192, causal half)."""
    backbone = Backbone(width=3328, heads=26, ffn=4 * 3328, window=None)
    plain = training_flops_per_token(Olmo3Config(100352, 16, backbone), 8192)
    ncp = released(vocab=100352, encoder_layers=8, concept_layers=4, decoder_layers=7, backbone=backbone)
    ncp = dataclasses.replace(ncp, concept=dataclasses.replace(ncp.concept, window=None))
    parts = training_flops_by_part(ncp, 8192)
    routed = sum(parts[name] for name in ("encoder", "concept", "decoder", "head"))
    assert plain * 150e9 == pytest.approx(3.245e21, abs=0.0006e21)
    assert routed * 150e9 == pytest.approx(3.227e21, abs=0.0006e21)


def test_small_model_by_hand():
    """k = 4, T = 10: two concepts per ten tokens. Layers alternate a window of 3 keys and full attention."""
    config = released(**SMALL_SIZES, concept=Concept(chunk=4, segments=2, codes=5, window=None))
    matrices = 16 * (4 + 2) * 4 * 2 + 3 * 16 * 24
    window, full = (1 + 2 + 3 * 8) / 10, 5.5
    irc = sum(2 * 16 * n + n * n for n in (2, 3, 4))
    irc_concept = sum(2 * 16 * n + n * n for n in (2, 3))
    crc_encoder, crc_concept, crc_into_concept = 2 * 16 * 3 + 9, 2 * 16 * 2 + 4, 2 * 16 * 2 + 4
    parts = training_flops_by_part(config, 10)
    assert parts["encoder"] == parts["decoder"] == pytest.approx(18 * matrices + 12 * 16 * (2 * window + full))
    assert parts["concept"] == pytest.approx(0.2 * (12 * matrices + 12 * 16 * 2 * 1.5))
    assert parts["prediction"] == pytest.approx(0.2 * 6 * (2 * 16 * 5 + 5 * 16))
    routes = 2 * irc + 0.2 * irc_concept + 3 * (crc_encoder + crc_concept) + 0.2 * 2 * crc_into_concept
    assert parts["routes"] == pytest.approx(6 * routes)
    assert parts["head"] == 6 * 16 * 19
    total = training_flops_per_token(config, 10)
    assert total == pytest.approx(sum(parts.values()))
    assert training_flops_per_token(config, 10, head=False, routes=False) == pytest.approx(
        total - parts["head"] - parts["routes"]
    )


def test_conventions_differ_by_hidden_keys_alone():
    config = Olmo3Config(vocab=19, layers=2, backbone=SMALL)
    visible, full = (training_flops_per_token(config, 10, convention=name) for name in CONVENTIONS)
    assert full - visible == pytest.approx(12 * 16 * (2 * 10 - 2.7 - 5.5))


@pytest.mark.parametrize(("length", "window"), [(1, None), (7, None), (7, 3), (7, 7), (7, 9), (8192, 4096)])
def test_visible_keys_is_a_mean_over_queries(length, window):
    counted = [min(i + 1, window or length) for i in range(length)]
    assert visible_keys(length, window) == pytest.approx(sum(counted) / length)


def test_nano_sizes():
    """The 1 M models of the nano comparison: 1.049 M and 0.854 M parameters outside the embeddings."""
    nano = Backbone(width=128, heads=4, ffn=352)
    config = released(
        vocab=4096, encoder_layers=2, concept_layers=1, decoder_layers=2, backbone=nano,
        concept=Concept(segments=8, codes=32),
    )  # fmt: skip
    assert non_embedding_parameters(config) == pytest.approx(1.049e6, abs=500)
    wide = Olmo3Config(vocab=4096, layers=4, backbone=dataclasses.replace(nano, ffn=384))
    assert non_embedding_parameters(wide) == pytest.approx(0.854e6, abs=500)


SMALL_CONFIGS = {
    "released": released(**SMALL_SIZES, concept=Concept(segments=4, codes=5)),
    "paper": paper(**SMALL_SIZES, segments=2, codes=3),
    "per_head": released(
        **(SMALL_SIZES | {"backbone": dataclasses.replace(SMALL, qk_norm="per_head")}),
        concept=Concept(segments=2, codes=3, norm="rms", fusion="scalar_gate", reinject=False),
    ),
    "few_routes": released(
        **SMALL_SIZES,
        concept=Concept(segments=2, codes=3),
        routing=Routing(irc_concept="none", decoder_from_concept=False, concept_from_encoder=False),
    ),
    "olmo3": Olmo3Config(vocab=19, layers=3, backbone=SMALL),
}


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_counts_equal_initialised_models(name):
    config = SMALL_CONFIGS[name]
    model = NCP(config) if isinstance(config, NCPConfig) else Olmo3(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in _leaves(shapes)}
    assert total_parameters(config) == sum(leaf.size for leaf in leaves.values())
    groups = parameter_count(config)
    irc = sum(leaf.size for path, leaf in leaves.items() if "/irc_" in path)
    crc = sum(leaf.size for path, leaf in leaves.items() if "/read_" in path)
    assert groups.get("irc", 0) == irc
    assert groups.get("crc", 0) + groups.get("crc_norms", 0) == crc


def test_sequence_shorter_than_a_chunk():
    with pytest.raises(ValueError, match="sequence 3 is shorter than a chunk of 4"):
        training_flops_per_token(released(**SMALL_SIZES, concept=Concept(segments=2, codes=3)), 3)


def _leaves(tree):
    return jax.tree_util.tree_flatten_with_path(tree)[0]
