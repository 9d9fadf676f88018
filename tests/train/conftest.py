"""Fixtures of the trainer's tests: one prepared corpus, and compiled programs shared by all runs of a session."""

import os
from pathlib import Path

import jax
import pytest
from tiny_runs import prepare_corpus, run_config

from ncp_jax.train.loop import train


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return prepare_corpus(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session", autouse=True)
def compiled(tmp_path_factory):
    """Runs of one shape, also in processes started by tests, compile once."""
    settings = {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
                "jax_persistent_cache_min_compile_time_secs": 0.2}  # fmt: skip
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    yield
    for name in settings:
        del os.environ[name.upper()]
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="session")
def ncp_run(corpus, tmp_path_factory) -> Path:
    """A finished NCP run with two evaluations and two diagnostic steps."""
    workdir = tmp_path_factory.mktemp("ncp_run")
    changes = ("optim.optimizer=adamw", "train.diagnose_every=10", "train.batch=16", "train.micro_batches=2")
    train(run_config(corpus, workdir, "ncp", *changes), devices=jax.devices()[:2])
    return workdir
