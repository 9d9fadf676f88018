"""The token store: one flat array of token ids on disk or in a bucket, with document offsets and a manifest.

Layout under a directory or URL:
    tokens/         zarr3, sharded; documents one after another, each followed by one end-of-text token
    offsets.npy     int64 [documents + 1]; document d occupies tokens offsets[d] : offsets[d + 1], its EOS included
    token_bytes.npy int32 [vocab]; UTF-8 bytes that each id stands for, 0 for special tokens
    manifest.json   written last: a store without one was never finished
Everything goes through TensorStore, so gs://, s3:// and local paths are read and written by the same lines.
"""

import array
import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorstore as ts

FORMAT = 1
CHUNK = 32_768  # tokens per inner chunk: small ones cost a request each, large ones waste reads of short windows
SHARD = 512 * CHUNK  # tokens per file: 32 or 64 MiB, held in memory once while writing
UINT16_IDS = 2**16
# Per open store: keeps shard indices and recent chunks, which doubles the rate of short random windows.
CACHE = {"cache_pool": {"total_bytes_limit": 64 << 20}}


class DataError(ValueError):
    """Data that cannot be read, written or trusted. The message names the place and the remedy."""


class StoreError(DataError):
    """A token store that is absent, unfinished, damaged, or made for another vocabulary."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a finished store says about itself."""

    tokens: int  # end-of-text tokens included
    documents: int
    text_bytes: int  # UTF-8 bytes of the documents' text
    vocab: int  # full id space of the tokenizer, added tokens included
    eos: int
    tokenizer: str  # content hash
    dtype: str  # uint16 | uint32
    tokens_sha256: str  # of the little-endian token array
    offsets_sha256: str
    sources: dict[str, Any] = dataclasses.field(default_factory=dict)  # file -> {"bytes", "sha256"}
    skipped_empty: int = 0
    format: int = FORMAT


class TokenStore:
    """A finished store, open for reading; reads are thread-safe."""

    def __init__(self, path: str, manifest: Manifest, tokens: Any, files: ts.KvStore):
        self.path, self.manifest, self._tokens, self._files = path, manifest, tokens, files
        self._arrays: dict[str, np.ndarray] = {}

    @classmethod
    def open(cls, path: str | os.PathLike) -> "TokenStore":
        """Open the store at a directory or URL. Raises StoreError if it is absent, unfinished or damaged."""
        path = os.fspath(path)
        files = open_files(path)
        manifest = _read_manifest(path, files)
        try:
            tokens = ts.open(_spec(files), open=True, context=ts.Context(CACHE)).result()
        except ValueError as error:
            raise StoreError(f"token store {path}: the token array cannot be opened ({error}); {_REBUILD}") from None
        if tokens.shape != (manifest.tokens,):
            raise StoreError(
                f"token store {path}: {tokens.shape[0]} tokens, manifest says {manifest.tokens}; {_REBUILD}"
            )
        return cls(path, manifest, tokens, files)

    @property
    def offsets(self) -> np.ndarray:
        """int64 [documents + 1], read once."""
        return self._array("offsets.npy", self.manifest.documents + 1)

    @property
    def token_bytes(self) -> np.ndarray:
        """int32 [vocab], read once."""
        return self._array("token_bytes.npy", self.manifest.vocab)

    def read(self, start: int, stop: int, *, vocab: int | None = None) -> np.ndarray:
        """Tokens start:stop as a fresh int32 array. Raises StoreError for damage or an id outside `vocab`."""
        return self.read_many([(start, stop)], vocab=vocab)[0]

    def read_many(self, spans: Sequence[tuple[int, int]], *, vocab: int | None = None) -> list[np.ndarray]:
        """`read` for several (start, stop) pairs at once; TensorStore overlaps the requests."""
        for start, stop in spans:
            if not 0 <= start <= stop <= self.manifest.tokens:
                raise StoreError(f"token store {self.path}: no tokens {start}:{stop}; it holds {self.manifest.tokens}")
        futures = [self._tokens[start:stop].read() for start, stop in spans]
        limit = self.manifest.vocab if vocab is None else vocab
        return [self._checked(future, *span, limit) for future, span in zip(futures, spans, strict=True)]

    def check_shards(self) -> None:
        """Read one token of every shard: a missing, truncated or cut file raises StoreError without a full scan."""
        starts = range(0, self.manifest.tokens, SHARD)
        self.read_many([(start, start + 1) for start in starts])

    def verify(self) -> None:
        """Read everything and compare checksums. Raises StoreError."""
        digest = hashlib.sha256()
        for start in range(0, self.manifest.tokens, SHARD):
            tokens = self.read(start, min(start + SHARD, self.manifest.tokens))
            digest.update(tokens.astype(np.dtype(self.manifest.dtype).newbyteorder("<")).tobytes())
        if digest.hexdigest() != self.manifest.tokens_sha256:
            raise StoreError(f"token store {self.path}: the tokens do not match the manifest's checksum; {_REBUILD}")

    def _checked(self, future: ts.Future, start: int, stop: int, vocab: int) -> np.ndarray:
        try:
            tokens = np.asarray(future.result())
        except ValueError as error:
            raise StoreError(
                f"token store {self.path}: tokens {start}:{stop} are damaged ({error}); {_REBUILD}"
            ) from None
        if tokens.size and tokens.max() >= vocab:
            worst = int(tokens.argmax())
            raise StoreError(
                f"token store {self.path}: id {int(tokens[worst])} at token {start + worst} is outside "
                f"the vocabulary of {vocab}; {_REBUILD}"
            )
        return tokens.astype(np.int32)

    def _array(self, name: str, size: int) -> np.ndarray:
        if name not in self._arrays:
            values = _load_array(read_file(self.path, name))
            damaged = values.shape != (size,)
            if name == "offsets.npy":
                damaged = damaged or _sha256(values.tobytes()) != self.manifest.offsets_sha256
            if damaged:
                raise StoreError(f"token store {self.path}: {name} is missing or damaged; {_REBUILD}")
            values.setflags(write=False)
            self._arrays[name] = values
        return self._arrays[name]


class TokenWriter:
    """Builds a store document by document, holding one shard in memory; `finish` makes it a store."""

    def __init__(self, path: str | os.PathLike, *, vocab: int, eos: int, tokenizer: str, token_bytes: np.ndarray):
        """`token_bytes`: int32 [vocab]. `tokenizer`: its content hash. Raises StoreError if `path` is not writable."""
        self.path, self.vocab, self.eos, self.tokenizer = os.fspath(path), vocab, eos, tokenizer
        self.dtype = np.dtype(np.uint16 if vocab <= UINT16_IDS else np.uint32)
        self.tokens = self.text_bytes = 0
        self._token_bytes = np.asarray(token_bytes, np.int32)
        self._digest = hashlib.sha256()
        self._offsets = array.array("q", [0])
        self._pending: list[np.ndarray] = []
        self._buffered = 0
        self._files = open_files(self.path)
        self._array = self._try(lambda: ts.open(_spec(self._files, self.dtype), create=True).result())

    @property
    def documents(self) -> int:
        return len(self._offsets) - 1

    def append(self, ids: Sequence[int] | np.ndarray, *, text_bytes: int, origin: str) -> None:
        """Add one document (without EOS; it is added here). Raises StoreError naming `origin` for an illegal id."""
        tokens = np.empty(len(ids) + 1, np.int64)
        tokens[:-1], tokens[-1] = ids, self.eos
        bad = np.flatnonzero((tokens < 0) | (tokens >= self.vocab))
        if bad.size:
            raise StoreError(
                f"{origin}: id {tokens[bad[0]]} at token {bad[0]} of the document is outside the vocabulary of "
                f"{self.vocab}; the tokenizer and its declared size disagree"
            )
        self._pending.append(tokens.astype(self.dtype))
        self._buffered += len(tokens)
        self._offsets.append(self._offsets[-1] + len(tokens))
        self.text_bytes += int(text_bytes)
        if self._buffered >= SHARD:
            self._flush(self._buffered // SHARD * SHARD)

    def finish(self, *, sources: dict[str, Any] | None = None, skipped_empty: int = 0) -> Manifest:
        """Write what is left, then the manifest. Raises StoreError if the disk refuses."""
        if self._buffered:
            self._flush(self._buffered)
        offsets = np.asarray(self._offsets, np.int64)
        manifest = Manifest(
            tokens=self.tokens, documents=self.documents, text_bytes=self.text_bytes, vocab=self.vocab, eos=self.eos,
            tokenizer=self.tokenizer, dtype=self.dtype.name, tokens_sha256=self._digest.hexdigest(),
            offsets_sha256=_sha256(offsets.tobytes()), sources=sources or {}, skipped_empty=skipped_empty,
        )  # fmt: skip
        write_file(self.path, "offsets.npy", _dump_array(offsets))
        write_file(self.path, "token_bytes.npy", _dump_array(self._token_bytes))
        write_file(self.path, "manifest.json", json.dumps(dataclasses.asdict(manifest), indent=1).encode())
        return manifest

    def _flush(self, count: int) -> None:
        buffered = np.concatenate(self._pending)
        head, tail = buffered[:count], buffered[count:]
        stop = self.tokens + count
        self._array = self._try(lambda: self._array.resize(exclusive_max=[stop], expand_only=True).result())
        for start in range(0, count, SHARD):
            part = head[start : start + SHARD]
            here = self._array[self.tokens + start : self.tokens + start + len(part)]
            self._try(lambda here=here, part=part: here.write(part).result())
        self._digest.update(head.astype(self.dtype.newbyteorder("<")).tobytes())
        self.tokens, self._pending, self._buffered = stop, [tail], len(tail)

    def _try(self, action: Any) -> Any:
        try:
            return action()
        except ValueError as error:
            raise StoreError(
                f"cannot write the token store {self.path}: {error}; free space or choose another --out"
            ) from None


def check_ids(store: TokenStore, vocab: int) -> None:
    """Refuse, before any device step, a store that a model of `vocab` ids cannot train on.

    Raises StoreError when the store's ids exceed the model's, when the tokenizer.json beside it is another one than
    the store was made with, or when a shard is missing or truncated.
    """
    manifest = store.manifest
    if manifest.vocab > vocab:
        raise StoreError(
            f"token store {store.path} holds ids below {manifest.vocab}, the model has {vocab}; "
            f"set model.vocab to {manifest.vocab} or more"
        )
    beside = read_file(os.path.dirname(store.path.rstrip("/")) or ".", "tokenizer.json")
    if beside is not None and _sha256(beside) != manifest.tokenizer:
        raise StoreError(
            f"token store {store.path} was made with tokenizer {manifest.tokenizer[:12]}, but the tokenizer.json "
            f"beside it is {_sha256(beside)[:12]}; {_REBUILD}"
        )
    store.check_shards()


def open_files(path: str | os.PathLike) -> ts.KvStore:
    """Key-value view of a directory or URL. Raises StoreError for an address TensorStore does not know."""
    path = os.fspath(path)
    spec: Any = f"{path.rstrip('/')}/" if "://" in path else {"driver": "file", "path": f"{os.path.abspath(path)}/"}
    try:
        return ts.KvStore.open(spec).result()
    except ValueError as error:
        raise StoreError(f"cannot open {path}: {error}; use a local path or a URL such as gs://bucket/corpus") from None


def read_file(path: str, name: str) -> bytes | None:
    """Content of PATH/NAME, local or remote; None if it is absent."""
    try:
        result = open_files(path).read(name).result()
    except ValueError as error:
        raise StoreError(f"cannot read {path}/{name}: {error}") from None
    return bytes(result.value) if result.state == "value" else None


def write_file(path: str, name: str, content: bytes) -> None:
    """Write PATH/NAME atomically, local or remote. Raises StoreError if the place is not writable."""
    try:
        open_files(path).write(name, content).result()
    except ValueError as error:
        raise StoreError(f"cannot write {path}/{name}: {error}; free space or choose another --out") from None


_REBUILD = "build it again with 'ncp-jax data prepare ... --overwrite'"


def _read_manifest(path: str, files: ts.KvStore) -> Manifest:
    try:
        result = files.read("manifest.json").result()
    except ValueError as error:
        raise StoreError(f"cannot read the token store {path}: {error}") from None
    if result.state != "value":
        raise StoreError(f"no finished token store at {path}; make one with 'ncp-jax data prepare SRC --out DIR'")
    try:
        values = json.loads(result.value)
        if values["format"] != FORMAT:
            raise StoreError(
                f"token store {path} has format {values['format']}, this version reads {FORMAT}; {_REBUILD}"
            )
        return Manifest(**values)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise StoreError(f"token store {path}: manifest.json is damaged ({error}); {_REBUILD}") from None


def _spec(files: ts.KvStore, dtype: np.dtype | None = None) -> dict:
    """TensorStore spec of the token array; with `dtype`, of a new and empty one.

    Chunks are uncompressed (reads of short windows are bound by decoding otherwise) but carry a CRC32C, and a chunk
    that is absent is an error: by default it would read as zeros, which is a legal token.
    """
    spec = {
        "driver": "zarr3",
        "kvstore": {**files.spec().to_json(), "path": files.spec().to_json().get("path", "") + "tokens/"},
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }
    if dtype is None:
        return spec
    raw, crc = {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}
    sharding = {"chunk_shape": [CHUNK], "codecs": [raw, crc], "index_codecs": [raw, crc]}
    metadata = {
        "shape": [0],
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [SHARD]}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    return {**spec, "metadata": metadata}


def _dump_array(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return buffer.getvalue()


def _load_array(content: bytes | None) -> np.ndarray:
    """The array, or a zero-dimensional one if there is none or it is damaged."""
    try:
        return np.load(io.BytesIO(content or b""), allow_pickle=False)
    except (ValueError, EOFError, OSError):
        return np.zeros(())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
