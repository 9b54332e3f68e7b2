"""How much memory the messages of one consumer may take, and how many more that leaves room for."""

from __future__ import annotations

import sys

from kafka_marshal.ports import Message

__all__ = ["FIRST_READ", "InFlight", "mean_bytes"]

#: What a message takes besides its value (bytes): two objects, and librdkafka's part of it.
MESSAGE_BYTES = 500

#: Messages of the first read, which tells how large messages are.
FIRST_READ = 16

#: Of a read, every so many messages are measured; of a short one, all.
MEASURED_ONE_IN = 8


def mean_bytes(messages: list[Message]) -> float:
    """How large these messages are, as some of them show; 0: there are none."""
    some = messages if len(messages) <= FIRST_READ else messages[::MEASURED_ONE_IN]
    return sum(len(message.value() or b"") + MESSAGE_BYTES for message in some) / len(some) if some else 0.0


class InFlight:
    """Half of ``max_bytes_in_flight`` may wait to be handed out, half be in hand."""

    __slots__ = ("_bounds_in_hand", "_max_bytes", "message_bytes", "most_in_hand", "spent")

    def __init__(self, max_bytes: int, *, at_most_once: bool) -> None:
        self._max_bytes = max_bytes
        self._bounds_in_hand = not at_most_once  # there a batch is in hand, and no more
        #: How large a message is, as the last reads have shown; 0: nothing was read yet.
        self.message_bytes: float = 0.0
        #: At least once: so many messages may be in hand, and one of each partition in any case.
        self.most_in_hand: int = sys.maxsize
        #: A batch that was handed out (at most once), on its way out of memory; see ``_free``.
        self.spent: list[Message] = []

    def read(self, count: int, mean_bytes: float) -> None:
        """A read has returned this many messages, of this mean size; large ones are remembered for a while."""
        self._free(count)
        if count:
            self.message_bytes = max(mean_bytes, self.message_bytes * 0.9)
            if self._bounds_in_hand:
                self.most_in_hand = self.half

    @property
    def half(self) -> int:
        """How many messages may wait; something was read. One may in any case, or nothing would be read again."""
        return max(1, int(self._max_bytes / 2 / self.message_bytes))

    def room(self, waiting: int) -> int:
        """How many messages more may be fetched, where so many wait."""
        return self.half - waiting if self.message_bytes else FIRST_READ

    def _free(self, count: int) -> None:
        """Free as many of the messages of the batch before as new ones came; all of them when none came.

        In step with them, the garbage collector sees no growth and keeps out; freed all at once, they would make room
        for a full batch of new objects, each of which it would look at, for a fifth of all time.
        """
        if self.spent:
            del self.spent[-count if count else 0 :]
