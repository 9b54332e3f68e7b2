"""The program alone, and reasons why a Marshal has no watchdog."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kafka_marshal import ConfigurationError, Marshal
from kafka_marshal.errors import TopicMissingError
from kafka_marshal.watchdog import Watchdog, process
from kafka_marshal.watchdog.parent import Pipe, producer_properties
from tests.client.conftest import wait_until
from tests.watchdog.conftest import is_running

NOBODY = "127.0.0.1:9"


class Program:
    """The watchdog process of a worker that only sleeps."""

    def __init__(self) -> None:
        self.worker = subprocess.Popen(["sleep", "600"])
        worker = os.pidfd_open(self.worker.pid)
        self.pipe = Pipe()
        inherited = (self.pipe.theirs.fileno(), worker)
        self.parent = subprocess.Popen(
            [sys.executable, "-I", "-S", process.__file__, *map(str, inherited)],
            pass_fds=inherited,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(worker)
        self.pipe.theirs.close()
        self.pid = self.hear()["hello"]
        assert self.parent.wait(20) == 0

    def hear(self) -> dict[str, Any]:
        """What it says next."""
        packet = wait_until(lambda: self.pipe.receive(10_000), 60, "the watchdog says something")
        found: dict[str, Any] = json.loads(packet)
        return found

    def errors(self) -> str:
        """What it wrote, once it has ended."""
        assert self.parent.stderr is not None
        return self.parent.stderr.read()

    def clean_up(self) -> None:
        self.pipe.close()
        self.worker.kill()
        self.worker.wait()
        wait_until(lambda: not is_running(self.pid))
        assert self.parent.stderr is not None
        self.parent.stderr.close()


@pytest.fixture
def program() -> Iterator[Program]:
    made = Program()
    yield made
    made.clean_up()


def config(**more: object) -> bytes:
    said = json.loads(Watchdog("w", "t", ("i", "c", "g"), {}, 400)._config[1:])
    properties = producer_properties(NOBODY, {}, 400)
    return process.CONFIG + json.dumps({**said, "properties": properties, **more}).encode()


def last_will(heartbeat_interval_ms: int) -> bytes:
    return process.LAST_WILL + process.pack_lease(0, 0, heartbeat_interval_ms, b"a release")


def test_it_ends_with_a_goodbye(program: Program) -> None:
    program.pipe.send(config())
    program.pipe.send(last_will(600_000))
    program.pipe.send(process.GOODBYE)
    wait_until(lambda: not is_running(program.pid))
    assert program.errors() == ""


def test_it_ends_at_once_where_there_is_nothing_to_release(program: Program) -> None:
    program.pipe.send(config())
    program.pipe.send(last_will(600_000))
    program.pipe.send(process.LAST_WILL + process.pack_lease(0, 0, 0, b""))
    program.pipe.close()
    wait_until(lambda: not is_running(program.pid))
    assert program.worker.poll() is None
    assert program.errors() == ""


@pytest.mark.parametrize("sign", ["pipe", "process"])
def test_with_one_sign_alone_it_says_nothing_and_ends_after_2_hi(program: Program, sign: str) -> None:
    program.pipe.send(config())
    program.pipe.send(last_will(400))
    began = time.monotonic()
    if sign == "pipe":
        program.pipe.close()
    else:
        program.worker.kill()
    wait_until(lambda: not is_running(program.pid))
    # Both processes read the same clock; it saw the sign after our check.
    assert time.monotonic() - began >= 2 * 0.4
    assert program.errors() == ""


def test_a_worker_that_dies_before_it_has_said_anything(program: Program) -> None:
    program.worker.kill()
    program.pipe.close()
    wait_until(lambda: not is_running(program.pid))
    assert program.errors() == ""


def test_what_could_not_be_released_is_said(program: Program) -> None:
    program.pipe.send(config())
    program.pipe.send(last_will(400))
    program.worker.kill()
    program.pipe.close()
    wait_until(lambda: not is_running(program.pid))
    said = program.errors()
    assert "0 of 1 leases released" in said
    assert "Connection refused" in said or "timed out" in said


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"format": 2}, "another release"),
        ({"properties": {"bootstrap.servers": NOBODY, "message.timeout.ms": 400, "no.such.property": 1}}, "no.such"),
    ],
)
def test_what_it_can_not_work_with_is_reported(program: Program, more: dict[str, object], why: str) -> None:
    program.pipe.send(config(**more))
    assert why in program.hear()["trouble"]
    wait_until(lambda: not is_running(program.pid))
    assert why in program.errors()


def test_no_broker_is_reported_to_the_worker(program: Program) -> None:
    program.pipe.send(config())
    assert "Connection refused" in program.hear()["trouble"]


def test_functions_can_not_be_given_to_another_process() -> None:
    with pytest.raises(ConfigurationError, match="'oauth_cb'"):
        producer_properties(NOBODY, {"oauth_cb": lambda _: ("token", 1.0)}, 3_000)
    listening: dict[str, Callable[..., None] | int] = {
        "error_cb": print,
        "stats_cb": print,
        "statistics.interval.ms": 9,
    }
    assert not listening.keys() & producer_properties(NOBODY, listening, 3_000).keys()


def test_a_system_that_does_not_know_when_a_process_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(ConfigurationError, match=r"Linux 5\.3"):
        Marshal(NOBODY, group_id="g", watchdog=True)


def test_an_interpreter_that_can_not_be_started_is_said_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    watchdog = Watchdog("w", "t", ("i", "c", "g"), {}, 400)
    watchdog.start()
    wait_until(lambda: len([x for x in caplog.messages if "could not be started" in x]) > 1)
    watchdog.close()
    watchdog.close()
    assert watchdog.pid is None


def test_a_marshal_that_can_not_start_leaves_no_watchdog(kafka_bootstrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Watchdog] = []
    start = Watchdog.start

    def noted(watchdog: Watchdog) -> None:
        made.append(watchdog)
        start(watchdog)

    monkeypatch.setattr(Watchdog, "start", noted)
    with pytest.raises(TopicMissingError):
        Marshal(kafka_bootstrap, group_id="g", topic="__not-there", watchdog=True)
    [watchdog] = made
    assert not watchdog._thread.is_alive()
    assert watchdog.pid is None
