"""Fixtures of the data tests: small stores with known tokens, and a small prepared corpus."""

import json
from pathlib import Path

import numpy as np
import pytest

from ncp_jax.data.prepare import Options, prepare
from ncp_jax.data.store import TokenStore, TokenWriter

WORDS = ["the", "whale", "swam", "past", "an", "old", "ship", "sang", "about", "rope,", "&", "naïve", "—", "1851", "☂"]


@pytest.fixture
def make_store(tmp_path):
    """make_store(lengths, name=..., vocab=..., first=1): at tmp/NAME/train; tokens count up from `first`, EOS is 0."""

    def make(lengths, name="corpus", vocab=60_000, first=1) -> TokenStore:
        path = tmp_path / name / "train"
        writer = TokenWriter(path, vocab=vocab, eos=0, tokenizer="f" * 64, token_bytes=np.ones(vocab, np.int32))
        for number, length in enumerate(lengths):
            writer.append(np.arange(first, first + length), text_bytes=length, origin=f"document {number}")
            first += length
        writer.finish()
        return TokenStore.open(path)

    return make


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory) -> Path:
    """80 documents of 20 to 200 words as JSON lines."""
    random = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("source") / "small.jsonl"
    texts = [" ".join(random.choice(WORDS, random.integers(20, 200))) for _ in range(80)]
    file.write_text("".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(texts)))
    return file


@pytest.fixture(scope="session")
def corpus(corpus_file, tmp_path_factory) -> Path:
    """The prepared form of `corpus_file`, read only by convention."""
    out = tmp_path_factory.mktemp("prepared") / "corpus"
    prepare([str(corpus_file)], Options(out=str(out), train_bpe=300))
    return out
