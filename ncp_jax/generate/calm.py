"""Generation by chunks: a CALM model and its autoencoder, one tempered chunk of K tokens per row and step.

Shapes: B rows, N draws, K = k tokens per chunk, m chunks of a prompt, D width. Row b's chunk i is drawn with
fold_in(fold_in(key(seed), b), i), so that a row's draws depend on nothing but its place and its own text. What goes
back into the context is the chunk's tokens, not its latent vector. A row ends at the first of: the end-of-text token
(not returned, nor what follows it in its chunk), a stop string (cut off, with what follows), `max_new` tokens.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ncp_jax.config import ConfigError
from ncp_jax.data.tokenizer import Tokenizer
from ncp_jax.generate.decoder import pieces
from ncp_jax.generate.sampling import row_keys
from ncp_jax.generate.spelling import Outlined
from ncp_jax.generate.temperature import Begun, Tempered, Tempering, draw_blocks
from ncp_jax.generate.text import (
    Completion,
    Event,
    Prompts,
    Row,
    check_prompts,
    check_request,
    check_tokenizer,
    completions,
    encoded,
)
from ncp_jax.generate.words import cut_table, likeliest
from ncp_jax.models.calm import cached
from ncp_jax.models.calm.autoencoder import Autoencoder
from ncp_jax.models.calm.call import call
from ncp_jax.models.calm.heads import one_array_per_block
from ncp_jax.models.calm.model import Calm
from ncp_jax.models.calm.sampling import keyed_latents
from ncp_jax.nn.block import one_array_per_layer
from ncp_jax.nn.llama_cache import LlamaCache

PIECE = 128  # prompt chunks per prefill call
# Logits that exist at one time, and draws: few where a row may be done after any of them, many where all are wanted.
LOGITS = {"exact": 1 << 21, "vote": 1 << 23}
DRAWS = {"exact": 16, "vote": 50}
# The authors advise T <= 1/2 for fluent text.
DEFAULT = Tempering(0.5, "vote")

# What becomes of a prompt's n mod K tokens beyond its whole chunks. The chunk that they begin is not theirs alone, and
# its model draws chunks whole.
# trim: the prompt's first n mod K tokens are left out instead. Exact for the text that is left, at no cost, and what is
#     lost is what lies farthest back; therefore the default.
# condition: every token is kept, and the first chunk is drawn, by Algorithm 1 whatever the method, until it begins so.
#     Exact for the whole prompt, but a beginning of probability p takes 1/p times the draws, and after max_draws it is
#     put right by force (temperature.py, `exact`).
# pad: filled up with pads, which the model then reads (the official code; its language models never saw any).
Partial = Literal["trim", "condition", "pad"]


class Start(NamedTuple):
    """A prompt as chunks, and the tokens that begin the next one."""

    chunks_mK: np.ndarray
    begun: list[int]


class Params(NamedTuple):
    """Weights as a step reads them."""

    model: Any  # one array per layer
    frozen: Any  # the autoencoder's, likewise
    table: tuple[Array, ...]  # the autoencoder's token table in slices


class Work(NamedTuple):
    """What the chunks of a stream have taken so far."""

    chunks: int = 0
    draws: int = 0
    exact: int = 0  # chunks that follow the tempered law exactly


class CalmEngine:
    """A model ready to generate: its compiled functions and its weights, laid out for decoding.

    `capacity`: tokens per row, prompt included. `work` counts the draws of the newest stream.
    """

    def __init__(
        self,
        model: Calm,
        params: Any,
        frozen: Any,
        *,
        capacity: int,
        tokenizer: Tokenizer | None = None,
        partial: Partial = "trim",
    ):
        c = model.config
        check_tokenizer(tokenizer, c.vocab)
        if capacity < 1:
            raise ConfigError(f"a cache needs capacity >= 1, got {capacity}")
        if partial == "pad" and c.autoencoder.pad is None:
            raise ConfigError("model.autoencoder.pad is missing, so nothing can fill up a chunk; use 'trim'")
        self.model, self.tokenizer, self.partial, self.capacity = model, tokenizer, partial, capacity
        ours = one_array_per_layer(params) | {"generator": one_array_per_block(params["generator"])}
        self.params = Params(ours, one_array_per_layer(frozen), cut_table(frozen["embed"]["table"]))
        self.work = Work()
        self._extend = jax.jit(functools.partial(_extend, model), donate_argnums=1)
        self._step = jax.jit(functools.partial(_step, model), static_argnums=7, donate_argnums=1)

    def generate(
        self, prompts: Prompts, *, max_new: int, how: Tempering = DEFAULT, seed: int = 0, stop: Sequence[str] = ()
    ) -> list[Completion]:
        """Continue every prompt. Raises ConfigError before any device step for what cannot be continued."""
        events = self.stream(prompts, max_new=max_new, how=how, seed=seed, stop=stop)
        return completions(events, len(prompts), self.tokenizer)

    def stream(
        self, prompts: Prompts, *, max_new: int, how: Tempering = DEFAULT, seed: int = 0, stop: Sequence[str] = ()
    ) -> Iterator[Event]:
        """The same, event by event, in the order in which chunks are drawn. Pads count, but are not shown."""
        check_request(max_new, stop, self.tokenizer)
        ids = encoded(prompts, self.tokenizer)
        check_prompts(ids, self.model.config.vocab, self.capacity, max_new)
        starts = [self.start(row, prompt) for row, prompt in enumerate(ids)]
        return self._events(starts, max_new, how, seed, stop)

    def paced(self, how: Tempering, begun: bool = False) -> Tempering:
        """Settings with the number of draws that are spelt out together. A begun chunk is always drawn by `exact`."""
        c, method = self.model.config, "exact" if begun else how.method
        together = min(max(LOGITS[method] // (c.chunk * c.vocab), 1), DRAWS[method])
        return dataclasses.replace(how, at_once=how.at_once or together)

    def start(self, row: int, prompt: list[int]) -> Start:
        """A prompt cut into chunks. Raises ConfigError for one without a whole chunk: the first is never predicted."""
        K, pad = self.model.config.chunk, self.model.config.autoencoder.pad
        rest = len(prompt) % K
        if self.partial == "pad" and rest:
            prompt = [*prompt, *[pad] * (K - rest)]  # type: ignore[list-item]
        elif len(prompt) < K:
            raise ConfigError(
                f"prompt {row} has {len(prompt)} tokens and a chunk has {K}: the model predicts chunks after the first "
                f"and cannot draw this one; give at least {K} tokens"
            )
        begun = prompt[len(prompt) - rest :] if self.partial == "condition" else []
        whole = prompt[rest:] if self.partial == "trim" else prompt[: len(prompt) - len(begun)]
        return Start(np.asarray(whole, np.int32).reshape(-1, K), begun)

    def _events(
        self, starts: list[Start], max_new: int, how: Tempering, seed: int, stop: Sequence[str]
    ) -> Iterator[Event]:
        c, B = self.model.config, len(starts)
        cache = cached.empty_cache(self.model, B, -(-self.capacity // c.chunk))
        for part_BmK, count_B in pieces([start.chunks_mK[:-1] for start in starts], PIECE):
            cache = self._extend(self.params, cache, part_BmK, count_B)
        rows = [Row(row, self.tokenizer, stop, c.autoencoder.pad) for row in range(B)]
        known_B, left_B, live_B = np.array([len(s.begun) for s in starts]), np.full(B, max_new), np.ones(B, bool)
        tokens_BK: Any = np.stack([start.chunks_mK[-1] for start in starts])
        key, index, self.work = jax.random.key(seed), 0, Work()
        while live_B.any():
            # Also where nothing has begun: no row may be drawn otherwise because of another's prompt.
            begun = _begun(starts, c.chunk) if index == 0 and self.partial == "condition" else None
            paced = self.paced(how, begun is not None)
            found, cache = self._step(self.params, cache, tokens_BK, live_B, key, np.int32(index), begun, paced)
            tokens_BK = found.tokens_BK
            self._count(found, live_B)
            for row, block in zip(rows, np.asarray(tokens_BK).tolist(), strict=True):
                if row.reason is None:
                    new = block[known_B[row.number] if index == 0 else 0 :]
                    yield from _take(row, new, left_B)
            live_B, index = np.array([row.reason is None for row in rows]), index + 1

    def _count(self, found: Tempered, live_B: np.ndarray) -> None:
        draws, exact = int(np.asarray(found.draws_B)[live_B].sum()), int(np.asarray(found.exact_B)[live_B].sum())
        self.work = Work(self.work.chunks + int(live_B.sum()), self.work.draws + draws, self.work.exact + exact)


def _take(row: Row, tokens: list[int], left_B: np.ndarray) -> Iterator[Event]:
    """A chunk's new tokens, up to what ends the row."""
    for token in tokens:
        left_B[row.number] -= 1
        yield from row.take(token, last=left_B[row.number] == 0)
        if row.reason is not None:
            return


def _begun(starts: list[Start], K: int) -> Begun:
    tokens = [start.begun + [0] * (K - len(start.begun)) for start in starts]
    return Begun(np.asarray(tokens, np.int32), np.array([len(start.begun) for start in starts], np.int32))  # type: ignore[arg-type]


def _extend(model: Calm, params: Params, cache: LlamaCache, tokens_Bmk: Array, count_B: Array) -> LlamaCache:
    return cached.extend(model, params.model, params.frozen, cache, tokens_Bmk, count_B)[1]


def _step(
    model: Calm, params: Params, cache: LlamaCache, tokens_Bk: Array, live_B: Array, key: Array, index: Array,
    begun: Begun | None, how: Tempering,
) -> tuple[Tempered, LlamaCache]:  # fmt: skip
    """Read each live row's newest chunk and draw its next."""
    count_B = live_B.astype(jnp.int32)
    h_B1D, cache = cached.extend(model, params.model, params.frozen, cache, tokens_Bk[:, None], count_B)
    condition = call(model, params.model, "condition", h_B1D[:, 0])
    keys_B = row_keys(key, len(tokens_Bk), index)
    return draw_blocks(sampler(model, params), condition, keys_B, how, live_B, begun), cache


def sampler(model: Calm, params: Params) -> Outlined:
    """Chunks after states whose `condition` is given, outlined by what the autoencoder unfolds them to, [N, B, k, D].

    What it computes for each token alone, half of its layers, is left to the spelling of those that matter.
    """
    c, autoencoder = model.config, Autoencoder(model.config.autoencoder, model.dtype)

    def draw(condition: Any, keys_NB: Array) -> Array:
        return call(autoencoder, params.frozen, "unfold", keyed_latents(c, model, params.model, condition, keys_NB))

    def spell(x_RD: Array) -> Array:
        return likeliest(params.table, call(autoencoder, params.frozen, "finish", x_RD))

    return Outlined(draw, spell)
