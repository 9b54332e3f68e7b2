"""Open transactions in the input are named: by `check` and its like, and where offsets are pending."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from kafka_marshal import KafkaUnavailableError
from kafka_marshal.admin.transfer import empty_kafka_group
from kafka_marshal.observe.stuck import OpenTransaction, behind_transactions, mark_stuck, open_transactions, parse
from tests.cli.test_view import held
from tests.client.conftest import Scene
from tests.client.conftest import scene as scene

#: TransactionLogValue of Kafka: producer 5, epoch 2, timeout 60 s, ongoing, t [0, 3], since 1,000 ms.
KEY = b"\x00\x00\x00\x03pay"
NUMBERS = (5).to_bytes(8, "big") + (2).to_bytes(2, "big") + (60_000).to_bytes(4, "big") + b"\x01"
TIMES = (2_000).to_bytes(8, "big") + (1_000).to_bytes(8, "big")
OLD = b"\x00\x00" + NUMBERS + b"\x00\x00\x00\x01\x00\x01t\x00\x00\x00\x02" + b"\x00\x00\x00\x00\x00\x00\x00\x03" + TIMES
NEW = (
    b"\x00\x01" + NUMBERS + b"\x02\x02t\x03" + b"\x00\x00\x00\x00\x00\x00\x00\x03" + b"\x01\x00\x02xy" + TIMES + b"\x00"
)


@pytest.mark.parametrize("value", [OLD, NEW])
def test_both_versions_of_a_record_are_read(value: bytes) -> None:
    assert parse(KEY, value) == OpenTransaction("pay", 5, 2, 60_000, 1_000, frozenset({("t", 0), ("t", 3)}))
    ended = value.replace(NUMBERS, NUMBERS[:-1] + b"\x04")
    assert parse(KEY, ended) is None


@pytest.mark.parametrize("cut", range(len(NEW) - 1))
def test_a_record_that_is_cut_is_none(cut: int) -> None:
    try:
        assert parse(KEY, NEW[:cut]) is None
    except ValueError:
        return


@pytest.fixture
def producer(scene: Scene) -> Iterator[Producer]:
    """A transactional producer whose transactions end with the test."""
    made = Producer({"bootstrap.servers": scene.bootstrap, "transactional.id": f"pay-{scene.group}"})
    made.init_transactions(20)
    made.begin_transaction()
    yield made
    made.abort_transaction(20)


def test_what_holds_a_partition_back_is_named(scene: Scene, producer: Producer) -> None:
    topic = scene.topic(2, 3)
    for partition in (0, 1):
        producer.produce(topic, b"open", partition=partition)
    assert producer.flush(20) == 0
    scene.publish(topic, 1, 1)
    now_ms = int(time.time() * 1000)
    found = behind_transactions(scene.cluster, {(topic, 0): 3, (topic, 1): 2}, now_ms)
    assert found.keys() == {(topic, 0)}, "of the other there is something to read"
    assert f"open from offset 3 on (transactional id 'pay-{scene.group}', producer " in found[topic, 0]
    assert f"abort --topic {topic} --partition 0 --start-offset 3" in found[topic, 0]

    row = replace(held(waiting_ms=None), topic=topic, stable=2, log_start=0)
    [row] = mark_stuck(scene.cluster, [row], now_ms)
    assert row.stuck.startswith("a transaction is open from offset 3 on")


def test_without_the_state_topic_the_command_is_named(scene: Scene, producer: Producer) -> None:
    assert open_transactions(scene.cluster, []) == {}
    assert open_transactions(scene.cluster, [("no such topic", 0)]) == {}


def test_a_pending_offset_is_told_from_brokers_that_do_not_answer(scene: Scene, producer: Producer) -> None:
    topic = scene.topic(1, 3)
    group = Consumer({"bootstrap.servers": scene.bootstrap, "group.id": scene.group})
    offsets = [TopicPartition(topic, 0, 2)]
    producer.send_offsets_to_transaction(offsets, group.consumer_group_metadata(), 20)
    group.close()
    with pytest.raises(KafkaUnavailableError, match="has an offset in a transaction that has not ended"):
        scene.cluster.kafka_group(scene.group, 6)
    with pytest.raises(KafkaUnavailableError, match=f"most likely transactional id 'pay-{scene.group}', producer "):
        empty_kafka_group(scene.cluster, scene.group)
