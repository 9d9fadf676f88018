"""The configs we ship, and how any config is read, changed, compared and named."""

import dataclasses
from pathlib import Path

import jax
import pytest

from ncp_jax.config import ConfigError, differences, from_dict, identity, load, override, to_dict
from ncp_jax.models import flops
from ncp_jax.models.calm import presets
from ncp_jax.models.ncp.config import Concept, NCPConfig
from ncp_jax.nn.backbone import Backbone
from ncp_jax.parallel.rules import unboxed
from ncp_jax.train.families import build_task
from ncp_jax.train.run_config import RunConfig
from ncp_jax.train.step import abstract_params

CONFIGS = sorted(path.stem for path in (Path(__file__).parent.parent / "configs").glob("[!_]*.py"))
# Exact sizes; a label such as 190m names the non-embedding count.
PARAMETERS = {
    "ncp_nano": (2_097_466, 1_048_890),
    "ncp_nano_energy": (2_097_466, 1_048_890),
    "olmo3_nano": (1_902_720, 854_144),
    "olmo3_nano_wide": (2_054_784, 1_006_208),
    "ncp_190m": (343_740_713, 189_713_705),
    "ncp_1b": (1_427_820_073, 1_017_081_385),
    "speed": (343_740_713, 189_713_705),
    "ncp_archpreview_9b": (8_938_363_793, 8_116_886_417),
    "ncp_archpreview_9b_stage2": (8_938_363_793, 8_116_886_417),
    "ncp_paper_9b": (8_938_142_576, 8_116_665_200),
    "olmo3_7b": (7_298_011_136, 6_476_533_760),
    # CALM's own, without the autoencoder's; a name with a colon is a variant
    "calm_autoencoder_nano": (1_198_080, None),
    "calm_nano": (1_750_016, None),
    "calm_nano:flow": (1_790_592, None),
    "calm_nano:diffusion": (1_807_104, None),
    "calm_baseline_nano": (1_852_544, None),
    "calm_autoencoder": (75_832_064, None),
    "calm_autoencoder:k8": (78_128_128, None),
    "calm_m": (371_732_608, None),
    "calm_l": (735_332_480, None),
    "calm_xl": (1_829_795_968, None),
    "calm_transformer": (281_956_608, None),
    "calm_transformer:m": (465_079_296, None),
    "calm_transformer:l": (849_400_320, None),
    "calm_ablation": (201_324_416, None),
}
# The name of a config that has variants says which one it is where no variant is given.
DEFAULT_NAMES = {
    "calm_autoencoder": "calm_autoencoder_k4", "calm_transformer": "calm_transformer_s",
    "calm_ablation": "calm_ablation_default", "speed": "speed_190m_routes",
}  # fmt: skip


def nano() -> RunConfig:
    return load("configs/ncp_nano.py")


def test_every_config_has_a_size_here():
    assert set(CONFIGS) == {name for name in PARAMETERS if ":" not in name}


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_config_loads_round_trips_and_has_its_size(name):
    file, _, variant = name.partition(":")
    config = load(f"configs/{file}.py:{variant}")
    assert from_dict(RunConfig, to_dict(config)) == config
    assert config.name == DEFAULT_NAMES.get(name, name.replace(":", "_"))
    task = build_task(config.model, config.data.sequence)
    counts = [leaf.size for leaf in jax.tree.leaves(unboxed(abstract_params(task)[0]))]
    total, non_embedding = PARAMETERS[name]
    assert sum(counts) == sum(task.parameters.values()) == total
    if non_embedding is not None:
        assert flops.non_embedding_parameters(config.model) == non_embedding


def test_every_ablation_finds_its_autoencoder():
    """Each arm differs from the default in one place, and names a run that `configs/calm_autoencoder.py` makes."""
    for arm in (*presets.ARMS, "k1", "k2", "k8"):
        config = load(f"configs/calm_ablation.py:{arm}")
        assert config.name == f"calm_ablation_{arm}"
        variant = config.model.autoencoder_run.removeprefix("runs/calm_autoencoder_")
        theirs = load(f"configs/calm_autoencoder.py:{variant}")
        assert theirs.directory == config.model.autoencoder_run
        changes = differences(to_dict(config.model.autoencoder), to_dict(theirs.model))
        assert {change.partition(":")[0] for change in changes} <= {"score_pads", "head_chunk"}, arm


def test_variants_that_do_not_exist():
    for name, complaint in [
        ("calm_nano.py:gan", "no variant 'gan'; known: energy, flow, diffusion, k1"),
        ("calm_m.py:k3", "no variant 'k3'"),
        ("calm_ablation.py:beta_9", "CALM has no arm 'beta_9'"),
        ("ncp_nano.py:big", "has no variants; give its path without ':big'"),
    ]:
        with pytest.raises(ConfigError, match=complaint):
            load(f"configs/{name}")


def test_the_vq_interface_of_the_9b():
    params = unboxed(abstract_params(build_task(load("configs/ncp_archpreview_9b.py").model, 8192))[0])["concept"]
    assert sum(leaf.size for leaf in jax.tree.leaves([params["heads"], params["codebook"]])) == 17_305_600


def test_the_report_recipe():
    run = load("configs/ncp_archpreview_9b.py")
    assert run.tokens_per_step == 4_194_304
    assert run.total_steps == 1_366_138
    assert run.optim.schedule.horizon == 1_430_512
    second = load("configs/ncp_archpreview_9b_stage2.py")
    assert second.init_from is not None
    assert second.init_from.run == run.directory
    assert second.optim.schedule.horizon is None


def test_nano_arms_are_aligned():
    """olmo3_nano has ncp_nano's FLOPs to 2 %, olmo3_nano_wide its parameters to 5 %."""
    ncp, equal, wide = (load(f"configs/{name}.py") for name in ("ncp_nano", "olmo3_nano", "olmo3_nano_wide"))
    cost = [flops.training_flops_per_token(run.model, 128, head=False, routes=False) for run in (ncp, equal)]
    assert cost[1] / cost[0] == pytest.approx(1, abs=0.02)
    assert PARAMETERS["olmo3_nano_wide"][1] / PARAMETERS["ncp_nano"][1] == pytest.approx(1, abs=0.05)
    for field in ("data", "optim", "train", "evaluation"):
        assert getattr(ncp, field) == getattr(equal, field) == getattr(wide, field)


@pytest.mark.parametrize(
    ("pair", "field", "value"),
    [
        ("train.steps=7", "train.steps", 7),
        ("optim.muon_learning_rate=1e-3", "optim.muon_learning_rate", 1e-3),
        ("optim.clip=null", "optim.clip", None),
        ("model.concept.mix=softmax", "model.concept.mix", "softmax"),
        ("data.mixture=[{path: a, weight: 2}, {path: b}]", "data.mixture", 2),
        ("init_from.run=runs/x", "init_from.run", "runs/x"),
    ],
)
def test_overrides(pair, field, value):
    found = override(nano(), [pair])
    for name in field.split("."):
        found = getattr(found, name)
    assert (len(found) if isinstance(found, tuple) else found) == value


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("train.stesp=7", "did you mean 'train.steps'"),
        ("trian.steps=7", "did you mean 'train'"),
        ("train.steps", "has no '='"),
        ("train.steps=soon", "train.steps"),
        ("train.steps=1.5", "train.steps"),
        ("model.concept.mix=hardest", "model.concept.mix"),
        ("model.layers=4", "unknown config field 'model.layers'"),
        ("data.sequence=130", "nearest legal data.sequence: 128 or 132"),
        ("model.backbone.heads=5", "nearest legal width: 125 or 130"),
        ("model.concept.segments=7", "nearest legal segments: 4 or 8"),
        ("train.tokens=1000", "exactly one of train.steps"),
        ("train.micro_batches=3", "nearest legal train.batch: 6 or 9"),
        ("init_from.nur=x", "init_from"),
    ],
)
def test_bad_fields_name_the_field_and_the_remedy(pair, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        override(nano(), [pair])


def test_an_unknown_config_file_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'ncp_nano'"):
        load("ncp_nanno")


def test_identity_is_the_science():
    run = nano()
    same = [["workdir=/somewhere/else"], ["mesh.tensor=2"]]
    other = [["train.seed=1"], ["optim.clip=2.0"], ["model.concept.codes=16"], ["data.sequence=64"], ["train.steps=9"]]
    assert {identity(override(run, pairs)) for pairs in same} == {identity(run)}
    assert len({identity(override(run, pairs)) for pairs in other} | {identity(run)}) == len(other) + 1


def test_differences_name_each_changed_field():
    ours, theirs = to_dict(nano()), to_dict(override(nano(), ["train.seed=3", "optim.clip=null"]))
    assert differences(ours, theirs) == ["optim.clip: 1.0 -> None", "train.seed: 0 -> 3"]


def test_presets_differ_where_they_should():
    backbone = Backbone(width=32, heads=2, ffn=32)
    with pytest.raises(ConfigError, match="at least 1"):
        NCPConfig(vocab=8, encoder_layers=2, concept_layers=0, decoder_layers=1, backbone=backbone)
    with pytest.raises(ConfigError, match="encoder_layers >= 2"):
        NCPConfig(
            vocab=8,
            encoder_layers=1,
            concept_layers=1,
            decoder_layers=1,
            backbone=backbone,
            concept=Concept(segments=4),
        )
    with pytest.raises(dataclasses.FrozenInstanceError):
        nano().name = "x"  # type: ignore[misc]
