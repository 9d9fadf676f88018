"""The roll call: before jax's service starts, process 0 hears from every other process, and all learn who is missing.

jax's service waits for the last process and then ends all in C++ without saying which it was. The roll is called on
the same port, which is given back before the service takes it. One JSON line goes each way:
{"index", "count", "host"} and {"error": null or what everyone should say}.
"""

import contextlib
import json
import socket
import time
from typing import Any

LINE = 65536  # bytes; the longest line that is read
PAUSE = 0.2  # seconds between two attempts to reach process 0


class RollCallError(RuntimeError):
    """Not all processes joined. The message names the missing ones."""


def call_roll(address: str, count: int, index: int, seconds: float) -> None:
    """Return once all `count` processes are there. Raises RollCallError, at each that is, after `seconds`."""
    host, _, port = address.rpartition(":")
    if index == 0:
        error = _listen(int(port), count, seconds)
    else:
        error = _report(host.strip("[]"), int(port), count, index, seconds)
    if error:
        raise RollCallError(error)


def _listen(port: int, count: int, seconds: float) -> str | None:
    """Process 0: collect the others, then tell all of them how it went."""
    deadline = time.monotonic() + seconds
    present: dict[int, str] = {0: socket.gethostname()}
    error = None
    with contextlib.ExitStack() as open_sockets:
        try:
            server = open_sockets.enter_context(_server(port))
        except OSError as problem:
            return f"process 0 cannot listen on port {port}: {problem.strerror}; stop what uses it, or choose another"
        callers = []
        while error is None and len(present) < count and time.monotonic() < deadline:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            with contextlib.suppress(OSError):  # nobody within the time, or one that went away again
                caller = open_sockets.enter_context(server.accept()[0])
                said = _read(caller, 5.0)
                if said is not None:
                    callers.append(caller)
                    error = _enter(present, said, count)
        missing = [str(process) for process in range(count) if process not in present]
        if error is None and missing:
            here = ", ".join(f"{process} ({host})" for process, host in sorted(present.items()))
            error = (
                f"process {', '.join(missing)} of {count} never joined within {seconds:g} s (processes.join_seconds); "
                f"there are {here}. Look at the log of the host that should run it"
            )
        for caller in callers:
            with contextlib.suppress(OSError):
                caller.sendall(json.dumps({"error": error}).encode() + b"\n")
    return error


def _enter(present: dict[int, str], said: dict[str, Any], count: int) -> str | None:
    """Note one caller; what is wrong with it."""
    index, host = said["index"], said["host"]
    if said["count"] != count:
        return f"process {index} ({host}) counts {said['count']} processes, process 0 ({present[0]}) counts {count}"
    if index in present:
        return f"{present[index]} and {host} both say that they are process {index}; number the processes from 0"
    present[index] = host
    return None


def _report(host: str, port: int, count: int, index: int, seconds: float) -> str | None:
    """Any other process: say that it is there, and hear how it went."""
    deadline = time.monotonic() + seconds
    line = json.dumps({"index": index, "count": count, "host": socket.gethostname()}).encode() + b"\n"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=5.0) as server:
                server.sendall(line)
                answer = _read(server, max(deadline - time.monotonic(), 0.0) + seconds)  # its clock began later
                if answer is not None:
                    return answer["error"]
        except OSError:
            pass
        time.sleep(PAUSE)
    return f"process 0 did not answer at {host}:{port} within {seconds:g} s (processes.join_seconds); look at its log"


def _read(connection: socket.socket, seconds: float) -> dict[str, Any] | None:
    """One JSON line; None from whoever says something else, or nothing."""
    connection.settimeout(seconds)
    with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as stream:
        found = json.loads(stream.readline(LINE))
        return found if isinstance(found, dict) else None
    return None


def _server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
