"""What both readers need of a librdkafka consumer: fast reads, and a close that is safe beside them.

``consume(n, timeout)`` waits until it has n messages *or* the timeout is over, so asking it for many would hold back
the first one; asking it for one at a time is slow. Hence :meth:`Reading.read`: first take what is there, and only if
nothing is there wait for one message and take what came with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from confluent_kafka import Consumer, KafkaException
from confluent_kafka import Message as KafkaMessage

from kafka_marshal.adapters.kafka.errors import Troubles, configuration_error
from kafka_marshal.errors import ClosedError

__all__ = ["SLICE_S", "Reading"]

#: A wait looks up this often: for a close() from another thread, and for errors told by callback.
SLICE_S = 0.1


class Reading:
    """A librdkafka consumer with one reading thread and any number of others that steer it.

    ``steering`` guards every native call but the wait for a first message; a call under it takes microseconds, the
    taking of a full batch a few milliseconds.
    """

    def __init__(self, name: str, settings: dict[str, object], troubles: Troubles) -> None:
        """Open the consumer (nothing is sent yet). name says in errors what this reads."""
        self.name = name
        self.troubles = troubles
        self.steering = threading.Lock()
        self._reading = threading.Lock()
        self._closing = False
        try:
            self.consumer = Consumer(settings)
        except (KafkaException, ValueError, TypeError) as error:
            raise configuration_error(error) from error

    def check_open(self) -> None:
        """Raise ClosedError once close() was called."""
        if self._closing:
            raise ClosedError(f"The {self.name} was closed; nothing more is read from it. Open a new one.")

    def read(
        self, limit: int, timeout_s: float, keep: Callable[[KafkaMessage], bool] | None = None
    ) -> list[KafkaMessage]:
        """Up to limit messages, error messages among them; waits up to timeout_s for the first.

        Returns early and empty when librdkafka tells of an error by callback.

        keep: decides, under ``steering``, about a message that arrived during the wait (when others may have steered).
        """
        deadline = time.monotonic() + timeout_s
        with self._reading:
            while True:
                with self.steering:
                    self.check_open()
                    messages = self.consumer.consume(limit, 0)
                remaining = deadline - time.monotonic()
                if messages or remaining <= 0 or self.troubles.pending:
                    return messages
                first = self.consumer.poll(min(SLICE_S, remaining))
                if first is None:
                    continue
                with self.steering:
                    if keep is not None and not keep(first):
                        continue
                    return [first, *self.consumer.consume(limit - 1, 0)] if limit > 1 else [first]

    def close(self) -> None:
        """Free the consumer; waits for a read in another thread to leave (at most a slice). Idempotent."""
        self._closing = True
        with self._reading, self.steering:
            self.consumer.close()
