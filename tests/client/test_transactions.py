"""Transactions of batches: outputs and progress are committed together, or not at all (M2 to M8)."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Consumer as Reader
from confluent_kafka import KafkaError
from confluent_kafka import TopicPartition as Place

from kafka_marshal import (
    Admin,
    AdminError,
    Batch,
    Claims,
    ClosedError,
    ConfigurationError,
    Consumer,
    Group,
    LeaseLostError,
    Marshal,
    ProduceError,
    TransactionError,
    TransactionFencedError,
    Transactions,
    aio,
)
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.admin.conversion import saved_in
from kafka_marshal.admin.transfer import planned_export
from kafka_marshal.client import health
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.node.jobs import progress_of_all
from kafka_marshal.observe.view import LiveView
from kafka_marshal.ports import KafkaGroup
from rationalizer import Upgrade, encode
from tests.client.conftest import HI, Scene, wait_until
from tests.faults.stories import GROUP, TOPIC, answer, member, memory_cluster

OUT = "out"
MESSAGES = 20


@pytest.fixture
def cluster() -> MemoryCluster:
    made = memory_cluster(1, MESSAGES)
    made.broker.create_topic(OUT, 1)
    return made


@pytest.fixture
def marshal(cluster: MemoryCluster) -> Iterator[Marshal]:
    made = member(cluster)
    yield made
    answer("Marshal.close()", made.close)


def as_text(value: bytes | str | None) -> str:
    assert isinstance(value, bytes)
    return value.decode()


def outputs(cluster: MemoryCluster, partition: int = 0) -> list[str]:
    """What a read_committed reader sees."""
    reader = cluster.data_reader("reader", {})
    reader.assign({(OUT, partition): 0})
    found: list[str] = []
    while messages := reader.read(1000, 0.05)[0]:
        found += [as_text(message.value()) for message in messages]
    reader.close()
    return found


def transact(consumer: Consumer, batch: Batch) -> None:
    with consumer.transaction(batch) as tx:
        for message in batch:
            tx.produce(OUT, message.value(), key="k", headers={"from": str(message.offset())})


def names(first: int, last: int) -> list[str]:
    return [str(number) for number in range(first, last + 1)]


# -- in memory --------------------------------------------------------------------------------------------


def test_outputs_and_progress_are_committed_together(cluster: MemoryCluster, marshal: Marshal) -> None:
    with marshal.consumer([TOPIC], exactly_once=Transactions()) as consumer:
        batches = consumer.batches(MESSAGES // 2, 0.1)
        transact(consumer, next(batches))
        assert outputs(cluster) == names(0, 9)
        [position] = consumer.assignment()
        assert cluster.broker.committed[GROUP][TOPIC, 0] == (10, f"kafka-marshal {position.epoch}")
        transact(consumer, next(batches))
    assert outputs(cluster) == names(0, 19)
    lease = marshal.world.lease(TOPIC, 0)
    assert lease is not None and lease.stable == 19 and lease.ranges == ()


def test_an_exception_in_the_block_leaves_nothing_and_the_batch_comes_again(
    cluster: MemoryCluster, marshal: Marshal
) -> None:
    consumer = marshal.consumer([TOPIC], exactly_once=Transactions())
    batches = consumer.batches(5, 0.1)
    first, second = next(batches), next(batches)
    with pytest.raises(ZeroDivisionError), consumer.transaction(first) as tx:
        tx.produce(OUT, b"never")
        raise ZeroDivisionError
    assert outputs(cluster) == []
    with pytest.raises(TransactionError, match="come again") as raised, consumer.transaction(second):
        raise AssertionError("a batch after one that failed is not begun")
    assert raised.value.retry
    again = next(batches)
    assert (again.first_offset, again.last_offset) == (0, 4)
    transact(consumer, again)
    assert outputs(cluster) == names(0, 4)
    with pytest.raises(ConfigurationError, match="has had its transaction"), consumer.transaction(again):
        pass


def test_a_batch_that_the_program_drops_comes_again_with_those_after_it(
    cluster: MemoryCluster, marshal: Marshal
) -> None:
    consumer = marshal.consumer([TOPIC], exactly_once=Transactions())
    batches = consumer.batches(5, 0.1)
    next(batches)
    second = next(batches)
    with pytest.raises(TransactionError):  # it waits until the first, which was dropped, is taken back
        transact(consumer, second)
    while not outputs(cluster):
        transact(consumer, next(batches))
    assert outputs(cluster) == names(0, 4)


def test_a_record_that_cannot_be_written_leaves_nothing(cluster: MemoryCluster, marshal: Marshal) -> None:
    consumer = marshal.consumer([TOPIC], exactly_once=Transactions())
    batches = consumer.batches(5, 0.1)
    with pytest.raises(Exception, match="nowhere") as raised, consumer.transaction(next(batches)) as tx:
        tx.produce(OUT, b"never")
        tx.produce("nowhere", b"never")
    assert not isinstance(raised.value, TransactionFencedError)
    assert outputs(cluster) == []
    transact(consumer, next(batches))
    assert outputs(cluster) == names(0, 4)


def test_a_producer_that_was_fenced_is_made_again_and_nothing_is_done_twice(
    cluster: MemoryCluster, marshal: Marshal
) -> None:
    consumer = marshal.consumer([TOPIC], exactly_once=Transactions())
    batches = consumer.batches(5, 0.1)
    transact(consumer, next(batches))
    batch = next(batches)
    cluster.broker.transactions.init(f"{GROUP}/{TOPIC}/0", 60_000)  # as a process does that woke too late
    with pytest.raises(TransactionFencedError) as raised:
        transact(consumer, batch)
    assert raised.value.retry
    while len(outputs(cluster)) < MESSAGES:
        transact(consumer, next(batches))
    assert outputs(cluster) == names(0, 19)


def test_the_lease_is_compared_with_the_clock_right_before_the_commit(cluster: MemoryCluster) -> None:
    marshal = member(cluster, hi=60_000)  # no heartbeat comes in between
    consumer = marshal.consumer([TOPIC], exactly_once=Transactions())
    batch = next(consumer.batches(5, 0.1))
    with pytest.raises(LeaseLostError, match="nothing was committed") as raised, consumer.transaction(batch) as tx:
        tx.produce(OUT, b"never")
        lease = marshal._driver.engine.book.leases[TOPIC, 0]
        lease.valid_until = 0.0  # as if the block had taken that long
        lease.refresh()
    assert isinstance(raised.value, TransactionError) and raised.value.retry, "the loop of the page goes on"
    assert outputs(cluster) == []
    answer("Marshal.close()", marshal.close)


def test_a_loop_goes_on_after_an_outage_that_ends_while_its_transaction_is_given_up(cluster: MemoryCluster) -> None:
    marshal = member(cluster, hi=60_000)  # the lease is held meanwhile
    consumer = marshal.consumer([TOPIC], exactly_once=Transactions(timeout=1))
    batches = consumer.batches(5, 0.1)
    back = threading.Timer(3.0, cluster.broker.set_reachable, ("a", True))  # the commit waits 1 s, giving it up 10 s
    batch = next(batches)
    with pytest.raises(TransactionError, match="was not committed") as raised, consumer.transaction(batch) as tx:
        tx.produce(OUT, b"never")
        cluster.broker.set_reachable("a", False)
        back.start()
    assert raised.value.retry
    while len(outputs(cluster)) < MESSAGES:
        transact(consumer, next(batches))
    assert outputs(cluster) == names(0, 19)
    answer("Marshal.close()", marshal.close)


@pytest.mark.parametrize("group_id", ["größe", "日本"])
@pytest.mark.parametrize("mode", [Claims(), Group()])
def test_a_group_id_that_librdkafka_commits_no_offsets_for_is_refused_at_once(
    cluster: MemoryCluster, mode: Any, group_id: str
) -> None:
    marshal = Marshal.on_cluster(cluster.connect("b"), group_id=group_id, client_id="b")
    with pytest.raises(ConfigurationError, match="of ASCII characters"):
        marshal.consumer([TOPIC], mode=mode, exactly_once=Transactions())
    marshal.consumer([TOPIC], mode=mode)
    answer("Marshal.close()", marshal.close)


def test_few_producers_serve_many_partitions(caplog: pytest.LogCaptureFixture) -> None:
    cluster = memory_cluster(4, MESSAGES)
    cluster.broker.create_topic(OUT, 1)
    marshal = member(cluster)
    consumer = marshal.consumer([TOPIC], exactly_once=Transactions(max_producers=1))
    batches = consumer.batches(5, 0.1)
    for _ in range(4 * MESSAGES // 5):
        transact(consumer, next(batches))
    assert Counter(outputs(cluster)) == Counter(dict.fromkeys(names(0, 19), 4))
    [warning] = [x for x in caplog.records if x.name == "kafka_marshal" and "transactional producers" in x.message]
    assert "at most 1" in warning.message and "4 threads" in warning.message
    answer("Marshal.close()", marshal.close)


@pytest.mark.parametrize(
    "call",
    [
        iter,
        lambda consumer: consumer.poll(0),
        lambda consumer: consumer.consume(1, 0),
        lambda consumer: consumer.done(next(consumer.batches(5, 0.1)).messages[0]),
        lambda consumer: consumer.seek(TOPIC, 0, 5),
        lambda consumer: next(consumer.batches(5, 0.1)).done(),
    ],
    ids=["iterate", "poll", "consume", "done", "seek", "batch.done"],
)
def test_other_ways_of_progress_are_refused(marshal: Marshal, call: Callable[[Consumer], object]) -> None:
    consumer = marshal.consumer([TOPIC], exactly_once=Transactions())
    with pytest.raises(ConfigurationError, match=r"consumer\.transaction\(batch\)"):
        call(consumer)


@pytest.mark.parametrize(
    ("mode", "options", "text"),
    [
        (Claims(), {"delivery": "at-most-once"}, "at-least-once"),
        (Group(allow_key_share=True), {}, "order='key'"),
        (Group(mirror_offsets=True), {}, "exact already"),
    ],
)
def test_options_that_contradict_transactions_are_refused(
    marshal: Marshal, mode: Any, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        marshal.consumer([TOPIC], mode=mode, exactly_once=Transactions(), **options)


def test_a_transaction_needs_a_consumer_made_for_it(marshal: Marshal) -> None:
    consumer = marshal.consumer([TOPIC])
    batch = next(consumer.batches(5, 0.1))
    with pytest.raises(ConfigurationError, match="exactly_once="):
        consumer.transaction(batch)


@pytest.mark.parametrize(
    "record", [{"topic": "a b"}, {"value": 5}, {"key": 5}, {"headers": "x"}, {"headers": [("a", 5)]}, {"partition": -1}]
)
def test_what_kafka_cannot_take_is_refused_at_once(marshal: Marshal, record: dict[str, Any]) -> None:
    consumer = marshal.consumer([TOPIC], exactly_once=Transactions())
    batch = next(consumer.batches(5, 0.1))
    with pytest.raises(ConfigurationError), consumer.transaction(batch) as tx:
        tx.produce(**{"topic": OUT, "value": b"", **record})


def test_a_group_that_worked_in_transactions_is_not_worked_on_without(cluster: MemoryCluster, marshal: Marshal) -> None:
    with marshal.consumer([TOPIC], exactly_once=Transactions()) as consumer:
        transact(consumer, next(consumer.batches(5, 0.1)))
    consumer = marshal.consumer([TOPIC])
    [stuck] = wait_until(lambda: consumer.stuck)
    assert stuck.why == "position lost" and "exactly_once=" in stuck.text and "release-group" in stuck.text


def test_a_lease_of_it_is_not_claimed_by_hand(cluster: MemoryCluster, marshal: Marshal) -> None:
    with marshal.consumer([TOPIC], exactly_once=Transactions()) as consumer:
        transact(consumer, next(consumer.batches(5, 0.1)))
    with pytest.raises(ConfigurationError, match="exactly_once="):
        marshal.claim(TOPIC, 0)
    with marshal.consumer([TOPIC], exactly_once=Transactions()) as consumer:
        transact(consumer, next(consumer.batches(5, 0.1)))
    assert outputs(cluster) == names(0, 9)


def test_its_positions_are_neither_exported_nor_converted(cluster: MemoryCluster, marshal: Marshal) -> None:
    with marshal.consumer([TOPIC], exactly_once=Transactions()) as consumer:
        transact(consumer, next(consumer.batches(5, 0.1)))
    worlds = marshal._driver.replica.worlds
    found, kafka = progress_of_all(worlds, GROUP), KafkaGroup((), {})
    with pytest.raises(AdminError, match="exact offsets already"):
        planned_export(cluster, GROUP, kafka, found, force=True)
    with pytest.raises(AdminError, match="release-group"):
        saved_in(worlds, GROUP)


def test_an_offset_of_another_program_stops_the_partition(cluster: MemoryCluster, marshal: Marshal) -> None:
    with marshal.consumer([TOPIC], exactly_once=Transactions()) as consumer:
        transact(consumer, next(consumer.batches(5, 0.1)))
    cluster.commit_for_group(GROUP, {(TOPIC, 0): (2, "")}, 5)
    consumer = marshal.consumer([TOPIC], exactly_once=Transactions())
    [stuck] = wait_until(lambda: consumer.stuck)
    assert "another program has committed offset 2" in stuck.text and "release-group" in stuck.text
    assert marshal.health().stuck == (stuck,)
    view = LiveView(cluster, "__marshal", 10)  # what status, lag and check see
    with closing(view.replica):
        view.catch_up(lambda done, of_all: None)
        view.look_at_data()
        [row] = view.rows(GROUP)
    assert row.lost and "another program has committed offset 2" in row.stuck


def test_groups_of_one_name_on_two_coordination_topics_find_each_other(
    cluster: MemoryCluster, marshal: Marshal, caplog: pytest.LogCaptureFixture
) -> None:
    def on_topic(topic: str) -> Marshal:
        create_topic(cluster, topic, 1, 10)
        options = {"group_id": GROUP, "client_id": topic, "heartbeat_interval": HI / 1000}
        return Marshal.on_cluster(cluster.connect(topic), topic=topic, **options)  # type: ignore[arg-type]

    consumer = marshal.consumer([TOPIC], exactly_once=Transactions())
    transact(consumer, next(consumer.batches(5, 0.1)))
    mine = next(consumer.batches(5, 0.1))
    with on_topic("other") as other, other.consumer([TOPIC], exactly_once=Transactions()) as same:
        transact(same, next(same.batches(5, 0.1)))
        assert "on the coordination topic __marshal has committed offset 5 in Kafka, and this one begins" in caplog.text
        assert cluster.broker.committed[GROUP][TOPIC, 0][1].endswith(" other")
        with pytest.raises(TransactionFencedError):
            transact(consumer, mine)
        wait_until(lambda: consumer.stuck)
        assert "a group of this name on the coordination topic other has committed offset 5" in consumer.stuck[0].text
    with on_topic("third") as third, third.consumer([TOPIC], exactly_once=Transactions()) as last:
        next(last.batches(5, 0.1))
    assert "on the coordination topic other has committed offset 5 in Kafka, and this one begins" in caplog.text


def test_a_block_that_hangs_is_in_health_and_metrics(marshal: Marshal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "HELD_BACK_MS", 0.0)
    with marshal.consumer([TOPIC], exactly_once=Transactions()) as consumer:
        with consumer.transaction(next(consumer.batches(5, 0.1))):
            [waiting] = marshal.health().held_back
            assert (waiting.topic, waiting.partition, waiting.offset, waiting.in_hand) == (TOPIC, 0, 0, 5)
            assert "by its batch, whose transaction has not ended" in str(marshal.health())
            assert marshal.metrics().held_back == 1 and marshal.metrics().partitions[0].held_back
        assert marshal.health().held_back == ()


def test_how_transactions_end_is_in_metrics(cluster: MemoryCluster, marshal: Marshal) -> None:
    def ended() -> dict[str, int]:
        return {each.outcome: each.count for each in marshal.metrics().transactions}

    consumer = marshal.consumer([TOPIC], exactly_once=Transactions())
    batches = consumer.batches(5, 0.1)
    first, second = next(batches), next(batches)
    assert (ended(), marshal.metrics().transaction_seconds.count) == ({}, 0)
    waits = threading.Thread(target=transact, args=(consumer, second))
    waits.start()
    wait_until(lambda: marshal.metrics().transactions_waiting == 1)
    transact(consumer, first)
    waits.join(10)
    assert (ended(), marshal.metrics().transactions_waiting) == ({"committed": 2}, 0)
    with pytest.raises(ZeroDivisionError), consumer.transaction(next(batches)):
        raise ZeroDivisionError
    assert ended() == {"committed": 2, "aborted": 1}
    again = next(batches)
    cluster.transactional_producer(f"{GROUP}/{TOPIC}/0", {}, transaction_timeout_ms=60_000).init(1.0)
    with pytest.raises(TransactionFencedError):
        transact(consumer, again)
    consumer.close()
    assert ended() == {"committed": 2, "aborted": 1, "fenced": 1}
    assert marshal.metrics().transaction_seconds.count == 2


def test_closing_in_a_transaction_commits_nothing_or_all(cluster: MemoryCluster, marshal: Marshal) -> None:
    consumer = marshal.consumer([TOPIC], exactly_once=Transactions())
    batch = next(consumer.batches(5, 0.1))
    with pytest.raises((LeaseLostError, TransactionError, ClosedError)), consumer.transaction(batch) as tx:
        tx.produce(OUT, b"never")
        consumer.close()
    with marshal.consumer([TOPIC], exactly_once=Transactions()) as again:
        transact(again, next(again.batches(5, 0.1)))
    assert outputs(cluster) == names(0, 4)


def test_transactions_of_an_event_loop(cluster: MemoryCluster) -> None:
    asyncio.run(transact_in_a_loop(cluster))
    assert outputs(cluster) == ["once"]


def test_a_coordinated_group_takes_over_and_hands_over() -> None:
    cluster = memory_cluster(2, MESSAGES)
    cluster.broker.create_topic(OUT, 1)
    cluster.broker.produce("__marshal", 0, encode(Upgrade("x", "admin", "any", 2)))
    with member(cluster, "a") as first:
        consumer = first.consumer([TOPIC], mode=Group(), exactly_once=Transactions())
        batches = consumer.batches(5, 0.1)
        for _ in range(3):
            transact(consumer, next(batches))
        with member(cluster, "b") as second:
            other = second.consumer([TOPIC], mode=Group(), exactly_once=Transactions())
            wait_until(lambda: len(other.assignment()) == len(consumer.assignment()) == 1)
            for each in (consumer, other):
                batches = each.batches(5, 0.1)
                while each.assignment()[0].offset < MESSAGES:
                    transact(each, next(batches))
            assert Counter(outputs(cluster)) == Counter(dict.fromkeys(names(0, 19), 2))


async def transact_in_a_loop(cluster: MemoryCluster) -> None:
    async with (
        aio.Marshal.on_cluster(
            cluster.connect("a"), group_id=GROUP, client_id="a", heartbeat_interval=HI / 1000
        ) as marshal,
        marshal.consumer([TOPIC], exactly_once=Transactions()) as consumer,
    ):
        with pytest.raises(ConfigurationError, match="transaction"):
            aiter(consumer)
        batches = consumer.batches(5, 0.1)
        with pytest.raises(ZeroDivisionError):
            async with consumer.transaction(await anext(batches)) as tx:
                tx.produce(OUT, b"never")
                raise ZeroDivisionError
        async with consumer.transaction(await anext(batches)) as tx:
            tx.produce(OUT, b"once")


# -- on a real broker -------------------------------------------------------------------------------------


def committed(scene: Scene, topic: str) -> list[str]:
    """What a read_committed reader of Kafka's own sees."""
    reader = Reader(
        {
            "bootstrap.servers": scene.bootstrap,
            "group.id": f"{scene.group}-reader",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    reader.assign([Place(topic, 0, 0)])
    found: list[str] = []
    while (message := reader.poll(10)) is not None:
        if (error := message.error()) is not None:
            assert error.code() == KafkaError._PARTITION_EOF
            break
        found.append(as_text(message.value()))
    reader.close()
    return found


def copy(consumer: Consumer, topic: str, until: int) -> None:
    """Copy messages until the next offset is ``until``."""
    for batch in consumer.batches(7, 0.2):
        with consumer.transaction(batch) as tx:
            for message in batch:
                tx.produce(topic, message.value())
        if batch.last_offset + 1 >= until:
            return


def test_two_owners_and_repositions_on_a_broker(scene: Scene) -> None:
    topic, out = scene.topic(1, 40), scene.topic(1)
    with scene.member("a") as first, first.consumer([topic], exactly_once=Transactions()) as consumer:
        copy(consumer, out, 20)
    done = len(committed(scene, out))
    assert committed(scene, out) == names(0, done - 1)
    with scene.member("b") as second:
        consumer = second.consumer([topic], exactly_once=Transactions())
        copy(consumer, out, 40)
        assert committed(scene, out) == names(0, 39)
        admin = Admin(scene.bootstrap, topic=scene.coordination)
        with admin.pause(scene.group) as pause:  # back: what was done is done again, on purpose
            pause.wait_released(timeout=20)
            pause.reposition({(topic, 0): 30})
        copy(consumer, out, 40)
        assert committed(scene, out) == [*names(0, 39), *names(30, 39)]
        scene.publish(topic, 1, 20)
        with admin.pause(scene.group) as pause:  # forward: what lies between never is
            pause.wait_released(timeout=20)
            pause.reposition({(topic, 0): 50})
        copy(consumer, out, 60)
        assert committed(scene, out) == [*names(0, 39), *names(30, 39), *names(10, 19)]


def test_after_a_record_that_the_broker_refuses_the_next_transaction_is_committed(scene: Scene) -> None:
    """librdkafka counts the refused record: the same producer's next one would be out of sequence."""
    topic, out = scene.topic(1, 5), scene.topic(1)
    with scene.member("a") as a, a.consumer([topic], exactly_once=Transactions()) as consumer:
        batches = consumer.batches(5, 0.1)
        with pytest.raises(ProduceError, match="larger than"), consumer.transaction(next(batches)) as tx:
            tx.produce(out, os.urandom(3_000_000))
        with consumer.transaction(next(batches)) as tx:
            tx.produce(out, b"small")
    assert committed(scene, out) == ["small"]
