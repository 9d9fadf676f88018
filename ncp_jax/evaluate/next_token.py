"""BrierLM of a next-token model: P(y) exactly, the collision from one short path per position.

Accuracies come from one pass over the row. So does the collision for n = 1, sum_x p(x)^2. For n > 1 two tokens are
drawn; where they agree the path goes on along them, and n-grams collide with the square sum behind it: unbiased, with
less noise than four drawn tokens (the rule of the official train_ar.py). All positions of a row go one step together;
contexts whose draws differ are dropped, about 0.5 rows per position where a quarter of the pairs agree.

Shapes: B rows, T tokens, V vocabulary, S scored starts, P = B S positions, p contexts that leave the text.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ncp_jax.config import ConfigError, nearest_multiples
from ncp_jax.evaluate.brier import Protocol, Scores, gather
from ncp_jax.evaluate.brier_rows import (
    RowBatch,
    Rows,
    batches,
    block_starts,
    branches,
    check_ids,
    groups,
    scored,
    token_starts,
)
from ncp_jax.ops.scoring import LENGTHS, chain
from ncp_jax.train.task import Params, Task

Starts = Literal["tokens", "blocks"]
# (step 0..2, row of the text [p], first predicted token [p], logits [p, V]) -> two tokens per context, int [2, p]
DrawPairs = Callable[[int, np.ndarray, np.ndarray, Array], Array]
DRAWS_AT_ONCE = 64  # first tokens drawn at a time: their noise is [64, 2, V]

_chain = jax.jit(chain)


class NextToken(NamedTuple):
    """A model that gives the next token's logits; causal, so that what follows a token does not matter.

    logits(tokens_BT) -> [B, T, V], at t the law of token t + 1.
    logits_at(tokens_pT, place_p) -> [p, V], the same at one place per row. None: taken from `logits`; a model that
        applies its head at that place alone saves T times the memory.
    Compile them yourself.
    """

    logits: Callable[[Array], Array]
    vocab: int
    chunk: int = 1  # rows are a multiple of this many tokens
    logits_at: Callable[[Array, Array], Array] | None = None
    name: str = "next-token model"
    tokenizer: str = "unnamed"
    dtype: str = "float32"


def of_task(task: Task, params: Params, frozen: Params = None, **named: str) -> NextToken:
    """Any next-token Task with its parameters. `named`: name, tokenizer, dtype. Raises ConfigError for another Task."""
    if task.forward is None:
        raise ConfigError(
            f"task '{task.name}' gives no token logits; score a block sampler by its draws (evaluate/blocks.py)"
        )
    forward: Callable[..., Array] = task.forward
    whole = jax.jit(forward)
    at = jax.jit(lambda params, frozen, tokens_pT, place_p: _take(forward(params, frozen, tokens_pT), place_p))
    named = {"name": task.name, **named}
    return NextToken(
        partial(whole, params, frozen), task.vocab, task.chunk, logits_at=partial(at, params, frozen), **named
    )


def score_next_token(
    model: NextToken,
    rows: Rows,
    *,
    starts: Starts = "tokens",
    chunk: int | None = None,
    seed: int = 0,
    batch: int = 1,
    at_once: int = 16,
    draw: DrawPairs | None = None,
) -> Scores:
    """Parts of every scored position.

    Args:
        starts: `tokens` scores every offset, as the official baseline does; `blocks` scores where a block sampler of
            `chunk` tokens is scored, with the same context, so that both can be compared (evaluate/brier.compare).
        batch: rows at a time; at_once: contexts at a time, [at_once, T, V] logits. Neither changes a score, but for
            rounding.
        draw: replaces the draws, to repeat recorded ones.
    Raises ConfigError for impossible sizes, ScoreError for ids that the model does not have.
    """
    check_ids(rows, model.vocab, model.name)
    T = rows.tokens_NT.shape[1]
    if T % model.chunk:
        raise ConfigError(
            f"rows of {T} tokens do not fit {model.name}, which reads chunks of {model.chunk}; "
            f"nearest: {nearest_multiples(T, model.chunk)}"
        )
    start_S, drawing = _starts(starts, T, chunk), draw or partial(_draw_pairs, jax.random.key(seed))
    counted_NS = scored(rows, np.arange(len(rows.tokens_NT)), start_S)
    found = []
    for part in batches(rows, batch):
        counted_BS = counted_NS[part.row_B] & (np.arange(batch) < part.new)[:, None]
        parts = _parts(model, part, start_S, counted_BS, drawing, at_once)
        found.append([values_BSn[: part.new] for values_BSn in parts])
    protocol = Protocol(
        model=model.name, tokenizer=model.tokenizer, dtype=model.dtype, packing=rows.packing, block=T, chunk=chunk,
        rows=len(rows.tokens_NT), starts="every token" if starts == "tokens" else f"blocks of {chunk}",
        first_start=int(start_S[0]), samples=None, estimator="exact", seed=seed,
    )  # fmt: skip
    accuracy_NSn, collision_NSn = (np.concatenate(values) for values in zip(*found, strict=True))
    return gather(rows, start_S, counted_NS, accuracy_NSn, collision_NSn, protocol)


class _Places(NamedTuple):
    """Positions to follow beyond the first token: p of them, in a batch of rows."""

    tokens_BT: np.ndarray
    text_row_B: np.ndarray  # each row's place in the whole text
    row_p: np.ndarray
    start_p: np.ndarray


def _starts(kind: Starts, T: int, chunk: int | None) -> np.ndarray:
    if kind == "tokens":
        return token_starts(T)
    if chunk is None:
        raise ConfigError("starts 'blocks' needs the chunk of the block sampler to compare with, for example chunk=4")
    return block_starts(T, chunk)


def _parts(
    model: NextToken, part: RowBatch, start_S: np.ndarray, counted_BS: np.ndarray, draw: DrawPairs, at_once: int
) -> tuple[np.ndarray, np.ndarray]:
    """(accuracy, collision) [B, S, 4] of one batch of rows; no collision where nothing is counted."""
    logits_BTV = model.logits(jnp.asarray(part.tokens_BT))
    accuracy_BSn, square_BT = _first_pass(logits_BTV, jnp.asarray(part.tokens_BT), start_S)
    row_p, place_p = np.nonzero(counted_BS)
    places = _Places(part.tokens_BT, part.row_B, row_p, start_S[place_p])
    pair_2p = _pairs(draw, logits_BTV, places)
    del logits_BTV  # up to a gigabyte, before contexts make as much again
    collision_BSn = np.zeros((*counted_BS.shape, LENGTHS))
    collision_BSn[counted_BS] = _collision(model, places, np.asarray(square_BT), pair_2p, draw, at_once)
    return np.asarray(accuracy_BSn), collision_BSn


@jax.jit
def _first_pass(logits_BTV: Array, tokens_BT: Array, start_S: Array) -> tuple[Array, Array]:
    """(probabilities of the n-grams that stand in the text [B, S, 4], sums of squared probabilities [B, T])."""
    log_p_BTV = _log_p(logits_BTV)
    next_BT1 = tokens_BT[:, 1:, None]
    p_BT = jnp.exp(jnp.take_along_axis(log_p_BTV[:, :-1], next_BT1, axis=-1)[..., 0])
    p_BS4 = p_BT[:, start_S[:, None] - 1 + jnp.arange(LENGTHS)]
    return jnp.cumprod(p_BS4, axis=-1), jnp.exp(2 * log_p_BTV).sum(axis=-1)


def _pairs(draw: DrawPairs, logits_BTV: Array, places: _Places) -> np.ndarray:
    """Two first tokens for every position, int [2, p]."""
    found = [np.zeros((2, 0), np.int32)]
    for index, count in groups(len(places.row_p), DRAWS_AT_ONCE):
        row_g, start_g = places.row_p[index], places.start_p[index]
        logits_gV = _rows(logits_BTV, row_g, start_g - 1)
        found.append(np.asarray(draw(0, places.text_row_B[row_g], start_g, logits_gV))[:, :count])
    return np.concatenate(found, axis=1)


def _collision(
    model: NextToken, places: _Places, square_BT: np.ndarray, pair_2p: np.ndarray, draw: DrawPairs, at_once: int
) -> np.ndarray:
    """Unbiased collisions, [p, 4]: step by step along the first drawn token, where the second agrees."""
    tokens_BT, text_row_B, row_p, start_p = places
    rate_p4, whole_p4 = np.zeros((len(row_p), LENGTHS)), np.zeros((len(row_p), LENGTHS))
    rate_p4[:, 0], whole_p4[:, 0] = square_BT[row_p, start_p - 1], pair_2p[0] == pair_2p[1]
    path_pi, alive = pair_2p[0][:, None], np.flatnonzero(pair_2p[0] == pair_2p[1])
    for step in range(1, LENGTHS):
        token_p, agree_p = np.zeros(len(row_p), path_pi.dtype), np.zeros(len(row_p), bool)
        for here, count, width in _groups_by_width(alive, start_p + step, tokens_BT.shape[1], model.chunk, at_once):
            context_gT = branches(tokens_BT, row_p[here], start_p[here], path_pi[here])
            logits_gV = _logits_at(model, context_gT[:, :width], start_p[here] + step - 1)
            rate_p4[here[:count], step] = np.asarray(_square_sum(logits_gV))[:count]
            if step < LENGTHS - 1:
                pair_2g = np.asarray(draw(step, text_row_B[row_p[here]], start_p[here], logits_gV))[:, :count]
                token_p[here[:count]], agree_p[here[:count]] = pair_2g[0], pair_2g[0] == pair_2g[1]
        whole_p4[:, step], alive = agree_p, np.flatnonzero(agree_p)
        path_pi = np.concatenate([path_pi, token_p[:, None]], axis=1)
    return np.asarray(_chain(rate_p4[..., None], whole_p4))


def _groups_by_width(
    alive: np.ndarray, length_p: np.ndarray, T: int, chunk: int, at_once: int
) -> Iterator[tuple[np.ndarray, int, int]]:
    """(positions, how many of them are new, tokens to read): `at_once` contexts that fit one width at a time.

    Widths are quarters of a row, in whole chunks: few programs to compile, and 5/8 of the tokens on average.
    """
    quarter = chunk * -(-T // (4 * chunk))
    width_p = np.minimum(-(-length_p // quarter) * quarter, T)
    for width in np.unique(width_p[alive]):
        wide = alive[width_p[alive] == width]
        for index, count in groups(len(wide), at_once):
            yield wide[index], count, int(width)


def _logits_at(model: NextToken, tokens_pT: np.ndarray, place_p: np.ndarray) -> Array:
    if model.logits_at is not None:
        return model.logits_at(jnp.asarray(tokens_pT), jnp.asarray(place_p))
    return _take(model.logits(jnp.asarray(tokens_pT)), jnp.asarray(place_p))


@jax.jit
def _take(logits_pTV: Array, place_p: Array) -> Array:
    return jnp.take_along_axis(logits_pTV, place_p[:, None, None], axis=1)[:, 0]


@jax.jit
def _rows(logits_BTV: Array, row_g: Array, place_g: Array) -> Array:
    return logits_BTV[row_g, place_g]


@jax.jit
def _square_sum(logits_pV: Array) -> Array:
    return jnp.exp(2 * _log_p(logits_pV)).sum(axis=-1)


@jax.jit
def _draw_pairs(root: Array, step: int, row_p: Array, start_p: Array, logits_pV: Array) -> Array:
    """Keys by row of the text, start and step, so that no batch size changes a draw."""

    def one(row: Array, start: Array, logits_V: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(root, row), start), step)
        # "high": plain float32 noise would never draw the rarest tokens of a large vocabulary.
        return jax.random.categorical(key, _log_p(logits_V), shape=(2,), mode="high")

    return jax.vmap(one)(row_p, start_p, logits_pV).T


def _log_p(logits_V: Array) -> Array:
    return jax.nn.log_softmax(logits_V.astype(jnp.promote_types(logits_V.dtype, jnp.float32)), axis=-1)
