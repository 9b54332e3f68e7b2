"""Marshal.health(): answers at once from any thread, and log lines of hanging user threads."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kafka_marshal import Balanced, Claims, Health, Marshal, MarshalError, Policy
from kafka_marshal.engine.policies import View, Wishes
from kafka_marshal.errors import UpgradeRequiredError
from kafka_marshal.runtime import THREADS
from rationalizer import Upgrade, encode
from tests.client.conftest import Scene, wait_until
from tests.faults.conftest import Program
from tests.faults.stories import AGAIN_S, HI, TOPIC, answer, member, memory_cluster
from tests.interrupts import run_within

pytestmark = pytest.mark.flaky(reruns=0)


class Stuck(Policy):
    """Balanced, until it is set to block."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.go_on.set()

    def wishes(self, view: View, own: tuple[tuple[str, int], ...], now: float) -> Wishes:
        self.go_on.wait()
        return Balanced().wishes(view, own, now)


@pytest.fixture
def marshal() -> Iterator[Marshal]:
    made = member(memory_cluster())
    yield made
    answer("Marshal.close()", made.close)


@pytest.fixture
def policy(marshal: Marshal) -> Iterator[Stuck]:
    made = Stuck()
    yield made
    made.go_on.set()


def reports(caplog: pytest.LogCaptureFixture, text: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "kafka_marshal" and text in record.getMessage()]


def problem(marshal: Marshal, text: str) -> str:
    """Wait until health() reports a problem; returns its sentence."""
    found: Health = wait_until(lambda: next((h for h in [marshal.health()] if text in str(h)), None), 15)
    assert not found.ok
    return next(each for each in found.problems if text in each)


def is_well(marshal: Marshal) -> bool:
    return marshal.health().ok


def test_a_member_that_works_is_well(marshal: Marshal) -> None:
    consumer = marshal.consumer([TOPIC])
    assert consumer.poll(AGAIN_S) is not None
    found = marshal.health()
    assert (found.ok, found.problems, found.needs_restart, found.closed, found.failure) == (
        True,
        (),
        False,
        False,
        None,
    )
    wait_until(lambda: marshal.health().leases == 2)
    assert str(marshal.health()).startswith("ok: 2 leases held, last turn 0.")


def test_handlers_that_hang_are_reported_until_one_comes_back(marshal: Marshal) -> None:
    consumer = marshal.consumer([TOPIC], handler_timeout=0.3)
    kept = consumer.poll(AGAIN_S)
    assert kept is not None
    assert "it claims nothing until one comes back" in problem(marshal, "within handler_timeout")
    assert not marshal.health().needs_restart
    consumer.poll(0)
    wait_until(lambda: is_well(marshal), 15)


@pytest.mark.parametrize("interval_ms", [100, 300])
def test_a_thread_that_has_nothing_to_do_is_well(interval_ms: int) -> None:
    """It waits for the log for longer than a short heartbeat interval."""
    made = Marshal.on_cluster(memory_cluster().connect("idle"), group_id="g", heartbeat_interval=interval_ms / 1000)
    seen, until = 0.0, time.monotonic() + 1.3
    while time.monotonic() < until:
        found = made.health()
        assert found.ok, found
        seen = max(seen, found.turned_ago_ms)
        time.sleep(0.01)
    assert seen > interval_ms
    wait_until(lambda: made.health().turned_ago_ms < interval_ms, 15)
    made.close()


def test_a_policy_that_does_not_return_is_reported_with_its_place_and_delivers_nothing(
    marshal: Marshal, policy: Stuck, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = marshal.consumer([TOPIC], mode=Claims(policy=policy))
    assert consumer.poll(AGAIN_S) is not None
    wait_until(lambda: marshal.health().leases == 2)
    policy.go_on.clear()
    began = time.monotonic()
    told = problem(marshal, "has not turned")
    assert time.monotonic() - began < 2.0
    assert "test_health.py" in told
    assert "in wishes)" in told
    assert marshal.health().needs_restart
    assert marshal.health().turned_ago_ms > HI
    # Its leases have expired by its own clock: nothing is delivered, and poll() keeps its time-out.
    wait_until(lambda: marshal.health().turned_ago_ms > 2 * HI)
    assert answer("poll()", lambda: consumer.poll(0.1)) is None
    assert len(reports(caplog, "has not turned")) == 1
    assert "Marshal.health()" in reports(caplog, "has not turned")[0].getMessage()
    policy.go_on.set()
    wait_until(lambda: is_well(marshal))


def test_a_short_poll_reports_it_too_and_each_outage_is_reported_once(
    marshal: Marshal, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread waits outside the lock, so that every poll() returns in time."""
    monkeypatch.setattr("kafka_marshal.node.life.SAID_EVERY_MS", 0.0)
    monkeypatch.setattr(marshal._driver.pulse._repeats, "_every", 0.0)
    consumer = marshal.consumer([TOPIC])
    tail = marshal._driver.replica.tail
    go_on, read = threading.Event(), tail.read

    def stuck(timeout_s: float, **more: Any) -> Any:
        go_on.wait()
        return read(timeout_s, **more)

    for outage in (1, 2):
        go_on.clear()
        monkeypatch.setattr(tail, "read", stuck)
        until = time.monotonic() + 6 * HI / 1000
        while time.monotonic() < until:
            consumer.poll(0.02)
        assert len(reports(caplog, "has not turned")) == outage
        monkeypatch.setattr(tail, "read", read)
        go_on.set()
        wait_until(lambda: is_well(marshal))


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_any_end_of_the_background_thread_is_reported(
    marshal: Marshal, error: type[BaseException], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = marshal.consumer([TOPIC])
    assert consumer.poll(AGAIN_S) is not None

    def failing() -> None:
        raise error("odd")

    monkeypatch.setattr(marshal._driver, "_turn", failing)
    with pytest.raises((RuntimeError, MarshalError)) as raised:
        run_within(AGAIN_S, lambda: [consumer.poll(0.1) for _ in range(100)])
    found = marshal.health()
    assert found.failure is raised.value
    assert found.needs_restart and found.leases == 0
    assert error is RuntimeError or error.__name__ in str(found)
    assert len(reports(caplog, "has not turned")) == 0
    assert len(reports(caplog, "the background thread of a failed")) == 1


def test_a_callback_that_does_not_return_is_reported(marshal: Marshal) -> None:
    go_on = threading.Event()

    def on_assign(_consumer: object, _partitions: object) -> None:
        go_on.wait()

    _kept = marshal.consumer([TOPIC], on_assign=on_assign)
    told = problem(marshal, "on_assign of t [0]")
    assert "in on_assign)" in told
    assert not marshal.health().needs_restart
    go_on.set()
    wait_until(lambda: is_well(marshal))


def test_appends_that_fail_are_reported_until_one_succeeds() -> None:
    cluster = memory_cluster()
    marshal = member(cluster)
    marshal.claim(TOPIC, 0)
    cluster.broker.set_reachable("a", False)
    told = problem(marshal, "appends to __marshal have failed")
    assert "no broker could be reached in time" in told
    assert not marshal.health().needs_restart
    cluster.broker.set_reachable("a", True)
    lease = wait_until(lambda: claimed(marshal))
    wait_until(lambda: is_well(marshal))
    lease.release()
    marshal.close()


def test_an_outage_is_over_for_one_that_appends_nothing_after_it() -> None:
    """It held something, and lost it: no append shows it that appends succeed again."""
    cluster = memory_cluster()
    marshal = member(cluster)
    marshal.claim(TOPIC, 0)
    cluster.broker.set_reachable("a", False)
    problem(marshal, "appends to __marshal have failed")
    wait_until(lambda: marshal.health().leases == 0)
    assert not marshal.health().ready
    cluster.broker.set_reachable("a", True)
    wait_until(lambda: is_well(marshal) and marshal.health().ready, 15)
    marshal.close()


def test_a_broker_that_refuses_what_is_appended_has_answered(caplog: pytest.LogCaptureFixture) -> None:
    cluster = memory_cluster()
    marshal = member(cluster)
    marshal.claim(TOPIC, 0)
    settings = cluster.broker.existing["__marshal"].settings
    allowed, settings["max.message.bytes"] = settings["max.message.bytes"], "80"
    assert "max.message.bytes" in problem(marshal, "appends to __marshal have failed")
    wait_until(lambda: marshal.health().leases == 0)
    assert not marshal.health().ready
    until = time.monotonic() + 2 * HI / 1000
    while time.monotonic() < until:
        assert reports(caplog, "Kafka has not answered") == []
        time.sleep(0.02)
    assert len(reports(caplog, "an append to __marshal failed")) == 1
    settings["max.message.bytes"] = allowed
    wait_until(lambda: is_well(marshal) and marshal.health().ready, 15)
    marshal.close()


def test_a_thread_that_waits_for_the_lock_is_told_by_its_holder(marshal: Marshal) -> None:
    go_on = threading.Event()

    def holds() -> None:
        with marshal._driver.condition:
            go_on.wait(15)

    holder = threading.Thread(target=holds)
    holder.start()
    told = problem(marshal, "has not turned")
    go_on.set()
    holder.join()
    assert "(it waits for a lock whose holder stands at " in told
    assert "in holds)" in told


def claimed(marshal: Marshal) -> Any:
    try:
        return marshal.claim(TOPIC, 1, timeout=1.0)
    except MarshalError:
        return None


def test_a_log_that_needs_a_newer_release_is_reported(marshal: Marshal) -> None:
    appender = marshal._driver.cluster.appender("__marshal", delivery_timeout_ms=1000)
    appender.append(0, encode(Upgrade("x-1", "x", "g", 1_000)))
    assert "protocol level 1000" in problem(marshal, "was raised to protocol level")
    assert not marshal.health().needs_restart
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(UpgradeRequiredError, match="level 1000"):
            marshal.claim(TOPIC, 0, timeout=30)
    assert time.monotonic() < began + 15  # no waiting helps
    assert not marshal._driver.engine.book.leases


def test_a_closed_member_is_not_well_and_needs_no_restart(marshal: Marshal) -> None:
    marshal.close()
    found = marshal.health()
    assert (found.ok, found.closed, found.needs_restart, found.leases) == (False, True, False, 0)


def test_threads_that_can_not_be_started_are_reported_and_calls_are_carried_out(
    marshal: Marshal, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = marshal.consumer([TOPIC])
    servants = marshal._driver.servants

    def refused(target: Callable[[], object], name: str) -> Any:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(servants, "runtime", Refusing(refused))
        threads = [threading.Thread(target=marshal.world.wait_for, args=(_never, 0.3)) for _ in range(12)]
        for each in threads:
            each.start()
        assert "can't start new thread" in problem(marshal, "no further thread could be started")
        for each in threads:
            each.join(10)
        assert answer("a call", consumer.assignment) is not None
    assert len(reports(caplog, "no further thread could be started")) == 1
    wait_until(lambda: consumer.assignment() is not None and is_well(marshal))


def _never(_world: object) -> bool:
    return False


class Refusing:
    """A runtime that starts no thread."""

    def __init__(self, start: Callable[..., Any]) -> None:
        self.start = start

    def __getattr__(self, name: str) -> Any:
        return getattr(THREADS, name)


def test_a_handler_of_a_signal_may_ask(marshal: Marshal, policy: Stuck) -> None:
    """During a call, and while the engine's lock is held."""
    consumer = marshal.consumer([TOPIC], mode=Claims(policy=policy))
    found: list[Health] = []
    before = signal.signal(signal.SIGALRM, lambda *_: found.append(marshal.health()))
    try:
        policy.go_on.clear()
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        run_until = time.monotonic() + AGAIN_S
        while len(found) < 5 and time.monotonic() < run_until:
            consumer.poll(0.2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        policy.go_on.set()
    assert len(found) >= 5


def test_health_takes_no_lock(marshal: Marshal) -> None:
    with marshal._driver.condition:
        assert answer("health()", marshal.health) is not None


def test_a_forked_child_must_make_its_own(marshal: Marshal) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(marshal.health()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    told = os.read(reading, 10_000).decode()
    os.close(reading)
    assert "needs a restart" in told and "forked" in told
    assert is_well(marshal)


def test_a_process_that_was_stopped_reports_no_outage(scene: Scene) -> None:
    program = Program(scene, "polls", scene.topic(2, 3), hangs_s=20.0)
    program.await_line("waiting")
    program.process.send_signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    wait_until(lambda: time.monotonic() > stopped_at + 1.5)
    program.process.send_signal(signal.SIGCONT)
    program.await_line("well again")
    program.process.send_signal(signal.SIGTERM)
    status, _, err = program.end(5.0)
    assert status == 0, err
    assert "has not turned" not in err
