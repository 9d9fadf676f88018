"""Fixtures of the trainer's tests: one prepared corpus, and compiled programs shared by all runs of a session."""

import os
from pathlib import Path

import jax
import pytest
from killed_runs import Runs, straight_and_killed
from tiny_runs import prepare_corpus


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
def ncp_runs(corpus, tmp_path_factory) -> Runs:
    return straight_and_killed("ncp", corpus, tmp_path_factory.mktemp("ncp"))


@pytest.fixture(scope="session")
def olmo3_runs(corpus, tmp_path_factory) -> Runs:
    return straight_and_killed("olmo3", corpus, tmp_path_factory.mktemp("olmo3"))


@pytest.fixture(scope="session")
def ncp_run(ncp_runs) -> Path:
    """A finished NCP run with two evaluations, whose last step is a diagnostic one."""
    return ncp_runs.straight
