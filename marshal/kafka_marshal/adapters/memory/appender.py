"""Appends to the coordination topic in memory, and produces to users' topics."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kafka_marshal.adapters import producing
from kafka_marshal.adapters.memory.broker import MemoryBroker
from kafka_marshal.adapters.memory.faults import AppendFate
from kafka_marshal.adapters.producing import Headers
from kafka_marshal.errors import ClosedError
from kafka_marshal.ports import Ack

_MASK = 0xFFFFFFFF
_FACTOR = 0x5BD1E995
_SEED = 0x9747B28C

#: What an ack is: an Ack, or an error.
A = TypeVar("A")
#: What waits for a broker.
R = TypeVar("R", bound="_Waiting")


@dataclass(slots=True)
class _Waiting:
    """Something that waits for a broker until then (ms)."""

    deadline: float


@dataclass(slots=True)
class _Due(Generic[A]):
    """An ack that is due at a time (ms)."""

    at: float
    on_ack: Callable[[A], None] | None
    ack: A


class _Sending(Generic[R, A]):
    """Writes at once if the broker can be reached, else as soon as it can, within the delivery timeout."""

    what = "producer"

    def __init__(self, broker: MemoryBroker, client: str, delivery_timeout_ms: int) -> None:
        self._broker = broker
        self._client = client
        self._delivery_timeout_ms = delivery_timeout_ms
        self._waiting: deque[R] = deque()
        self._due: list[_Due[A]] = []
        self._closed = False

    def _send(self) -> None:
        """Write what waits, or give up on it; the lock is held."""
        now = self._broker.clock()
        while self._waiting and self._waiting[0].deadline <= now:
            self._expire(self._waiting.popleft(), now)
        while self._waiting and self._broker.reachable(self._client):
            self._write(self._waiting.popleft(), now)

    def _expire(self, record: R, now: float) -> None:
        raise NotImplementedError

    def _write(self, record: R, now: float) -> None:
        raise NotImplementedError

    def _drop(self, record: R, now: float) -> None:
        raise NotImplementedError

    def _answer(self, on_ack: Callable[[A], None] | None, at: float, ack: A) -> None:
        self._due.append(_Due(at, on_ack, ack))

    def poll(self, timeout_s: float = 0.0) -> None:
        with self._broker.changed:
            self._check_open()
            self._send()
            if self._broker.waits and timeout_s > 0:
                self._broker.changed.wait_for(self._sent_and_ripe, timeout_s)
        self._call()

    def flush(self, timeout_s: float) -> int:
        with self._broker.changed:
            self._check_open()
        return self._flush(timeout_s)

    def _flush(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while True:
            with self._broker.changed:
                self._send()
            self._call()
            with self._broker.changed:
                left = len(self._waiting) + len(self._due)
                remaining = deadline - time.monotonic()
                if not left or not self._broker.waits or remaining <= 0:
                    return left
                self._broker.changed.wait(min(remaining, self._next_s()))

    def close(self, timeout_s: float = 0.0) -> None:
        with self._broker.changed:
            if self._closed:
                return
        self._flush(timeout_s)
        with self._broker.changed:
            self._closed = True
            now = self._broker.clock()
            for record in self._waiting:
                self._drop(record, now)
            self._waiting.clear()
            for due in self._due:
                due.at = min(due.at, now)
        self._call()

    def _sent_and_ripe(self) -> bool:
        self._send()
        now = self._broker.clock()
        return any(due.at <= now for due in self._due)

    def _next_s(self) -> float:
        """Seconds until something is due by time; the lock is held."""
        moments = [due.at for due in self._due] + [record.deadline for record in self._waiting]
        return max(0.001, (min(moments) - self._broker.clock()) / 1000) if moments else 1.0

    def _call(self) -> None:
        """Call the acks that are due, without the lock."""
        with self._broker.changed:
            now = self._broker.clock()
            ripe = [due for due in self._due if due.at <= now]
            self._due = [due for due in self._due if due.at > now]
        for due in ripe:
            if due.on_ack is not None:
                due.on_ack(due.ack)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"The {self.what} was closed; nothing was sent. Open a new one.")


@dataclass(slots=True)
class _Record(_Waiting):
    """One for the coordination topic."""

    partition: int
    value: bytes
    on_ack: Callable[[Ack], None] | None


class MemoryAppender(_Sending[_Record, Ack]):
    """The appender of one topic."""

    what = "appender"

    def __init__(self, broker: MemoryBroker, client: str, topic: str, delivery_timeout_ms: int) -> None:
        super().__init__(broker, client, delivery_timeout_ms)
        self._topic = topic
        self._fatal = False

    def append(self, partition: int, value: bytes, on_ack: Callable[[Ack], None] | None = None) -> None:
        with self._broker.changed:
            self._check_open()
            now = self._broker.clock()
            if self._fatal:
                self._answer(on_ack, now, Ack(None, "the appender is in a fatal state", fatal=True))
            else:
                self._waiting.append(_Record(now + self._delivery_timeout_ms, partition, value, on_ack))
                self._send()

    def _expire(self, record: _Record, now: float) -> None:
        self._answer(record.on_ack, now, Ack(None, "no broker could be reached in time"))

    def _drop(self, record: _Record, now: float) -> None:
        self._answer(record.on_ack, now, Ack(None, "the appender was closed before this was sent"))

    def _write(self, record: _Record, now: float) -> None:
        if self._fatal:
            self._answer(record.on_ack, now, Ack(None, "the appender is in a fatal state", fatal=True))
            return
        problem = self._broker.refusal(self._topic, record.partition, record.value)
        if problem is not None:
            self._answer(record.on_ack, now, Ack(None, problem))
            return
        lost = Ack(None, "the broker did not acknowledge in time")
        match self._broker.faults.append(self._client, self._topic, record.partition, record.value):
            case AppendFate.WRITTEN:
                self._answer(record.on_ack, now, Ack(self._produce(record)))
            case AppendFate.DUPLICATED:
                self._produce(record)
                self._produce(record)
                self._answer(record.on_ack, now, Ack(None))
            case AppendFate.UNACKNOWLEDGED:
                self._produce(record)
                self._answer(record.on_ack, record.deadline, lost)
            case AppendFate.LOST:
                self._answer(record.on_ack, record.deadline, lost)
            case AppendFate.FATAL:
                self._fatal = True
                self._answer(record.on_ack, now, Ack(None, "the appender met a fatal error", fatal=True))

    def _produce(self, record: _Record) -> int:
        return self._broker.produce(self._topic, record.partition, record.value, b"")


@dataclass(slots=True)
class _DataRecord(_Waiting):
    """One for a user's topic."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: Headers
    timestamp_ms: int
    on_ack: Callable[[Exception | None], None] | None


class MemoryProducer(_Sending[_DataRecord, Exception | None]):
    """The producer of users' topics. No fault is for good: the next record may be written."""

    def __init__(self, broker: MemoryBroker, client: str, delivery_timeout_ms: int) -> None:
        super().__init__(broker, client, delivery_timeout_ms)
        self._partitioner = Partitioner()

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        on_ack: Callable[[Exception | None], None] | None = None,
    ) -> None:
        with self._broker.changed:
            self._check_open()
            now = self._broker.clock()
            deadline = now + self._delivery_timeout_ms
            self._waiting.append(_DataRecord(deadline, topic, value, key, tuple(headers), int(now), on_ack))
            self._send()

    def _expire(self, record: _DataRecord, now: float) -> None:
        self._answer(record.on_ack, now, producing.unacknowledged(record.topic, "no broker could be reached"))

    def _drop(self, record: _DataRecord, now: float) -> None:
        self._answer(record.on_ack, now, producing.closed(record.topic))

    def _write(self, record: _DataRecord, now: float) -> None:
        problem = self._broker.data_refusal(record.topic, record.value, record.key, record.headers)
        if problem is not None:
            self._answer(record.on_ack, now, problem)
            return
        partition = self._partitioner.partition(record.key, self._broker.existing[record.topic].info.partitions)
        lost = producing.unacknowledged(record.topic, "no answer")
        match self._broker.faults.append(self._client, record.topic, partition, record.value or b""):
            case AppendFate.WRITTEN:
                self._produce(record, partition)
                self._answer(record.on_ack, now, None)
            case AppendFate.DUPLICATED:
                self._produce(record, partition)
                self._produce(record, partition)
                self._answer(record.on_ack, now, None)
            case AppendFate.UNACKNOWLEDGED:
                self._produce(record, partition)
                self._answer(record.on_ack, record.deadline, lost)
            case AppendFate.LOST:
                self._answer(record.on_ack, record.deadline, lost)
            case AppendFate.FATAL:
                self._answer(record.on_ack, now, producing.refused(record.topic, "a fatal error", retry=True))

    def _produce(self, record: _DataRecord, partition: int) -> None:
        self._broker.produce(
            record.topic,
            partition,
            record.value,
            record.key,
            timestamp_ms=record.timestamp_ms,
            headers=record.headers or None,
        )


def murmur2(data: bytes) -> int:
    """The hash of Kafka's default partitioner, unsigned."""
    size = len(data)
    hashed = _SEED ^ size
    for at in range(0, size - size % 4, 4):
        word = int.from_bytes(data[at : at + 4], "little") * _FACTOR & _MASK
        word = (word ^ word >> 24) * _FACTOR & _MASK
        hashed = hashed * _FACTOR & _MASK ^ word
    if size % 4:
        hashed = (hashed ^ int.from_bytes(data[size - size % 4 :], "little")) * _FACTOR & _MASK
    hashed = (hashed ^ hashed >> 13) * _FACTOR & _MASK
    return hashed ^ hashed >> 15


class Partitioner:
    """One producer's choice of partitions: that of Java's producer for a key, the next one without."""

    def __init__(self) -> None:
        self._turn = itertools.count()

    def partition(self, key: bytes | None, partitions: int) -> int:
        """Of one of this many partitions."""
        return (next(self._turn) if key is None else murmur2(key) & 0x7FFFFFFF) % partitions
