"""Failures around a consumer: its reader, half-way; the user's callbacks and policies; dropped messages.

Each proof is a function that raises if anything is lost, hangs or has died. ``PROOFS`` names those that take a second
or two each, with the expected log lines: any other error in the log is a failure, too.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kafka_marshal import Balanced, Consumer, Delivery, Policy, guard
from kafka_marshal.adapters.kafka.settings import Role, properties
from kafka_marshal.client.fetching import Then
from kafka_marshal.engine.policies import View, Wishes
from kafka_marshal.engine.work.pull import Hand, Pull, Take, Wanted
from kafka_marshal.logs import RateLimit
from kafka_marshal.node.serving import Reply
from kafka_marshal.ports import DataFault, Message
from tests.engine.scenes import working
from tests.faults import cases
from tests.faults.crew import WAYS, share
from tests.faults.endings import CALLBACKS, DELIVERIES, LOOPS, WHAT, a_callback_closes, closed_at_once, opened
from tests.faults.stories import (
    AGAIN_S,
    MESSAGES,
    PARTITIONS,
    TOPIC,
    Story,
    answer,
    await_assigned,
    member,
    memory_cluster,
)
from tests.interrupts import Interrupts

Read = tuple[list[Message], list[DataFault]]


class OddError(Exception):
    """Raised only by these proofs."""


class OddExit(BaseException):
    """Not an Exception, like SystemExit."""


@dataclass(frozen=True, slots=True)
class Proof:
    """One of them."""

    run: Callable[[], object]
    #: Parts of the expected error lines.
    says: tuple[str, ...] = ()


class _Ear(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.getMessage()} {record.exc_info[1]!r}" if record.exc_info else record.getMessage())


@contextmanager
def heard(*says: str) -> Iterator[None]:
    """Check that all these errors, and no others, are logged."""
    ear, logger = _Ear(), logging.getLogger("kafka_marshal")
    guard._repeats = RateLimit(guard.SAID_EVERY_S)  # earlier lines may be repeated
    logger.addHandler(ear)
    try:
        yield
    finally:
        logger.removeHandler(ear)
    wrong = [line for line in ear.said if not any(part in line for part in says)]
    assert not wrong, f"logged: {wrong[0]}"
    missing = [part for part in says if not any(part in line for line in ear.said)]
    assert not missing, f"not logged: {missing}"


def eventually(condition: Callable[[], object], what: str, within_s: float = AGAIN_S) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, f"not within {within_s:g} s: {what}"
        time.sleep(0.002)


# A read that fails after taking messages, as if a callback raised within librdkafka.


class Torn:
    """A reader of which each third call raises after it was executed."""

    def __init__(self, consumer: Consumer, name: str) -> None:
        self._call: Callable[..., Any] = getattr(consumer._fetcher.reader, name)
        self._came = 0
        self.times = 0
        setattr(consumer._fetcher.reader, name, self)

    def __call__(self, *args: Any) -> Any:
        found = self._call(*args)
        self._came += bool(found[0] if args else found)
        if self._came == 2 and self.times < 3:
            self._came = 0
            self.times += 1
            raise OddError("torn")
        return found


def torn(loop: Callable[[Story, Consumer], None], name: str, **options: Any) -> None:
    story = Story(**options)
    if name == "take_ends":
        for partition in range(PARTITIONS):
            story.cluster.broker.skip(TOPIC, partition, 2)
            story.skipped |= {(partition, MESSAGES), (partition, MESSAGES + 1)}
    consumer = story.make_consumer()
    reader = Torn(consumer, name)
    consumer._delivery.memory.message_bytes = options.get("max_bytes_in_flight", 1e9)  # one message per read
    waiting = Interrupts(None, OddError)
    story.work(waiting, lambda story: loop(story, consumer))
    assert reader.times > 0, f"{name}() was never torn"
    assert consumer._fetcher.reread > 0, "a torn read was taken for a whole one"
    story.check(consumer)


# The user's functions.


class Moody(Policy):
    """Balanced, once it has failed often enough."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error
        self.asked = 0

    def wishes(self, view: View, own: tuple[tuple[str, int], ...], now: float) -> Wishes:
        self.asked += 1
        if self.asked < 3:
            raise self._error(f"time {self.asked}")
        return Balanced().wishes(view, own, now)


def a_policy_raises(error: type[BaseException]) -> None:
    story = Story(policy=Moody(error))
    consumer = story.make_consumer()
    story.work(Interrupts(None), lambda story: cases.poll(story, consumer))
    story.check(consumer)


def callbacks_raise(error: type[BaseException]) -> None:
    """Each is called though others have raised, and work continues."""
    calls: list[str] = []

    def raising(name: str) -> Callable[..., None]:
        def call(*_: object) -> None:
            calls.append(name)
            raise error(name)

        return call

    story = Story(on_assign=raising("assign"), on_revoke=raising("revoke"))
    consumer = story.make_consumer()
    story.work(Interrupts(None), lambda story: cases.poll(story, consumer))
    assert "assign" in calls
    story.check(consumer)
    assert "revoke" in calls


def callbacks_of_librdkafka_raise() -> None:
    """Every callable in a configuration is guarded before librdkafka gets it."""
    for name in ("stats_cb", "error_cb", "throttle_cb", "a.callback.of.the.future"):
        for error in (OddError, OddExit):
            guarded: Any = properties(Role.DATA, "h:1", {name: partial(_raise, error)})[name]
            assert guarded("event") is None


def _raise(error: type[BaseException], *_: object) -> None:
    raise error


def predicates_look() -> None:
    """Predicates of ``wait_for`` run with the lock held and may make calls that take it."""
    with opened() as marshal:
        consumer = marshal.consumer([TOPIC])
        call = partial(marshal.world.wait_for, lambda world: len(consumer.assignment()) == PARTITIONS, AGAIN_S)
        assert answer("wait_for with a predicate that calls assignment()", call)


def another_thread_is_faster(delivery: Delivery) -> None:
    """One thread's time-out passes; during its last check another thread gets the arrived messages."""
    cluster = memory_cluster(PARTITIONS, 0)
    marshal = member(cluster)
    consumer = marshal.consumer([TOPIC], delivery=delivery, batch_size=4)
    await_assigned(consumer)
    pump, got, looks = consumer._fetcher.pump, list[tuple[int | None, int | None]](), list[float]()

    def take() -> None:
        if (message := consumer.poll(0.0)) is not None:
            got.append((message.partition(), message.offset()))
            consumer.done(message)

    def is_complete() -> bool:
        take()
        return len(got) == PARTITIONS * MESSAGES

    def looked(timeout_s: float, then: Then | None = None) -> int:
        looks.append(timeout_s)
        if len(looks) == 2:  # the last check of the first call
            for partition in range(PARTITIONS):
                for number in range(MESSAGES):
                    cluster.broker.produce(TOPIC, partition, b"%d" % number)
            answer("poll() of another thread", take)
        return pump(timeout_s, then)

    setattr(consumer._fetcher, "pump", looked)  # noqa: B010 - a method is not assigned otherwise
    try:
        answer("poll()", take)
        eventually(is_complete, "all are handed out")
        assert len(set(got)) == len(got), f"handed out twice: {got}"
    finally:
        answer("Marshal.close()", marshal.close)


# Messages that a user drops, keeps, or never gets.


def a_dropped_message_comes_again() -> None:
    """As by a cancelled task whose poll() continued in its thread: it can never be marked as done."""
    story = Story()
    consumer = story.make_consumer()
    dropped = consumer.poll(AGAIN_S)
    assert dropped is not None
    key = (dropped.partition(), dropped.offset())
    del dropped
    story.was_interrupted = True
    story.work(Interrupts(None), lambda story: cases.poll(story, consumer))
    assert key in story.seen, f"{key} was dropped, and did not come again"
    story.behind.discard(key)
    story.check(consumer)


class _Cut:
    """Messages of a hand; an interrupt comes after the first was taken, and before anything knows of it."""

    def __init__(self, walk: Iterator[Message]) -> None:
        self._walk = walk

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        next(self._walk)
        raise OddExit


def what_an_interrupt_took_comes_next() -> None:
    """C14: before those that follow it, though nothing knows which one it is."""
    with opened() as marshal:
        consumer = marshal.consumer([TOPIC])
        first = consumer.poll(AGAIN_S)
        assert first is not None
        hand = consumer._hand.run
        assert hand is not None
        walk, hand.walk = hand.walk, _Cut(hand.walk)
        with suppress(OddExit):
            consumer.poll(AGAIN_S)
        hand.walk = walk
        later: list[Message] = []
        while len(later) < PARTITIONS * MESSAGES - 1:
            message = consumer.poll(AGAIN_S)
            assert message is not None
            later.append(message)
        found = [each.offset() for each in later if each.partition() == first.partition()]
        assert found == list(range(first.offset() + 1, MESSAGES))


WAIT = Reply.wait


def _reaches_nobody(reply: Reply[Any], timeout: float | None = None) -> None:
    WAIT(reply, timeout)
    raise OddExit


def a_batch_reaches_nobody() -> None:
    """C14: a batch that an interrupt kept from its caller comes again, before those that follow it."""
    with opened() as marshal:
        consumer = marshal.consumer([TOPIC])
        consumer._waited, waited = _reaches_nobody, consumer._waited  # type: ignore[method-assign, assignment]
        with suppress(OddExit):
            next(consumer.batches(3, timeout=0.0))
        consumer._waited = waited  # type: ignore[method-assign]
        found: dict[int, list[int]] = {}
        batches = consumer.batches(100, timeout=0.0)
        while sum(map(len, found.values())) < PARTITIONS * MESSAGES:
            batch = answer("the next batch", partial(next, batches))
            found.setdefault(batch.partition, []).extend(each.offset() for each in batch)
            batch.done()
        assert found == {partition: list(range(MESSAGES)) for partition in range(PARTITIONS)}


def a_consumer_reaches_nobody() -> None:
    """C17: a consumer that an interrupt kept from its caller ends, even while a traceback refers to it."""

    def wait(reply: Reply[Any], timeout: float | None = None) -> object:
        value = WAIT(reply, timeout)
        if isinstance(value, Consumer):
            raise OddExit
        return value

    with opened() as marshal:
        Reply.wait = wait  # type: ignore[method-assign, assignment]
        try:
            marshal.consumer([TOPIC])
        except OddExit as error:
            kept = error
        finally:
            Reply.wait = WAIT  # type: ignore[method-assign]
        until = time.monotonic() + AGAIN_S
        while not all(each._closed for each in marshal._ending.consumers):
            assert time.monotonic() < until, f"it goes on, and nobody has it: {kept!r}"
            time.sleep(0.002)


def what_a_hand_has_left_is_not_forgotten() -> None:
    """C14: while its lease is not proven others are delivered, and it comes first when it is."""
    net, engine = working(partitions=2)
    consumer, hand = engine.consumers[0], Hand()
    engine.fetch(3)
    first = Pull(consumer, hand).next(Wanted(3), net.now)
    assert isinstance(first, Take)
    first.run.assignment.lease.stop()
    other = Pull(consumer, hand).next(Wanted(3), net.now)
    assert isinstance(other, Take)
    assert other.run.assignment is not first.run.assignment
    assert first.run.assignment.tracker.in_hand == 0, "it is held by nobody"


def all_is_done_at_the_end(delivery: Delivery) -> None:
    """P6: the last offsets have no message: a transaction marker or compacted records."""
    cluster = memory_cluster(1, 3)
    cluster.broker.skip(TOPIC, 0, 4)
    marshal = member(cluster)
    consumer = marshal.consumer([TOPIC], delivery=delivery)
    for offset in range(3):
        message = consumer.poll(AGAIN_S)
        assert message is not None
        assert message.offset() == offset
        consumer.done(message)

    def is_done() -> bool:
        consumer.poll(0.01)
        lease = marshal.world.lease(TOPIC, 0)
        return lease is not None and lease.stable == 6

    try:
        eventually(is_done, "the end of the topic is done, there is no lag (P6)")
    finally:
        answer("Marshal.close()", marshal.close)


class Kept:
    """A variable of a user's function."""


def an_error_keeps_nothing() -> None:
    """The caller's variables are freed with its frame, not by the garbage collector, so that a drop is noticed."""
    story = Story()
    consumer = story.make_consumer()
    await_assigned(consumer)
    setattr(consumer._fetcher.reader, "read", partial(_raise, OddError))  # noqa: B010 - a method is not assigned otherwise

    def fails() -> weakref.ref[Kept]:
        kept = Kept()
        with suppress(OddError):
            consumer.poll(AGAIN_S)
        return weakref.ref(kept)

    gc.disable()
    try:
        kept = fails()
        eventually(lambda: kept() is None, "what the caller of poll() had is gone")
    finally:
        gc.enable()
    story.close()


def memory_is_bounded(delivery: Delivery) -> None:
    """``max_bytes_in_flight`` with large messages, though more are available."""
    size, messages, limit = 10_000, 200, 200_000
    cluster = memory_cluster(PARTITIONS, 0)
    for number in range(messages):
        for partition in range(PARTITIONS):
            cluster.broker.produce(TOPIC, partition, b"%d" % number + b"x" * size)
    marshal = member(cluster)
    consumer = marshal.consumer([TOPIC], delivery=delivery, max_bytes_in_flight=limit)
    try:
        seen = 0
        while seen < PARTITIONS * messages:
            message = consumer.poll(AGAIN_S)
            assert message is not None, f"{seen} of {PARTITIONS * messages} came within {AGAIN_S:g} s"
            waiting = consumer._delivery.buffered * size
            assert waiting <= limit, f"{waiting} bytes wait in a consumer that may keep {limit}"
            in_hand = consumer._delivery.memory.most_in_hand * size
            assert delivery == "at-most-once" or in_hand <= limit, f"{in_hand} bytes may be in hand"
            seen += 1
            consumer.done(message)
    finally:
        answer("Marshal.close()", marshal.close)


ONCE: dict[str, Any] = {"delivery": "at-most-once", "batch_size": 2}
TORN = ("reading messages was interrupted before they were noted",)
ERRORS: tuple[type[BaseException], ...] = (OddError, OddExit)


def _closes(callback: str, what: str) -> None:
    with opened() as marshal:
        a_callback_closes(marshal, callback, what)


def _closed_at_once(what: str, delivery: Delivery) -> None:
    for loop in LOOPS:
        with opened() as marshal:
            closed_at_once(marshal, loop, what, delivery)


PROOFS: dict[str, Proof] = {
    "a read is torn: poll": Proof(partial(torn, cases.poll, "read"), TORN),
    "a read is torn: iterate": Proof(partial(torn, cases.iterate, "read"), TORN),
    "a read is torn: batches": Proof(partial(torn, cases.batches, "read"), TORN),
    "a read is torn at its end: poll": Proof(partial(torn, cases.poll, "take_ends"), TORN),
    "at most once: a read is torn: poll": Proof(partial(torn, cases.poll, "read", **ONCE), TORN),
    "at most once: a read is torn: iterate": Proof(partial(torn, cases.iterate, "read", **ONCE), TORN),
    **{
        f"a policy raises {x.__name__}": Proof(partial(a_policy_raises, x), ("the policy Moody raised",))
        for x in ERRORS
    },
    **{
        f"callbacks raise {x.__name__}": Proof(partial(callbacks_raise, x), ("on_assign raised", "on_revoke raised"))
        for x in ERRORS
    },
    "callbacks of librdkafka raise": Proof(
        callbacks_of_librdkafka_raise, ("stats_cb raised", "error_cb raised", "throttle_cb raised", "future raised")
    ),
    "a predicate looks": Proof(predicates_look),
    **{f"{x}: another thread is faster": Proof(partial(another_thread_is_faster, x)) for x in DELIVERIES},
    "an error keeps nothing": Proof(an_error_keeps_nothing),
    "a dropped message comes again": Proof(a_dropped_message_comes_again),
    "what an interrupt took comes next": Proof(what_an_interrupt_took_comes_next),
    "a batch reaches nobody": Proof(a_batch_reaches_nobody),
    "a consumer reaches nobody": Proof(a_consumer_reaches_nobody),
    "what a hand has left is not forgotten": Proof(what_a_hand_has_left_is_not_forgotten),
    **{f"{x}: all is done at the end": Proof(partial(all_is_done_at_the_end, x)) for x in DELIVERIES},
    **{f"{x}: memory is bounded": Proof(partial(memory_is_bounded, x)) for x in DELIVERIES},
}

#: Proofs that test_closing.py and test_threads.py run, too.
SHARED: dict[str, Proof] = {
    **{
        f"{callback} closes the {what}": Proof(partial(_closes, callback, what))
        for callback in CALLBACKS
        for what in WHAT
    },
    **{f"{x}: threads close the {what}": Proof(partial(_closed_at_once, what, x)) for x in DELIVERIES for what in WHAT},
    **{f"{x}: threads share: {'+'.join(ways)}": Proof(partial(share, ways, x)) for x in DELIVERIES for ways in WAYS},
}
