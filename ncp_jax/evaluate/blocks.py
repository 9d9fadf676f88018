"""BrierLM of a block sampler: a model known by nothing but the blocks of K tokens that it draws.

Shapes: B rows, T tokens per row, L = T / K blocks, R samples, M = L - 1 blocks that have a context, S scored starts,
P = B S, p contexts that leave the text, s = ceil(4 / K) blocks per position.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ncp_jax.config import ConfigError
from ncp_jax.evaluate.brier import Protocol, Scores, gather
from ncp_jax.evaluate.brier_rows import (
    RowBatch,
    Rows,
    batches,
    block_starts,
    blocks_for,
    branches,
    check_ids,
    groups,
    scored,
)
from ncp_jax.ops.scoring import LENGTHS, chain, leader_rate, pair_rate, prefix_match

Estimator = Literal["all", "official"]

_chain = jax.jit(chain)


class BlockSampler(NamedTuple):
    """A black box that draws blocks. Sample r of row b depends on keys[r, b] and on its context, on nothing else.

    after((tokens_pT, length_p), keys_Rp) -> int [R, p, K]: the block that follows each row's first `length` tokens, a
        multiple of K; what stands behind them in `tokens` must not matter.
    everywhere(tokens_BT, keys_RB) -> int [R, B, M, K]: blocks 1..L-1, each after the true tokens before it, from one
        pass over the row. None: made of `after`, one row per block, which costs M times as much.
    Compile them yourself: they are called with arrays of few shapes.
    """

    chunk: int  # K
    vocab: int
    after: Callable[[tuple[Array, Array], Array], Array]
    everywhere: Callable[[Array, Array], Array] | None = None
    name: str = "block sampler"
    tokenizer: str = "unnamed"
    dtype: str = "float32"


def score_blocks(
    sampler: BlockSampler,
    rows: Rows,
    *,
    samples: int = 8,
    seed: int = 0,
    batch: int = 1,
    at_once: int = 16,
    estimator: Estimator = "all",
) -> Scores:
    """Parts of every scored position, from `samples` draws per block.

    K >= 4: the first four tokens of each block. K < 4: chains of s blocks. P(y) is the product of the blocks' rates,
    each drawn after the true tokens; the collision goes on along the first sample, weighted by the share of the others
    that agree with it (s - 1 further draws, only where that share is not 0).
    Args:
        batch: rows at a time; at_once: contexts at a time, where rows leave the text. Neither changes a score.
        estimator: `official` takes two samples, multiplies their matches one by one, and leaves out the last start
            where K < 4; for parity with the released code (CALM repository, eval_brier).
    Raises ConfigError for impossible sizes, ScoreError for ids that the sampler does not have.
    """
    if samples < 2:
        raise ConfigError(f"{samples} sample(s) per position give no collision; use at least 2")
    check_ids(rows, sampler.vocab, sampler.name)
    official = estimator == "official"
    R, T, K = (2 if official else samples), rows.tokens_NT.shape[1], sampler.chunk
    start_S = block_starts(T, K)
    root, accuracy, collision = jax.random.key(seed), [], []
    for part in batches(rows, batch):
        drawn_RBMK = _everywhere(sampler, part, root, R, at_once)
        blocks_BLK = jnp.asarray(part.tokens_BT.reshape(batch, -1, K))
        accuracy_Pn = _accuracy(jnp.asarray(drawn_RBMK), blocks_BLK, len(start_S), official)
        collision_Pn = _collision(sampler, rows, part, root, drawn_RBMK, start_S, at_once)
        accuracy.append(np.asarray(accuracy_Pn).reshape(batch, -1, LENGTHS)[: part.new])
        collision.append(np.asarray(collision_Pn).reshape(batch, -1, LENGTHS)[: part.new])
    found = np.concatenate(accuracy), np.concatenate(collision)
    if official and K < LENGTHS:
        start_S, found = start_S[:-1], (found[0][:, :-1], found[1][:, :-1])
    counted_NS = scored(rows, np.arange(len(rows.tokens_NT)), start_S)
    protocol = Protocol(
        model=sampler.name, tokenizer=sampler.tokenizer, dtype=sampler.dtype, packing=rows.packing, block=T, chunk=K,
        rows=len(rows.tokens_NT), starts=f"blocks of {K}", first_start=int(start_S[0]) if len(start_S) else 0,
        samples=R, estimator=estimator, seed=seed,
    )  # fmt: skip
    return gather(rows, start_S, counted_NS, *found, protocol)


def _everywhere(sampler: BlockSampler, part: RowBatch, root: Array, R: int, at_once: int) -> np.ndarray:
    """Samples of all blocks but the first, int [R, B, M, K]."""
    B, T = part.tokens_BT.shape
    M = T // sampler.chunk - 1
    if sampler.everywhere is not None:
        keys_RB = _keys(root, jnp.asarray(part.row_B), jnp.zeros(B, int), 0, R)
        drawn = np.asarray(sampler.everywhere(jnp.asarray(part.tokens_BT), keys_RB))
    else:
        row_p, block_p = np.divmod(np.arange(B * M), M)
        length_p = (block_p + 1) * sampler.chunk
        draws = _after(sampler, part.tokens_BT[row_p], length_p, (root, part.row_B[row_p], length_p, 0), R, at_once)
        drawn = np.concatenate([drawn_RpK[:, : len(index)] for index, drawn_RpK in draws], axis=1).reshape(R, B, M, -1)
    if drawn.shape != (R, B, M, sampler.chunk):
        raise ConfigError(
            f"{sampler.name} drew blocks of shape {drawn.shape}, expected {(R, B, M, sampler.chunk)} "
            "(samples, rows, blocks but the first, chunk); mend the sampler or its chunk"
        )
    return drawn


@partial(jax.jit, static_argnums=(2, 3))
def _accuracy(drawn_RBMK: Array, blocks_BLK: Array, S: int, official: bool) -> Array:
    """Unbiased P(y), [P, 4]."""
    s = blocks_for(blocks_BLK.shape[-1])
    drawn_RPsK = jnp.stack([_flat(drawn_RBMK[:, :, j : j + S], 1) for j in range(s)], axis=2)
    target_PsK = jnp.stack([_flat(blocks_BLK[:, 1 + j : 1 + j + S], 0) for j in range(s)], axis=1)
    match_RPsK = prefix_match(drawn_RPsK, target_PsK).astype(jnp.result_type(float))
    if official:
        return chain(match_RPsK, match_RPsK[..., -1]).mean(axis=0)
    rate_PsK = match_RPsK.mean(axis=0)
    return chain(rate_PsK, rate_PsK[..., -1])


def _collision(
    sampler: BlockSampler, rows: Rows, part: RowBatch, root: Array, drawn_RBMK: np.ndarray, start_S: np.ndarray,
    at_once: int,
) -> Array:  # fmt: skip
    """Unbiased collisions, [P, 4]."""
    R, B, _, K = drawn_RBMK.shape
    S, s = len(start_S), blocks_for(K)
    first_RPK = drawn_RBMK[:, :, :S].reshape(R, B * S, K)
    rate_PsK, whole_Ps = np.zeros((B * S, s, K)), np.zeros((B * S, s))
    rate_PsK[:, 0], whole_Ps[:, 0] = _agreement(jnp.asarray(first_RPK))
    row_P, length_P = np.repeat(np.arange(B), S), np.tile(start_S, B)
    alive_P = (whole_Ps[:, 0] > 0) & (row_P < part.new) & scored(rows, part.row_B, start_S).ravel()
    path_Pi = first_RPK[0]
    for j in range(1, s):
        alive = np.flatnonzero(alive_P)
        if not len(alive):
            break
        context_pT = branches(part.tokens_BT, row_P[alive], length_P[alive], path_Pi[alive])
        source = (root, part.row_B[row_P[alive]], length_P[alive], j)
        draws = _after(sampler, context_pT, length_P[alive] + j * K, source, R, at_once)
        step_PK = np.zeros((B * S, K), path_Pi.dtype)
        for index, drawn_RpK in draws:
            rate_pK, whole_p = _agreement(jnp.asarray(drawn_RpK))
            here, new = alive[index], slice(len(index))
            rate_PsK[here, j], whole_Ps[here, j], step_PK[here] = rate_pK[new], whole_p[new], drawn_RpK[0, new]
        path_Pi, alive_P = np.concatenate([path_Pi, step_PK], axis=1), alive_P & (whole_Ps[:, j] > 0)
    return _chain(rate_PsK, whole_Ps)


@jax.jit
def _agreement(samples_RPK: Array) -> tuple[Array, Array]:
    return pair_rate(samples_RPK), leader_rate(samples_RPK)


def _after(
    sampler: BlockSampler, tokens_pT: np.ndarray, length_p: np.ndarray,
    source: tuple[Array, np.ndarray, np.ndarray, int], R: int, at_once: int,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:  # fmt: skip
    """(contexts, the sampler's blocks after them int [R, at_once, K]); only the first of a last group are new.

    source: what keys are made of, see `_keys`.
    """
    root, row_p, start_p, step = source
    for index, count in groups(len(tokens_pT), at_once):
        keys_Rp = _keys(root, jnp.asarray(row_p[index]), jnp.asarray(start_p[index]), step, R)
        context = jnp.asarray(tokens_pT[index]), jnp.asarray(length_p[index])
        yield index[:count], np.asarray(sampler.after(context, keys_Rp))


def _flat(x: Array, axis: int) -> Array:
    """Merge axes `axis` and `axis + 1`."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


@partial(jax.jit, static_argnums=4)
def _keys(root: Array, row_p: Array, start_p: Array, step: int, R: int) -> Array:
    """One key per sample and context, [R, p]: by row of the text, step of the chain, place in the row, sample."""

    def one(row: Array, start: Array, sample: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(root, row), step), start)
        return jax.random.fold_in(key, sample)

    contexts = jax.vmap(one, in_axes=(0, 0, None))
    return jax.vmap(contexts, in_axes=(None, None, 0))(row_p, start_p, jnp.arange(R))
