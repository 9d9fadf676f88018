"""Sampling by full forward passes: the plain reference, one whole pass per token.

Shapes: T tokens so far, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ncp_jax.config import ConfigError
from ncp_jax.data.store import DataError
from ncp_jax.data.tokenizer import Tokenizer
from ncp_jax.ops.sampling import draw

# Rows are padded to a multiple of this many tokens, so that a growing text compiles a handful of times.
BUCKET = 64
REPLACEMENT = "\ufffd"  # what bytes decode to while a character is still being spelled


class Sampling(NamedTuple):
    """How tokens are drawn. Filters see the tempered distribution (ops/sampling.py)."""

    temperature: float = 0.8  # 0: greedy
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError for what no distribution can have."""
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature {self.temperature} is not a number from 0 (greedy); 1 is the model's own")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top-k {self.top_k} keeps no token; use at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p {self.top_p} is not in (0, 1]")


class Model(NamedTuple):
    """What sampling needs of a model: `forward`, (params, tokens [1, T] int32) -> logits [1, T, V], must be causal."""

    forward: Callable[[Any, Array], Array]
    params: Any
    vocab: int  # ids that it knows
    chunk: int  # rows are a multiple of this many tokens
    tokenizer: Tokenizer


def sample(model: Model, prompt: str, tokens: int, how: Sampling = Sampling()) -> Iterator[str]:
    """Pieces of text as they are drawn, up to `tokens` tokens or the end-of-text token.

    Token i is drawn with fold_in(key(seed), i). Raises ConfigError for impossible settings or an empty prompt,
    DataError for a prompt with an id that the model does not have.
    """
    how.check()
    if tokens < 1:
        raise ConfigError(f"asked for {tokens} new tokens; ask for at least 1")
    ids = model.tokenizer.encode(prompt)
    if not ids:
        raise ConfigError("the prompt is empty; give at least one character to continue")
    if max(ids) >= model.vocab:
        raise DataError(f"prompt token {ids.index(max(ids))} has id {max(ids)}, the model has {model.vocab}")
    return _pieces(model, ids, tokens, how)


def _pieces(model: Model, ids: list[int], tokens: int, how: Sampling) -> Iterator[str]:
    @jax.jit
    def next_token(params: Any, tokens_1T: Array, last: Array, key: Array) -> Array:
        return draw(model.forward(params, tokens_1T)[:, last], key, how.temperature, how.top_k, how.top_p)[0]

    key, start, shown = jax.random.key(how.seed), len(ids), 0
    for index in range(tokens):
        chosen = int(next_token(model.params, *_padded(ids, model.chunk), jax.random.fold_in(key, index)))
        if chosen == model.tokenizer.eos:
            break
        ids.append(chosen)
        text = model.tokenizer.decode(ids[start:])
        if not text.endswith(REPLACEMENT):
            yield text[shown:]
            shown = len(text)
    if len(text := model.tokenizer.decode(ids[start:])) > shown:
        yield text[shown:]  # the last character was not finished


def _padded(ids: list[int], chunk: int) -> tuple[np.ndarray, Array]:
    """Causality keeps what follows the last token from mattering, so zeros may."""
    bucket = math.lcm(BUCKET, chunk)
    length = -(-len(ids) // bucket) * bucket
    return np.asarray([ids + [0] * (length - len(ids))], np.int32), jnp.asarray(len(ids) - 1)
