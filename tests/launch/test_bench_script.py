"""bench_accelerator.sh: which commands, what becomes of the time, and a real run at the smallest size."""

import json
import sys

import pytest
from fake_cloud import ODD, ROOT, FakeCloud
from tiny_runs import child_environment

from ncp_jax.config import ConfigError, load

SCRIPT = "launch/bench_accelerator.sh"
# In place of ncp-jax: says what it was asked to time; 1b takes for ever, and adamw breaks.
BENCH = r"""#!/usr/bin/env bash
printf '{"name": "%s"}\n' "$2"
case "$*" in
    *1b_*) exec sleep 60 ;;
    *adamw*) exit 3 ;;
esac
"""


@pytest.fixture
def cloud(tmp_path) -> FakeCloud:
    return FakeCloud(tmp_path / "cloud")


def test_commands(cloud):
    lines = cloud.printed(SCRIPT, "train.seed=3", "--sizes=190m", "--rows", "8", "--arms", "vanilla,irc,routes")
    shared = ["--alone", "--json", "-", "train.batch=8", "data.sequence=2048", "train.seed=3"]
    vanilla, irc, routes = (f"configs/speed.py:190m_{arm}" for arm in ("vanilla", "irc", "routes"))
    three = ["ncp-jax", "bench", vanilla, "--vs", irc, "--vs", routes]
    assert lines == [
        [*three, "--steps", "20", "optim.optimizer=muon", *shared],
        [*three, "--decode", "64", *shared],
        ["ncp-jax", "bench", vanilla, "--vs", routes, "--steps", "20", "optim.optimizer=adamw", *shared],
    ]
    sizes = [line[2] for line in cloud.printed(SCRIPT)]
    assert sizes == [f"configs/speed.py:{size}_vanilla" for size in ("190m", "1b") * 3]


def test_what_fails_or_does_not_fit_is_named_and_costs_nothing_else(cloud):
    cloud.add("ncp-jax", BENCH)
    done = cloud.run(SCRIPT, "--seconds", "4", "--out", str(cloud.folder / "out"))
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    names = [one.get("name", one.get("reason")) for one in found]
    assert names[:3] == ["configs/speed.py:190m_vanilla", "configs/speed.py:1b_vanilla", "exit status 124"]
    assert names[3:] == ["4 s are over"] * 4
    assert found[2]["skipped"].startswith("ncp-jax bench configs/speed.py:1b_vanilla --vs")
    assert (cloud.folder / "out").read_text() == done.stdout
    done = cloud.run(SCRIPT, "--sizes", "190m", *ODD)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one.get("reason") for one in found] == [None, None, None, "exit status 3"]
    assert r"'f=\n'" in found[3]["skipped"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seconds", "ten"], "--seconds must be a whole number from 1, got 'ten'"),
        (["--size", "1b"], "unknown option '--size'; options: --out --sizes"),
        ([], "ncp-jax not found; pip install"),
    ],
)
def test_mistakes(cloud, words, said):
    done = cloud.run(SCRIPT, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_a_real_run(cloud):
    cloud.add("ncp-jax", f'#!/usr/bin/env bash\nexec {sys.executable} -m ncp_jax.cli.main "$@"\n')
    words = ["--sizes=nano", "--arms=vanilla", "--steps=2", "--rows=8", "--tokens=16", "--decode=3", "train.seed=1"]
    variables = child_environment(JAX_PLATFORMS="cpu", PATH=str(cloud.bin), HOME=str(cloud.folder))
    done = cloud.run(SCRIPT, *words, **variables)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one.get("what"), one.get("optimizer")) for one in found] == [
        ("train", "muon"), ("decode", "muon"), ("train", "adamw"),
    ], done.stderr  # fmt: skip
    for one in found:
        assert one["name"] == "speed_nano_vanilla"
        assert (one["batch"], one["sequence"]) == (8, 16)
        assert one["median"] > 0


@pytest.mark.parametrize("variant", ["1b", "1b_fast", "2b_irc"])
def test_unknown_arms_are_refused(variant):
    with pytest.raises(ConfigError, match=f"no variant '{variant}'; write SIZE_ARM, of nano, 190m, 1b and vanilla"):
        load(f"{ROOT}/configs/speed.py:{variant}")
