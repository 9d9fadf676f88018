"""The BrierLM chart of a report: one curve per run over its training FLOPs, with standard errors."""

from collections.abc import Sequence

from ncp_jax.report.runs import Run, number
from ncp_jax.report.spec import Chart, Line, LineChart
from ncp_jax.report.text import power

TITLE = "BrierLM against training FLOPs"


def brierlm(runs: Sequence[Run]) -> list[Chart]:
    """A chart if any run was scored; a score that does not exist (a component is not positive) is named, not drawn."""
    lines, words, absent = [], [], []
    for index, run in enumerate(runs):
        points = []
        for score in run.brierlm:
            flops, value = number(score.get("training_flops")), number(score["brierlm"].get("value"))
            if value is None:
                absent.append(f"{run.name} at step {score['step']}")
            elif flops:
                points.append((flops, value, number(score["brierlm"].get("error")) or 0.0))
        if points:
            x, y, errors = map(list, zip(*sorted(points), strict=True))
            lines.append(Line(x, y, run.name, index, marker=True, error=errors))
            words.append(f"{run.name}: {y[-1]:.2f} ± {errors[-1]:.2f} after {power(x[-1])} FLOPs")
    if not lines:
        return []
    caption = f"Bars: standard errors over {_places(runs)}. The cost of training an autoencoder is not included."
    if absent:
        caption += f" Without a score, since a component is not positive: {', '.join(absent)}."
    alt = f"Line chart of BrierLM against training FLOPs. {'; '.join(words)}."
    return [LineChart("brierlm", TITLE, caption, alt, "training FLOPs", "BrierLM", lines, log_x=True)]


def _places(runs: Sequence[Run]) -> str:
    """What was scored, as far as all scores agree."""
    found = {
        f"{score.get('positions', 0):,} positions in {score.get('clusters')} {score.get('cluster')}s"
        for run in runs for score in run.brierlm
    }  # fmt: skip
    return found.pop() if len(found) == 1 else "positions that differ between the scores; see the files"
