"""The data configuration: which token stores are read, in which proportions, and how rows are cut from them."""

from typing import Literal

from ncp_jax.config import ConfigError, frozen, nearest_multiples

# Grain's index shuffle takes 32-bit seeds.
SEED_LIMIT = 2**32


@frozen
class Source:
    """One prepared corpus (`ncp-jax data prepare ... --out PATH`) of a mixture."""

    path: str  # directory or URL (gs://bucket/corpus) that holds train/, val/ and tokenizer.json
    weight: float = 1.0  # share of the rows, relative to the other sources
    split: str = "train"

    def __post_init__(self):
        if not self.path:
            raise ConfigError(
                "data.mixture has a source without a path; name a directory made by 'ncp-jax data prepare'"
            )
        if not 0 < self.weight < float("inf"):
            raise ConfigError(
                f"data.mixture source '{self.path}' has weight {self.weight}; weights are positive and finite "
                "(remove the source to leave it out)"
            )

    @property
    def store(self) -> str:
        """Where the token store lies: PATH/SPLIT."""
        return f"{self.path.rstrip('/')}/{self.split}"


@frozen
class DataConfig:
    """Rows of `sequence` tokens from a weighted mixture of token stores."""

    mixture: tuple[Source, ...]
    sequence: int  # T, tokens per row
    packing: Literal["concat", "official", "documents"] = "documents"  # data/packing.py
    shuffle_seed: int = 0
    prefetch: int = 2  # batches read ahead; 0 reads in the caller's thread
    workers: int = 1  # threads that read ahead; neither field changes what is read

    def __post_init__(self):
        if not self.mixture:
            raise ConfigError("data.mixture is empty; name at least one source, e.g. (Source('corpus'),)")
        if self.sequence < 1:
            raise ConfigError(f"data.sequence must be at least 1 token, got {self.sequence}")
        if not 0 <= self.shuffle_seed < SEED_LIMIT:
            raise ConfigError(f"data.shuffle_seed must be in 0..{SEED_LIMIT - 1}, got {self.shuffle_seed}")
        if self.prefetch < 0:
            raise ConfigError(f"data.prefetch must be 0 or more batches, got {self.prefetch}")
        if self.workers < 1:
            raise ConfigError(
                f"data.workers must be at least 1 thread, got {self.workers}; use prefetch=0 for no thread"
            )


def check_chunk(sequence: int, k: int) -> None:
    """Raise ConfigError unless T = `sequence` is a positive multiple of the chunk size k."""
    if k < 1:
        raise ConfigError(f"the chunk size must be at least 1 token, got {k}")
    if sequence % k:
        raise ConfigError(
            f"data.sequence {sequence} is not a multiple of the chunk size {k}; "
            f"nearest legal data.sequence: {nearest_multiples(sequence, k)}"
        )
