"""A bigram world for scores: every n-gram probability and collision in closed form, as a model and as a sampler."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ncp_jax.evaluate.blocks import BlockSampler
from ncp_jax.evaluate.brier_rows import cut
from ncp_jax.evaluate.next_token import NextToken

VOCAB = 6
_rng = np.random.default_rng(7)
WORLD = _rng.dirichlet(np.full(VOCAB, 0.5), VOCAB)  # what the text follows
BELIEFS = {  # what models think
    "fair": 0.7 * WORLD + 0.3 * _rng.dirichlet(np.full(VOCAB, 0.5), VOCAB),
    "poor": 0.4 * WORLD + 0.6 * _rng.dirichlet(np.full(VOCAB, 0.5), VOCAB),
    "wrong": np.eye(VOCAB)[WORLD.argmin(axis=1)],  # sure of what hardly happens
}


def text(documents: int, length: int, seed: int) -> list[np.ndarray]:
    rng, cdf = np.random.default_rng(seed), WORLD.cumsum(axis=1)
    token = rng.integers(0, VOCAB, documents)
    found = [token]
    for _ in range(length - 1):
        token = (rng.random(documents)[:, None] > cdf[token]).sum(axis=1).clip(max=VOCAB - 1)
        found.append(token)
    return list(np.stack(found, axis=1))


def exact_parts(rows, row_P, start_P) -> tuple[np.ndarray, np.ndarray]:
    """(accuracy, collision) [P, 4] of the model at each position: products along the text, powers of the squares."""
    place_P4 = start_P[:, None] + np.arange(4)
    before, after = rows.tokens_NT[row_P[:, None], place_P4 - 1], rows.tokens_NT[row_P[:, None], place_P4]
    belief = BELIEFS["fair"]
    square, reach = belief**2, [np.ones(VOCAB)]
    for _ in range(4):
        reach.append(square @ reach[-1])
    return np.cumprod(belief[before, after], axis=1), np.stack(reach[1:], axis=1)[before[:, 0]]


@functools.cache
def model(belief: str = "fair", **named) -> NextToken:
    table = jnp.log(jnp.asarray(BELIEFS[belief]))
    return NextToken(jax.jit(lambda tokens_BT: table[tokens_BT]), VOCAB, **named)


@functools.cache
def sampler(chunk: int, belief: str = "fair", everywhere: bool = True, **named) -> BlockSampler:
    cdf = jnp.asarray(BELIEFS[belief].cumsum(axis=1))

    def block(last, key):
        def step(token, uniform):
            token = jnp.minimum((uniform > cdf[token]).sum(), VOCAB - 1).astype(last.dtype)
            return token, token

        return jax.lax.scan(step, last, jax.random.uniform(key, chunk))[1]

    def after(context, keys_Rp):
        tokens_pT, length_p = context
        last_p = jnp.take_along_axis(tokens_pT, length_p[:, None] - 1, axis=1)[:, 0]
        return jax.vmap(lambda keys_p: jax.vmap(block)(last_p, keys_p))(keys_Rp)

    def rows(tokens_BT, keys_RB):
        last_BM = tokens_BT[:, chunk - 1 : -1 : chunk]
        keys_RBM = jax.vmap(jax.vmap(lambda key: jax.random.split(key, last_BM.shape[1])))(keys_RB)
        return jax.vmap(lambda keys_BM: jax.vmap(jax.vmap(block))(last_BM, keys_BM))(keys_RBM)

    return BlockSampler(chunk, VOCAB, jax.jit(after), jax.jit(rows) if everywhere else None, **named)


def rows(documents: int = 12, length: int = 240, block: int = 48, seed: int = 0, packing="official"):
    return cut(text(documents, length, seed), block, packing)
