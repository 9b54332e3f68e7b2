"""A topic recreated under a worker: no message of the new one is delivered at an old position (P11)."""

from __future__ import annotations

import time
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from kafka_marshal import Group
from tests.client.conftest import Scene, wait_until

pytestmark = [pytest.mark.broker, pytest.mark.slow]

OLD, NEW = 20, 60


def recreate(scene: Scene, topic: str) -> None:
    """Recreate a topic with more messages than the old one."""
    admin = AdminClient({"bootstrap.servers": scene.bootstrap})
    admin.delete_topics([topic])[topic].result(20)
    wait_until(lambda: topic not in scene.cluster.topic_info([topic], 10))
    wait_until(lambda: admin.create_topics([NewTopic(topic, 1)])[topic].exception(20) is None)
    producer = Producer({"bootstrap.servers": scene.bootstrap})
    for number in range(NEW):
        producer.produce(topic, f"new {number}".encode(), partition=0)
    assert producer.flush(20) == 0


@pytest.mark.parametrize("kind", ["claimed", "coordinated"])
def test_nothing_of_the_new_one_is_given(scene: Scene, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = scene.topic(1, OLD)
    member = scene.member()
    consumer: Any = member.consumer([topic]) if kind == "claimed" else member.consumer([topic], mode=Group())
    seen: list[bytes] = []

    def take() -> int:
        for message in consumer.consume(100, 0.1):
            seen.append(message.value())
            consumer.done(message)
        return len(seen)

    wait_until(lambda: take() == OLD)
    # Topics are not polled: the reader must notice it by itself.
    monkeypatch.setattr(member._driver.upkeep.topics, "is_due", lambda now: False)
    recreate(scene, topic)
    wait_until(lambda: take() and consumer.lost_positions, 90)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        take()
    assert seen == [str(number).encode() for number in range(OLD)]
