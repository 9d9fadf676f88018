"""Joining other processes: what is refused before any of them is asked, and the roll call itself."""

import socket
import threading

import jax
import pytest

from ncp_jax.config import ConfigError
from ncp_jax.parallel.processes import ProcessesConfig, Store, join
from ncp_jax.parallel.roll_call import RollCallError, call_roll


@pytest.fixture
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize(
    ("given", "variables", "message"),
    [
        (
            (None, None, None),
            {},
            r"cannot join .* None, None processes, this one None. Give --coordinator",
        ),
        (("10.0.0.1:8476", 4, None), {}, r"coordinator 10.0.0.1:8476, 4 processes, this one None"),
        (("10.0.0.1", 4, 0), {}, r"coordinator '10.0.0.1' is not HOST:PORT, for example 10.0.0.1:8476"),
        (("10.0.0.1:8476", 4, 4), {}, r"process 4 of 4 does not exist; processes count from 0"),
        ((None, None, 2), {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2"}, r"process 2 of 2 does not"),
        ((None, None, None), {"JAX_NUM_PROCESSES": "two"}, r"JAX_NUM_PROCESSES='two' is not a whole number"),
    ],
)
def test_impossible_processes(monkeypatch, given, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        join(ProcessesConfig(), *given)


@pytest.mark.parametrize("name", ["join_seconds", "silent_seconds", "heartbeat_seconds"])
def test_times_are_positive(name):
    with pytest.raises(ConfigError, match=f"processes.{name} must be positive, got 0"):
        ProcessesConfig(**{name: 0})


def called(address: str, *callers: tuple[int, int], seconds: float = 20) -> list[str | None]:
    """What each (count, index) was told; None: all are there."""
    told: list[str | None] = [None] * len(callers)

    def call(place: int, count: int, index: int) -> None:
        try:
            call_roll(address, count, index, seconds)
        except RollCallError as error:
            told[place] = str(error)

    threads = [threading.Thread(target=call, args=(place, *caller)) for place, caller in enumerate(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=3 * seconds)
    return told


def test_all_there_and_the_port_is_free_again(address):
    for _ in range(2):
        assert called(address, (3, 2), (3, 0), (3, 1)) == [None, None, None]


def test_whoever_is_missing_is_named_to_all_who_came(address):
    told = called(address, (4, 0), (4, 2), seconds=1.5)
    assert told[0] == told[1]
    assert told[0].startswith("process 1, 3 of 4 never joined within 1.5 s (processes.join_seconds); there are 0 (")


def test_a_number_given_twice_and_a_count_that_differs(address):
    told = called(address, (3, 0), (3, 1), (3, 1), seconds=2)
    assert "both say that they are process 1" in told[0]
    told = called(address, (2, 0), (3, 1), seconds=2)
    assert told[0] == told[1]
    assert "counts 3 processes, process 0 (" in told[0]


def test_callers_that_are_none_are_passed_over(address):
    """A port scanner, or a process of another run that speaks to jax's service."""
    host, _, port = address.rpartition(":")
    told: list = []
    roll = threading.Thread(target=lambda: told.extend(called(address, (2, 0))))
    roll.start()
    for _ in range(200):
        try:
            with socket.create_connection((host, int(port)), timeout=1) as stranger:
                stranger.sendall(b"PRI * HTTP/2.0\r\n\r\n")
            break
        except OSError:
            threading.Event().wait(0.05)
    assert called(address, (2, 1)) == [None]
    roll.join()
    assert told == [None]


def test_a_port_in_use(address):
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        (told,) = called(address, (2, 0), seconds=1)
    assert "process 0 cannot listen on port" in told


def test_one_process_has_nothing_to_wait_for():
    assert jax.process_count() == 1
    store = Store("alone")
    store.barrier("anything", 0.001)
    store.agree("a value", "5", 0.001, "")
    assert store.exchange("more", "x", 0.001) == ["x"]
