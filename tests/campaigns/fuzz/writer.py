"""Writes messages to one topic: to a given partition, as fast as the broker takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, Message, Producer

__all__ = ["Writer"]


class Writer:
    """An idempotent producer. A context manager; each delivery must succeed."""

    def __init__(self, topic: str, bootstrap: str, config: Mapping[str, object] | None = None) -> None:
        self._topic = topic
        self._failures: list[KafkaError] = []
        settings: dict[str, Any] = {**(config or {}), "bootstrap.servers": bootstrap, "enable.idempotence": True}
        self._producer = Producer(settings)

    def write(self, value: bytes | None, key: bytes | None, partition: int) -> None:
        """Queue a message; waits while the queue is full."""
        while True:
            try:
                self._producer.produce(self._topic, value, key, partition, on_delivery=self._delivered)
                break
            except BufferError:
                self._producer.poll(0.05)
        self._producer.poll(0)

    def flush(self) -> None:
        """Wait until every message is acknowledged."""
        left = self._producer.flush(60)
        assert not left and not self._failures, f"{left} messages are open; {self._failures[:3]}"

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._failures.append(error)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._producer.flush(1)
