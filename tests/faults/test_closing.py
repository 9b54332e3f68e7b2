"""close() from a callback, a loop, another thread, twice, concurrently: it returns, and everything else ends."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kafka_marshal import Balanced, Claims, Consumer, Delivery, HeldError, Marshal, Policy
from kafka_marshal.engine.policies import View, Wishes
from kafka_marshal.errors import ClosedError
from kafka_marshal.node.serving import Servants
from kafka_marshal.runtime import THREADS
from tests.faults.endings import (
    CALLBACKS,
    DELIVERIES,
    LOOPS,
    WHAT,
    Background,
    a_callback_closes,
    closed_at_once,
    iterate,
    opened,
)
from tests.faults.stories import AGAIN_S, ANSWER_S, HI, TOPIC, answer, await_assigned, member
from tests.interrupts import run_within

pytestmark = pytest.mark.flaky(reruns=0)

#: Tolerance of time limits on a busy machine.
SLACK_S = 0.7


@pytest.fixture
def marshal() -> Iterator[Marshal]:
    with opened() as made:
        yield made


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("loop", LOOPS)
def test_another_thread_closes(
    marshal: Marshal, loop: Callable[[Consumer], None], what: str, delivery: Delivery
) -> None:
    consumer = marshal.consumer([TOPIC], delivery=delivery, batch_size=4)
    user = Background(lambda: loop(consumer))
    assert marshal.world.wait_for(lambda world: len(world.leases()) == 2, AGAIN_S)
    answer(f"{what}.close()", consumer.close if what == "consumer" else marshal.close)
    user.end()


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("loop", LOOPS)
def test_many_threads_close_at_once(
    marshal: Marshal, loop: Callable[[Consumer], None], what: str, delivery: Delivery
) -> None:
    closed_at_once(marshal, loop, what, delivery)


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("callback", CALLBACKS)
def test_a_callback_closes(marshal: Marshal, callback: str, what: str) -> None:
    a_callback_closes(marshal, callback, what)


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("what", WHAT)
def test_a_loop_closes_what_it_reads(marshal: Marshal, what: str, delivery: Delivery) -> None:
    consumer = marshal.consumer([TOPIC], delivery=delivery, batch_size=4)

    def loop() -> None:
        for _ in consumer:
            (consumer if what == "consumer" else marshal).close()

    run_within(AGAIN_S, loop, "the loop")
    with pytest.raises(ClosedError):
        consumer.poll(0.1)
    assert list(consumer) == []


def test_it_is_closed_between_a_claim_of_messages_and_the_wait_for_it(
    marshal: Marshal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has no such consumer any more: what to read meanwhile has no answer."""
    consumer: Any = marshal.consumer([TOPIC], delivery="at-most-once", batch_size=4)
    wait, waits = consumer._await, []

    def closed_first(pull: object, grant: object) -> None:
        waits.append(grant)
        Background(consumer.close)
        consumers = marshal._driver.engine.consumers
        assert marshal.world.wait_for(lambda _: consumer._engine.number not in consumers, AGAIN_S)
        wait(pull, grant)

    monkeypatch.setattr(consumer, "_await", closed_first)
    user = Background(lambda: iterate(consumer))
    user.end()
    assert waits


def test_a_lease_and_ranges_are_closed_beside_each_other(marshal: Marshal) -> None:
    ranges = marshal.ranges([TOPIC])
    user = Background(lambda: [ranges.done(ranges.take(3)) for _ in range(10_000) if not marshal.stopping])
    closers = [Background(marshal.close) for _ in range(2)]
    for each in (*closers, user):
        each.end()
    answer("RangeConsumer.close()", ranges.close)


@pytest.mark.parametrize("call", ["poll", "world", "claim", "consumer"])
def test_calls_after_close_answer(marshal: Marshal, call: str) -> None:
    """With a result or a MarshalError, at once."""
    consumer = marshal.consumer([TOPIC])
    answer("Marshal.close()", marshal.close)
    calls: dict[str, Callable[[], object]] = {
        "poll": lambda: _refused(lambda: consumer.poll(1.0)),
        "world": lambda: marshal.world.leases(),
        "claim": lambda: _refused(lambda: marshal.claim(TOPIC, 0)),
        "consumer": lambda: _refused(lambda: marshal.consumer([TOPIC])),
    }
    answer(call, calls[call])


class Hung:
    """A callback that blocks until it is released."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, *_: object) -> None:
        self.begun.set()
        self.go_on.wait()


@pytest.fixture
def hung(marshal: Marshal) -> Iterator[Hung]:
    made = Hung()
    yield made
    made.go_on.set()


def within(what: str, timeout_s: float, close: Callable[[], object]) -> None:
    """close() returns at most a second after its time-out."""
    run_within(timeout_s + 1.0 + SLACK_S, close, what)


def warnings(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [x.getMessage() for x in caplog.records if x.name == "kafka_marshal" and text in x.getMessage()]


@contextmanager
def another(marshal: Marshal) -> Iterator[Marshal]:
    made = member(marshal._driver.cluster.connect("other"), "other")  # type: ignore[attr-defined]
    yield made
    answer("Marshal.close()", made.close)


@pytest.mark.parametrize("callback", ["on_assign", "on_revoke"])
def test_a_marshal_does_not_wait_for_ever_for_a_callback(
    marshal: Marshal, hung: Hung, callback: str, caplog: pytest.LogCaptureFixture
) -> None:
    marshal._driver.cluster.broker.create_topic("u", 1)  # type: ignore[attr-defined]
    called: list[object] = []
    options: dict[str, Any] = {callback: hung}
    _kept = marshal.consumer(["u"], on_revoke=lambda *_: called.append(1))
    assert marshal.world.wait_for(lambda world: len(world.leases()) == 1, AGAIN_S)
    _kept_too = marshal.consumer([TOPIC], **options)
    by_hand = marshal.claim("by-hand", 0)
    assert marshal.world.wait_for(lambda world: len(world.leases()) == 4, AGAIN_S)
    if callback == "on_assign":
        assert hung.begun.wait(AGAIN_S)
    with another(marshal) as other:
        within("Marshal.close()", 0.2, lambda: marshal.close(0.2))
        # Idle partitions were released, so there is no wait for them. The others' leases expire.
        other.claim("by-hand", by_hand.partition, timeout=0).release()
        if callback == "on_assign":
            other.claim("u", 0, timeout=0).release()
            assert not called
        with pytest.raises(HeldError):
            other.claim(TOPIC, 0, timeout=0)
        assert other.claim(TOPIC, 0, timeout=AGAIN_S).valid
    (told,) = warnings(caplog, "close() does not wait any longer")
    assert f"{callback} of t [0], t [1] has not returned for" in told
    assert "in __call__)" in told
    assert ("not called any more, for none begins before that one returns: on_revoke of u [0]" in told) is (
        callback == "on_assign"
    )


def test_a_consumer_does_not_wait_for_ever_and_releases_when_the_callback_returns(
    marshal: Marshal, hung: Hung, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = marshal.consumer([TOPIC], on_revoke=hung)
    await_assigned(consumer)
    within("Consumer.close()", 0.1, lambda: consumer.close(0.1))
    assert "stay with this Marshal" in warnings(caplog, "on_revoke of t [0], t [1] has not returned")[0]
    threading.Event().wait(3 * HI / 1000)  # longer than a lease lasts without heartbeats
    assert [lease.client_id for lease in marshal.world.leases()] == ["a", "a"]
    hung.go_on.set()
    assert marshal.world.wait_for(lambda world: not any(x.client_id for x in world.leases()), AGAIN_S)


@pytest.mark.parametrize("what", ["consumer", "marshal"])
def test_the_most_impatient_close_counts(marshal: Marshal, hung: Hung, what: str) -> None:
    consumer = marshal.consumer([TOPIC], on_revoke=hung)
    await_assigned(consumer)
    closing = consumer.close if what == "consumer" else marshal.close
    patient = Background(lambda: closing(None))
    assert hung.begun.wait(AGAIN_S)
    within("an impatient close()", 0.0, lambda: closing(0.0))
    patient.end()


def test_a_callback_is_waited_for_as_long_as_was_asked_for(marshal: Marshal, hung: Hung) -> None:
    consumer = marshal.consumer([TOPIC], on_revoke=hung)
    await_assigned(consumer)
    closing = Background(consumer.close)
    assert hung.begun.wait(AGAIN_S)
    assert not closing.has_ended_within(1.5)
    hung.go_on.set()
    closing.end()


class Stuck(Policy):
    """Blocks while it holds the engine's lock, once it is set to."""

    def __init__(self, hung: Hung) -> None:
        self.hung = hung
        self.is_stuck = False

    def wishes(self, view: View, own: tuple[tuple[str, int], ...], now: float) -> Wishes:
        if self.is_stuck:
            self.hung()
        return Balanced().wishes(view, own, now)


@pytest.mark.parametrize("what", ["consumer", "marshal"])
def test_close_ends_where_the_engines_lock_is_never_free(
    marshal: Marshal, hung: Hung, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Stuck(hung)
    consumer = marshal.consumer([TOPIC], mode=Claims(policy=policy))
    await_assigned(consumer)
    policy.is_stuck = True
    with another(marshal) as other:
        other.consumer([TOPIC])  # what it asks for changes the view: a policy is asked after changes only
        assert hung.begun.wait(AGAIN_S)
    user = Background(lambda: iterate(consumer))  # only now: a thread of the library is the one that hangs
    within(f"{what}.close()", 0.3, lambda: (consumer if what == "consumer" else marshal).close(0.3))
    told = warnings(caplog, "has not ended 1 s after its timeout of 0.3 s")
    assert len(told) == 1
    assert "has not turned" in told[0]
    assert "test_closing.py" in told[0]
    if what == "consumer":
        hung.go_on.set()
    user.end()  # the Marshal was closed although the lock is not free


def test_close_ends_where_a_thread_of_ours_hangs(marshal: Marshal, hung: Hung, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a read of messages that never returns; its leases are released before."""
    consumer = marshal.consumer([TOPIC])
    assert consumer.poll(AGAIN_S) is not None
    assert marshal.world.wait_for(lambda world: len(world.leases()) == 2, AGAIN_S)
    monkeypatch.setattr(consumer._fetcher.reader, "read", hung)
    user = Background(lambda: iterate(consumer))
    assert hung.begun.wait(AGAIN_S)
    with another(marshal) as other:
        within("Marshal.close()", 0.2, lambda: marshal.close(0.2))
        other.claim(TOPIC, 0, timeout=0).release()
    user.end()


@pytest.mark.parametrize("delay_s", [0.0, 0.1])
def test_a_handler_of_a_signal_closes_while_a_callback_hangs(marshal: Marshal, hung: Hung, delay_s: float) -> None:
    consumer = marshal.consumer([TOPIC], on_revoke=hung)
    await_assigned(consumer)
    before = signal.signal(signal.SIGALRM, lambda *_: marshal.close(0.1))
    began = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001 + delay_s)
        iterate(consumer)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 0.1 + 1.0 + SLACK_S


@pytest.mark.parametrize("what", ["consumer", "marshal"])
def test_a_destructor_that_closes_may_run_in_a_thread_of_ours(marshal: Marshal, what: str) -> None:
    """With the engine's lock held, as by the garbage collector."""
    consumer = marshal.consumer([TOPIC])
    closing = (consumer if what == "consumer" else marshal).close
    done: list[bool] = []

    def applied(*_: object) -> None:
        if not done:
            done.append(True)
            closing()

    marshal._driver.listeners.append(applied)
    user = Background(lambda: iterate(consumer))
    user.end()
    with another(marshal) as other:
        assert other.claim(TOPIC, 0, timeout=AGAIN_S).valid


@pytest.mark.parametrize("what", ["consumer", "marshal"])
def test_a_callback_that_closes_does_not_wait_for_itself(marshal: Marshal, what: str) -> None:
    took: list[float] = []

    def close(consumer: Consumer, _partitions: object) -> None:
        began = time.monotonic()
        (consumer if what == "consumer" else marshal).close()
        took.append(time.monotonic() - began)

    consumer = marshal.consumer([TOPIC], on_assign=close)
    user = Background(lambda: iterate(consumer))
    user.end()
    until = time.monotonic() + ANSWER_S
    while not took:
        assert time.monotonic() < until
        time.sleep(0.002)
    assert took[0] < 0.8


def _refused(call: Callable[[], object]) -> None:

    with pytest.raises(ClosedError):
        call()


def test_a_value_that_reaches_its_caller_while_it_is_looked_for_is_not_undone() -> None:
    """A Marshal, a consumer or a lease would end in its user's hand."""
    undone: list[str] = []
    servants = Servants(THREADS)
    servants.begin()
    calls = [servants.ask(lambda _: "made", undo=undone.append)]

    class Receipt:
        left = False

        @property
        def out(self) -> bool:
            if not calls:
                return True
            calls.clear()  # the caller continues at this moment
            return False

    calls[0].wait()
    [(job, _)] = servants._delivered
    job.receipt = Receipt()  # type: ignore[assignment]
    servants.undo_lost()
    servants.end()
    assert undone == []
