"""Fail points: kill -9 at a numbered step of a claim, at least once (C14) or at most once (C13).

The client does not know them. Its traffic with Kafka passes through a :class:`~kafka_marshal.ports.Cluster`; in a
process that is to die, :func:`dying` wraps the real one to check each record::

    with dying("localhost:9092", Doom("grant", FailPoint.READ, 3)):
        work(Marshal("localhost:9092", …))     # ends when it has read but not applied its third ClaimingMessages

Five moments of each of its records: before the append, appended (librdkafka has it, the broker may not), acknowledged,
read back (our replica has not applied it), applied (without effects yet). Three of each call of a transactional
producer: before it, while the broker works on it, and when the broker has answered but the caller does not know yet.
Steps that are neither (a message in flight, its handling, done) are reported by the worker: ``doom.at("handled")``.
A process may also stop itself there (SIGSTOP), so that it continues after others have taken its work.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kafka_marshal.adapters.opening import announced
from kafka_marshal.node.log_keeper import PassThrough
from kafka_marshal.ports import (
    Ack,
    Appender,
    Cluster,
    DataFault,
    DataReader,
    Message,
    Tail,
    TailBatch,
    TopicPartition,
    TransactionalProducer,
)
from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    CommitOffsets,
    CommitRanges,
    GroupHeartbeat,
    Heartbeat,
    HeartbeatBatch,
    JoinGroup,
    LeaveGroup,
    Record,
    RejectedValueError,
    ReleasingPartition,
    SettleOffsets,
    SettlingMessages,
    decode,
)
from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.wire.wellformed import LET_GO


class FailPoint(StrEnum):
    """Moments of a record of this process."""

    BEFORE = "before append"
    APPENDED = "appended"
    ACKNOWLEDGED = "acknowledged"
    READ = "read"
    APPLIED = "applied"


class CallMoment(StrEnum):
    """Moments of a call of a transactional producer."""

    BEFORE = "before call"
    #: Within ``linger_s`` after it began.
    DURING = "during call"
    RETURNED = "returned"


#: Steps that are records, in order. "mark": Kafka's offset counts from here on.
RECORD_STEPS = ("claim", "takeover", "grant", "beat", "release", "mark")

#: Steps that are calls of a transactional producer, and the look-up of the offset that Kafka has.
CALL_STEPS = ("init", "committed", "begin", "send", "commit", "abort")

#: Steps of a member that prunes the log: it asks for its rights, opens a tail for what is to go, and cuts.
PRUNE_STEPS = ("rights", "replay", "cut log", "cut snapshots")

#: Steps between records, reported by the worker (``fetched``: by its data reader).
BY_HAND = ("assigned", "fetched", "handed out", "handling", "handled", "done")

#: Steps at which each kind of worker can die, in order.
_STEPS: Mapping[str, tuple[str, ...]] = {
    "at least once": ("claim", "takeover", *BY_HAND, "beat", "release"),
    "at most once": ("claim", "takeover", "assigned", "fetched", "grant", "beat", *BY_HAND[2:5], "release"),
    "by hand": ("claim", "grant", *BY_HAND[2:5], "beat", "release"),
    "transactions": ("claim", "takeover", *CALL_STEPS, "mark", "assigned", *BY_HAND[2:5], "beat", "release"),
}

#: The range by which a log says that Kafka's offset counts.
_MARK = 2**63 - 1


def points_of(delivery: str) -> list[str]:
    """The fail points of one kind of worker, by name: ``"at least once 07: handling"``, in their order."""
    return [name for name, kind, _, _ in _points() if kind == delivery]


def _moments(step: str) -> tuple[FailPoint | CallMoment | None, ...]:
    if step in CALL_STEPS:
        return tuple(CallMoment)
    return tuple(FailPoint) if step in RECORD_STEPS else (None,)


def _points() -> Iterator[tuple[str, str, str, FailPoint | CallMoment | None]]:
    for delivery, steps in _STEPS.items():
        number = 0
        for step in steps:
            for moment in _moments(step):
                number += 1
                what = step if moment is None else f"{step} {moment}"
                yield f"{delivery} {number:02}: {what}", delivery, step, moment


#: name → (step, moment; None for a step that is no record).
POINTS: Mapping[str, tuple[str, FailPoint | CallMoment | None]] = {
    name: (step, moment) for name, _, step, moment in _points()
}


def step_of(record: Record) -> str:
    """The step of a record of this process; "idle beat" and "other" are not fail points."""
    match record:
        case ClaimingPartition() | JoinGroup():
            return "claim"
        case Heartbeat(epoch=None):
            return "takeover"
        case ClaimingMessages():
            return "grant"
        case ReleasingPartition() | LeaveGroup():
            return "release"
        case SettlingMessages() | SettleOffsets():
            return "settle"
        case CommitRanges(ranges=ranges) if _is_mark(ranges):
            return "mark"
        case CommitOffsets(entries=entries) if any(_is_mark(entry.ranges) for entry in entries):
            return "mark"
        case CommitOffsets(entries=entries):
            return "release" if any(entry.action == LET_GO for entry in entries) else "beat"
        case Heartbeat(last_offset=None) | GroupHeartbeat():
            return "idle beat"
        case HeartbeatBatch(entries=entries) if all(entry.last_offset is None for entry in entries):
            return "idle beat"
        case Heartbeat() | HeartbeatBatch() | CommitRanges():
            return "beat"
        case _:
            return "other"


def _is_mark(ranges: Sequence[tuple[int, int]]) -> bool:
    return bool(ranges) and ranges[-1][1] == _MARK


#: Called before each append with (CP, step, value).
Sent = Callable[[int, str, bytes], None]


@dataclass(slots=True)
class Doom:
    """The step, and its occurrence, at which this process kills itself with -9."""

    step: str
    moment: FailPoint | CallMoment | None = None
    times: int = 1
    #: Called just before.
    last_words: Callable[[], object] | None = None
    #: Between records: how long the worker waits (s) before it dies, while heartbeats continue. During a call: how long
    #: after its beginning.
    linger_s: float = 0.0
    #: SIGSTOP: it stops there, and continues with the step when it gets SIGCONT.
    by: signal.Signals = signal.SIGKILL

    def at(self, step: str, moment: FailPoint | CallMoment | None = None) -> None:
        """The process has reached this step: kill it there if it is the chosen one."""
        if step == self.step and moment is self.moment:
            self.times -= 1
            if self.times == 0:
                if moment is CallMoment.DURING:
                    threading.Timer(self.linger_s, self._end).start()
                    return
                if moment is None:
                    time.sleep(self.linger_s)
                self._end()

    def _end(self) -> None:
        if self.last_words is not None:
            self.last_words()
        os.kill(os.getpid(), self.by)
        if self.by == signal.SIGKILL:
            signal.pause()  # the signal is pending: take no further step


@contextmanager
def dying(bootstrap_servers: str, doom: Doom | None, sent: Sent | None = None) -> Iterator[None]:
    """Inside the block, a Marshal with exactly these bootstrap servers is killed at this point (None: never).

    sent: called with every record before it is appended.
    """

    def opener(config: Mapping[str, object]) -> Cluster:
        from kafka_marshal.adapters.kafka import KafkaCluster

        return _Cluster(KafkaCluster(bootstrap_servers, config), doom or Doom("never"), sent)

    with announced(bootstrap_servers, opener):
        yield


class _Cluster(PassThrough):
    def __init__(self, real: Cluster, doom: Doom, sent: Sent | None) -> None:
        super().__init__(real)
        self._doom = doom
        self._sent = sent
        #: Values of the chosen step that were appended and not read back yet.
        self._own: set[bytes] = set()

    def appender(self, topic: str, *, delivery_timeout_ms: int) -> Appender:
        real = self._real.appender(topic, delivery_timeout_ms=delivery_timeout_ms)
        return _Appender(real, self._doom, self._own, self._sent)

    def tail(self, topic: str, positions: Mapping[int, int]) -> Tail:
        if threading.current_thread().name == "kafka-marshal-prune":
            with _call(self._doom, "replay"):
                pruning: Tail = self._real.tail(topic, positions)
            return pruning
        return _Tail(self._real.tail(topic, positions), self._doom, self._own)

    def operations(self, topic: str, timeout_s: float) -> frozenset[str] | None:
        with _call(self._doom, "rights"):
            found: frozenset[str] | None = self._real.operations(topic, timeout_s)
        return found

    def delete_records(self, before: Mapping[TopicPartition, int], timeout_s: float) -> dict[TopicPartition, int]:
        is_log = all(not topic.endswith("_snapshots") for topic, _ in before)
        with _call(self._doom, "cut log" if is_log else "cut snapshots"):
            found: dict[TopicPartition, int] = self._real.delete_records(before, timeout_s)
        return found

    def data_reader(self, group_id: str, config: Mapping[str, object]) -> DataReader:
        return _DataReader(self._real.data_reader(group_id, config), self._doom)

    def transactional_producer(
        self, transactional_id: str, config: Mapping[str, object], *, transaction_timeout_ms: int
    ) -> TransactionalProducer:
        real = self._real.transactional_producer(
            transactional_id, config, transaction_timeout_ms=transaction_timeout_ms
        )
        return _TransactionalProducer(real, self._doom)

    def committed_offset(self, group_id: str, key: TopicPartition, timeout_s: float) -> tuple[int, str] | None:
        with _call(self._doom, "committed"):
            found: tuple[int, str] | None = self._real.committed_offset(group_id, key, timeout_s)
        return found


@contextmanager
def _call(doom: Doom, step: str) -> Iterator[None]:
    doom.at(step, CallMoment.BEFORE)
    doom.at(step, CallMoment.DURING)
    yield
    doom.at(step, CallMoment.RETURNED)


class _TransactionalProducer(PassThrough):
    def __init__(self, real: TransactionalProducer, doom: Doom) -> None:
        super().__init__(real)
        self._doom = doom

    def __getattr__(self, name: str) -> Any:
        real = super().__getattr__(name)
        if name not in CALL_STEPS:
            return real

        def call(*args: Any, **options: Any) -> Any:
            with _call(self._doom, name):
                return real(*args, **options)

        return call


class _Appender(PassThrough):
    def __init__(self, real: Appender, doom: Doom, own: set[bytes], sent: Sent | None) -> None:
        super().__init__(real)
        self._doom = doom
        self._own = own
        self._sent = sent

    def append(self, partition: int, value: bytes, on_ack: Callable[[Ack], None] | None = None) -> None:
        try:
            step = step_of(decode(value, SUPPORTED_LEVEL))
        except RejectedValueError:  # a snapshot, in another topic
            self._real.append(partition, value, on_ack)
            return
        if self._sent is not None:
            self._sent(partition, step, value)
        if step != self._doom.step:
            self._real.append(partition, value, on_ack)
            return
        self._doom.at(step, FailPoint.BEFORE)
        self._own.add(value)

        def answered(ack: Ack) -> None:
            if ack.error is None:
                self._doom.at(step, FailPoint.ACKNOWLEDGED)
            if on_ack is not None:
                on_ack(ack)

        self._real.append(partition, value, answered)
        self._doom.at(step, FailPoint.APPENDED)


class _Tail(PassThrough):
    def __init__(self, real: Tail, doom: Doom, own: set[bytes]) -> None:
        super().__init__(real)
        self._doom = doom
        self._own = own
        self._applied = 0

    def read(self, timeout_s: float) -> TailBatch:
        # A reader has applied earlier records before it reads again.
        for _ in range(self._applied):
            self._doom.at(self._doom.step, FailPoint.APPLIED)
        self._applied = 0
        batch: TailBatch = self._real.read(timeout_s)
        if self._own:
            for entries in batch.records.values():
                for _, _, value in entries:
                    if value in self._own:
                        self._applied += 1
                        self._doom.at(self._doom.step, FailPoint.READ)
        return batch


class _DataReader(PassThrough):
    def __init__(self, real: DataReader, doom: Doom) -> None:
        super().__init__(real)
        self._doom = doom

    def read(self, max_messages: int, timeout_s: float) -> tuple[list[Message], list[DataFault]]:
        found: tuple[list[Message], list[DataFault]] = self._real.read(max_messages, timeout_s)
        if found[0]:
            self._doom.at("fetched")
        return found
