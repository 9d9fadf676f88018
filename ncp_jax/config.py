"""Configs are frozen dataclasses; this file reads, writes, overrides, compares and hashes them.

A config is built by a short Python function (`configs/*.py`), changed on the command line by `key=value` pairs with
dotted keys, and stored as JSON. pydantic checks types and rejects unknown fields; this file turns its reports into
one sentence that names the field, the value, and the nearest field that exists.
"""

import dataclasses
import difflib
import hashlib
import importlib.util
import inspect
import json
import math
import sys
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform

import yaml
from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")

# Fields of a run that do not change its science: the same experiment elsewhere, watched or saved in another way, keeps
# its identity. Two say what happens to a bad step: a run that stopped at one must be able to go on.
NOT_IDENTITY = (
    "workdir", "mesh", "checkpoint", "evaluation", "data.prefetch", "data.workers", "train.log_every",
    "train.diagnose_every", "model.backbone.attention", "model.routing.tower", "optim.newton_schulz_layout",
    "train.on_bad_step", "train.gradient_ceiling", "processes",
)  # fmt: skip


class ConfigError(ValueError):
    """A configuration that cannot run. The message names the field, the value and the remedy."""


@dataclass_transform(frozen_default=True)
def frozen(cls: type[T]) -> type[T]:
    """Frozen dataclass whose unknown fields are errors."""
    cls.__pydantic_config__ = {"extra": "forbid"}  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True)(cls)


def to_dict(config: Any) -> dict:
    """Nested plain dict of a config, JSON-ready."""
    return TypeAdapter(type(config)).dump_python(config, mode="json")


def from_dict(cls: type[T], values: dict) -> T:
    """Build `cls` from a nested dict. Raises ConfigError naming every bad field."""
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem, values) for problem in error.errors())) from None


def override(config: T, pairs: list[str]) -> T:
    """Apply `a.b=value` pairs. Values are read as YAML: `1e-3`, `true`, `[1, 2]`, `null`, `text`.

    Raises ConfigError for a pair without `=`, an unknown field (with the nearest one), or a value of the wrong type.
    """
    values = to_dict(config)
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator:
            raise ConfigError(f"override '{pair}' has no '='; write key=value, for example train.steps=100")
        _assign(values, key.strip(), _parse(text))
    return from_dict(type(config), values)


def load(path: str | Path) -> Any:
    """The RunConfig that `configs/NAME.py` returns from `config()`. Accepts a path or a bare name under ./configs.

    `NAME.py:VARIANT` is what `config(VARIANT)` returns, where a file offers variants.
    """
    name, _, variant = str(path).partition(":")
    file = _find(Path(name)).resolve()
    root = str(file.parent.parent)  # configs build on one another: `from configs.ncp_nano import nano`
    if root not in sys.path:
        sys.path.insert(0, root)
    spec = importlib.util.spec_from_file_location(f"ncp_jax_config_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "config"):
        raise ConfigError(f"{file} has no function config(); see configs/ncp_nano.py for the shape of one")
    if variant and not inspect.signature(module.config).parameters:
        raise ConfigError(f"{file} has no variants; give its path without ':{variant}'")
    return module.config(variant) if variant else module.config()


def identity(config: Any) -> str:
    """Twelve hex digits naming the science of a run: everything but NOT_IDENTITY."""
    return hashlib.sha256(json.dumps(science(to_dict(config)), sort_keys=True).encode()).hexdigest()[:12]


def science(values: dict, prefix: str = "") -> dict:
    """The part of a config's dict that its identity covers."""
    return {
        key: science(value, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in values.items()
        if prefix + key not in NOT_IDENTITY
    }


def differences(ours: Any, theirs: Any, prefix: str = "") -> list[str]:
    """One line per leaf that differs between two nested dicts: `key: ours -> theirs`."""
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return [] if ours == theirs else [f"{prefix}: {ours!r} -> {theirs!r}"]
    lines = []
    for key in sorted(ours.keys() | theirs.keys()):
        lines += differences(ours.get(key), theirs.get(key), f"{prefix}.{key}" if prefix else key)
    return lines


def nearest_multiples(value: int, step: int) -> str:
    """Legal neighbours of `value` among the positive multiples of `step`, for error messages."""
    below = value // step * step
    return " or ".join(str(n) for n in (below, below + step) if n > 0)


def _parse(text: str) -> Any:
    value = yaml.safe_load(text)
    if isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
        try:
            number = float(value)
        except ValueError:
            return value
        return number if math.isfinite(number) else value
    return value


def _assign(values: dict, key: str, value: Any) -> None:
    *parents, last = key.split(".")
    here, seen = values, ""
    for name in parents:
        seen = f"{seen}.{name}" if seen else name
        if not isinstance(here.get(name), dict):
            if name in here and here[name] is None:
                here[name] = {}
            else:
                raise ConfigError(_unknown(seen, here))
        here = here[name]
    if here and last not in here:
        raise ConfigError(_unknown(key, here))
    here[last] = value


def _unknown(key: str, here: dict) -> str:
    known = list(here)
    close = difflib.get_close_matches(key.split(".")[-1], known, n=1, cutoff=0.5)
    parent = key.rpartition(".")[0]
    names = [f"{parent}.{name}" if parent else name for name in (close or known)]
    hint = f"did you mean '{names[0]}'?" if close else f"fields here: {', '.join(names)}"
    return f"unknown config field '{key}'; {hint}"


def _explain(problem: Any, values: dict) -> str:
    place = [part for part in problem["loc"] if not _is_union_tag(part, values)]
    key = ".".join(map(str, place))
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"unknown config field '{key}' (value {problem['input']!r})"
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):  # raised by a config's own check: it names field and value already
        return str(cause)
    return f"config field '{key}': {problem['msg']}, got {problem['input']!r}"


def _is_union_tag(part: Any, values: dict) -> bool:
    """pydantic puts the chosen member of a tagged union into the location; readers never wrote it."""
    return isinstance(values.get("model"), dict) and part == values["model"].get("kind")


def _find(path: Path) -> Path:
    for candidate in (path, path.with_suffix(".py"), Path("configs") / path.with_suffix(".py").name):
        if candidate.is_file():
            return candidate
    known = sorted(file.stem for file in Path("configs").glob("[!_]*.py"))
    close = difflib.get_close_matches(path.stem, known, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known) or 'none in ./configs'}"
    raise ConfigError(f"no config file '{path}'{hint}")
