"""Three brokers: two of them survive the faults of the third."""

from __future__ import annotations

import json
import threading

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from kafka_marshal import Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.cli.app import run
from kafka_marshal.node.coordination_topic import create_topic
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
    eventually(lambda: in_sync(kafka_cluster3, topic) == [1, 2, 3], 90, "the killed broker's catching up")
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


@pytest.mark.campaign
def test_a_partition_whose_only_broker_is_gone_is_reported_and_continues_when_it_is_back(
    kafka_cluster3: RunningKafka, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kafka_marshal.engine.work.stuck.SILENT_AFTER_MS", 1_500.0)
    monkeypatch.setattr("kafka_marshal.node.topics.METADATA_INTERVAL_MS", 300.0)
    bootstrap, log, topic = kafka_cluster3.bootstrap_servers, "__marshal-leader", "one-replica"
    cluster = KafkaCluster(bootstrap, {})
    create_topic(cluster, log, 2, 30)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, 1, replica_assignment=[[3]])])[topic].result(20)
    produce(kafka_cluster3, topic, b"before")
    shown = ["--bootstrap", bootstrap, "--topic", log, "status", "--json"]
    member = Marshal(bootstrap, group_id="g", topic=log, heartbeat_interval=2.0)
    with member, member.consumer([topic]) as consumer:
        (before,) = consumer.consume(1, 20.0)
        consumer.done(before)
        kafka_cluster3.kill(3)
        try:
            eventually(lambda: consumer.poll(0.05) or [x.why for x in consumer.stuck] == ["no leader"], 90, "a word")
            eventually(lambda: run(shown) == 0, 90, "leaders of the log")
            (lease,) = json.loads(capfd.readouterr().out)["leases"]
            assert lease["stuck"].startswith("no leader")
        finally:
            kafka_cluster3.restart(3)
        produce(kafka_cluster3, topic, b"after")
        eventually(lambda: [x.value() for x in consumer.consume(1, 1.0)] == [b"after"], 180, "what came after")
        eventually(lambda: not consumer.stuck, 90, "its end")
    cluster.close()
