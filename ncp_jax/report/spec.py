"""Chart descriptions: what a chart shows, apart from how it is drawn."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve. `colour` numbers the run; `faint` is background, such as unsmoothed values; `thin` is secondary;
    `error` is drawn as bars of that half length."""

    x: Sequence[float]
    y: Sequence[float]
    label: str | None = None
    colour: int = 0
    style: str = "-"
    marker: bool = False
    faint: bool = False
    thin: bool = False
    error: Sequence[float] | None = None


@dataclasses.dataclass(frozen=True)
class Chart:
    """What every chart carries besides its data."""

    slug: str  # file name
    title: str
    caption: str
    alt: str
    x_label: str
    y_label: str


@dataclasses.dataclass(frozen=True)
class LineChart(Chart):
    """Curves over a common axis; `levels` are named horizontal lines."""

    lines: Sequence[Line] = ()
    levels: Sequence[tuple[str, float]] = ()
    y_range: tuple[float, float] | None = None
    whole_x: bool = False  # x counts things: ticks at whole numbers, no scale letters
    log_x: bool = False


@dataclasses.dataclass(frozen=True)
class HeatMap(Chart):
    """Rows of cells; rows may be of unequal length. `signed` centres the colours at zero."""

    rows: Sequence[Sequence[float]] = ()
    x_ticks: Sequence[str] = ()
    y_ticks: Sequence[str] = ()
    value_label: str = ""
    signed: bool = False
    value_range: tuple[float, float] | None = None
