"""The processes of a run, one per host: they join, meet at named barriers, compare what must be the same, and stop
with a name when one of them is missing.

jax's own service ends a process in C++, with a stack trace, when another is lost. Here everything that waits has a
timeout and an error that names the process (its number and host name) that did not come. This is the only file that
reaches into jax's private modules: the service's key-value store has no public door.
"""

import os
import socket
from typing import Any

import jax

from ncp_jax.config import ConfigError, frozen
from ncp_jax.parallel.roll_call import RollCallError, call_roll

# jax reads the first itself; the other two are ours, named in the same way.
ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


@frozen
class ProcessesConfig:
    """How long processes wait for one another, and how often the log says that the run lives."""

    join_seconds: float = 300.0  # for the last host to start, and at barriers; hosts of a pod may start minutes apart
    silent_seconds: float = 60.0  # a process not heard of for so long is gone: the others stop
    heartbeat_seconds: float | None = 300.0  # between two heartbeat lines; None: no such line

    def __post_init__(self):
        for name in ("join_seconds", "silent_seconds", "heartbeat_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                off = "; null switches it off" if name == "heartbeat_seconds" else ""
                raise ConfigError(f"processes.{name} must be positive, got {value}{off}")


class ProcessError(RuntimeError):
    """A process that did not come, or left. The message names it; the same command continues once it is back."""


def join(
    config: ProcessesConfig, address: str | None = None, count: int | None = None, index: int | None = None
) -> None:
    """Join the other processes of the run; to be called before anything asks for devices.

    What is not given comes from the environment (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID), then
    from the platform, where jax knows it (TPU VM, GKE, Slurm).

    Args:
        address: HOST:PORT at which process 0 listens.
        count, index: how many processes there are, and which this is, from 0.
    Raises ConfigError for values that cannot be, ProcessError naming those that never joined.
    """
    address, count, index = _resolved(config, address, count, index)
    if count > 1:
        try:
            call_roll(address, count, index, config.join_seconds)
        except RollCallError as error:
            raise ProcessError(str(error)) from None
    # Its SIGTERM handler would compete with the trainer's, whose wish to stop travels with the step.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        address, num_processes=count, process_id=index, initialization_timeout=round(config.join_seconds) + 1,
        # Longer than ours: whoever is gone should be named before jax ends the process.
        heartbeat_timeout_seconds=round(2 * config.silent_seconds) + 30,
    )  # fmt: skip


def asked_to_join() -> bool:
    """Whether the environment names a coordinator."""
    return bool(os.environ.get(ADDRESS))


def joined() -> bool:
    """Whether this process is one of several that found each other."""
    return _client() is not None and jax.process_count() > 1


class Store:
    """Small values shared by all processes, under a prefix; and barriers. With one process nothing is shared."""

    def __init__(self, prefix: str):
        """Every process makes its stores in the same order, with the same prefixes."""
        self._prefix, self._client = prefix, _client()
        self.index, self.count = jax.process_index(), jax.process_count()
        self.hosts = [socket.gethostname()]  # by process
        self._meetings: dict[str, int] = {}

    def meet(self, seconds: float) -> None:
        """Learn the others' host names. Raises ProcessError."""
        self.hosts = ["an unknown host"] * self.count
        self.hosts = self.exchange("start", socket.gethostname(), seconds)

    def put(self, key: str, value: str) -> None:
        """Set this process's value of a key."""
        if self.count > 1:
            self._client.key_value_set(f"{self._prefix}/{key}/{self.index}", value, allow_overwrite=True)

    def read(self, key: str) -> dict[int, str]:
        """Values of a key, by process."""
        if self.count == 1:
            return {}
        pairs = self._client.key_value_dir_get(f"{self._prefix}/{key}/")
        return {int(name.rsplit("/", 1)[1]): value for name, value in pairs}

    def exchange(self, name: str, value: str, seconds: float) -> list[str]:
        """Every process's value, by process. Raises ProcessError naming the barrier and who did not come to it."""
        if self.count == 1:
            return [value]
        number = self._meetings[name] = self._meetings.get(name, 0) + 1
        key = f"meeting/{name}/{number}"
        self.put(key, value)
        try:
            self._client.wait_at_barrier(f"{self._prefix}/{key}", round(1000 * seconds))
        except jax.errors.JaxRuntimeError as error:
            raise ProcessError(self._absent(name, key, seconds, error)) from None
        found = self.read(key)
        return [found[process] for process in range(self.count)]

    def barrier(self, name: str, seconds: float) -> None:
        """Wait for all processes. Raises ProcessError naming the barrier and who did not come to it."""
        self.exchange(name, "", seconds)

    def agree(self, what: str, value: str, seconds: float, remedy: str) -> None:
        """Raise ConfigError, at every process, unless all have the same `value` of `what`."""
        values = self.exchange(what, value, seconds)
        others = [f"{self.name(process)} has {theirs}" for process, theirs in enumerate(values) if theirs != values[0]]
        if others:
            raise ConfigError(f"{what}: {self.name(0)} has {values[0]}, but {'; '.join(others)}. {remedy}")

    def name(self, process: int) -> str:
        """How messages call a process: its number, and its host."""
        return f"process {process} ({self.hosts[process]})"

    def _absent(self, name: str, key: str, seconds: float, error: Exception) -> str:
        try:
            here = self.read(key)
        except jax.errors.JaxRuntimeError:
            return f"barrier '{name}': {self.name(0)} does not answer: it ended, or its network did"
        missing = [self.name(process) for process in range(self.count) if process not in here]
        if not missing:
            return f"barrier '{name}' broke: {str(error).splitlines()[0]}"
        return f"barrier '{name}': {', '.join(missing)} did not arrive within {seconds:g} s; look at its log"


def coordinator_answers(seconds: float = 2.0) -> bool:
    """Whether something listens where process 0 should."""
    address = _private().global_state.coordinator_address
    if address is None:
        return False
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except OSError:
        return False
    return True


def _resolved(
    config: ProcessesConfig, address: str | None, count: int | None, index: int | None
) -> tuple[str, int, int]:
    address = address or os.environ.get(ADDRESS)
    count = _number(COUNT) if count is None else count
    index = _number(INDEX) if index is None else index
    if None in (address, count, index):
        address, count, index = _detected(config, address, count, index)
    if not address or count is None or index is None:
        raise ConfigError(
            f"cannot join other processes: coordinator {address}, {count} processes, this one {index}. Give "
            f"--coordinator HOST:PORT --processes N --process I, or {ADDRESS}, {COUNT} and {INDEX}"
        )
    if not address.rpartition(":")[2].isdigit() or not address.rpartition(":")[0]:
        raise ConfigError(f"coordinator '{address}' is not HOST:PORT, for example 10.0.0.1:8476")
    if not 0 <= index < count:
        raise ConfigError(f"process {index} of {count} does not exist; processes count from 0")
    return address, count, index


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is not None and not text.strip().isdigit():
        raise ConfigError(f"{variable}='{text}' is not a whole number")
    return None if text is None else int(text)


def _detected(
    config: ProcessesConfig, address: str | None, count: int | None, index: int | None
) -> tuple[str | None, int | None, int | None]:
    """What jax finds out from the platform, beside what is given."""
    from jax._src import clusters

    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    found = detect(address, count, index, None, None, round(config.join_seconds))
    return found[0], found[1], found[2]


def _private() -> Any:
    from jax._src import distributed

    return distributed


def _client() -> Any:
    return _private().global_state.client
