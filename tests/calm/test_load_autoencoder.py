"""The frozen autoencoder comes from its own run, or the language model does not start."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from test_calm_tasks import AE, CONFIGS, started

from ncp_jax.checkpoint.store import CheckpointStore
from ncp_jax.config import ConfigError, to_dict
from ncp_jax.train.calm_families import AutoencoderRun


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory of an autoencoder."""
    folder = tmp_path_factory.mktemp("autoencoder")
    (folder / "config.json").write_text(json.dumps({"config": {"model": to_dict(AE)}}))
    (folder / "tokenizer.json").write_text("{}")
    with CheckpointStore(f"{folder}/checkpoints", keep=1, asynchronous=False, best=False) as store:
        store.save(3, {"train": {"params": started("autoencoder")[0]}}, {})
    return folder


@pytest.fixture
def ours(tmp_path):
    return tmp_path


def language_model(run=None, **changes):
    autoencoder = dataclasses.replace(AE, **changes)
    return dataclasses.replace(CONFIGS["calm_energy"], autoencoder=autoencoder, autoencoder_run=run and str(run))


def test_values_come_from_the_run(run, ours):
    like = jax.eval_shape(lambda: started("calm_energy")[1])
    # dropout is a matter of its training alone
    found = AutoencoderRun(language_model(run, latent_dropout=0.5)).load(like, ours)
    jax.tree.map(np.testing.assert_array_equal, found, started("autoencoder")[0])


def test_absent_runs(ours, tmp_path):
    with pytest.raises(ConfigError, match=r"autoencoder_run is missing: .* train one"):
        AutoencoderRun(language_model()).load(None, ours)
    with pytest.raises(ConfigError, match=r"has no config\.json; .* Train an autoencoder first"):
        AutoencoderRun(language_model(tmp_path / "nowhere")).load(None, ours)


def test_another_chunk_size_is_named(run, ours):
    with pytest.raises(
        ConfigError, match=r"model\.autoencoder\.chunk: 4 -> 2; model\.autoencoder\.latent: 8 -> 6; copy"
    ):
        AutoencoderRun(language_model(run, chunk=4, latent=8)).load(None, ours)


def test_another_tokenizer(run, ours):
    (ours / "tokenizer.json").write_text('{"other": 1}')
    with pytest.raises(ConfigError, match="trained with another tokenizer"):
        AutoencoderRun(language_model(run)).load(None, ours)
