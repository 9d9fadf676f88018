"""babysit.sh against a gcloud with a scripted future: what it does in each state, and when it stops."""

import re

import pytest
from fake_cloud import FakeCloud

WORDS = ["a", "configs/ncp_1b.py", "train.seed=1", "--type", "v5p-32", "--zone", "us-east5-a", "--bucket", "b"]
RUNNING = "worker w0 running 7"
FINISHED = "worker w0 finished"


@pytest.fixture
def cloud(tmp_path) -> FakeCloud:
    return FakeCloud(tmp_path)


def babysit(cloud: FakeCloud, *options: str):
    return cloud.run("launch/babysit.sh", *WORDS, "--interval", "0", *options)


def deeds(cloud: FakeCloud) -> str:
    """What it did, a letter a deed: Create, Push, Setup, Run, sTop, Delete."""
    kinds = {
        "create": "C", "scp": "P", "worker.sh setup": "S", "worker.sh start": "R", "worker.sh stop": "T", "delete": "D",
    }  # fmt: skip
    letters = [letter for call in cloud.calls for kind, letter in kinds.items() if re.search(rf"[ /]{kind}\b", call)]
    return "".join(letters)


@pytest.mark.parametrize(
    ("states", "workers", "options", "wanted"),
    [
        pytest.param("ABSENT CREATING READY", f"worker w0 bare | {FINISHED}", [], "CPSR", id="from nothing to the end"),
        pytest.param("READY", f"{RUNNING} | {RUNNING} | {FINISHED}", [], "", id="a run that goes on is left alone"),
        pytest.param(
            "READY PREEMPTED DELETING ABSENT READY", f"{RUNNING} | worker w0 bare | {RUNNING} | {FINISHED}", [],
            "DCPSR", id="preempted",
        ),
        pytest.param("TERMINATED ABSENT READY", FINISHED, [], "DC", id="terminated"),
        pytest.param(
            "WAITING_FOR_RESOURCES PROVISIONING ACTIVE SUSPENDED ABSENT ACTIVE",
            f"worker w0 bare;worker w1 bare | {FINISHED};worker w1 finished", ["--slices", "2"], "PSRDC", id="queued",
        ),
        pytest.param("READY", f"worker w0 failed 1 | {RUNNING} | {FINISHED}", [], "R", id="a crash is started again"),
        pytest.param("READY", f"worker w0 lost | {FINISHED}", [], "R", id="a reboot"),
        pytest.param("READY", f"worker w0 stopped;worker w1 finished | {FINISHED}", [], "R", id="stopped in order"),
        pytest.param("READY", f"worker w0 idle | {FINISHED}", [], "R", id="installed, not started"),
        pytest.param(
            "READY", f"{RUNNING};worker w1 failed 1 | worker w0 failed 1;worker w1 failed 1 | {FINISHED}", [], "R",
            id="one worker's end gets a round to reach the others",
        ),
        pytest.param(
            "READY", f"{RUNNING};worker w1 lost | {RUNNING};worker w1 lost | worker w0 stopped | {FINISHED}", [], "TR",
            id="and no more than one",
        ),
        pytest.param("READY", f"DOWN | DOWN | {FINISHED}", [], "", id="silent workers are not deleted"),
        pytest.param("DOWN READY", FINISHED, [], "", id="no answer is not absence"),
        pytest.param("READY", FINISHED, ["--delete-when-done"], "D", id="deleted at the end if asked"),
    ],
)  # fmt: skip
def test_until_the_run_has_finished(cloud, states, workers, options, wanted):
    cloud.add_gcloud(states, workers)
    done = babysit(cloud, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert deeds(cloud) == wanted
    said = [line for line in done.stdout.splitlines() if " a: " in line]
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ a: ", line) for line in said)
    assert any("the run has finished" in line for line in said)
    assert ("still costs money" in done.stdout) == ("--delete-when-done" not in options)


def test_it_starts_the_same_command_each_time(cloud):
    cloud.add_gcloud("READY PREEMPTED ABSENT READY", f"worker w0 bare | worker w0 bare | {FINISHED}")
    assert babysit(cloud).returncode == 0
    first, second = (call for call in cloud.calls if "worker.sh start" in call)
    assert first == second
    assert first.endswith("start --generation v5p --bucket b -- configs/ncp_1b.py train.seed=1")


@pytest.mark.parametrize(
    ("states", "workers", "broken", "status", "said", "wanted"),
    [
        pytest.param("READY", "worker w0 failed 2", "", 2, "mend what its log says", "", id="a mistake in the config"),
        pytest.param("STOPPED", RUNNING, "", 1, "someone stopped it", "", id="stopped by hand"),
        pytest.param("READY", "worker w0 failed 1", "", 1, "too many troubles", "RR", id="crashes for ever"),
        pytest.param("ABSENT", RUNNING, " create ", 1, "trouble 3 of 3: creating failed", "CCC", id="no capacity"),
        pytest.param("DOWN", RUNNING, "", 1, "trouble 3 of 3: no answer about the slice", "", id="no network"),
        pytest.param("READY", "DOWN", "", 1, "its workers do not answer", "", id="no key"),
        pytest.param("READY", "worker w0 bare", "worker.sh setup", 1, "could not get the run", "PSPSPS", id="no pip"),
        pytest.param("FAILED", RUNNING, "", 1, "trouble 3 of 3: FAILED", "DD", id="turned down at once"),
    ],
)  # fmt: skip
def test_giving_up(cloud, states, workers, broken, status, said, wanted):
    cloud.add_gcloud(states, workers, broken)
    done = babysit(cloud, "--retries", "3")
    assert done.returncode == status, done.stdout + done.stderr
    assert said in done.stdout
    assert "giving up" in done.stdout
    assert "still costs money: launch/tpu_vm.sh delete a --zone us-east5-a" in done.stdout
    assert deeds(cloud) == wanted


@pytest.mark.parametrize(("looks", "status"), [(1, 1), (2, 0)])
def test_troubles_are_forgotten_after_a_quiet_half_hour(cloud, looks, status):
    calm = " | ".join([RUNNING] * looks)
    cloud.add_gcloud("READY", f"worker w0 failed 1 | {calm} | worker w0 failed 1 | {FINISHED}")
    cloud.add("sleep", "#!/usr/bin/env bash\n")
    done = cloud.run("launch/babysit.sh", *WORDS, "--retries", "2", "--interval", "900")
    assert done.returncode == status, done.stdout


def test_waits_grow_with_troubles(cloud):
    cloud.add_gcloud("ABSENT", broken=" create ")
    cloud.add("sleep", '#!/usr/bin/env bash\necho "$1" >>"$FAKE/waits"\n')
    cloud.run("launch/babysit.sh", *WORDS, "--retries", "9")
    assert (cloud.folder / "waits").read_text() == "60\n120\n240\n480\n960\n1800\n1800\n1800\n"


def test_print_shows_one_round_and_calls_nothing(cloud):
    lines = cloud.printed("launch/babysit.sh", *WORDS, "--spot")
    verbs = [line[4] if line[0] == "gcloud" else line[0] for line in lines]
    assert verbs == ["describe", "delete", "create", "tar", "scp", "ssh", "ssh", "ssh", "describe", "ssh"]
    assert lines[2][-1] == "--spot"
    assert cloud.calls == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a"], "give the NAME of a slice and a CONFIG"),
        (WORDS[:3], "give --type"),
        (WORDS[:7], "a new slice has empty disks; give --bucket NAME, or workdir=PATH"),
        ([*WORDS, "--retries", "-1"], "whole numbers"),
        ([*WORDS, "--type", "v5p-9"], "no slice 'v5p-9'"),
        ([*WORDS, "--zone", "us-west4-a"], "zone 'us-west4-a' is not one where we know v5p to be"),
        ([*WORDS, "--foo"], "unknown option '--foo'"),
    ],
)
def test_mistakes(cloud, words, said):
    cloud.add_gcloud()
    done = cloud.run("launch/babysit.sh", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert cloud.calls == []


def test_without_gcloud(cloud):
    done = babysit(cloud)
    assert done.returncode == 2
    assert "gcloud not found" in done.stderr
