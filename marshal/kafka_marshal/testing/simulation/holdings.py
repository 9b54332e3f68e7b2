"""For the checks: the leases, or pieces of a coordinated group, that a process holds, and what of it a message is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from kafka_marshal.engine.claims.keys import ShareLease
from kafka_marshal.engine.claims.leases import HeldLease
from kafka_marshal.engine.groups.client import GroupClient
from kafka_marshal.engine.groups.pieces import HeldPiece
from kafka_marshal.engine.settings import proof_margin_ms
from kafka_marshal.engine.work.assignment import Assignment
from kafka_marshal.node.driver import Driver
from kafka_marshal.ports import Message
from kafka_marshal.testing.simulation.living import Living
from kafka_marshal.types import Key

Held = HeldLease | HeldPiece


def member(driver: Driver) -> GroupClient | None:
    """The membership of a coordinated group; None if it has not joined or claims its leases."""
    for consumer in driver.engine.consumers.values():
        if isinstance(consumer.source, GroupClient):
            return consumer.source
    return None


def holdings(driver: Driver) -> Mapping[Key, HeldLease] | Mapping[Key, HeldPiece]:
    """By partition."""
    leases = driver.engine.book.leases
    found = None if leases else member(driver)
    return leases if found is None else found.pieces


def margin_ms(held: Held) -> float:
    """How much earlier than by the log a process considers it over (T4); a piece's session is two HI (G20)."""
    hi = held.heartbeat_interval_ms
    return proof_margin_ms(2 * hi if isinstance(held, HeldPiece) else hi)


def longest_trust_ms(held: Held) -> float:
    """How long, by its own clock, a process may trust it after it sent its last accepted heartbeat."""
    return 2 * held.heartbeat_interval_ms - margin_ms(held)


def last_proof(driver: Driver, held: Held) -> tuple[float, int]:
    """When the last accepted heartbeat was sent (own clock, ms), and its log time."""
    if isinstance(held, HeldLease):
        return held.proof.sent_at, held.proof.log_time
    found = member(driver)
    assert found is not None
    last = found.member.proof.last
    return last.sent_at, last.log_time


def overlap(one: Held, other: Held) -> bool:
    """Whether two of one partition have a key in common; shares by batches have none."""
    if isinstance(one, HeldPiece) and isinstance(other, HeldPiece):
        return one.span[0] <= other.span[1] and other.span[0] <= one.span[1]
    return not (isinstance(one, ShareLease) and isinstance(other, ShareLease))


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
