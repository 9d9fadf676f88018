"""Generation: prompts in, tokens out, one cached step at a time for a whole batch.

Shapes: B rows, D width, V vocabulary. Row b's token i is drawn with fold_in(fold_in(key(seed), b), i), so that a row's
draws depend on nothing but its place and its own text. A row ends at the first of: the end-of-text token (not
returned), a stop string (cut off, with what follows), `max_new` tokens.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ncp_jax.data.tokenizer import Tokenizer
from ncp_jax.generate.decoder import ROLLBACK, Decoder, decoder_of, prefill
from ncp_jax.generate.sampling import Sampling, draw_rows, row_keys
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
from ncp_jax.models.llama import Llama
from ncp_jax.models.ncp.cached import History
from ncp_jax.models.ncp.model import NCP
from ncp_jax.models.olmo3 import Olmo3
from ncp_jax.nn.block import one_array_per_layer

PIECE = 512  # prompt tokens per prefill call


class Engine:
    """A model ready to generate: its compiled functions and its weights, laid out for decoding."""

    def __init__(
        self,
        model: NCP | Olmo3 | Llama,
        params: Any,
        *,
        capacity: int,
        tokenizer: Tokenizer | None = None,
        history: History = "encoder",
        rollback: int = ROLLBACK,
    ):
        check_tokenizer(tokenizer, model.config.vocab)
        self.decoder: Decoder = decoder_of(model, capacity, rollback=rollback, history=history)
        self.params, self.tokenizer = one_array_per_layer(params), tokenizer
        self._extend = jax.jit(self.decoder.extend, static_argnums=4, donate_argnums=1)
        self._step = jax.jit(partial(_step, self.decoder), static_argnums=5, donate_argnums=1)
        self._first = jax.jit(_choose, static_argnums=3)

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new: int,
        how: Sampling = Sampling(),
        stop: Sequence[str] = (),
    ) -> list[Completion]:
        """Continue every prompt. Raises ConfigError before any device step for what cannot be continued."""
        events = self.stream(prompts, max_new=max_new, how=how, stop=stop)
        return completions(events, len(prompts), self.tokenizer)

    def stream(
        self,
        prompts: Prompts,
        *,
        max_new: int,
        how: Sampling = Sampling(),
        stop: Sequence[str] = (),
    ) -> Iterator[Event]:
        """The same, event by event, in the order in which tokens are drawn."""
        how.check()
        check_request(max_new, stop, self.tokenizer)
        ids = encoded(prompts, self.tokenizer)
        check_prompts(ids, self.decoder.vocab, self.decoder.capacity, max_new)
        return self._events(ids, max_new, how, stop)

    def _events(self, ids: list[list[int]], max_new: int, how: Sampling, stop: Sequence[str]) -> Iterator[Event]:
        cache, last_BD = prefill(self.decoder, self._extend, self.params, ids, PIECE)
        rows = [Row(row, self.tokenizer, stop) for row in range(len(ids))]
        key = jax.random.key(how.seed)
        token_B = self._first(self.params, last_BD, row_keys(key, len(ids), 0), how)
        for index in range(max_new):
            drawn = np.asarray(token_B)
            for row in rows:
                if row.reason is None:
                    yield from row.take(int(drawn[row.number]), last=index == max_new - 1)
            active_B = np.array([row.reason is None for row in rows])
            if not active_B.any():
                return
            token_B, cache = self._step(self.params, cache, token_B, active_B, row_keys(key, len(ids), index + 1), how)


def _step(decoder: Decoder, params: Any, cache: Any, token_B: Array, active_B: Array, keys_B: Array, how: Sampling):
    """Read each active row's newest token and draw its next."""
    out_B1D, cache = decoder.extend(params, cache, token_B[:, None], active_B.astype(jnp.int32), False)
    return _choose(params, out_B1D[:, 0], keys_B, how), cache


def _choose(params: Any, state_BD: Array, keys_B: Array, how: Sampling) -> Array:
    wide = jnp.promote_types(state_BD.dtype, jnp.float32)
    head_DV = params["head"]["kernel"].astype(state_BD.dtype)
    return draw_rows(jnp.matmul(state_BD, head_DV, preferred_element_type=wide), keys_B, how)
