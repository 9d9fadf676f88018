"""config.json of the CALM family both ways: every field has its meaning or its error."""

import dataclasses
import json

import numpy as np
import pytest
from torch_files import write_torch

from ncp_jax.checkpoint.hf_calm_names import FROZEN_ROOT
from ncp_jax.checkpoint.hf_tensor import HFError
from ncp_jax.config import ConfigError
from ncp_jax.convert.calm_config import HEADS
from ncp_jax.convert.formats import SpecialIds, left_out, name_map, read_config, token_fields, write_config
from ncp_jax.models.calm import presets
from ncp_jax.models.calm.config import AutoencoderConfig, CalmConfig, DiffusionHead, EnergyHead, FlowHead
from ncp_jax.models.llama import LlamaConfig
from ncp_jax.nn.llama_block import LlamaBackbone

LLAMA3 = {"vocab_size": 128_257, "bos_token_id": 128_000, "eos_token_id": 128_001, "pad_token_id": 128_256}
BASE = {"initializer_range": 0.02, "pretraining_tp": 1, "tie_word_embeddings": False, "transformers_version": "4.43.0",
        "torch_dtype": "float32", "max_position_embeddings": 2048, "hidden_act": "silu", "mlp_bias": False,
        "rms_norm_eps": 1e-06}  # fmt: skip
# As transformers 4.43 saves the official classes with the settings of the official scripts: no model_type.
AE = LLAMA3 | BASE | {
    "architectures": ["Autoencoder"], "ae_dropout": 0.15, "kl_clamp": 0.5, "kl_weight": 0.001, "patch_size": 4,
    "hidden_size": 512, "intermediate_size": 1280, "num_encoder_layers": 2, "num_decoder_layers": 2, "latent_size": 128,
}  # fmt: skip
CALM = LLAMA3 | BASE | {
    "architectures": ["EnergyTransformer"], "ae_path": "/cluster/autoencoder", "patch_size": 4, "num_mlp_layers": 4,
    "num_samples": 8, "beta": 1.0, "noise_size": 64, "hidden_size": 1024, "intermediate_size": 2752,
    "num_hidden_layers": 16, "latent_size": 128, "num_attention_heads": 16, "num_key_value_heads": 16,
    "use_cache": True, "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False, "attention_dropout": 0.0,
}  # fmt: skip
LLAMA = LLAMA3 | BASE | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048,
    "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 16, "use_cache": True,
    "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False, "attention_dropout": 0.0,
}  # fmt: skip
IDS = SpecialIds(128_000, (128_001,), 128_256)
REMOVED = "<removed>"


def read(folder, fields, ignore=(), model: CalmConfig | None = None, **changes):
    """`model`: whose autoencoder the tensors beside a language model's config have; only their shapes are looked at."""
    values = {name: value for name, value in (fields | changes).items() if value is not REMOVED}
    (folder / "config.json").write_text(json.dumps(values))
    if values.get("architectures") not in (["Autoencoder"], ["LlamaForCausalLM"]):
        shapes = name_map(model or presets.calm("M"), "calm").shapes
        kept = {n: (0, *shape[1:]) for n, shape in shapes.items() if n.startswith(FROZEN_ROOT) and "gate" not in n}
        kept |= {n: shape for n, shape in shapes.items() if n.startswith(FROZEN_ROOT) and "gate" in n}
        write_torch(folder / "pytorch_model.bin", {n: np.zeros(shape, np.float16) for n, shape in kept.items()})
    return read_config(folder, ignore)


def refused(folder, fields, ignore=(), **changes) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, fields, ignore, **changes)
    return str(caught.value)


def official(**changes) -> AutoencoderConfig:
    """The official loss counts pads."""
    return presets.autoencoder(score_pads=True, **changes)


# ---- reading


def test_the_published_autoencoder(tmp_path):
    published = read(tmp_path, AE)
    assert (published.format, published.model, published.ids) == ("calm_autoencoder", official(), IDS)
    assert published.positions == 2048
    assert read(tmp_path, AE, tie_word_embeddings=True).model == official()  # it ties by hand, whatever this says
    saved_as_llama = {"model_type": "llama", "num_attention_heads": 32, "rope_theta": 1e4, "attention_bias": False}
    assert read(tmp_path, AE, **saved_as_llama).model == official()


@pytest.mark.parametrize("head", HEADS)
def test_the_published_language_models(tmp_path, head):
    """A quarter of 16 layers is 4 blocks, which is also the official default."""
    published = read(tmp_path, CALM, architectures=[HEADS[head]])
    expected = presets.calm("M", arm="default" if head == "energy" else head)
    assert published.model == dataclasses.replace(expected, autoencoder=official())
    assert (published.format, published.ids, published.positions) == ("calm", IDS, 8192)  # 2048 chunks of 4 tokens


def test_the_published_baseline(tmp_path):
    published = read(tmp_path, LLAMA)
    assert (published.format, published.model) == ("llama", presets.transformer("S"))
    assert read(tmp_path, LLAMA, num_key_value_heads=4).model.backbone.kv_heads == 4


def test_defaults_are_those_of_the_classes(tmp_path):
    ids = {"architectures": AE["architectures"]}
    plain = AutoencoderConfig(32_000, pad=None, score_pads=True)
    assert read(tmp_path, ids).model == plain
    backbone = LlamaBackbone(768, 12, 2048)
    model = read(tmp_path, {"architectures": CALM["architectures"]}).model
    assert model == CalmConfig(12, backbone, plain, head=EnergyHead())
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    text = refused(tmp_path, {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    for name in (*needed, "max_position_embeddings"):
        assert f"{name} is missing" in text


def test_settings_reach_the_model(tmp_path):
    changes = {"num_mlp_layers": 2, "num_samples": 12, "beta": 1.25, "noise_size": 32, "num_key_value_heads": 4,
               "rope_theta": 5e5, "rms_norm_eps": 1e-5, "pad_token_id": None}  # fmt: skip
    model = read(tmp_path, CALM, **changes).model
    assert model.head == EnergyHead(2, 32, 12, beta=1.25)
    assert model.backbone == LlamaBackbone(1024, 16, 2752, 4, 5e5, 1e-5)
    assert model.autoencoder == official(pad=None)
    assert read(tmp_path, CALM, architectures=["FlowTransformer"], num_samples=3).model.head == FlowHead(4, 3)
    model = read(tmp_path, AE, ae_dropout=0.0, kl_clamp=0, kl_weight=0.1, num_encoder_layers=4, rms_norm_eps=1e-5).model
    assert model == official(
        token_dropout=0.0, latent_dropout=0.0, kl_floor=0.0, kl_weight=0.1, encoder_layers=4, eps=1e-5
    )


def test_the_autoencoder_of_a_language_model_is_measured(tmp_path):
    """Its width, feed-forward width and layers are nowhere in config.json."""
    autoencoder = official(width=24, ffn=40, encoder_layers=4, decoder_layers=6)
    assert read(tmp_path, CALM, model=dataclasses.replace(presets.calm("M"), autoencoder=autoencoder)).model == (
        dataclasses.replace(presets.calm("M"), autoencoder=autoencoder)
    )
    write_torch(tmp_path / "pytorch_model.bin", {"transformer.norm.weight": np.zeros(1024, np.float32)})
    with pytest.raises(HFError, match=r"without its autoencoder \(ae_model\.\*\)"):
        read_config(tmp_path)


def test_identity(tmp_path):
    flow = FlowHead()
    assert read(tmp_path, CALM, architectures=["FlowTransformer"], model_type="flow").model.head == flow
    assert read(tmp_path, CALM, architectures=["FlowTransformer"], model_type="").model.head == flow
    assert read(tmp_path, CALM, architectures=REMOVED, model_type="diffusion").model.head == DiffusionHead()
    text = refused(tmp_path, CALM, architectures=["FlowTransformer"], model_type="energy")
    assert "model_type is 'energy'; it must be 'flow'" in text
    for changes in ({"architectures": REMOVED}, {"architectures": ["Autoencoder", "FlowTransformer"]}):
        assert "EnergyTransformer, FlowTransformer" in refused(tmp_path, CALM, **changes)
    assert "known are" in refused(tmp_path, LLAMA, model_type=REMOVED)


WRONG = {
    "calm_autoencoder": (AE, {
        "hidden_act": "gelu", "mlp_bias": True, "patch_size": 0, "latent_size": "128", "ae_dropout": True,
        "kl_clamp": "0.5", "rms_norm_eps": 0, "vocab_size": -1, "pad_token_id": "x", "latent_scale": 2.0,
    }),
    "calm": (CALM, {
        "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "rope_theta": 0, "num_samples": 1, "beta": 0,
        "noise_size": 0, "num_mlp_layers": 1.5, "head_dim": 32, "model_type": "gan", "noise_kind": "normal",
        "patch_overlap": 1, "rope_scaling": {"type": "linear", "factor": 2.0},
    }),
    "llama": (LLAMA, {
        "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "hidden_act": "relu", "head_dim": 32,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "sliding_window": 128, "num_hidden_layers": 0,
    }),
}  # fmt: skip


@pytest.mark.parametrize(("format", "name"), [(format, name) for format in WRONG for name in WRONG[format][1]])
def test_values_that_have_no_form_here(tmp_path, format, name):
    fields, wrong = WRONG[format]
    text = refused(tmp_path, fields, **{name: wrong[name]})
    assert name in text
    assert str(tmp_path / "config.json") in text


def test_values_that_the_model_itself_refuses(tmp_path):
    assert "model.encoder_layers is 3" in refused(tmp_path, AE, num_encoder_layers=3)
    assert "model.token_dropout is 1.5" in refused(tmp_path, AE, ae_dropout=1.5)
    assert "model.pad 128257 is no id" in refused(tmp_path, AE, pad_token_id=128_257)
    assert "model.head.beta" in refused(tmp_path, CALM, beta=2.5)
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048}
    assert "LLaMA has no YaRN here" in refused(tmp_path, LLAMA, rope_scaling=yarn)


def test_unknown_fields_are_refused_unless_they_are_ignored(tmp_path):
    assert "did you mean latent_size?" in refused(tmp_path, AE, latent_sizes=64)
    assert read(tmp_path, AE, ["latent_sizes"], latent_sizes=64).model == official()
    assert read(tmp_path, CALM, ["rope_extra"], rope_extra=1).format == "calm"


# ---- writing

WRITABLE = {
    **{f"autoencoder K={chunk}": official(chunk=chunk) for chunk in presets.CHUNKS},
    "autoencoder": official(width=24, ffn=40, encoder_layers=4, eps=1e-5, token_dropout=0.1, latent_dropout=0.1,
                            kl_weight=0.0, kl_floor=0.0, pad=None),
    **{f"calm {size}": presets.calm(size, score_pads=True) for size in presets.SIZES},
    **{f"calm {arm}": presets.calm("M", arm=arm, score_pads=True) for arm in ("flow", "diffusion", "samples_12",
                                                                          "beta_1.75", "latent_256")},
    "calm grouped": CalmConfig(2, LlamaBackbone(32, 4, 48, 2, 5e4, 1e-5), official(), head=EnergyHead(2, 6, 3)),
    **{f"transformer {size}": presets.transformer(size) for size in ("S", "M", "L")},
    "grouped": LlamaConfig(300, 2, LlamaBackbone(32, 4, 48, 2, 5e5, 1e-5)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITABLE)
def test_what_is_written_is_read_back(tmp_path, name):
    model, ids = WRITABLE[name], SpecialIds(1, (2, 3), 0)
    values = write_config(model, model.kind, ids, 64, "bfloat16")
    published = read(tmp_path, values, model=model if model.kind == "calm" else None)
    if model.kind == "calm":  # how it was trained is not in a language model's file
        theirs = published.model.autoencoder
        trained = {n: getattr(model.autoencoder, n) for n in ("token_dropout", "latent_dropout")}
        published = published._replace(
            model=dataclasses.replace(published.model, autoencoder=dataclasses.replace(theirs, **trained))
        )
    assert (published.model, published.format, published.positions) == (model, model.kind, 64)
    pad = {"llama": 0}.get(model.kind, getattr(getattr(model, "autoencoder", model), "pad", None))
    assert published.ids == SpecialIds(1, (2, 3), pad)  # padding belongs to the model
    assert left_out(model) == ()


def test_every_field_of_the_classes_is_written():
    """What transformers 4.43 saves, less its version; and what tells a class its head."""
    for fields, model, more in (
        (AE, official(), set()),
        (CALM, presets.calm("M"), {"model_type", "head_dim", "rope_parameters"}),
        (LLAMA, presets.transformer("S"), {"head_dim", "rope_parameters"}),
    ):
        written = write_config(model, model.kind, IDS, 8192 if model.kind == "calm" else 2048, "float32")
        assert written.keys() == fields.keys() - {"transformers_version"} | more
        same = fields.keys() & written.keys() - {"ae_path"}
        assert {name: written[name] for name in same} == {name: fields[name] for name in same}
        assert token_fields(IDS).items() <= written.items()


def changed(model, **changes):
    for name, value in changes.items():
        outer, _, inner = name.partition("__")
        value = dataclasses.replace(getattr(model, outer), **{inner: value}) if inner else value
        model = dataclasses.replace(model, **{outer: value})
    return model


NOT_HELD = {
    "input": (presets.calm("M", arm="input_both"), "input: 'both' -> 'discrete'"),
    "posterior of a frozen autoencoder": (presets.calm("M", posterior="mean"), "autoencoder.posterior: 'mean' -> 'sam"),
    "eps of a frozen autoencoder": (presets.calm("M", eps=1e-5), "autoencoder.eps: 1e-05 -> 1e-06"),
    "solver": (changed(presets.calm("M", arm="flow"), head__solver="euler"), "head.solver: 'euler' -> 'midpoint'"),
    "steps of the flow": (changed(presets.calm("M", arm="flow"), head__steps=50), "head.steps: 50 -> 10"),
    "steps": (changed(presets.calm("M", arm="diffusion"), head__steps=50), "head.steps: 50 -> 100"),
    "posterior": (official(posterior="mean"), "posterior: 'mean' -> 'sampled'"),
    "two dropouts": (official(latent_dropout=0.0), "latent_dropout: 0.0 -> 0.15"),
}


@pytest.mark.parametrize("name", NOT_HELD)
def test_models_that_the_layout_cannot_hold(name):
    model, line = NOT_HELD[name]
    with pytest.raises(ConfigError, match="cannot hold this model") as caught:
        write_config(model, model.kind, IDS, 64, "float32")
    assert f"\n  {line}" in str(caught.value)


def test_settings_of_training_alone_do_not_stop_an_export(tmp_path):
    draws = changed(presets.calm("M", arm="draws_16"), scan=False, backbone__remat="block", autoencoder_run="runs/ae")
    assert write_config(draws, "calm", IDS, 64, "float32") == write_config(
        presets.calm("M"), "calm", IDS, 64, "float32"
    )
    assert left_out(draws) == ("head.draws: 16 -> 100",)
    ours = AutoencoderConfig(4098, pad=4096, mask=4097, head_chunk=64)
    write_config(ours, "calm_autoencoder", SpecialIds(), 64, "float32")
    assert left_out(ours) == ("mask: 4097 -> 0", "score_pads: False -> True")
    assert left_out(dataclasses.replace(presets.transformer("S"), z_loss=1e-4)) == ()


def test_formats_of_other_families_are_refused():
    for model, format in ((official(), "calm"), (presets.transformer("S"), "olmo3"), (presets.calm("M"), "llama")):
        with pytest.raises(ConfigError, match=f"'{format}' cannot hold a model of kind '{model.kind}'; use"):
            write_config(model, format, IDS, 64, "float32")
