"""The report: index.html with everything inside it, and beside it the images as PNG and the numbers as CSV."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from ncp_jax.config import differences
from ncp_jax.report import charts, page, plotting, tables
from ncp_jax.report.runs import ReportError, Run, load_all

MOST_RUNS = len(plotting.LIGHT.series)  # one colour each


def report(paths: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of some run directories; returns the path of index.html.

    `out` defaults to RUN/report for one run and ./report for several. Raises ReportError if there is nothing to show,
    more runs than colours, or no room to write.
    """
    runs = load_all(paths)
    if len(runs) > MOST_RUNS:
        raise ReportError(f"{len(runs)} runs are more than the {MOST_RUNS} colours one can tell apart; name fewer runs")
    folder = Path(out) if out is not None else (runs[0].path / "report" if len(runs) == 1 else Path("report"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sections = [
            page.Section(heading, text, [_draw(chart, folder) for chart in found])
            for heading, text, found in charts.sections(runs)
        ]
        files = tables.write_csv(runs, folder)
        index = folder / "index.html"
        text = page.render(_title(runs), _views(runs), sections, [f.name for f in files], _changes(runs))
        index.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ReportError(f"cannot write the report to {folder}: {error.strerror}; choose another --out") from error
    return index


def _draw(chart: charts.Chart, folder: Path) -> page.Image:
    light, dark = (plotting.draw(chart, theme) for theme in (plotting.LIGHT, plotting.DARK))
    (folder / f"{chart.slug}.png").write_bytes(light)
    return page.Image(chart.title, chart.caption, chart.alt, light, dark)


def _title(runs: Sequence[Run]) -> str:
    return f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs compared"


def _views(runs: Sequence[Run]) -> list[page.RunView]:
    views = []
    for index, (run, row) in enumerate(zip(runs, tables.summary_rows(runs), strict=True)):
        cells = {heading: value for heading, value in row.items() if not heading.startswith("_")}
        colours = (plotting.LIGHT.series[index], plotting.DARK.series[index])
        config = json.dumps(run.document, indent=2) if run.document else None
        views.append(page.RunView(run.name, str(run.summary.get("task") or ""), cells, run.notes, config, colours))
    return views


def _changes(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """For each further run: the config fields in which it differs from the first."""
    first = runs[0]
    return [(run.name, list(_lines(first, run))) for run in runs[1:] if run.config and first.config]


def _lines(first: Run, run: Run) -> Iterable[str]:
    drop = ("name", "workdir")
    ours, theirs = ({k: v for k, v in r.config.items() if k not in drop} for r in (first, run))
    return (line.replace(" -> ", " → ") for line in differences(ours, theirs))
