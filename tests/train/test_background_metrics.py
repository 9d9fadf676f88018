"""Metrics written by a thread: whoever logs does not wait, lines keep their order, and no error is lost."""

import json
import threading

import pytest

from ncp_jax.train.rundir import RunDirectory, RunDirectoryError


def test_a_slow_disk_delays_nobody(tmp_path, monkeypatch):
    directory, gate = RunDirectory(tmp_path, background=True), threading.Event()
    append = directory._append
    monkeypatch.setattr(directory._background, "_write", lambda line: gate.wait(20) and append(line))
    with directory.locked():
        for step in range(50):
            directory.log({"step": step, "loss": float("nan")})
        assert not directory.metrics.exists()  # all 50 calls came back before the first line was written
        gate.set()
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    assert lines == [{"step": step, "loss": None} for step in range(50)]


def test_a_full_disk_is_an_error_of_a_later_call(tmp_path):
    directory = RunDirectory(tmp_path / "run", background=True)
    directory.log({"step": 1})  # the directory was never made
    with pytest.raises(RunDirectoryError, match=r"cannot write .*metrics.jsonl: .*; free space or fix the permissions"):
        directory.flush()
    directory.log({"step": 2})
    directory.flush()  # told once; nothing is written after a gap


def test_processes_that_do_not_write_start_no_thread(tmp_path):
    before = threading.active_count()
    directory = RunDirectory(tmp_path, writes=False, background=True)
    directory.log({"step": 1})
    directory.flush()
    assert threading.active_count() == before
    assert not directory.metrics.exists()
