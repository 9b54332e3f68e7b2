"""A member of a coordinated group dies, and its watchdog commits and leaves in its name (G14, G20)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from rationalizer import CommitOffsets, LeaveGroup, Outcome
from tests.client.conftest import wait_until
from tests.client.test_group import Groups, Joined
from tests.watchdog.conftest import Watched, is_running

#: Long: a member replaced sooner than this left by its watchdog.
LONG_SESSION = 30_000


@pytest.fixture
def scene(kafka_bootstrap: str, topic_factory: Callable[..., str]) -> Iterator[Groups]:
    made = Groups(kafka_bootstrap, topic_factory)
    yield made
    made.close()


def spoken(watched: Watched) -> list[tuple[str, str]]:
    """Every CommitOffsets and LeaveGroup of a, as (type, code), from now on."""
    found: list[tuple[str, str]] = []

    def applied(cp: int, offset: int, outcome: Outcome) -> None:
        if isinstance(outcome.record, CommitOffsets | LeaveGroup) and outcome.record.client_id == "a":
            found.append((outcome.type or "", outcome.code))

    watched.watcher._driver.listeners.append(applied)
    return found


def test_a_dead_member_leaves_at_once_and_what_it_had_done_is_committed(watched: Watched, scene: Groups) -> None:
    worker = watched.worker()
    watchdog = worker.ready_watchdog()
    worker.do("join", LONG_SESSION)
    b = scene.joined("b", watched.topic, session_timeout=LONG_SESSION / 1000)
    wait_until(lambda: len(b.has()) == 2)
    scene.publish(watched.topic, 4, 50)
    wait_until(lambda: len(worker.handled) == 100)
    theirs = {partition for partition, _ in worker.handled}
    # Its next commit is seconds away; its watchdog receives the progress within a fraction of one.
    wait_until(lambda: worker.do("look")["untold"] == 0 and worker.do("look")["told"] == 3)
    log = spoken(watched)
    began = time.monotonic()
    worker.kill()
    wait_until(lambda: len(b.has()) == 4)
    assert time.monotonic() - began < 1
    assert log == [("CommitOffsets", "OK"), ("CommitOffsets", "OK"), ("LeaveGroup", "OK")]
    # All except possibly the message in flight: 49 or 50 of each.
    found = b.consumer.committed([(watched.topic, partition) for partition in theirs])
    assert all(x.offset >= 49 for x in found)
    assert sum(x.offset for x in found) >= 99
    wait_until(lambda: not is_running(watchdog))
    wait_until(lambda: any("3 of 3 records written in its name" in line for line in worker.errors))


def test_two_lives_the_first_ones_watchdog_can_not_end_the_second(watched: Watched, scene: Groups) -> None:
    first = watched.worker()
    watchdog = first.ready_watchdog()
    first.do("join", LONG_SESSION)
    seen = Joined(watched.watcher, None)  # type: ignore[arg-type]  # it observes
    wait_until(lambda: seen.member("a") is not None and first.do("look")["told"] == 1)
    dead = seen.member("a")
    assert dead is not None
    dead_id = dead.member_id
    os.kill(watchdog, signal.SIGSTOP)
    first.kill()
    second = watched.worker()
    second.do("join", LONG_SESSION)
    wait_until(lambda: (now := seen.member("a")) is not None and now.member_id != dead_id)
    log = spoken(watched)
    os.kill(watchdog, signal.SIGCONT)
    wait_until(lambda: log == [("LeaveGroup", "UNKNOWN_CONSUMER")])
    assert seen.member("a") is not None
    assert not second.log or not any("hand over" in line for line in second.log), "that is no request to drain"
    # After a regular end the watchdog writes nothing.
    own = second.ready_watchdog()
    second.do("close")
    assert seen.member("a") is None or wait_until(lambda: seen.member("a") is None)
    wait_until(lambda: not is_running(own) and not is_running(watchdog))
    assert not any("died" in line for line in second.errors)
