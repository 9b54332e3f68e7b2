"""The broker's side of transactions in memory: who may write, what is open, and offsets that are pending.

As Kafka does it, as far as the rules of transactions lean on it: init() fences and aborts; readers (all are
read_committed) see nothing of what is open or aborted, and end at the last stable offset; each partition gets a marker,
which takes an offset; a plain commit that comes while a transaction's offset is pending wins over it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kafka_marshal.adapters import transactions
from kafka_marshal.adapters.producing import Headers
from kafka_marshal.ports import TopicPartition

#: The brokers' transaction.max.timeout.ms.
MAX_TIMEOUT_MS = 900_000

#: The epoch of a producer, and the number of its transaction.
At = tuple[int, int]

#: Of a group.
_Where = tuple[str, TopicPartition]


class _Log(Protocol):
    """A partition."""

    #: Transactional id → the first offset of its open transaction here.
    open: dict[str, int]

    def drop(self, offsets: Sequence[int]) -> None: ...


class _Logs(Protocol):
    """What transactions need of a broker."""

    clock: Callable[[], float]
    committed: dict[str, dict[TopicPartition, tuple[int, str]]]

    def log(self, topic: str, partition: int) -> _Log | None: ...

    def skip(self, topic: str, partition: int, offsets: int = 1) -> None: ...

    def produce(
        self,
        topic: str,
        partition: int,
        value: bytes | None,
        key: bytes | None = None,
        *,
        timestamp_ms: int | None = None,
        headers: Headers | None = None,
    ) -> int: ...


@dataclass(slots=True, eq=False)
class _Transaction:
    """One that is open: from its first record or offset on."""

    #: When the broker ends it (ms).
    deadline: float
    #: The offsets of its records.
    records: dict[TopicPartition, list[int]] = field(default_factory=dict)
    #: Number of the commit, offset and metadata.
    offsets: dict[_Where, tuple[int, int, str]] = field(default_factory=dict)


class Transactions:
    """All transactional ids of a broker. The broker's lock is held by callers."""

    def __init__(self, broker: _Logs) -> None:
        self._broker = broker
        #: transactional id → epoch of the producer that may use it, and its timeout (ms).
        self._epochs: dict[str, int] = {}
        self._timeouts: dict[str, int] = {}
        self._open: dict[str, _Transaction] = {}
        #: The last one that was ended by its producer, and whether it was committed.
        self._ended: dict[str, tuple[At, bool]] = {}
        #: Commits by the order of their arrival: the latest wins, whenever its transaction ends.
        self._numbers = itertools.count(1)
        self._latest: dict[_Where, int] = {}
        #: Committed, and not shown yet: brokers do that a little after their answer. Until then it counts as pending.
        self._unsettled: list[_Transaction] = []
        #: Calls the function when that is.
        self.settle: Callable[[Callable[[], None]], None] = lambda apply: apply()
        #: Called with each partition whose end for readers may have changed.
        self.on_end: Callable[[TopicPartition], None] = lambda _: None

    def init(self, transactional_id: str, timeout_ms: int) -> int:
        """Fence the producer before, and abort its transaction; returns the new one's epoch."""
        if timeout_ms > MAX_TIMEOUT_MS:
            raise transactions.timeout_too_high(timeout_ms)
        self._end(transactional_id, commit=False)
        self._timeouts[transactional_id] = timeout_ms
        epoch = self._epochs[transactional_id] = self._epochs.get(transactional_id, -1) + 1
        return epoch

    def produce(
        self,
        transactional_id: str,
        at: At,
        key: TopicPartition,
        value: bytes | None,
        record_key: bytes | None,
        headers: Headers,
        timestamp_ms: int,
    ) -> None:
        """Write a record that no reader sees yet."""
        transaction = self._transaction(transactional_id, at)
        offset = self._broker.produce(*key, value, record_key, timestamp_ms=timestamp_ms, headers=headers or None)
        transaction.records.setdefault(key, []).append(offset)
        log = self._broker.log(*key)
        if log is not None:
            log.open.setdefault(transactional_id, offset)

    def send_offset(
        self, transactional_id: str, at: At, group_id: str, key: TopicPartition, offset: int, metadata: str
    ) -> None:
        """An offset that is pending until the transaction ends."""
        found = next(self._numbers), offset, metadata
        self._transaction(transactional_id, at).offsets[group_id, key] = found

    def end(self, transactional_id: str, at: At, *, commit: bool) -> None:
        """Commit or abort it. A request that comes again has the same answer."""
        self._check(transactional_id, at)
        if self._ended.get(transactional_id) == (at, commit):
            return
        self._check_open(transactional_id, at)
        self._end(transactional_id, commit=commit)
        self._ended[transactional_id] = at, commit

    def commit_plainly(self, group_id: str, offsets: Mapping[TopicPartition, tuple[int, str]]) -> None:
        """Offsets outside of transactions."""
        for key, found in offsets.items():
            self._latest[group_id, key] = next(self._numbers)
            self._broker.committed.setdefault(group_id, {})[key] = found

    def is_pending(self, group_id: str, key: TopicPartition) -> bool:
        """Whether an open transaction has sent an offset of it."""
        self.expire()
        return any((group_id, key) in each.offsets for each in (*self._open.values(), *self._unsettled))

    def expire(self) -> None:
        """End what is open for too long; its producer is fenced."""
        now = self._broker.clock()
        for transactional_id in [name for name, each in self._open.items() if each.deadline <= now]:
            self._end(transactional_id, commit=False)
            self._epochs[transactional_id] += 1

    def _check(self, transactional_id: str, at: At) -> None:
        self.expire()
        if self._epochs[transactional_id] != at[0]:
            raise transactions.fenced(transactional_id, "there is a newer producer with the same transactional id")

    def _check_open(self, transactional_id: str, at: At) -> None:
        """Refuse requests that are late: their transaction has ended."""
        if (ended := self._ended.get(transactional_id)) is not None and at <= ended[0]:
            raise transactions.failed(transactional_id, "the transaction has ended", retry=True)

    def _transaction(self, transactional_id: str, at: At) -> _Transaction:
        self._check(transactional_id, at)
        self._check_open(transactional_id, at)
        if transactional_id not in self._open:
            deadline = self._broker.clock() + self._timeouts[transactional_id]
            self._open[transactional_id] = _Transaction(deadline)
        return self._open[transactional_id]

    def _end(self, transactional_id: str, *, commit: bool) -> None:
        transaction = self._open.pop(transactional_id, None)
        if transaction is None:
            return
        for key, offsets in transaction.records.items():
            log = self._broker.log(*key)
            if log is None or log.open.pop(transactional_id, None) is None:
                continue  # deleted meanwhile
            if not commit:
                log.drop(offsets)
            self._broker.skip(*key)  # the marker
            self.on_end(key)
        if commit and transaction.offsets:
            self._unsettled.append(transaction)
            self.settle(partial(self._show, transaction))

    def _show(self, transaction: _Transaction) -> None:
        """Show the offsets of a committed transaction."""
        self._unsettled.remove(transaction)
        for (group_id, key), (number, offset, metadata) in transaction.offsets.items():
            if number > self._latest.get((group_id, key), 0):
                self._latest[group_id, key] = number
                self._broker.committed.setdefault(group_id, {})[key] = offset, metadata
