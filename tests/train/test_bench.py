"""The benchmark command: configs in turn in one process, figures that belong together."""

import json

import pytest
from tiny_runs import config_file

from ncp_jax.cli.main import main


@pytest.fixture(scope="module")
def measured(corpus, tmp_path_factory):
    """(printed text, JSON) of two configs."""
    folder = tmp_path_factory.mktemp("bench")
    files = [str(config_file(folder, corpus, model)) for model in ("ncp", "olmo3")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ncp_jax.train.bench.make_mesh", _one_device)
        status = main(["bench", files[0], "--vs", files[1], "--steps", "3", "--json", str(folder / "out.json")])
    assert status == 0
    return json.loads((folder / "out.json").read_text())


def _one_device(config):
    import jax

    from ncp_jax.parallel.mesh import make_mesh

    return make_mesh(config, jax.devices()[:1])


def test_figures_belong_together(measured):
    assert [one["name"] for one in measured["configs"]] == ["tiny_ncp", "tiny_olmo3"]
    assert measured["steps"] == 3
    assert measured["machine"]["backend"] == "cpu"
    for one in measured["configs"]:
        assert 0 < one["fastest"] <= one["median"] <= one["slowest"]
        assert one["tokens_per_second"] == pytest.approx(8 * 16 / one["median"])
        assert one["flops_per_second"] > 0
        assert one["mfu"] is None  # the peak of a CPU is unknown
        assert 0 < one["loss"] < 8


def test_decoding_in_lines(corpus, tmp_path, capsys):
    files = [str(config_file(tmp_path, corpus, model)) for model in ("ncp", "olmo3")]
    assert main(["bench", files[0], "--vs", files[1], "--decode", "6", "--alone", "--json", "-", "train.batch=3"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["name"], one["what"]) for one in found] == [("tiny_ncp", "decode"), ("tiny_olmo3", "decode")]
    for one in found:
        assert (one["rows"], one["prompt"], one["new"]) == (3, 10, 6)
        assert 0 < one["fastest"] <= one["median"] <= one["slowest"]
        assert one["tokens_per_second"] == pytest.approx(3 / one["median"])
        assert one["first_token_seconds"] > 0


@pytest.mark.parametrize("count", ["1", "16"])
def test_decoding_needs_a_prompt(corpus, tmp_path, capsys, count):
    assert main(["bench", str(config_file(tmp_path, corpus, "ncp")), "--decode", count]) == 2
    assert f"--decode {count}: from 2 to 15 tokens" in capsys.readouterr().err


def test_decoding_needs_token_probabilities(capsys):
    assert main(["bench", "configs/calm_nano.py", "--decode", "8"]) == 2
    assert "calm_nano is a 'calm': --decode times models with token probabilities" in capsys.readouterr().err


def test_bad_input(corpus, tmp_path, capsys):
    file = str(config_file(tmp_path, corpus, "ncp"))
    assert main(["bench", file, "--steps", "0"]) == 2
    assert "--steps 0: at least one" in capsys.readouterr().err
