"""Rows of text for BrierLM: how documents are cut, and at which positions a row is scored.

Shapes: N rows, T tokens per row (the block), P positions of a row, K tokens per sampled block.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from ncp_jax.config import ConfigError, nearest_multiples
from ncp_jax.ops.scoring import LENGTHS, ScoreError

Packing = Literal["official", "documents"]


class Rows(NamedTuple):
    """Text to score. A position's document is that of its first predicted token."""

    tokens_NT: np.ndarray  # int32
    real_NT: np.ndarray  # bool; padding is never scored
    document_NT: np.ndarray  # int32, from 0
    packing: Packing


class RowBatch(NamedTuple):
    """Rows at one time: always the same number, the last batch is filled with copies of its first row."""

    tokens_BT: np.ndarray
    row_B: np.ndarray  # index among all rows
    new: int  # rows that are not filling


def cut(documents: Sequence[Sequence[int]], block: int, packing: Packing = "official") -> Rows:
    """Tokenised documents as rows of `block` tokens.

    official: all documents one after another, nothing between them; a remainder shorter than a block is dropped.
    documents: every document starts a row of its own and goes on in further ones; the last is padded with id 0.
    Add end-of-text tokens, if the model saw them, before. Raises ScoreError for text shorter than one block.
    """
    sizes = [len(document) for document in documents]
    total = sum(sizes)
    if block < LENGTHS + 1:
        raise ConfigError(f"a block of {block} tokens has no {LENGTHS}-gram after a context; use {LENGTHS + 1} or more")
    if packing == "documents":
        return _separate([np.asarray(document, np.int32) for document in documents if len(document)], block)
    if total < block:
        raise ScoreError(
            f"the evaluation text has {total} tokens in {len(sizes)} documents and a block is {block}: nothing to "
            f"score; use a block of at most {total} tokens, or packing 'documents', which pads"
        )
    count = total // block
    tokens_n = np.concatenate([np.asarray(document, np.int32) for document in documents])[: count * block]
    document_n = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)[: count * block]
    shape = (count, block)
    return Rows(tokens_n.reshape(shape), np.ones(shape, bool), document_n.reshape(shape), packing)


def token_starts(block: int) -> np.ndarray:
    """First predicted tokens when every offset is scored, int [T - 4]: all that have a context and four tokens."""
    return np.arange(1, block - LENGTHS + 1)


def block_starts(block: int, chunk: int) -> np.ndarray:
    """First predicted tokens when blocks of `chunk` are: every block but the first, while four tokens' blocks are left.

    K >= 4: T / K - 1 starts, of whose K tokens four are scored. K < 4: T / K - ceil(4 / K) starts; the official code
    leaves out the last of them. Raises ConfigError for a block that is no multiple of K, or too short.
    """
    if block % chunk:
        raise ConfigError(
            f"rows of {block} tokens are no multiple of blocks of {chunk}; nearest: {nearest_multiples(block, chunk)}"
        )
    count = block // chunk - blocks_for(chunk)
    if count < 1:
        raise ConfigError(
            f"rows of {block} tokens hold no scored position with blocks of {chunk}: the first block is context; "
            f"use at least {(1 + blocks_for(chunk)) * chunk} tokens"
        )
    return chunk * np.arange(1, count + 1)


def blocks_for(chunk: int) -> int:
    """Consecutive blocks of `chunk` tokens that hold four tokens."""
    return -(-LENGTHS // chunk)


def scored(rows: Rows, row_B: np.ndarray, start_P: np.ndarray) -> np.ndarray:
    """[B, P] bool: the four tokens from each start on are all real."""
    window_P4 = start_P[:, None] + np.arange(LENGTHS)
    return rows.real_NT[row_B][:, window_P4].all(axis=-1)


def batches(rows: Rows, batch: int) -> Iterator[RowBatch]:
    """All rows, `batch` at a time."""
    if batch < 1:
        raise ConfigError(f"a batch of {batch} rows scores nothing; use at least 1")
    for first in range(0, len(rows.tokens_NT), batch):
        row_B = np.arange(first, min(first + batch, len(rows.tokens_NT)))
        padded_B = np.concatenate([row_B, np.full(batch - len(row_B), first)])
        yield RowBatch(rows.tokens_NT[padded_B], padded_B, len(row_B))


def branches(tokens_NT: np.ndarray, row_p: np.ndarray, length_p: np.ndarray, path_ps: np.ndarray) -> np.ndarray:
    """Contexts that leave the text, int32 [p, T]: the first `length` tokens of each row, its path, then zeros."""
    T, s = tokens_NT.shape[1], path_ps.shape[1]
    place_T = np.arange(T)
    context_pT = np.where(place_T < length_p[:, None], tokens_NT[row_p], 0)
    np.put_along_axis(context_pT, length_p[:, None] + np.arange(s), path_ps, axis=1)
    return context_pT.astype(np.int32)


def groups(count: int, at_once: int) -> Iterator[tuple[np.ndarray, int]]:
    """Indices 0..count in groups of exactly `at_once` (the last repeats index 0), each with how many of it are new."""
    for first in range(0, count, at_once):
        index = np.arange(first, min(first + at_once, count))
        yield np.concatenate([index, np.zeros(at_once - len(index), int)]), len(index)


def check_ids(rows: Rows, vocab: int, name: str) -> None:
    """Raise ScoreError for an id that the model does not have: an embedding lookup would not."""
    bad_NT = (rows.tokens_NT < 0) | (rows.tokens_NT >= vocab)
    if bad_NT.any():
        row, place = np.argwhere(bad_NT)[0]
        raise ScoreError(
            f"evaluation row {row}, token {place} has id {rows.tokens_NT[row, place]}, {name} knows 0..{vocab - 1}; "
            "tokenise with the model's own tokenizer"
        )


def _separate(documents: list[np.ndarray], block: int) -> Rows:
    pieces = [(d, doc[at : at + block]) for d, doc in enumerate(documents) for at in range(0, len(doc), block)]
    longest = max((len(piece) for _, piece in pieces), default=0)
    if longest <= LENGTHS:
        raise ScoreError(
            f"no document of the evaluation text has more than {LENGTHS} tokens (the longest has {longest}): "
            "nothing to score; give longer documents, or packing 'official', which joins them"
        )
    tokens_NT = np.zeros((len(pieces), block), np.int32)
    real_NT, document_NT = np.zeros(tokens_NT.shape, bool), np.zeros(tokens_NT.shape, np.int32)
    for row, (document, piece) in enumerate(pieces):
        tokens_NT[row, : len(piece)], real_NT[row, : len(piece)], document_NT[row] = piece, True, document
    return Rows(tokens_NT, real_NT, document_NT, "documents")
