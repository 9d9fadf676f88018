"""Two processes of two devices: the same training as one process, one writer, and one will to stop."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from tiny_runs import bigram, child_environment, records, run_config, watch_batches

from ncp_jax.train.loop import train

STEPS = ("train.steps=10", "evaluation.every=5", "optim.schedule.warmup=2")


def test_the_width_over_both(corpus, tmp_path):
    """A tensor axis that spans the processes: both must be fed the same rows."""
    said = two_processes(corpus, tmp_path / "two", "mesh.tensor=4")
    assert "from initial values" in said[0]
    assert not [line for line in said[1].splitlines() if not line.startswith("[Gloo]")]  # one speaks, and writes
    assert_as_one_process(corpus, tmp_path)


def test_rows_over_both_and_a_signal_to_either(corpus, tmp_path):
    said = two_processes(corpus, tmp_path / "two", "mesh.fsdp=4", "stop")
    assert "another process was asked to stop: saved step 7; the same command continues from there" in said[0]
    assert [record["step"] for record in records(tmp_path / "two", "train")] == list(range(1, 8))
    said = two_processes(corpus, tmp_path / "two", "mesh.fsdp=4")
    assert "from checkpoint 7" in said[0]
    assert_as_one_process(corpus, tmp_path)


def assert_as_one_process(corpus: Path, folder: Path) -> None:
    train(run_config(corpus, folder / "one", "olmo3", *STEPS), bigram(), devices=jax.devices()[:4])
    for kind, name in (("train", "loss"), ("train", "gradient_norm"), ("eval", "bits_per_byte"), ("eval", "bytes")):
        ours, theirs = ([record[name] for record in records(folder / run, kind)] for run in ("two", "one"))
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert len(ours) == {"train": 10, "eval": 2}[kind]


def two_processes(corpus: Path, workdir: Path, *arguments: str) -> list[str]:
    """What each process printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=2")
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, index, port, str(corpus), str(workdir), *arguments],
            env=child_environment(XLA_FLAGS=flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in "01"
    ]  # fmt: skip
    found = [worker.communicate(timeout=240) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], found[0][1][-2000:] + found[1][1][-2000:]
    return [out for out, _ in found]


def _work(index: int, port: str, corpus: str, workdir: str, mesh: str, stop: str = "") -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
    if stop and index == 1:
        watch_batches(setattr, lambda number, _: os.kill(os.getpid(), signal.SIGTERM) if number == 7 else None)
    train(run_config(corpus, workdir, "olmo3", mesh, *STEPS), bigram())


if __name__ == "__main__":
    _work(int(sys.argv[1]), *sys.argv[2:])
