"""The BrierLM chart: what is drawn, what is named instead, and where scores are read from."""

import json

import pytest

from ncp_jax.report.build import report
from ncp_jax.report.runs import Run, load
from ncp_jax.report.scores import brierlm


def score(step, value, error=0.1, positions=50):
    found = {"value": value, "error": None if value is None else error, "bias": None, "status": "ok"}
    return {
        "step": step, "training_flops": 1e9 * step, "positions": positions, "clusters": 3, "cluster": "document",
        "brierlm": found,
    }  # fmt: skip


def run(name, *scores):
    return Run(name, None, {"train": [], "eval": [], "diagnostics": [], "skipped": []}, {}, {}, {}, [], list(scores))


def test_points_errors_and_scores_that_do_not_exist():
    (chart,) = brierlm([run("calm", score(10, 1.5), score(20, None)), run("ar", score(10, 2.5, 0.2))])
    assert [(list(line.x), list(line.y), list(line.error)) for line in chart.lines] == [
        ([1e10], [1.5], [0.1]),
        ([1e10], [2.5], [0.2]),
    ]
    assert [line.colour for line in chart.lines] == [0, 1]
    assert "50 positions in 3 documents" in chart.caption
    assert "calm at step 20" in chart.caption


def test_brier_1_is_drawn_where_brierlm_has_no_value():
    (chart,) = brierlm([run("calm", score(10, None) | {"brier_n": [0.3, -0.1], "error_n": [0.05, 0.1]})])
    assert (chart.slug, list(chart.lines[0].y), list(chart.lines[0].error)) == ("brier-1", [0.3], [0.05])


def test_no_chart_without_scores():
    assert brierlm([run("a"), run("b", score(1, None))]) == []


def test_scores_on_different_texts_say_so():
    (chart,) = brierlm([run("a", score(1, 1.0)), run("b", score(1, 1.0, positions=60))])
    assert "positions that differ" in chart.caption


def test_scores_are_read_from_the_run_and_plotted(tmp_path):
    folder = tmp_path / "run"
    (folder / "eval").mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"name": "calm"}))
    for step in (20, 3):
        (folder / f"eval/brierlm_held_out_{step}.json").write_text(json.dumps(score(step, 1.0 + step)))
    (folder / "eval/brierlm_broken_1.json").write_text("{")
    found = load(folder)
    assert [one["step"] for one in found.brierlm] == [3, 20]
    assert any("brierlm_broken_1.json is damaged" in note for note in found.notes)
    page = report([folder]).read_text()
    assert "BrierLM against training FLOPs" in page
    assert (folder / "report/brierlm.png").stat().st_size > 5000


@pytest.mark.parametrize("flops", [None, 0])
def test_a_score_without_its_cost_has_no_place(flops):
    assert brierlm([run("a", score(1, 1.0) | {"training_flops": flops})]) == []
