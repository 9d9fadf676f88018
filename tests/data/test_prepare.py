"""Corpus builder: split by document, nothing done twice, nothing half done, and the command on top of it."""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, pre_tokenizers

from ncp_jax.cli import data as command
from ncp_jax.data import prepare as builder
from ncp_jax.data.documents import InputError
from ncp_jax.data.prepare import Options, prepare
from ncp_jax.data.store import DataError, TokenStore, check_ids
from ncp_jax.data.tokenizer import Tokenizer, train_bpe


def texts_of(corpus, split) -> list[str]:
    store, tokenizer = TokenStore.open(corpus / split), Tokenizer.load(corpus / "tokenizer.json")
    pairs = zip(store.offsets, store.offsets[1:], strict=False)
    return [tokenizer.decode(store.read(start, stop - 1)) for start, stop in pairs]


def source_texts(file) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


def sha1(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def state(folder) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_documents_go_where_their_hash_says(corpus, corpus_file):
    held_out = [text for text in source_texts(corpus_file) if int(sha1(text), 16) % 10_000 < 1000]
    assert 0 < len(held_out) < 40
    assert texts_of(corpus, "val") == held_out
    assert texts_of(corpus, "train") == [text for text in source_texts(corpus_file) if text not in held_out]


def test_manifest_counts(corpus, corpus_file):
    for split in ("train", "val"):
        store, texts = TokenStore.open(corpus / split), texts_of(corpus, split)
        manifest, tokens = store.manifest, store.read(0, store.manifest.tokens)
        assert (manifest.documents, manifest.text_bytes) == (len(texts), sum(len(text.encode()) for text in texts))
        assert store.token_bytes[tokens].sum() == manifest.text_bytes
        assert (tokens[store.offsets[1:] - 1] == manifest.eos).all()
        assert (tokens == manifest.eos).sum() == manifest.documents
        assert manifest.sources["small.jsonl"]["bytes"] == corpus_file.stat().st_size
        check_ids(store, 300)
        store.verify()


def test_bpe_sees_training_documents_only(corpus):
    assert train_bpe(texts_of(corpus, "train"), 300).content == (corpus / "tokenizer.json").read_bytes()


def test_split_file_is_honoured(corpus_file, tmp_path):
    texts = source_texts(corpus_file)
    (tmp_path / "split.json").write_text(json.dumps({"held_out": [{"sha1": sha1(texts[7])}, sha1(texts[3])]}))
    options = Options(out=str(tmp_path / "out"), train_bpe=300, split_file=str(tmp_path / "split.json"))
    prepare([str(corpus_file)], options)
    assert texts_of(tmp_path / "out", "val") == [texts[3], texts[7]]
    assert len(texts_of(tmp_path / "out", "train")) == 78
    (tmp_path / "split.json").write_text(json.dumps({"held_out": ["0" * 40, sha1(texts[3])]}))
    with pytest.raises(InputError, match=r"split\.json holds out 1 documents .* sha1 0000000"):
        prepare([str(corpus_file)], Options(**{**vars(options), "out": str(tmp_path / "other")}))
    (tmp_path / "split.json").write_text("{}")
    with pytest.raises(InputError, match="is no split file"):
        prepare([str(corpus_file)], Options(**{**vars(options), "out": str(tmp_path / "other")}))


def test_again_is_a_no_op_and_different_is_an_error(corpus_file, tmp_path, monkeypatch):
    out = tmp_path / "out"
    source = tmp_path / "small.jsonl"
    source.write_bytes(corpus_file.read_bytes())
    assert not prepare([str(source)], Options(out=str(out), train_bpe=300)).reused
    before = state(out)
    with monkeypatch.context() as patch:
        patch.setattr(builder, "_build", lambda *_: pytest.fail("built again"))
        again = prepare([str(source)], Options(out=str(out), train_bpe=300))
    assert again.reused
    assert again.manifests["train"] == TokenStore.open(out / "train").manifest
    with pytest.raises(DataError, match=r"tokenizer\.train_bpe: 300 -> 320\nchoose another --out, or --overwrite"):
        prepare([str(source)], Options(out=str(out), train_bpe=320))
    with source.open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(DataError, match=r"sources\.small\.jsonl\.bytes: \d+ -> \d+"):
        prepare([str(source)], Options(out=str(out), train_bpe=300))
    assert state(out) == before
    assert not prepare([str(source)], Options(out=str(out), train_bpe=300, overwrite=True)).reused
    assert sum(TokenStore.open(out / split).manifest.documents for split in ("train", "val")) == 81
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "small.jsonl"]


def test_overwrite_repairs_a_damaged_store(corpus_file, tmp_path):
    out = tmp_path / "out"
    options = Options(out=str(out), train_bpe=300, overwrite=True)
    prepare([str(corpus_file)], options)
    assert prepare([str(corpus_file)], options).reused
    good = state(out)
    shard = out / "train/tokens/c/0"
    shard.write_bytes(shard.read_bytes()[:-9])
    assert not prepare([str(corpus_file)], options).reused
    assert state(out) == good


def test_a_url_is_built_in_place_and_finished_last(corpus, corpus_file, tmp_path, monkeypatch):
    out = tmp_path / "bucket"
    options = Options(out=f"file://{out}", train_bpe=300)
    with monkeypatch.context() as patch:
        patch.setattr(builder.TokenWriter, "finish", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare([str(corpus_file)], options)
    assert not (out / "prepared.json").exists()
    assert not prepare([str(corpus_file)], options).reused
    assert prepare([str(corpus_file)], options).reused
    plans = {name for name in state(corpus) if "/plans/" in name}
    assert state(out) == {name: content for name, content in state(corpus).items() if name not in plans}


def _interrupt(*_, **__):
    raise KeyboardInterrupt


def test_interrupt_leaves_what_was_there(corpus_file, tmp_path):
    out = tmp_path / "out"
    prepare([str(corpus_file)], Options(out=str(out), train_bpe=300))
    before = state(out)
    with pytest.raises(KeyboardInterrupt):
        prepare([str(corpus_file)], Options(out=str(out), train_bpe=310, overwrite=True), _interrupt)
    assert state(out) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


KILLED = """
import os, signal, sys
from ncp_jax.data import prepare
written = prepare.TokenWriter.append
def append(self, *args, **names):
    written(self, *args, **names)
    if self.documents == 30:
        os.kill(os.getpid(), signal.SIGKILL)
prepare.TokenWriter.append = append
prepare.prepare([sys.argv[1]], prepare.Options(out=sys.argv[2], train_bpe=300))
"""
FULL = """
import resource, sys
from ncp_jax.data import prepare
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
try:
    prepare.prepare([sys.argv[1]], prepare.Options(out=sys.argv[2], train_bpe=300))
except prepare.DataError as error:
    print("refused:", error)
"""


def in_process(script, *arguments) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_killed_run_leaves_nothing_in_the_way(corpus, corpus_file, tmp_path):
    out = tmp_path / "out"
    assert in_process(KILLED, corpus_file, out).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.partial-")
    assert not prepare([str(corpus_file)], Options(out=str(out), train_bpe=300)).reused
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert texts_of(out, "train") == texts_of(corpus, "train")


def test_a_living_run_is_not_disturbed(corpus_file, tmp_path):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        place = tmp_path / f".out.partial-{builder.socket.gethostname()}-{sleeper.pid}"
        place.mkdir()
        with pytest.raises(DataError, match=f"process {sleeper.pid} is preparing"):
            prepare([str(corpus_file)], Options(out=str(tmp_path / "out"), train_bpe=300))
        assert place.exists()
    finally:
        sleeper.kill()
        sleeper.wait()


def test_disk_that_refuses_to_grow(corpus_file, tmp_path):
    result = in_process(FULL, corpus_file, tmp_path / "out")
    assert "refused: cannot write" in result.stdout, result.stderr
    assert "free space or choose another --out" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written(corpus_file, tmp_path):
    (tmp_path / "file").touch()
    for out in ("/proc/nowhere/out", str(tmp_path / "file" / "out"), str(tmp_path / "file")):
        with pytest.raises(DataError, match=out):
            prepare([str(corpus_file)], Options(out=out, train_bpe=300, overwrite=True))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(DataError, match="mine is not empty and was not made by 'data prepare'"):
        prepare([str(corpus_file)], Options(out=str(tmp_path / "mine"), train_bpe=300, overwrite=True))
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_empty_documents_are_counted_and_empty_corpora_refused(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": ""}\n{"text": "some words"}\n\n{"text": ""}\n')
    made = prepare([str(file)], Options(out=str(tmp_path / "out"), train_bpe=300, val_fraction=0))
    assert made.manifests["train"].documents == 1
    assert sum(manifest.skipped_empty for manifest in made.manifests.values()) == 2
    with pytest.raises(InputError, match="none of the 1 documents is held out"):
        prepare([str(file)], Options(out=str(tmp_path / "other"), train_bpe=300, val_fraction=0.0001))
    with pytest.raises(InputError, match="no training document"):
        prepare([str(file)], Options(out=str(tmp_path / "other"), train_bpe=300, val_fraction=0.9999))
    file.write_text('{"text": ""}\n')
    with pytest.raises(InputError, match="the corpus is empty: 1 files, 1 documents without text"):
        prepare([str(file)], Options(out=str(tmp_path / "other"), train_bpe=300))
    file.write_text("")
    with pytest.raises(InputError, match="the corpus is empty: 1 files, 0 documents"):
        prepare([str(file)], Options(out=str(tmp_path / "other"), train_bpe=300))
    assert not (tmp_path / "other").exists()


# D6: ten added tokens push the id space over the 16-bit boundary; the highest one survives.
def test_added_tokens_count_for_the_dtype(tmp_path):
    hf = HFTokenizer(models.WordLevel({f"w{n}": n for n in range(65_530)}, unk_token="w0"))
    hf.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    hf.add_tokens([f"[[{n}]]" for n in range(9)])
    hf.add_special_tokens(["<|endoftext|>"])
    hf.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("w3 [[8]] w65529")
    options = Options(out=str(tmp_path / "out"), tokenizer=str(tmp_path / "tokenizer.json"), val_fraction=0)
    manifest = prepare([str(tmp_path / "a.txt")], options).manifests["train"]
    assert (manifest.vocab, manifest.dtype, manifest.eos) == (65_540, "uint32", 65_539)
    assert TokenStore.open(tmp_path / "out" / "train").read(0, 4).tolist() == [3, 65_538, 65_529, 65_539]


def test_options_that_make_no_sense(tmp_path):
    for given in ({}, {"tokenizer": "t.json", "train_bpe": 300}):
        with pytest.raises(DataError, match="either --tokenizer"):
            Options(out="x", **given)
    with pytest.raises(DataError, match="--val-fraction must be"):
        Options(out="x", train_bpe=300, val_fraction=1.0)


def run(*arguments) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["data", *map(str, arguments)])
    return args.run(args)


def test_commands(corpus, corpus_file, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("prepare", corpus_file, "--out", out, "--train-bpe", 100_000) == 0
    printed = capsys.readouterr()
    assert "train: 7" in printed.out
    assert "of 100,000 ids; set model.vocab to" in printed.out
    assert "tokenize" in printed.err
    assert run("prepare", corpus_file, "--out", out, "--train-bpe", 100_000) == 0
    assert "already prepared from these sources; nothing to do" in capsys.readouterr().out
    assert run("train-bpe", corpus_file, "--out", tmp_path / "t.json", "--vocab", 300) == 0
    assert (tmp_path / "t.json").read_bytes() == (corpus / "tokenizer.json").read_bytes()
    assert run("inspect", corpus, "--verify", "--sample", 1) == 0
    printed = capsys.readouterr().out
    assert texts_of(corpus, "train")[0][:30] in printed
    assert "checksums match" in printed
    with pytest.raises(DataError, match="no finished token store"):
        run("inspect", tmp_path)


def test_eos_of_another_name_reaches_the_store(tmp_path, capsys):
    tokenizer = train_bpe(["a b c"], 300)
    (tmp_path / "t.json").write_bytes(tokenizer.content.replace(b"<|endoftext|>", b"<<stop>>"))
    (tmp_path / "a.txt").write_text("a b c")
    options = ("--out", tmp_path / "out", "--tokenizer", tmp_path / "t.json", "--val-fraction", 0)
    with pytest.raises(DataError, match="none of the end-of-text tokens"):
        run("prepare", tmp_path / "a.txt", *options)
    assert run("prepare", tmp_path / "a.txt", *options, "--eos", "<<stop>>") == 0
    assert run("inspect", tmp_path / "out") == 0
    assert "end of text <<stop>> = 0" in capsys.readouterr().out
    store = TokenStore.open(tmp_path / "out" / "train")
    assert np.array_equal(store.token_bytes, tokenizer.token_bytes())
