"""Generation: prompts in, tokens out, one cached step at a time for a whole batch.

Shapes: B rows, D width, V vocabulary. Row b's token i is drawn with fold_in(fold_in(key(seed), b), i), so that a row's
draws depend on nothing but its place and its own text. A row ends at the first of: the end-of-text token (not
returned), a stop string (cut off, with what follows), `max_new` tokens.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ncp_jax.config import ConfigError
from ncp_jax.data.tokenizer import Tokenizer
from ncp_jax.generate.decoder import ROLLBACK, Decoder, check_prompts, decoder_of, prefill
from ncp_jax.generate.sampling import Sampling, draw_rows
from ncp_jax.models.ncp.cached import History
from ncp_jax.models.ncp.model import NCP
from ncp_jax.models.olmo3 import Olmo3
from ncp_jax.nn.block import one_array_per_layer

REPLACEMENT = "\ufffd"  # what bytes decode to while a character is still being spelled
PIECE = 512  # prompt tokens per prefill call

Reason = Literal["end", "stop", "length"]


class Completion(NamedTuple):
    """What was generated for one prompt. `text` is None without a tokenizer."""

    tokens: list[int]
    text: str | None
    reason: Reason


class Event(NamedTuple):
    """Something new in one row: a piece of text ready to show, or (text "", reason) its end."""

    row: int
    token: int | None
    text: str
    reason: Reason | None


class Engine:
    """A model ready to generate: its compiled functions and its weights, laid out for decoding."""

    def __init__(
        self,
        model: NCP | Olmo3,
        params: Any,
        *,
        capacity: int,
        tokenizer: Tokenizer | None = None,
        history: History = "encoder",
        rollback: int = ROLLBACK,
    ):
        if tokenizer is not None and tokenizer.size > model.config.vocab:
            raise ConfigError(f"the tokenizer has {tokenizer.size} ids, the model knows {model.config.vocab}")
        self.decoder: Decoder = decoder_of(model, capacity, rollback=rollback, history=history)
        self.params, self.tokenizer = one_array_per_layer(params), tokenizer
        self._extend = jax.jit(self.decoder.extend, static_argnums=4, donate_argnums=1)
        self._step = jax.jit(partial(_step, self.decoder), static_argnums=5, donate_argnums=1)
        self._first = jax.jit(_choose, static_argnums=3)

    def generate(
        self,
        prompts: Sequence[str] | Sequence[list[int]],
        *,
        max_new: int,
        how: Sampling = Sampling(),
        stop: Sequence[str] = (),
    ) -> list[Completion]:
        """Continue every prompt. Raises ConfigError before any device step for what cannot be continued."""
        count = len(prompts)
        tokens: list[list[int]] = [[] for _ in range(count)]
        texts, reasons = [""] * count, ["length"] * count
        for event in self.stream(prompts, max_new=max_new, how=how, stop=stop):
            if event.token is not None:
                tokens[event.row].append(event.token)
            texts[event.row] += event.text
            if event.reason is not None:
                reasons[event.row] = event.reason
        shown = texts if self.tokenizer is not None else [None] * count
        return [Completion(*parts) for parts in zip(tokens, shown, reasons, strict=True)]  # type: ignore[arg-type]

    def stream(
        self,
        prompts: Sequence[str] | Sequence[list[int]],
        *,
        max_new: int,
        how: Sampling = Sampling(),
        stop: Sequence[str] = (),
    ) -> Iterator[Event]:
        """The same, event by event, in the order in which tokens are drawn."""
        how.check()
        if max_new < 1:
            raise ConfigError(f"asked for {max_new} new tokens; ask for at least 1")
        if stop and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer; give one, or stop by the end-of-text token alone")
        ids = [self._encode(prompt) for prompt in prompts]
        check_prompts(self.decoder, ids, max_new)
        return self._events(ids, max_new, how, stop)

    def _events(self, ids: list[list[int]], max_new: int, how: Sampling, stop: Sequence[str]) -> Iterator[Event]:
        cache, last_BD = prefill(self.decoder, self._extend, self.params, ids, PIECE)
        rows = [_Row(row, self.tokenizer, stop) for row in range(len(ids))]
        key = jax.random.key(how.seed)
        token_B = self._first(self.params, last_BD, _row_keys(key, len(ids), 0), how)
        for index in range(max_new):
            drawn = np.asarray(token_B)
            for row in rows:
                if row.reason is None:
                    yield from row.take(int(drawn[row.number]), last=index == max_new - 1)
            active_B = np.array([row.reason is None for row in rows])
            if not active_B.any():
                return
            token_B, cache = self._step(self.params, cache, token_B, active_B, _row_keys(key, len(ids), index + 1), how)

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ConfigError("a prompt of text needs a tokenizer; give one, or prompts of token ids")
        return self.tokenizer.encode(prompt)


class _Row:
    """One row's text as it grows, and why it ended."""

    def __init__(self, number: int, tokenizer: Tokenizer | None, stop: Sequence[str]):
        self.number, self.tokenizer, self.stop = number, tokenizer, stop
        self.tokens: list[int] = []
        self.shown = 0
        self.reason: Reason | None = None

    def take(self, token: int, last: bool) -> Iterator[Event]:
        if self.tokenizer is not None and token == self.tokenizer.eos:
            yield self._end("end", self._text())
            return
        self.tokens.append(token)
        text = self._text()
        cut = min((place for place in map(text.find, self.stop) if place >= 0), default=None)
        if cut is not None:
            yield Event(self.number, token, "", None)
            yield self._end("stop", text[:cut])
            return
        yield Event(self.number, token, self._show(text[: self._safe(text)]), None)
        if last:
            yield self._end("length", text)

    def _text(self) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(self.tokens)

    def _safe(self, text: str) -> int:
        """How much may be shown: no unfinished character, nothing that may yet become a stop string."""
        end = len(text.rstrip(REPLACEMENT))
        for stop in self.stop:
            for size in range(min(len(stop) - 1, end), 0, -1):
                if text[:end].endswith(stop[:size]):
                    end -= size
                    break
        return end

    def _show(self, text: str) -> str:
        new = text[self.shown :]
        self.shown = max(self.shown, len(text))
        return new

    def _end(self, reason: Reason, text: str) -> Event:
        self.reason = reason
        return Event(self.number, None, self._show(text), reason)


def _step(decoder: Decoder, params: Any, cache: Any, token_B: Array, active_B: Array, keys_B: Array, how: Sampling):
    """Read each active row's newest token and draw its next."""
    out_B1D, cache = decoder.extend(params, cache, token_B[:, None], active_B.astype(jnp.int32), False)
    return _choose(params, out_B1D[:, 0], keys_B, how), cache


def _choose(params: Any, state_BD: Array, keys_B: Array, how: Sampling) -> Array:
    wide = jnp.promote_types(state_BD.dtype, jnp.float32)
    head_DV = params["head"]["kernel"].astype(state_BD.dtype)
    return draw_rows(jnp.matmul(state_BD, head_DV, preferred_element_type=wide), keys_B, how)


def _row_keys(key: Array, rows: int, index: int) -> Array:
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), index))(jnp.arange(rows))
