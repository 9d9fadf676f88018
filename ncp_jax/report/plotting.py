"""Chart drawings: matplotlib turns a LineChart or a HeatMap into a PNG, one panel per image for narrow screens."""

import dataclasses
import io
import math

from ncp_jax.report.runs import ReportError
from ncp_jax.report.spec import Chart, HeatMap, LineChart
from ncp_jax.report.text import short

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps, ticker
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ReportError("plots need matplotlib; pip install 'ncp-jax[report]'") from error

SIZE = (4.8, 3.5)  # inches; 10 pt text stays 10 px high when the image is 360 px wide
DPI = 200
CURVE_MARKERS = "osD^vPX*"


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colours of one scheme. `series` follows Okabe and Ito (2008), told apart with any colour vision."""

    name: str
    paper: str
    ink: str
    muted: str
    grid: str
    series: tuple[str, ...]


LIGHT = Theme(
    "light", "#ffffff", "#1f2328", "#59636e", "#e4e7eb",
    ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"),
)  # fmt: skip
DARK = Theme(
    "dark", "#161b22", "#e6edf3", "#9aa6b2", "#2d343d",
    ("#56b4e9", "#ff8c42", "#2ec498", "#e29fc6", "#f0b93a", "#8585ff", "#ffffff"),
)  # fmt: skip


def draw(chart: Chart, theme: Theme) -> bytes:
    """PNG of a chart, 960 x 700 pixels."""
    figure = Figure(figsize=SIZE, dpi=DPI, facecolor=theme.paper, layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor(theme.paper)
    if isinstance(chart, LineChart):
        _draw_lines(figure, axes, chart, theme)
    elif isinstance(chart, HeatMap):
        _draw_cells(figure, axes, chart, theme)
    axes.set_xlabel(chart.x_label, color=theme.ink, fontsize=10)
    axes.set_ylabel(chart.y_label, color=theme.ink, fontsize=10)
    axes.tick_params(which="both", colors=theme.muted, labelsize=9, length=3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor=theme.paper, metadata={"Software": None})
    return buffer.getvalue()


def _draw_lines(figure: Figure, axes: Axes, chart: LineChart, theme: Theme) -> None:
    axes.grid(color=theme.grid, linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(theme.muted)
    for line in chart.lines:
        shape = CURVE_MARKERS[line.colour % len(CURVE_MARKERS)] if line.marker or len(line.x) == 1 else None
        width, opacity = (0.7, 0.3) if line.faint else (0.9, 0.6) if line.thin else (1.6, 1.0)
        axes.plot(
            line.x, line.y, line.style, label=line.label, color=theme.series[line.colour % len(theme.series)],
            linewidth=width, alpha=opacity, marker=shape, markersize=3.5, markevery=max(1, len(line.x) // 20),
            zorder=1 + opacity,
        )  # fmt: skip
        if line.error is not None:
            axes.errorbar(line.x, line.y, line.error, fmt="none", ecolor=theme.series[line.colour % len(theme.series)])
    if chart.y_range:
        axes.set_ylim(*chart.y_range)
    _draw_levels(axes, chart, theme)
    if chart.log_x:
        axes.set_xscale("log")
    elif chart.whole_x:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
    else:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: short(value)))
    axes.yaxis.set_major_locator(ticker.MaxNLocator(6))
    if max((abs(y) for line in chart.lines for y in line.y), default=0) >= 1e4:
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: short(value)))
    labelled = sum(line.label is not None for line in chart.lines)
    if labelled:
        longest = max(len(line.label or "") for line in chart.lines)
        columns = 1 if labelled == 1 or longest > 26 else 3 if longest <= 12 and labelled in (3, 5, 6) else 2
        legend = figure.legend(
            loc="outside lower center", ncols=columns, frameon=False, fontsize=9, handlelength=2.2, columnspacing=1.5
        )
        for text in legend.get_texts():
            text.set_color(theme.ink)
            text.set_text(text.get_text() if len(text.get_text()) <= 52 else text.get_text()[:51] + "…")


def _draw_levels(axes: Axes, chart: LineChart, theme: Theme) -> None:
    """Named horizontal lines; a name stands above its line, or below it when the line above is too close."""
    low, high = axes.get_ylim()
    below = math.inf
    for label, level in sorted(chart.levels, key=lambda pair: -pair[1]):
        crowded = below - level < 0.09 * (high - low)
        axes.axhline(level, color=theme.muted, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            f"{label} {level:.2f}", (1.0, level), xycoords=("axes fraction", "data"), fontsize=8, color=theme.ink,
            xytext=(0, -2 if crowded else 2), textcoords="offset points", ha="right", va="top" if crowded else "bottom",
            bbox={"facecolor": theme.paper, "edgecolor": "none", "alpha": 0.75, "pad": 0.5}, zorder=3,
        )  # fmt: skip
        below = level


def _draw_cells(figure: Figure, axes: Axes, chart: HeatMap, theme: Theme) -> None:
    width = max(len(row) for row in chart.rows)
    cells = [[*row, *[math.nan] * (width - len(row))] for row in chart.rows]
    values = [value for row in chart.rows for value in row if math.isfinite(value)] or [0.0]
    low, high = chart.value_range or (min(values), max(values))
    if chart.signed:
        high = max(abs(low), abs(high)) or 1.0
        low = -high
    colours = colormaps["PuOr" if chart.signed else "cividis"].with_extremes(bad=theme.paper)
    image = axes.imshow(
        cells, cmap=colours, vmin=low, vmax=high if high > low else low + 1, aspect="auto", interpolation="nearest"
    )
    _label(axes, chart)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if len(cells) <= 8 and width <= 9:
        _write_values(axes, chart, low, high)
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=25)
    bar.set_label(chart.value_label, color=theme.ink, fontsize=9)
    bar.ax.tick_params(colors=theme.muted, labelsize=8, length=2)
    bar.outline.set_visible(False)


def _label(axes: Axes, chart: HeatMap) -> None:
    """At most about eight labels per axis, at whole cells."""
    for axis, labels in ((axes.xaxis, chart.x_ticks), (axes.yaxis, chart.y_ticks)):
        every = math.ceil(len(labels) / (6 if max(map(len, labels), default=0) > 3 else 10)) or 1
        axis.set_ticks(range(0, len(labels), every), labels[::every])


def _write_values(axes: Axes, chart: HeatMap, low: float, high: float) -> None:
    for y, row in enumerate(chart.rows):
        for x, value in enumerate(row):
            place = (value - low) / ((high - low) or 1)  # cividis ends bright; PuOr is bright in the middle
            bright = 0.25 < place < 0.75 if chart.signed else place > 0.55
            text = f"{value:.0f}" if abs(value) >= 10 else f"{value:z.2f}"
            axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color="#000000" if bright else "#ffffff")
