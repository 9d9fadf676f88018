"""Tokenizer: bytes per id, special tokens in text, the end-of-text token, deterministic training."""

import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, pre_tokenizers

from ncp_jax.data.store import DataError
from ncp_jax.data.tokenizer import EOS, Tokenizer, TokenizerError, save, train_bpe

TEXTS = [
    "Call me Ishmael. Some years ago—never mind",
    "don't  stop\r\n\r\n 12345 naïve ☂ 日本語\t\x00",
    "  \n x",
    EOS + " in text",
]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe([*TEXTS, "the ship the whale the sea " * 20], 300)


@pytest.mark.parametrize("text", [*TEXTS, "never seen: ħ€𝄞 \u2028 end"])
def test_bytes_of_ids_sum_to_bytes_of_text(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert bpe.token_bytes()[ids].sum() == len(text.encode())


def test_special_token_in_text_does_not_end_the_document(bpe):
    assert bpe.eos not in bpe.encode(f"a{EOS}b")
    assert bpe.encode_batch([f"a{EOS}b"]) == [bpe.encode(f"a{EOS}b")]


def test_size_counts_added_tokens(bpe):
    hf = HFTokenizer.from_buffer(bpe.content)
    hf.add_tokens(["|||PHONE|||"])
    hf.add_special_tokens(["<|pad|>"])
    tokenizer = Tokenizer(hf.to_str().encode())
    phone, pad = tokenizer.size - 2, tokenizer.size - 1
    assert tokenizer.size == bpe.size + 2
    assert phone in tokenizer.encode("call |||PHONE||| now")
    assert tokenizer.token_bytes()[[phone, pad, tokenizer.eos]].tolist() == [11, 0, 0]


def test_sentencepiece_pieces_count_a_space_and_byte_fallback():
    hf = HFTokenizer(models.BPE({"</s>": 0, "▁a": 1, "<0xE2>": 2, "é": 3}, []))
    hf.add_special_tokens(["</s>"])
    assert Tokenizer(hf.to_str().encode()).token_bytes().tolist() == [0, 2, 1, 2]


def test_end_of_text_by_name_or_error():
    hf = HFTokenizer(models.WordLevel({"stop": 0, "a": 1}, unk_token="a"))
    hf.pre_tokenizer = pre_tokenizers.Whitespace()
    content = hf.to_str().encode()
    assert Tokenizer(content, eos="stop").eos == 0
    with pytest.raises(TokenizerError, match=r"none of the end-of-text tokens.*--eos"):
        Tokenizer(content)
    with pytest.raises(TokenizerError, match="no token 'halt'"):
        Tokenizer(content, eos="halt")


def test_unreadable_tokenizers(tmp_path):
    with pytest.raises(TokenizerError, match="no tokenizer at"):
        Tokenizer.load(tmp_path / "absent.json")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"vocab": 3}))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a Hugging Face"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_save_and_load_keep_the_hash(bpe, tmp_path):
    save(bpe, tmp_path / "deep" / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "deep" / "tokenizer.json").hash == bpe.hash
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["tokenizer.json"]
    with pytest.raises(DataError, match="cannot write"):
        save(bpe, tmp_path / "deep" / "tokenizer.json" / "below")


def test_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(TokenizerError, match="256 bytes"):
        train_bpe(TEXTS, 256)


def test_training_gives_the_same_file_in_another_process(corpus_file):
    script = (
        "import json, sys; from ncp_jax.data.tokenizer import train_bpe\n"
        "print(train_bpe([json.loads(line)['text'] for line in open(sys.argv[1])], 400).hash)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", script, str(corpus_file)], capture_output=True, text=True, check=True,
            env={"PYTHONPATH": ":".join(sys.path), "RAYON_NUM_THREADS": threads},
        ).stdout
        for threads in ("1", "3")
    ]  # fmt: skip
    assert runs[0] == runs[1] != ""
