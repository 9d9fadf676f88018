"""Charts of a report: which quantity of which run goes where, and the caption that says what one sees."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ncp_jax.report.runs import Run, number
from ncp_jax.report.scores import brierlm
from ncp_jax.report.spec import Chart, HeatMap, Line, LineChart
from ncp_jax.report.text import short

TOKENS = "tokens seen"
WINDOW = 40  # a running mean covers 1/40 of the logged steps
TRANSIENT = 0.1  # share of the training during which curves may leave the frame
COLUMNS = 120  # of a heat map over time

LOSSES = {  # key -> (title, axis)
    "loss": ("Training objective", "weighted sum of all terms"),
    "loss/ntp": ("Next-token loss", "nats per token"),
    "loss/ncp": ("Next-concept loss", "NCP loss"),
    "loss/vq": ("Codebook loss", "VQ loss"),
}
ROUTES = {  # key -> (title, sources, reader)
    "routes/encoder": ("Routes in the encoder", "source: encoder input, then layer", "encoder layer"),
    "routes/concept": ("Routes in the concept module", "source: concept input, then layer", "concept layer"),
    "routes/decoder": ("Routes in the decoder", "source: decoder input, then layer", "decoder layer"),
    "routes/concept_from_encoder": ("Concept module reads the encoder", "source: encoder layer", "concept layer"),
    "routes/decoder_from_encoder": ("Decoder reads the encoder", "source: encoder layer", "decoder layer"),
    "routes/decoder_from_concept": ("Decoder reads the concept module", "source: concept layer", "decoder layer"),
}


def sections(runs: Sequence[Run]) -> list[tuple[str, str, list[Chart]]]:
    """(heading, introduction, charts), in reading order; a section without charts is left out."""
    candidates = [
        (
            "Quality",
            "Bits that the model needs for a byte of text, and each loss term before its weight: lower is better. "
            "BrierLM, where runs were scored: higher is better.",
            [*quality(runs), *brierlm(runs), *losses(runs)],
        ),
        ("Codebooks", "How many codes are in use. Each segment has its own codebook.", codebooks(runs)),
        (
            "Routes and gates",
            "Mean weights with which each layer reads earlier states, and how each decoder layer divides itself "
            "between two readings of the concept. Newest measurement.",
            [*routes(runs), *gates(runs)],
        ),
        (
            "Optimisation and throughput",
            "What the optimizer did, and how fast.",
            [*optimisation(runs), *throughput(runs)],
        ),
    ]
    return [(heading, text, charts) for heading, text, charts in candidates if charts]


def quality(runs: Sequence[Run]) -> list[Chart]:
    """Bits per byte over tokens, with yardsticks that need no training."""
    yardsticks = {name: value for run in runs for name, value in run.yardsticks.items()}
    chart = _curves(runs, "bits-per-byte", "Bits per byte", "bits per byte", "bits_per_byte", yardsticks)
    return [chart] if chart else []


def losses(runs: Sequence[Run]) -> list[Chart]:
    """One chart per loss term."""
    found = dict.fromkeys(
        key for run in runs for kind in ("train", "eval") for key in run.keys(kind) if key.split("/")[0] == "loss"
    )
    order = [key for key in LOSSES if key in found] + sorted(key for key in found if key not in LOSSES)
    charts = []
    for key in order:
        title, axis = LOSSES.get(key, (f"Loss term {key.removeprefix('loss/')}", key))
        charts.append(_curves(runs, key.replace("/", "-"), title, axis, key))
    return [chart for chart in charts if chart]


def codebooks(runs: Sequence[Run]) -> list[Chart]:
    """Mean over segments for all runs together; every segment for each run; prediction errors."""
    charts: list[Chart | None] = [
        _over_time(
            runs, "code-perplexity", "Code perplexity, mean over segments", "codes in effective use",
            ["codes/perplexity"], _mean, "exp(entropy) of how often each code is the nearest one: the number of codes "
            "if all are used alike, 1 if a single code is used.",
        ),
        _over_time(
            runs, "codes-dead", "Dead codes, all segments", "codes never nearest", ["codes/dead"], _sum,
            "Codes that were not the nearest one for any concept of the measured batch. A small batch leaves codes "
            "unused that are not dead.",
        ),
        _over_time(
            runs, "concept-error", "Error of the predicted concept", "mean squared error",
            ["concept_error/predicted", "concept_error/copy_last", "concept_error/mean"], number,
            "The prediction (solid) beside two guesses without a model: repeat the last concept (dashed), and always "
            "say the mean (dotted). The solid line should be the lowest.",
        ),
    ]  # fmt: skip
    for run in runs:
        codes = (run.config.get("model") or {}).get("concept", {}).get("codes")
        full = (1.0, float(codes)) if codes else None
        charts += [
            _segments(run, runs, "codes/perplexity", "Code perplexity by segment", "codes in effective use", full),
            _segments(run, runs, "codes/dead", "Dead codes by segment", "codes never nearest", None),
        ]
    return [chart for chart in charts if chart]


def routes(runs: Sequence[Run]) -> list[Chart]:
    """One heat map per tower and per pair of towers, for each run."""
    charts: list[Chart] = []
    for run in runs:
        for key, (title, sources, reader) in ROUTES.items():
            rows = _matrix(run.last("diagnostics", key))
            if rows:
                own = "_from_" not in key
                charts.append(_route_map(_slug(run, runs, key), f"{title}{_of(run, runs)}", own, sources, reader, rows))
    return charts


def gates(runs: Sequence[Run]) -> list[Chart]:
    """Both gates of every decoder layer, newest measurement, all runs together."""
    lines, words = [], []
    for index, run in enumerate(runs):
        rows = _matrix(run.last("diagnostics", "gates"))
        if not rows or any(len(row) != 2 for row in rows):
            continue
        depth = list(range(1, len(rows) + 1))
        labels = (run.name, None) if len(runs) > 1 else ("predicted concept", "concept layers")
        lines.append(Line(depth, [g for g, _ in rows], labels[0], index, marker=True))
        lines.append(Line(depth, [g for _, g in rows], labels[1], index, "--", marker=True))
        words.append(f"{run.name}: predicted concept from {rows[0][0]:.2f} in layer 1 to {rows[-1][0]:.2f} in the last")
    if not lines:
        return []
    caption = (
        "Solid: weight of the predicted concept, added again after the layer. Dashed: weight of what the layer reads "
        "from the concept module's layers. The two sum to 1."
    )
    alt = f"Line chart of gates by decoder layer. {'; '.join(words)}."
    return [LineChart("gates", "Gates by decoder layer", caption, alt, "decoder layer", "gate", lines, whole_x=True)]


def optimisation(runs: Sequence[Run]) -> list[Chart]:
    """Learning rates of every group, and the gradient norm."""
    rates = list(dict.fromkeys(k for run in runs for k in run.keys("train") if k.startswith("learning_rate")))
    charts = [
        _over_time(
            runs, "learning-rate", "Learning rate", "learning rate", rates, number,
            _strokes_caption(rates), kind="train",
        ),
        _curves(runs, "gradient-norm", "Gradient norm", "norm before clipping", "gradient_norm"),
    ]  # fmt: skip
    return [chart for chart in charts if chart]


def throughput(runs: Sequence[Run]) -> list[Chart]:
    """Tokens per second, and the share of the hardware's peak where it is known."""
    charts = [
        _curves(runs, "tokens-per-second", "Tokens per second", "tokens per second, all devices", "tokens_per_second"),
        _curves(runs, "mfu", "Model FLOPs utilisation", "share of the peak", "mfu"),
    ]
    return [chart for chart in charts if chart]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to window-1 before it; fewer at the beginning, where curves are steep."""
    means = []
    for i in range(len(values)):
        count = min(window, 1 + i // 8)
        means.append(math.fsum(values[i + 1 - count : i + 1]) / count)
    return means


def _curves(
    runs: Sequence[Run], slug: str, title: str, axis: str, key: str, yardsticks: dict[str, float] | None = None
) -> LineChart | None:
    """Training as a running mean, held-out values with markers."""
    lines, words = [], []
    for index, run in enumerate(runs):
        of_run, described = _run_curves(run, index, key, alone=len(runs) == 1)
        lines += of_run
        words += described
    if not lines:
        return None
    known = yardsticks or {}
    span = _frame(lines, list(known.values()))
    shown = [(name, value) for name, value in known.items() if span is None or span[0] <= value <= span[1]]
    caption = _curve_caption(lines, span, known, shown)
    alt = f"Line chart of {title.lower()} against {TOKENS}. {'; '.join(words)}."
    return LineChart(slug, title, caption, alt, TOKENS, axis, lines, shown, span)


def _run_curves(run: Run, index: int, key: str, alone: bool) -> tuple[list[Line], list[str]]:
    """Lines of one run, and what they say. Colours tell training from held out if `alone`, otherwise the runs apart."""
    lines, words = [], []
    (x, y), (x_eval, y_eval) = run.series("train", key), run.series("eval", key)
    if x:
        window = max(1, len(y) // WINDOW)
        smooth = running_mean(y, window)
        if alone and window > 1:
            lines.append(Line(x, y, colour=index, faint=True))
        label = run.name if not alone else "training" if x_eval else None
        lines.append(Line(x, smooth, None if x_eval and not alone else label, index, thin=bool(x_eval) and not alone))
        words.append(f"{run.name}: training from {short(smooth[0])} to {short(smooth[-1])}")
    if x_eval:
        label, colour = ("held out", index + 1) if alone else (run.name, index)
        lines.append(Line(x_eval, y_eval, label, colour, marker=True))
        words.append(
            f"{run.name}: held out from {short(y_eval[0])} to {short(y_eval[-1])}, lowest {short(min(y_eval))}"
        )
    return lines, words


def _curve_caption(
    lines: Sequence[Line], span: tuple[float, float] | None, known: dict[str, float], shown: Sequence[tuple[str, float]]
) -> str:
    parts = []
    held_out = any(line.marker for line in lines)
    if held_out:
        parts.append("With markers: held-out text.")
    if any(not line.marker for line in lines):
        parts.append(f"{'Without: training' if held_out else 'Training'}, running mean over 1/{WINDOW} of the steps.")
    if shown:
        parts.append("Dashes: yardsticks that need no neural network.")
    hidden = [f"{name} ({value:.2f})" for name, value in known.items() if (name, value) not in shown]
    if hidden:
        parts.append(f"Outside the frame: {', '.join(hidden)}.")
    if span and max(max(line.y) for line in lines) > span[1]:
        parts.append("The first steps are above the frame.")
    return " ".join(parts)


def _frame(lines: Sequence[Line], levels: Sequence[float]) -> tuple[float, float] | None:
    """Vertical range that neither the first steps nor a far yardstick squeeze. None: let the plot choose."""
    end = max(max(line.x) for line in lines)
    settled = [y for line in lines for x, y in zip(line.x, line.y, strict=True) if x >= TRANSIENT * end]
    low, high = min(settled), max(settled)
    near = [level for level in levels if 0.5 * low <= level <= 1.5 * high]
    top = max(max(line.y) for line in lines)
    if low <= 0 or (not near and top <= 1.3 * high):
        return None
    low, high = min([low, *near]), max([high, *near])
    margin = 0.06 * (high - low) or 0.05 * high
    return low - margin, high + margin


def _over_time(
    runs: Sequence[Run], slug: str, title: str, axis: str, keys: Sequence[str],
    reduce: Callable[[Any], float | None], caption: str, kind: str = "diagnostics",
) -> LineChart | None:  # fmt: skip
    """One number per record; several keys are told apart by the stroke."""
    strokes = dict(zip(keys, ["-", "--", ":", "-."] * (len(keys) // 4 + 1), strict=False))
    lines: list[Line] = []
    words = []
    for index, run in enumerate(runs):
        for key in keys:
            points = [(float(r.get("tokens", r["step"])), reduce(r.get(key))) for r in run.records[kind]]
            x, y = [p for p, v in points if v is not None], [v for _, v in points if v is not None]
            if x:
                name = key.rpartition("/")[2].replace("_", " ")
                label = name if len(keys) > 1 else None
                if len(runs) > 1:  # colours are runs, and the caption explains the strokes
                    label = None if any(line.label == run.name for line in lines) else run.name
                lines.append(Line(x, y, label, index if len(runs) > 1 else keys.index(key), strokes[key]))
                words.append(f"{run.name}, {name}: from {short(y[0])} to {short(y[-1])}")
    if not lines:
        return None
    alt = f"Line chart of {title.lower()} against {TOKENS}. {'; '.join(words)}."
    return LineChart(slug, title, caption, alt, TOKENS, axis, lines)


def _segments(
    run: Run, runs: Sequence[Run], key: str, title: str, value_label: str, value_range: tuple[float, float] | None
) -> HeatMap | None:
    """Segments down, time to the right; the columns are records, thinned evenly."""
    records = [r for r in run.records["diagnostics"] if _is_vector(r.get(key))]
    if not records:
        return None
    records = [records[i] for i in _thinned(len(records), COLUMNS)]
    segments = min(len(r[key]) for r in records)
    rows = [[float(r[key][s]) for r in records] for s in range(segments)]
    ends = [row[-1] for row in rows]
    caption = "Segments down, time to the right. " + (
        "Bright: all codes in use." if key == "codes/perplexity" else "Bright: a codebook that collapses."
    )
    alt = (
        f"Heat map of {title.lower()}{_of(run, runs)}: {segments} segments over {len(records)} measurements; "
        f"at the end from {short(min(ends))} to {short(max(ends))}."
    )
    return HeatMap(
        _slug(run, runs, f"{key}-by-segment"), f"{title}{_of(run, runs)}", caption, alt, TOKENS, "segment", rows,
        [short(r.get("tokens", r["step"])) for r in records], [str(s + 1) for s in range(segments)], value_label,
        value_range=value_range,
    )  # fmt: skip


def _route_map(slug: str, title: str, own: bool, sources: str, reader: str, rows: list[list[float]]) -> HeatMap:
    """`own`: the sources are the tower's own history, which begins with its input."""
    width = max(map(len, rows))
    ticks = ["in", *map(str, range(1, width))] if own else [str(i + 1) for i in range(width)]
    values = [value for row in rows for value in row]
    signed = min(values) < 0
    newest = "The last cell of a row is the layer's own output. " if own else ""
    scale = "Orange: negative, white: zero, purple: positive." if signed else "Bright: a large weight."
    alt = f"Heat map of {title.lower()}: {len(rows)} layers; weights from {min(values):.2f} to {max(values):.2f}."
    return HeatMap(
        slug, title, f"One row per layer. {newest}{scale}", alt, sources, reader, rows, ticks,
        [str(i + 1) for i in range(len(rows))], "mean weight", signed,
    )  # fmt: skip


def _strokes_caption(rates: Sequence[str]) -> str:
    names = [key.rpartition("/")[2] for key in rates]
    strokes = [
        f"{name} {stroke}" for name, stroke in zip(names, ("solid", "dashed", "dotted", "dash-dotted"), strict=False)
    ]
    return f"As scheduled, one line per optimizer group: {', '.join(strokes)}."


def _of(run: Run, runs: Sequence[Run]) -> str:
    return f", {run.name}" if len(runs) > 1 else ""


def _slug(run: Run, runs: Sequence[Run], key: str) -> str:
    name = f"{key}-{run.name}" if len(runs) > 1 else key
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)


def _thinned(count: int, limit: int) -> Iterable[int]:
    """Up to `limit` indices, evenly spread, first and last included."""
    if count <= limit:
        return range(count)
    return [round(i * (count - 1) / (limit - 1)) for i in range(limit)]


def _is_vector(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(number(part) is not None for part in value)


def _matrix(value: Any) -> list[list[float]]:
    if not isinstance(value, list) or not value or not all(_is_vector(row) for row in value):
        return []
    return [[float(part) for part in row] for row in value]


def _mean(value: Any) -> float | None:
    return math.fsum(value) / len(value) if _is_vector(value) else None


def _sum(value: Any) -> float | None:
    return math.fsum(value) if _is_vector(value) else None
