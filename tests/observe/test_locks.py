"""What is shown of a lock: neither a missing topic nor a partition."""

from __future__ import annotations

from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.node.jobs import progress_of_all
from kafka_marshal.observe.problems import places, problems_of
from kafka_marshal.observe.rows import GroupRow, partitions_held, partitions_of
from kafka_marshal.observe.view import LiveView
from rationalizer import ClaimingPartition, Heartbeat, Record, ReleasingPartition, encode

HI = 600_000
A, B = ("a1", "a", "g"), ("b1", "b", "g")
LOCK = ("lock:x", 0)


def shown(*records: Record) -> GroupRow:
    """The group after these records; it has a partition beside its locks."""
    cluster = MemoryCluster()
    create_topic(cluster, "__marshal", 1, 5.0)
    cluster.broker.create_topic("t", 1)
    for record in (ClaimingPartition(*A, "t", 0, HI), *records):
        cluster.broker.produce("__marshal", 0, encode(record))
    view = LiveView(cluster, "__marshal", 5.0)
    try:
        view.catch_up(lambda done, of_all: None)
        view.look_at_data(["g"])
        (found,) = view.groups("g")
        assert set(progress_of_all(view.worlds, "g")) == {("t", 0)}, "a lock has no position to be moved"
        return found
    finally:
        view.replica.close()


def test_a_held_lock_is_no_partition_and_nothing_is_unread() -> None:
    group = shown(ClaimingPartition(*B, *LOCK, HI), Heartbeat(*B, *LOCK, 1, None))
    assert problems_of(group) == []
    assert partitions_of(group.leases) == partitions_held(group.leases) == 1
    assert [(row.topic, row.client, row.state, row.lag, row.stuck) for row in group.leases] == [
        ("lock:x", "b", "seen", 0, ""),
        ("t", "a", "seen", 0, ""),
    ]
    assert group.worker_count == 2
    assert places(group.leases) == "lock:x; t 0"


def test_a_free_lock_lacks_no_holder() -> None:
    group = shown(ClaimingPartition(*B, *LOCK, HI), ReleasingPartition(*B, *LOCK, 1, None))
    assert problems_of(group) == []
    assert group.lag == 0


def test_one_that_waits_for_a_lock_is_not_told_as_waiting_for_a_partition() -> None:
    group = shown(ClaimingPartition(*A, *LOCK, HI), ClaimingPartition(*B, *LOCK, HI))
    assert [run.doing for run in group.idle] == ["waits for the lock 'x'"]
    assert problems_of(group) == []


def test_a_holder_that_is_silent_is_told_as_any_member() -> None:
    from dataclasses import replace

    group = shown(ClaimingPartition(*B, *LOCK, HI), Heartbeat(*B, *LOCK, 1, None))
    gone = [replace(row, silence_ms=3 * HI) if row.client == "b" else row for row in group.leases]
    (problem,) = problems_of(replace(group, leases=gone))
    assert problem.kind == "gone"
    assert "It holds 1 lock (lock:x)" in problem.text
    assert "without a holder" not in problem.text
