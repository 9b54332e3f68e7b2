"""``commit(metadata=…)``: a text beside the progress of a partition, in a coordinated group (G14)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kafka_marshal import Group, GroupConsumer, Marshal, aio
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.node.coordination_topic import create_topic
from rationalizer import CommitOffsets, decode
from tests.client.conftest import wait_until

T0, T1 = ("t", 0), ("t", 1)


@pytest.fixture
def cluster() -> MemoryCluster:
    made = MemoryCluster()
    create_topic(made, "__marshal", 1, 10)
    made.broker.create_topic("t", 2)
    for partition in (0, 1):
        for _ in range(3):
            made.broker.produce("t", partition, b"v")
    return made


def member(cluster: MemoryCluster, name: str) -> Marshal:
    return Marshal.on_cluster(MemoryCluster(broker=cluster.broker, client=name), group_id="g", client_id=name)


@pytest.fixture
def consumer(cluster: MemoryCluster) -> Iterator[GroupConsumer]:
    with member(cluster, "a") as marshal, marshal.consumer(["t"], mode=Group(session_timeout=3.0)) as made:
        read(made, 6)
        yield made


def read(consumer: Any, count: int) -> None:
    for _ in range(count):
        message = consumer.poll(20)
        assert message is not None
        consumer.done(message)


def said(consumer: GroupConsumer) -> list[str | None]:
    return [x.metadata for x in consumer.committed([T0, T1], ranges=True)]


def test_the_next_owner_reads_what_was_said_and_progress_moves_with_it(
    cluster: MemoryCluster, consumer: GroupConsumer
) -> None:
    consumer.commit()
    assert said(consumer) == [None, None]
    consumer.commit(metadata={T0: "file 7, line 3", T1: ""})
    assert said(consumer) == ["file 7, line 3", ""]
    cluster.broker.produce("t", 0, b"v")
    read(consumer, 1)
    consumer.commit(metadata={T0: "file 8 \n"})
    assert said(consumer) == ["file 8 \n", ""]
    assert [x.offset for x in consumer.committed([T0, T1])] == [4, 3]
    with member(cluster, "b") as other, other.consumer(["t"], mode=Group(session_timeout=3.0)) as second:
        wait_until(lambda: second.poll(0.05) or second.assignment())
        assert said(second) == ["file 8 \n", ""]


def test_a_text_without_new_progress_is_one_entry_and_the_same_one_again_is_none(
    cluster: MemoryCluster, consumer: GroupConsumer
) -> None:
    consumer.commit()
    for _ in range(2):
        consumer.commit(metadata={T1: "x"})
    log = cluster.broker.log("__marshal", 0)
    assert log is not None
    records = [decode(message.value(), 2) for message in log.messages]
    entries = [entry for each in records if isinstance(each, CommitOffsets) for entry in each.entries]
    assert [entry.metadata for entry in entries].count("x") == 1


def test_what_can_not_be_said_is_refused_and_nothing_is_committed(
    cluster: MemoryCluster, consumer: GroupConsumer
) -> None:
    for wrong in ({("t", 7): "x"}, {T0: "x", ("other", 0): "y"}):
        with pytest.raises(ConfigurationError, match=r"does not work on all of .* Nothing was committed"):
            consumer.commit(metadata=wrong)
    for bad in ({T0: "x" * 256}, {T0: "ä" * 128}, {T0: b"x"}, {T0: None}):
        with pytest.raises(ConfigurationError, match="texts of up to 255 bytes"):
            consumer.commit(metadata=bad)  # type: ignore[arg-type]
    for no_mapping in ("x", [T0], {"t": "x"}):
        with pytest.raises((ConfigurationError, TypeError)):
            consumer.commit(metadata=no_mapping)  # type: ignore[arg-type]
    assert said(consumer) == [None, None]


def test_a_partition_that_has_not_begun_does_not_begin_with_a_text(cluster: MemoryCluster) -> None:
    """G14: metadata would make its progress, at the start of its log, whatever start= says."""
    cluster.broker.create_topic("new", 1)
    for _ in range(3):
        cluster.broker.produce("new", 0, b"v")
    mode = Group(session_timeout=3.0)
    with member(cluster, "a") as marshal, marshal.consumer(["new"], mode=mode, start="latest") as consumer:

        def is_said() -> bool:
            try:
                consumer.commit(metadata={("new", 0): "x"})
            except ConfigurationError as error:
                assert "has not begun" in str(error)
                return False
            return True

        wait_until(is_said)
        found = consumer.committed([("new", 0)], ranges=True)[0]
        assert (found.offset, found.metadata) == (3, "x")


def test_asyncio(cluster: MemoryCluster) -> None:
    async def say() -> list[str | None]:
        made = aio.Marshal.on_cluster(MemoryCluster(broker=cluster.broker, client="c"), group_id="g", client_id="c")
        async with made as marshal, marshal.consumer(["t"], mode=Group(session_timeout=3.0)) as consumer:
            for _ in range(6):
                message = await consumer.poll(20)
                assert message is not None
                consumer.done(message)
            await consumer.commit(metadata={T0: "by asyncio"})
            return [x.metadata for x in await consumer.committed([T0, T1], ranges=True)]

    assert asyncio.run(say()) == ["by asyncio", None]
