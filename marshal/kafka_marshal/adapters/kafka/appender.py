"""Appends to the coordination topic."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as KafkaMessage

from kafka_marshal.adapters.kafka.errors import Troubles, configuration_error, is_forbidden, kafka_error
from kafka_marshal.errors import ClosedError
from kafka_marshal.ports import Ack

__all__ = ["KafkaAppender"]

#: The longest that the first record waits for the first connection; see _warm_up().
WARM_UP_S = 0.05

#: The longest one wait of a flush lasts before its end is looked at.
FLUSH_SLICE_S = 0.1

#: Shared between threads: what to call, and with what.
_Due: TypeAlias = deque[tuple[Callable[[Ack], None], Ack]]


class KafkaAppender:
    """An appender over an idempotent librdkafka producer (L1).

    librdkafka's delivery callbacks only put acks aside; they are called from within poll(), flush() and close(), also
    where append() has to let librdkafka work to find room.
    """

    def __init__(
        self,
        topic: str,
        settings: dict[str, object],
        troubles: Troubles,
        *,
        delivery_timeout_ms: int,
        producer: Callable[[dict[str, object]], Producer] = Producer,
    ) -> None:
        """Open it; it connects in the background. The first record has a few milliseconds' patience with that."""
        self._topic = topic
        self._troubles = troubles
        self._due: _Due = deque()
        self._closing = threading.Lock()
        self._closed = False
        self._denied = False
        self._counting = threading.Lock()
        #: Records handed to librdkafka that it has not answered for. (Its own count includes what it has to say.)
        self._under_way = 0
        settings = {
            **settings,
            "logger": troubles,
            # A record that is late is worth nothing: its sender has stopped counting on it by then (L1, T4).
            "message.timeout.ms": delivery_timeout_ms,
            "error_cb": troubles,
        }
        try:
            self._producer = producer(settings)
        except (KafkaException, ValueError, TypeError) as error:
            raise configuration_error(error) from error
        self._warming = threading.Thread(target=self._warm_up, daemon=True)
        self._warming.start()
        #: Whether a record need not wait for that any more.
        self._is_warm = False

    def _warm_up(self) -> None:
        """Connect before the first record (a thread of its own: a start goes on meanwhile).

        A record that comes earlier makes it look up the topic before it has its producer id; it then asks for that
        only 500 ms later. With this wait of some milliseconds the first record is acknowledged after 15 ms.
        """
        with contextlib.suppress(KafkaException):  # no broker yet: it goes on connecting by itself
            self._producer.cluster_id(WARM_UP_S)

    def append(self, partition: int, value: bytes, on_ack: Callable[[Ack], None] | None = None) -> None:
        self._check_open()
        if not self._is_warm:
            self._warming.join(WARM_UP_S)
            self._is_warm = True
        callback = partial(self._delivered, on_ack)
        try:
            self._produce(partition, value, callback)
        except BufferError:
            # librdkafka's queue is full: let it hand over what is delivered, then try once more.
            self._serve(partial(self._producer.poll, 0))
            try:
                self._produce(partition, value, callback)
            except BufferError:
                self._refused(on_ack, "the client's queue of records to be sent is full; this one was not sent")
            except KafkaException as error:
                self._refused(on_ack, kafka_error(error).str(), error)
        except KafkaException as error:
            self._refused(on_ack, kafka_error(error).str(), error)

    def _produce(
        self, partition: int, value: bytes, callback: Callable[[KafkaError | None, KafkaMessage], None]
    ) -> None:
        self._producer.produce(self._topic, value, b"", partition, callback)
        with self._counting:
            self._under_way += 1

    def _delivered(self, on_ack: Callable[[Ack], None] | None, error: KafkaError | None, message: KafkaMessage) -> None:
        """Put an ack aside (librdkafka's delivery callback)."""
        with self._counting:
            self._under_way -= 1
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
        self._due.append((on_ack, ack))

    def _refused(self, on_ack: Callable[[Ack], None] | None, text: str, error: KafkaException | None = None) -> None:
        """A record that was not even queued: its ack is due at the next poll like any other."""
        if on_ack is not None:
            why = self._troubles.fatal or text  # a client that failed for good says "fatal error" of all that follows
            self._due.append((on_ack, Ack(None, why, self._fatal, self._forbidden(error))))

    def _forbidden(self, error: KafkaException | KafkaError | None) -> bool:
        """Whether a record failed because we may not append: said of it, or of the producer as a whole."""
        return self._denied or (error is not None and is_forbidden(kafka_error(error)))

    def _serve(self, work: Callable[[], object]) -> None:
        """Let librdkafka work. Where it raises it has failed for good, which the acks of all records then tell."""
        try:
            work()
        except KafkaException as error:
            cause = kafka_error(error)
            if not cause.fatal():
                raise
            self._troubles(cause)
            self._denied = self._denied or is_forbidden(cause)
            self._producer.purge()

    @property
    def _fatal(self) -> bool:
        return self._troubles.fatal is not None

    def poll(self, timeout_s: float = 0.0) -> None:
        self._check_open()
        self._serve(partial(self._producer.poll, 0 if self._due else timeout_s))
        self._call()

    def flush(self, timeout_s: float) -> int:
        self._check_open()
        left = self._flush(timeout_s)
        self._call()
        return left

    def _flush(self, timeout_s: float) -> int:
        """How many records are still under way when all are done, or the time is up.

        Not by Producer.flush: where a fatal error comes up in it, it goes on and calls callbacks with an exception set.
        """
        deadline = time.monotonic() + timeout_s
        while self._under_way > 0 and (left_s := deadline - time.monotonic()) > 0:
            self._serve(partial(self._producer.poll, min(left_s, FLUSH_SLICE_S)))
        self._serve(partial(self._producer.poll, 0))
        return self._under_way

    def close(self, timeout_s: float = 0.0) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._warming.join()  # it is in librdkafka, of which nothing is left afterwards
        if self._flush(timeout_s) > 0:
            self._producer.purge()
            self._flush(1.0)  # serves the callbacks of what was purged; nothing is sent any more
        self._producer.close()
        self._call()

    def _call(self) -> None:
        """Call the acks that are due, each once, whichever thread comes first."""
        while True:
            try:
                on_ack, ack = self._due.popleft()
            except IndexError:
                return
            on_ack(ack)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The appender was closed; nothing was appended. Open a new one.")
