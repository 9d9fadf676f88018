"""A PATH without a cloud: chosen system tools, and stand-ins for those that would reach out."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = shlex.split(
    "basename bash cat cksum cp date dirname env find grep gzip mkdir mktemp nohup rm sed setsid sleep sort tail tar "
    "tee timeout"
)
# What a user may write after a config, and a shell would like to read otherwise.
ODD = [
    "data.mixture=[{path: 'gs://b/a b', weight: 1}]", 'name="x"', "a=$HOME", "b=`id`", "c=it's", "d=*", "e=", "ü=ß",
    r"f=\n", "g=a;b&c|d>e", "h={x}", "i=!!", "j=  two  spaces ",
]  # fmt: skip

# Notes its words in $FAKE/calls. `describe` says the next line of $FAKE/states, `worker.sh status` the next of
# $FAKE/workers (in which ; ends a line); the last line of either stays. A call that has a line of $FAKE/broken in it
# fails.
GCLOUD = r"""#!/usr/bin/env bash
printf '%s\n' "$*" >>"$FAKE/calls"
next() {
    mapfile -t lines <"$FAKE/$1"
    [ ${#lines[@]} -le 1 ] || printf '%s\n' "${lines[@]:1}" >"$FAKE/$1"
    answer="${lines[0]}"
}
[ ! -f "$FAKE/broken" ] || while read -r line; do [[ "$*" != *"$line"* ]] || exit 1; done <"$FAKE/broken"
case "$*" in
    *" describe "*)
        next states
        case "$answer" in
            ABSENT) echo "ERROR: NOT_FOUND: Resource 'a' was not found" >&2; exit 1 ;;
            DOWN) echo "ERROR: no route to host" >&2; exit 1 ;;
        esac
        echo "WARNING: this goes to stderr" >&2
        echo "$answer"
        ;;
    *"worker.sh status"*)
        next workers
        [ "$answer" != DOWN ] || exit 255
        echo "Using ssh batch size of 1."
        echo "${answer//;/$'\n'}"
        ;;
esac
"""


class FakeCloud:
    """A directory of executables that is the whole PATH, and what happened to the stand-ins among them."""

    def __init__(self, folder: Path):
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir(parents=True)
        for tool in TOOLS:
            found = shutil.which(tool)
            if found:
                (self.bin / tool).symlink_to(found)
        self.environment = {
            "PATH": str(self.bin), "HOME": str(folder), "TMPDIR": str(folder), "FAKE": str(folder), "LC_ALL": "C.UTF-8",
        }  # fmt: skip

    def add(self, name: str, script: str) -> None:
        """An executable of this name, in place of the system's."""
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(script)
        path.chmod(0o755)

    def add_gcloud(self, states: str = "READY", workers: str = "worker w0 idle", broken: str = "") -> None:
        """A gcloud with a future: states and workers are what it will say, one word or line after the other."""
        self.add("gcloud", GCLOUD)
        self.add("tar", "#!/usr/bin/env bash\n")  # no archive of the whole tree
        (self.folder / "states").write_text("\n".join(states.split()) + "\n")
        (self.folder / "workers").write_text(workers.replace(" | ", "\n") + "\n")
        if broken:
            (self.folder / "broken").write_text(broken + "\n")

    @property
    def calls(self) -> list[str]:
        """Words of each call of gcloud."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def run(self, *words: str, cwd: os.PathLike = ROOT, answer: str = "", **environment: str):
        """Run `bash WORDS`; text of stdout and stderr, no exception on failure."""
        return subprocess.run(
            ["bash", *map(str, words)], cwd=cwd, env=self.environment | environment, input=answer,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    def printed(self, *words: str) -> list[list[str]]:
        """Commands that a script shows with --print, as words."""
        done = self.run(*words, "--print")
        assert done.returncode == 0, done.stderr
        return [shlex.split(line) for line in done.stdout.splitlines()]
