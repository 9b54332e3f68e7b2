"""The metrics of a Marshal at one moment (:meth:`Marshal.metrics`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kafka_marshal.engine.figures import Distribution

__all__ = [
    "CheckpointMetrics",
    "Distribution",
    "Failures",
    "Measured",
    "MessageCounts",
    "Metrics",
    "OutcomeCount",
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
    #: Its last known log end; None: not known.
    log_end: int | None
    #: Offsets below the log's end that are not done; None: not known yet.
    lag: int | None
    #: The age of the next undone message, by its timestamp; 0.0: there is none; None: not known.
    lag_seconds: float | None
    #: Messages in flight: delivered and not done.
    in_hand: int
    #: Messages fetched and not delivered.
    buffered: int
    #: How long its lease is still proven; 0.0: it is in doubt.
    lease_remaining_seconds: float
    #: Its progress waits for one message (``health().held_back``).
    held_back: bool
    #: Messages that are set aside, that wait for their next try, and that are in a worker's batch (any member's).
    parked: int = 0
    waiting: int = 0
    acquired: int = 0
    #: Others may share it with this member.
    shared: bool = False
    #: The part of its work that is of one key which takes more than half of what a handler can do; None: no key does.
    hot_key_share: float | None = None


@dataclass(frozen=True, slots=True)
class MessageCounts:
    """Messages of a partition since this Marshal was created, held now or not."""

    topic: str
    partition: int
    #: Messages fetched from Kafka.
    consumed: int
    #: Messages done; at most once: delivered.
    processed: int


@dataclass(frozen=True, slots=True)
class RecordCount:
    """Records of the coordination log that this replica has applied since it caught up."""

    #: The record's type; "": it is not known.
    type: str
    #: Its outcome: ``"OK"``, ``"HELD"`` …
    outcome: str
    count: int


@dataclass(frozen=True, slots=True)
class TopicCount:
    """A count for a topic."""

    topic: str
    count: int


@dataclass(frozen=True, slots=True)
class OutcomeCount:
    """Transactions that ended in a way."""

    #: ``"committed"``, ``"aborted"``, ``"fenced"``, or ``"unknown"``: the brokers have not answered.
    outcome: str
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
    """The durations of handlers of ``run``, if it has the hooks ``marshal.timing()``."""

    topic: str
    #: The exception's class; "": the handler returned.
    error: str
    seconds: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMetrics:
    """The checkpoints of a member whose group takes some. Counters begin with the consumer."""

    #: ("complete", "without_some": a member, or one of our pieces, was missing, or "ended") → barriers closed so.
    outcomes: tuple[tuple[str, int], ...]
    #: Since the newest was complete, by log time; None: it is not known yet.
    age_seconds: float | None
    #: Since the oldest state of our pieces that a checkpoint has was cut, or restored; None: there is none.
    oldest_cut_seconds: float | None
    #: From a piece's cut until its state was safe.
    save_seconds: Distribution
    #: ("joined", "handed_over", "lost", "rollback", "positions") → pieces that were restored.
    restores: tuple[tuple[str, int], ...]
    #: How long on_restore took.
    restore_seconds: Distribution
    #: From a barrier's first sight to the last cut: of the last one, and the longest.
    drain_seconds: float
    drain_seconds_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """A Marshal at one moment. Counters only grow during its life."""

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
    #: How long the one that ends first is still proven; None: none is held.
    lease_remaining_seconds: float | None
    #: Members of the group in the log: of a coordinated group all, else those that hold a lease.
    members: int
    #: The group is paused.
    paused: bool
    #: From sending a claim to its outcome in the log, for granted claims.
    claim_seconds: Distribution
    #: How long partitions had no holder before this member's claim: since the last holder's release or heartbeat.
    handover_gap_seconds: Distribution
    records: tuple[RecordCount, ...]
    #: Records of the coordination log that this replica has not applied yet.
    log_behind_records: int
    #: Snapshots of other members that contradict this replica (``marshal.alarms``).
    replica_alarms: int
    #: Records of the coordination log, in what this member reads of it; None: not known yet.
    log_records: int | None
    #: The age of its oldest record; None: it is kept for ever, or not known yet.
    log_oldest_age_seconds: float | None
    #: This member can't remove what is older than it is kept (``health().log_not_pruned``).
    log_not_pruned: bool
    partitions: tuple[PartitionMetrics, ...]
    messages: tuple[MessageCounts, ...]
    #: Messages reported done after their lease had ended; they are repeated elsewhere (``ignored_done``).
    done_too_late: int
    #: Partitions whose progress waits for one message, and the number of their messages in flight.
    held_back: int
    held_back_messages: int
    #: Handlers of ``run`` that are running.
    handlers_running: int
    #: Partitions that are stuck though there is something to read (``health().stuck``).
    stuck: int
    #: Runs that try one message of a partition at a time, and set next to none aside, as all tries fail (U2).
    runs_failing: int
    #: Failed tries of ``run``, retried messages, and dead letters.
    failures: tuple[Failures, ...]
    retries: tuple[TopicCount, ...]
    dead_letters: tuple[TopicCount, ...]
    processing: tuple[Processing, ...]
    #: Transactions by how they ended, of each outcome that there was; and those that wait for an earlier one or a
    #: producer.
    transactions: tuple[OutcomeCount, ...]
    transactions_waiting: int
    #: From the begin of a transaction to its commit, for committed ones.
    transaction_seconds: Distribution
    #: None: this member takes no checkpoints.
    checkpoints: CheckpointMetrics | None
    #: Requests for a batch of a shared partition that the log has answered: with messages that no member had been
    #: given (``"new"``), that some had (``"again"``), or with ``"nothing"``. Messages delivered here and before.
    acquires: tuple[OutcomeCount, ...] = ()
    redelivered_messages: int = 0
    #: Messages of the group that the log shows as set aside (``"parked"``), and as freed (``"redriven"``) or given up
    #: (``"discarded"``) by an operator, since this member has read the log to its end.
    settled: tuple[OutcomeCount, ...] = ()
    #: What members of this process keep of partitions that they read together (bytes; of the process, and the same at
    #: each of them). Messages of such partitions that another one had fetched (``"hit"``), and others (``"miss"``).
    shared_read_bytes: int = 0
    shared_reads: tuple[OutcomeCount, ...] = ()

    @property
    def lag(self) -> int:
        """The known lag of all held partitions."""
        return sum(each.lag or 0 for each in self.partitions)

    @property
    def lag_seconds(self) -> float:
        """The known age of the oldest undone message in all held partitions."""
        return max((each.lag_seconds or 0.0 for each in self.partitions), default=0.0)


class Measured(Protocol):
    """A Marshal."""

    def metrics(self) -> Metrics: ...
