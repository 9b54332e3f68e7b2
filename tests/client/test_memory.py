"""Memory is bounded by bytes: ``max_bytes_in_flight``."""

from __future__ import annotations

from itertools import islice

import pytest
from confluent_kafka import Producer

from kafka_marshal import Delivery
from tests.client.conftest import Scene

pytestmark = pytest.mark.broker

SIZE = 50_000
PARTITIONS, MESSAGES = 4, 100


def large_messages(scene: Scene) -> str:
    topic = scene.topic(PARTITIONS)
    producer = Producer({"bootstrap.servers": scene.bootstrap})
    for number in range(MESSAGES):
        for partition in range(PARTITIONS):
            producer.produce(topic, b"x" * SIZE, str(number), partition=partition)
    assert producer.flush(30) == 0
    return topic


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
def test_batches_of_large_messages_are_smaller_than_asked_for(scene: Scene, delivery: Delivery) -> None:
    topic = large_messages(scene)
    limit = 20 * SIZE
    consumer = scene.member("a").consumer([topic], delivery=delivery, max_bytes_in_flight=limit)
    seen = 0
    for batch in consumer.batches(MESSAGES, 1.0):
        assert len(batch) * SIZE <= limit
        assert consumer._delivery.buffered * SIZE <= limit
        seen += len(batch)
        batch.done()
        if seen == PARTITIONS * MESSAGES:
            break


def test_one_message_that_is_larger_than_the_limit_comes_all_the_same(scene: Scene) -> None:
    topic = large_messages(scene)
    consumer = scene.member("a").consumer([topic], max_bytes_in_flight=1_000)
    got = [(m.partition(), m.offset()) for m in islice(consumer, PARTITIONS * MESSAGES)]
    assert sorted(got) == [(p, o) for p in range(PARTITIONS) for o in range(MESSAGES)]
