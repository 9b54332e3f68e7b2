"""The leases that a record or a message concerns, for the checks."""

from __future__ import annotations

from bisect import bisect_left

from kafka_marshal.engine.work.assignment import Assignment
from kafka_marshal.ports import Message
from kafka_marshal.testing.simulation.holdings import holdings
from kafka_marshal.testing.simulation.living import Living
from kafka_marshal.types import Key


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
