"""Fixtures of the trainer's tests: one prepared corpus per session."""

from pathlib import Path

import pytest
from tiny_runs import prepare_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return prepare_corpus(tmp_path_factory.mktemp("tiny"))
