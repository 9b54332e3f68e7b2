"""When a watchdog must write nothing: a closed pipe or a dead process alone is no death; nor is a regular end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.client.conftest import wait_until
from tests.watchdog.conftest import SHORT_HI, Watched, is_running


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
