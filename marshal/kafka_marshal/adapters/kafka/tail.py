"""Reads the coordination topic onwards."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, KafkaError, KafkaException, Message, TopicPartition

from kafka_marshal.adapters.kafka.errors import Troubles, fault_kind, is_of_groups
from kafka_marshal.adapters.kafka.reading import LONGEST_WAIT_S, WARM_UP_TIMEOUT_S, Pace, Reading, partition_of
from kafka_marshal.errors import ClosedError
from kafka_marshal.ports import FaultKind, LogEntry, TailBatch, TailFault

#: The most records one read returns. A batch that fits the caches is drained a quarter faster than one of 5,000: the
#: garbage collector, too, meets fewer objects that still live.
BATCH = 500


#: Commands for a tail are rare: a close(), a fault, or further partitions may have to wait this long. Records do not.
PACE = Pace(LONGEST_WAIT_S)


#: Where the logs end is noted this often (s).
ENDS_EVERY_S = 1.0


class KafkaTail:
    """A tail over a librdkafka consumer that never joins a group (L4)."""

    def __init__(self, topic: str, settings: dict[str, object], troubles: Troubles) -> None:
        """Nothing is sent before ``warm_up`` or ``begin``."""
        # librdkafka wants a group.id even though no group takes part.
        settings = {**settings, "logger": troubles, "group.id": "kafka-marshal-tail", "error_cb": troubles}
        self._reading = Reading(f"tail of {topic!r}", settings, troubles, PACE)
        self._topic = topic
        self._positions: dict[int, int] = {}
        #: Why other partitions could not be read from now on: reported by the next read.
        self._failures: list[TailFault] = []
        self._lock = threading.Lock()
        #: Where the logs end. Replaced, never changed.
        self._ends: Mapping[int, int] = {}
        self._ends_due = 0.0
        #: Whether nothing is fetched now.
        self._is_resting = False
        #: What came before a rest, for the next read.
        self._came: list[Message] = []

    def warm_up(self) -> None:
        """Begin to connect, and to look up the leaders; returns at once.

        A consumer that is connected, and then assigned a topic that it does not know, asks for its leaders only a
        second later.
        """
        self._reading.warm_up(self._warm_up)

    def _warm_up(self) -> None:
        with contextlib.suppress(KafkaException):  # no broker yet: it retries by itself
            self._reading.consumer.list_topics(self._topic, timeout=WARM_UP_TIMEOUT_S)

    def begin(self, positions: Mapping[int, int]) -> None:
        """Read these partitions, each from its offset, in librdkafka's own threads. Once, before it is read from."""
        self._positions = dict(positions)
        places = [TopicPartition(self._topic, cp, offset) for cp, offset in positions.items()]
        self._reading.use(lambda: self._reading.consumer.assign(places))

    def read(self, timeout_s: float) -> TailBatch:
        if self._is_resting:
            self._fetch_again()
        messages, self._came = self._came or self._reading.read(BATCH, timeout_s), []
        records, others = _entries(messages)
        ends: dict[int, int] = {}
        faults: list[TailFault] = []
        for message, error in others:
            if error.code() == KafkaError._PARTITION_EOF:
                ends[message.partition()] = message.offset()
            elif not is_of_groups(error):
                faults.append(TailFault(fault_kind(error), partition_of(message), error.str()))
        with self._lock:
            for left in (records.keys() | ends.keys()) - self._positions.keys():
                records.pop(left, None)
                ends.pop(left, None)
            for cp, entries in records.items():
                self._positions[cp] = entries[-1][0] + 1
            for cp, end in ends.items():
                self._positions[cp] = max(end, self._positions[cp])
            faults.extend(self._failures)
            self._failures.clear()
        faults.extend(TailFault(kind, None, text) for kind, text in self._reading.troubles.take_faults())
        if time.monotonic() >= self._ends_due:
            self._ends_due = time.monotonic() + ENDS_EVERY_S
            with contextlib.suppress(ClosedError):
                self._reading.enqueue_command(self._look_at_ends)
        return TailBatch(records, ends, faults, len(messages) >= BATCH)

    def rest(self) -> bool:
        """Fetch nothing more. What is on its way is dropped, and fetched again from where we are."""
        if not self._is_resting:
            self._came = self._came or self._reading.read(BATCH, 0)
            if self._came:
                return False
            self._is_resting = True
            places = self._places()
            self._reading.use(partial(self._steer, partial(self._reading.consumer.pause, places)))
        return True

    def _fetch_again(self) -> None:
        """End the rest, at once: a partition that is only resumed waits until its broker's thread wakes by itself."""
        self._is_resting = False
        consumer, places = self._reading.consumer, self._places()

        def resume() -> None:
            consumer.resume(places)
            for place in places:
                consumer.seek(place)

        self._reading.use(partial(self._steer, resume))

    def _places(self) -> list[TopicPartition]:
        with self._lock:
            return [TopicPartition(self._topic, cp, position) for cp, position in self._positions.items()]

    def position(self, partition: int) -> int:
        self._reading.check_open()
        with self._lock:
            return self._positions[partition]

    def _look_at_ends(self) -> None:
        ends = {}
        with self._lock:
            positions = dict(self._positions)
        for cp, position in positions.items():
            with contextlib.suppress(KafkaException):  # it never asked a broker about this partition
                _, high = self._reading.consumer.get_watermark_offsets(TopicPartition(self._topic, cp), cached=True)
                ends[cp] = max(high, position)
        self._ends = ends

    def log_ends(self) -> Mapping[int, int]:
        return self._ends

    def follow(self, positions: Mapping[int, int]) -> None:
        self._reading.enqueue_command(partial(self._follow, dict(positions)))

    def _follow(self, positions: dict[int, int]) -> None:
        with self._lock:
            self._positions.update(positions)
        places = [TopicPartition(self._topic, cp, offset) for cp, offset in positions.items()]
        self._steer(lambda: self._reading.consumer.incremental_assign(places))

    def leave(self, partitions: Iterable[int]) -> None:
        left = list(partitions)
        with self._lock:
            for cp in left:
                del self._positions[cp]
        places = [TopicPartition(self._topic, cp) for cp in left]
        self._reading.enqueue_command(lambda: self._steer(partial(self._reading.consumer.incremental_unassign, places)))

    def restart(self, positions: Mapping[int, int]) -> None:
        self._came = []
        with self._lock:
            self._positions.update(positions)
        places = [TopicPartition(self._topic, cp, offset) for cp, offset in positions.items()]
        for steer in (self._reading.consumer.incremental_unassign, self._reading.consumer.incremental_assign):
            self._reading.use(partial(self._steer, partial(steer, places)))

    def _steer(self, steer: Callable[[], object]) -> None:
        try:
            steer()
        except KafkaException as error:  # a partition that is not read would seem silent
            with self._lock:
                self._failures.append(TailFault(FaultKind.FATAL, None, f"what is read could not be changed: {error}"))

    def close(self) -> None:
        self._reading.close()


def _entries(messages: list[Any]) -> tuple[dict[int, list[LogEntry]], list[tuple[Any, KafkaError]]]:
    """Messages as log entries by partition; beside them those that stand for an error or an end.

    This runs for every record of a replay: a plain loop proved fastest (beside zip and map), 75 ns a record where
    fetching takes 440. So is it cheapest to look for errors only among messages without a stamp of the log.
    """
    records: dict[int, list[LogEntry]] = {}
    others = []
    current = None
    for message in messages:
        kind, stamp = message.timestamp()
        if kind != TIMESTAMP_LOG_APPEND_TIME:
            if (error := message.error()) is not None:
                others.append((message, error))
                continue
            stamp = -1  # T1: a stamp set by a client says nothing about log time
        partition = message.partition()
        if partition != current:  # a batch holds few runs of one partition each
            current = partition
            add = records.setdefault(partition, []).append
        add((message.offset(), stamp, message.value()))
    return records, others
