"""P6: offsets without messages at a partition's end are done when the reader has passed them."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from confluent_kafka import Producer

from kafka_marshal import Delivery
from kafka_marshal.ports import Message
from tests.client.conftest import Scene, take, wait_until

pytestmark = pytest.mark.broker


def transactions(scene: Scene, topic: str, *, aborted: int) -> None:
    """Three committed records, then ``aborted`` aborted ones: the log ends with markers."""
    producer = Producer({"bootstrap.servers": scene.bootstrap, "transactional.id": uuid.uuid4().hex})
    producer.init_transactions(20)
    for count, end in ((3, producer.commit_transaction), (aborted, producer.abort_transaction)):
        if count:
            producer.begin_transaction()
            for number in range(count):
                producer.produce(topic, str(number).encode(), partition=0)
            producer.flush(20)
            end(20)


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
@pytest.mark.parametrize(("aborted", "end"), [(0, 4), (5, 10)], ids=["a marker", "aborted records and two markers"])
def test_q40_all_is_done_at_the_end_of_a_topic(scene: Scene, delivery: Delivery, aborted: int, end: int) -> None:
    topic = scene.topic()
    transactions(scene, topic, aborted=aborted)
    member = scene.member("a")
    consumer = member.consumer([topic], delivery=delivery)
    assert take(consumer, 3) == [(0, 0), (0, 1), (0, 2)]
    assert consumer.poll(0.3) is None

    def done() -> bool:
        consumer.poll(0.05)
        lease = member.world.lease(topic, 0)
        return lease is not None and lease.stable == end - 1

    wait_until(done, what=f"done through {end - 1}")
    assert [x.offset for x in consumer.assignment()] == [end]
    scene.publish(topic, 1, 2)
    assert take(consumer, 2) == [(0, end), (0, end + 1)], "what comes after it is handed out"


def test_q41_a_read_that_was_not_noted_is_read_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that left the reader unrecorded would look like offsets that Kafka never delivers."""
    topic = scene.topic(1, 20)
    consumer = scene.member("a").consumer([topic])
    assert take(consumer, 5) == [(0, offset) for offset in range(5)]
    scene.publish(topic, 1, 20)
    read = consumer._fetcher.reader.read
    lost: list[Message] = []

    def torn(size: int, timeout_s: float) -> Any:
        found = read(size, timeout_s)
        if found[0] and not lost:
            lost.extend(found[0])
            raise OSError("torn")
        return found

    monkeypatch.setattr(consumer._fetcher.reader, "read", torn)
    got: list[int | None] = []
    errors = 0
    while len(got) < 35:
        try:
            message = consumer.poll(20)
        except OSError:
            errors += 1
            continue
        assert message is not None
        got.append(message.offset())
        consumer.done(message)
    assert got == list(range(5, 40))
    assert lost
    assert (errors, consumer._fetcher.reread) == (1, 1)
