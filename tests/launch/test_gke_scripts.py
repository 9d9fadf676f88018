"""GKE: the JobSet that jobset.sh writes, and the command that xpk.sh would run."""

import re
import shlex

import pytest
import yaml
from fake_cloud import ODD, ROOT, FakeCloud

from ncp_jax.checkpoint.config import CheckpointConfig

IMAGE = ["--image", "i", "--bucket", "b"]
CLUSTER = ["--type", "v5p-8", "--image", "i", "--cluster", "k"]


@pytest.fixture
def cloud(tmp_path) -> FakeCloud:
    return FakeCloud(tmp_path)


def jobset(cloud, *options: str) -> dict:
    done = cloud.run("launch/gke/jobset.sh", *options)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


def test_jobset_of_two_slices(cloud):
    words = ["configs/ncp_1b.py", "mesh.data=2", *ODD, "k=$(NAME) $$ ${CHIPS}"]
    found = jobset(cloud, "r", *words, "--type=v5p-32", "--slices=2", "--image=i:1", "--bucket=gs://b/x/y")
    slices = found["spec"]["replicatedJobs"][0]
    job = slices["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert (slices["replicas"], job["parallelism"], job["completions"], job["backoffLimit"]) == (2, 4, 4, 0)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice", "cloud.google.com/gke-tpu-topology": "2x2x4",
    }  # fmt: skip
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert container["command"][3] == "v5p"
    assert [word.replace("$$", "$") for word in container["args"]] == words
    assert found["spec"]["failurePolicy"]["maxRestarts"] == 50
    bucket = pod["volumes"][1]["csi"]["volumeAttributes"]
    assert bucket["bucketName"] == "b"
    assert bucket["mountOptions"].endswith(",only-dir=x/y")


def test_a_checkpoint_fits_between_sigterm_and_sigkill(cloud):
    limit = CheckpointConfig().timeout_seconds
    found = jobset(cloud, "r", "c", "--type", "v6e-1", "--image", "i", "--bucket", "b", "--spot")
    pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > limit
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert int(re.search(r"SAVE_SECONDS=(\d+)", (ROOT / "launch/worker.sh").read_text())[1]) > limit
    (line,) = cloud.printed("launch/gke/xpk.sh", "r", "c", *CLUSTER, "--storage", "s")
    assert int(next(word for word in line if "grace" in word).split("=")[1]) > limit


@pytest.mark.parametrize(
    ("kind", "topology", "nodes", "chips"),
    [
        ("v4-8", "2x2x1", 1, 4),
        ("v5e-4", "2x2", 1, 4),
        ("v5e-256", "16x16", 64, 4),
        ("v6e-1", "1x1", 1, 1),
        ("v6e-16", "4x4", 4, 4),
    ],
)
def test_nodes(cloud, kind, topology, nodes, chips):
    found = jobset(cloud, "r", "c", "--type", kind, *IMAGE)
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == topology
    assert (job["parallelism"], pod["containers"][0]["resources"]["limits"]["google.com/tpu"]) == (nodes, chips)


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("jobset", ["r", "c", *IMAGE], "give --type"),
        ("jobset", ["r", "c", "--type", "v5p-8", "--bucket", "b"], "give --image"),
        ("jobset", ["r", "c", "--type", "v5p-8", "--image", "i"], "give --bucket"),
        ("jobset", ["r", "c", "--type", "v5p-384", *IMAGE], "which way are the 192 chips"),
        ("jobset", ["r", "c", "--type", "v5p-8", "--topology", "4x4x4", *IMAGE], "does not have the 4 chips"),
        ("jobset", ["r", "c\n", "--type", "v5p-8", *IMAGE], "control character"),
        ("xpk", ["r", "c", "--type", "v5p-8", "--image", "i", "--storage", "s"], "give --cluster"),
        ("xpk", ["r", "c", *CLUSTER], "give --storage"),
        ("xpk", ["r", "c", *CLUSTER, "--storage", "s"], "xpk not found"),
    ],
)
def test_mistakes(cloud, script, words, said):
    done = cloud.run(f"launch/gke/{script}.sh", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_xpk(cloud):
    words = ["r", "c", *ODD, *CLUSTER, "--type", "v5e-16", "--storage", "s", "--slices", "2", "--spot"]
    (line,) = cloud.printed("launch/gke/xpk.sh", *words)
    assert shlex.join(line[:-1]) == (
        "xpk workload create --workload=r --cluster=k --tpu-type=v5litepod-16 --num-slices=2 --docker-image=i "
        "--max-restarts=50 --termination-grace-period-seconds=1800 --storage=s --spot"
    )
    shell, program = line[-1].removeprefix("--command=").split(" && exec ")
    assert shell == "cd /app && source launch/env/v5e.sh"
    assert shlex.split(program) == ["python", "launch/pod.py", "c", *ODD]
