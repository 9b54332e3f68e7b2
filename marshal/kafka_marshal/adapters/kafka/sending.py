"""What both writers share: acks that are put aside, a flush that survives a fatal error, a safe close."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from confluent_kafka import KafkaException, Producer

from kafka_marshal.adapters.kafka.errors import Troubles, configuration_error, is_forbidden, kafka_error
from kafka_marshal.errors import ClosedError

#: The longest that the first record waits for the first connection; see _warm_up().
WARM_UP_S = 0.05

#: The longest one wait of a flush before the deadline is checked.
FLUSH_SLICE_S = 0.1

#: Shared between threads: acks to be called.
_Due: TypeAlias = deque[Callable[[], object]]


class Sending:
    """An idempotent librdkafka producer, and the acks of what it sends.

    librdkafka's delivery callbacks only put acks aside; they are called from within poll(), flush() and close(), also
    if a full queue makes a sender let librdkafka work to find room.
    """

    #: Completes "The … was closed".
    what = "producer"

    def __init__(
        self,
        settings: dict[str, object],
        troubles: Troubles,
        *,
        delivery_timeout_ms: int,
        producer: Callable[[dict[str, object]], Producer] = Producer,
    ) -> None:
        """Open it; it connects in the background. The first record has a few milliseconds' patience with that."""
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
            "message.timeout.ms": delivery_timeout_ms,
            "error_cb": troubles,
        }

        def make() -> Producer:
            try:
                made = producer(settings)
            except (KafkaException, ValueError, TypeError) as error:
                raise configuration_error(error) from error
            return made

        self._make = make
        self._producer = make()
        self._warming = threading.Thread(target=self._warm_up, daemon=True)
        self._warming.start()
        #: Whether a record need not wait for that any more.
        self._is_warm = False

    def _warm_up(self) -> None:
        """Connect before the first produce (on a separate thread, beside a start).

        A record that comes earlier makes it look up the topic before it has its producer id; it then asks for that only
        500 ms later. With this wait of some milliseconds the first record is acknowledged after 15 ms.
        """
        with contextlib.suppress(KafkaException):  # no broker yet: it retries by itself
            self._producer.cluster_id(WARM_UP_S)

    def _await_warmth(self) -> None:
        if not self._is_warm:
            self._warming.join(WARM_UP_S)
            self._is_warm = True

    def _queue(self, produce: Callable[[], None], refused: Callable[[KafkaException | None], None]) -> None:
        """Pass a record to librdkafka; refused is called with why it is not taken (None: its queue is full)."""
        try:
            self._count(produce)
        except BufferError:
            # librdkafka's queue is full: let it call back for what is delivered, then try once more.
            self._serve(partial(self._producer.poll, 0))
            try:
                self._count(produce)
            except BufferError:
                refused(None)
            except KafkaException as error:
                refused(error)
        except KafkaException as error:
            refused(error)

    def _count(self, produce: Callable[[], None]) -> None:
        produce()
        with self._counting:
            self._under_way += 1

    def _answered(self) -> None:
        """Librdkafka has answered for a record."""
        with self._counting:
            self._under_way -= 1

    def _serve(self, work: Callable[[], object]) -> None:
        """Let librdkafka work. If it raises it has failed for good, which the acks of all records then report."""
        try:
            work()
        except KafkaException as error:
            self._failed(error)
            self._producer.purge()

    def _failed(self, error: KafkaException) -> None:
        """Note what ends the producer for good; raise anything else."""
        cause = kafka_error(error)
        if not cause.fatal():
            raise error
        self._troubles(cause)
        self._denied = self._denied or is_forbidden(cause)

    @property
    def _fatal(self) -> bool:
        return self._troubles.fatal is not None

    def poll(self, timeout_s: float = 0.0) -> None:
        """Serve acks that are due; wait for the first up to timeout_s."""
        self._check_open()
        self._serve(partial(self._producer.poll, 0 if self._due else timeout_s))
        self._call()

    def flush(self, timeout_s: float) -> int:
        """Wait for all answers; returns how many records are still under way."""
        self._check_open()
        left = self._flush(timeout_s)
        self._call()
        return left

    def _flush(self, timeout_s: float) -> int:
        """How many records are still under way when all are done, or the time is up.

        Not by Producer.flush: if a fatal error comes up in it, it continues and calls callbacks with an exception set.
        """
        deadline = time.monotonic() + timeout_s
        while not self._is_answered() and (left_s := deadline - time.monotonic()) > 0:
            self._serve(partial(self._producer.poll, min(left_s, FLUSH_SLICE_S)))
        self._serve(partial(self._producer.poll, 0))
        return self._left()

    def _left(self) -> int:
        """How many records are under way."""
        return self._under_way

    def _is_answered(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self._left() == 0

    def close(self, timeout_s: float = 0.0) -> None:
        """Flush for up to timeout_s, drop the rest, free the connection. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._warming.join()  # it is in librdkafka, of which nothing is left afterwards
        if self._flush(timeout_s) > 0:
            self._producer.purge()
            self._flush(1.0)  # serves the callbacks of what was purged; nothing is sent any more
        try:
            self._free()
        except KafkaException as error:  # it came up only now; librdkafka has freed everything before it raised
            self._failed(error)
        self._call()

    def _free(self) -> None:
        """Free the connection; nothing is under way."""
        self._producer.close()

    def _call(self) -> None:
        """Call the acks that are due, each once, whichever thread comes first."""
        while True:
            try:
                ack = self._due.popleft()
            except IndexError:
                return
            ack()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"The {self.what} was closed; nothing was sent. Open a new one.")
