"""One host's process of a training run on a TPU slice: it joins the other hosts, then trains.

    python launch/pod.py CONFIG [KEY=VALUE ...]

worker.sh and the GKE jobs start it on every host. Exit status: that of `ncp-jax train`, except that the first host
says 143 where it stopped in order before the last step. A restarter must tell that from the end, and `ncp-jax` says 0
to both.
"""

import json
import sys
from pathlib import Path

STOPPED = 143  # what a shell says of a process that SIGTERM ended


def main(arguments: list[str]) -> int:
    """Train on all hosts of the slice, or slices. Returns the exit status."""
    import jax

    from ncp_jax.cli.main import main as ncp_jax

    # --join finds the other hosts through the TPU VM's metadata, or GKE's variables; with several slices through
    # MEGASCALE_*, which the platform sets (jax/_src/clusters/cloud_tpu_cluster.py).
    status = ncp_jax(["train", "--join", *arguments])
    if status == 0 and jax.process_index() == 0 and not finished(arguments):
        return STOPPED
    return status


def finished(arguments: list[str]) -> bool:
    """Whether the summary of the run that these arguments describe says that it took its last step."""
    from ncp_jax.config import load, override

    summary = Path(override(load(arguments[0]), arguments[1:]).directory) / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["finished"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
