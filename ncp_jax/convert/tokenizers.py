"""Tokenizer files of published checkpoints: which ones travel, whether they fit the model, and new ones from ours."""

import json
from pathlib import Path

from ncp_jax.config import ConfigError
from ncp_jax.convert.formats import Model, SpecialIds
from ncp_jax.data.tokenizer import Tokenizer

FILE = "tokenizer.json"
# What transformers may keep beside tokenizer.json; carried unread from an import to an export.
COMPANIONS = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja",
)  # fmt: skip
PAD_NAMES = ("<|pad|>", "<pad>", "[PAD]")
NO_TOKENIZER = "none"


def read_tokenizer(
    folder: Path, model: Model, ids: SpecialIds, place: str | None, allow_unused_ids: bool
) -> Tokenizer | None:
    """The tokenizer of a published checkpoint; `place`: another file, or NO_TOKENIZER for none.

    Raises ConfigError where tokenizer and model do not have the same ids, or not the same end of text.
    """
    if place == NO_TOKENIZER:
        return None
    file = Path(place) if place else folder / FILE
    if not file.is_file():
        raise ConfigError(
            f"no tokenizer at {file}; give one with --tokenizer FILE, or --tokenizer {NO_TOKENIZER} for weights alone"
        )
    content = file.read_bytes()
    tokenizer = Tokenizer(content, eos=_name(content, ids.eos[0]) if ids.eos else None, origin=str(file))
    check_size(tokenizer, model, allow_unused_ids)
    if ids.eos and tokenizer.eos != ids.eos[0]:
        raise ConfigError(
            f"config.json ends a text with id {ids.eos[0]}, {file} with '{tokenizer.eos_name}' = {tokenizer.eos}; "
            "correct eos_token_id, or give the model's own tokenizer"
        )
    return tokenizer


def of_run(run: Path, eos: int) -> Tokenizer | None:
    """The tokenizer of a run directory, if it has one."""
    file = run / FILE
    if not file.exists():
        return None
    content = file.read_bytes()
    return Tokenizer(content, eos=_name(content, eos), origin=str(file))


def check_size(tokenizer: Tokenizer, model: Model, allow_unused_ids: bool) -> None:
    """Raise ConfigError unless the model has the tokenizer's ids, and no others unless `allow_unused_ids`."""
    if tokenizer.size > model.vocab:
        raise ConfigError(
            f"{tokenizer.origin} has ids up to {tokenizer.size - 1}, the model has {model.vocab} rows: text would get "
            "ids that the model does not know; give the model's own tokenizer"
        )
    if tokenizer.size < model.vocab and not allow_unused_ids:
        raise ConfigError(
            f"the model has {model.vocab} ids, {tokenizer.origin} knows {tokenizer.size}: sampling could draw an id "
            "without text; give the model's own tokenizer, or accept rows that pad the vocabulary with "
            "--allow-unused-ids"
        )


def companions(folder: Path) -> dict[str, bytes]:
    """The files beside tokenizer.json, by name."""
    return {name: (folder / name).read_bytes() for name in COMPANIONS if (folder / name).exists()}


def own_ids(tokenizer: Tokenizer) -> SpecialIds:
    """Special tokens of a tokenizer that was made here: end of text, and padding where it has a token for it."""
    added = {token["content"]: token["id"] for token in _added(tokenizer.content)}
    return SpecialIds(eos=(tokenizer.eos,), pad=next((added[name] for name in PAD_NAMES if name in added), None))


def own_companions(tokenizer: Tokenizer, ids: SpecialIds, positions: int) -> dict[str, bytes]:
    """A tokenizer_config.json for a tokenizer that has none."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions, "add_bos_token": False,
        "clean_up_tokenization_spaces": False, "eos_token": tokenizer.eos_name,
    } | ({} if ids.pad is None else {"pad_token": _name(tokenizer.content, ids.pad)})  # fmt: skip
    return {"tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode()}


def _name(content: bytes, index: int) -> str | None:
    return next((token["content"] for token in _added(content) if token["id"] == index), None)


def _added(content: bytes) -> list[dict]:
    try:
        return json.loads(content).get("added_tokens") or []
    except (ValueError, AttributeError):  # Tokenizer says what is wrong with it
        return []
