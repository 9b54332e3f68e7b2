"""The pytest plugin's fixtures, used as a user's tests would use them."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer, Producer

from kafka_marshal.testing import RunningKafka
from kafka_marshal.testing.plugin import TopicFactory

pytestmark = pytest.mark.broker


def test_a_message_goes_through(kafka_bootstrap: str, topic_factory: TopicFactory) -> None:
    topic = topic_factory(2)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    producer.produce(topic, b"value", b"key", partition=1)
    assert producer.flush(10) == 0
    consumer = Consumer({"bootstrap.servers": kafka_bootstrap, "group.id": topic, "auto.offset.reset": "earliest"})
    try:
        consumer.subscribe([topic])
        message = consumer.poll(20)
        assert message is not None
        assert message.error() is None
        assert (message.topic(), message.partition(), message.key(), message.value()) == (topic, 1, b"key", b"value")
    finally:
        consumer.close()


def test_topics_have_names_of_their_own_and_the_settings_asked_for(
    kafka_broker: RunningKafka, topic_factory: TopicFactory
) -> None:
    first, second = topic_factory(3, settings={"message.timestamp.type": "LogAppendTime"}), topic_factory(1)
    assert first != second
    producer = Producer({"bootstrap.servers": kafka_broker.bootstrap_servers})
    topics = producer.list_topics(timeout=10).topics
    assert len(topics[first].partitions) == 3
    assert len(topics[second].partitions) == 1
    stamps: list[tuple[int, int]] = []
    producer.produce(first, b"x", on_delivery=lambda _error, message: stamps.append(message.timestamp()))
    assert producer.flush(10) == 0
    assert stamps[0][0] == 2  # TIMESTAMP_LOG_APPEND_TIME
