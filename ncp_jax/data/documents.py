"""The corpus reader: documents out of .txt, .jsonl, .jsonl.gz and .jsonl.zst files, or an error that says where.

A .txt file is one document; a line of a .jsonl file is one JSON object with the text under a key.
"""

import dataclasses
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from ncp_jax.data.store import DataError

KINDS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst")
BLOCK = 1 << 20  # bytes read at a time


class InputError(DataError):
    """A source that cannot be read. The message names the file and the line or byte."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One text and where it came from."""

    text: str
    origin: str  # file, or file:line
    bytes: int  # UTF-8 length
    sha1: str  # of the UTF-8 text: decides the split


def find_sources(paths: list[str]) -> dict[str, Path]:
    """Files under `paths`, named by their place below the argument, in sorted order per argument.

    Directories are searched recursively, hidden names left out. Raises InputError for a missing path, an unknown kind,
    a directory without sources, or one file named twice.
    """
    found: dict[str, Path] = {}
    for given in map(Path, paths):
        if not given.exists():
            raise InputError(f"no such file or directory: {given}")
        for name, file in _walk(given):
            if name in found:
                raise InputError(
                    f"two sources are called '{name}': {found[name]} and {file}; rename one or give their parent"
                )
            found[name] = file
    return found


def documents(file: Path, *, text_key: str, progress: Callable[[int], None] = lambda size: None) -> Iterator[Document]:
    """Documents of one file, empty ones included. `progress` is told the bytes of the file as they are read.

    Raises InputError for a cut or corrupt archive, a line that is no JSON object with text under `text_key`, or bytes
    that are not UTF-8.
    """
    try:
        with file.open("rb") as raw:
            blocks = _blocks(file, _Counted(raw, progress))
            yield from _whole(file, blocks) if file.suffix == ".txt" else _lines(file, blocks, text_key)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from None


def fingerprint(file: Path) -> dict[str, str | int]:
    """Size and SHA-256 of a file's bytes."""
    try:
        with file.open("rb") as raw:
            return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(raw, "sha256").hexdigest()}
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None


class _Counted:
    """Reads a file and reports how far it got."""

    def __init__(self, raw: BinaryIO, progress: Callable[[int], None]):
        self._raw, self._progress = raw, progress

    def read(self, size: int = -1) -> bytes:
        block = self._raw.read(size)
        self._progress(len(block))
        return block


def _walk(given: Path) -> Iterator[tuple[str, Path]]:
    if given.is_file():
        if not given.name.endswith(KINDS):
            raise InputError(f"{given} is none of {', '.join(KINDS)}; convert it or rename it")
        yield given.name, given
        return
    files = [file for file in sorted(given.rglob("*")) if file.is_file() and file.name.endswith(KINDS)]
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(given).parts)]
    if not files:
        raise InputError(f"{given} holds no {', '.join(KINDS)} file")
    for file in files:
        yield file.relative_to(given).as_posix(), file


def _blocks(file: Path, raw: _Counted) -> Iterator[bytes]:
    """Decompressed content, block by block."""
    if file.suffix == ".gz":
        return _gzip_blocks(file, raw)
    if file.suffix == ".zst":
        return _zstd_blocks(file, raw)
    return iter(lambda: raw.read(BLOCK), b"")


def _gzip_blocks(file: Path, raw: _Counted) -> Iterator[bytes]:
    total = 0
    try:
        with gzip.GzipFile(fileobj=raw, mode="rb") as stream:  # type: ignore[call-overload]
            while block := stream.read(BLOCK):
                total += len(block)
                yield block
    except EOFError:
        raise InputError(
            f"{file} is truncated: the gzip stream ends after {total} bytes of text; copy it again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{file} is corrupt after {total} bytes of text ({error}); copy it again") from None


def _zstd_blocks(file: Path, raw: _Counted) -> Iterator[bytes]:
    """Frame by frame: zstandard's own stream reader takes a cut frame for the end of the file."""
    total, frame, unfinished = 0, zstandard.ZstdDecompressor().decompressobj(), False
    try:
        while block := raw.read(BLOCK):
            while block:
                unfinished = True
                text = frame.decompress(block)
                block = frame.unused_data if frame.eof else b""
                if frame.eof:
                    frame, unfinished = zstandard.ZstdDecompressor().decompressobj(), False
                total += len(text)
                yield text
    except zstandard.ZstdError as error:
        raise InputError(f"{file} is corrupt after {total} bytes of text ({error}); copy it again") from None
    if unfinished:
        raise InputError(f"{file} is truncated: the zstd frame ends after {total} bytes of text; copy it again")


def _whole(file: Path, blocks: Iterator[bytes]) -> Iterator[Document]:
    content = b"".join(blocks)
    yield _document(_decode(content, file, 1, 0), str(file))


def _lines(file: Path, blocks: Iterator[bytes], text_key: str) -> Iterator[Document]:
    """Documents of JSON lines; blank lines hold none."""
    before = 0
    for number, (line, complete) in enumerate(_split(blocks), 1):
        text = _decode(line, file, number, before)
        before += len(line) + 1
        if text.strip():
            yield _document(_text(text, f"{file}:{number}", text_key, complete), f"{file}:{number}")


def _split(blocks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Lines without their newline, and whether there was one. Only b"\\n" ends a line: JSON may hold U+2028."""
    rest = io.BytesIO()
    for block in blocks:
        *lines, last = block.split(b"\n")
        for line in lines:
            yield rest.getvalue() + line, True
            rest = io.BytesIO()
        rest.write(last)
    if rest.getvalue():
        yield rest.getvalue(), False


def _decode(content: bytes, file: Path, line: int, before: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        raise InputError(
            f"{file} is not UTF-8: byte 0x{content[error.start]:02x} at offset {before + error.start} (line {line}); "
            "convert it, e.g. with iconv -t UTF-8"
        ) from None


def _text(line: str, origin: str, text_key: str, complete: bool) -> str:
    try:
        values = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        what = "is not JSON" if complete else "is not JSON and has no newline: the file looks truncated"
        raise InputError(f"{origin} {what} ({error})") from None
    if not isinstance(values, dict):
        raise InputError(f"{origin} is a JSON {type(values).__name__}, not an object with the key '{text_key}'")
    if text_key not in values:
        raise InputError(f"{origin} has no key '{text_key}'; its keys: {', '.join(values) or 'none'}; see --text-key")
    if not isinstance(values[text_key], str):
        raise InputError(f"{origin}: '{text_key}' is {type(values[text_key]).__name__}, not text")
    return values[text_key]


def _document(text: str, origin: str) -> Document:
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{origin}: character {error.start} is half a surrogate pair, which UTF-8 cannot hold"
        ) from None
    return Document(text, origin, len(content), hashlib.sha1(content).hexdigest())
