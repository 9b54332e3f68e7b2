"""Writes many messages to one topic, fast and without loss: for demos and tests that need data to work on.

kafka-marshal reads its users' topics and never writes to them; who fills them is their business. So this is no part of
the :class:`~kafka_marshal.ports.Cluster` that the client needs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as KafkaMessage

from kafka_marshal.adapters.kafka import settings
from kafka_marshal.adapters.kafka.errors import LOGGER, Troubles, configuration_error, marshal_error
from kafka_marshal.adapters.kafka.settings import Role
from kafka_marshal.errors import KafkaUnavailableError
from kafka_marshal.secret import values_of

__all__ = ["KafkaDataWriter"]

#: How long a message may wait for a broker before the writer gives up.
DELIVERY_TIMEOUT_MS = 30_000

#: The key decides; without one, chance does.
ANY_PARTITION = -1

#: Messages between two polls of the broker's answers.
_LOOK_EVERY = 1_000

_SETTINGS: Mapping[str, object] = {
    "acks": "all",
    # A retry may not write a message twice: what was written is counted afterwards by its offsets.
    "enable.idempotence": True,
    "message.timeout.ms": DELIVERY_TIMEOUT_MS,
    "compression.type": "lz4",
    "linger.ms": 20,
    "queue.buffering.max.messages": 200_000,
    "queue.buffering.max.kbytes": 131_072,
    # A callback into Python for each message would cost more than sending it; failures are what we want to hear of.
    "delivery.report.only.error": True,
}


class KafkaDataWriter:
    """An idempotent producer to one topic. For one thread. As a context manager it is closed at the end.

    Messages with the same key go to the same partition, in order; those without a key to any.
    """

    def __init__(self, topic: str, bootstrap_servers: str, config: Mapping[str, object] | None = None) -> None:
        """Open it; it connects in the background.

        Args:
            topic: which exists.
            bootstrap_servers: host:port, several separated by commas.
            config: librdkafka properties for the connection (TLS, SASL).

        Raises:
            ConfigurationError: librdkafka does not accept the configuration.
        """
        self._topic = topic
        self._bootstrap = bootstrap_servers
        self._troubles = Troubles(secrets=values_of(config or {}))
        self._failure: KafkaError | None = None
        self._accepted = 0
        settings.check(config or {})
        properties: dict[str, Any] = {
            "logger": LOGGER,
            **settings.properties(Role.ADMIN, bootstrap_servers, config or {}, _SETTINGS),
            "error_cb": self._troubles,
        }
        try:
            self._producer = Producer(properties)
        except (KafkaException, ValueError, TypeError) as error:
            raise configuration_error(error) from error

    @property
    def written(self) -> int:
        """How many messages the broker has acknowledged or, while writing continues, will have unless it fails."""
        return self._accepted - len(self._producer)

    def write(self, value: bytes | None, key: bytes | None, partition: int = ANY_PARTITION) -> None:
        """Queue a message, for the partition of its key or for that one; waits while the queue is full.

        Raises:
            KafkaUnavailableError: (or another error of its family) a message could not be delivered in time.
        """
        while True:
            try:
                self._producer.produce(self._topic, value, key, partition, self._delivered)
                break
            except BufferError:
                self._producer.poll(0.05)
                self._check()
            except KafkaException as error:
                raise marshal_error(error, self._doing(), self._bootstrap, self._troubles, changing=True) from error
        self._accepted += 1
        if self._accepted % _LOOK_EVERY == 0:
            self._producer.poll(0)
            self._check()

    def flush(self) -> None:
        """Wait until everything is acknowledged. Raises as write() does."""
        until = time.monotonic() + DELIVERY_TIMEOUT_MS / 1000 + 5
        while (left := self._producer.flush(0.2)) and time.monotonic() < until:
            self._check()
        self._check()
        if left:
            raise KafkaUnavailableError(
                f"While {self._doing()}: {left} of {self._accepted} messages are not acknowledged. They may or may not "
                "be in the topic. Check that the broker runs."
            )

    def close(self) -> None:
        """Drop what is not acknowledged yet, free the connection."""
        self._producer.purge()
        self._producer.flush(1.0)
        with suppress(KafkaException):  # a fatal error that came up only now: there is nothing left to be lost
            self._producer.close()

    def __enter__(self) -> KafkaDataWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _delivered(self, error: KafkaError | None, _message: KafkaMessage) -> None:
        if error is not None and error.code() != KafkaError._PURGE_QUEUE and error.code() != KafkaError._PURGE_INFLIGHT:
            self._failure = self._failure or error

    def _check(self) -> None:
        if self._failure is not None:
            raise marshal_error(self._failure, self._doing(), self._bootstrap, self._troubles, changing=True)

    def _doing(self) -> str:
        return f"writing to topic {self._topic!r}"
