"""Kafka's consumer groups: reading and writing their commits from outside."""

from __future__ import annotations

import os
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.errors import MarshalError
from tests.contract.sides import TIMEOUT_S, Side


def test_a_group_that_no_one_knows_is_empty(side: Side) -> None:
    found = side.cluster.kafka_group(f"g-{os.urandom(4).hex()}", TIMEOUT_S)
    assert (found.members, found.committed) == ((), {})


def test_what_is_committed_is_there(side: Side) -> None:
    topic, group = side.topic(3), f"g-{os.urandom(4).hex()}"
    side.cluster.commit_for_group(group, {(topic, 0): (7, "so far"), (topic, 2): (0, "")}, TIMEOUT_S)
    side.cluster.commit_for_group(group, {(topic, 0): (5, "")}, TIMEOUT_S)
    side.cluster.commit_for_group(group, {}, TIMEOUT_S)
    found = side.cluster.kafka_group(group, TIMEOUT_S)
    assert (found.members, found.committed) == ((), {(topic, 0): (5, ""), (topic, 2): (0, "")})
    assert side.cluster.kafka_group(f"{group}x", TIMEOUT_S).committed == {}


@pytest.mark.broker
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_group_with_members_is_seen_and_takes_nothing(protocol: str, kafka_broker: Any) -> None:
    cluster = KafkaCluster(kafka_broker.bootstrap_servers, kafka_broker.client_config)
    topic, group = f"contract-{os.urandom(4).hex()}", f"g-{os.urandom(4).hex()}"
    cluster.create_topic(topic, 1, 1, {}, TIMEOUT_S)
    settings = {"group.id": group, "client.id": "worker-1", "group.protocol": protocol, "auto.offset.reset": "earliest"}
    consumer = Consumer({**kafka_broker.client_config, "bootstrap.servers": kafka_broker.bootstrap_servers, **settings})
    try:
        consumer.subscribe([topic])
        while not consumer.assignment():
            consumer.poll(0.1)
        consumer.commit(offsets=[TopicPartition(topic, 0, 3, "mine")], asynchronous=False)
        found = cluster.kafka_group(group, TIMEOUT_S)
        assert (found.members, found.committed) == (("worker-1",), {(topic, 0): (3, "mine")})
        with pytest.raises(MarshalError):
            cluster.commit_for_group(group, {(topic, 0): (9, "")}, TIMEOUT_S)
    finally:
        consumer.close()
    assert cluster.kafka_group(group, TIMEOUT_S).members == ()
    cluster.commit_for_group(group, {(topic, 0): (9, "")}, TIMEOUT_S)
    assert cluster.kafka_group(group, TIMEOUT_S).committed == {(topic, 0): (9, "")}
    cluster.close()
