"""The first step: topics are made, and every row of the file becomes a message."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flights.data import encode, read
from flights.errors import DemoError
from flights.options import PARTITIONS
from kafka_marshal.adapters.kafka.data_writer import KafkaDataWriter
from kafka_marshal.node.coordination_topic import DEFAULT_PARTITIONS, DEFAULT_TOPIC, create_topic, snapshots_topic
from kafka_marshal.ports import Cluster

__all__ = ["Published", "Scene", "flights_alone", "make_topics", "publish"]

_TIMEOUT_S = 30.0

#: Rows between two reports of progress.
_REPORT_EVERY = 5_000


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a run takes place: one Kafka, two topics, one group."""

    bootstrap: str
    config: Mapping[str, object] = field(repr=False)
    topic: str
    coordination: str
    group_id: str

    @property
    def dead_letters(self) -> str:
        """The topic for messages that are no flights."""
        return f"{self.topic}-dead-letters"

    @property
    def topics(self) -> list[str]:
        """All that a run may make."""
        return [self.topic, self.coordination, snapshots_topic(self.coordination), self.dead_letters]

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

    #: Messages.
    rows: int
    #: Partition → the offset after its last message; they all begin at 0.
    ends: Mapping[int, int]


def make_topics(cluster: Cluster, scene: Scene, brokers: int, *, dead_letters: bool = False) -> None:
    """Create the topics on a cluster of that many brokers. Raises CoordinationTopicError where it says no."""
    cluster.create_topic(scene.topic, PARTITIONS, min(3, brokers), {}, _TIMEOUT_S)
    if dead_letters:
        cluster.create_topic(scene.dead_letters, 1, min(3, brokers), {}, _TIMEOUT_S)
    create_topic(cluster, scene.coordination, DEFAULT_PARTITIONS, _TIMEOUT_S)


def flights_alone(rows: Iterable[Sequence[str]]) -> Iterator[tuple[bytes | None, bytes | None]]:
    """Key and value of each row's message, and nothing else."""
    return map(encode, rows)


def publish(
    cluster: Cluster,
    scene: Scene,
    file: Path,
    rows: int | None,
    report: Callable[[int], None],
    messages: Callable[[Iterable[Sequence[str]]], Iterable[tuple[bytes | None, bytes | None]]] = flights_alone,
) -> Published:
    """Write the first rows of the file (None: all) to the topic; all are acknowledged when it returns.

    messages: makes rows into (key, value). report is called with the number of messages written so far. Raises
    DataMissingError for the file, KafkaUnavailableError (or its like) where Kafka does not take the messages, DemoError
    where it has another number.
    """
    count = 0
    with KafkaDataWriter(scene.topic, scene.bootstrap, scene.config) as writer:
        for key, value in messages(read(file, rows)):
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
            f"{count} messages were written to {scene.topic!r}, and the broker says it has {sum(ends.values())}. "
            "Nothing was processed. Did somebody else write to it? Run the demo again."
        )
    return Published(count, ends)
