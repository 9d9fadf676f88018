"""Pipeline: data order is a function of (seed, row) alone; evaluation reads every row once."""

import itertools
import zlib

import jax
import numpy as np
import pytest

from ncp_jax.config import ConfigError
from ncp_jax.data.config import DataConfig, Source
from ncp_jax.data.packing import ConcatRows, DocumentRows
from ncp_jax.data.pipeline import effective_mixture, evaluation_batches, train_batches
from ncp_jax.data.store import StoreError

T, K, VOCAB = 16, 4, 60_000


@pytest.fixture
def config(make_store, tmp_path):
    """config(**changes): a mixture of two stores of 61 and 40 documents."""
    random = np.random.default_rng(1)
    for name, count in (("one", 61), ("two", 40)):
        make_store(random.integers(1, 40, count), name=name)
    sources = (Source(str(tmp_path / "one"), 0.7), Source(str(tmp_path / "two"), 0.3))
    return lambda **changes: DataConfig(**{"mixture": sources, "sequence": T, **changes})


def open_train(config, global_batch=8, **place):
    return train_batches(config, vocab=VOCAB, chunk=K, global_batch=global_batch, **place)


def digests(batches, count) -> list[int]:
    return [digest(batch) for batch in itertools.islice(batches, count)]


def digest(batch) -> int:
    return zlib.crc32(b"".join(np.ascontiguousarray(batch[name]).tobytes() for name in sorted(batch)))


# D3: read-ahead never changes what is read, or its order.
@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_workers_and_prefetch_change_nothing(config, packing):
    runs = [
        digests(open_train(config(packing=packing, prefetch=prefetch, workers=workers)), 30)
        for prefetch, workers in ((0, 1), (1, 1), (2, 2), (9, 5))
    ]
    assert runs.count(runs[0]) == len(runs)
    assert len(set(runs[0])) == 30


# D4: a run that is stopped with batches read ahead continues with the next batch it had not consumed.
@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_resume_is_straight(config, packing):
    config = config(packing=packing, prefetch=8, workers=3)
    straight = digests(open_train(config), 20)
    first = open_train(config)
    assert first.position == 0
    assert digests(first, 13) == straight[:13]
    assert (first.position, first.next_row) == (13, 104)
    first.close()
    again = open_train(config, start_step=10)
    assert again.position == 10
    assert digests(again, 10) == straight[10:]


# D5: any number of processes reads the same global batches, rows in the same order, also from the middle.
@pytest.mark.parametrize("packing", ["concat", "documents"])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_process_count_changes_nothing(config, packing, count):
    config = config(packing=packing)
    alone = list(itertools.islice(open_train(config), 12))
    hosts = [open_train(config, start_step=5, process_index=index, process_count=count) for index in range(count)]
    for expected in alone[5:]:
        parts = [next(host) for host in hosts]
        assert digest({name: np.concatenate([part[name] for part in parts]) for name in expected}) == digest(expected)
    assert {host.position for host in hosts} == {12}


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_an_epoch_reads_every_row_once(make_store, tmp_path, packing):
    store = make_store(np.random.default_rng(0).integers(1, 40, 50))
    config = DataConfig((Source(str(tmp_path / "corpus")),), sequence=T, packing=packing)
    rows = DocumentRows(store, T, K, 0) if packing == "documents" else ConcatRows(store, T)
    batches = open_train(config, global_batch=1)
    epochs = [[batch["tokens"].tobytes() for batch in itertools.islice(batches, len(rows))] for _ in range(2)]
    assert len(set(epochs[0])) == len(rows)
    assert set(epochs[0]) == set(epochs[1])
    assert epochs[0] != epochs[1]


def test_seed_changes_the_order(config):
    assert digests(open_train(config(shuffle_seed=1)), 5) != digests(open_train(config(shuffle_seed=2)), 5)


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1), (3, 0.5), (0.123, 0.877)])
def test_mixture_proportions_are_exact_and_even(make_store, tmp_path, weights):
    make_store([50] * 20, name="low", first=1)
    make_store([30] * 20, name="high", first=30_001)
    sources = tuple(Source(str(tmp_path / name), weight) for name, weight in zip(("low", "high"), weights, strict=True))
    config = DataConfig(sources, sequence=8, packing="concat")
    shares = [row.weight for row in effective_mixture(config, chunk=K, global_batch=10, steps=1)]
    assert shares == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-12)
    from_low = [batch["tokens"].max() < 30_000 for batch in itertools.islice(open_train(config, global_batch=1), 2000)]
    taken = np.cumsum(from_low)
    assert (np.abs(taken - shares[0] * np.arange(1, 2001)) <= 1).all()
    assert taken[999] == round(1000 * shares[0])


def test_weights_that_never_repeat_are_refused(config):
    sources = (Source(config().mixture[0].path, 0.1234567), Source(config().mixture[1].path, 1.0))
    with pytest.raises(ConfigError, match=r"repeat only every 11234567 rows.*four decimals"):
        open_train(config(mixture=sources))


def test_effective_mixture_counts_epochs(config):
    rows = effective_mixture(config(packing="concat"), chunk=K, global_batch=10, steps=100)
    assert [row.documents for row in rows] == [61, 40]
    assert [row.epochs * row.windows for row in rows] == pytest.approx([700, 300])
    assert [row.windows for row in rows] == [-(-(row.tokens - 1) // T) for row in rows]


# D9: a batch is never written to again, so device arrays that alias it stay what they were.
def test_past_batches_do_not_change(make_store, tmp_path):
    make_store([5000] * 10)
    config = DataConfig((Source(str(tmp_path / "corpus")),), sequence=1024, packing="concat", prefetch=3)
    kept = []
    for batch in itertools.islice(open_train(config, global_batch=32), 8):
        assert batch["tokens"].nbytes >= 100_000
        kept.append((digest(batch), jax.device_put(batch), batch))
    for before, on_device, batch in kept:
        assert digest(batch) == before
        assert digest(jax.tree.map(np.asarray, on_device)) == before
    assert not any(np.shares_memory(a[2]["tokens"], b[2]["tokens"]) for a, b in itertools.combinations(kept, 2))


# D10 and friends: refused before the first batch.
def test_refusals_before_the_first_batch(config, make_store, tmp_path):
    with pytest.raises(StoreError, match=r"set model\.vocab to 60000"):
        train_batches(config(), vocab=100, chunk=K, global_batch=8)
    with pytest.raises(ConfigError, match=r"nearest legal data\.sequence: 14 or 21"):
        train_batches(config(), vocab=VOCAB, chunk=7, global_batch=8)
    with pytest.raises(ConfigError, match="batch of 10 does not divide over 4 processes; nearest legal: 8 or 12"):
        open_train(config(), global_batch=10, process_count=4)
    with pytest.raises(ConfigError, match="process 4 of 4 does not exist"):
        open_train(config(), process_index=4, process_count=4)
    make_store([], name="empty")
    with pytest.raises(StoreError, match="empty/train has no row"):
        open_train(config(mixture=(Source(str(tmp_path / "empty")),)))
    manifest = tmp_path / "two/train/manifest.json"
    manifest.write_text(manifest.read_text().replace("f" * 64, "e" * 64))
    with pytest.raises(StoreError, match="different tokenizers"):
        open_train(config())


def test_damage_while_training_names_the_store(make_store, tmp_path):
    store = make_store([40_000, 40_000], vocab=100_000)
    (shard,) = (tmp_path / "corpus/train/tokens/c").iterdir()
    content = bytearray(shard.read_bytes())
    content[2 * 4 * 32_768 + 9] ^= 1  # within the last chunk
    shard.write_bytes(content)
    config = DataConfig((Source(str(tmp_path / "corpus")),), sequence=1024, packing="concat")
    batches = train_batches(config, vocab=100_000, chunk=K, global_batch=8)
    with pytest.raises(StoreError, match=f"{store.path}: tokens .* are damaged"):
        digests(batches, 20)


# X2: uneven evaluation data over any number of processes.
@pytest.mark.parametrize("count", [1, 2, 4])
def test_evaluation_reads_every_row_once(make_store, count):
    store = make_store([101 * T])
    config = DataConfig((Source("unused"),), sequence=T)
    readers = [
        evaluation_batches(store, config, batch=8, chunk=K, process_index=index, process_count=count)
        for index in range(count)
    ]
    assert {len(reader) for reader in readers} == {13}
    assert {reader.sequences for reader in readers} == {101}
    steps = list(zip(*readers, strict=True))
    assert len(steps) == 13
    batches = [{name: np.concatenate([part[name] for part in step]) for name in step[0]} for step in steps]
    assert all(batch["tokens"].shape == (8, T) for batch in batches)
    real = np.concatenate([batch["tokens"][batch["real"]] for batch in batches])
    assert np.sort(real).tolist() == list(range(1, 101 * T + 1))
    alone = list(evaluation_batches(store, config, batch=8, chunk=K))
    assert [digest(batch) for batch in batches] == [digest(batch) for batch in alone]


def test_evaluation_with_an_empty_share_and_a_limit(make_store):
    store = make_store([5 * T])
    config = DataConfig((Source("unused"),), sequence=T, packing="concat")
    last = evaluation_batches(store, config, batch=8, chunk=K, process_index=3, process_count=4)
    assert len(last) == 1
    assert not next(iter(last))["real"].any()
    limited = evaluation_batches(store, config, batch=2, chunk=K, limit=3)
    assert sum(batch["scored"].sum() for batch in limited) == 3 * T
    assert len(list(limited)) == len(limited) == 2


def test_evaluation_refusals(make_store):
    store, config = make_store([50]), DataConfig((Source("unused"),), sequence=T)
    with pytest.raises(ConfigError, match="nearest legal: 8 or 12"):
        evaluation_batches(store, config, batch=10, chunk=K, process_count=4)
    with pytest.raises(ConfigError, match="limit must be at least 1"):
        evaluation_batches(store, config, batch=8, chunk=K, limit=0)
    with pytest.raises(StoreError, match=r"model\.vocab"):
        evaluation_batches(store, config, batch=8, chunk=K, vocab=10)


def test_evaluation_rows_ignore_the_training_seed(make_store):
    store = make_store(np.random.default_rng(0).integers(1, 40, 50))
    runs = [
        digests(
            evaluation_batches(store, DataConfig((Source("u"),), sequence=T, shuffle_seed=seed), batch=4, chunk=K), 3
        )
        for seed in (0, 9)
    ]
    assert runs[0] == runs[1]
