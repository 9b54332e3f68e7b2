"""A close() right after a request: what the log then grants is released, so that no member waits for it."""

from __future__ import annotations

import pytest

from kafka_marshal import Group, Marshal
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.client.closing import CLOSE_TIMEOUT_S
from kafka_marshal.node.replica import Replica
from tests.faults.stories import TOPIC, answer, member, memory_cluster

#: Delay of a record to the member: while close() waits for it, and longer.
LATE_S = [0.3, CLOSE_TIMEOUT_S + 1.0]


def asks(marshal: Marshal, what: str) -> None:
    if what == "claims":
        marshal.consumer([TOPIC])
    elif what == "ranges":
        marshal.ranges([TOPIC])
    elif what == "join":
        marshal.consumer([TOPIC], mode=Group())


def held(cluster: MemoryCluster) -> list[str]:
    """Holders and members by the log."""
    cluster.broker.faults.delay_ms = lambda client, topic, partition, offset: 0
    replica = Replica(cluster.connect("reader"), "__marshal", 5)
    try:
        replica.catch_up(5)
        (world,) = replica.worlds.values()
        group = world.group("g")
        return [x.client_id or "" for x in world.leases() if x.held] + ([] if group is None else list(group.clients))
    finally:
        replica.close()


@pytest.mark.parametrize("late_s", LATE_S)
@pytest.mark.parametrize("what", ["claims", "ranges", "join"])
def test_what_is_granted_after_a_close_is_released(cluster: MemoryCluster, what: str, late_s: float) -> None:
    marshal = member(cluster, hi=3_000)
    if what == "join":
        marshal.consumer([TOPIC], mode=Group()).close()  # the CPs are marked: a join comes next
    cluster.broker.faults.delay_ms = lambda client, topic, partition, offset: int(1000 * late_s)
    asks(marshal, what)
    answer("Marshal.close()", lambda: marshal.close(timeout=5))
    assert held(cluster) == []


@pytest.fixture
def cluster() -> MemoryCluster:
    return memory_cluster()
