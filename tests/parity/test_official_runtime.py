"""Exported NCP models against the released runtime's own contract: every config field, every tensor name and shape.

Needs `pip install --no-deps ncp-olmo-eval==0.1.1`; its contract is plain Python and needs none of its dependencies.
"""

import json

import pytest
from golden_files import load, publish

contract = pytest.importorskip("ncp_olmo_eval.vllm_plugin.contract", reason="needs ncp-olmo-eval, see above")
weights = pytest.importorskip("ncp_olmo_eval.vllm_plugin.weights", reason="needs ncp-olmo-eval, see above")

from ncp_jax.convert.pretrained import Export, load_pretrained, save_pretrained  # noqa: E402  below the skip


@pytest.mark.parametrize("golden", ["ncp_raw_full", "ncp_raw_perhead", "ncp_window_edges"])
@pytest.mark.parametrize("format", ["ncp_olmo3", "native"])
def test_the_official_contract_accepts_an_export(tmp_path, golden, format):
    model = load_pretrained(publish(tmp_path / "theirs", load(golden), "ncp_olmo3"))
    save_pretrained(tmp_path / "ours", *model, Export(format, positions=64, shard_bytes=200_000))
    fields = json.loads((tmp_path / "ours" / "config.json").read_text())
    c = model.config
    accepted = contract.ConceptLMBackendConfig.from_mapping(fields)
    assert (accepted.encoder_layers, accepted.hlm_layers) == (c.encoder_layers, c.concept_layers)
    assert (accepted.qk_norm_mode == "per_head") == (c.backbone.qk_norm == "per_head")
    for token_tower in ("layernorm_epsilon", "rotary_base", "rotary_percent", "rotary_interleaved",
                        "position_embedding_type", "window_size", "window_attn_skip_freq"):  # fmt: skip
        assert token_tower in fields  # read without a default
    audit = weights.audit_stage3_weight_shapes(
        weights.read_safetensors_shapes(tmp_path / "ours"), weights.Stage3WeightConfig.from_mapping(fields)
    )
    assert audit.ok, audit
    assert audit.matched_parameter_count == audit.expected_parameter_count


def test_the_contract_sees_a_missing_tensor(tmp_path):
    """So that the test above can fail."""
    model = load_pretrained(publish(tmp_path / "theirs", load("ncp_raw_full"), "ncp_olmo3"))
    save_pretrained(tmp_path / "ours", *model)
    shapes = weights.read_safetensors_shapes(tmp_path / "ours")
    fields = json.loads((tmp_path / "ours" / "config.json").read_text())
    del shapes["model.fusion_norm_alpha"]
    audit = weights.audit_stage3_weight_shapes(shapes, weights.Stage3WeightConfig.from_mapping(fields))
    assert audit.missing_parameters == ("fusion_norm_alpha",)
