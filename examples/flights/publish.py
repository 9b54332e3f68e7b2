"""The first step: topics are made, and every row of the file becomes a message."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flights.data import encode, read
from flights.errors import DemoError
from flights.kafka import Kafka, KeyAndValue
from flights.options import PARTITIONS
from kafka_marshal import Admin

__all__ = ["Published", "Scene", "flights_alone", "make_topics", "publish"]

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
        return [self.topic, self.coordination, f"{self.coordination}_snapshots", self.dead_letters]

    @classmethod
    def on_own_kafka(cls, bootstrap: str, config: Mapping[str, object]) -> Scene:
        """On a Kafka that was started for this run: the plain names."""
        return cls(bootstrap, config, "flights", "__marshal", "delays")

    @classmethod
    def on_named_kafka(cls, bootstrap: str, config: Mapping[str, object]) -> Scene:
        """On your Kafka: new names, so that nothing there is touched, and runs do not meet."""
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


def make_topics(kafka: Kafka, scene: Scene, *, dead_letters: bool = False) -> None:
    """Create the topics. Raises KafkaUnavailableError or CoordinationTopicError if it cannot be done."""
    kafka.create_topics({scene.topic: PARTITIONS, **({scene.dead_letters: 1} if dead_letters else {})})
    Admin(scene.bootstrap, topic=scene.coordination, config=scene.config).init()


def flights_alone(rows: Iterable[Sequence[str]]) -> Iterator[KeyAndValue]:
    """Key and value of each row's message, and nothing else."""
    return map(encode, rows)


def publish(
    kafka: Kafka,
    scene: Scene,
    file: Path,
    rows: int | None,
    report: Callable[[int], None],
    messages: Callable[[Iterable[Sequence[str]]], Iterable[KeyAndValue]] = flights_alone,
) -> Published:
    """Write the first rows of the file (None: all) to the topic; all are acknowledged when it returns.

    messages: makes rows into (key, value). report is called with the number of messages written so far. Raises
    DataMissingError for the file, KafkaUnavailableError (or its like) where Kafka does not take the messages, DemoError
    where it has another number.
    """
    count = 0
    for count in kafka.write(scene.topic, messages(read(file, rows))):
        if count % _REPORT_EVERY == 0:
            report(count)
    report(count)
    ends = kafka.ends(scene.topic, PARTITIONS)
    if sum(ends.values()) != count:
        raise DemoError(
            f"{count} messages were written to {scene.topic!r}, and the broker says it has {sum(ends.values())}. "
            "Nothing was processed. Did somebody else write to it? Run the demo again."
        )
    return Published(count, ends)
