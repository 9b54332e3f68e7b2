"""The leases that a record or a message concerns, for the checks."""

from __future__ import annotations

from bisect import bisect_left

from kafka_marshal.engine.work.assignment import Assignment
from kafka_marshal.ports import Message
from kafka_marshal.testing.simulation.holdings import holdings
from kafka_marshal.testing.simulation.living import Living
from kafka_marshal.types import Key
from rationalizer import (
    BeatEntry,
    ClaimingMessages,
    ClaimingPartition,
    ClaimingShare,
    CommitRanges,
    Heartbeat,
    HeartbeatBatch,
    Outcome,
    Record,
    ReleasingPartition,
    SettlingMessages,
    codes,
)


def touched(record: Record, outcome: Outcome) -> list[tuple[Key, str]]:
    """The leases that an accepted record concerns, each with its outcome."""
    match record:
        case HeartbeatBatch(entries=entries):
            answers = zip(entries, outcome.entries or (), strict=True)
            return [(key_of(entry), code) for entry, code in answers if code in codes.ACCEPTED]
        case (
            Heartbeat()
            | ClaimingPartition()
            | ReleasingPartition()
            | ClaimingMessages()
            | CommitRanges()
            | ClaimingShare()
            | SettlingMessages()
        ):
            return [(key_of(record), outcome.code)]
        case _:
            return []


def key_of(
    record: Heartbeat
    | ClaimingPartition
    | ReleasingPartition
    | ClaimingMessages
    | CommitRanges
    | ClaimingShare
    | SettlingMessages
    | BeatEntry,
) -> Key:
    """The partition of a record or an entry."""
    return record.topic, record.partition


def place_of(message: Message) -> tuple[Key, int]:
    """(topic, partition), and the offset, of a message."""
    partition, offset = message.partition(), message.offset()
    return (message.topic() or "", -1 if partition is None else partition), -1 if offset is None else offset


def in_flight_of(process: Living, key: Key, message: Message) -> Assignment | None:
    """The assignment under which this message is in flight in a process."""
    for driver in process.drivers:
        for consumer in driver.engine.consumers.values():
            assignment = consumer.assignments.get(key)
            if assignment is None or assignment.over:
                continue
            for run in assignment.tracker.runs.values():
                messages = run.messages
                place = bisect_left(messages, message.offset() or 0, key=lambda x: x.offset() or 0)
                if place < len(messages) and messages[place] is message:
                    return assignment
    return None


def holds(process: Living, key: Key) -> bool:
    """Whether a process holds the lease now, by its own clock."""
    return any(
        (lease := holdings(driver).get(key)) is not None and driver.now_ms() < lease.proven_until
        for driver in process.drivers
    )


def name_of(key: Key) -> str:
    """A partition, for people."""
    return f"{key[0]} [{key[1]}]"
