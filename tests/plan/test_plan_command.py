"""`ncp-jax plan`: the estimate anywhere; with the TPU compiler, the real train step for a slice that is not here."""

import json

import pytest
from tiny_runs import config_file

from ncp_jax.cli.main import main
from ncp_jax.config import load, override
from ncp_jax.plan import chips
from ncp_jax.plan.estimate import estimate
from ncp_jax.plan.search import pareto
from ncp_jax.plan.step import step_on

NINE = "configs/ncp_archpreview_9b.py"


def plan(capsys, *arguments):
    """(exit status, printed text)."""
    status = main(["plan", *arguments])
    said = capsys.readouterr()
    return status, said.out + said.err


def test_the_estimate_of_the_9b_agrees_with_a_compiled_one():
    """16 chips, one row of 8192 tokens each: 17.84 GB with gather barriers by the TPU compiler (an earlier study)."""
    config = override(load(NINE), ["train.batch=16", "train.micro_batches=1", "evaluation.batch=16"])
    found = estimate(step_on(config, chips.parse("v5p:2x2x4"), compiler=False))
    assert found.arguments == pytest.approx(4.81e9, rel=0.03)
    assert found.peak == pytest.approx(17.84e9, rel=0.15)


def test_an_oversized_plan_names_the_excess_and_fails(capsys, tmp_path):
    file = tmp_path / "plan.json"
    status, said = plan(
        capsys, NINE, "--topology", "v5e:2x2", "--rows-per-chip", "1", "--analytic", "--json", str(file)
    )
    assert status == 1
    assert "does NOT fit" in said
    found = json.loads(file.read_text())
    assert not found["fits"]
    assert found["hbm_peak"] > found["hbm"] == 16 * 2**30


def test_without_the_compiler_the_estimate_says_so(capsys, monkeypatch):
    monkeypatch.setattr(chips, "has_compiler", lambda: False)
    status, said = plan(capsys, "configs/ncp_nano.py", "--topology", "v5e:2x2", "--rows-per-chip", "2")
    assert status == 0
    assert "(libtpu) is not installed: this is the analytic estimate alone" in said
    assert "estimated" in said


def test_search_keeps_what_no_other_beats(capsys):
    status, said = plan(capsys, "configs/ncp_1b.py", "--topology", "v5e:4x4", "--search", "--analytic")
    assert status == 0
    assert "layouts that no other beats" in said


def test_search_where_nothing_fits(capsys):
    status, said = plan(capsys, NINE, "--topology", "v5e:2x2", "--search", "--analytic")
    assert status == 1
    assert "no layout of ncp_archpreview_9b is estimated to fit v5e:2x2" in said


def test_pareto():
    assert pareto([(10, 5), (8, 4), (9, 6), (10, 6), (7, 4)]) == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--topology", "v5e:3x3"], "'v5e:3x3' does not exist; v5e has 1x1"),
        (["--topology", "v5e:2x2", "--mesh", "fsdp=3"], "does not multiply to 4 devices"),
        (["--topology", "v5e:2x2", "--mesh", "fdsp=4"], "mesh.fdsp"),
        (["--topology", "v5e:2x2", "train.batch=6"], "train.batch 6 does not divide over data x fsdp = 4"),
        (["--topology", "v5e:2x2", "--slices", "0"], "--slices 0"),
    ],
)
def test_bad_input(capsys, arguments, complaint):
    status, said = plan(capsys, "configs/ncp_nano.py", *arguments, "--analytic")
    assert status == 2
    assert complaint in said


@pytest.mark.skipif(not chips.has_compiler(), reason="the TPU compiler, libtpu, is not installed (extra 'tpu')")
@pytest.mark.parametrize(("model", "slices"), [("ncp", 1), ("olmo3", 1), ("olmo3", 2)])
def test_a_real_step_compiles_for_a_slice(capsys, tmp_path, model, slices):
    config, file = config_file(tmp_path, tmp_path / "no_corpus", model), tmp_path / "plan.json"
    status, said = plan(capsys, str(config), "--topology", "v5e:2x2", "--slices", str(slices), "--json", str(file))
    assert status == 0, said
    found = json.loads(file.read_text())
    assert found["compiled"]
    assert 0 < found["memory"]["arguments"] < found["hbm_peak"] < found["hbm"]
    assert found["traffic"]["collective_bytes"]["all-gather"] > 0
    assert found["step_seconds"] >= max(found["roofline"][name] for name in ("compute", "hbm", "ici")) > 0
