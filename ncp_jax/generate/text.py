"""Text as it grows: what was generated for each prompt, what of it may be shown already, and why it ended."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from ncp_jax.config import ConfigError
from ncp_jax.data.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what bytes decode to while a character is still being spelled

Prompts = Sequence[str] | Sequence[list[int]]
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


class Row:
    """One row's text as it grows, and why it ended. Tokens that are `pad` are passed over."""

    def __init__(self, number: int, tokenizer: Tokenizer | None, stop: Sequence[str], pad: int | None = None):
        self.number, self.tokenizer, self.stop, self.pad = number, tokenizer, stop, pad
        self.tokens: list[int] = []
        self.shown = 0
        self.reason: Reason | None = None

    def take(self, token: int, last: bool) -> Iterator[Event]:
        """What a further token brings. `last`: no other may follow."""
        if self.tokenizer is not None and token == self.tokenizer.eos:
            yield self._end("end", self._text())
            return
        if token == self.pad:
            if last:
                yield self._end("length", self._text())
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


def completions(events: Iterable[Event], rows: int, tokenizer: Tokenizer | None) -> list[Completion]:
    """All that a stream of events says, by row."""
    tokens: list[list[int]] = [[] for _ in range(rows)]
    texts, reasons = [""] * rows, ["length"] * rows
    for event in events:
        if event.token is not None:
            tokens[event.row].append(event.token)
        texts[event.row] += event.text
        if event.reason is not None:
            reasons[event.row] = event.reason
    shown = texts if tokenizer is not None else [None] * rows
    return [Completion(*parts) for parts in zip(tokens, shown, reasons, strict=True)]  # type: ignore[arg-type]


def check_tokenizer(tokenizer: Tokenizer | None, vocab: int) -> None:
    """Raise ConfigError for a tokenizer with ids that the model does not have."""
    if tokenizer is not None and tokenizer.size > vocab:
        raise ConfigError(f"the tokenizer has {tokenizer.size} ids, the model knows {vocab}")


def check_request(max_new: int, stop: Sequence[str], tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError for what cannot be generated."""
    if max_new < 1:
        raise ConfigError(f"asked for {max_new} new tokens; ask for at least 1")
    if stop and tokenizer is None:
        raise ConfigError("stop strings need a tokenizer; give one, or stop by the end-of-text token alone")


def encoded(prompts: Prompts, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Token ids of prompts. Raises ConfigError for text without a tokenizer."""
    ids = []
    for prompt in prompts:
        if isinstance(prompt, str) and tokenizer is None:
            raise ConfigError("a prompt of text needs a tokenizer; give one, or prompts of token ids")
        ids.append(tokenizer.encode(prompt) if isinstance(prompt, str) and tokenizer else list(prompt))
    return ids  # type: ignore[return-value]


def check_prompts(prompts: list[list[int]], vocab: int, capacity: int, new: int = 0) -> None:
    """Raise ConfigError for no prompt, an empty one, an unknown id, or one that does not fit with `new` tokens."""
    if not prompts:
        raise ConfigError("no prompts; give at least one")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {row} is empty; give at least one token to continue")
        bad = next((place for place, token in enumerate(prompt) if not 0 <= token < vocab), None)
        if bad is not None:
            raise ConfigError(f"prompt {row}, token {bad} has id {prompt[bad]}; the model knows 0..{vocab - 1}")
        if len(prompt) + new > capacity:
            raise ConfigError(
                f"prompt {row} has {len(prompt)} tokens and {new} more were asked for, the cache holds "
                f"{capacity}; ask for at most {max(capacity - len(prompt), 0)} or enlarge it"
            )
