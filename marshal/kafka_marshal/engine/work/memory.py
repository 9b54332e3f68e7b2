"""The memory that messages of one consumer may take, and how many more messages fit."""

from __future__ import annotations

import sys
from math import ceil

from kafka_marshal.engine.inputs import given
from kafka_marshal.ports import Message

#: Memory of a message besides its value (bytes): two Python objects, and librdkafka's part.
MESSAGE_BYTES = 500

#: Messages of the first read, which shows how large messages are.
FIRST_READ = 16

#: One of this many messages of a read is measured; all of a short one.
MEASURED_ONE_IN = 8


def mean_bytes(messages: list[Message]) -> float:
    """The mean size of these messages in memory (bytes), estimated from some of them; 0: there are none."""
    some = messages if len(messages) <= FIRST_READ else messages[::MEASURED_ONE_IN]
    return sum(len(message.value() or b"") + MESSAGE_BYTES for message in some) / len(some) if some else 0.0


class InFlight:
    """Half of ``max_bytes_in_flight`` is for messages that wait, half for messages handed out and not done."""

    __slots__ = ("_bounds_in_hand", "_max_bytes", "message_bytes", "most_in_hand", "spent")

    def __init__(self, max_bytes: int, *, at_most_once: bool) -> None:
        self._max_bytes = max_bytes
        self._bounds_in_hand = not at_most_once  # at most once, only one batch is in flight
        #: The size of a message in the last reads (bytes); 0: nothing was read yet.
        self.message_bytes: float = 0.0
        #: At least once: the most messages in flight; each partition may have one in any case.
        self.most_in_hand: int = sys.maxsize
        #: At most once: a batch that was handed out and is being freed; see ``_free``.
        self.spent: list[Message] = []

    @given
    def read(self, count: int, mean_bytes: float) -> None:
        """A read returned this many messages of this mean size (bytes); a large mean decays over later reads."""
        self._free(count)
        if count:
            self.message_bytes = max(mean_bytes, self.message_bytes * 0.9)
            if self._bounds_in_hand:
                self.most_in_hand = self.half

    @property
    def half(self) -> int:
        """How many messages may wait, at least one, or reading would stop. Only valid after the first read."""
        return max(1, int(self._max_bytes / 2 / self.message_bytes))

    def room(self, waiting: int) -> int:
        """How many more messages may be fetched, if this many wait."""
        return self.half - waiting if self.message_bytes else FIRST_READ

    @property
    def half_bytes(self) -> float:
        """How many bytes each half has."""
        return self._max_bytes / 2

    def messages_in(self, size: int) -> int:
        """How many messages take as much memory as this number of bytes, rounded up."""
        return ceil(size / self.message_bytes) if size and self.message_bytes else 0

    def _free(self, count: int) -> None:
        """Free as many messages of the previous batch as new ones came; all of them if none came.

        This way the garbage collector sees no growth and does not run. Freed all at once, they would make room for a
        full batch of new objects, and the collector would scan each one, which took a fifth of all time.
        """
        if self.spent:
            del self.spent[-count if count else 0 :]
