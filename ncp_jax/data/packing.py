"""The packing: which stretches of a store make up row i, and how such rows become a batch.

A row of T tokens is a list of pieces: stretches of the store, each with its place in the row. Inputs are
store[s : s + n], targets store[s + 1 : s + n + 1]: the target of a document's last token is its end-of-text token.

`concat`     row i is the stretch that starts at token i*T; documents run on across rows.
`official`   the same stream without its end-of-text tokens, as CALM's public language models were trained.
`documents`  each document's n tokens are one piece, or several of at most T if it is longer. Pieces start at multiples
             of k, and a plan made once from the documents' lengths says which pieces share a row. For families that
             read end-of-text tokens instead of scoring them as targets alone, those count as tokens (`ends`).

B rows, T tokens per row, k tokens per chunk.
"""

import contextlib
import hashlib
import io
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ncp_jax.data.store import StoreError, TokenStore, read_file, write_file

# Changes whenever the same documents would be packed differently, so that stale plans are not reused.
PLAN_FORMAT = 2


class Piece(NamedTuple):
    """A stretch of the store within a row."""

    place: int  # first token's index in the row
    start: int  # first token's index in the store
    length: int  # inputs
    ids: int  # tokens read: length + 1, or length where the last input has no target
    follows: bool = False  # its first token is the target of the input before it


class Rows(Protocol):
    """Row i of a store, for any packing."""

    store: TokenStore

    def __len__(self) -> int: ...

    def pieces(self, row: int) -> list[Piece]: ...


class ConcatRows:
    """Rows of `concat` packing: every token but the store's first is a target exactly once."""

    def __init__(self, store: TokenStore, sequence: int):
        self.store, self._sequence = store, sequence

    def __len__(self) -> int:
        return -(-(self.store.manifest.tokens - 1) // self._sequence)

    def pieces(self, row: int) -> list[Piece]:
        start = row * self._sequence
        length = min(self._sequence, self.store.manifest.tokens - 1 - start)
        return [Piece(0, start, length, length + 1)]


class OfficialRows:
    """Rows of `official` packing: every token that ends no text, the store's first aside, is a target exactly once."""

    def __init__(self, store: TokenStore, sequence: int):
        self.store, self._sequence = store, sequence
        self._first = store.offsets - np.arange(len(store.offsets))  # of each document, in the stream without ends

    def __len__(self) -> int:
        return -(-max(int(self._first[-1]) - 1, 0) // self._sequence)

    def pieces(self, row: int) -> list[Piece]:
        start = row * self._sequence
        stop = min(start + self._sequence + 1, int(self._first[-1]))
        found = []
        for document in range(np.searchsorted(self._first, start, "right") - 1, np.searchsorted(self._first, stop)):
            first, last = max(start, int(self._first[document])), min(stop, int(self._first[document + 1]))
            if last > first:  # an empty document has no token here
                place, ids = first - start, last - first
                found.append(Piece(place, first + document, min(ids, stop - 1 - first), ids, follows=place > 0))
        return found


class DocumentRows:
    """Rows of `documents` packing. The plan is read from, or left in, the store where that is possible."""

    def __init__(self, store: TokenStore, sequence: int, k: int, seed: int, ends: bool = False):
        self.store = store
        self.plan = cached_plan(store, sequence, k, seed, ends)

    def __len__(self) -> int:
        return len(self.plan.rows) - 1

    def pieces(self, row: int) -> list[Piece]:
        some = slice(self.plan.rows[row], self.plan.rows[row + 1])
        columns = (self.plan.place[some], self.plan.start[some], self.plan.length[some], self.plan.ids[some])
        return [Piece(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


class Plan(NamedTuple):
    """Pieces in row order; row r owns pieces rows[r] : rows[r + 1]. All int64."""

    rows: np.ndarray  # [R + 1]
    place: np.ndarray  # [P]
    start: np.ndarray  # [P]
    length: np.ndarray  # [P]
    ids: np.ndarray  # [P]


def plan_documents(offsets: np.ndarray, sequence: int, k: int, seed: int, ends: bool = False) -> Plan:
    """Pack documents into rows of T = `sequence` tokens by best fit decreasing.

    `offsets`: int64 [documents + 1], each document's EOS included. Lengths count in chunks of k, so there are only T/k
    distinct sizes and the tightest row with room is found by one bit scan; the cost is a sort plus one step per piece.
    `seed` orders pieces of equal size and the rows, so any prefix of the rows is a fair sample. `ends`: a document's
    EOS is an input like its other tokens, and is followed by none.
    """
    start, length, ids = _pieces(offsets, sequence, ends)
    random = np.random.default_rng(seed)
    order = random.permutation(len(start))
    chunks = -(-length // k)
    order = order[np.argsort(-chunks[order], kind="stable")]
    row_of, place = _best_fit(chunks[order].tolist(), sequence // k)
    count = int(row_of.max(initial=-1)) + 1
    row_of = random.permutation(count)[row_of] if count else row_of
    by_row = np.lexsort((place, row_of))
    rows = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=count))]).astype(np.int64)
    pieces = order[by_row]
    return Plan(rows, place[by_row] * k, start[pieces], length[pieces], ids[pieces])


def cached_plan(store: TokenStore, sequence: int, k: int, seed: int, ends: bool = False) -> Plan:
    """`plan_documents`, kept in the store as plans/<hash of its inputs>.npz. A read-only store costs only the reuse."""
    key = f"{PLAN_FORMAT}/{store.manifest.offsets_sha256}/{sequence}/{k}/{seed}/{int(ends)}"
    name = f"plans/{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"
    plan = _load_plan(read_file(store.path, name))
    if plan is None:
        plan = plan_documents(store.offsets, sequence, k, seed, ends)
        buffer = io.BytesIO()
        np.savez(buffer, **plan._asdict())
        with contextlib.suppress(StoreError):  # a read-only store: the plan is computed again, nothing else is lost
            write_file(store.path, name, buffer.getvalue())
    return plan


def assemble(
    rows: Sequence[tuple[TokenStore, list[Piece]]], sequence: int, *, documents: bool, vocab: int
) -> dict[str, np.ndarray]:
    """Fresh arrays of one batch; a row without pieces is fully masked.

    tokens, targets int32 [B, T]; real, scored bool [B, T]; with `documents` also segments (document number in the row,
    from 1; 0 is padding) and positions (restart per document, run on through padding), int32 [B, T].
    Raises StoreError for damage or an id of `vocab` or above.
    """
    shape = (len(rows), sequence)
    tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    real, scored = np.zeros(shape, bool), np.zeros(shape, bool)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    positions += np.arange(sequence, dtype=np.int32)
    for row, number, piece, ids in _read(rows, vocab):
        here = slice(piece.place, piece.place + piece.length)
        tokens[row, here], real[row, here], segments[row, here] = ids[: piece.length], True, number
        of_before = int(piece.follows)
        aims = slice(piece.place - of_before, piece.place + piece.ids - 1)
        targets[row, aims], scored[row, aims] = ids[1 - of_before :], True
        positions[row, piece.place :] = np.arange(sequence - piece.place, dtype=np.int32)
    batch = {"tokens": tokens, "targets": targets, "real": real, "scored": scored}
    return {**batch, "segments": segments, "positions": positions} if documents else batch


def _read(rows: Sequence[tuple[TokenStore, list[Piece]]], vocab: int):
    """(row, number of the piece in its row, piece, ids) of a batch; the reads of each store go out together."""
    stores = {id(store): store for store, _ in rows}
    for key, store in stores.items():
        wanted = [
            (row, number, piece)
            for row, (owner, pieces) in enumerate(rows)
            if id(owner) == key
            for number, piece in enumerate(pieces, 1)
        ]
        spans = [(piece.start, piece.start + piece.ids) for _, _, piece in wanted]
        for place, ids in zip(wanted, store.read_many(spans, vocab=vocab), strict=True):
            yield *place, ids


def _pieces(offsets: np.ndarray, sequence: int, ends: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start, length and ids of every piece, int64 [P]: documents with or without their EOS, cut every `sequence`."""
    lengths = np.diff(offsets) - (0 if ends else 1)
    counts = -(-lengths // sequence)
    document = np.repeat(np.arange(len(lengths)), counts)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = offsets[:-1][document] + nth * sequence
    length = np.minimum(sequence, lengths[document] - nth * sequence)
    return start, length, np.minimum(length + 1, offsets[1:][document] - start)


def _best_fit(sizes: list[int], capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and place (both in units of `sizes`) of each piece, int64 [P]. `sizes` decrease; none exceeds `capacity`."""
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by room left
    rooms = 0  # bit r is set while some row has room r > 0
    row_of, place = np.empty(len(sizes), np.int64), np.empty(len(sizes), np.int64)
    count = 0
    for index, size in enumerate(sizes):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
        else:
            room, row, count = capacity, count, count + 1
        row_of[index], place[index] = row, capacity - room
        if room > size:
            open_rows[room - size].append(row)
            rooms |= 1 << (room - size)
    return row_of, place


def _load_plan(content: bytes | None) -> Plan | None:
    """A stored plan; None if there is none or it is damaged (zip members carry a CRC)."""
    if content is None:
        return None
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return Plan(**{name: arrays[name] for name in Plan._fields})
    except Exception:  # zipfile, zlib and NumPy each raise their own kinds for a cut file
        return None
