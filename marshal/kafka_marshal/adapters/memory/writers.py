"""What writes to a Kafka in memory: to the coordination topic, to topics of users, and to these in transactions."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from kafka_marshal.adapters import producing, transactions
from kafka_marshal.adapters.memory.broker import AppendFate, At, MemoryBroker
from kafka_marshal.adapters.producing import Headers
from kafka_marshal.errors import ClosedError
from kafka_marshal.ports import Ack, TopicPartition
from kafka_marshal.types import T

_MASK = 0xFFFFFFFF
_FACTOR = 0x5BD1E995
_SEED = 0x9747B28C

#: What an ack is: an Ack, or an error.
A = TypeVar("A")
#: What waits for a broker.
R = TypeVar("R", bound="_Waiting")


@dataclass
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

    def _follow(
        self,
        fate: AppendFate,
        produce: Callable[[], int],
        deadline: float,
        on_ack: Callable[[A], None] | None,
        written: Callable[[int | None], A],
        lost: A,
    ) -> None:
        """Write a record as often as its fate, which is not FATAL, says; written: its ack, with the offset if known."""
        offset = None if fate is AppendFate.LOST else produce()
        if fate in (AppendFate.UNACKNOWLEDGED, AppendFate.LOST):
            self._answer(on_ack, deadline, lost)
            return
        if fate is AppendFate.DUPLICATED:
            produce()
            offset = None
        self._answer(on_ack, self._broker.clock(), written(offset))

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
            self._answer(record.on_ack, now, Ack(None, problem, refused=True))
            return
        fate = self._broker.faults.append(self._client, self._topic, record.partition, record.value)
        if fate is AppendFate.FATAL:
            self._fatal = True
            self._answer(record.on_ack, now, Ack(None, "the appender met a fatal error", fatal=True))
            return
        produce = partial(self._broker.produce, self._topic, record.partition, record.value, b"")
        lost = Ack(None, "the broker did not acknowledge in time")
        self._follow(fate, produce, record.deadline, record.on_ack, Ack, lost)


@dataclass(slots=True)
class _Data:
    """For a user's topic."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: Headers
    timestamp_ms: int


@dataclass(slots=True)
class _DataRecord(_Data, _Waiting):
    """One that waits for its ack."""

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
        fate = self._broker.faults.append(self._client, record.topic, partition, record.value or b"")
        if fate is AppendFate.FATAL:
            self._answer(record.on_ack, now, producing.refused(record.topic, "a fatal error", retry=True))
            return
        produce = partial(
            self._broker.produce,
            record.topic,
            partition,
            record.value,
            record.key,
            timestamp_ms=record.timestamp_ms,
            headers=record.headers or None,
        )
        lost = producing.unacknowledged(record.topic, "no answer")
        self._follow(fate, produce, record.deadline, record.on_ack, lambda _: None, lost)


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


@dataclass(slots=True)
class _InTransaction(_Data):
    """One that waits for a reachable broker."""

    partition: int | None


class MemoryTransactionalProducer:
    """One transactional id. Records are written when they are sent, or as soon as the broker can be reached."""

    def __init__(self, broker: MemoryBroker, client: str, transactional_id: str, transaction_timeout_ms: int) -> None:
        self._broker = broker
        self._client = client
        self._id = transactional_id
        self._timeout_ms = transaction_timeout_ms
        self._partitioner = Partitioner()
        self._waiting: deque[_InTransaction] = deque()
        #: None: init() has not returned.
        self._epoch: int | None = None
        #: Of the transaction.
        self._number = 0
        self._is_open = False
        self._in_doubt = False
        #: Why the first record of the transaction was not written.
        self._lost: Exception | None = None
        #: Why no call succeeds any more.
        self._failed: Exception | None = None
        self._closed = False

    def init(self, timeout_s: float) -> None:
        late = partial(transactions.unfinished, self._id, "taking over the transactional id")
        self._epoch = self._ask(
            "init", timeout_s, late, lambda: self._broker.transactions.init(self._id, self._timeout_ms)
        )

    def begin(self) -> None:
        self._check_usable()
        if self._epoch is None:
            raise transactions.not_in_order(self._id, "init() has not returned")
        if self._is_open or self._in_doubt:
            raise transactions.not_in_order(self._id, "a transaction is open")
        self._is_open, self._lost = True, None
        self._number += 1

    @property
    def _at(self) -> At:
        return self._epoch or 0, self._number

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> None:
        self._check_in_transaction()
        self._waiting.append(_InTransaction(topic, value, key, tuple(headers), int(self._broker.clock()), partition))
        with self._broker.changed:
            if self._is_reached():
                self._write_all()

    def _is_reached(self) -> bool:
        """Whether records are written as they are sent."""
        return self._broker.reachable(self._client)

    def commit(self, group_id: str, key: TopicPartition, offset: int, metadata: str, timeout_s: float) -> None:
        self._check_in_transaction()
        deadline = self._now_s() + timeout_s
        late = partial(transactions.not_committed, self._id)
        if self._waiting:
            self._ask("send", timeout_s, late, self._write_all)
        if self._lost is not None:
            raise self._lost
        at = self._at

        def send_offset() -> None:
            self._broker.transactions.send_offset(self._id, at, group_id, key, offset, metadata)

        self._ask("send_offsets", self._left_s(deadline), late, send_offset)
        self._in_doubt = True
        in_doubt = partial(transactions.in_doubt, self._id)
        self._ask("commit", self._left_s(deadline), in_doubt, partial(self._end, at, commit=True))
        self._in_doubt = self._is_open = False

    def abort(self, timeout_s: float) -> None:
        self._check_usable()
        if self._in_doubt:
            raise transactions.undecided(self._id)
        if self._is_open:
            self._waiting.clear()
            late = partial(transactions.unfinished, self._id, "aborting a transaction of")
            self._ask("abort", timeout_s, late, partial(self._end, self._at, commit=False))
            self._is_open = False

    def close(self) -> None:
        with self._broker.changed:
            self._closed = True
            self._broker.changed.notify_all()

    def _end(self, at: At, *, commit: bool) -> None:
        self._broker.transactions.end(self._id, at, commit=commit)

    def _write_all(self) -> None:
        """Write what waits; the lock is held."""
        while self._waiting:
            record = self._waiting.popleft()
            try:
                error = self._write(record)
            except Exception as fenced:  # noqa: BLE001 - commit() raises it
                error = fenced
            self._lost = self._lost or error

    def _write(self, record: _InTransaction) -> Exception | None:
        """Write a record; returns why it is not written."""
        topic, broker = record.topic, self._broker
        problem = broker.data_refusal(topic, record.value, record.key, record.headers)
        if problem is not None:
            return problem
        count = broker.existing[topic].info.partitions
        partition = record.partition
        if partition is None:
            partition = self._partitioner.partition(record.key, count)
        elif not 0 <= partition < count:
            return producing.missing(topic)
        fate = broker.faults.append(self._client, topic, partition, record.value or b"")
        if fate is AppendFate.FATAL:
            self._failed = transactions.failed(self._id, "a fatal error", retry=True)
            return self._failed
        if fate is not AppendFate.LOST:
            broker.transactions.produce(
                self._id,
                self._at,
                (topic, partition),
                record.value,
                record.key,
                record.headers,
                record.timestamp_ms,
            )
        return None if fate in (AppendFate.WRITTEN, AppendFate.DUPLICATED) else producing.unacknowledged(topic, "lost")

    def _ask(self, request: str, timeout_s: float, late: Callable[[str], Exception], act: Callable[[], T]) -> T:
        """Have the broker act; late: the error if there is no answer in time."""
        broker = self._broker
        with broker.changed:
            self._check_usable()
            if broker.waits:
                broker.changed.wait_for(lambda: broker.reachable(self._client) or self._closed, timeout_s)
            self._check_usable()
            if not broker.reachable(self._client):
                raise late("no broker could be reached")
            fate = broker.faults.request(self._client, self._id, request)
            if fate is AppendFate.LOST:
                raise late("the request was lost")
            if fate is AppendFate.FATAL:
                self._failed = transactions.failed(self._id, "a fatal error", retry=True)
                raise self._failed
            answer = act()
            broker.changed.notify_all()
            if fate is AppendFate.UNACKNOWLEDGED:
                raise late("the answer was lost")
            return answer

    def _now_s(self) -> float:
        return time.monotonic()

    def _left_s(self, deadline: float) -> float:
        return max(0.0, deadline - self._now_s())

    def _check_usable(self) -> None:
        if self._closed:
            raise transactions.closed()
        if self._failed is not None:
            raise self._failed

    def _check_in_transaction(self) -> None:
        self._check_usable()
        if not self._is_open or self._in_doubt:
            raise transactions.not_in_order(self._id, "no transaction is open")
