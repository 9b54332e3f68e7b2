"""The program alone, and reasons why a Marshal has no watchdog."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal import ConfigurationError, Marshal
from kafka_marshal.errors import TopicMissingError
from kafka_marshal.watchdog import Watchdog, process
from kafka_marshal.watchdog.parent import LastWill, Pipe, producer_properties
from rationalizer import ClaimingShare, Record, ReleasingPartition, Upgrade, World, encode
from rationalizer.levels import SHARING_LEVEL
from tests.client.conftest import wait_until
from tests.watchdog.conftest import SHORT_HI, Watched, is_running

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


# When a watchdog must write nothing: a closed pipe or a dead process alone is no death; nor is a regular end.


def test_close_releases_once_and_takes_the_watchdog_along(watched: Watched) -> None:
    worker = watched.worker()
    watchdog = worker.ready_watchdog()
    worker.do("claim", [0, 1])
    worker.do("close")
    assert not is_running(watchdog)
    worker.kill()
    wait_until(lambda: watched.holders() == {0: None, 1: None})
    assert sorted(x.partition for x in watched.releases) == [0, 1]


def test_c7_terminate_keeps_the_claims(watched: Watched) -> None:
    worker = watched.worker()
    watchdog = worker.ready_watchdog()
    worker.do("claim", [0, 1])
    worker.do("terminate")
    assert not is_running(watchdog)
    worker.kill()
    # A later record in each CP: anything that the watchdog wrote would be before it.
    wait_until(lambda: watched.holders() == {0: "a", 1: "a"})
    for partition in (2, 3):
        watched.watcher.claim(watched.topic, partition).release()
    assert {x.partition for x in watched.releases} <= {2, 3}
    assert watched.holders()[0] == "a"


def test_an_exec_is_no_death(watched: Watched) -> None:
    worker = watched.worker(hi=SHORT_HI)
    watchdog = worker.ready_watchdog()
    worker.do("claim", [0])
    worker.order("exec", ["sleep", "600"])
    watched.taken_over()
    wait_until(lambda: not is_running(watchdog), 60, "it has outlived its work")
    assert worker.process.poll() is None
    assert watched.releases == []


def test_children_that_were_forked_may_handle_messages_on(watched: Watched) -> None:
    worker = watched.worker(hi=SHORT_HI)
    watchdog = worker.ready_watchdog()
    worker.do("claim", [0])
    child = worker.fork()
    worker.kill()
    watched.taken_over()
    wait_until(lambda: not is_running(watchdog), 60, "it has outlived its work")
    assert is_running(child)
    assert watched.releases == []


def test_when_the_last_forked_child_is_gone_it_speaks(watched: Watched) -> None:
    worker = watched.worker()
    watchdog = worker.ready_watchdog()
    worker.do("claim", [0])
    children = [worker.fork(), worker.fork()]
    worker.kill()
    os.kill(children[0], signal.SIGKILL)
    before = watched.watcher.world.log_time
    watched.watcher.claim(watched.topic, 1).release()
    wait_until(lambda: watched.watcher.world.log_time > before)
    assert watched.holders()[0] == "a"
    os.kill(children[1], signal.SIGKILL)
    wait_until(lambda: watched.holders().get(0, "") is None)
    wait_until(lambda: not is_running(watchdog))


def test_a_daemon_that_forked_away_holds_the_pipe(watched: Watched) -> None:
    worker = watched.worker(hi=SHORT_HI)
    watchdog = worker.ready_watchdog()
    worker.do("claim", [0])
    daemon = worker.do("daemonise")
    worker.children.append(daemon)
    assert worker.process.wait(20) == 0
    watched.taken_over()
    wait_until(lambda: not is_running(watchdog), 60, "it has outlived its work")
    assert is_running(daemon)
    assert watched.releases == []


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_another_program_started_by_the_worker_does_not_hold_the_pipe(watched: Watched, how: str) -> None:
    worker = watched.worker()
    worker.ready_watchdog()
    worker.do("claim", [0])
    child = worker.fork("sleep", "600") if how == "fork" else worker.spawn("sleep", "600")
    wait_until(lambda: Path(f"/proc/{child}/comm").read_text().strip() == "sleep")
    worker.kill()
    wait_until(lambda: watched.holders().get(0, "") is None)
    assert is_running(child)


def test_a_worker_that_closes_its_descriptors_lives_and_gets_another_watchdog(watched: Watched, tmp_path: Path) -> None:
    worker = watched.worker()
    first = worker.ready_watchdog()
    worker.do("claim", [0])
    other = tmp_path / "a file of the user's"
    worker.do("close_pipe", str(other))
    worker.do("claim", [1])
    second = worker.ready_watchdog(other_than=first)
    assert any("closed the connection" in line for line in worker.log)
    # The descriptor is a file's now: nothing may be written to it.
    assert other.read_bytes() == b""
    assert watched.releases == []
    assert watched.holders() == {0: "a", 1: "a"}
    os.kill(first, 0)  # it waits 2 · HI for the process to end, too
    worker.kill()
    wait_until(lambda: watched.holders() == {0: None, 1: None})
    wait_until(lambda: not is_running(first) and not is_running(second))


# -- The cost of an idle watchdog, and what it does not receive ---------------------------------------------------


MAX_PSS_KB = 32 * 1024
MAX_IDLE_CPU = 0.001
IDLE_MS = 4_000


def pss_kb(pid: int) -> int:
    [line] = [x for x in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if x.startswith("Pss:")]
    return int(line.split()[1])


def cpu_s(pid: int) -> float:
    """Processor time of all threads (s), with nanosecond resolution."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def test_it_is_small_and_idle(watched: Watched) -> None:
    watched.scene.grow(watched.topic, 20)
    worker = watched.worker(hi=300)
    watchdog = worker.ready_watchdog()
    worker.do("claim", list(range(20)))
    # The worker sends ten heartbeats a second meanwhile, and the watchdog receives none of them.
    before, began = cpu_s(watchdog), time.monotonic()
    until = watched.watcher.world.log_time + IDLE_MS
    wait_until(lambda: watched.watcher.world.log_time > until)
    used = (cpu_s(watchdog) - before) / (time.monotonic() - began)
    assert used < MAX_IDLE_CPU
    assert pss_kb(watchdog) < MAX_PSS_KB


def test_secrets_are_in_neither_its_arguments_nor_its_environment(watched: Watched) -> None:
    config = {"sasl.username": "ann", "sasl.password": "hunter2", "ssl.key.password": "hunter2"}
    worker = watched.worker(config=config)
    watchdog = worker.ready_watchdog()
    arguments = Path(f"/proc/{watchdog}/cmdline").read_bytes()
    environment = Path(f"/proc/{watchdog}/environ").read_bytes()
    assert f"--worker={worker.process.pid}".encode() in arguments
    for secret in (b"hunter2", b"not-for-the-watchdog"):
        assert secret not in arguments + environment


def test_it_holds_nothing_of_the_workers_but_where_errors_go(watched: Watched, tmp_path: Path) -> None:
    worker = watched.worker()
    watchdog = worker.ready_watchdog()
    links = {int(fd.name): str(fd.readlink()) for fd in Path(f"/proc/{watchdog}/fd").iterdir()}
    assert links[0] == links[1] == "/dev/null"
    of_worker = {str(fd.readlink()) for fd in Path(f"/proc/{worker.process.pid}/fd").iterdir() if int(fd.name) > 2}
    assert of_worker & {link for fd, link in links.items() if link != links[2]} <= {"anon_inode:[eventpoll]"}
    assert str(Path(f"/proc/{watchdog}/cwd").readlink()) == "/"


# -- What a watchdog releases of a partition of which its worker has several ranges of keys: each share -----------


IDS = ("w-1", "w", "g")
KEY = ("orders", 0)


def test_each_share_has_its_release_and_one_that_ended_has_none() -> None:
    world, will = World(0, 1), LastWill(IDS)
    will.worlds, will.partitions = {0: world}, 1

    def write(record: Record) -> None:
        outcome = world.apply(world.next_offset, 1_000 + world.next_offset, encode(record))
        for key in will.touched(0, outcome):
            will.look(0, key)

    write(Upgrade("x", "admin", "any", SHARING_LEVEL))
    write(ClaimingShare(*IDS, *KEY, 1_000, 0, 9, None))
    write(ClaimingShare(*IDS, *KEY, 1_000, 20, 29, None))
    write(ClaimingShare("v-1", "v", "g", *KEY, 1_000, 10, 19, None))
    assert len(will.leases) == 2
    packed = b"".join(entry for _, entry in will.leases.values())
    assert all(encode(ReleasingPartition(*IDS, *KEY, epoch, None)) in packed for epoch in (1, 2))
    write(ReleasingPartition(*IDS, *KEY, 1, None))
    assert len(will.leases) == 1
    write(ReleasingPartition(*IDS, *KEY, 2, None))
    assert not will.leases
