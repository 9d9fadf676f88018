"""TPU slices: which exist, and what is said of those that do not."""

import pytest

from ncp_jax.config import ConfigError
from ncp_jax.plan.chips import CHIPS, parse


@pytest.mark.parametrize(
    ("name", "chips"), [("v5p:2x2x1", 4), ("v5p:4x4x4", 64), ("v5e:16x16", 256), ("v6e:8x8", 64), ("v4:4x4x8", 128)]
)
def test_slices_that_exist(name, chips):
    assert parse(name).chips == chips
    assert parse(name, slices=2).chips == 2 * chips
    assert str(parse(name)) == name


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("v9:2x2", "no chip 'v9'; known: v4, v5e, v5p, v6e"),
        ("v5p:2x2", "'v5p:2x2' does not exist; v5p has 2x2x1, .*multiples of 4"),
        ("v5e:3x3", "v5e has 1x1, 2x2"),
        ("v5e:32x32", "does not exist"),
        ("v5p:8x4x4", "smallest first"),
        ("v5p:4xx4", "does not exist"),
        ("v6e", "does not exist; v6e has"),
    ],
)
def test_slices_that_do_not(name, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse(name)


def test_slices_must_be_positive():
    with pytest.raises(ConfigError, match="--slices 0"):
        parse("v5e:2x2", 0)


def test_peaks_agree_with_the_trainer():
    from ncp_jax.train.throughput import PEAK_FLOPS

    for kind in ("v4", "v5e", "v5p", "v6e"):
        assert CHIPS[kind].flops == PEAK_FLOPS[f"TPU {kind}"]
