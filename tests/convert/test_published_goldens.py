"""Golden outputs through the importer: from published folders, in both name formats, to logits."""

import functools

import jax
import numpy as np
import pytest
from golden_files import config_fields, load, native_tensors, ncp_config, publish, tensors, write_shards

from ncp_jax.convert.pretrained import load_pretrained
from ncp_jax.models.ncp.model import NCP
from ncp_jax.models.olmo3 import Olmo3

TOLERANCE = 5e-4
# A prefix of a row has the logits of the whole row there: no golden is shorter than 30 tokens in per_head mode.
CASES = [
    ("ncp_raw_full", "T32", 32), ("ncp_raw_full", "T30", 30), ("ncp_softmax_full", "T32", 32),
    ("ncp_raw_perhead", "T32", 32), ("ncp_raw_perhead", "T30", 30), ("ncp_raw_perhead", "T32", 3),
    ("ncp_raw_perhead", "T32", 4), ("ncp_raw_perhead", "T32", 7), ("ncp_window_edges", "T50", 50),
    ("ncp_window_edges", "T3", 3), ("ncp_window_edges", "T4", 4), ("ncp_window_edges", "T7", 7),
]  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Golden, format -> the loaded checkpoint."""

    @functools.cache
    def loaded(name, format):
        golden, folder = load(name), tmp_path_factory.mktemp(f"{name}_{format}")
        publish(folder, golden, format)
        if format == "native":
            for file in folder.glob("*.safetensors"):
                file.unlink()
            write_shards(folder, native_tensors(tensors(golden), config_fields(golden)["heads"]))
        return load_pretrained(folder)

    return loaded


@functools.cache
def forward(config):
    model = NCP(config)
    return jax.jit(lambda params, ids: model.apply({"params": params}, ids, method="logits"))


@pytest.mark.parametrize("format", ["ncp_olmo3", "native"])
@pytest.mark.parametrize(("name", "key", "length"), CASES)
def test_ncp_logits(published, name, key, length, format):
    golden = load(name)
    config, params = published(name, format)
    assert config == ncp_config(config_fields(golden))
    ours = forward(config)(params, golden[f"{key}/ids"][:, :length])
    np.testing.assert_allclose(ours, golden[f"{key}/logits"][:, :length], atol=TOLERANCE, rtol=0)


def test_the_published_native_names(tmp_path):
    """The golden whose tensors came with native names; their fusing is what the other cases use."""
    golden, released = load("ncp_native_names"), load("ncp_raw_full")
    fused = native_tensors(tensors(released), config_fields(released)["heads"])
    theirs = tensors(golden)
    assert fused.keys() == theirs.keys()
    assert all(np.array_equal(fused[name], theirs[name]) for name in theirs)
    config, params = load_pretrained(publish(tmp_path, golden, "native"))
    ours = forward(config)(params, golden["T32/ids"])
    np.testing.assert_allclose(ours, golden["T32/logits"], atol=TOLERANCE, rtol=0)


def test_olmo3_logits(tmp_path):
    golden = load("olmo3_tiny")
    config, params = load_pretrained(publish(tmp_path, golden, "olmo3"))
    assert config.backbone.window == config_fields(golden)["sliding_window"]  # the query's own key included
    model = Olmo3(config)
    ours = jax.jit(lambda params, ids: model.apply({"params": params}, ids, method="logits"))(params, golden["ids"])
    np.testing.assert_allclose(ours, golden["logits"], atol=TOLERANCE, rtol=0)
