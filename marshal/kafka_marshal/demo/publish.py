"""The first step: topics are made, and every row of the file becomes a message."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kafka_marshal.adapters.interface import Cluster
from kafka_marshal.adapters.kafka.data_writer import KafkaDataWriter
from kafka_marshal.coordination import DEFAULT_PARTITIONS, DEFAULT_TOPIC, create_topic
from kafka_marshal.demo.errors import DemoError
from kafka_marshal.demo.flights import encode, read
from kafka_marshal.demo.options import PARTITIONS

__all__ = ["Published", "Scene", "make_topics", "publish"]

_TIMEOUT_S = 30.0

#: Rows between two reports of progress.
_REPORT_EVERY = 5_000


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a run takes place: one Kafka, two topics, one group."""

    bootstrap: str
    config: Mapping[str, object]
    topic: str
    coordination: str
    group_id: str

    @classmethod
    def on_own_kafka(cls, bootstrap: str, config: Mapping[str, object]) -> Scene:
        """On a Kafka that was started for this run: the plain names."""
        return cls(bootstrap, config, "flights", DEFAULT_TOPIC, "delays")

    @classmethod
    def on_named_kafka(cls, bootstrap: str, config: Mapping[str, object]) -> Scene:
        """On somebody's Kafka: names that nobody uses, so that nothing there is touched, and runs do not meet."""
        run = uuid.uuid4().hex[:10]
        topic, coordination = f"kafka-marshal-demo-{run}-flights", f"kafka-marshal-demo-{run}-log"
        return cls(bootstrap, config, topic, coordination, f"kafka-marshal-demo-{run}-delays")


@dataclass(frozen=True, slots=True)
class Published:
    """What is in the topic now."""

    rows: int
    #: Partition → the offset after its last message; they all begin at 0.
    ends: Mapping[int, int]


def make_topics(cluster: Cluster, scene: Scene, brokers: int) -> None:
    """Create both topics on a cluster of that many brokers. Raises CoordinationTopicError where it says no."""
    cluster.create_topic(scene.topic, PARTITIONS, min(3, brokers), {}, _TIMEOUT_S)
    create_topic(cluster, scene.coordination, DEFAULT_PARTITIONS, _TIMEOUT_S)


def publish(cluster: Cluster, scene: Scene, file: Path, rows: int | None, report: Callable[[int], None]) -> Published:
    """Write the first rows of the file (None: all) to the topic; all are acknowledged when it returns.

    report is called with the number of rows written so far. Raises DataMissingError for the file,
    KafkaUnavailableError (or its like) where Kafka does not take the messages, DemoError where it has another number.
    """
    count = 0
    with KafkaDataWriter(scene.topic, scene.bootstrap, scene.config) as writer:
        for row in read(file, rows):
            key, value = encode(row)
            writer.write(value, key)
            count += 1
            if count % _REPORT_EVERY == 0:
                report(count)
        writer.flush()
    report(count)
    marks = cluster.watermarks([(scene.topic, partition) for partition in range(PARTITIONS)], _TIMEOUT_S)
    ends = {partition: high for (_, partition), (_, high) in sorted(marks.items())}
    if sum(ends.values()) != count:
        raise DemoError(
            f"{count} rows were written to {scene.topic!r}, and the broker says it has {sum(ends.values())}. Nothing "
            "was processed. Did somebody else write to it? Run the demo again."
        )
    return Published(count, ends)
