"""Fields: a published config.json read name by name, where what is wrong, absent or left over is one error."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ncp_jax.config import ConfigError

REQUIRED: Any = object()  # no default
# An unknown field with one of these words may change what a model computes; others are bookkeeping.
MEANINGFUL = re.compile(
    r"rope|rotary|yarn|mscale|position_emb|window|sliding|chunk|concept|attn|attention|norm|softcap|scal|bias"
    r"|activation|hidden_act|expert|moe|mtp|tie_|layer_types|latent|patch|noise"
)
# Written by the base classes of transformers, or about speed and training; no effect on a model's values.
BOOKKEEPING = (
    "chunk_size_feed_forward", "add_cross_attention", "tie_encoder_decoder", "cross_attention_hidden_size",
    "output_attentions", "_attn_implementation", "attn_implementation", "_attn_implementation_autoset",
    "attention_dropout", "attention_backend", "attention_softmax_in_fp32", "apply_rope_fusion", "bias_swiglu_fusion",
    "bias_activation_fusion",
)  # fmt: skip


class Fields:
    """Readers return the value of the first of several names that is there; a field that is null counts as absent.

    Problems are collected; `check` raises them together. Until then a bad field reads as its fallback.
    """

    def __init__(self, values: Mapping[str, Any], origin: str):
        self._values, self._origin = values, origin
        self._used: set[str] = set(BOOKKEEPING)
        self.problems: list[str] = []

    def integer(self, *names: str, default: Any = REQUIRED, least: int = 1) -> Any:
        """A whole number of at least `least`."""
        value = self._take(names, default)
        if value is not default and (type(value) is not int or value < least):
            return self._wrong(names, value, f"must be a whole number of at least {least}", least)
        return least if value is REQUIRED else value

    def number(self, *names: str, default: Any = REQUIRED, above: float = 0.0) -> Any:
        """A number above `above`."""
        value = self._take(names, default)
        if value is not default and (type(value) not in (int, float) or not above < value < math.inf):
            return self._wrong(names, value, f"must be a number above {above}", above + 1)
        return above + 1 if value is REQUIRED else value if value is default else float(value)

    def choice(self, *names: str, known: Mapping[Any, Any], default: Any = REQUIRED) -> Any:
        """The entry of `known` for the value."""
        value = self._take(names, default)
        if value is default and default is not REQUIRED:
            return value
        for theirs, ours in known.items():
            if _same(value, theirs):
                return ours
        fallback = next(iter(known.values()))
        if value is REQUIRED:  # reported as missing already
            return fallback
        return self._wrong(names, value, f"must be {' or '.join(repr(theirs) for theirs in known)}", fallback)

    def exactly(self, values: Mapping[str, Any], required: bool = True) -> None:
        """Fields that can have one value only, because the model has no other form here."""
        for name, value in values.items():
            self.choice(name, known={value: value}, default=REQUIRED if required else None)

    def raw(self, *names: str, default: Any = REQUIRED) -> Any:
        """A value of any kind, for a caller that reports with `wrong`."""
        return self._take(names, default)

    def ignore(self, names: Iterable[str]) -> None:
        """Fields that say nothing about what the model computes, or that the user vouches for."""
        self._used |= set(names)

    def wrong(self, name: str, value: Any, rule: str) -> None:
        """Report a field."""
        self.problems.append(f"{name} is {value!r}; it {rule}")

    def check(self) -> None:
        """Raise ConfigError with every problem so far, and every unread field that may have a meaning."""
        for name, value in self._values.items():
            if name not in self._used and value is not None and MEANINGFUL.search(name):
                self.problems.append(self._unknown(name, value))
        if self.problems:
            lines = "".join(f"\n  {problem}" for problem in dict.fromkeys(self.problems))
            raise ConfigError(f"{self._origin} cannot be used as it stands:{lines}")

    def _take(self, names: tuple[str, ...], default: Any) -> Any:
        there = {name: self._values[name] for name in names if self._values.get(name) is not None}
        self._used |= set(names)
        if not there:
            if default is REQUIRED:
                also = f" (or {', '.join(names[1:])})" if names[1:] else ""
                self.problems.append(f"{names[0]} is missing{also}; there is no default for it")
            return default
        value = next(iter(there.values()))
        if not all(_same(value, other) for other in there.values()):
            self.problems.append(f"{' and '.join(f'{name} = {v!r}' for name, v in there.items())} disagree")
        return value

    def _wrong(self, names: tuple[str, ...], value: Any, rule: str, fallback: Any) -> Any:
        name = next(name for name in names if self._values.get(name) is not None)
        self.wrong(name, value, rule)
        return fallback

    def _unknown(self, name: str, value: Any) -> str:
        close = difflib.get_close_matches(name, self._used, n=1, cutoff=0.8)
        hint = f"did you mean {close[0]}? Otherwise " if close else ""
        return (
            f"{name} is {value!r}, a field that this importer does not know and that may change the model; {hint}"
            f"if it does not, import with --ignore-field {name}"
        )


def _same(one: Any, other: Any) -> bool:
    """Equal, where 1 is 1.0 but true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)
