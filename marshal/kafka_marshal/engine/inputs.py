"""The inputs of an engine: all pass through :meth:`Engine.take`, one at a time, under the lock.

So the run of an engine is a function of its inputs, of the records of the coordination topic, and of what it reads from
user threads (:mod:`.readings`). :mod:`.recording` writes these down; a replay feeds them in again. Objects in
inputs are the engine's own: an earlier ``take`` returned them. Times are by our own clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kafka_marshal.engine.claims.manual import ManualLease
from kafka_marshal.engine.consumer_inputs import ConsumerInput
from kafka_marshal.engine.effects import Call, LookUp
from kafka_marshal.engine.settings import ConsumerSettings
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.ports import TopicInfo
from kafka_marshal.types import Key
from rationalizer import Outcome, Record

# The log, the brokers, time.


class CaughtUp(NamedTuple):
    """The replica has reached the log's end (C15). Given again when it reads other CPs: a member's home, or all."""


class Applied(NamedTuple):
    """The replica applied one record."""

    cp: int
    offset: int
    outcome: Outcome


class CompareClocks(NamedTuple):
    """Some of the records fetched together are applied: compare the log's clock with ours (T5)."""


class Acked(NamedTuple):
    """The broker answered an append: its offset, or None if it failed or the broker gave none."""

    token: int
    offset: int | None


class Topics(NamedTuple):
    """The topics that the cluster has now."""

    topics: Mapping[str, TopicInfo]


class TopicIdsPromised(NamedTuple):
    """``Topics`` with ids comes soon, as ``TopicIds.wanted`` asks."""


class Located(NamedTuple):
    """The leader returned a log's start and end, and the start offset asked for."""

    asked: LookUp
    low: int
    high: int
    start: int


class Called(NamedTuple):
    """A callback of the user has returned (or raised)."""

    call: Call


class Step(NamedTuple):
    """Time has passed: do everything that is due."""


class Deadline(NamedTuple):
    """Returns the latest time (own clock, ms) of the next ``Step``."""


class AppendRecord(NamedTuple):
    """Append a record for an admin. Returns its token."""

    cp: int
    record: Record


# The start and the end.


class AddConsumer(NamedTuple):
    """A new consumer; it claims once it has ``Topics``. Returns its engine."""

    subscription: Subscription
    settings: ConsumerSettings


class RaiseError(NamedTuple):
    """The next call of a user of this consumer (None: of each) raises this, once."""

    error: Exception
    consumer: int | None = None


class Failed(NamedTuple):
    """End for good: every lease is over, nothing more is sent."""

    error: Exception


class Forked(NamedTuple):
    """This process is a forked child: it holds no lease; all belong to the parent."""


class ReleaseUnseen(NamedTuple):
    """Before the end: release what the log may grant after it. Returns whether anything was sent."""


class LastHeartbeats(NamedTuple):
    """Before an end without a release (for a fast restart, C7): send heartbeats once more, with what is done."""


# Leases claimed by hand.


class ClaimLease(NamedTuple):
    """Claim a lease by hand. Returns its ``ManualLease``."""

    key: Key


class BeatLease(NamedTuple):
    """Send a heartbeat with an offset (C14). Returns an ``Answer``."""

    lease: ManualLease
    last_offset: int | None


class GrantLease(NamedTuple):
    """Send a ClaimingMessages up to last_offset (C12). Returns an ``Answer``."""

    lease: ManualLease
    last_offset: int


class CommitLease(NamedTuple):
    """Send a CommitRanges (P3); an admin restores old progress with it (C11)."""

    lease: ManualLease
    ranges: tuple[tuple[int, int], ...]


class ReleaseLease(NamedTuple):
    """Release it, or stop waiting for its grant. bare: without an offset, even if a release with one is in flight."""

    lease: ManualLease
    last_offset: int | None = None
    bare: bool = False


MemberInput = (
    CaughtUp
    | Applied
    | CompareClocks
    | Acked
    | Topics
    | TopicIdsPromised
    | Located
    | Called
    | Step
    | Deadline
    | AppendRecord
    | AddConsumer
    | RaiseError
    | Failed
    | Forked
    | ReleaseUnseen
    | LastHeartbeats
    | ClaimLease
    | BeatLease
    | GrantLease
    | CommitLease
    | ReleaseLease
)
Input = MemberInput | ConsumerInput
