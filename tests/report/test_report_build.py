"""The report as a user gets it: page, images, tables, errors."""

import argparse
import csv
import importlib
import json
import re
import sys
from html.parser import HTMLParser

import pytest

from ncp_jax.cli import report as command
from ncp_jax.report.build import report
from ncp_jax.report.runs import ReportError


def write_run(path, task="ncp", name=None, layers=2):
    path.mkdir(parents=True)
    lines = []
    for step in range(1, 6):
        where = {"step": step, "tokens": step * 1000, "seconds": step * 0.5}
        ntp = {"loss/ntp": 6 - step / 2, "bits_per_byte": 3 - step / 4}
        concept = {"loss/ncp": 1 / step, "loss/vq": 0.5} if task == "ncp" else {}
        rates = {"learning_rate/muon": 0.02, "gradient_norm": 1.0, "tokens_per_second": 2000.0, "mfu": None}
        lines.append({"kind": "train", **where, "loss": 7 - step / 2, **ntp, **concept, **rates})
    lines.append({"kind": "eval", "step": 5, "tokens": 5000, **ntp, **concept, "best": True})
    if task == "ncp":
        routes = {"routes/encoder": [[0.1] * (l + 2) for l in range(layers)], "gates": [[0.4, 0.6]] * layers}
        codes = {"codes/perplexity": [3.0, 4.0], "codes/used": [1.0, 0.5], "codes/dead": [0, 2]}
        lines.append({"kind": "diagnostics", "step": 5, "tokens": 5000, **routes, **codes})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    name = name or path.name
    config = {"name": name, "model": {"kind": task, "layers": layers}}
    (path / "config.json").write_text(json.dumps({"config": config, "versions": {"jax": "0"}}))
    summary = {
        "name": name,
        "task": task,
        "best_bits_per_byte": 1.75,
        "parameters": 31_400_000,
        "flops_per_token": 1.6e8,
    }
    (path / "summary.json").write_text(json.dumps(summary))
    return path


class Page(HTMLParser):
    """Images, open tags and text of a page."""

    VOID = ("meta", "img", "source", "link", "br")

    def __init__(self, text):
        super().__init__()
        self.images, self.stack, self.words, self.links = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.images.append(dict(attrs))
        self.links += [value for key, value in attrs if key in ("href", "src", "srcset")]
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    run = write_run(tmp_path_factory.mktemp("single") / "nano <b>")
    (run / "train.log").write_text("bits_per_byte 0.0001 nonsense from a log")
    return report([run])


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    root = tmp_path_factory.mktemp("several")
    runs = [write_run(root / "ncp"), write_run(root / "olmo", task="olmo3", layers=3)]
    with open(runs[1] / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "ste')
    return report(runs, root / "out")


def test_the_page_is_well_formed_and_self_contained(single):
    text = single.read_text()
    page = Page(text)
    assert page.stack == []
    assert "<script" not in text
    assert all(link.startswith(("data:image/png;base64,", "#")) or link.endswith(".csv") for link in page.links)
    assert "nano <b>" in "".join(page.words), "names are escaped, not interpreted"
    assert "nonsense" not in text


def test_every_image_says_what_it_shows(single):
    images = Page(single.read_text()).images
    assert len(images) >= 12
    assert all(re.match(r"(Line chart|Heat map) of ", image["alt"]) and len(image["alt"]) > 40 for image in images)
    assert len(list(single.parent.glob("*.png"))) == len(images)
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in single.parent.glob("*.png"))


def test_the_default_place_is_the_run(single):
    assert single.name == "index.html"
    assert single.parent.parent.name == "nano <b>"


def test_tables_hold_the_logged_numbers(several):
    def rows(name):
        with open(several.parent / f"{name}.csv", newline="") as file:
            return list(csv.DictReader(file))

    assert [row["loss/ntp"] for row in rows("train") if row["run"] == "ncp"] == ["5.5", "5.0", "4.5", "4.0", "3.5"]
    assert [row["run"] for row in rows("summary")] == ["ncp", "olmo"]
    assert rows("summary")[0]["best_bits_per_byte"] == "1.75"
    assert json.loads(rows("diagnostics")[0]["codes/dead"]) == [0, 2]


def test_several_runs_are_told_apart_and_compared(several):
    text = "".join(Page(several.read_text()).words)
    assert "2 runs compared" in text
    assert "olmo: the last line of metrics.jsonl is half-written" in text
    assert "model.layers: 2 → 3" in text
    assert "31.4 M" in text
    assert (several.parent / "routes-encoder-ncp.png").exists()
    assert not (several.parent / "routes-encoder-olmo.png").exists()


def test_the_command_prints_where_the_report_is(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["report", str(write_run(tmp_path / "run", task="olmo3")), "--out", str(tmp_path / "o")])
    assert args.run(args) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "o" / "index.html")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=r"cannot write the report to .*file/out.*--out"):
        report([write_run(tmp_path / "run")], tmp_path / "file" / "out")


def test_more_runs_than_colours_are_refused(tmp_path):
    runs = [write_run(tmp_path / f"run{i}", task="olmo3") for i in range(8)]
    with pytest.raises(ReportError, match="8 runs are more than the 7 colours"):
        report(runs, tmp_path / "out")


@pytest.mark.parametrize(("package", "module"), [("matplotlib", "plotting"), ("jinja2", "page")])
def test_a_missing_package_names_the_extra(monkeypatch, package, module):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"ncp_jax.report.{module}")
    with pytest.raises(ReportError, match=r"pip install 'ncp-jax\[report\]'"):
        importlib.import_module(f"ncp_jax.report.{module}")


def test_the_other_subcommands_do_not_load_matplotlib():
    import subprocess

    script = "import sys, ncp_jax.cli.report; print([m for m in ('matplotlib', 'jinja2', 'jax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
