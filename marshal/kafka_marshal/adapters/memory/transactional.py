"""A transactional producer of a cluster in memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kafka_marshal.adapters import producing, transactions
from kafka_marshal.adapters.memory.appender import Partitioner
from kafka_marshal.adapters.memory.broker import MemoryBroker
from kafka_marshal.adapters.memory.faults import AppendFate
from kafka_marshal.adapters.memory.transactions import At
from kafka_marshal.adapters.producing import Headers
from kafka_marshal.ports import TopicPartition

T = TypeVar("T")


@dataclass(slots=True)
class _Record:
    """One that waits for a reachable broker."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: Headers
    timestamp_ms: int
    partition: int | None


class MemoryTransactionalProducer:
    """One transactional id. Records are written when they are sent, or as soon as the broker can be reached."""

    def __init__(self, broker: MemoryBroker, client: str, transactional_id: str, transaction_timeout_ms: int) -> None:
        self._broker = broker
        self._client = client
        self._id = transactional_id
        self._timeout_ms = transaction_timeout_ms
        self._partitioner = Partitioner()
        self._waiting: deque[_Record] = deque()
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
        self._waiting.append(_Record(topic, value, key, tuple(headers), int(self._broker.clock()), partition))
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

    def _write(self, record: _Record) -> Exception | None:
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
