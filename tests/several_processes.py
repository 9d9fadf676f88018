"""Training in several processes on this machine, each with its own simulated devices.

As a program: `several_processes.py INDEX COUNT PORT CORPUS WORKDIR ACTION [CHANGE...]` is one of the processes. ACTION
says what happens to it on the way: nothing, or NAME@STEP (see _act).
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax
import numpy as np
from tiny_runs import bigram, child_environment, run_config, watch_batches

from ncp_jax.parallel.processes import join
from ncp_jax.parallel.watch import end_process
from ncp_jax.train.loop import train

FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_force_host_platform_device_count="

INTERLEAVED = "interleaved"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(
    corpus: Path, workdir: Path, *changes: str, count: int = 2, devices: int = 2, absent: int | None = None,
    acts: dict[int, str] | None = None, interleaved: bool = False,
) -> list[subprocess.Popen]:  # fmt: skip
    """Processes 0 to `count` - 1, but for an absent one. `acts`: what happens to some of them. `interleaved`: in the
    mesh, devices of different processes take turns, as chips do where the wires say so."""
    port, acts = free_port(), acts or {}
    changes = (*changes, INTERLEAVED) if interleaved else changes
    return [
        subprocess.Popen(
            [sys.executable, __file__, str(index), str(count), str(port), str(corpus), str(workdir),
             acts.get(index, "nothing"), *changes],
            env=child_environment(XLA_FLAGS=f"{FLAGS}{devices}"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count) if index != absent
    ]  # fmt: skip


def ends(workers: list[subprocess.Popen], timeout: float = 120) -> list[tuple[int, str, str]]:
    """(exit status, standard output, standard error) of each. All are dead afterwards."""
    try:
        found = [worker.communicate(timeout=timeout) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, *texts) for worker, texts in zip(workers, found, strict=True)]


def run(corpus: Path, workdir: Path, *changes: str, **options) -> list[str]:
    """What each process printed in a run without failures."""
    found = ends(start(corpus, workdir, *changes, **options))
    assert [status for status, *_ in found] == [0] * len(found), "\n".join(text[-1500:] for _, _, text in found)
    return [out for _, out, _ in found]


def row_sums(batch: dict[str, np.ndarray]) -> list[int]:
    """A checksum of each row's tokens."""
    return [zlib.crc32(row.tobytes()) for row in batch["tokens"]]


def _act(action: str, number: int) -> None:
    """What happens to this process on the way to a step: kill, stop, fail, slow."""
    name, _, step = action.partition("@")
    if name == "nothing" or number != int(step):
        return
    if name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
    elif name == "slow":
        time.sleep(10)  # longer than the tests' processes.silent_seconds
    else:
        raise OSError("the disk of this host is broken")


def _work(index: int, count: int, port: str, corpus: str, workdir: str, action: str, *changes: str) -> None:
    config, seen = run_config(corpus, workdir, "olmo3", *(change for change in changes if change != INTERLEAVED)), []

    def see(number: int, batch: dict) -> None:
        seen.append(row_sums(batch))
        _act(action, number)

    watch_batches(setattr, see)
    join(config.processes, f"127.0.0.1:{port}", count, index)
    devices = jax.devices()  # process by process
    if INTERLEAVED in changes:
        devices = [
            device for one in range(jax.local_device_count()) for device in devices[one :: len(devices) // count]
        ]
    train(config, bigram(), devices=devices)
    (Path(workdir) / f"rows-{index}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    try:
        _work(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        end_process(1)
