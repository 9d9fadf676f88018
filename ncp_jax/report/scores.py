"""The BrierLM charts of a report: scores of each run over its training FLOPs, with standard errors."""

from collections.abc import Callable, Sequence
from typing import Any

from ncp_jax.report.runs import Run, number
from ncp_jax.report.spec import Chart, Line, LineChart
from ncp_jax.report.text import power

Pick = Callable[[dict], tuple[Any, ...]]  # a score -> (value, standard error), None where there is none


def brierlm(runs: Sequence[Run]) -> list[Chart]:
    """BrierLM, and Brier-1, which also exists where a small model leaves the geometric mean without a value."""
    found = [
        _chart(
            runs, "brierlm", "BrierLM", lambda score: (score["brierlm"].get("value"), score["brierlm"].get("error"))
        ),
        _chart(runs, "brier-1", "Brier-1", lambda score: (_first(score, "brier_n"), _first(score, "error_n"))),
    ]
    return [chart for chart in found if chart]


def _chart(runs: Sequence[Run], slug: str, name: str, pick: Pick) -> LineChart | None:
    """A score that does not exist is named, not drawn."""
    lines, words, absent = [], [], []
    for index, run in enumerate(runs):
        points = []
        for score in run.brierlm:
            flops, (value, error) = number(score.get("training_flops")), map(number, pick(score))
            if value is None:
                absent.append(f"{run.name} at step {score['step']}")
            elif flops:
                points.append((flops, value, error or 0.0))
        if points:
            x, y, errors = map(list, zip(*sorted(points), strict=True))
            lines.append(Line(x, y, run.name, index, marker=True, error=errors))
            words.append(f"{run.name}: {y[-1]:.2f} ± {errors[-1]:.2f} after {power(x[-1])} FLOPs")
    if not lines:
        return None
    caption = f"Bars: standard errors over {_places(runs)}. The cost of training an autoencoder is not included."
    if absent:
        caption += f" Without a score, since a component is not positive: {', '.join(absent)}."
    title = f"{name} against training FLOPs"
    alt = f"Line chart of {title}. {'; '.join(words)}."
    return LineChart(slug, title, caption, alt, "training FLOPs", name, lines, log_x=True)


def _first(score: dict, key: str) -> Any:
    values = score.get(key)
    return values[0] if isinstance(values, list) and values else None


def _places(runs: Sequence[Run]) -> str:
    """What was scored, as far as all scores agree."""
    found = {
        f"{score.get('positions', 0):,} positions in {score.get('clusters')} {score.get('cluster')}s"
        for run in runs for score in run.brierlm
    }  # fmt: skip
    return found.pop() if len(found) == 1 else "positions that differ between the scores; see the files"
