"""config.json both ways: every field has its meaning or its error."""

import argparse
import dataclasses
import json
import math

import pytest
import yaml
from golden_files import config_fields, load, ncp_config, ncp_fields

from ncp_jax.cli import convert as cli
from ncp_jax.config import ConfigError
from ncp_jax.convert import ncp_fields as tables
from ncp_jax.convert.formats import FORMATS, SpecialIds, read_config, write_config
from ncp_jax.models.ncp.config import paper
from ncp_jax.models.olmo3 import Olmo3Config
from ncp_jax.nn.backbone import Backbone, Yarn

GOLDEN = config_fields(load("ncp_window_edges"))
NCP = ncp_fields(GOLDEN)
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32, "beta_slow": 1}
NCP_YARN = dict(zip(tables.YARN_FIELDS, (8.0, 8192, 32, 1, 1.0, 0.0, True, True), strict=True))
# The fields of a released OLMo-3, as transformers 4 wrote them.
OLMO3 = {
    "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": None, "eos_token_id": 257, "pad_token_id": 277, "hidden_act": "silu", "hidden_size": 64,
    "initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 65536, "num_attention_heads": 4,
    "num_hidden_layers": 5, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_scaling": YARN, "rope_theta": 500000,
    "layer_types": [*["sliding_attention"] * 3, "full_attention", "sliding_attention"], "sliding_window": 4096,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.57.0", "use_cache": False,
    "vocab_size": 300,
}  # fmt: skip
REMOVED = "<removed>"  # a string: parametrised ids must be the same in every process


def read(folder, fields, ignore=(), **changes):
    values = {name: value for name, value in (fields | changes).items() if value is not REMOVED}
    (folder / "config.json").write_text(json.dumps(values))
    return read_config(folder, ignore)


def refused(folder, fields, ignore=(), **changes) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, fields, ignore, **changes)
    assert str(folder / "config.json") in str(caught.value)
    return str(caught.value)


# ---- NCP


@pytest.mark.parametrize("format", ["ncp_olmo3", "native"])
def test_ncp_fields_have_their_meaning(tmp_path, format):
    published = read(tmp_path, ncp_fields(GOLDEN, format), eos_token_id=3, pad_token_id=5)
    assert published.model == ncp_config(GOLDEN)
    assert published.format == format
    assert published.ids == SpecialIds(None, (3,), 5)
    assert published.positions == 64


def test_ncp_window_counts_the_keys_to_the_left(tmp_path):
    model = read(tmp_path, NCP, window_size=[4096, 0]).model
    assert (model.backbone.window, model.concept.window) == (4097, 4097)
    assert read(tmp_path, NCP, conceptlm_hlm_attention_mode="full").model.concept.window is None


def test_ncp_qk_norm_mode_may_be_implied_by_its_size(tmp_path):
    for size, mode in ((REMOVED, "full"), (64, "full"), (16, "per_head")):
        model = read(tmp_path, NCP, qk_norm_mode=REMOVED, qk_norm_weight_size=size).model
        assert model.backbone.qk_norm == mode
    assert read(tmp_path, NCP, qk_norm_mode="per_head").model.backbone.qk_norm == "per_head"
    assert "qk_norm_weight_size is 32" in refused(tmp_path, NCP, qk_norm_mode=REMOVED, qk_norm_weight_size=32)
    assert "qk_norm_weight_size is 16" in refused(tmp_path, NCP, qk_norm_mode="full_hidden", qk_norm_weight_size=16)


def test_ncp_aliases_agree_or_are_refused(tmp_path):
    aliased = {"num_hidden_layers": 8, "num_key_value_heads": 4, "intermediate_size": 96, "rms_norm_eps": 1e-6}
    assert read(tmp_path, NCP, **aliased).model == ncp_config(GOLDEN)
    without = dict.fromkeys(("num_layers", "num_query_groups", "ffn_hidden_size", "layernorm_epsilon"), REMOVED)
    assert read(tmp_path, NCP, **without, **aliased).model == ncp_config(GOLDEN)
    assert "ffn_hidden_size = 96 and intermediate_size = 100 disagree" in refused(tmp_path, NCP, intermediate_size=100)


@pytest.mark.parametrize("name", [*tables.PINNED, "conceptlm_encoder_layers", "conceptlm_chunk_size",
                                  "conceptlm_shift_feature", "conceptlm_v22_vq_merge_mode", "window_size",
                                  "window_attn_skip_freq", "position_embedding_type", "rotary_base", "vocab_size",
                                  "layernorm_epsilon", "conceptlm_hlm_attention_mode", "num_query_groups",
                                  "weight_key_format"])  # fmt: skip
def test_a_required_field_has_no_default(tmp_path, name):
    assert f"{name} is missing" in refused(tmp_path, NCP, **{name: REMOVED})


def test_the_longest_sequence_has_two_names(tmp_path):
    assert "max_position_embeddings is missing" in refused(tmp_path, NCP, max_sequence_length=REMOVED)
    both = read(tmp_path, NCP, max_sequence_length=8192, max_position_embeddings=65536)
    assert both.positions == 8192  # the training length; the other one is a runtime's limit


WRONG = {
    "num_layers": 9, "num_query_groups": 2, "kv_channels": 17, "hidden_size": 0, "vocab_size": "128",
    "conceptlm_chunk_size": True, "conceptlm_shift_feature": 1, "conceptlm_chunk_merge_method": "first",
    "conceptlm_layer_norm_option": "rawadd", "conceptlm_hlm_ffn_hidden_size": 128,
    "conceptlm_v22_vq_merge_mode": "hard", "conceptlm_v21_dd_self_dd_mode": "cumsum", "qk_layernorm": False,
    "conceptlm_v21_dd_two_route_add_decoder_use_softmax": False, "conceptlm_hlm_attention_mode": "window",
    "window_size": [4096, 4096], "window_attn_skip_freq": [1, 0], "position_embedding_type": "alibi",
    "rotary_interleaved": True, "rotary_percent": 0.5, "rotary_base": -1.0, "layernorm_epsilon": None,
    "qk_norm_mode": "per_layer", "tie_word_embeddings": True, "weight_key_format": "gguf", "eos_token_id": "3",
    "conceptlm_v22_vq_hlm_loss_type": "huber",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_ncp_values_that_have_no_form_here(tmp_path, name):
    assert f"{name} is " in refused(tmp_path, NCP, **{name: WRONG[name]})


@pytest.mark.parametrize("window", [4096, [4096], [-1, 0], [4.0, 0], [True, 0], "4096"])
def test_ncp_windows_that_are_none(tmp_path, window):
    assert "window_size is " in refused(tmp_path, NCP, window_size=window)


def test_all_problems_are_told_at_once(tmp_path):
    text = refused(tmp_path, NCP, vocab_size=REMOVED, num_layers=9, rotary_base=0, sliding_window_size=5)
    for name in ("vocab_size", "num_layers", "rotary_base", "sliding_window_size"):
        assert f"\n  {name} is " in text


UNKNOWN = ("rope_scale", "rotary_dim", "sliding_windows", "yarn_new", "attn_logit_softcapping", "conceptlm_v23_gate")


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("fields", [NCP, OLMO3], ids=["ncp", "olmo3"])
def test_unknown_fields_that_may_matter(tmp_path, fields, name):
    text = refused(tmp_path, fields, **{name: 2})
    assert f"{name} is 2" in text
    assert f"--ignore-field {name}" in text
    assert read(tmp_path, fields, [name], **{name: 2}).model == read(tmp_path, fields).model
    assert read(tmp_path, fields, **{name: None}).model == read(tmp_path, fields).model


def test_bookkeeping_is_passed_over(tmp_path):
    noise = {"use_cache": True, "transformers_version": "5.24.0", "_name_or_path": "x", "attention_dropout": 0.1,
             "conceptlm_v21_final_read_concept_gate_init_final": 0.5, "apply_rope_fusion": True}  # fmt: skip
    assert read(tmp_path, NCP, **noise).model == ncp_config(GOLDEN)


def test_a_misspelt_field_names_its_neighbour(tmp_path):
    text = refused(tmp_path, NCP, window_size=REMOVED, windows_size=[4, 0])
    assert "did you mean window_size?" in text
    assert "window_size is missing" in text


def test_training_fields_reach_the_loss_and_the_first_values(tmp_path):
    model = read(
        tmp_path, NCP, conceptlm_v22_vq_commitment_cost=0.0, conceptlm_v22_vq_hlm_loss_type="ce",
        conceptlm_fusion_norm_alpha_init=0.2, conceptlm_v21_residual_flow_beta_init=0.03,
    ).model  # fmt: skip
    assert (model.loss.commitment, model.loss.concept_objective) == (0.0, "code_ce")
    assert (model.concept.fusion_init, model.routing.crc_init) == (0.2, 0.03)


# ---- side file


def test_concept_fields_may_stand_in_the_side_file(tmp_path):
    here, side = {}, {"_wandb": {"value": {}}, "optimizer": {"value": "muon"}, "bias_dropout_fusion": {"value": True}}
    for name, value in ncp_fields(GOLDEN, "native").items():
        if name.startswith("conceptlm_") or name in ("window_size", "rotary_base", "qk_layernorm"):
            side[name] = {"value": value}
        else:
            here[name] = value
    (tmp_path / "training_config.yaml").write_text(yaml.safe_dump(side))
    assert read(tmp_path, here).model == ncp_config(GOLDEN)
    assert "rotary_base is 10000.0 here and 500000.0 in training" in refused(tmp_path, here, rotary_base=10000.0)
    (tmp_path / "training_config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"training_config.yaml is not valid YAML"):
        read(tmp_path, here)


# ---- rotary settings


def test_yarn_of_olmo3_in_each_spelling(tmp_path):
    expected = Yarn(8.0, 8192)
    nested = {"sliding_attention": PLAIN, "full_attention": YARN | {"rope_theta": 500000.0}}
    spellings = (
        {},
        {"rope_scaling": None, "rope_parameters": YARN},
        {"rope_scaling": REMOVED, "rope_theta": REMOVED, "rope_parameters": YARN | {"rope_theta": 500000}},
        {"rope_scaling": REMOVED, "rope_theta": REMOVED, "rope_parameters": nested},
        {"rope_parameters": nested},
        {"rope_scaling": {**YARN, "type": "yarn", "rope_type": None}},
    )
    for changes in spellings:
        backbone = read(tmp_path, OLMO3, **changes).model.backbone
        assert (backbone.yarn, backbone.rope_theta) == (expected, 500000.0), changes
    assert read(tmp_path, OLMO3, rope_scaling=None).model.backbone.yarn is None
    assert read(tmp_path, OLMO3, rope_scaling=None, rope_parameters=PLAIN).model.backbone.yarn is None


def test_attention_factor_is_honoured(tmp_path):
    """Default 0.1 ln 8 + 1; explicit values win, under either key."""
    stated = YARN | {"attention_factor": 1.0}
    for changes in ({"rope_scaling": stated}, {"rope_scaling": None, "rope_parameters": stated}):
        assert read(tmp_path, OLMO3, **changes).model.backbone.yarn.attention_factor == 1.0
    default = YARN | {"attention_factor": 0.1 * math.log(8) + 1}
    assert read(tmp_path, OLMO3, rope_scaling=default).model.backbone.yarn.attention_factor is None
    weighted = read(tmp_path, OLMO3, rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}).model.backbone.yarn
    assert weighted.attention_factor == pytest.approx((0.1 * math.log(8) + 1) / (0.05 * math.log(8) + 1))


BAD_ROPE = {
    "an unknown key": ({"rope_scaling": YARN | {"low_freq_factor": 1}}, "rope_scaling: low_freq_factor is 1"),
    "another kind": ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling: rope_type is 'llama3'"),
    "no kind": ({"rope_scaling": {"factor": 8.0}}, "rope_scaling: rope_type is missing"),
    "no length": ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
                  "rope_scaling: original_max_position_embeddings is missing"),
    "shrinking": ({"rope_scaling": YARN | {"factor": 0.5}}, "rope_scaling: factor is 0.5"),
    "no object": ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
    "two answers": ({"rope_parameters": YARN | {"factor": 4.0}}, "rope_scaling and rope_parameters is"),
    "yarn and none": ({"rope_parameters": PLAIN}, "rope_scaling and rope_parameters is"),
    "two bases": ({"rope_parameters": YARN | {"rope_theta": 1e4}}, "rope_theta and rope_parameters is"),
    "windowed yarn": ({"rope_parameters": {"sliding_attention": YARN, "full_attention": YARN}},
                      "full-attention layers alone"),
    "another layer type": ({"rope_parameters": {"full_attention": YARN, "chunked_attention": PLAIN}},
                           "rope_parameters.chunked_attention is"),
    "part of the head": ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    "no base": ({"rope_theta": REMOVED}, "rope_theta is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ROPE)
def test_rotary_settings_that_are_refused(tmp_path, case):
    changes, message = BAD_ROPE[case]
    assert message in refused(tmp_path, OLMO3, **changes)


def test_ncp_yarn(tmp_path):
    on = NCP | NCP_YARN | {"position_embedding_type": "yarn"}
    assert read(tmp_path, on).model.backbone.yarn == Yarn(8.0, 8192)
    assert read(tmp_path, NCP | NCP_YARN).model.backbone.yarn is None  # its defaults stand beside plain rope
    weighted = read(tmp_path, on, yarn_mscale=0.5).model.backbone.yarn
    assert weighted.attention_factor == pytest.approx(0.05 * math.log(8) + 1)
    assert read(tmp_path, on, rope_scaling=YARN).model.backbone.yarn == Yarn(8.0, 8192)
    assert "must agree" in refused(tmp_path, on, rope_scaling=YARN | {"factor": 4.0})
    assert "contradicts the YaRN" in refused(tmp_path, NCP, rope_scaling=YARN)
    assert "yarn_full_attn_layers_only is False" in refused(tmp_path, on, yarn_full_attn_layers_only=False)
    assert "yarn_beta_fast is missing" in refused(tmp_path, on, yarn_beta_fast=REMOVED)


# ---- OLMo-3


def test_olmo3_fields_have_their_meaning(tmp_path):
    published = read(tmp_path, OLMO3)
    backbone = Backbone(width=64, heads=4, kv_heads=2, ffn=96, window=4096, full_every=4, yarn=Yarn(8.0, 8192))
    assert published.model == Olmo3Config(vocab=300, layers=5, backbone=backbone)
    assert (published.ids, published.positions) == (SpecialIds(None, (257,), 277), 65536)
    assert read(tmp_path, OLMO3, layer_types=REMOVED).model == published.model


@pytest.mark.parametrize(("pattern", "expected"), [("FFFFF", (None, 4)), ("SFSFS", (4096, 2)), ("SSSSS", (4096, 6))])
def test_olmo3_layer_types(tmp_path, pattern, expected):
    names = {"S": "sliding_attention", "F": "full_attention"}
    backbone = read(tmp_path, OLMO3, layer_types=[names[letter] for letter in pattern]).model.backbone
    assert (backbone.window, backbone.full_every) == expected
    assert [backbone.is_full(layer) for layer in range(5)] == [letter == "F" for letter in pattern]


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention", *["sliding_attention"] * 4]}, {"layer_types": ["full_attention"] * 4},
        {"layer_types": "full"}, {"sliding_window": REMOVED}, {"sliding_window": 0}, {"attention_bias": True},
        {"tie_word_embeddings": True}, {"hidden_act": "gelu"}, {"head_dim": 32}, {"rms_norm_eps": REMOVED},
    ],
    ids=str,
)  # fmt: skip
def test_olmo3_values_that_have_no_form_here(tmp_path, changes):
    assert f"\n  {next(iter(changes))} is " in refused(tmp_path, OLMO3, **changes)


def test_end_tokens_come_from_the_generation_config_too(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [265, 257], "pad_token_id": 277}))
    published = read(tmp_path, OLMO3, eos_token_id=REMOVED, pad_token_id=REMOVED)
    assert published.ids == SpecialIds(None, (265, 257), 277)


# ---- identity


@pytest.mark.parametrize(
    "changes", [{"model_type": "llama"}, {"architectures": ["LlamaForCausalLM"]}, {"architectures": "Olmo3ForCausalLM"}]
)
def test_other_models_are_named(tmp_path, changes):
    assert "known are: ncp_olmo3" in refused(tmp_path, OLMO3, **changes)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_no_config(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config.json"):
        read_config(tmp_path)


# ---- writing


BACKBONE = Backbone(width=64, heads=4, ffn=96, window=9)
WRITABLE = {
    "released": ncp_config(GOLDEN),
    "yarn": dataclasses.replace(
        ncp_config(GOLDEN),
        backbone=dataclasses.replace(ncp_config(GOLDEN).backbone, yarn=Yarn(4.0, 16, 16.0, 2.0, 0.9, False)),
    ),
    "olmo3": Olmo3Config(vocab=300, layers=5, backbone=dataclasses.replace(BACKBONE, kv_heads=2)),
    "olmo3 yarn": Olmo3Config(vocab=300, layers=5, backbone=dataclasses.replace(BACKBONE, yarn=Yarn(4.0, 16, 9, 3, 1))),
    "olmo3 full": Olmo3Config(vocab=300, layers=5, backbone=dataclasses.replace(BACKBONE, window=None)),
}


@pytest.mark.parametrize("name", WRITABLE)
def test_what_is_written_is_read_back(tmp_path, name):
    model, ids = WRITABLE[name], SpecialIds(1, (2, 3), 0)
    for format in ("ncp_olmo3", "native") if model.kind == "ncp" else ("olmo3",):
        published = read(tmp_path, write_config(model, format, ids, 64, "bfloat16"))
        assert published.format == format
        assert (published.ids, published.positions) == (ids, 64)
        if name == "yarn":
            scale = published.model.backbone.yarn.attention_factor
            assert scale == pytest.approx(0.9, rel=1e-12)
            yarn = dataclasses.replace(published.model.backbone.yarn, attention_factor=0.9)
            backbone = dataclasses.replace(published.model.backbone, yarn=yarn)
            published = published._replace(model=dataclasses.replace(published.model, backbone=backbone))
        assert published.model == model


def test_an_unwindowed_ncp_has_every_layer_full(tmp_path):
    golden = ncp_config(GOLDEN)
    model = dataclasses.replace(
        golden, backbone=dataclasses.replace(golden.backbone, window=None),
        concept=dataclasses.replace(golden.concept, window=None),
    )  # fmt: skip
    back = read(tmp_path, write_config(model, "ncp_olmo3", SpecialIds(), 64, "float32")).model
    assert all(back.backbone.is_full(layer) for layer in range(5))
    assert all(back.concept_backbone.is_full(layer) for layer in range(5))


def test_models_that_no_format_holds():
    settings = paper(backbone=BACKBONE, segments=4, codes=8, vocab=128, encoder_layers=2, concept_layers=1,
                     decoder_layers=1)  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        write_config(settings, "ncp_olmo3", SpecialIds(), 64, "float32")
    for name in ("concept.norm", "concept.fusion", "concept.reinject", "routing.irc_decoder", "routing.irc_input"):
        assert f"\n  {name} is " in str(caught.value)
    per_head = Olmo3Config(vocab=300, layers=2, backbone=dataclasses.replace(BACKBONE, qk_norm="per_head"))
    with pytest.raises(ConfigError, match="qk_norm"):
        write_config(per_head, "olmo3", SpecialIds(), 64, "float32")
    unrounded = Olmo3Config(
        vocab=300, layers=2, backbone=dataclasses.replace(BACKBONE, yarn=Yarn(4.0, 16, round_to_int=False))
    )
    with pytest.raises(ConfigError, match="round_to_int"):
        write_config(unrounded, "olmo3", SpecialIds(), 64, "float32")
    with pytest.raises(ConfigError, match="'olmo3' cannot hold a model of kind 'ncp'; use ncp_olmo3 or native"):
        write_config(ncp_config(GOLDEN), "olmo3", SpecialIds(), 64, "float32")


def test_the_command_line_knows_the_formats():
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers(dest="command"))
    for format in FORMATS:
        assert parser.parse_args(["convert", "export", "run", "out", "--format", format]).format == format
