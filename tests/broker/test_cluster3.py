"""Three brokers: what one of them does, the other two survive."""

from __future__ import annotations

import threading

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from kafka_marshal.adapters.probe import Probe
from kafka_marshal.testing import RunningKafka
from kafka_marshal.testing.plugin import TopicFactory
from tests.broker.helpers import consume, eventually, produce

pytestmark = [pytest.mark.cluster3, pytest.mark.slow]


def leader_of(kafka: RunningKafka, topic: str) -> int:
    return int(AdminClient({"bootstrap.servers": kafka.bootstrap_servers}).list_topics(topic, timeout=10)
               .topics[topic].partitions[0].leader)  # fmt: skip


def in_sync(kafka: RunningKafka, topic: str) -> list[int]:
    topics = AdminClient({"bootstrap.servers": kafka.bootstrap_servers}).list_topics(topic, timeout=10).topics
    return sorted(topics[topic].partitions[0].isrs)


def test_one_killed_broker_stops_nothing_and_comes_back(
    kafka_cluster3: RunningKafka, topic_factory: TopicFactory
) -> None:
    topic = topic_factory(1, kafka=kafka_cluster3)
    assert kafka_cluster3.broker_ids == (1, 2, 3)
    assert in_sync(kafka_cluster3, topic) == [1, 2, 3]
    produce(kafka_cluster3, topic, b"before")
    leader = leader_of(kafka_cluster3, topic)
    kafka_cluster3.kill(leader)
    try:
        produce(kafka_cluster3, topic, b"during")
        assert leader_of(kafka_cluster3, topic) != leader
        assert consume(kafka_cluster3, topic, 2) == [b"before", b"during"]
    finally:
        kafka_cluster3.restart(leader)
    eventually(lambda: in_sync(kafka_cluster3, topic) == [1, 2, 3], 30, "the killed broker's catching up")
    assert Probe(kafka_cluster3.bootstrap_servers).broker_ids(10) == {1, 2, 3}


def test_with_two_gone_nothing_is_acknowledged_until_one_is_back(
    kafka_cluster3: RunningKafka, topic_factory: TopicFactory
) -> None:
    topic = topic_factory(1, kafka=kafka_cluster3)
    produce(kafka_cluster3, topic, b"before")
    leader = leader_of(kafka_cluster3, topic)
    followers = [each for each in kafka_cluster3.broker_ids if each != leader]
    for each in followers:
        kafka_cluster3.pause(each)
    acks: list[object] = []
    producer = Producer({"bootstrap.servers": kafka_cluster3.bootstrap_servers, "acks": "all"})
    producer.produce(topic, b"during", partition=0, on_delivery=lambda error, _message: acks.append(error))
    flusher = threading.Thread(target=producer.flush, args=(60,))
    flusher.start()
    try:
        flusher.join(2.0)
        assert not acks, "min.insync.replicas is 2"
    finally:
        for each in followers:
            kafka_cluster3.resume(each)
    flusher.join()
    assert acks == [None]
    assert consume(kafka_cluster3, topic, 2)[0] == b"before"
