"""worker.sh with a stand-in for the trainer, and pod.py with one for the pod: start, go on, stop, say how it went."""

import importlib.util
import json
import os
import re
import shutil
import time
from pathlib import Path

import jax
import pytest
from fake_cloud import ROOT, FakeCloud

from ncp_jax.cli import main as cli

# In place of .venv/bin/python: notes what it was started with, then does what the first word after pod.py asks.
TRAINER = r"""#!/usr/bin/env bash
printf '%s\n' "$@" "LIBTPU_INIT_ARGS=$LIBTPU_INIT_ARGS" >>words
case "$2" in
    end) exit 0 ;;
    crash) exit 134 ;;
    long) trap 'exit 143' TERM; echo training; while true; do sleep 0.05; done ;;
esac
"""


class Worker:
    """A host: a home with the pushed tree in it."""

    def __init__(self, folder: Path):
        self.cloud = FakeCloud(folder / "cloud")
        self.tree = folder / "ncp_jax"
        shutil.copytree(ROOT / "launch", self.tree / "launch", ignore=shutil.ignore_patterns("tiny_corpus"))

    def set_up(self) -> None:
        binaries = self.tree / ".venv/bin"
        binaries.mkdir(parents=True)
        for name in ("python", "ncp-jax"):
            (binaries / name).write_text(TRAINER)
            (binaries / name).chmod(0o755)

    def __call__(self, command: str, *words: str, **environment: str):
        return self.cloud.run(self.tree / "launch/worker.sh", command, *words, HOSTNAME="w7", **environment)

    def start(self, *words: str, generation: str = "v5p"):
        return self("start", "--generation", generation, "--", *words)

    def state(self) -> str:
        """What status says of it; a run that ends at once is waited for."""
        for _ in range(100):
            lines = self("status").stdout.splitlines()
            assert lines[0].startswith("worker w7 ")
            state = lines[0].removeprefix("worker w7 ")
            if not state.startswith("running") or "training" in "".join(lines[1:]):
                return state
            time.sleep(0.02)
        raise AssertionError(f"still {state}")


@pytest.fixture
def worker(tmp_path):
    worker = Worker(tmp_path)
    yield worker
    pid = worker.tree / ".run/pid"
    if pid.exists() and Path(f"/proc/{pid.read_text().strip()}").exists():
        os.kill(int(pid.read_text()), 15)


def test_a_run_from_start_to_stop(worker):
    assert worker.state() == "bare"
    worker.set_up()
    assert worker.state() == "idle"
    words = ["long", "data.mixture=[{path: 'a b'}]", 'name="x"']
    assert worker.start(*words).stdout == "started on w7\n"
    assert re.fullmatch(r"running \d+", worker.state())
    seen = (worker.tree / "words").read_text().splitlines()
    assert seen[:-1] == ["launch/pod.py", *words]
    assert "--xla_tpu_enable_ag_backward_pipelining=true" in seen[-1]
    assert worker("running").returncode == 0

    again = worker.start(*words)
    assert (again.returncode, again.stdout) == (0, "already running on w7\n")
    other = worker.start("long", "train.seed=2")
    assert other.returncode == 2
    assert "w7 is running something else: v5p long" in other.stderr
    assert (worker.tree / "words").read_text().count("launch/pod.py") == 1

    assert worker("stop").stdout.startswith("worker w7 stopped\n")
    assert worker("running").returncode == 1
    assert worker("stop").stdout == "nothing runs on w7\n"
    worker.start(*words)
    assert worker.state().startswith("running")
    log = worker("logs").stdout
    assert len(re.findall(r"^== \d{4}-\d\d-\d\dT\S+Z v5p long ", log, re.MULTILINE)) == 2


@pytest.mark.parametrize(("how", "state"), [("end", "finished"), ("crash", "failed 134")])
def test_how_a_run_ended(worker, how, state):
    worker.set_up()
    worker.start(how)
    assert worker.state() == state
    assert worker("running").returncode == 1


def test_a_host_that_went_down(worker):
    """The pid belongs to another process now, or to none."""
    worker.set_up()
    worker.start("end")
    assert worker.state() == "finished"
    (worker.tree / ".run/exit").unlink()
    for pid in (os.getpid(), 2**22 - 1):
        (worker.tree / ".run/pid").write_text(f"{pid}\n")
        assert worker.state() == "lost"
    worker.start("end")
    assert worker.state() == "finished"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fly"], "unknown command 'fly'; commands are setup, start"),
        (["start", "--generation", "v5p"], "start needs a CONFIG"),
        (["start", "--generation", "v9", "--", "c"], "no launch/env/v9.sh; give --generation v4, v5e, v5p or v6e"),
        (["start", "--generation", "v5p", "--", "c"], "no environment on w7; run setup first"),
        (["logs"], "no log on w7"),
    ],
)
def test_mistakes(worker, words, said):
    done = worker(*words)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_bucket_becomes_runs(worker):
    worker.set_up()
    worker.cloud.add("gcsfuse", '#!/usr/bin/env bash\nprintf "%s\\n" "$@" >>"$FAKE/mounts"\n')
    worker.cloud.add("mountpoint", '#!/usr/bin/env bash\n[ -f "$FAKE/mounts" ]\n')
    for _ in range(2):
        done = worker("start", "--generation", "v6e", "--bucket", "gs://b/some/folder", "--", "end")
        assert done.returncode == 0, done.stderr
        assert worker.state() == "finished"
    assert (worker.cloud.folder / "mounts").read_text().split() == [
        "--implicit-dirs", "--metadata-cache-ttl-secs=0", "--metadata-cache-negative-ttl-secs=0",
        "--only-dir=some/folder", "b", "runs",
    ]  # fmt: skip
    assert (worker.tree / "runs").is_dir()


def test_setup_brings_a_python_where_the_image_has_an_old_one(worker):
    shutil.copy(ROOT / "setup.py", worker.tree)
    shutil.copy(ROOT / "constraints.txt", worker.tree)
    # A python that is old under its first name, and new under the one that uv gives.
    script = r"""#!/usr/bin/env bash
echo "${0##*/} $*" >>"$FAKE/python"
case "$*" in
    -c*) [[ "$0" == *new* ]] ;;
    "-m uv python find 3.11") echo "$FAKE/bin/new3.11" ;;
    "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
"""
    worker.cloud.add("python3", script)
    worker.cloud.add("new3.11", script)
    done = worker("setup", "--extras", "tpu,report")
    assert done.returncode == 0, done.stderr
    calls = (worker.cloud.folder / "python").read_text().splitlines()
    assert "python3 -m pip install --quiet --user uv" in calls
    assert "python3 -m uv python install --quiet 3.11" in calls
    assert f"new3.11 -m venv {worker.tree}/.venv" in calls
    assert calls[-1].endswith("--constraint constraints.txt --editable .[tpu,report]")


# ---- pod.py


@pytest.fixture
def pod(monkeypatch):
    """pod.py, on a host of a pretended pod: `pod.host` is its number, `pod.did` what happened, in order."""
    spec = importlib.util.spec_from_file_location("pod", ROOT / "launch/pod.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.host, module.status, module.did = 0, 0, []
    monkeypatch.setattr(jax, "process_index", lambda: module.host)
    monkeypatch.setattr(cli, "main", lambda words: module.did.append(words) or module.status)
    return module


@pytest.mark.parametrize(
    ("summary", "host", "status", "wanted"),
    [
        ({"finished": True}, 0, 0, 0),
        ({"finished": False}, 0, 0, 143),
        (None, 0, 0, 143),
        ({"finished": False}, 1, 0, 0),
        ({"finished": False}, 0, 2, 2),
    ],
)
def test_pod_tells_a_stopped_run_from_a_finished_one(pod, tmp_path, summary, host, status, wanted):
    if summary is not None:
        (tmp_path / "summary.json").write_text(json.dumps(summary))
    words = [str(ROOT / "configs/ncp_nano.py"), f"workdir={tmp_path}"]
    pod.host, pod.status = host, status
    assert pod.main(words) == wanted
    assert pod.did == [["train", "--join", *words]]


def test_scripts_and_pod_mean_the_same_status(pod):
    assert f"STOPPED={pod.STOPPED} " in (ROOT / "launch/worker.sh").read_text()
