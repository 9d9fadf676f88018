"""Token store: exact round trip in the right dtype, and every kind of damage named."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from ncp_jax.data import store as stores
from ncp_jax.data.store import StoreError, TokenStore, TokenWriter, check_ids


def write(path, documents, vocab, **names):
    writer = TokenWriter(path, vocab=vocab, eos=0, tokenizer="t", token_bytes=np.ones(vocab, np.int32))
    for number, ids in enumerate(documents):
        writer.append(ids, text_bytes=len(ids), origin=f"corpus.jsonl:{number + 1}")
    return writer.finish(**names)


# D6: the dtype follows the full id space; the highest id survives on both sides of the boundary.
@pytest.mark.parametrize(("vocab", "dtype"), [(65_536, "uint16"), (65_537, "uint32"), (100_278, "uint32")])
def test_highest_id_survives(tmp_path, vocab, dtype):
    ids = [vocab - 1, 0, 34_721, vocab - 1]
    manifest = write(tmp_path / "s", [ids], vocab)
    store = TokenStore.open(tmp_path / "s")
    assert manifest.dtype == store.manifest.dtype == dtype
    tokens = store.read(0, 5)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [*ids, 0]


@pytest.mark.parametrize("bad", [100, -1, 65_536 + 5])
def test_id_outside_the_vocabulary_is_refused_at_build_time(tmp_path, bad):
    with pytest.raises(StoreError, match=rf"corpus.jsonl:2: id {bad} at token 2 of the document"):
        write(tmp_path / "s", [[1, 2], [3, 4, bad]], 100)


def test_many_shards_round_trip(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "CHUNK", 64)
    monkeypatch.setattr(stores, "SHARD", 256)
    random = np.random.default_rng(0)
    documents = [random.integers(0, 500, n) for n in (1, 700, 3, 255, 256, 64, 0, 5)]
    write(tmp_path / "s", documents, 500)
    store = TokenStore.open(tmp_path / "s")
    expected = np.concatenate([np.append(ids, 0) for ids in documents])
    assert np.array_equal(store.read(0, len(expected)), expected)
    assert store.offsets.tolist() == [0, *np.cumsum([len(ids) + 1 for ids in documents]).tolist()]
    assert len(list((tmp_path / "s" / "tokens" / "c").iterdir())) == -(-len(expected) // 256)
    store.verify()


def test_url_and_path_are_one_store(tmp_path):
    write(f"file://{tmp_path}/s", [[1, 2, 3]], 10)
    assert TokenStore.open(tmp_path / "s").read(0, 4).tolist() == [1, 2, 3, 0]
    assert TokenStore.open(f"file://{tmp_path}/s").manifest.documents == 1


def test_zero_tokens_are_data_not_gaps(tmp_path):
    write(tmp_path / "s", [np.zeros(100_000, int)], 10)  # whole chunks equal to the fill value
    assert not TokenStore.open(tmp_path / "s").read(0, 100_001).any()


def damage_truncate(shard):
    shard.write_bytes(shard.read_bytes()[:-50])


def damage_flip(shard):
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)


def damage_empty(shard):
    shard.write_bytes(b"")


def damage_remove(shard):
    shard.unlink()


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_empty, damage_remove])
def test_damaged_shard_is_an_error_that_names_the_store(make_store, damage):
    store = make_store([50, 60])
    damage(next(Path(store.path).glob("tokens/c/*")))
    with pytest.raises(StoreError, match=f"{store.path}.*data prepare.*--overwrite"):
        check_ids(TokenStore.open(store.path), 60_000)


def test_verify_finds_a_store_of_other_tokens(make_store, tmp_path):
    ours, other = make_store([50], "a"), make_store([20, 29], "b")
    shutil.copytree(tmp_path / "b/train/tokens", tmp_path / "a/train/tokens", dirs_exist_ok=True)
    with pytest.raises(StoreError, match="checksum"):
        TokenStore.open(ours.path).verify()
    other.verify()


def test_unfinished_absent_and_foreign_stores(make_store, tmp_path):
    store = make_store([5])
    with pytest.raises(StoreError, match=r"no finished token store at .*absent"):
        TokenStore.open(tmp_path / "absent")
    manifest = tmp_path / "corpus/train/manifest.json"
    good = manifest.read_text()
    manifest.write_text(good.replace('"format": 1', '"format": 9'))
    with pytest.raises(StoreError, match="format 9, this version reads 1"):
        TokenStore.open(store.path)
    manifest.write_text(good[:40])
    with pytest.raises(StoreError, match=r"manifest\.json is damaged"):
        TokenStore.open(store.path)
    manifest.write_text(good.replace('"tokens": 6', '"tokens": 7'))
    with pytest.raises(StoreError, match="6 tokens, manifest says 7"):
        TokenStore.open(store.path)
    manifest.unlink()
    with pytest.raises(StoreError, match="no finished token store"):
        TokenStore.open(store.path)


def test_damaged_offsets(make_store, tmp_path):
    store = make_store([5, 6])
    file = tmp_path / "corpus/train/offsets.npy"
    content = bytearray(file.read_bytes())
    content[-8] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match=r"offsets\.npy is missing or damaged"):
        _ = TokenStore.open(store.path).offsets


# D10: an id that the model does not have never reaches it.
def test_ids_are_checked_before_training_and_at_every_read(make_store):
    store = make_store([50])
    with pytest.raises(StoreError, match=r"set model\.vocab to 60000"):
        check_ids(store, 59_999)
    with pytest.raises(StoreError, match=f"{store.path}: id 40 at token 39 is outside the vocabulary of 40"):
        store.read(30, 40, vocab=40)
    assert store.read(30, 39, vocab=40).tolist() == list(range(31, 40))


def test_another_tokenizer_beside_the_store(make_store, tmp_path):
    store = make_store([5])
    check_ids(store, 60_000)
    (tmp_path / "corpus/tokenizer.json").write_text("{}")
    with pytest.raises(StoreError, match=r"made with tokenizer ffffffffffff, but the tokenizer\.json beside it is"):
        check_ids(store, 60_000)


def test_reads_outside_the_store(make_store):
    store = make_store([5])
    with pytest.raises(StoreError, match="no tokens 3:9; it holds 6"):
        store.read(3, 9)
