"""CheckpointStore: the checkpoints of one run in one directory, written by Orbax.

A checkpoint is a directory named by its step: `state/` (arrays, as a nested plain dict of names) and `meta/` (JSON,
with the leaf table). It appears by one rename (a commit file on object stores), so what can be listed is complete.
`best.json` beside them lists the steps that were the best so far. Reading touches nothing on disk.

Everything here is called by every process of a multi-host run, with the same arguments.
"""

import json
import os
import re
import threading
from collections.abc import Iterable
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from ncp_jax.checkpoint import leaves
from ncp_jax.checkpoint.leaves import CheckpointError, CheckpointMismatch, Leaf, explain_mismatch

__all__ = [
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointSaveError",
    "CheckpointStore",
    "explain_mismatch",
]

FORMAT = 1  # of the meta file; raised when an older reader would misread a newer file
TEMPORARY = ".orbax-checkpoint-tmp"  # suffix by which Orbax marks what is incomplete


class CheckpointSaveError(CheckpointError):
    """A save that failed, now or in the background. Earlier checkpoints are untouched."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint whose files are unreadable, or whose values are not the saved ones."""


class CheckpointStore:
    """Saves and restores pytrees of arrays; keeps the newest `keep` checkpoints, and the best one if `best`."""

    def __init__(
        self,
        directory: str | os.PathLike,
        keep: int = 2,
        asynchronous: bool = True,
        best: bool = True,
        timeout_seconds: int = 1200,
    ):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        text = os.fspath(directory)
        self.directory = epath.Path(text if "://" in text else os.path.abspath(os.path.expanduser(text)))
        self._keep, self._asynchronous, self._best, self._timeout = keep, asynchronous, best, timeout_seconds
        self._writer: ocp.AsyncCheckpointer | None = None  # made by the first save: a reader starts no threads
        self._thread: threading.Thread | None = None
        self._failure: CheckpointSaveError | None = None

    # ---- writing

    def save(self, step: int, state: Any, meta: dict, best: bool = False) -> None:
        """Save `state`, a pytree of jax arrays, with `meta`, a JSON dict. Returns when the arrays may be donated.

        A step that is already stored is not written again; `best=True` still marks it. Waits for the save before.
        Raises CheckpointSaveError for that one's failure or this one's, CheckpointError for a leaf that is no array.
        """
        self.wait()
        named = leaves.flatten(state)
        meta = json.loads(json.dumps(meta))  # a copy: the caller may change its own while this one is written
        document = {"format": FORMAT, "meta": meta, "leaves": _to_json(_table_of(named))}
        solid = {name: array for name, array in named.items() if array.size}  # Orbax cannot store empty arrays
        try:
            stored = step in self.steps()
            self._mark(step, best or (stored and step in self._marked()))
            if stored:
                return
            self._writer = self._writer or self._make_writer()
            args = ocp.args.Composite(state=ocp.args.PyTreeSave(leaves.nest(solid)), meta=ocp.args.JsonSave(document))
            self._writer.save(self.directory / str(step), args=args)
        except Exception as error:  # whatever Orbax, the file system or the object store raised
            raise self._save_error(step, error) from error
        self._thread = threading.Thread(target=self._finish, args=(step,), name=f"checkpoint-{step}")
        self._thread.start()
        if not self._asynchronous:
            self.wait()

    def check(self) -> None:
        """Raise CheckpointSaveError if a background save has failed since the last call. Costs nothing."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Return when nothing is being written. Raises like `check`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def close(self) -> None:
        """Wait, then end the writer's threads. Raises like `check`."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- reading

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending. Empty if the directory does not exist."""
        return sorted(ocp.utils.checkpoint_steps(self.directory)) if self.directory.exists() else []

    def latest(self) -> int | None:
        """Newest complete step."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """Newest complete step that was saved as the best."""
        return max(set(self._marked()) & set(self.steps()), default=None)

    def meta(self, step: int) -> dict:
        """The dict given to `save`, and `fingerprint`: twelve hex digits of the leaf names, shapes and dtypes."""
        document = self._document(step)
        return {**document["meta"], "fingerprint": leaves.fingerprint(_from_json(document["leaves"]))}

    def abstract(self, step: int) -> dict:
        """Nested dict of ShapeDtypeStructs without shardings: what is stored, read without any array or device."""
        table = _from_json(self._document(step)["leaves"])
        return leaves.nest({name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in table.items()})

    def restore(self, step: int, abstract: Any, config: dict | None = None) -> Any:
        """The whole state, in the structure and on the shardings of `abstract`, a pytree of ShapeDtypeStructs.

        A leaf without a sharding goes to the first local device. Names, shapes and dtypes must be the stored ones:
        otherwise CheckpointMismatch, which also lists config differences if `config`, a resolved config dict, is given
        and meta has one under "config". Raises CheckpointDamaged if values differ from what was saved.
        """
        document = self._document(step)
        return self._restore(step, abstract, document, _from_json(document["leaves"]), config)

    def restore_subtree(self, step: int, names: Iterable[str], abstract: Any, config: dict | None = None) -> Any:
        """Like `restore`, for the leaves below `names` only, for example ("params",) with {"params": ...}."""
        document, prefixes = self._document(step), tuple(names)
        stored = _from_json(document["leaves"])
        for prefix in prefixes:
            if not any(_below(prefix, name) for name in stored):
                known = ", ".join(sorted({name.partition("/")[0] for name in stored}))
                raise CheckpointMismatch(
                    f"checkpoint {self._path(step)} holds nothing called '{prefix}'; it has {known}"
                )
        wanted = {name: leaf for name, leaf in stored.items() if any(_below(prefix, name) for prefix in prefixes)}
        return self._restore(step, abstract, document, wanted, config)

    # ---- below

    def _path(self, step: int) -> epath.Path:
        return self.directory / str(step)

    def _document(self, step: int) -> dict:
        if step not in self.steps():
            known = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"no complete checkpoint of step {step} in {self.directory}; steps there: {known}")
        file = self._path(step) / "meta" / "metadata"
        try:
            document = json.loads(file.read_text())
            if document["format"] > FORMAT:
                raise CheckpointError(
                    f"checkpoint {self._path(step)} has format {document['format']}, this version reads up to "
                    f"{FORMAT}; update ncp_jax"
                )
            return document
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise self._damaged(step, f"{file} cannot be read ({_cause(error)})") from error

    def _restore(self, step: int, abstract: Any, document: dict, stored: dict[str, Leaf], config: dict | None) -> Any:
        wanted = leaves.flatten(abstract)
        lines = leaves.compare(leaves.describe(wanted), stored)
        if lines:
            raise leaves.refuse(f"checkpoint {self._path(step)}", lines, config, document["meta"].get("config"))
        placed = {name: _placed(leaf) for name, leaf in wanted.items()}
        solid = leaves.nest({name: leaf for name, leaf in placed.items() if not stored[name].empty})
        restored = leaves.flatten(self._read(step, solid)) if solid else {}
        sums = leaves.checksums(restored)
        wrong = [name for name in restored if sums[name] != stored[name].checksum]
        if wrong:
            raise self._damaged(
                step, f"the values of {len(wrong)} leaves are not the saved ones: {', '.join(wrong[:5])}"
            )
        for name, leaf in placed.items():
            if stored[name].empty:
                restored[name] = jax.device_put(jax.numpy.zeros(leaf.shape, leaf.dtype), leaf.sharding)
        return leaves.unflatten_like(abstract, restored)

    def _read(self, step: int, solid: dict) -> dict:
        args = ocp.args.PyTreeRestore(
            solid, restore_args=ocp.checkpoint_utils.construct_restore_args(solid), partial_restore=True
        )
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                return reader.restore(self._path(step) / "state", args=args)
        except Exception as error:  # tensorstore reports damage as ValueError, FileNotFoundError, XlaRuntimeError, ...
            raise self._damaged(step, f"its arrays cannot be read ({_cause(error)})") from error

    def _make_writer(self) -> ocp.AsyncCheckpointer:
        self.directory.mkdir(parents=True, exist_ok=True)
        handler = ocp.CompositeCheckpointHandler(state=ocp.PyTreeCheckpointHandler(), meta=ocp.JsonCheckpointHandler())
        return ocp.AsyncCheckpointer(handler, async_options=ocp.options.AsyncOptions(timeout_secs=self._timeout))

    def _finish(self, step: int) -> None:
        """Background: wait for the commit, then remove what is no longer kept. Nothing goes before the commit."""
        try:
            assert self._writer is not None
            self._writer.wait_until_finished()
            if jax.process_index() == 0:
                self._prune()
        except Exception as error:  # handed to the main thread by check()
            self._failure = self._save_error(step, error)

    def _prune(self) -> None:
        steps = self.steps()
        kept = set(steps[-self._keep :]) | ({self.best_step()} if self._best else set())
        for step in set(steps) - kept:
            _retire(self._path(step))
        for path in self.directory.iterdir():  # left by killed runs; nothing is in flight here
            if re.fullmatch(rf"\d+{re.escape(TEMPORARY)}.*", path.name):
                path.rmtree(missing_ok=True)

    def _marked(self) -> list[int]:
        file = self.directory / "best.json"
        return json.loads(file.read_text())["steps"] if file.exists() else []

    def _mark(self, step: int, best: bool) -> None:
        """List `step` as best before it is written: until it is complete, the best before it stays listed and kept."""
        marked = self._marked()
        if jax.process_index() != 0 or best == (step in marked):
            return
        complete = set(self.steps())
        marked = sorted(({s for s in marked if s in complete} - {step}) | ({step} if best else set()))
        self.directory.mkdir(parents=True, exist_ok=True)
        new = self.directory / "best.json.new"
        new.write_text(json.dumps({"steps": marked}))
        new.replace(self.directory / "best.json")

    def _save_error(self, step: int, error: BaseException) -> CheckpointSaveError:
        return CheckpointSaveError(
            f"saving step {step} to {self._path(step)} failed: {_cause(error)}. {self._still_good()}; "
            "free space or fix the permissions, then start the run again"
        )

    def _damaged(self, step: int, what: str) -> CheckpointDamaged:
        return CheckpointDamaged(
            f"checkpoint {self._path(step)} is damaged: {what}. {self._still_good(but=step)}; move the damaged one away"
        )

    def _still_good(self, but: int | None = None) -> str:
        try:
            good = [step for step in self.steps() if step != but]
        except OSError as error:
            return f"{self.directory} cannot be listed ({_cause(error)})"
        return f"Untouched: {self._path(good[-1])} (all steps: {good})" if good else "No other checkpoint is there"


def _table_of(named: dict[str, Any]) -> dict[str, Leaf]:
    table = leaves.describe(named)
    for name, array in named.items():
        if not isinstance(array, jax.Array):
            raise CheckpointError(f"leaf '{name}' is a {type(array).__name__}, not a jax array; use jnp.asarray")
    sums = leaves.checksums(named)
    return {name: Leaf(leaf.shape, leaf.dtype, sums[name]) for name, leaf in table.items()}


def _to_json(table: dict[str, Leaf]) -> dict[str, list]:
    return {name: [leaf.dtype, list(leaf.shape), leaf.checksum] for name, leaf in table.items()}


def _from_json(table: dict[str, list]) -> dict[str, Leaf]:
    return {name: Leaf(tuple(shape), dtype, checksum) for name, (dtype, shape, checksum) in table.items()}


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _below(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(prefix + "/")


def _retire(path: epath.Path) -> None:
    """Delete a checkpoint so that no moment shows a half-deleted one as complete."""
    if ocp.utils.is_gcs_path(path):  # no rename there: without its commit file a checkpoint is not listed
        (path / "commit_success.txt").unlink(missing_ok=True)
    else:
        path = path.rename(path.parent / (path.name + TEMPORARY))
    path.rmtree(missing_ok=True)


def _cause(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
