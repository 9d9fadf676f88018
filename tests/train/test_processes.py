"""Several processes: the same training as in one, one writer, one will to stop, and a name for whoever is gone."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from several_processes import FLAGS, ends, free_port, row_sums, run, start
from tiny_runs import bigram, child_environment, config_file, records, run_config, watch_batches

from ncp_jax.train.loop import train

STEPS = ("evaluation.every=10", "optim.schedule.warmup=2")
SILENT = 8  # seconds
# Deaths are noticed sooner than in earnest; nothing is printed or saved that the tests do not read.
HASTY = (f"processes.silent_seconds={SILENT}", "processes.join_seconds=60", "train.log_every=100", *STEPS)


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory) -> Path:
    """20 steps in this process on eight devices."""
    return one_process(corpus, tmp_path_factory.mktemp("straight"))


def one_process(corpus: Path, workdir: Path, devices: int = 8) -> Path:
    rows: list = []
    with pytest.MonkeyPatch.context() as patch:
        watch_batches(patch.setattr, lambda number, batch: rows.append(row_sums(batch)))
        train(run_config(corpus, workdir, "olmo3", *STEPS), bigram(), devices=jax.devices()[:devices])
    (workdir / "rows-0.json").write_text(json.dumps(rows))
    return workdir


def rows_by_step(workdir: Path, slices: int) -> list[list[int]]:
    """Checksum of each row of each global batch that the newest processes of a run fed, rows in order."""
    parts = [json.loads((workdir / f"rows-{index}.json").read_text()) for index in range(slices)]
    return [[row for rows in step for row in rows] for step in zip(*parts, strict=True)]


def assert_same_run(ours: Path, theirs: Path) -> None:
    for kind, count in (("train", 20), ("eval", 2)):
        for name in {"train": ("loss", "gradient_norm"), "eval": ("bits_per_byte", "bytes")}[kind]:
            values, wanted = ([record[name] for record in records(path, kind)] for path in (ours, theirs))
            assert len(values) == count
            assert values == pytest.approx(wanted, rel=1e-5)


def test_devices_that_take_turns_between_processes(corpus, straight, tmp_path):
    """Each process feeds slices of the batch that are no neighbours, of which the mesh makes the same batch."""
    run(corpus, tmp_path, "mesh.fsdp=4", *STEPS, interleaved=True)
    assert_same_run(tmp_path, straight)
    ours, theirs = (rows_by_step(workdir, slices) for workdir, slices in ((tmp_path, 2), (straight, 1)))
    assert [[*step[0:2], *step[4:6], *step[2:4], *step[6:8]] for step in ours] == theirs


@pytest.mark.parametrize(
    ("count", "devices", "mesh", "slices"),
    [
        (2, 4, "mesh.data=2", 2),
        (2, 2, "mesh.tensor=4", 1),  # a tensor axis that spans the processes: both must be fed the same rows
        (4, 1, "mesh.fsdp=4", 4),
        (4, 2, "mesh.tensor=2", 4),
    ],
)
def test_as_in_one_process(corpus, straight, tmp_path, count, devices, mesh, slices):
    said = run(corpus, tmp_path, mesh, *STEPS, count=count, devices=devices)
    assert "from initial values" in said[0]
    assert not any("loss" in text for text in said[1:])  # one speaks, and writes
    assert_same_run(tmp_path, straight)
    assert rows_by_step(tmp_path, slices) == rows_by_step(straight, 1)


def test_two_save_because_one_was_asked_to_stop_and_others_go_on(corpus, straight, tmp_path):
    """SIGTERM at one process stops both after the same step; one, two or four processes continue from there."""
    two, one, four = (tmp_path / name for name in ("two", "one", "four"))
    # The wish leaves with step 8 and is read after step 9 was sent; train.log_every has no part in it.
    said = run(corpus, two, "mesh.fsdp=4", "train.log_every=5", *STEPS, acts={1: "stop@7"})
    assert "another process was asked to stop: saved step 8; the same command continues from there" in said[0]
    shutil.copytree(two, one)
    shutil.copytree(two, four)
    one_process(corpus, one, devices=2)
    run(corpus, four, "mesh.data=2", "mesh.fsdp=4", *STEPS, count=4)
    for workdir, slices in ((one, 1), (four, 4)):
        assert rows_by_step(workdir, slices) == rows_by_step(straight, 1)[8:]
        losses = {record["step"]: record["loss"] for record in records(workdir, "train")}
        wanted = {record["step"]: record["loss"] for record in records(straight, "train")}
        assert losses == pytest.approx({step: wanted[step] for step in (1, 5, *range(9, 21))}, rel=1e-5)


@pytest.mark.parametrize(("count", "victim"), [(2, 0), (2, 1), (4, 2)])
def test_a_killed_process_is_named_by_the_others(corpus, tmp_path, count, victim):
    workers = start(corpus, tmp_path, "mesh.fsdp=-1", *HASTY, count=count, acts={victim: "kill@8"})
    workers[victim].wait(timeout=60)
    killed = time.monotonic()
    found = ends(workers)
    assert time.monotonic() - killed < SILENT + 12  # two beats, and whatever else this machine does
    assert [status for status, *_ in found] == [-9 if process == victim else 1 for process in range(count)]
    for process, (_, _, errors) in enumerate(found):
        if process != victim:
            last = errors.strip().splitlines()[-1]
            assert last.startswith(f"ncp-jax: process {victim} (")
            assert ("does not answer" if victim == 0 else f"has not been heard of for {SILENT}") in last
            assert f"; process {process} (" in last


@pytest.mark.parametrize("absent", [0, 2])
def test_a_host_that_never_joins_is_named(corpus, tmp_path, absent):
    began = time.monotonic()
    found = ends(start(corpus, tmp_path, "processes.join_seconds=4", count=3, absent=absent))
    assert time.monotonic() - began < 30  # the start of Python included
    for status, _, errors in found:
        assert status == 1
        wanted = "process 2 of 3 never joined within 4 s" if absent else "process 0 did not answer at 127.0.0.1:"
        assert wanted in errors


def test_an_error_at_one_process_ends_the_others_with_it(corpus, tmp_path):
    found = ends(start(corpus, tmp_path, "mesh.fsdp=4", *HASTY, acts={0: "fail@8"}))
    assert [status for status, *_ in found] == [1, 1]
    assert found[0][2].strip().endswith("OSError: the disk of this host is broken")
    assert ") failed: OSError: the disk of this host is broken; process 1 (" in found[1][2]


def test_a_slow_process_is_waited_for_and_the_log_says_so(corpus, tmp_path):
    said = run(corpus, tmp_path, "mesh.fsdp=4", *HASTY, "processes.heartbeat_seconds=1", acts={1: "slow@8"})
    behind = re.findall(r"^heartbeat: step 8, (\d+) s since the last; process 1 \(.*\) is at step 7$", said[0], re.M)
    assert max(map(int, behind), default=0) >= 2
    assert len(records(tmp_path, "eval")) == 2


def test_the_command_line_and_configs_that_differ(corpus, tmp_path):
    """`ncp-jax train` on two hosts, one with another seed: refused by both, and both say what differs."""
    file, address = config_file(tmp_path, corpus, "olmo3"), f"127.0.0.1:{free_port()}"
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "ncp_jax.cli.main", "train", str(file), f"workdir={tmp_path / 'run'}",
             f"train.seed={index}", "--process", index, *options],
            env=child_environment(XLA_FLAGS=f"{FLAGS}1", **variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for index, options, variables in (
            ("0", ["--coordinator", address, "--processes", "2"], {}),
            ("1", [], {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}),
        )
    ]  # fmt: skip
    for status, _, errors in ends(workers):
        assert status == 2
        assert "the run's identity: process 0 (" in errors
        assert "Give every process the same config and overrides" in errors
    assert not (tmp_path / "run/config.json").exists()
