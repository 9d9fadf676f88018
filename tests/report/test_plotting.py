"""Drawings: size, colours, and that awkward data do not stop them."""

import io

import matplotlib.image
import pytest
from matplotlib.colors import to_rgb

from ncp_jax.report import plotting
from ncp_jax.report.spec import HeatMap, Line, LineChart

WORDS = {"slug": "s", "title": "t", "caption": "c", "alt": "a", "x_label": "tokens seen", "y_label": "loss"}


def pixels(chart, theme=plotting.LIGHT):
    return matplotlib.image.imread(io.BytesIO(plotting.draw(chart, theme)))


@pytest.mark.parametrize("theme", [plotting.LIGHT, plotting.DARK])
def test_a_line_has_its_colour_on_the_paper_of_the_scheme(theme):
    image = pixels(LineChart(**WORDS, lines=[Line([0, 1e6], [1.0, 2.0], "run", colour=1)]), theme)
    assert image.shape[:2] == (700, 960)
    assert image[0, 0, :3] == pytest.approx(to_rgb(theme.paper), abs=0.01)
    distance = abs(image[..., :3] - to_rgb(theme.series[1])).max(axis=-1)
    assert (distance < 0.02).sum() > 200


@pytest.mark.parametrize(
    "lines", [[Line([5], [1.0], "one point")], [Line([1, 2], [0.0, 0.0], "flat")], [Line([1, 2], [1e5, 2e9], "large")]]
)
def test_awkward_lines(lines):
    chart = LineChart(**WORDS, lines=lines, levels=[("level", 0.5), ("close", 0.51)], whole_x=True)
    assert pixels(chart).shape[:2] == (700, 960)


def test_a_signed_map_is_white_at_zero_and_paper_where_rows_end():
    rows = [[1.0, 0.0] * 6, [-1.0] * 11]
    image = pixels(HeatMap(**WORDS, rows=rows, x_ticks=[str(i) for i in range(12)], y_ticks=["1", "2"], signed=True))
    middle = image[100:400:50, 100:700:5, :3].reshape(-1, 3)
    assert (middle.min(axis=-1) > 0.95).any()
    assert (middle.min(axis=-1) < 0.3).any()


def test_a_map_of_one_value_is_drawn():
    chart = HeatMap(**WORDS, rows=[[0.25]], x_ticks=["in"], y_ticks=["1"], value_label="w")
    assert pixels(chart).shape[:2] == (700, 960)


def test_series_colours_can_be_told_apart():
    for theme in (plotting.LIGHT, plotting.DARK):
        assert len(set(theme.series)) == len(theme.series) >= 7
