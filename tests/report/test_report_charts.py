"""What each chart shows, read from its description."""

import pytest

from ncp_jax.report import charts
from ncp_jax.report.runs import KINDS, Run


def make(name="nano", config=None, yardsticks=None, **records):
    return Run(
        name=name, path=None, records={kind: records.get(kind, []) for kind in KINDS}, summary={},
        document={"config": config or {}}, yardsticks=yardsticks or {}, notes=[],
    )  # fmt: skip


def curve(values, key="bits_per_byte", kind="train"):
    return [{"kind": kind, "step": s, "tokens": s * 10, key: v} for s, v in enumerate(values, 1)]


def diagnostics(**values):
    return [
        {"kind": "diagnostics", "step": 5, "tokens": 50, **{key.replace("__", "/"): v for key, v in values.items()}}
    ]


def test_running_mean_is_a_mean_of_the_last_values():
    values = list(range(100))
    means = charts.running_mean(values, 4)
    assert means[0] == 0
    assert means[50] == (47 + 48 + 49 + 50) / 4
    assert charts.running_mean(values, 1) == values


def test_one_run_has_raw_smooth_and_held_out_curves():
    run = make(train=curve([4 - i / 100 for i in range(200)]), eval=curve([3.0, 2.5], kind="eval"))
    (chart,) = charts.quality([run])
    assert [line.label for line in chart.lines] == [None, "training", "held out"]
    assert chart.lines[0].faint
    assert chart.lines[2].y == [3.0, 2.5]
    assert "lowest 2.5" in chart.alt


def test_several_runs_have_one_colour_and_one_label_each():
    runs = [make(name, train=curve([3, 2]), eval=curve([2.5], kind="eval")) for name in ("a", "b")]
    (chart,) = charts.quality(runs)
    assert {(line.colour, line.label) for line in chart.lines if line.label} == {(0, "a"), (1, "b")}
    assert {line.colour for line in chart.lines} == {0, 1}


def test_near_yardsticks_are_drawn_and_far_ones_are_told():
    run = make(train=curve([2.5] * 20), yardsticks={"5-gram": 2.2, "bytes": 8.0})
    (chart,) = charts.quality([run])
    assert chart.levels == [("5-gram", 2.2)]
    assert "bytes (8.00)" in chart.caption
    low, high = chart.y_range
    assert low < 2.2 < 2.5 < high


def test_the_first_steps_do_not_squeeze_the_rest():
    run = make(train=curve([11.0, 8.0] + [2.0 + i / 100 for i in range(98)]))
    (chart,) = charts.quality([run])
    assert chart.y_range[1] < 4
    assert "above the frame" in chart.caption


def test_loss_terms_come_in_order_and_unknown_ones_follow():
    record = {"step": 1, "tokens": 1, "loss/vq": 1.0, "loss": 2.0, "loss/other": 1.0, "loss/ntp": 1.0, "loss/ncp": 0.0}
    assert [chart.slug for chart in charts.losses([make(train=[record])])] == [
        "loss", "loss-ntp", "loss-ncp", "loss-vq", "loss-other",
    ]  # fmt: skip


def test_a_family_without_concepts_has_no_concept_charts():
    run = make(train=curve([3, 2]))
    assert [heading for heading, _, _ in charts.sections([run])] == ["Quality"]
    both = charts.sections(
        [run, make("ncp", diagnostics=diagnostics(codes__dead=[1, 2], codes__perplexity=[3.0, 5.0]))]
    )
    assert [heading for heading, _, _ in both] == ["Quality", "Codebooks"]


def test_codebooks_have_means_sums_and_a_map_per_run():
    values = [diagnostics(codes__dead=[1, 2], codes__perplexity=[3.0, 5.0])[0] | {"step": s} for s in (1, 2, 3)]
    run = make(config={"model": {"concept": {"codes": 8}}}, diagnostics=values)
    by_slug = {chart.slug: chart for chart in charts.codebooks([run])}
    assert by_slug["code-perplexity"].lines[0].y == [4.0] * 3
    assert by_slug["codes-dead"].lines[0].y == [3.0] * 3
    perplexity_map = next(c for c in charts.codebooks([run]) if c.title == "Code perplexity by segment")
    assert perplexity_map.rows == [[3.0] * 3, [5.0] * 3]
    assert perplexity_map.value_range == (1.0, 8.0)


def test_many_measurements_are_thinned_evenly():
    values = [{"step": s, "tokens": s, "codes/dead": [s]} for s in range(1000)]
    (chart,) = [c for c in charts.codebooks([make(diagnostics=values)]) if c.title == "Dead codes by segment"]
    assert len(chart.rows[0]) == charts.COLUMNS
    assert (chart.rows[0][0], chart.rows[0][-1]) == (0, 999)


def test_route_maps_name_their_sources():
    record = diagnostics(
        routes__encoder=[[0.1, 0.9], [-0.1, 0.2, 0.9]], routes__decoder_from_concept=[[0.5, 0.5], [1.0, 0.0]]
    )
    own, read = charts.routes([make(diagnostics=record)])
    assert own.x_ticks == ["in", "1", "2"]
    assert own.y_ticks == ["1", "2"]
    assert own.signed
    assert read.x_ticks == ["1", "2"]
    assert not read.signed
    assert "weights from -0.10 to 0.90" in own.alt


@pytest.mark.parametrize("broken", [None, [], "text", [[1.0, "x"]], [[float("nan"), 1.0]]])
def test_broken_route_weights_are_left_out(broken):
    assert charts.routes([make(diagnostics=diagnostics(routes__encoder=broken))]) == []


def test_gates_are_read_by_depth():
    (chart,) = charts.gates([make(diagnostics=diagnostics(gates=[[0.5, 0.5], [0.7, 0.3]]))])
    assert [line.y for line in chart.lines] == [[0.5, 0.7], [0.5, 0.3]]
    assert chart.whole_x


def test_learning_rates_of_all_groups_are_in_one_chart():
    records = [{"step": s, "tokens": s, "learning_rate/muon": 0.02, "learning_rate/adamw": 0.001} for s in (1, 2)]
    chart = charts.optimisation([make(train=records)])[0]
    assert [line.label for line in chart.lines] == ["muon", "adamw"]
    assert "muon solid, adamw dashed" in chart.caption
