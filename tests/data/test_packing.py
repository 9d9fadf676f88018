"""Packing: every token once, chunk-aligned, no row overfull, plans reused; batches by hand."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncp_jax.data import packing
from ncp_jax.data.packing import ConcatRows, DocumentRows, OfficialRows, assemble, cached_plan, plan_documents
from ncp_jax.data.store import TokenStore


def offsets_of(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64) + 1)]).astype(np.int64)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90), max_size=40),
    chunks=st.integers(1, 9),
    k=st.integers(1, 5),
    seed=st.integers(0, 3),
)
def test_plan_laws(lengths, chunks, k, seed):
    sequence, offsets = chunks * k, offsets_of(lengths)
    plan = plan_documents(offsets, sequence, k, seed)
    inputs = [np.arange(s, s + n) for s, n in zip(plan.start, plan.length, strict=True)]
    expected = [np.arange(s, s + n) for s, n in zip(offsets[:-1], lengths, strict=True)]
    empty = np.zeros(0, np.int64)
    assert np.array_equal(np.sort(np.concatenate([empty, *inputs])), np.concatenate([empty, *expected]))
    assert (plan.place % k == 0).all()
    assert plan.rows[0] == 0
    assert plan.rows[-1] == len(plan.start)
    for first, last in zip(plan.rows, plan.rows[1:], strict=False):
        place, length = plan.place[first:last], plan.length[first:last]
        padded = -(-length // k) * k
        assert len(place) > 0
        assert (place == np.cumsum(padded) - padded).all()
        assert place[-1] + padded[-1] <= sequence
        documents = np.searchsorted(offsets, plan.start[first:last], side="right")
        assert (plan.start[first:last] + length <= offsets[documents] - 1).all()  # the EOS is never an input


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(0, 90), max_size=40), chunks=st.integers(1, 9), k=st.integers(1, 5))
def test_plans_with_ends_hold_every_token_once(lengths, chunks, k):
    offsets = offsets_of(lengths)
    plan = plan_documents(offsets, chunks * k, k, 0, ends=True)
    inputs = [np.zeros(0, np.int64), *map(np.arange, plan.start, plan.start + plan.length)]
    assert np.array_equal(np.sort(np.concatenate(inputs)), np.arange(offsets[-1]))
    ends = np.isin(plan.start + plan.length, offsets[1:])
    assert (plan.ids == plan.length + ~ends).all()  # only what ends a document has no target
    assert (plan.place % k == 0).all()


def test_plan_depends_on_the_seed_and_nothing_else():
    offsets = offsets_of(np.random.default_rng(0).integers(1, 60, 200))
    first, again, other = (plan_documents(offsets, 32, 4, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first.start, other.start)


def test_best_fit_fills_rows():
    lengths = np.random.default_rng(0).lognormal(5, 1, 20_000).astype(int) + 1
    began = time.monotonic()
    plan = plan_documents(offsets_of(lengths), 1024, 4, 0)
    assert time.monotonic() - began < 5
    assert plan.length.sum() / (1024 * (len(plan.rows) - 1)) > 0.98


def test_documents_batch_by_hand(make_store):
    store = make_store([3, 5, 10])  # tokens 1..3, 4..8, 9..18, each document followed by EOS 0
    rows = DocumentRows(store, 8, 2, 0)
    batch = assemble([(store, rows.pieces(row)) for row in range(len(rows))], 8, documents=True, vocab=100)
    found = {
        tuple(row[real].tolist()): number
        for number, (row, real) in enumerate(zip(batch["tokens"], batch["real"], strict=True))
    }
    assert set(found) == {(9, 10, 11, 12, 13, 14, 15, 16), (4, 5, 6, 7, 8, 17, 18), (1, 2, 3)}
    row = found[4, 5, 6, 7, 8, 17, 18]
    assert batch["targets"][row].tolist() == [5, 6, 7, 8, 0, 0, 18, 0]
    assert batch["segments"][row].tolist() == [1, 1, 1, 1, 1, 0, 2, 2]
    assert batch["positions"][row].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    row = found[1, 2, 3]
    assert batch["targets"][row].tolist() == [2, 3, 0, 0, 0, 0, 0, 0]
    assert batch["segments"][row].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert batch["positions"][row].tolist() == list(range(8))
    row = found[9, 10, 11, 12, 13, 14, 15, 16]
    assert batch["targets"][row].tolist() == [10, 11, 12, 13, 14, 15, 16, 17]
    assert np.array_equal(batch["scored"], batch["real"])
    dtypes = {name: values.dtype.name for name, values in batch.items()}
    assert dtypes == {"tokens": "int32", "targets": "int32", "real": "bool", "scored": "bool"} | dict.fromkeys(
        ("segments", "positions"), "int32"
    )


def test_documents_with_ends_by_hand(make_store):
    store = make_store([3, 4])
    rows = DocumentRows(store, 8, 2, 0, ends=True)
    batch = assemble([(store, rows.pieces(row)) for row in range(len(rows))], 8, documents=True, vocab=100)
    found = {tuple(row.tolist()): number for number, row in enumerate(batch["tokens"])}
    assert set(found) == {(4, 5, 6, 7, 0, 0, 0, 0), (1, 2, 3, 0, 0, 0, 0, 0)}
    row = found[4, 5, 6, 7, 0, 0, 0, 0]
    assert batch["real"][row].tolist() == [True] * 5 + [False] * 3
    assert batch["scored"][row].tolist() == [True] * 4 + [False] * 4
    assert batch["targets"][row].tolist() == [5, 6, 7, 0, 0, 0, 0, 0]


def test_a_stream_without_ends_by_hand(make_store):
    store = make_store([3, 0, 4, 2])  # 1 2 3 0 | 0 | 4 5 6 7 0 | 8 9 0
    rows = OfficialRows(store, 4)
    batch = assemble([(store, rows.pieces(row)) for row in range(len(rows))], 4, documents=False, vocab=100)
    assert batch["tokens"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert batch["targets"].tolist() == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert batch["real"].all()
    assert batch["scored"].all()


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12), sequence=st.integers(1, 16))
def test_a_stream_without_ends_is_the_stream(lengths, sequence):
    class Store:
        offsets = offsets_of(lengths)

    rows, ids = OfficialRows(Store(), sequence), []
    for row in range(len(rows)):
        pieces = rows.pieces(row)
        assert [piece.follows for piece in pieces] == [False] + [True] * (len(pieces) - 1)
        assert sum(piece.ids for piece in pieces) == sum(piece.length for piece in pieces) + 1
        ids += [piece.start + i for piece in pieces for i in range(piece.length)]
    texts = [np.arange(a, b - 1) for a, b in zip(Store.offsets, Store.offsets[1:], strict=False)]
    stream = np.concatenate([np.zeros(0, int), *texts])
    assert ids == stream[:-1].tolist()


def test_concat_batch_by_hand(make_store):
    store = make_store([3, 5])  # 1 2 3 0 4 5 6 7 8 0
    rows = ConcatRows(store, 4)
    batch = assemble([(store, rows.pieces(row)) for row in range(len(rows))], 4, documents=False, vocab=100)
    assert sorted(batch) == ["real", "scored", "targets", "tokens"]
    assert batch["tokens"].tolist() == [[1, 2, 3, 0], [4, 5, 6, 7], [8, 0, 0, 0]]
    assert batch["targets"].tolist() == [[2, 3, 0, 4], [5, 6, 7, 8], [0, 0, 0, 0]]
    assert batch["real"].tolist() == [[True] * 4, [True] * 4, [True, False, False, False]]


@pytest.mark.parametrize("tokens", range(2, 20))
def test_concat_targets_cover_the_stream_once(make_store, tokens):
    store = make_store([tokens - 1], name=f"corpus{tokens}")
    rows = ConcatRows(store, 4)
    targets = [
        piece.start + 1 + i for row in range(len(rows)) for piece in rows.pieces(row) for i in range(piece.length)
    ]
    assert targets == list(range(1, tokens))


def test_row_without_pieces_is_masked(make_store):
    batch = assemble([(make_store([3]), [])], 8, documents=True, vocab=10)
    assert not batch["real"].any()
    assert not batch["segments"].any()


def test_plan_is_made_once(make_store, monkeypatch):
    store = make_store([3, 50, 7])
    first = cached_plan(store, 16, 4, 5)
    monkeypatch.setattr(packing, "plan_documents", lambda *inputs: pytest.fail(f"planned again: {inputs[1:]}"))
    again = cached_plan(TokenStore.open(store.path), 16, 4, 5)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    for other in ((32, 4, 5), (16, 2, 5), (16, 4, 6)):
        with pytest.raises(pytest.fail.Exception, match="planned again"):
            cached_plan(store, *other)


def test_damaged_plan_is_replaced(make_store, tmp_path):
    store = make_store([3, 50, 7])
    first = cached_plan(store, 16, 4, 5)
    (file,) = (tmp_path / "corpus/train/plans").iterdir()
    good = file.read_bytes()
    for content in (b"", good[:200], good[:-30], b"x" * 400):
        file.write_bytes(content)
        assert all(np.array_equal(a, b) for a, b in zip(first, cached_plan(store, 16, 4, 5), strict=True))
        assert file.read_bytes() == good


def test_read_only_store_plans_in_memory(make_store, tmp_path):
    store = make_store([3, 50, 7])
    (tmp_path / "corpus/train/plans").write_text("a file where the directory should be")
    assert len(cached_plan(store, 16, 4, 5).start) == 6
