"""The corpus builder: sources -> DIR/{train,val}/ token stores and DIR/tokenizer.json.

The result appears all at once. Locally it is built in a sibling directory and renamed; at a URL, where nothing can be
renamed, DIR/prepared.json is written last and everything before it counts as unfinished. That file also holds what the
result was made from, so the same command again does nothing, and another one says what differs.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ncp_jax.config import differences
from ncp_jax.data import tokenizer as tokenizers
from ncp_jax.data.documents import Document, InputError, documents, find_sources, fingerprint
from ncp_jax.data.store import DataError, Manifest, TokenStore, TokenWriter, open_files, read_file, write_file
from ncp_jax.data.tokenizer import Tokenizer

FORMAT = 1
RECEIPT = "prepared.json"
SPLITS = ("train", "val")
BATCH_BYTES = 4 << 20  # text handed to the tokenizer's threads at a time
FRACTION_STEPS = 10_000  # resolution of the split by hash

Progress = Callable[[str, int], None]  # (what is being done, bytes of source just read)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to build. Exactly one of `tokenizer` and `train_bpe`."""

    out: str
    tokenizer: str | None = None  # path of a tokenizer.json
    train_bpe: int | None = None  # vocabulary size
    eos: str | None = None  # name of the end-of-text token where it is not a usual one
    val_fraction: float = 0.1  # of the documents, by hash of their text
    split_file: str | None = None  # JSON {"held_out": [sha1 of the text | {"sha1": ...}]}, instead of val_fraction
    text_key: str = "text"
    overwrite: bool = False

    def __post_init__(self):
        if (self.tokenizer is None) == (self.train_bpe is None):
            raise DataError("give either --tokenizer tokenizer.json or --train-bpe VOCAB")
        if not 0 <= self.val_fraction < 1:
            raise DataError(f"--val-fraction must be in 0..1 (1 excluded), got {self.val_fraction}")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A finished corpus. `reused`: it was there already."""

    out: str
    manifests: dict[str, Manifest]  # by split
    reused: bool


class Split:
    """Decides by its text whether a document is held out."""

    def __init__(self, val_fraction: float, split_file: str | None = None):
        self._limit = val_fraction * FRACTION_STEPS
        self.held_out = None if split_file is None else _held_out(split_file)
        self._file, self._seen = split_file, set[str]()

    def __call__(self, document: Document) -> str:
        if self.held_out is None:
            return "val" if int(document.sha1, 16) % FRACTION_STEPS < self._limit else "train"
        self._seen.add(document.sha1)
        return "val" if document.sha1 in self.held_out else "train"

    def check(self, counts: dict[str, int]) -> None:
        """After all documents: raise InputError for an empty split, or held-out texts that were never seen."""
        missing = (self.held_out or set()) - self._seen
        if missing:
            raise InputError(
                f"{self._file} holds out {len(missing)} documents that the sources do not contain, "
                f"e.g. sha1 {min(missing)}; they were edited or are of another corpus"
            )
        if not counts["train"]:
            raise InputError(f"no training document: the sources hold {counts['val']} documents, all of them held out")
        if not counts["val"] and (self._limit or self.held_out):
            raise InputError(
                f"none of the {counts['train']} documents is held out; "
                "raise --val-fraction, give --split-file, or write --val-fraction 0 for no validation part"
            )

    def describe(self) -> dict[str, Any]:
        if self.held_out is None:
            return {"val_fraction": self._limit / FRACTION_STEPS}
        listed = hashlib.sha256("\n".join(sorted(self.held_out)).encode()).hexdigest()
        return {"held_out": f"{len(self.held_out)} documents, sha256 {listed[:16]}"}


def prepare(paths: list[str], options: Options, progress: Progress = lambda what, size: None) -> Prepared:
    """Build, or find finished, the corpus `options.out`. Raises DataError and then leaves alone what was there."""
    sources = find_sources(paths)
    split = Split(options.val_fraction, options.split_file)
    given = None if options.tokenizer is None else Tokenizer.load(options.tokenizer, eos=options.eos)
    receipt = _receipt(sources, options, split, given)
    if _finished(receipt, options):
        return Prepared(options.out, _manifests(options.out), reused=True)
    with _workplace(options.out) as place:
        _build(place, sources, options, split, given, progress)
        write_file(place, RECEIPT, json.dumps(receipt, indent=1).encode())
    return Prepared(options.out, _manifests(options.out), reused=False)


def train_tokenizer(paths: list[str], vocab: int, split: Split, text_key: str, progress: Progress) -> Tokenizer:
    """Byte-level BPE of the training documents alone. Raises DataError."""
    counts: Counter[str] = Counter()
    return _train_bpe(find_sources(paths), vocab, split, text_key, counts, progress)


def receipt_of(out: str) -> dict[str, Any]:
    """What a finished corpus was made from. Raises DataError if there is none at `out`."""
    content = read_file(out, RECEIPT)
    try:
        return json.loads(content or b"")
    except ValueError:
        raise DataError(f"no prepared corpus at {out}; make one with 'ncp-jax data prepare SRC --out {out}'") from None


def _build(
    place: str,
    sources: dict[str, Path],
    options: Options,
    split: Split,
    tokenizer: Tokenizer | None,
    progress: Progress,
) -> None:
    if tokenizer is None:
        assert options.train_bpe is not None
        tokenizer = _train_bpe(sources, options.train_bpe, split, options.text_key, Counter(), progress)
    write_file(place, "tokenizer.json", tokenizer.content)
    writers = {part: _writer(f"{place}/{part}", tokenizer) for part in SPLITS}
    counts: Counter[str] = Counter()
    texts = _documents(sources, split, options.text_key, counts, lambda size: progress("tokenize", size))
    for batch in _batches(texts):
        for (part, document), ids in zip(batch, tokenizer.encode_batch([d.text for _, d in batch]), strict=True):
            counts[part] += 1
            writers[part].append(ids, text_bytes=document.bytes, origin=document.origin)
    split.check(counts)
    inputs = {name: fingerprint(file) for name, file in sources.items()}
    for part, writer in writers.items():
        writer.finish(sources=inputs, skipped_empty=counts[f"{part} empty"])


def _train_bpe(
    sources: dict[str, Path], vocab: int, split: Split, text_key: str, counts: Counter[str], progress: Progress
) -> Tokenizer:
    def texts() -> Iterator[str]:
        for part, document in _documents(sources, split, text_key, counts, lambda size: progress("train BPE", size)):
            counts[part] += 1
            if part == "train":
                yield document.text

    tokenizer = tokenizers.train_bpe(texts(), vocab)
    split.check(counts)
    return tokenizer


def _documents(
    sources: dict[str, Path], split: Split, text_key: str, counts: Counter[str], progress: Callable[[int], None]
) -> Iterator[tuple[str, Document]]:
    """(split, document) of all sources; empty texts are counted as "<split> empty" and left out."""
    total = 0
    for file in sources.values():
        for document in documents(file, text_key=text_key, progress=progress):
            part = split(document)
            total += 1
            if document.text:
                yield part, document
            else:
                counts[f"{part} empty"] += 1
    empty = sum(counts[f"{part} empty"] for part in SPLITS)
    if total == empty:
        raise InputError(f"the corpus is empty: {len(sources)} files, {empty} documents without text, none with text")


def _batches(texts: Iterator[tuple[str, Document]]) -> Iterator[list[tuple[str, Document]]]:
    batch, size = [], 0
    for item in texts:
        batch.append(item)
        size += item[1].bytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _writer(path: str, tokenizer: Tokenizer) -> TokenWriter:
    return TokenWriter(
        path, vocab=tokenizer.size, eos=tokenizer.eos, tokenizer=tokenizer.hash, token_bytes=tokenizer.token_bytes()
    )  # fmt: skip


def _held_out(split_file: str) -> set[str]:
    try:
        entries = json.loads(Path(split_file).read_bytes())["held_out"]
        return {entry if isinstance(entry, str) else entry["sha1"] for entry in entries}
    except OSError as error:
        raise InputError(f"cannot read the split file {split_file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{split_file} is no split file ({type(error).__name__}: {error}); "
            'write JSON such as {"held_out": [{"sha1": "..."}]}'
        ) from None


def _receipt(sources: dict[str, Path], options: Options, split: Split, tokenizer: Tokenizer | None) -> dict[str, Any]:
    made_with: dict[str, Any] = {"train_bpe": options.train_bpe}
    if tokenizer is not None:
        made_with = {"sha256": tokenizer.hash, "eos": tokenizer.eos_name}
    return {
        "format": FORMAT,
        "sources": {name: fingerprint(file) for name, file in sources.items()},
        "tokenizer": made_with,
        "split": split.describe(),
        "text_key": options.text_key,
    }


def _finished(receipt: dict[str, Any], options: Options) -> bool:
    """Whether `out` already is what is asked for. Raises DataError if it is something that may not be replaced."""
    content = read_file(options.out, RECEIPT)
    if content is None:
        if "://" not in options.out and not _free(Path(options.out)):
            raise DataError(f"{options.out} is not empty and was not made by 'data prepare'; choose another --out")
        return False
    try:
        there = json.loads(content)
    except ValueError:
        there = {"format": None}
    changes = differences(there, receipt)
    if changes and not options.overwrite:
        lines = "\n  ".join(changes)
        raise DataError(
            f"{options.out} was made from something else:\n  {lines}\nchoose another --out, or --overwrite it"
        )
    return not changes and not (options.overwrite and _damaged(options.out))


def _free(place: Path) -> bool:
    return not place.exists() or (place.is_dir() and not any(place.iterdir()))


def _damaged(out: str) -> bool:
    try:
        for part in SPLITS:
            TokenStore.open(f"{out}/{part}").verify()
    except DataError:
        return True
    return False


def _manifests(out: str) -> dict[str, Manifest]:
    return {part: TokenStore.open(f"{out}/{part}").manifest for part in SPLITS}


@contextlib.contextmanager
def _workplace(out: str) -> Iterator[str]:
    """Where to build; on success it becomes `out`, on failure it is removed."""
    if "://" in out:
        _clear(out)
        yield out
        return
    target = Path(out).absolute()
    marker = f".{target.name}.partial-{socket.gethostname()}-"
    place = target.with_name(f"{marker}{os.getpid()}")
    try:
        _remove_leftovers(target, marker)
        place.mkdir(parents=True)
        yield str(place)
        _swap(place, target)
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror or error}; free space or choose another --out") from None
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _clear(url: str) -> None:
    """Remove an unfinished or outdated corpus, its receipt first, so that it never looks finished."""
    files = open_files(url)
    try:
        files.delete_range(files.KeyRange(RECEIPT, RECEIPT + "\0")).result()
        for prefix in (*(f"{part}/" for part in SPLITS), "tokenizer.json"):
            files.delete_range(files.KeyRange(prefix, prefix + "\uffff")).result()
    except ValueError as error:
        raise DataError(f"cannot write {url}: {error}; choose another --out") from None


def _swap(place: Path, target: Path) -> None:
    """Put the finished directory where the old one, if any, was."""
    old = place.with_name(f"{place.name}-old")
    if target.exists():
        target.rename(old)
    place.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _remove_leftovers(target: Path, marker: str) -> None:
    """Directories that killed runs on this machine left behind. A run that is still alive is an error."""
    for left in target.parent.glob(f"{marker}*"):
        owner = int(left.name.removeprefix(marker).partition("-")[0])
        if owner != os.getpid() and Path(f"/proc/{owner}").exists():
            raise DataError(f"process {owner} is preparing {target} right now; wait for it or choose another --out")
        shutil.rmtree(left)
