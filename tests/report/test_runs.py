"""Reading run directories, also broken ones."""

import json

import pytest

from ncp_jax.report.runs import ReportError, load, load_all


def write(path, lines, **files):
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    )
    for name, content in files.items():
        (path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def train(step, **values):
    return {"kind": "train", "step": step, "tokens": step * 100, **values}


def test_records_are_sorted_and_a_repeated_step_counts_once(tmp_path):
    lines = [train(1, loss=5.0), train(2, loss=4.0), train(3, loss=9.0), train(2, loss=3.5), train(3, loss=3.0)]
    run = load(write(tmp_path / "a", lines, config={"config": {"name": "first"}}, summary={}))
    assert run.name == "first"
    assert run.series("train", "loss") == ([100.0, 200.0, 300.0], [5.0, 3.5, 3.0])
    assert run.notes == []


def test_a_half_written_last_line_is_left_out_and_noted(tmp_path):
    run = load(write(tmp_path / "a", [train(1, loss=5.0), '{"kind": "train", "st']))
    assert run.series("train", "loss") == ([100.0], [5.0])
    assert any("half-written" in note for note in run.notes)
    assert "summary.json is missing" in run.notes


def test_unreadable_lines_in_the_middle_are_counted(tmp_path):
    run = load(write(tmp_path / "a", [train(1), "garbage\n", "[1]\n", train(2)], summary="{", config={}))
    assert len(run.records["train"]) == 2
    assert any("2 lines cannot be read, the first is line 2" in note for note in run.notes)
    assert any("summary.json is damaged" in note for note in run.notes)


def test_values_that_are_no_finite_number_are_gaps(tmp_path):
    lines = [train(1, mfu=None), train(2, mfu=float("nan")), train(3, mfu=0.5), train(4, mfu="x"), train(5, mfu=True)]
    assert load(write(tmp_path / "a", lines)).series("train", "mfu") == ([300.0], [0.5])


def test_skipped_steps_are_noted(tmp_path):
    run = load(write(tmp_path / "a", [train(1), {"kind": "skipped", "step": 2, "loss": "nan"}]))
    assert any("1 steps were skipped" in note for note in run.notes)


def test_yardsticks_are_optional_numbers(tmp_path):
    run = load(write(tmp_path / "a", [train(1)], yardsticks={"xz -9e": 2.33, "source": "text"}))
    assert run.yardsticks == {"xz -9e": 2.33}
    assert not any("yardsticks" in note for note in load(write(tmp_path / "b", [train(1)])).notes)


def test_what_is_no_run_is_an_error(tmp_path):
    with pytest.raises(ReportError, match="no run directory"):
        load(tmp_path / "absent")
    with pytest.raises(ReportError, match="is no run directory"):
        load(tmp_path)


def test_runs_without_any_number_are_an_error_but_one_of_them_beside_others_is_not(tmp_path):
    empty = write(tmp_path / "empty", [])
    with pytest.raises(ReportError, match=r"empty holds no metrics yet"):
        load_all([empty])
    full = write(tmp_path / "full", [train(1)])
    assert [run.name for run in load_all([empty, full, full])] == ["empty", "full"]


def test_equal_names_get_their_directories(tmp_path):
    paths = [write(tmp_path / where / "nano", [train(1)]) for where in ("a", "b")]
    assert [run.name for run in load_all(paths)] == ["a/nano", "b/nano"]
