"""The metrics of a Marshal at one moment (:meth:`Marshal.metrics`), and the names under which they are exported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, Protocol

from kafka_marshal.engine.figures import Distribution


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
    #: Messages that wait until a time for their next try.
    later: int = 0
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
    #: ("joined", "handed_over", "lost", "rollback", "positions", "forked") → pieces that were restored.
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
    #: Messages that wait for a rate of ``run``: of each key, the first.
    rate_limited: tuple[TopicCount, ...]
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
    #: Done messages of the group that an operator opened again, since this member has read the log to its end.
    redone: int = 0
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


# -- the names, once for all exporters -------------------------------------------------------------------------
#
# Names and attributes follow OpenTelemetry's conventions for messaging, and its Kafka receiver's for lag; ours begin
# with ``kafka_marshal.``. Prometheus gets them as OpenTelemetry's specification translates names.

Kind = Literal["counter", "gauge", "histogram"]

#: Values of a metric's labels, in the order of ``Metric.labels``.
Labels = tuple[str, ...]

Value = float | Distribution

Read = Callable[[Metrics], Iterable[tuple[Labels, Value]]]

#: Unit → suffix of a Prometheus name.
_SUFFIXES = {"s": "_seconds"}

_MEMBER = ("group", "client_id")
_PLACE = ("topic", "partition")
_MESSAGING = (
    "messaging.system",
    "messaging.operation.name",
    "messaging.consumer.group.name",
    "messaging.client.id",
    "messaging.destination.name",
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name, and how to read it."""

    #: In OpenTelemetry.
    name: str
    kind: Kind
    #: "s", or the counted thing, such as "{message}".
    unit: str
    labels: tuple[str, ...]
    #: Labels and value of each series.
    read: Read
    help: str = ""

    def means(self, text: str) -> Metric:
        """The same with this help."""
        return replace(self, help=text)

    @property
    def prometheus(self) -> str:
        """Its name for Prometheus."""
        name, suffix = self.name.replace(".", "_"), _SUFFIXES.get(self.unit, "")
        name = name if suffix and suffix in name else name + suffix
        return f"{name}_total" if self.kind == "counter" and not name.endswith("_total") else name

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series in Prometheus."""
        if self.kind != "histogram":
            return (self.prometheus,)
        return tuple(f"{self.prometheus}_{part}" for part in ("bucket", "sum", "count"))


def prometheus_label(name: str) -> str:
    """A label's name for Prometheus."""
    return name.replace(".", "_")


class SeriesSource(NamedTuple):
    """The labels of a metric's series, and how to read labels and values."""

    labels: tuple[str, ...]
    read: Read


def _gauge(name: str, unit: str, source: SeriesSource) -> Metric:
    return Metric(name, "gauge", unit, *source)


def _counter(name: str, unit: str, source: SeriesSource) -> Metric:
    return Metric(name, "counter", unit, *source)


def _histogram(name: str, unit: str, source: SeriesSource) -> Metric:
    return Metric(name, "histogram", unit, *source)


def _each(labels: Labels, rows: Callable[[Metrics], Iterable[tuple[Labels, Value | None]]]) -> SeriesSource:
    """A series for each row with a known value: this member's labels, and those of the row."""

    def read(metrics: Metrics) -> list[tuple[Labels, Value]]:
        member = metrics.group_id, metrics.client_id
        return [((*member, *more), value) for more, value in rows(metrics) if value is not None]

    return SeriesSource((*_MEMBER, *labels), read)


def _member(value: Callable[[Metrics], Value | None]) -> SeriesSource:
    """One series for this member, unless the value is None."""
    return _each((), lambda metrics: [((), value(metrics))])


def _checkpoints(value: Callable[[CheckpointMetrics], Value | None]) -> SeriesSource:
    """One series for a member that takes checkpoints."""
    return _member(lambda metrics: None if metrics.checkpoints is None else value(metrics.checkpoints))


def _partition(value: Callable[[PartitionMetrics], Value | None]) -> SeriesSource:
    """A series for each held partition."""
    return _each(_PLACE, lambda metrics: [((one.topic, str(one.partition)), value(one)) for one in metrics.partitions])


def _rows(rows: Callable[[Metrics], Iterable[Any]], *labels: str) -> SeriesSource:
    """A series for each of these rows, whose last field is the value, and the others its labels."""

    def fields_of(row: Any) -> Iterable[Any]:
        return row if isinstance(row, tuple) else [getattr(row, each.name) for each in fields(row)]

    return _each(labels, lambda metrics: [(tuple(of), n) for *of, n in map(fields_of, rows(metrics))])


def _messaging(operation: str, label: str, rows: Callable[[Metrics], Iterable[tuple[Labels, Value]]]) -> SeriesSource:
    """With the attributes of OpenTelemetry's conventions."""

    def read(metrics: Metrics) -> list[tuple[Labels, Value]]:
        common = "kafka", operation, metrics.group_id, metrics.client_id
        return [((*common, *labels), value) for labels, value in rows(metrics)]

    return SeriesSource((*_MESSAGING, label), read)


_CONSUMED = _messaging(
    "poll",
    "messaging.destination.partition.id",
    lambda x: [((m.topic, str(m.partition)), m.consumed) for m in x.messages],
)
_PROCESSED = _each(_PLACE, lambda x: [((m.topic, str(m.partition)), m.processed) for m in x.messages])
_PROCESSING = _messaging("process", "error.type", lambda x: [((p.topic, p.error), p.seconds) for p in x.processing])
_OPEN = _each(
    (*_PLACE, "state"),
    lambda x: [
        ((one.topic, str(one.partition), state), amount)
        for one in x.partitions
        for state, amount in (("waiting", one.waiting), ("later", one.later), ("acquired", one.acquired))
        if amount
    ],
)
_OUTCOMES = _rows(lambda x: () if x.checkpoints is None else x.checkpoints.outcomes, "outcome")
_RESTORES = _rows(lambda x: () if x.checkpoints is None else x.checkpoints.restores, "why")
_COMMITTED = _member(lambda x: x.transaction_seconds if x.transaction_seconds.count else None)

CATALOGUE: tuple[Metric, ...] = (
    # Messages.
    _counter("messaging.client.consumed.messages", "{message}", _CONSUMED).means("Messages fetched from Kafka."),
    _counter("kafka_marshal.processed_messages", "{message}", _PROCESSED).means(
        "Messages done; at most once: delivered."
    ),
    _histogram("messaging.process.duration", "s", _PROCESSING).means(
        "How long handlers of run() take, where it was given marshal.timing()."
    ),
    _gauge("kafka_marshal.in_hand_messages", "{message}", _partition(lambda x: x.in_hand)).means(
        "Messages delivered and not done."
    ),
    _gauge("kafka_marshal.buffered_messages", "{message}", _partition(lambda x: x.buffered)).means(
        "Messages fetched and not delivered."
    ),
    _counter("kafka_marshal.done_too_late", "{message}", _member(lambda x: x.done_too_late)).means(
        "Messages said to be done after their lease had ended; they come again elsewhere."
    ),
    # Lag.
    _gauge("kafka.consumer_group.lag", "{message}", _partition(lambda x: x.lag)).means(
        "Offsets that are neither done nor set aside, of partitions that this member holds."
    ),
    _gauge("kafka.consumer_group.offset", "{offset}", _partition(lambda x: x.offset if x.offset >= 0 else None)).means(
        "Everything below this offset is done, of partitions that this member holds."
    ),
    _gauge("kafka.consumer_group.members", "{member}", _member(lambda x: x.members)).means(
        "Members of the group, as this member sees it: of a claimed group those that hold something."
    ),
    _gauge("kafka_marshal.time_lag", "s", _partition(lambda x: x.lag_seconds)).means(
        "The age of the next message that is not done, of partitions that this member holds; 0: there is none."
    ),
    _gauge("kafka_marshal.held_back_partitions", "{partition}", _member(lambda x: x.held_back)).means(
        "Partitions whose progress waits for one message."
    ),
    _gauge("kafka_marshal.held_back_messages", "{message}", _member(lambda x: x.held_back_messages)).means(
        "Messages in flight of partitions whose progress waits for one message."
    ),
    # Open messages: each member that shares a partition reports all of it.
    _gauge("kafka_marshal.parked_messages", "{message}", _partition(lambda x: x.parked)).means(
        "Messages that are set aside, of partitions that this member holds or shares."
    ),
    _gauge("kafka_marshal.open_messages", "{message}", _OPEN).means(
        "Messages that wait for their next try (later: until a time), or are in a worker's batch, of partitions that "
        "it holds or shares."
    ),
    _gauge("kafka_marshal.shares", "{partition}", _member(lambda x: sum(one.shared for one in x.partitions))).means(
        "Partitions that this member shares with others, or may."
    ),
    _counter("kafka_marshal.acquires", "{request}", _rows(lambda x: x.acquires, "result")).means(
        "Requests for a batch of a shared partition: new messages, some that a member had before (again), or nothing."
    ),
    _counter("kafka_marshal.redelivered_messages", "{message}", _member(lambda x: x.redelivered_messages)).means(
        "Messages that were delivered here, and to a member before: of a batch, or open ones whose tries are logged."
    ),
    _counter("kafka_marshal.settled_messages", "{message}", _rows(lambda x: x.settled, "result")).means(
        "Messages of the group that the log shows as set aside (parked), or as redriven or discarded by an operator."
    ),
    _counter("kafka_marshal.redone_messages", "{message}", _member(lambda x: x.redone)).means(
        "Done messages of the group that an operator opened again (kafka-marshal redo)."
    ),
    _gauge("kafka_marshal.shared_read_bytes", "By", _member(lambda x: x.shared_read_bytes)).means(
        "What members of this process keep of partitions that they read together; the same at each of them."
    ),
    _counter("kafka_marshal.shared_reads", "{message}", _rows(lambda x: x.shared_reads, "result")).means(
        "Messages of partitions that several members of this process read: another one had fetched it (hit), or not."
    ),
    _gauge("kafka_marshal.hot_key_share", "1", _partition(lambda x: x.hot_key_share)).means(
        "The part of a partition's work that is of one key which keeps a handler busy for more than half of the time."
    ),
    _gauge("kafka_marshal.leases", "{lease}", _member(lambda x: x.leases)).means(
        "Leases held, or pieces of a coordinated group."
    ),
    _gauge("kafka_marshal.lease_remaining", "s", _member(lambda x: x.lease_remaining_seconds)).means(
        "How long the lease that ends first is proven still; absent: none is held."
    ),
    _histogram("kafka_marshal.claim_duration", "s", _member(lambda x: x.claim_seconds)).means(
        "From the sending of a claim until the log granted it."
    ),
    _histogram("kafka_marshal.handover_gap", "s", _member(lambda x: x.handover_gap_seconds)).means(
        "From the release, or the last heartbeat, of a lease's last holder until this member's claim was granted."
    ),
    _gauge("kafka_marshal.paused", "{group}", _member(lambda x: int(x.paused))).means("1: the group is paused."),
    # This member, and the log.
    _gauge("kafka_marshal.ready", "{member}", _member(lambda x: int(x.ready))).means(
        "1: the log is read to its end, and heartbeats go out."
    ),
    _gauge("kafka_marshal.needs_restart", "{member}", _member(lambda x: int(x.needs_restart))).means(
        "1: only a new process helps."
    ),
    _gauge("kafka_marshal.turned_ago", "s", _member(lambda x: x.turned_ago_seconds)).means(
        "Since the last turn of the background thread, which turns once a second at least."
    ),
    _counter("kafka_marshal.records", "{record}", _rows(lambda x: x.records, "type", "outcome")).means(
        "Records of the coordination log that this member has applied, by type and by outcome."
    ),
    _gauge("kafka_marshal.log_behind_records", "{record}", _member(lambda x: x.log_behind_records)).means(
        "Records of the coordination log that this member has not applied yet."
    ),
    _counter("kafka_marshal.replica_alarms", "{alarm}", _member(lambda x: x.replica_alarms)).means(
        "Snapshots of the coordination log that contradict this member's state."
    ),
    _gauge("kafka_marshal.log_records", "{record}", _member(lambda x: x.log_records)).means(
        "Records of the coordination log, in what this member reads of it."
    ),
    _gauge("kafka_marshal.log_oldest_age", "s", _member(lambda x: x.log_oldest_age_seconds)).means(
        "Age of the coordination log's oldest record, unless the log is kept for ever."
    ),
    _gauge("kafka_marshal.log_not_pruned", "{member}", _member(lambda x: int(x.log_not_pruned))).means(
        "1: this member can't remove log that is older than the topic asks for."
    ),
    # Checkpoints.
    _counter(
        "kafka_marshal.checkpoints",
        "{checkpoint}",
        _OUTCOMES,
    ).means(
        "Checkpoints that were complete, complete without some member or some of this one's pieces, or ended without "
        "being complete."
    ),
    _gauge("kafka_marshal.checkpoint_age", "s", _checkpoints(lambda x: x.age_seconds)).means(
        "Since the group's newest checkpoint was complete."
    ),
    _gauge("kafka_marshal.oldest_cut", "s", _checkpoints(lambda x: x.oldest_cut_seconds)).means(
        "Of this member's pieces, the oldest state that a checkpoint has, since its cut: what its loss would undo."
    ),
    _histogram("kafka_marshal.save", "s", _checkpoints(lambda x: x.save_seconds)).means(
        "From the cut of a piece until its state is safe."
    ),
    _counter("kafka_marshal.restores", "{piece}", _RESTORES).means("Pieces whose state was restored, by the reason."),
    _histogram("kafka_marshal.restore", "s", _checkpoints(lambda x: x.restore_seconds)).means(
        "How long on_restore takes."
    ),
    _gauge("kafka_marshal.drain", "s", _checkpoints(lambda x: x.drain_seconds)).means(
        "From the beginning of the last checkpoint until this member had cut its last piece."
    ),
    _gauge("kafka_marshal.drain_seconds_max", "s", _checkpoints(lambda x: x.drain_seconds_max)).means(
        "The longest of these."
    ),
    # run().
    _gauge("kafka_marshal.handlers_running", "{handler}", _member(lambda x: x.handlers_running)).means(
        "Handlers of run() that have a message."
    ),
    _gauge("kafka_marshal.rate_limited", "{message}", _rows(lambda x: x.rate_limited, "topic")).means(
        'Messages that wait for a rate of run(), of each key the first; topic "": a rate of all topics.'
    ),
    _gauge("kafka_marshal.stuck_partitions", "{partition}", _member(lambda x: x.stuck)).means(
        "Partitions that are stuck though there is something to read: damaged, without a leader, or position lost."
    ),
    _gauge("kafka_marshal.runs_failing", "{run}", _member(lambda x: x.runs_failing)).means(
        "Runs of which all tries fail: they try one message of a partition at a time, and set next to none aside."
    ),
    _counter("kafka_marshal.handler_failures", "{try}", _rows(lambda x: x.failures, "topic", "error.type")).means(
        "Tries of run() that raised, by exception."
    ),
    _counter("kafka_marshal.retries", "{message}", _rows(lambda x: x.retries, "topic")).means(
        "Failed tries of run() that are followed by another."
    ),
    _counter("kafka_marshal.dead_letters", "{message}", _rows(lambda x: x.dead_letters, "topic")).means(
        "Messages of run() that have become dead letters."
    ),
    # Transactions.
    _counter("kafka_marshal.transactions", "{transaction}", _rows(lambda x: x.transactions, "outcome")).means(
        "Transactions by how they ended: committed, aborted, fenced, or unknown where the brokers have not answered."
    ),
    _histogram(
        "kafka_marshal.transaction_duration",
        "s",
        _COMMITTED,
    ).means("From the begin of a transaction to its commit, for committed ones."),
    _gauge("kafka_marshal.transactions_waiting", "{transaction}", _member(lambda x: x.transactions_waiting)).means(
        "Transactions that wait for an earlier one of their partition, or for a producer."
    ),
)
