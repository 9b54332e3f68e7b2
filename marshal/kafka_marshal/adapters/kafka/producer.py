"""Produces records to topics of users: dead letters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from confluent_kafka import KafkaError, Producer
from confluent_kafka import Message as KafkaMessage

from kafka_marshal.adapters import producing
from kafka_marshal.adapters.kafka.errors import (
    RETRY_CODES,
    UNKNOWN_CODES,
    Troubles,
    fault_kind,
    is_forbidden,
    is_refusal,
    kafka_error,
)
from kafka_marshal.adapters.kafka.sending import Sending
from kafka_marshal.ports import FaultKind

#: The partitioner decides.
ANY_PARTITION = -1

#: The broker takes none of this size.
TOO_LARGE_CODES = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})

#: librdkafka has dropped the record.
CLOSED_CODES = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})

#: What passes by itself, and did not in time.
_TIMEOUT_CODES = RETRY_CODES | {KafkaError.NOT_ENOUGH_REPLICAS, KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND}


class KafkaProducer(Sending):
    """An idempotent producer. After a fatal error it fails what is under way, and begins again with the next record."""

    def __init__(
        self,
        settings: dict[str, object],
        troubles: Troubles,
        *,
        delivery_timeout_ms: int,
        producer: Callable[[dict[str, object]], Producer] = Producer,
    ) -> None:
        super().__init__(settings, troubles, delivery_timeout_ms=delivery_timeout_ms, producer=producer)
        self._renewing = threading.Lock()

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        on_ack: Callable[[Exception | None], None] | None = None,
    ) -> None:
        self._check_open()
        self._await_warmth()
        self._begin_again()
        size = producing.size_of(value, key, headers)
        # The producer is looked up when it is used: what another thread has given up takes no record.
        self._queue(
            lambda: self._producer.produce(
                topic,
                value,
                key,
                ANY_PARTITION,
                partial(self._delivered, topic, size, on_ack),
                headers=list(headers),
            ),
            lambda error: self._fail(topic, size, on_ack, None if error is None else kafka_error(error)),
        )

    def _begin_again(self) -> None:
        """A producer that has failed for good is replaced once all that it had is answered for."""
        if self._fatal and self._under_way == 0:
            with self._renewing:
                if self._fatal:
                    self._producer = self._make()
                    self._denied = False
                    self._troubles.fatal = None

    def _delivered(
        self,
        topic: str,
        size: int,
        on_ack: Callable[[Exception | None], None] | None,
        error: KafkaError | None,
        _message: KafkaMessage,
    ) -> None:
        """Put an ack aside (librdkafka's delivery callback)."""
        self._answered()
        if error is not None:
            self._fail(topic, size, on_ack, error)
        elif on_ack is not None:
            self._due.append(partial(on_ack, None))

    def _fail(
        self, topic: str, size: int, on_ack: Callable[[Exception | None], None] | None, error: KafkaError | None
    ) -> None:
        if on_ack is not None:
            self._due.append(partial(on_ack, self._error(topic, size, error)))

    def _error(self, topic: str, size: int, error: KafkaError | None) -> Exception:
        if error is None:
            return producing.queue_full(topic)
        code, text = error.code(), error.str()
        if self._denied or is_forbidden(error):
            return producing.forbidden(topic, self._troubles.fatal or text)
        if self._fatal or error.fatal():
            return producing.refused(topic, self._troubles.fatal or text, retry=True)
        if code in CLOSED_CODES:
            return producing.closed(topic)
        if code in TOO_LARGE_CODES:
            return producing.too_large(topic, size)
        if code in UNKNOWN_CODES:
            return producing.missing(topic)
        reason = self._troubles.recent()
        if code in _TIMEOUT_CODES or error.retriable() or fault_kind(error) is FaultKind.UNREACHABLE:
            if reason is not None and is_refusal(reason):
                return producing.shut_out(topic, reason.str())
            return self._unacknowledged(topic, text if reason is None else f"{text}; {reason.str()}")
        return producing.refused(topic, text)

    def _unacknowledged(self, topic: str, why: str) -> Exception:
        return producing.unacknowledged(topic, why)
