"""Readers of logs in memory: the tail of the coordination topic, and the reader of data.

They behave as librdkafka does. A position outside of the log is reported once and that partition rests; a topic that is
gone is silence (look-ups report it). A topic recreated under the same name is read on by the tail, and reported by the
reader of data.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from typing import cast

from kafka_marshal.adapters.memory.broker import LOG_APPEND_TIME, MemoryBroker, MemoryMessage, PartitionLog
from kafka_marshal.errors import ClosedError
from kafka_marshal.ports import (
    DataFault,
    FaultKind,
    LogEntry,
    Message,
    TailBatch,
    TailFault,
    TopicPartition,
)
from kafka_marshal.types import T

#: The most records one read of the tail returns.
BATCH = 5_000


def entry_of(message: MemoryMessage) -> LogEntry:
    """(offset, the log's own stamp or -1, value)."""
    kind, timestamp_ms = message.timestamp()
    return message.offset(), timestamp_ms if kind == LOG_APPEND_TIME else -1, message.value()


def outside(log: PartitionLog, position: int) -> str | None:
    """Why nothing can be read from this position; None: it is in the log."""
    if log.start <= position <= log.end:
        return None
    return f"offset {position} is not in the log ({log.start} to {log.end})"


class _Reader:
    """What both have: a client that may be cut off, records that may be held back, a wait, a close."""

    def __init__(self, broker: MemoryBroker, client: str, name: str) -> None:
        self._broker = broker
        self._client = client
        self._name = name
        self._closed = False
        self._told_unreachable = False
        #: When the next record that is held back becomes visible (ms), if the last read found one.
        self._next_visible: float | None = None

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"The {self._name} was closed; nothing more is read from it. Open a new one.")

    def close(self) -> None:
        """End it; a read in another thread raises ClosedError. Idempotent."""
        with self._broker.changed:
            self._closed = True
            self._broker.changed.notify_all()

    def _visible(
        self, topic: str, partition: int, log: PartitionLog, position: int, end: int
    ) -> Iterator[MemoryMessage]:
        """The messages from position on, below end, that have reached this client; the lock is held."""
        now = self._broker.clock()
        for index in range(log.index(position), log.index(end)):
            offset = log.offsets[index]
            at = log.arrivals[index] + self._broker.faults.delay_ms(self._client, topic, partition, offset)
            if at > now:
                self._next_visible = at if self._next_visible is None else min(at, self._next_visible)
                return
            yield log.messages[index]

    def _unreachable(self) -> str | None:
        """Why nothing can be read now, once for each outage; the lock is held."""
        if self._broker.reachable(self._client):
            self._told_unreachable = False
            return None
        told, self._told_unreachable = self._told_unreachable, True
        return None if told else "all brokers are down"

    def _wait_for(self, look: Callable[[], T | None], timeout_s: float) -> T | None:
        """What look() finds, waiting for it if there is anything to wait for; the lock is held."""
        deadline, wakes = time.monotonic() + timeout_s, self._broker.wakes
        while True:
            self._check_open()
            self._next_visible = None
            found = look()
            remaining = deadline - time.monotonic()
            if found is not None or not self._broker.waits or remaining <= 0 or wakes != self._broker.wakes:
                return found
            self._broker.changed.wait(min(remaining, self._held_back_s()))

    def _held_back_s(self) -> float:
        """Seconds until a record that is held back can be seen; the lock is held."""
        if self._next_visible is None:
            return threading.TIMEOUT_MAX
        return max(0.001, (self._next_visible - self._broker.clock()) / 1000)


class MemoryTail(_Reader):
    """A tail of some partitions of one topic."""

    def __init__(self, broker: MemoryBroker, client: str, topic: str, positions: Mapping[int, int]) -> None:
        super().__init__(broker, client, f"tail of {topic!r}")
        self._topic = topic
        self._positions = dict(positions)
        #: Partitions that are read no further, since their position is outside of the log.
        self._resting: set[int] = set()
        #: The last end reported, by partition.
        self._ends: dict[int, int] = {}
        #: How often a client has opened a tail, and this one each partition again.
        self._opened = broker.tails_opened[client, topic] = broker.tails_opened[client, topic] + 1
        self._restarts: Counter[int] = Counter()

    def read(self, timeout_s: float) -> TailBatch:
        with self._broker.changed:
            return self._wait_for(self._look, timeout_s) or TailBatch()

    def rest(self) -> bool:
        return True

    def log_ends(self) -> Mapping[int, int]:
        logs = {cp: self._broker.log(self._topic, cp) for cp in list(self._positions)}
        return {cp: log.end for cp, log in logs.items() if log is not None}

    def _look(self) -> TailBatch | None:
        unreachable = self._unreachable()
        if unreachable is not None:
            return TailBatch(faults=(TailFault(FaultKind.UNREACHABLE, None, unreachable),))
        if self._told_unreachable:
            return None
        batch = TailBatch(faults=[])
        room = BATCH
        for partition in sorted(self._positions):
            log = self._broker.log(self._topic, partition)
            if log is None or partition in self._resting or room <= 0:
                continue
            if self._broker.faults.stalled(
                self._client, self._topic, partition, self._opened, self._restarts[partition]
            ):
                continue
            room -= self._look_at(partition, log, room, batch)
        return batch if batch.records or batch.ends or batch.faults else None

    def _look_at(self, partition: int, log: PartitionLog, room: int, batch: TailBatch) -> int:
        position = self._positions[partition]
        if (text := outside(log, position)) is not None:
            self._resting.add(partition)
            cast("list[TailFault]", batch.faults).append(TailFault(FaultKind.OUT_OF_RANGE, partition, text))
            return 0
        entries: list[LogEntry] = []
        for message in self._visible(self._topic, partition, log, position, log.end):
            if len(entries) == room:
                break
            entries.append(entry_of(message))
        if entries:
            batch.records[partition] = entries
            position = entries[-1][0] + 1
        if log.index(position) == len(log.messages):
            position = log.end  # also past offsets that no client gets
            if self._ends.get(partition) != position:
                self._ends[partition] = batch.ends[partition] = position
        self._positions[partition] = position
        return len(entries)

    def follow(self, positions: Mapping[int, int]) -> None:
        with self._broker.changed:
            self._check_open()
            self._positions.update(positions)
            self._broker.changed.notify_all()

    def leave(self, partitions: Iterable[int]) -> None:
        with self._broker.changed:
            self._check_open()
            for partition in partitions:
                del self._positions[partition]
                self._resting.discard(partition)
                self._ends.pop(partition, None)

    def restart(self, positions: Mapping[int, int]) -> None:
        with self._broker.changed:
            self._check_open()
            self._positions.update(positions)
            self._resting.difference_update(positions)
            self._restarts.update(positions.keys())


class MemoryDataReader(_Reader):
    """A reader of partitions of any topics."""

    def __init__(self, broker: MemoryBroker, client: str) -> None:
        super().__init__(broker, client, "data reader")
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        #: The topic of each partition: reported if it is recreated, and read no further.
        self._ids: dict[TopicPartition, str] = {}
        self._resting: set[TopicPartition] = set()
        self._marks: dict[TopicPartition, int] = {}
        self._ends: dict[TopicPartition, int] = {}
        #: How often this client has opened a reader of messages, and this one was assigned each partition.
        self._opened = broker.tails_opened[client, ""] = broker.tails_opened[client, ""] + 1
        self._assigns: Counter[TopicPartition] = Counter()
        #: The partition that comes first in the next read, so that none is starved.
        self._turn = 0

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        with self._broker.changed:
            self._check_open()
            self._forget(positions)
            self._positions.update(positions)
            self._assigns.update(positions.keys())
            self._broker.changed.notify_all()

    def expect(self, positions: Mapping[TopicPartition, int]) -> None:
        """There is nothing to gain here."""

    def unassign(self, partitions: Iterable[TopicPartition]) -> None:
        with self._broker.changed:
            self._check_open()
            self._forget(partitions)

    def _forget(self, partitions: Iterable[TopicPartition]) -> None:
        for key in partitions:
            self._positions.pop(key, None)
            self._marks.pop(key, None)
            self._ends.pop(key, None)
            self._paused.discard(key)
            self._resting.discard(key)
            self._ids.pop(key, None)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        with self._broker.changed:
            self._check_open()
            self._paused.update(key for key in partitions if key in self._positions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        with self._broker.changed:
            self._check_open()
            self._paused.difference_update(partitions)
            self._broker.changed.notify_all()

    def read(self, max_messages: int, timeout_s: float) -> tuple[list[Message], list[DataFault]]:
        with self._broker.changed:
            return self._wait_for(lambda: self._look(max_messages), timeout_s) or ([], [])

    def _look(self, max_messages: int) -> tuple[list[Message], list[DataFault]] | None:
        unreachable = self._unreachable()
        if unreachable is not None:
            return [], [DataFault(FaultKind.UNREACHABLE, None, None, unreachable)]
        if self._told_unreachable:
            return None
        self._broker.transactions.expire()
        messages: list[Message] = []
        faults: list[DataFault] = []
        keys = sorted(self._positions)
        self._turn = (self._turn + 1) % max(1, len(keys))
        for key in keys[self._turn :] + keys[: self._turn]:
            log = self._broker.log(*key)
            if log is None or key in self._resting or key in self._paused or len(messages) >= max_messages:
                continue
            if self._broker.faults.stalled(self._client, *key, self._opened, self._assigns[key] - 1):
                continue
            topic_id = self._broker.existing[key[0]].info.topic_id
            if self._ids.setdefault(key, topic_id) != topic_id:
                if (fault := DataFault(FaultKind.RECREATED, key[0], None, topic_id)) not in faults:
                    faults.append(fault)
                self._resting.add(key)
                continue
            position = self._positions[key]
            if (text := outside(log, position)) is not None:
                self._resting.add(key)
                faults.append(DataFault(FaultKind.OUT_OF_RANGE, *key, text))
                continue
            self._marks[key] = log.end
            end = log.stable_end
            for message in self._visible(*key, log, position, end):
                if len(messages) >= max_messages:
                    break
                messages.append(copy(message))  # a new object, as librdkafka makes it
                self._positions[key] = message.offset() + 1
            if log.index(self._positions[key]) == log.index(end) and self._positions[key] < end:
                self._positions[key] = self._ends[key] = end  # past offsets that no client gets
        return (messages, faults) if messages or faults or self._ends else None

    def take_ends(self) -> dict[TopicPartition, int]:
        with self._broker.changed:
            ends, self._ends = self._ends, {}
            return ends

    def partition_counts(self, topics: Iterable[str], timeout_s: float) -> dict[str, int]:
        with self._broker.changed:
            existing = self._broker.existing if self._broker.reachable(self._client) else {}
            return {name: existing[name].info.partitions for name in topics if name in existing}

    def high_watermark(self, topic: str, partition: int) -> int | None:
        with self._broker.changed:
            self._check_open()
            return self._marks.get((topic, partition))

    def look_at_ends(self) -> None:
        with self._broker.changed:
            self._check_open()
            if self._broker.reachable(self._client):
                logs = {key: self._broker.log(*key) for key in self._positions}
                self._marks.update({key: log.end for key, log in logs.items() if log is not None})
