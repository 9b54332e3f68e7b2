"""Handlers for tests of ``consumer.run``: functions or coroutines that record events, wait at gates, and fail."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from confluent_kafka import Producer

from kafka_marshal import Consumer, Marshal, Retry
from tests.client.conftest import Scene, wait_until
from tests.client.test_group import Groups

QUICK = Retry(attempts=5, backoff=(0.01, 0.02))

HOW = ("threads", "coroutines")
KINDS = ("claims", "group")


class Crew(Groups):
    """Consumers of one kind."""

    kind = "claims"

    def consumer(self, client_id: str, topic: str, **options: Any) -> tuple[Marshal, Consumer]:
        if self.kind == "group":
            made = self.joined(client_id, topic, **options)
            return made.marshal, made.consumer
        member = self.member(client_id)
        return member, member.consumer([topic], **options)


def places(count: int, partition: int = 0) -> set[tuple[int, int]]:
    return {(partition, offset) for offset in range(count)}


def done_of(marshal: Marshal, topic: str, partition: int = 0) -> tuple[int | None, tuple[tuple[int, int], ...]]:
    info = marshal.world.lease(topic, partition)
    assert info is not None
    return info.stable, info.ranges


def consumer_again(crew: Crew, topic: str) -> Iterator[Any]:
    """A consumer in another process's place, which gets undone messages again."""
    _, consumer = crew.consumer("z", topic)
    wait_until(consumer.assignment)
    while (message := consumer.poll(1.0)) is not None:
        consumer.done(message)
        yield message


#: A time-out that no test reaches.
LONG_S = 20.0


class Event(NamedTuple):
    """An event of a handler."""

    what: str
    key: str | None
    partition: int
    offset: int
    at: float

    @property
    def place(self) -> tuple[int, int]:
        return self.partition, self.offset


class Handlers:
    """One handler, for any number of runs; ``handle`` is passed to ``run``."""

    def __init__(self, how: str = "threads", act: Callable[[Any], object] = lambda message: None) -> None:
        self.events: list[Event] = []
        #: Handlers of a message with this key wait.
        self.gates: dict[str | None, threading.Event] = {}
        #: Called with the message, in each handler; it may raise.
        self.act = act
        self.is_async = how == "coroutines"
        self.handle: Any = self._awaited if self.is_async else self._called

    def gate(self, key: str | None) -> threading.Event:
        return self.gates.setdefault(key, threading.Event())

    def note(self, what: str, message: Any) -> None:
        key = None if message.key() is None else message.key().decode()
        self.events.append(Event(what, key, message.partition(), message.offset(), time.monotonic()))

    def _called(self, message: Any) -> None:
        self.note("begin", message)
        try:
            if (gate := self.gates.get(_key(message))) is not None:
                assert gate.wait(LONG_S)
            self.act(message)
        except BaseException:
            self.note("failed", message)
            raise
        self.note("end", message)

    async def _awaited(self, message: Any) -> None:
        self.note("begin", message)
        try:
            if (gate := self.gates.get(_key(message))) is not None:
                until = time.monotonic() + LONG_S
                while not gate.is_set():
                    assert time.monotonic() < until
                    await asyncio.sleep(0.005)
            self.act(message)
        except BaseException:
            self.note("failed", message)
            raise
        self.note("end", message)

    # What they did.

    def of(self, what: str, key: str | None = "*") -> list[tuple[int, int]]:
        return [each.place for each in list(self.events) if each.what == what and key in ("*", each.key)]

    @property
    def ended(self) -> Counter[tuple[int, int]]:
        return Counter(self.of("end"))

    def await_begun(self, key: str | None, count: int = 1) -> None:
        wait_until(lambda: len(self.of("begin", key)) >= count, what=f"{count} handling(s) of {key!r}")

    def await_ended(self, places: Iterable[tuple[int, int]]) -> None:
        wanted = set(places)
        wait_until(lambda: wanted <= set(self.ended), 90, f"{len(wanted)} handlings, such as {sorted(wanted)[:3]}")

    def check_order(self, by: Callable[[Event], object] = lambda each: (each.partition, each.key)) -> None:
        """In one lane, each handler begins after its predecessor's end, and first handlings are in offset order."""
        running: dict[object, Event] = {}
        furthest: dict[object, int] = {}
        for each in self.events:
            lane = by(each)
            if each.what != "begin":
                del running[lane]
                continue
            assert lane not in running, f"{each} begins while {running[lane]} runs"
            running[lane] = each
            assert each.offset >= furthest.get(lane, -1) or each.place in self.ended, f"{each} is late"
            furthest[lane] = max(furthest.get(lane, -1), each.offset)


def _key(message: Any) -> str | None:
    return None if message.key() is None else message.key().decode()


class Running:
    """A call of ``run`` in a separate thread."""

    def __init__(self, consumer: Consumer, handlers: Handlers | Any, **options: Any) -> None:
        self.error: BaseException | None = None
        handle = handlers.handle if isinstance(handlers, Handlers) else handlers
        self._thread = threading.Thread(target=self._run, args=(consumer, handle, options), daemon=True)
        self._thread.start()

    def _run(self, consumer: Consumer, handle: Any, options: dict[str, Any]) -> None:
        try:
            consumer.run(handle, **options)
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            self.error = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def stop(self, by: Marshal | Consumer) -> None:
        """It ends in order when its member or its consumer is stopped."""
        by.stop()
        assert self.ended() is None

    def ended(self, within_s: float = 60.0) -> BaseException | None:
        """What it raised."""
        self._thread.join(within_s)
        assert self.is_over, f"run() has not ended after {within_s:g} s"
        return self.error


def publish(scene: Scene, topic: str, keys: Iterable[str | None], partition: int = 0) -> None:
    """Publish a message for each key to one partition."""
    options = {"enable.idempotence": True, "linger.ms": 2, "queue.buffering.max.messages": 10**6}
    producer = Producer({"bootstrap.servers": scene.bootstrap, **options})
    for key in keys:
        producer.produce(topic, b"x", key, partition=partition)
    assert producer.flush(20) == 0
