"""A broker that freezes repeatedly: when it is back, every member continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from confluent_kafka import Producer

from kafka_marshal.testing import RunningKafka
from tests.campaigns.freezes import Crowd, freeze
from tests.client.conftest import Scene, wait_until

PARTITIONS = 24
FROZEN_S = 12.0
BETWEEN_S = 30.0


@pytest.fixture
def feeding(scene: Scene) -> Iterator[str]:
    """A topic with a constant feed of messages."""
    topic, ended = scene.topic(PARTITIONS), threading.Event()
    producer = Producer({"bootstrap.servers": scene.bootstrap})

    def feed() -> None:
        while not ended.is_set():
            for partition in range(PARTITIONS):
                with suppress(BufferError):  # the broker is frozen
                    producer.produce(topic, bytes(100), partition=partition)
            producer.poll(0.2)

    thread = threading.Thread(target=feed)
    thread.start()
    yield topic
    ended.set()
    thread.join()


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_all_continues_after_each_freeze(scene: Scene, kafka_broker: RunningKafka, feeding: str) -> None:
    moved: dict[str, float] = {}
    ended = threading.Event()

    def work(name: str) -> None:
        with scene.member(name, heartbeat_interval_ms=3_000) as member, member.consumer([feeding]) as consumer:
            while not ended.is_set():
                for message in consumer.consume(1_000, 0.5):
                    consumer.done(message)
                    moved[f"{message.partition()}"] = time.monotonic()

    workers = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(4)]
    for worker in workers:
        worker.start()
    try:
        wait_until(lambda: len(moved) == PARTITIONS, 180)
        for _ in range(6):
            kafka_broker.pause()
            time.sleep(FROZEN_S)
            kafka_broker.resume()
            back = time.monotonic()
            time.sleep(BETWEEN_S)
            wait_until(lambda back=back: min(moved.values()) > back, 180, "all partitions go on")  # type: ignore[misc]
    finally:
        ended.set()
        for worker in workers:
            worker.join()


@pytest.mark.broker
def test_members_of_all_kinds_continue_after_a_freeze(kafka_bootstrap: str, kafka_broker: RunningKafka) -> None:
    """The short form of the campaign."""
    with Crowd(kafka_bootstrap, 8, 500) as crowd:
        crowd.begin()
        assert freeze(kafka_broker, crowd, 4.0, limit_s=60.0).late == ()
        assert crowd.failures == []
