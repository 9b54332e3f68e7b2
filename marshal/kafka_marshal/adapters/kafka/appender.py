"""Appends to the coordination topic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as KafkaMessage

from kafka_marshal.adapters.kafka.errors import Troubles, is_forbidden, kafka_error
from kafka_marshal.adapters.kafka.sending import Sending
from kafka_marshal.ports import Ack


class KafkaAppender(Sending):
    """An appender over an idempotent librdkafka producer (L1)."""

    what = "appender"

    def __init__(
        self,
        topic: str,
        settings: dict[str, object],
        troubles: Troubles,
        *,
        delivery_timeout_ms: int,
        producer: Callable[[dict[str, object]], Producer] = Producer,
    ) -> None:
        """delivery_timeout_ms: a record that is late is worth nothing; its sender stopped counting on it (L1, T4)."""
        super().__init__(settings, troubles, delivery_timeout_ms=delivery_timeout_ms, producer=producer)
        self._topic = topic

    def append(self, partition: int, value: bytes, on_ack: Callable[[Ack], None] | None = None) -> None:
        self._check_open()
        self._await_warmth()
        self._queue(
            lambda: self._producer.produce(self._topic, value, b"", partition, partial(self._delivered, on_ack)),
            partial(self._refused, on_ack),
        )

    def _delivered(self, on_ack: Callable[[Ack], None] | None, error: KafkaError | None, message: KafkaMessage) -> None:
        """Put an ack aside (librdkafka's delivery callback)."""
        self._answered()
        if on_ack is None:
            return
        if error is None:
            offset = message.offset()
            # A retry that found its record written already is acknowledged without the offset (C17).
            ack = Ack(offset if offset is not None and offset >= 0 else None)
        else:
            reason = self._troubles.recent()
            text = error.str()
            if reason is not None and error.code() == KafkaError._MSG_TIMED_OUT:
                text = f"{text} ({reason.str()})"
            elif error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                # Without numbers: the same reason is reported once for all records.
                text = f"{text}: max.message.bytes of {self._topic} is too small; kafka-marshal init --check says what "
                text += "it must be"
            elif self._troubles.fatal is not None:
                text = self._troubles.fatal
            ack = Ack(None, text, self._fatal or error.fatal(), self._forbidden(error))
        self._due.append(partial(on_ack, ack))

    def _refused(self, on_ack: Callable[[Ack], None] | None, error: KafkaException | None) -> None:
        """A record that was not even queued: its ack is due at the next poll like any other."""
        if on_ack is not None:
            full = "the client's queue of records to be sent is full; this one was not sent"
            text = full if error is None else kafka_error(error).str()
            why = self._troubles.fatal or text  # a client that failed for good says "fatal error" of all that follows
            self._due.append(partial(on_ack, Ack(None, why, self._fatal, self._forbidden(error))))

    def _forbidden(self, error: KafkaException | KafkaError | None) -> bool:
        """Whether a record failed because we may not append: reported for it, or for the producer as a whole."""
        return self._denied or (error is not None and is_forbidden(kafka_error(error)))
