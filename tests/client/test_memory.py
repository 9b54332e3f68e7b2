"""Memory is bounded by bytes: ``max_bytes_in_flight``."""

from __future__ import annotations

import time
from itertools import islice

import pytest
from confluent_kafka import Producer

from kafka_marshal import ConfigurationError, Delivery
from kafka_marshal.adapters.message import Message
from tests.client.conftest import Scene, wait_until

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


def test_run_continues_where_one_message_is_larger_than_the_limit(scene: Scene) -> None:
    topic = large_messages(scene)
    member = scene.member("a")
    consumer = member.consumer([topic], max_bytes_in_flight=1_000)
    got: list[tuple[int, int]] = []

    def handle(message: Message) -> None:
        got.append((message.partition(), message.offset()))
        if len(got) == PARTITIONS * MESSAGES:
            member.stop()

    consumer.run(handle)
    assert sorted(got) == [(p, o) for p in range(PARTITIONS) for o in range(MESSAGES)]


def test_a_limit_below_one_byte_is_refused(scene: Scene) -> None:
    with pytest.raises(ConfigurationError, match="max_bytes_in_flight must be at least 1"):
        scene.member("a").consumer(["t"], max_bytes_in_flight=0)


def test_what_is_in_flight_and_not_done_counts_and_each_partition_has_one_in_any_case(scene: Scene) -> None:
    """While nothing is done, memory stays within the limit; a partition continues when something of it is done."""
    topic = large_messages(scene)
    limit = 20 * SIZE
    consumer = scene.member("a").consumer([topic], max_bytes_in_flight=limit)
    wait_until(lambda: len(consumer.assignment()) == PARTITIONS)
    kept: list[Message] = []
    idle_since = time.monotonic()
    while time.monotonic() < idle_since + 1.5:
        if (message := consumer.poll(0.1)) is not None:
            kept.append(message)
            idle_since = time.monotonic()
    assert {message.partition() for message in kept} == set(range(PARTITIONS))
    fetched = consumer._delivery.buffered
    assert (len(kept) + fetched) * SIZE <= limit + 2 * PARTITIONS * SIZE, f"{len(kept)} in hand, {fetched} fetched"
    seen = {(message.partition(), message.offset()) for message in kept}
    for message in kept:
        consumer.done(message)
    kept.clear()
    while len(seen) < PARTITIONS * MESSAGES:
        message = consumer.poll(20)
        assert message is not None, f"{len(seen)} came"
        seen.add((message.partition(), message.offset()))
        consumer.done(message)


def test_a_partition_that_is_never_done_holds_up_no_other(scene: Scene) -> None:
    topic = large_messages(scene)
    consumer = scene.member("a").consumer([topic], max_bytes_in_flight=20 * SIZE)
    kept: list[Message] = []
    others = 0
    while others < (PARTITIONS - 1) * MESSAGES:
        message = consumer.poll(20)
        assert message is not None, f"{others} messages of others came, with {len(kept)} in hand"
        if message.partition() == 0:
            kept.append(message)
        else:
            others += 1
            consumer.done(message)
    assert len(kept) < MESSAGES
