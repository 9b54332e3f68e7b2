"""Single steps beside a bare round trip from producer to consumer: interleaved, each after a moment of idleness."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.common import bench_kafka
from kafka_marshal import Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.coordination_topic import create_topic

__all__ = ["COORDINATION_PARTITIONS", "IDLE_S", "RawPair", "beside_raw_pair"]

IDLE_S = 0.010

#: Uncounted rounds, in which connections warm up.
WARM_UP = 20

COORDINATION_PARTITIONS = 8

#: Takes the round's number, returns the step's duration (s).
Step = Callable[[int], float]


class RawPair:
    """A bare producer and consumer with the best settings for latency."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._topic = topic
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "acks": "all", "enable.idempotence": True, "linger.ms": 0}
        )
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "raw", "enable.auto.commit": False, "fetch.min.bytes": 1}
        )
        self._consumer.assign([TopicPartition(topic, 0, 0)])

    def round_trip(self) -> float:
        """Seconds until its own consumer has a record of 75 bytes."""
        began = time.perf_counter()
        self._producer.produce(self._topic, b"x" * 75, partition=0)
        self._producer.poll(0)
        while (message := self._consumer.poll(1.0)) is None or message.error() is not None:
            pass
        return time.perf_counter() - began

    def close(self) -> None:
        """Free both."""
        self._producer.flush(5)
        self._consumer.close()


def beside_raw_pair(rounds: int, prepare: Callable[[Marshal], Step]) -> tuple[list[float], list[float]]:
    """Milliseconds of each round's step, and of its bare round trip, on the same broker."""
    ours: list[float] = []
    bare: list[float] = []
    with bench_kafka() as bootstrap:
        cluster = KafkaCluster(bootstrap, {})
        coordination, topic = (f"{name}-{uuid.uuid4().hex[:8]}" for name in ("__marshal", "raw"))
        create_topic(cluster, coordination, COORDINATION_PARTITIONS, 10)
        cluster.create_topic(topic, 1, 1, {}, 10)
        raw = RawPair(bootstrap, topic)
        with Marshal(bootstrap, group_id="bench", topic=coordination) as marshal:
            step = prepare(marshal)
            for number in range(rounds + WARM_UP):
                time.sleep(IDLE_S)
                trip_s = raw.round_trip()
                time.sleep(IDLE_S)
                step_s = step(number)
                if number >= WARM_UP:
                    bare.append(trip_s * 1000)
                    ours.append(step_s * 1000)
        raw.close()
        cluster.close()
    return ours, bare
