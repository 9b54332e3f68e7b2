"""A worker dies in different ways, and its watchdog releases its leases or not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from kafka_marshal import Batches, Keys
from kafka_marshal.watchdog import parent
from rationalizer import CommitOffsets, LeaveGroup, Outcome
from rationalizer.limits import MAX_KEY_HASH
from tests.client.conftest import Scene, wait_until
from tests.client.test_group import Groups, Joined
from tests.watchdog.conftest import LONG_HI, SHORT_HI, Watched, is_running

FREE = {0: None, 1: None}


@pytest.mark.parametrize("how", ["kill -9", "segfault", "abort", "exit", "raise", "out of memory"])
def test_c8_what_a_dead_worker_held_is_released_at_once(watched: Watched, how: str) -> None:
    worker = watched.worker()
    watchdog = worker.ready_watchdog()
    epochs = worker.do("claim", [0, 1, 2])
    worker.do("release", 2)
    wait_until(lambda: watched.holders() == {0: "a", 1: "a", 2: None})
    [instance] = {lease.instance_id for lease in watched.watcher.world.leases() if lease.partition != 2}
    before = len(watched.releases)
    if how == "kill -9":
        worker.kill()
    else:
        worker.order(how)
        worker.process.wait(30)
    began = time.monotonic()
    wait_until(lambda: watched.holders() == {0: None, 1: None, 2: None})
    assert time.monotonic() - began < LONG_HI / 1000
    spoken = sorted((x.partition, x.epoch, x.last_offset, x.code) for x in watched.releases[before:])
    # Its own epochs, without offsets, and only leases that it held when it died.
    assert spoken == [(partition, epochs[str(partition)], None, "OK") for partition in (0, 1)]
    assert {x.instance_id for x in watched.releases[before:]} == {instance}
    wait_until(lambda: not is_running(watchdog))
    if how in ("raise", "out of memory"):  # the interpreter's exit has released them and dismissed the watchdog
        assert not any("died" in line for line in worker.errors)
        return
    wait_until(lambda: any("died without a goodbye: 2 of 2 leases released" in line for line in worker.errors))


def test_a_waiting_member_gets_it_without_waiting_for_2_hi(watched: Watched) -> None:
    worker = watched.worker()
    worker.ready_watchdog()
    worker.do("claim", [0])
    waiting = watched.scene.member("b", heartbeat_interval=SHORT_HI / 1000)
    consumer = waiting.consumer([watched.topic])
    wait_until(lambda: watched.holders().get(1) == "b")
    worker.kill()
    began = time.monotonic()
    wait_until(lambda: watched.holders()[0] == "b")
    assert time.monotonic() - began < LONG_HI / 1000
    assert consumer.poll(0) is None


def test_kill_9_of_a_sharer_another_one_has_its_batch_at_once(watched: Watched) -> None:
    worker = watched.worker()
    worker.ready_watchdog()
    worker.do("share")
    wait_until(lambda: worker.do("look")["told"] == 4)  # its shares
    watched.scene.publish(watched.topic, 1, 5)
    wait_until(lambda: worker.handled)
    other = watched.scene.member("b", heartbeat_interval=SHORT_HI / 1000)
    consumer = other.consumer([watched.topic], mode=Batches())
    wait_until(lambda: len(consumer.assignment()) == 4)
    had = set(worker.handled)
    worker.kill()
    began = time.monotonic()
    again = set[tuple[int, int]]()
    for batch in consumer.batches():
        if batch.delivery_count == 2:
            again |= {(batch.partition, message.offset() or 0) for message in batch}
        batch.done()
        if again >= had:
            break
    assert time.monotonic() - began < LONG_HI / 1000


def test_kill_9_of_a_process_with_several_shares_a_standby_has_all_of_them_at_once(watched: Watched) -> None:
    """Two ranges of one partition, one of another, and a third whole: each share has its own release."""
    outer, first = [(0, 99), (2**62, MAX_KEY_HASH)], [(0, 2**62 - 1)]
    worker = watched.worker()
    worker.ready_watchdog()
    worker.do("assign", [[0, outer], [1, first], [2, []]])

    def shares(client: str = "a") -> int:
        with watched.watcher._driver.lock.locked() as engine:
            leases = [lease for world in engine.worlds.values() for lease in world.leases()]
            return sum(each.client_id == client for lease in leases for each in lease.shares or ())

    wait_until(lambda: shares() == 3 and watched.holders().get(2) == "a")
    wait_until(lambda: worker.do("look")["told"] == 4 and worker.do("look")["untold"] == 0)
    wanted: dict[tuple[str, int], list[tuple[int, int]]] = {
        (watched.topic, 0): outer,
        (watched.topic, 1): first,
        (watched.topic, 2): [],
    }
    standby = watched.scene.member("b", heartbeat_interval=SHORT_HI / 1000).consumer(mode=Keys(wanted))
    assert standby.poll(2 * SHORT_HI / 1000) is None
    before = len(watched.releases)
    worker.kill()
    began = time.monotonic()
    wait_until(lambda: shares("b") == 3 and watched.holders()[2] == "b")
    assert time.monotonic() - began < LONG_HI / 1000
    assert shares() == 0
    spoken = [(x.partition, x.last_offset, x.code) for x in watched.releases[before:]]
    assert sorted(spoken) == [(number, None, "OK") for number in (0, 0, 1, 2)]


def test_kill_9_of_the_watchdog_another_one_takes_its_place(watched: Watched) -> None:
    worker = watched.worker()
    first = worker.ready_watchdog()
    worker.do("claim", [0, 1])
    os.kill(first, signal.SIGKILL)
    second = worker.ready_watchdog(other_than=first)
    assert any("the watchdog of worker 'a'" in line and "is gone" in line for line in worker.log)
    assert watched.holders() == {0: "a", 1: "a"}
    assert watched.releases == []
    worker.kill()
    wait_until(lambda: watched.holders() == FREE)
    wait_until(lambda: not is_running(second))


def test_kill_9_of_both_2_hi_hold(watched: Watched) -> None:
    worker = watched.worker(hi=SHORT_HI)
    watchdog = worker.ready_watchdog()
    worker.do("claim", [0])
    # Stopped first, so that neither notices the other's end.
    os.kill(watchdog, signal.SIGSTOP)
    worker.kill()
    os.kill(watchdog, signal.SIGKILL)
    watched.taken_over()
    assert watched.releases == []


def test_sigstop_of_the_worker_is_no_death(watched: Watched) -> None:
    worker = watched.worker(hi=SHORT_HI)
    watchdog = worker.ready_watchdog()
    worker.do("claim", [0])
    worker.process.send_signal(signal.SIGSTOP)
    watched.taken_over()
    assert watched.releases == []
    assert is_running(watchdog)
    worker.process.send_signal(signal.SIGCONT)
    assert worker.do("look")["pid"] == watchdog


def test_sigstop_of_the_watchdog_delays_no_worker_and_its_late_records_are_fenced(watched: Watched) -> None:
    worker = watched.worker(hi=SHORT_HI)
    watchdog = worker.ready_watchdog()
    epochs = worker.do("claim", [0])
    os.kill(watchdog, signal.SIGSTOP)
    worker.do("claim", [1])
    began = watched.watcher.world.log_time
    wait_until(lambda: watched.watcher.world.log_time > began + 4 * SHORT_HI)
    assert watched.holders() == {0: "a", 1: "a"}
    worker.kill()
    watched.taken_over()
    assert watched.releases == []
    os.kill(watchdog, signal.SIGCONT)
    wait_until(lambda: len(watched.releases) == 2)
    [late] = [x for x in watched.releases if x.partition == 0]
    assert (late.epoch, late.code) == (epochs["0"], "FENCED")
    assert watched.holders()[0] == "b"
    wait_until(lambda: not is_running(watchdog))


def test_c7_two_lives_the_first_ones_watchdog_can_not_end_the_second(watched: Watched) -> None:
    first = watched.worker()
    watchdog = first.ready_watchdog()
    first.do("consume")
    wait_until(lambda: watched.holders() == dict.fromkeys(range(4), "a"))
    wait_until(lambda: first.do("look")["told"] == 4)  # its replica may be a little behind ours
    [dead] = watched.instances()
    os.kill(watchdog, signal.SIGSTOP)
    first.kill()
    second = watched.worker()
    second.do("consume")
    wait_until(lambda: len(watched.instances()) == 1 and dead not in watched.instances())
    os.kill(watchdog, signal.SIGCONT)
    wait_until(lambda: len(watched.releases) == 4)
    assert {(x.instance_id, x.code) for x in watched.releases} == {(dead, "FENCED")}
    assert watched.holders() == dict.fromkeys(range(4), "a")
    # The second worker's watchdog knows the epochs of the takeover.
    own = second.ready_watchdog()
    second.kill()
    wait_until(lambda: watched.holders() == dict.fromkeys(range(4)))
    wait_until(lambda: not is_running(watchdog) and not is_running(own))


MANY = 400


def test_a_release_longer_than_the_pipe_is_sent_when_there_is_room_again(watched: Watched) -> None:
    watched.scene.grow(watched.topic, MANY)
    worker = watched.worker()
    watchdog = worker.ready_watchdog()
    os.kill(watchdog, signal.SIGSTOP)
    worker.do("claim", list(range(MANY)))
    assert worker.do("look")["untold"] > 0, "the pipe took it all: the test tests nothing"
    os.kill(watchdog, signal.SIGCONT)
    wait_until(lambda: worker.do("look")["untold"] == 0)
    worker.kill()
    wait_until(lambda: watched.holders() == dict.fromkeys(range(MANY)))
    assert len(watched.releases) == MANY


@pytest.mark.parametrize("claims", [0, MANY])
def test_a_watchdog_that_never_answers_is_replaced(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, claims: int
) -> None:
    monkeypatch.setattr(parent, "ASK_S", 0.1)
    monkeypatch.setattr(parent, "DEAF_S", 2.0)
    marshal = scene.member("a", watchdog=True)
    watchdog = marshal.watchdog
    assert watchdog is not None
    wait_until(lambda: watchdog.is_ready)
    deaf = watchdog.pid
    assert deaf is not None
    os.kill(deaf, signal.SIGSTOP)
    for partition in range(claims):
        marshal.claim("t", partition)
    wait_until(lambda: watchdog.is_ready and watchdog.pid != deaf)
    assert any("answered nothing" in line for line in caplog.messages)
    wait_until(lambda: not is_running(deaf))
    wait_until(lambda: not watchdog.last_will.untold)
    assert len(watchdog.last_will.leases) == claims


# -- A member of a coordinated group dies, and its watchdog commits and leaves in its name (G14, G20) -------------


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
