"""Number formats."""

import pytest

from ncp_jax.report import text


@pytest.mark.parametrize(
    ("value", "printed"),
    [(None, text.DASH), (0.0, "0"), (12.345, "12.3"), (999.9, "1 k"), (31_400_000, "31.4 M"), (5.5e12, "5.5 T")],
)
def test_short(value, printed):
    assert text.short(value) == printed


def test_power_and_duration_and_fixed():
    assert text.power(1.6e8) == f"1.60 {text.TIMES} 10⁸"
    assert text.power(2.5e-3) == f"2.50 {text.TIMES} 10⁻³"
    assert [text.duration(s) for s in (12, 250, 11100)] == ["12 s", "4 min 10 s", "3 h 05 min"]
    assert (text.fixed(1.23456), text.fixed(None)) == ("1.2346", text.DASH)
