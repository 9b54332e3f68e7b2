"""What has to wait: ``RetryAfter``, ``Retry(after=…)`` and ``run(not_before=…)``, on virtual time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from kafka_marshal import (
    Attempt,
    Batches,
    Group,
    Marshal,
    MessagesFailedError,
    Retry,
    RetryAfter,
    Transactions,
    aio,
)
from kafka_marshal.client import health
from kafka_marshal.client.waiting import wait_of
from kafka_marshal.engine.work import open_messages
from kafka_marshal.engine.work.assignment import Stage
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.testing import MemoryKafka
from kafka_marshal.types import due_of, reason_until
from tests.rationalizer.small_limits import small_limits

GROUP, TOPIC = "billing", "orders"
MESSAGE: Any = object()


class Program:
    """A worker: it notes each try, by value, number and time (s), before ``act``."""

    def __init__(self, kafka: MemoryKafka, act: Callable[[Any], object] = lambda message: None, **options: Any) -> None:
        self.kafka = kafka
        self.tries: list[tuple[bytes, int, float]] = []
        self.act = act
        self.consumer_options = {name: options.pop(name) for name in ("mode", "exactly_once") if name in options}
        self.options = options
        self.marshal: Marshal | None = None
        self.consumer: Any = None

    def note(self, message: Any) -> None:
        self.tries.append((message.value(), Attempt.current().number, self.now()))
        self.act(message)

    def now(self) -> float:
        return self.kafka._time.of_day_ms() / 1000

    def times(self, value: bytes) -> list[float]:
        return [at for each, _, at in list(self.tries) if each == value]

    def numbers(self, value: bytes) -> list[int]:
        return [number for each, number, _ in list(self.tries) if each == value]

    def work(self, bootstrap_servers: str, client_id: str = "a") -> None:
        with (
            Marshal(bootstrap_servers, group_id=GROUP, client_id=client_id) as marshal,
            marshal.consumer([TOPIC], **self.consumer_options) as consumer,
        ):
            self.marshal, self.consumer = marshal, consumer
            consumer.run(self.note, **self.options)

    async def awaited(self, bootstrap_servers: str) -> None:
        async def handle(message: Any) -> None:
            self.note(message)

        async with (
            aio.Marshal(bootstrap_servers, group_id=GROUP, client_id="a") as marshal,
            marshal.consumer([TOPIC], **self.consumer_options) as consumer,
        ):
            await consumer.run(handle, **self.options)

    def loop(self, bootstrap_servers: str) -> None:
        with (
            Marshal(bootstrap_servers, group_id=GROUP, client_id="a") as marshal,
            marshal.consumer([TOPIC]) as consumer,
        ):
            for message in consumer:
                self.tries.append((message.value() or b"", 0, self.now()))


class Once:
    """An act: the first try of the message "late" asks for a wait."""

    def __init__(self, seconds: float = 90.0) -> None:
        self.seconds = seconds
        self.asked_at = 0.0

    def __call__(self, message: Any) -> None:
        if message.value() == b"late" and not self.asked_at:
            self.asked_at = datetime.now(UTC).timestamp()
            raise RetryAfter(self.seconds)


def waiting(kafka: MemoryKafka) -> list[tuple[int, str, int]]:
    """Offset, state and number of tries of what is open in the log."""
    return [(each.offset, each.state, each.delivery_count) for each in kafka.admin.open_messages(GROUP)]


def start(kafka: MemoryKafka, *, partitions: int = 1) -> None:
    kafka.create_topic(TOPIC, partitions)
    kafka.produce(TOPIC, "late", key="ann")
    kafka.produce(TOPIC, "after", key="ann")
    kafka.produce(TOPIC, "other", key="bob")


def until_logged(kafka: MemoryKafka, expected: list[tuple[int, str, int]]) -> None:
    for _ in range(20):
        if waiting(kafka) == expected:
            return
        kafka.advance(1.0)
    assert waiting(kafka) == expected


KINDS = {"claims": {}, "group": {"mode": Group()}}


@pytest.mark.parametrize("how", ["work", "awaited"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_message_waits_and_its_key_with_it(memory_marshal: MemoryKafka, how: str, kind: str) -> None:
    start(memory_marshal)
    program = Program(memory_marshal, Once(150.0), **KINDS[kind])
    memory_marshal.start(getattr(program, how))
    memory_marshal.wait_until(lambda: program.times(b"other") and program.times(b"late"))
    until_logged(memory_marshal, [(0, "later", 1)])
    memory_marshal.advance(60.0)
    assert (len(program.times(b"late")), program.times(b"after")) == (1, [])
    assert program.marshal is None or program.marshal.health().held_back == ()
    memory_marshal.advance(100.0)
    memory_marshal.wait_until(lambda: program.times(b"after"))
    assert program.numbers(b"late") == [1, 2]
    first, second = program.times(b"late")
    assert 150 <= second - first < 200
    memory_marshal.wait_until_done(TOPIC, GROUP)
    assert waiting(memory_marshal) == []


@pytest.mark.parametrize("end", ["kill", "stop"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_owner_tries_it_at_its_time(memory_marshal: MemoryKafka, end: str, kind: str) -> None:
    start(memory_marshal)
    asks = Once(120.0)
    first = Program(memory_marshal, asks, **KINDS[kind])
    worker = memory_marshal.start(first.work)
    memory_marshal.wait_until(lambda: first.times(b"other") and first.times(b"late"))
    if end == "kill":
        until_logged(memory_marshal, [(0, "later", 1)])
        worker.kill()
    else:
        worker.stop()  # at once: the wait is logged before the partition is released
    until_logged(memory_marshal, [(0, "later", 1)])
    second = Program(memory_marshal, asks, **KINDS[kind])
    memory_marshal.start(second.work)
    memory_marshal.produce(TOPIC, "more", key="bob")
    memory_marshal.advance(40.0)
    memory_marshal.wait_until(lambda: second.times(b"more"), what="other keys pass")
    assert (second.times(b"late"), second.times(b"after")) == ([], [])
    memory_marshal.advance(90.0)
    memory_marshal.wait_until(lambda: second.times(b"after"))
    assert second.numbers(b"late") == [2]
    assert 120 <= second.times(b"late")[0] - first.times(b"late")[0] < 170
    assert first.times(b"after") == []
    memory_marshal.wait_until_done(TOPIC, GROUP)
    assert len(second.times(b"late")) == 1


def test_a_handler_that_asks_while_its_partition_moves_is_heard(memory_marshal: MemoryKafka) -> None:
    """The wait is logged before the partition is released: the next owner keeps to it."""
    memory_marshal.create_topic(TOPIC, 2)
    for partition in range(2):
        memory_marshal.produce(TOPIC, f"late{partition}", key=None)
    may_ask = threading.Event()

    def act(message: Any) -> None:
        if Attempt.current().number == 1:
            assert may_ask.wait(10)
            raise RetryAfter(150.0)

    first, second = Program(memory_marshal, act, mode=Group()), Program(memory_marshal, act, mode=Group())
    memory_marshal.start(first.work)
    memory_marshal.wait_until(lambda: len(first.tries) == 2)
    memory_marshal.start(partial(second.work, client_id="b"))

    def is_moving() -> bool:
        return any(each.stage is Stage.REVOKING for each in list(first.consumer._engine.assignments.values()))

    memory_marshal.wait_until(is_moving)
    may_ask.set()
    memory_marshal.wait_until(lambda: not is_moving())
    for _ in range(20):
        if [state for _, state, _ in waiting(memory_marshal)] == ["later", "later"]:
            break
        memory_marshal.advance(1.0)
    memory_marshal.advance(50.0)
    assert (len(first.tries), second.tries) == (2, [])
    memory_marshal.advance(110.0)
    memory_marshal.wait_until(lambda: second.tries and len(first.tries) == 3)
    assert [number for _, number, _ in second.tries] == [2]


@pytest.mark.parametrize("action", ["redrive", "discard", "park"])
def test_an_operator_decides_otherwise(memory_marshal: MemoryKafka, action: str) -> None:
    start(memory_marshal)
    program = Program(memory_marshal, Once(3_600.0))
    memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: program.times(b"other") and program.times(b"late"))
    until_logged(memory_marshal, [(0, "later", 1)])
    getattr(memory_marshal.admin, action)(GROUP, [(TOPIC, 0, 0)])
    memory_marshal.wait_until(lambda: program.times(b"after"), what="the key continues")
    memory_marshal.wait_until_done(TOPIC, GROUP)
    assert program.numbers(b"late") == ([1, 1] if action == "redrive" else [1])
    assert waiting(memory_marshal) == ([(0, "parked", 1)] if action == "park" else [])


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_first_try_waits_for_its_time(memory_marshal: MemoryKafka, is_killed: bool) -> None:
    start(memory_marshal)
    memory_marshal.advance(50.0)  # the brokers' time counts, not the machine's
    program = Program(memory_marshal)
    at = datetime.fromtimestamp(program.now() + 100, UTC)
    program.options["not_before"] = lambda message: at if message.value() == b"late" else None
    worker = memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: program.times(b"other"))
    until_logged(memory_marshal, [(0, "later", 0)])
    if is_killed:
        worker.kill()
        memory_marshal.start(program.work)
    memory_marshal.advance(50.0)
    assert (program.times(b"late"), program.times(b"after")) == ([], [])
    memory_marshal.advance(60.0)
    memory_marshal.wait_until(lambda: program.times(b"after"))
    assert program.numbers(b"late") == [1]
    assert program.times(b"late")[0] >= at.timestamp()
    memory_marshal.wait_until_done(TOPIC, GROUP)


def test_a_message_whose_time_can_t_be_read_fails_alone(memory_marshal: MemoryKafka) -> None:
    """As if its handler had raised; without ``park`` it would end the run, again after each restart."""

    def not_before(message: Any) -> datetime | None:
        return datetime.fromisoformat(message.value().decode()) if message.value() != b"x" else None

    program = Program(memory_marshal, not_before=not_before, retry=Retry(attempts=2, backoff=(0.0, 0.0)), park=True)
    memory_marshal.create_topic(TOPIC, 1)
    for value in ("no time", "x", "1999-01-01T00:00:00+00:00"):
        memory_marshal.produce(TOPIC, value, key=value)
    memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: len(program.tries) == 2)
    until_logged(memory_marshal, [(0, "parked", 2)])
    assert program.times(b"no time") == []


def test_a_short_wait_stays_in_memory(memory_marshal: MemoryKafka) -> None:
    start(memory_marshal)
    program = Program(memory_marshal, Once(50.0))
    program.options["not_before"] = lambda message: datetime.now(UTC) + timedelta(seconds=2)
    memory_marshal.start(program.work)
    memory_marshal.advance(5.0)
    memory_marshal.wait_until(lambda: program.times(b"other") and program.times(b"late"))
    memory_marshal.advance(20.0)
    assert (waiting(memory_marshal), program.numbers(b"late"), program.times(b"after")) == ([], [1], [])
    memory_marshal.advance(35.0)
    memory_marshal.wait_until(lambda: program.times(b"after"))
    assert program.numbers(b"late") == [1, 2]


def test_without_an_order_nothing_else_waits(memory_marshal: MemoryKafka) -> None:
    start(memory_marshal)
    program = Program(memory_marshal, Once(), order="none", retry=Retry(attempts=3, durable=True))
    memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: program.times(b"other") and program.times(b"late") and program.times(b"after"))
    until_logged(memory_marshal, [(0, "later", 1)])
    memory_marshal.advance(95.0)
    memory_marshal.wait_until(lambda: program.numbers(b"late") == [1, 2])
    memory_marshal.wait_until_done(TOPIC, GROUP)


@pytest.mark.parametrize("durable", [False, True])
def test_it_waits_again_and_is_set_aside_after_its_last_try(memory_marshal: MemoryKafka, durable: bool) -> None:
    """The waits of ``Retry(after=…)``: two in the log, one in memory."""

    def act(message: Any) -> None:
        if message.value() == b"late":
            raise ValueError

    start(memory_marshal)
    waits = {1: 70.0, 2: 5.0, 3: 80.0}
    retry = Retry(attempts=4, after=lambda error, attempt: waits[attempt], durable=durable)
    program = Program(memory_marshal, act, retry=retry, park=True)
    memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: program.times(b"other"))
    until_logged(memory_marshal, [(0, "later", 1)])
    memory_marshal.advance(72.0)
    memory_marshal.wait_until(lambda: len(program.times(b"late")) == 2)
    memory_marshal.advance(7.0)
    memory_marshal.wait_until(lambda: len(program.times(b"late")) == 3)
    until_logged(memory_marshal, [(0, "later", 3)])
    memory_marshal.advance(80.0)
    memory_marshal.wait_until_done(TOPIC, GROUP)
    times = program.times(b"late")
    waited = [after - before for before, after in pairwise(times)]
    assert all(least <= one < least + 60 for least, one in zip(waits.values(), waited, strict=True))
    assert program.numbers(b"late") == [1, 2, 3, 4]
    assert waiting(memory_marshal) == [(0, "parked", 4)]


@pytest.mark.parametrize("options", [{"mode": Batches()}, {"exactly_once": Transactions()}])
def test_where_the_log_can_t_have_it_a_long_wait_is_refused(
    memory_marshal: MemoryKafka, options: dict[str, Any]
) -> None:
    start(memory_marshal)
    program = Program(memory_marshal, Once(61.0), **options)
    worker = memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: not worker.is_alive)
    assert isinstance(worker.error, ConfigurationError)
    assert "wait 61 s" in str(worker.error)

    program.act = Once(20.0)
    memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: len(program.times(b"late")) == 2)
    memory_marshal.advance(30.0)
    memory_marshal.wait_until(lambda: len(program.times(b"late")) == 3)


def test_a_loop_gets_it_at_its_time_too(memory_marshal: MemoryKafka) -> None:
    start(memory_marshal)
    program = Program(memory_marshal, Once(150.0))
    worker = memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: program.times(b"other") and program.times(b"late"))
    until_logged(memory_marshal, [(0, "later", 1)])
    worker.stop()
    memory_marshal.start(program.loop)
    memory_marshal.wait_until(lambda: program.times(b"after"))
    memory_marshal.advance(60.0)
    assert len(program.times(b"late")) == 1
    memory_marshal.advance(100.0)
    memory_marshal.wait_until(lambda: len(program.times(b"late")) == 2)
    memory_marshal.produce(TOPIC, "next", key="cid")
    memory_marshal.wait_until(lambda: program.times(b"next"))
    memory_marshal.wait_until(lambda: not waiting(memory_marshal), what="the loop has done it")


@pytest.mark.parametrize("whole", [False, True])
def test_messages_of_a_batch_wait(memory_marshal: MemoryKafka, whole: bool) -> None:
    start(memory_marshal)
    got: list[list[bytes]] = []

    def handle(messages: list[Any]) -> None:
        got.append([message.value() for message in messages])
        if len(got) == 1:
            raise RetryAfter(90) if whole else MessagesFailedError({0: RetryAfter(90)})

    def work(bootstrap_servers: str) -> None:
        with (
            Marshal(bootstrap_servers, group_id=GROUP) as marshal,
            marshal.consumer([TOPIC]) as consumer,
        ):
            consumer.run(handle, batch=10, linger=0.5)

    memory_marshal.start(work)
    memory_marshal.wait_until(lambda: got)
    assert got[0] == [b"late", b"after", b"other"]
    until_logged(memory_marshal, [(n, "later", 1) for n in (range(3) if whole else [0])])
    memory_marshal.advance(95.0)
    memory_marshal.wait_until_done(TOPIC, GROUP)
    again = [value for values in got[1:] for value in values]
    assert sorted(again) == (sorted(got[0]) if whole else [b"late"])
    assert not whole or again.index(b"late") < again.index(b"after")


def test_at_the_limit_nothing_more_of_the_partition_is_delivered(
    memory_marshal: MemoryKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tests.rationalizer.oracle  # noqa: F401 - its limits are lowered, too

    small_limits(monkeypatch, MAX_HOLES=4)
    for module in (health, open_messages):  # the client knows the limit as the log does
        monkeypatch.setattr(module, "MAX_HOLES", 4)

    def act(message: Any) -> None:
        if message.value() != b"new" and Attempt.current().number == 1:
            raise RetryAfter(90.0)

    memory_marshal.create_topic(TOPIC)
    memory_marshal.produce(TOPIC, *(f"{number}" for number in range(6)))
    program = Program(memory_marshal, act, order="none", concurrency=1)
    memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: len(program.tries) == 6)
    until_logged(memory_marshal, [(offset, "later", 1) for offset in range(4)])
    memory_marshal.produce(TOPIC, "new")
    memory_marshal.advance(30.0)
    assert program.times(b"new") == []
    assert program.marshal is not None
    assert "4 of the 4 open messages that it may have" in str(program.marshal.health())
    memory_marshal.advance(70.0)
    memory_marshal.wait_until_done(TOPIC, GROUP)
    assert program.numbers(b"new") == [1]
    assert all(program.numbers(b"%d" % number) == [1, 2] for number in range(6))


def test_a_message_that_is_long_past_its_time_is_a_problem(memory_marshal: MemoryKafka) -> None:
    """The only handler hangs."""
    memory_marshal.create_topic(TOPIC, 1)
    memory_marshal.produce(TOPIC, "late", key="ann")
    memory_marshal.produce(TOPIC, "hangs", key="bob")
    once, may_end = Once(), threading.Event()

    def act(message: Any) -> None:
        once(message)
        if message.value() == b"hangs":
            may_end.wait(60.0)

    program = Program(memory_marshal, act, concurrency=1)
    memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: program.times(b"hangs"))
    until_logged(memory_marshal, [(0, "later", 1)])

    def said() -> str:
        assert program.marshal is not None
        return str(program.marshal.health())

    for _ in range(10):
        memory_marshal.advance(60.0)
        assert "to be tried by now" not in said()
    memory_marshal.advance(120.0)
    memory_marshal.wait_until(lambda: "orders [0] has 1 message that was to be tried by now, up to " in said())
    assert program.marshal is not None
    assert not program.marshal.health().ok
    may_end.set()
    memory_marshal.wait_until_done(TOPIC, GROUP)
    assert "to be tried by now" not in said()


def test_the_error_says_when_the_next_try_begins() -> None:
    retry = Retry(after=lambda error, attempt: 10.0 * attempt, on=(OSError,))
    assert retry.checked_delay(2, Random(1), RetryAfter(300)) == 300
    assert retry.checked_delay(2, Random(1), ValueError()) == 20
    with pytest.raises(ConfigurationError):
        Retry(after=lambda error, attempt: -1.0).checked_delay(1, Random(1), ValueError())


def test_a_time_needs_a_zone() -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    now = at.timestamp() * 1000
    assert wait_of(lambda _: at, MESSAGE, now - 5_000) == 5_000
    assert wait_of(lambda _: at, MESSAGE, now + 5_000) == 0
    assert wait_of(lambda _: None, MESSAGE, 0.0) == 0
    with pytest.raises(ConfigurationError):
        wait_of(lambda _: datetime(2030, 1, 1), MESSAGE, 0.0)  # noqa: DTZ001 - the mistake


def test_the_reason_has_the_time_rounded_up() -> None:
    assert reason_until(1_795_000_000_001.0) == "LATER 2026-11-18T11:06:41Z"
    assert due_of(reason_until(1_795_000_000_000.0)) == 1_795_000_000_000
    assert due_of(reason_until(1e18)) is not None
    assert [due_of(x) for x in (None, "ValueError", "LATER", "LATER tomorrow")] == [None] * 4
