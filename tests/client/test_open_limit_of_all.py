"""The clients' own limit: where a coordination partition has 100,000 holes, lowered here, no more is set aside (U2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kafka_marshal import Batches, Consumer, Group, KeyRangeError, Keys, Marshal
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.admin import Admin
from kafka_marshal.client import health
from kafka_marshal.engine.work import settlements
from rationalizer.holes import Hole
from rationalizer.limits import MANY_HOLES
from tests.client.conftest import wait_until
from tests.faults.stories import GROUP, TOPIC, member, memory_cluster

LIMIT = 3


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MANY_HOLES == 100_000
    for module in (settlements, health):
        monkeypatch.setattr(module, "MANY_HOLES", LIMIT)


def holes_of(marshal: Marshal) -> list[Hole]:
    world = marshal._driver.replica.worlds[0]
    with marshal._driver.condition:
        kept = [lease.progress for lease in world.leases()]
        kept += [one.progress for group in world.groups() for of in group.progress.values() for one in of.values()]
        return [hole for progress in kept for hole in progress.open]


def parked_in(marshal: Marshal) -> int:
    return sum(hole.is_parked for hole in holes_of(marshal))


def operator(cluster: MemoryCluster) -> Admin:
    return Admin.on_cluster(lambda: cluster.connect("operator"))


def poll(consumer: Consumer) -> Any:
    return wait_until(lambda: consumer.poll(0.5))


def in_claims(marshal: Marshal, **options: Any) -> Consumer:
    made: Consumer = marshal.consumer([TOPIC], **options)
    return made


def in_a_group(marshal: Marshal, **options: Any) -> Consumer:
    made: Consumer = marshal.consumer([TOPIC], mode=Group(session_timeout=6.0), **options)
    return made


def by_keys(marshal: Marshal, **options: Any) -> Consumer:
    halves = [(0, 2**62), (2**62 + 1, 2**63 - 1)]
    return marshal.consumer(mode=Keys({(TOPIC, 0): halves, (TOPIC, 1): halves}), **options)


@pytest.mark.parametrize("made", [in_claims, in_a_group, by_keys])
def test_what_fails_waits_and_a_partition_without_failures_continues(
    made: Callable[..., Consumer], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = memory_cluster(2, 4)
    with member(cluster, hi=1_000) as marshal, made(marshal, partition_stuck="raise") as consumer:
        aside: list[int] = []
        while len(aside) < LIMIT:
            message = poll(consumer)
            if message.partition() == 0:
                consumer.park(message, "bad")
                aside.append(message.offset())
            else:
                consumer.done(message)
        wait_until(lambda: parked_in(marshal) == LIMIT)
        (full,) = marshal.health().crowded
        assert (full.topic, full.partition, full.open, full.most, full.is_full) == ("__marshal", 0, 3, LIMIT, True)
        (problem,) = marshal.health().problems
        assert "__marshal [0] has 3 of the 3 open messages that it may have, of all groups" in problem
        assert "Nothing is lost" in problem

        while (message := poll(consumer)).partition() == 1:
            consumer.done(message)
        consumer.park(message, "bad")
        wait_until(lambda: "offset 3 can't be set aside: 100,000 messages, of all groups, are open" in caplog.text)
        for partition in (0, 1):
            cluster.broker.produce(TOPIC, partition, b"x")
        with pytest.raises(KeyRangeError) as raised:
            wait_until(lambda: consumer.poll(0.5))
        assert raised.value.kip_number == 92
        others = [poll(consumer)]
        others += [each for each in [consumer.poll(0.5)] if each is not None]
        assert {each.partition() for each in others} == {1}
        assert parked_in(marshal) == LIMIT

        operator(cluster).discard(GROUP, [(TOPIC, 0, aside[0])])
        while (message := poll(consumer)).partition() == 1:
            consumer.done(message)  # on a slow machine some come again
        assert message.offset() == 4
        wait_until(lambda: {hole.first for hole in holes_of(marshal)} == {*aside[1:], 3}, what="it is set aside")


def test_what_could_not_be_set_aside_comes_again_after_a_close() -> None:
    cluster = memory_cluster(1, 5)
    with member(cluster) as marshal, marshal.consumer([TOPIC]) as consumer:
        for _ in range(LIMIT):
            consumer.park(poll(consumer), "bad")
        wait_until(lambda: parked_in(marshal) == LIMIT)
        consumer.park(poll(consumer), "bad")
    with member(cluster, "b") as marshal, marshal.consumer([TOPIC]) as consumer:
        assert poll(consumer).offset() == 3


def test_a_message_that_is_open_by_itself_is_set_aside_all_the_same() -> None:
    """It is a hole already: there are no more then."""
    cluster = memory_cluster(1, 5)
    with member(cluster) as marshal, marshal.consumer([TOPIC]) as consumer:
        for _ in range(3):
            consumer.park(poll(consumer), "bad")
        wait_until(lambda: parked_in(marshal) == LIMIT)
        operator(cluster).redrive(GROUP, [(TOPIC, 0, 1)])
        while (message := poll(consumer)).offset() != 1:
            consumer.done(message)
        consumer.park(message, "again")
        wait_until(lambda: [hole.reason for hole in holes_of(marshal)] == ["bad", "again", "bad"])


def test_a_sharer_takes_nothing_more_and_gives_back_what_it_could_not_set_aside() -> None:
    cluster = memory_cluster(1, 5)
    with member(cluster) as marshal:
        consumer = marshal.consumer([TOPIC], mode=Batches())
        batches = consumer.batches()
        left = 5
        while left:
            batch = next(batches)
            left -= len(batch)
            for message in batch:
                if message.offset() == LIMIT:
                    wait_until(lambda: parked_in(marshal) == LIMIT)
                if message.offset() <= LIMIT:
                    batch.park(message, "bad")
            batch.done()
        wait_until(lambda: parked_in(marshal) == LIMIT)
        for _ in range(3):
            cluster.broker.produce(TOPIC, 0, b"x")
        wait_until(lambda: "of all groups" in str(marshal.health()))
        world = marshal._driver.replica.worlds[0]
        before = world.next_offset
        wait_until(lambda: world.next_offset >= before + 3, what="some heartbeats")
        lease = marshal.world.lease(TOPIC, 0)
        assert lease is not None
        assert lease.stable == 4, "nothing more is taken"
        consumer.close()
        (free,) = [hole for hole in holes_of(marshal) if not hole.is_parked]
        assert (free.first, free.last, free.is_free) == (3, 3, True)
    operator(cluster).discard(GROUP, "all")
    with member(cluster, "b") as marshal, marshal.consumer([TOPIC], mode=Batches()) as consumer:
        batch = next(consumer.batches())
        assert [(each.offset(), batch.delivery_count) for each in batch] == [(3, 2)]
