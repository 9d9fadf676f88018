"""The data pipeline: endless training batches and finite evaluation batches from prepared token stores.

Training row g of a run is a pure function of (data config, g): a fixed interleaving picks the source, and each source
is an endlessly repeated, per-epoch reshuffled Grain dataset. Step s of any run reads rows s*G : (s+1)*G, of which each
process takes some of P equal slices, so the global batch is the same on any number of hosts, rows in the same order.
(Grain's ElasticIterator deals rows out round-robin instead: the same set, but another order per host count.)

G rows per global batch, T tokens per row, k tokens per chunk.
"""

import dataclasses
import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction

import grain
import numpy as np

from ncp_jax.config import ConfigError, nearest_multiples
from ncp_jax.data.config import DataConfig, check_chunk
from ncp_jax.data.packing import ConcatRows, DocumentRows, OfficialRows, Piece, Rows, assemble
from ncp_jax.data.store import StoreError, TokenStore, check_ids

Batch = dict[str, np.ndarray]

# Longest repeating pattern of sources. Weights with up to four decimals stay far below it.
LONGEST_PATTERN = 1_000_000
# Evaluation rows must not move when a training seed does.
EVALUATION_SEED = 0


class TrainBatches(Iterator[Batch]):
    """Endless batches of this process. Read-ahead never shows: `position` counts what was handed out."""

    def __init__(self, batches: grain.MapDataset, config: DataConfig, start_step: int, global_batch: int):
        threads = min(config.workers, config.prefetch)  # more would find no room; none: read in the caller's thread
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=config.prefetch)
        self._iterator = iter(batches.to_iter_dataset(options))
        self._iterator.set_state({"next_index": start_step})
        self._global_batch = global_batch

    def __next__(self) -> Batch:
        return next(self._iterator)

    @property
    def position(self) -> int:
        """Batches consumed since step 0: the `start_step` that continues from here."""
        return self._iterator.get_state()["next_index"]

    @property
    def next_row(self) -> int:
        """Global index of the next training row."""
        return self.position * self._global_batch

    def close(self) -> None:
        """Stop reading ahead."""
        self._iterator.close()


class EvaluationBatches:
    """Finite batches of this process, the same number on every process; can be iterated again."""

    def __init__(self, rows: Rows, count: int, config: DataConfig, batch: int, vocab: int, offsets: list[int]):
        self.sequences = count
        self._rows, self._config, self._batch, self._vocab, self._offsets = rows, config, batch, vocab, offsets

    def __len__(self) -> int:
        return -(-self.sequences // self._batch)

    def __iter__(self) -> Iterator[Batch]:
        return (self._read(number) for number in range(len(self)))

    def _read(self, number: int) -> Batch:
        rows = [self._pieces(number * self._batch + offset) for offset in self._offsets]
        config = self._config
        return assemble(rows, config.sequence, documents=config.packing == "documents", vocab=self._vocab)

    def _pieces(self, row: int) -> tuple[TokenStore, list[Piece]]:
        return self._rows.store, self._rows.pieces(row) if row < self.sequences else []


@dataclasses.dataclass(frozen=True)
class MixtureRow:
    """What a run takes from one source."""

    source: str  # where its token store lies
    weight: float  # share of the rows, 0..1
    documents: int
    tokens: int  # in the store, end-of-text tokens included
    windows: int  # rows in one epoch
    epochs: float  # over the run


def train_batches(
    config: DataConfig, *, vocab: int, chunk: int, global_batch: int, start_step: int = 0,
    ends: bool = False, process_index: int | Sequence[int] = 0, process_count: int = 1,
) -> TrainBatches:  # fmt: skip
    """Batches from step `start_step` on, `global_batch / process_count` rows each (see packing.assemble).

    `vocab`: ids of the model; `chunk`: k; `ends`: whether packed documents hold their end-of-text token as an input;
    `process_index`: which of `process_count` equal slices of the rows are read, one or several in rising order.
    Raises ConfigError for impossible sizes or weights, StoreError for a store that is absent, damaged or made for more
    ids than `vocab`.
    """
    check_chunk(config.sequence, chunk)
    offsets = _offsets(global_batch, process_index, process_count)
    sources = [_rows(store, config, chunk, config.shuffle_seed, ends) for store in _stores(config, vocab)]
    mixture = _Mixture(sources, config)
    read = _StepReader(mixture, config, vocab, global_batch, offsets)
    return TrainBatches(grain.MapDataset.source(read), config, start_step, global_batch)


def evaluation_batches(
    store: TokenStore, config: DataConfig, *, batch: int, chunk: int, limit: int | None = None,
    vocab: int | None = None, ends: bool = False, process_index: int | Sequence[int] = 0, process_count: int = 1,
) -> EvaluationBatches:  # fmt: skip
    """Every row of `store` once (the first `limit` of them), `batch` rows over all processes at a time.

    Rows are cut as `config` says. The last batch is filled with fully masked rows. `vocab`: ids of the model, where it
    may differ from the store's; `ends` and `process_index` as in training. Raises ConfigError for impossible sizes.
    """
    check_chunk(config.sequence, chunk)
    offsets = _offsets(batch, process_index, process_count)
    if limit is not None and limit < 1:
        raise ConfigError(f"an evaluation limit must be at least 1 sequence, got {limit}; leave it out to read all")
    if vocab is not None:
        check_ids(store, vocab)
    rows = _rows(store, config, chunk, EVALUATION_SEED, ends)
    count = len(rows) if limit is None else min(limit, len(rows))
    ids = store.manifest.vocab if vocab is None else vocab
    return EvaluationBatches(rows, count, config, batch, ids, offsets)


def effective_mixture(
    config: DataConfig, *, chunk: int, global_batch: int, steps: int, ends: bool = False
) -> list[MixtureRow]:
    """What `steps` steps take from each source, for --dry-run. Raises as `train_batches`."""
    check_chunk(config.sequence, chunk)
    shares = _proportions(config)
    table = []
    for source, share in zip(config.mixture, shares, strict=True):
        store = TokenStore.open(source.store)
        windows, weight = len(_rows(store, config, chunk, config.shuffle_seed, ends)), share / sum(shares)
        epochs = weight * steps * global_batch / windows
        manifest = store.manifest
        table.append(MixtureRow(source.store, weight, manifest.documents, manifest.tokens, windows, epochs))
    return table


class _Mixture:
    """Training row g -> (store, pieces), for any g >= 0."""

    def __init__(self, sources: list[Rows], config: DataConfig):
        self._sources = sources
        self._datasets = [
            grain.MapDataset.range(len(rows)).seed(_source_seed(config.shuffle_seed, index)).shuffle().repeat(None)
            for index, rows in enumerate(sources)
        ]
        self._shares = _proportions(config)
        self._pattern, self._rank = _interleave(self._shares)

    def pieces(self, row: int) -> tuple[TokenStore, list[Piece]]:
        cycle, place = divmod(row, len(self._pattern))
        source = int(self._pattern[place])
        index = cycle * self._shares[source] + int(self._rank[place])
        rows = self._sources[source]
        return rows.store, rows.pieces(int(self._datasets[source][index]))


class _StepReader:
    """Random-access source for Grain: step -> this process's batch."""

    def __init__(self, mixture: _Mixture, config: DataConfig, vocab: int, global_batch: int, offsets: list[int]):
        self._mixture, self._vocab = mixture, vocab
        self._sequence, self._documents = config.sequence, config.packing == "documents"
        self._global_batch, self._offsets = global_batch, offsets

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, step: int) -> Batch:
        first = int(step) * self._global_batch
        rows = [self._mixture.pieces(first + offset) for offset in self._offsets]
        return assemble(rows, self._sequence, documents=self._documents, vocab=self._vocab)


def _stores(config: DataConfig, vocab: int) -> list[TokenStore]:
    """The mixture's stores, fit for a model of `vocab` ids and made with one tokenizer."""
    stores = [TokenStore.open(source.store) for source in config.mixture]
    for store in stores:
        check_ids(store, vocab)
        if store.manifest.tokenizer != stores[0].manifest.tokenizer:
            raise StoreError(
                f"token stores {stores[0].path} and {store.path} were made with different tokenizers "
                f"({stores[0].manifest.tokenizer[:12]}, {store.manifest.tokenizer[:12]}); "
                "prepare both with one tokenizer.json"
            )
    return stores


def _rows(store: TokenStore, config: DataConfig, chunk: int, seed: int, ends: bool) -> Rows:
    rows: Rows
    if config.packing == "documents":
        rows = DocumentRows(store, config.sequence, chunk, seed, ends)
    else:
        rows = (ConcatRows if config.packing == "concat" else OfficialRows)(store, config.sequence)
    if not len(rows):
        raise StoreError(f"token store {store.path} has no row to read; prepare a corpus with text in this split")
    return rows


def _offsets(batch: int, process_index: int | Sequence[int], process_count: int) -> list[int]:
    """Places in the global batch of the rows that are read here."""
    slices = [process_index] if isinstance(process_index, int) else list(process_index)
    for index in slices:
        if not 0 <= index < process_count:
            raise ConfigError(f"process {index} of {process_count} does not exist; processes count from 0")
    if batch < 1 or batch % process_count:
        raise ConfigError(
            f"a global batch of {batch} does not divide over {process_count} processes; "
            f"nearest legal: {nearest_multiples(batch, process_count)}"
        )
    size = batch // process_count
    return [row for index in slices for row in range(index * size, (index + 1) * size)]


def _proportions(config: DataConfig) -> list[int]:
    """Weights as the smallest whole numbers in the same ratio. (Grain's own mix rounds 0.7 : 0.3 to 233 : 100.)"""
    weights = [Fraction(str(source.weight)) for source in config.mixture]
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    whole = [number // math.gcd(*whole) for number in whole]
    if sum(whole) > LONGEST_PATTERN:
        raise ConfigError(
            f"data.mixture weights {[source.weight for source in config.mixture]} repeat only every {sum(whole)} rows; "
            f"round them so that the ratio needs at most {LONGEST_PATTERN} (four decimals will do)"
        )
    return whole


def _interleave(shares: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Source of each row in one period, and how many rows of that source came before it; int64 [sum(shares)].

    Row j of source s is due at (j + 1/2) / shares[s] of the period, which spreads every source evenly.
    """
    source = np.repeat(np.arange(len(shares)), shares)
    rank = np.concatenate([np.arange(share) for share in shares])
    due = (rank + 0.5) / np.asarray(shares)[source]
    order = np.lexsort((source, due))
    return source[order], rank[order]


def _source_seed(seed: int, index: int) -> int:
    """Unrelated shuffles per source: neighbouring seeds would meet, since Grain adds the epoch to the seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:4])
