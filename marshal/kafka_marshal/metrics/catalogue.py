"""The names under which metrics are exported, once for all exporters.

Names and attributes follow OpenTelemetry's conventions for messaging, and its Kafka receiver's for lag; ours begin with
``kafka_marshal.``. Prometheus gets them as OpenTelemetry's specification translates names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from kafka_marshal.metrics.rows import CheckpointMetrics, Distribution, Metrics, PartitionMetrics

Kind = Literal["counter", "gauge", "histogram"]

#: Values of a metric's labels, in the order of ``Metric.labels``.
Labels = tuple[str, ...]

Value = float | Distribution

Read = Callable[[Metrics], Iterable[tuple[Labels, Value]]]

#: Unit → suffix of a Prometheus name.
_SUFFIXES = {"s": "_seconds"}

_MEMBER = ("group", "client_id")
_TOPIC = (*_MEMBER, "topic")
_PARTITION = (*_TOPIC, "partition")
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
    help: str
    labels: tuple[str, ...]
    #: Labels and value of each series.
    read: Read

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


def _member(value: Callable[[Metrics], Value | None]) -> Read:
    """One series for this member, unless the value is None."""

    def read(metrics: Metrics) -> list[tuple[Labels, Value]]:
        found = value(metrics)
        return [] if found is None else [((metrics.group_id, metrics.client_id), found)]

    return read


def _checkpoints(value: Callable[[CheckpointMetrics], Value | None]) -> Read:
    """One series for a member that takes checkpoints."""
    return _member(lambda metrics: None if metrics.checkpoints is None else value(metrics.checkpoints))


def _of_checkpoints(rows: Callable[[CheckpointMetrics], Iterable[tuple[str, int]]]) -> Read:
    """A series for each word."""
    return _each(
        lambda metrics: [] if metrics.checkpoints is None else [((word,), n) for word, n in rows(metrics.checkpoints)]
    )


def _each(rows: Callable[[Metrics], Iterable[tuple[Labels, Value | None]]]) -> Read:
    """A series for each row with a known value: this member's labels, and those of the row."""

    def read(metrics: Metrics) -> list[tuple[Labels, Value]]:
        member = metrics.group_id, metrics.client_id
        return [((*member, *labels), value) for labels, value in rows(metrics) if value is not None]

    return read


def _partition(value: Callable[[PartitionMetrics], Value | None]) -> Read:
    """A series for each held partition."""
    return _each(lambda metrics: [((one.topic, str(one.partition)), value(one)) for one in metrics.partitions])


def _messaging(operation: str, rows: Callable[[Metrics], Iterable[tuple[Labels, Value]]]) -> Read:
    """With the attributes of OpenTelemetry's conventions."""

    def read(metrics: Metrics) -> list[tuple[Labels, Value]]:
        common = "kafka", operation, metrics.group_id, metrics.client_id
        return [((*common, *labels), value) for labels, value in rows(metrics)]

    return read


def _when(is_so: bool) -> int:
    return 1 if is_so else 0


CATALOGUE: tuple[Metric, ...] = (
    # Messages.
    Metric(
        "messaging.client.consumed.messages",
        "counter",
        "{message}",
        "Messages fetched from Kafka.",
        (*_MESSAGING, "messaging.destination.partition.id"),
        _messaging("poll", lambda x: [((m.topic, str(m.partition)), m.consumed) for m in x.messages]),
    ),
    Metric(
        "kafka_marshal.processed_messages",
        "counter",
        "{message}",
        "Messages done; at most once: delivered.",
        _PARTITION,
        _each(lambda x: [((m.topic, str(m.partition)), m.processed) for m in x.messages]),
    ),
    Metric(
        "messaging.process.duration",
        "histogram",
        "s",
        "How long handlers of run() take, where it was given marshal.timing().",
        (*_MESSAGING, "error.type"),
        _messaging("process", lambda x: [((p.topic, p.error), p.seconds) for p in x.processing]),
    ),
    Metric(
        "kafka_marshal.in_hand_messages",
        "gauge",
        "{message}",
        "Messages delivered and not done.",
        _PARTITION,
        _partition(lambda one: one.in_hand),
    ),
    Metric(
        "kafka_marshal.buffered_messages",
        "gauge",
        "{message}",
        "Messages fetched and not delivered.",
        _PARTITION,
        _partition(lambda one: one.buffered),
    ),
    Metric(
        "kafka_marshal.done_too_late",
        "counter",
        "{message}",
        "Messages said to be done after their lease had ended; they come again elsewhere.",
        _MEMBER,
        _member(lambda x: x.done_too_late),
    ),
    # Lag.
    Metric(
        "kafka.consumer_group.lag",
        "gauge",
        "{message}",
        "Offsets that are neither done nor set aside, of partitions that this member holds.",
        _PARTITION,
        _partition(lambda one: one.lag),
    ),
    Metric(
        "kafka.consumer_group.offset",
        "gauge",
        "{offset}",
        "Everything below this offset is done, of partitions that this member holds.",
        _PARTITION,
        _partition(lambda one: one.offset if one.offset >= 0 else None),
    ),
    Metric(
        "kafka.consumer_group.members",
        "gauge",
        "{member}",
        "Members of the group, as this member sees it: of a claimed group those that hold something.",
        _MEMBER,
        _member(lambda x: x.members),
    ),
    Metric(
        "kafka_marshal.time_lag",
        "gauge",
        "s",
        "The age of the next message that is not done, of partitions that this member holds; 0: there is none.",
        _PARTITION,
        _partition(lambda one: one.lag_seconds),
    ),
    Metric(
        "kafka_marshal.held_back_partitions",
        "gauge",
        "{partition}",
        "Partitions whose progress waits for one message.",
        _MEMBER,
        _member(lambda x: x.held_back),
    ),
    Metric(
        "kafka_marshal.held_back_messages",
        "gauge",
        "{message}",
        "Messages in flight of partitions whose progress waits for one message.",
        _MEMBER,
        _member(lambda x: x.held_back_messages),
    ),
    # Open messages: each member that shares a partition reports all of it.
    Metric(
        "kafka_marshal.parked_messages",
        "gauge",
        "{message}",
        "Messages that are set aside, of partitions that this member holds or shares.",
        _PARTITION,
        _partition(lambda one: one.parked),
    ),
    Metric(
        "kafka_marshal.open_messages",
        "gauge",
        "{message}",
        "Messages that wait for their next try, or are in a worker's batch, of partitions that it holds or shares.",
        (*_PARTITION, "state"),
        _each(
            lambda x: [
                ((one.topic, str(one.partition), state), amount)
                for one in x.partitions
                for state, amount in (("waiting", one.waiting), ("acquired", one.acquired))
                if amount
            ]
        ),
    ),
    Metric(
        "kafka_marshal.shares",
        "gauge",
        "{partition}",
        "Partitions that this member shares with others, or may.",
        _MEMBER,
        _member(lambda x: sum(one.shared for one in x.partitions)),
    ),
    Metric(
        "kafka_marshal.acquires",
        "counter",
        "{request}",
        "Requests for a batch of a shared partition: new messages, some that a member had before (again), or nothing.",
        (*_MEMBER, "result"),
        _each(lambda x: [((one.outcome,), one.count) for one in x.acquires]),
    ),
    Metric(
        "kafka_marshal.redelivered_messages",
        "counter",
        "{message}",
        "Messages that were delivered here, and to a member before: of a batch, or open ones whose tries are logged.",
        _MEMBER,
        _member(lambda x: x.redelivered_messages),
    ),
    Metric(
        "kafka_marshal.settled_messages",
        "counter",
        "{message}",
        "Messages of the group that the log shows as set aside (parked), or as redriven or discarded by an operator.",
        (*_MEMBER, "result"),
        _each(lambda x: [((one.outcome,), one.count) for one in x.settled]),
    ),
    Metric(
        "kafka_marshal.shared_read_bytes",
        "gauge",
        "By",
        "What members of this process keep of partitions that they read together; the same at each of them.",
        _MEMBER,
        _member(lambda x: x.shared_read_bytes),
    ),
    Metric(
        "kafka_marshal.shared_reads",
        "counter",
        "{message}",
        "Messages of partitions that several members of this process read: another one had fetched it (hit), or not.",
        (*_MEMBER, "result"),
        _each(lambda x: [((one.outcome,), one.count) for one in x.shared_reads]),
    ),
    Metric(
        "kafka_marshal.hot_key_share",
        "gauge",
        "1",
        "The part of a partition's work that is of one key which keeps a handler busy for more than half of the time.",
        _PARTITION,
        _partition(lambda one: one.hot_key_share),
    ),
    Metric(
        "kafka_marshal.leases",
        "gauge",
        "{lease}",
        "Leases held, or pieces of a coordinated group.",
        _MEMBER,
        _member(lambda x: x.leases),
    ),
    Metric(
        "kafka_marshal.lease_remaining",
        "gauge",
        "s",
        "How long the lease that ends first is proven still; absent: none is held.",
        _MEMBER,
        _member(lambda x: x.lease_remaining_seconds),
    ),
    Metric(
        "kafka_marshal.claim_duration",
        "histogram",
        "s",
        "From the sending of a claim until the log granted it.",
        _MEMBER,
        _member(lambda x: x.claim_seconds),
    ),
    Metric(
        "kafka_marshal.handover_gap",
        "histogram",
        "s",
        "From the release, or the last heartbeat, of a lease's last holder until this member's claim was granted.",
        _MEMBER,
        _member(lambda x: x.handover_gap_seconds),
    ),
    Metric(
        "kafka_marshal.paused",
        "gauge",
        "{group}",
        "1: the group is paused.",
        _MEMBER,
        _member(lambda x: _when(x.paused)),
    ),
    # This member, and the log.
    Metric(
        "kafka_marshal.ready",
        "gauge",
        "{member}",
        "1: the log is read to its end, and heartbeats go out.",
        _MEMBER,
        _member(lambda x: _when(x.ready)),
    ),
    Metric(
        "kafka_marshal.needs_restart",
        "gauge",
        "{member}",
        "1: only a new process helps.",
        _MEMBER,
        _member(lambda x: _when(x.needs_restart)),
    ),
    Metric(
        "kafka_marshal.turned_ago",
        "gauge",
        "s",
        "Since the last turn of the background thread, which turns once a second at least.",
        _MEMBER,
        _member(lambda x: x.turned_ago_seconds),
    ),
    Metric(
        "kafka_marshal.records",
        "counter",
        "{record}",
        "Records of the coordination log that this member has applied, by type and by outcome.",
        (*_MEMBER, "type", "outcome"),
        _each(lambda x: [((r.type, r.outcome), r.count) for r in x.records]),
    ),
    Metric(
        "kafka_marshal.log_behind_records",
        "gauge",
        "{record}",
        "Records of the coordination log that this member has not applied yet.",
        _MEMBER,
        _member(lambda x: x.log_behind_records),
    ),
    Metric(
        "kafka_marshal.replica_alarms",
        "counter",
        "{alarm}",
        "Snapshots of the coordination log that contradict this member's state.",
        _MEMBER,
        _member(lambda x: x.replica_alarms),
    ),
    Metric(
        "kafka_marshal.log_records",
        "gauge",
        "{record}",
        "Records of the coordination log, in what this member reads of it.",
        _MEMBER,
        _member(lambda x: x.log_records),
    ),
    Metric(
        "kafka_marshal.log_oldest_age",
        "gauge",
        "s",
        "Age of the coordination log's oldest record, unless the log is kept for ever.",
        _MEMBER,
        _member(lambda x: x.log_oldest_age_seconds),
    ),
    Metric(
        "kafka_marshal.log_not_pruned",
        "gauge",
        "{member}",
        "1: this member can't remove log that is older than the topic asks for.",
        _MEMBER,
        _member(lambda x: int(x.log_not_pruned)),
    ),
    # Checkpoints.
    Metric(
        "kafka_marshal.checkpoints",
        "counter",
        "{checkpoint}",
        "Checkpoints that were complete, complete without some member or some of this one's pieces, or ended without "
        "being complete.",
        (*_MEMBER, "outcome"),
        _of_checkpoints(lambda x: x.outcomes),
    ),
    Metric(
        "kafka_marshal.checkpoint_age",
        "gauge",
        "s",
        "Since the group's newest checkpoint was complete.",
        _MEMBER,
        _checkpoints(lambda x: x.age_seconds),
    ),
    Metric(
        "kafka_marshal.oldest_cut",
        "gauge",
        "s",
        "Of this member's pieces, the oldest state that a checkpoint has, since its cut: what its loss would undo.",
        _MEMBER,
        _checkpoints(lambda x: x.oldest_cut_seconds),
    ),
    Metric(
        "kafka_marshal.save",
        "histogram",
        "s",
        "From the cut of a piece until its state is safe.",
        _MEMBER,
        _checkpoints(lambda x: x.save_seconds),
    ),
    Metric(
        "kafka_marshal.restores",
        "counter",
        "{piece}",
        "Pieces whose state was restored, by the reason.",
        (*_MEMBER, "why"),
        _of_checkpoints(lambda x: x.restores),
    ),
    Metric(
        "kafka_marshal.restore",
        "histogram",
        "s",
        "How long on_restore takes.",
        _MEMBER,
        _checkpoints(lambda x: x.restore_seconds),
    ),
    Metric(
        "kafka_marshal.drain",
        "gauge",
        "s",
        "From the beginning of the last checkpoint until this member had cut its last piece.",
        _MEMBER,
        _checkpoints(lambda x: x.drain_seconds),
    ),
    Metric(
        "kafka_marshal.drain_seconds_max",
        "gauge",
        "s",
        "The longest of these.",
        _MEMBER,
        _checkpoints(lambda x: x.drain_seconds_max),
    ),
    # run().
    Metric(
        "kafka_marshal.handlers_running",
        "gauge",
        "{handler}",
        "Handlers of run() that have a message.",
        _MEMBER,
        _member(lambda x: x.handlers_running),
    ),
    Metric(
        "kafka_marshal.stuck_partitions",
        "gauge",
        "{partition}",
        "Partitions that are stuck though there is something to read: damaged, without a leader, or position lost.",
        _MEMBER,
        _member(lambda x: x.stuck),
    ),
    Metric(
        "kafka_marshal.runs_failing",
        "gauge",
        "{run}",
        "Runs of which all tries fail: they try one message of a partition at a time, and set next to none aside.",
        _MEMBER,
        _member(lambda x: x.runs_failing),
    ),
    Metric(
        "kafka_marshal.handler_failures",
        "counter",
        "{try}",
        "Tries of run() that raised, by exception.",
        (*_TOPIC, "error.type"),
        _each(lambda x: [((f.topic, f.error), f.count) for f in x.failures]),
    ),
    Metric(
        "kafka_marshal.retries",
        "counter",
        "{message}",
        "Failed tries of run() that are followed by another.",
        _TOPIC,
        _each(lambda x: [((r.topic,), r.count) for r in x.retries]),
    ),
    Metric(
        "kafka_marshal.dead_letters",
        "counter",
        "{message}",
        "Messages of run() that have become dead letters.",
        _TOPIC,
        _each(lambda x: [((d.topic,), d.count) for d in x.dead_letters]),
    ),
    # Transactions.
    Metric(
        "kafka_marshal.transactions",
        "counter",
        "{transaction}",
        "Transactions by how they ended: committed, aborted, fenced, or unknown where the brokers have not answered.",
        (*_MEMBER, "outcome"),
        _each(lambda x: [((t.outcome,), t.count) for t in x.transactions]),
    ),
    Metric(
        "kafka_marshal.transaction_duration",
        "histogram",
        "s",
        "From the begin of a transaction to its commit, for committed ones.",
        _MEMBER,
        _member(lambda x: x.transaction_seconds if x.transaction_seconds.count else None),
    ),
    Metric(
        "kafka_marshal.transactions_waiting",
        "gauge",
        "{transaction}",
        "Transactions that wait for an earlier one of their partition, or for a producer.",
        _MEMBER,
        _member(lambda x: x.transactions_waiting),
    ),
)
