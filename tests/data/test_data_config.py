"""Data configuration: what is refused, and what the message says."""

import pytest

from ncp_jax.config import ConfigError, from_dict, to_dict
from ncp_jax.data.config import DataConfig, Source, check_chunk


def test_round_trip():
    config = DataConfig((Source("a", 0.7), Source("gs://b/c/", 0.3, "val")), sequence=64, packing="concat")
    assert from_dict(DataConfig, to_dict(config)) == config
    assert [source.store for source in config.mixture] == ["a/train", "gs://b/c/val"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixture": ()}, "mixture is empty"),
        ({"sequence": 0}, "sequence must be at least 1"),
        ({"shuffle_seed": 2**32}, "shuffle_seed"),
        ({"prefetch": -1}, "prefetch"),
        ({"workers": 0}, "workers"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**{"mixture": (Source("a"),), "sequence": 8, **changes})


@pytest.mark.parametrize("weight", [0, -1.0, float("inf"), float("nan")])
def test_a_weight_is_positive_and_finite(weight):
    with pytest.raises(ConfigError, match="source 'a' has weight"):
        Source("a", weight)


def test_chunk_names_nearest_legal_sequence():
    check_chunk(1024, 4)
    with pytest.raises(ConfigError, match="1020 or 1024"):
        check_chunk(1022, 4)
