"""What the demo asks of Kafka itself, with confluent-kafka: topics, their ends, many messages in and some out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from confluent_kafka.cimpl import NewTopic

from kafka_marshal.errors import KafkaUnavailableError

__all__ = ["Kafka", "KeyAndValue"]

logger: logging.Logger = logging.getLogger("flights.kafka")

_TIMEOUT_S: Final = 30.0

#: Nothing is lost or written twice, and nothing is reported but what failed.
_WRITING: Final[Mapping[str, object]] = {
    "acks": "all",
    "enable.idempotence": True,
    "message.timeout.ms": int(_TIMEOUT_S * 1000),
    "compression.type": "lz4",
    "linger.ms": 20,
    "delivery.report.only.error": True,
}

KeyAndValue = tuple[bytes | None, bytes | None]


class Kafka:
    """One cluster. Its methods raise KafkaUnavailableError if it does not answer, or refuses."""

    def __init__(self, bootstrap: str, config: Mapping[str, object]) -> None:
        self._bootstrap = bootstrap
        self._said: list[KafkaError] = []
        self._settings: dict[str, Any] = {
            **config,
            "bootstrap.servers": bootstrap,
            "logger": logger,
            "error_cb": self._said.append,
        }
        self._admin = AdminClient({**self._settings})

    def brokers(self, timeout_s: float) -> int:
        """How many brokers there are."""
        try:
            return len(self._admin.list_topics(timeout=timeout_s).brokers)
        except KafkaException as error:
            why = self._said[-1].str() if self._said else str(error)
            raise KafkaUnavailableError(
                f"No broker answered at {self._bootstrap} within {timeout_s:g} s ({why}). Nothing was started. Check "
                "the address, and that the brokers run."
            ) from error

    def create_topics(self, partitions: Mapping[str, int]) -> None:
        """Create these topics, with three replicas if there are as many brokers."""
        try:
            replicas = min(3, self.brokers(_TIMEOUT_S))
            wanted = [NewTopic(name, count, replicas) for name, count in partitions.items()]
            for answer in self._admin.create_topics(wanted, request_timeout=_TIMEOUT_S).values():
                answer.result(_TIMEOUT_S)
        except (KafkaException, TimeoutError) as error:
            raise _unavailable(f"creating {', '.join(partitions)}", error) from error

    def delete_topics(self, names: list[str]) -> None:
        """Delete those that are there, as far as the cluster can be reached."""
        for answer in self._admin.delete_topics(names, request_timeout=10.0).values():
            try:
                answer.result(10.0)
            except (KafkaException, TimeoutError) as error:
                logger.info("a topic was not deleted: %s", error)

    def ends(self, topic: str, partitions: int) -> dict[int, int]:
        """Partition → the offset after its last message."""
        wanted = {TopicPartition(topic, partition): OffsetSpec.latest() for partition in range(partitions)}
        try:
            found = self._admin.list_offsets(wanted, request_timeout=_TIMEOUT_S)
            return {place.partition: answer.result(_TIMEOUT_S).offset for place, answer in found.items()}
        except (KafkaException, TimeoutError) as error:
            raise _unavailable(f"looking up the end of {topic!r}", error) from error

    def write(self, topic: str, messages: Iterable[KeyAndValue]) -> Iterable[int]:
        """Write messages; yields how many were given to the producer, and ends when all are acknowledged."""
        failures: list[KafkaError] = []

        def failed(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                failures.append(error)

        producer = Producer({**self._settings, **_WRITING})
        for count, (key, value) in enumerate(messages, 1):
            while True:
                try:
                    producer.produce(topic, value, key, on_delivery=failed)
                    break
                except BufferError:
                    producer.poll(0.05)
                    _raise_first(failures, topic)
            yield count
        producer.flush(_TIMEOUT_S + 5)
        _raise_first(failures, topic)

    def read(self, topic: str) -> list[Message]:
        """All messages of a topic with one partition, up to its end as it is now."""
        end = self.ends(topic, 1)[0]
        found: list[Message] = []
        until = time.monotonic() + _TIMEOUT_S
        settings = {"group.id": f"{topic}-check", "enable.auto.commit": False}
        with closing(Consumer({**self._settings, **settings})) as consumer:
            consumer.assign([TopicPartition(topic, 0, 0)])
            while (found[-1].offset() or 0 if found else -1) + 1 < end:
                found += [message for message in consumer.consume(1_000, 0.2) if message.error() is None]
                if time.monotonic() > until:
                    raise KafkaUnavailableError(
                        f"The messages in {topic!r} were not read to their end within {_TIMEOUT_S:g} s. They are "
                        "unchanged. Does the broker run?"
                    )
        return found


def _raise_first(failures: list[KafkaError], topic: str) -> None:
    if failures:
        raise KafkaUnavailableError(
            f"A message could not be written to {topic!r}: {failures[0].str()}. Nothing was processed. Check that the "
            "broker runs, and start again."
        )


def _unavailable(doing: str, error: Exception) -> KafkaUnavailableError:
    return KafkaUnavailableError(f"While {doing}: {error}. Nothing was processed. Check that the broker runs.")
