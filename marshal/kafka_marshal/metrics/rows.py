"""What can be measured of a Marshal at one moment (:meth:`Marshal.metrics`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kafka_marshal.engine.figures import Distribution

__all__ = [
    "Distribution",
    "Failures",
    "MessageCounts",
    "Metrics",
    "PartitionMetrics",
    "Processing",
    "RecordCount",
    "TopicCount",
]


class PartitionMetrics(NamedTuple):
    """A partition that this member holds."""

    topic: str
    partition: int
    #: Everything below this offset is done; −1: its start is not known yet.
    offset: int
    #: Where its log ends, as far as the reader has heard; None: it has not.
    log_end: int | None
    #: Offsets below the log's end that are not done; None: not known yet.
    lag: int | None
    #: The age of the next message that is not done, by its timestamp; 0.0: there is none; None: not known.
    lag_seconds: float | None
    #: Messages that were handed out and are not done.
    in_hand: int
    #: Messages that were fetched and not handed out.
    buffered: int
    #: How long its lease is proven still; 0.0: it is in doubt.
    lease_remaining_seconds: float
    #: Its progress waits for one message (``health().held_back``).
    held_back: bool


@dataclass(frozen=True, slots=True)
class MessageCounts:
    """Messages of a partition since this Marshal was made, whether or not it holds the partition now."""

    topic: str
    partition: int
    #: Messages fetched from Kafka.
    consumed: int
    #: Messages done; at most once: handed out.
    processed: int


@dataclass(frozen=True, slots=True)
class RecordCount:
    """Records of the coordination log that this replica has applied since it caught up."""

    #: The record's type; "": it is not known.
    type: str
    #: What became of it: ``"OK"``, ``"HELD"`` …
    outcome: str
    count: int


@dataclass(frozen=True, slots=True)
class TopicCount:
    """Something counted for a topic."""

    topic: str
    count: int


@dataclass(frozen=True, slots=True)
class Failures:
    """Tries of ``run`` that raised."""

    topic: str
    #: The exception's class.
    error: str
    count: int


@dataclass(frozen=True, slots=True)
class Processing:
    """How long handlers of ``run`` took, where it was given ``marshal.timing()``."""

    topic: str
    #: The exception's class; "": the handler returned.
    error: str
    seconds: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """A Marshal at one moment. Counters only grow, for as long as the Marshal lives."""

    group_id: str
    client_id: str
    #: The log is read to its end, and heartbeats go out: ``health().ready``.
    ready: bool
    #: Only a new process helps: ``health().needs_restart``.
    needs_restart: bool
    #: Since the background thread's last turn.
    turned_ago_seconds: float
    #: Leases held, or pieces of a coordinated group.
    leases: int
    #: How long the one that ends first is proven still; None: none is held.
    lease_remaining_seconds: float | None
    #: Members of the group, as the log shows them: of a coordinated group all, else those that hold a lease.
    members: int
    #: The group is paused.
    paused: bool
    #: From the sending of a claim until the log's answer, for claims that were granted.
    claim_seconds: Distribution
    #: For how long nobody was at work on a partition, until this member's claim was granted: since the last holder's
    #: release, or its last heartbeat.
    handover_gap_seconds: Distribution
    records: tuple[RecordCount, ...]
    #: Records of the coordination log that this replica has not applied yet.
    log_behind_records: int
    #: Snapshots of others that contradict this replica (``marshal.alarms``).
    replica_alarms: int
    partitions: tuple[PartitionMetrics, ...]
    messages: tuple[MessageCounts, ...]
    #: Messages said to be done after their lease had ended; they come again elsewhere (``ignored_done``).
    done_too_late: int
    #: Partitions whose progress waits for one message, and how many of their messages are in hand.
    held_back: int
    parked_messages: int
    #: Handlers of ``run`` that have a message now.
    handlers_running: int
    #: Tries of ``run`` that failed, messages that are tried again, and those that have become dead letters.
    failures: tuple[Failures, ...]
    retries: tuple[TopicCount, ...]
    dead_letters: tuple[TopicCount, ...]
    processing: tuple[Processing, ...]

    @property
    def lag(self) -> int:
        """Offsets not done, of all partitions held, as far as known."""
        return sum(each.lag or 0 for each in self.partitions)

    @property
    def lag_seconds(self) -> float:
        """The age of the oldest message not done, of all partitions held, as far as known."""
        return max((each.lag_seconds or 0.0 for each in self.partitions), default=0.0)
