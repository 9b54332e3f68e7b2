"""A member whose log reader receives nothing: it reports that, reopens the reader, and ends if that does not help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kafka_marshal import Group, KafkaUnavailableError, Marshal
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.node import log_reader
from tests.client.conftest import wait_until
from tests.faults.stories import TOPIC, answer, member, memory_cluster

PARTITIONS = 2
KINDS = ["claimed", "coordinated"]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    monkeypatch.setattr(log_reader, "SHORTEST_PATIENCE_S", 0.2)
    return memory_cluster(PARTITIONS, 100)


@contextmanager
def working(cluster: MemoryCluster, kind: str, client_id: str) -> Iterator[tuple[Marshal, Any]]:
    """A member with its own client that holds or waits for a lease."""
    marshal = member(cluster.connect(client_id), client_id=client_id)
    try:
        if kind == "claimed":
            yield marshal, marshal.consumer([TOPIC])
        else:
            yield marshal, marshal.consumer([TOPIC], mode=Group(session_timeout=1.5))
    finally:
        answer("Marshal.close()", marshal.close)


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_that_receives_nothing_reports_it_and_continues_with_a_new_client(
    cluster: MemoryCluster, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with working(cluster, kind, "a") as (marshal, consumer):
        assert consumer.poll(5) is not None
        opened = max(cluster.broker.tails_opened.values())
        cluster.broker.faults.stalled = lambda client, topic, cp, tails, restarts: (
            client == "a" and topic == "__marshal" and tails <= opened
        )
        found = wait_until(lambda: not (health := marshal.health()).ok and health)
        assert any("gets nothing more though the log holds more" in problem for problem in found.problems)
        assert not found.ready
        assert not found.needs_restart
        wait_until(lambda: marshal.health().ok and marshal.health().ready)
        wait_until(lambda: consumer.poll(0.1) is not None)
    assert [r.levelname for r in caplog.records if getattr(r, "event", "") == "reader_deaf"] == ["WARNING", "ERROR"]


@pytest.mark.parametrize("kind", KINDS)
def test_where_no_client_helps_it_ends_and_another_member_takes_over(
    cluster: MemoryCluster, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "SHORTEST_PATIENCE_S", 0.05)
    monkeypatch.setattr(log_reader, "LONGEST_PATIENCE_S", 0.1)
    with working(cluster, kind, "a") as (marshal, consumer), working(cluster, kind, "b") as (_, other):
        assert consumer.poll(5) is not None
        cluster.broker.faults.stalled = lambda client, topic, cp, tails, restarts: client == "a"
        wait_until(lambda: marshal.health().needs_restart)
        with pytest.raises(KafkaUnavailableError, match="Restart this process"):
            for _ in range(100):
                consumer.poll(0.1)
        wait_until(lambda: len(other.assignment()) == PARTITIONS)


@pytest.mark.parametrize("helps", ["restart", "client"])
def test_a_reader_of_messages_that_receives_nothing_continues(
    cluster: MemoryCluster, helps: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "QUIET_S", 0.3)
    with working(cluster, "claimed", "a") as (_, consumer):
        seen: set[tuple[int, int]] = set()

        def has_seen(count: int) -> bool:
            seen.update((message.partition(), message.offset()) for message in consumer.consume(200, 0.1))
            return len(seen) == count

        wait_until(lambda: has_seen(200))
        cluster.broker.faults.stalled = lambda client, topic, partition, readers, restarts: (
            topic == TOPIC and partition == 1 and readers == 1 and (helps == "client" or restarts == 0)
        )
        for partition in range(PARTITIONS):
            cluster.broker.produce(TOPIC, partition, b"late")
        wait_until(lambda: has_seen(202))
    steps = [r.levelname for r in caplog.records if getattr(r, "event", "") == "reader_deaf"]
    assert steps == (["WARNING"] if helps == "restart" else ["WARNING", "ERROR"])
