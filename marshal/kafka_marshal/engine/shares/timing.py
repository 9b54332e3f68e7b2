"""When a sharer takes the next batch, and how large (U8): a function of what its replica shows, times and one draw.

All sharers see the same free messages at nearly the same time. If all took at once, all but one would write for
nothing. So with fewer messages than idle sharers each waits a time that it draws, long enough that the first one's
record is seen by the others; and all wait until the messages are worth a record.
"""

from __future__ import annotations

from math import ceil, inf
from typing import Final, NamedTuple

#: The oldest free message waits this long (ms) for others, so that they share a record.
LINGER_MS: Final = 20.0

#: What is handled in this time (ms) is worth a record; between two takes of one sharer there is as much.
WORTH_MS: Final = 50.0


class Free(NamedTuple):
    """What of one partition the next take may have, as our replica and our reader show it."""

    #: How many messages.
    messages: int
    #: Since when (own clock, ms) the oldest of them has been free.
    since: float
    #: The sharers, and those of them that have no batch; both with this one.
    sharers: int
    idle: int


class Speed(NamedTuple):
    """How fast this member handles messages, and how fast the log answers."""

    #: Messages for each millisecond, by all its handlers.
    rate: float
    #: The most messages of a batch, and how long (ms) it may take to handle them.
    max_messages: int
    batch_ms: float
    #: The median time (ms) from appending a record to seeing it applied.
    answer_ms: float

    @property
    def full(self) -> int:
        """The messages of a full batch."""
        return max(1, min(self.max_messages, int(self.rate * self.batch_ms)))

    @property
    def worth(self) -> int:
        """How many messages are worth a record."""
        return max(1, min(self.max_messages, int(self.rate * WORTH_MS)))


def worth_it_at(free: Free, speed: Speed, taken_at: float) -> float:
    """From when on (own clock, ms) a take is worth a record; inf: nothing is free. taken_at: of our last take."""
    if free.messages <= 0:
        return inf
    if free.messages >= speed.full:
        return 0.0
    ripe = 0.0 if free.messages >= speed.worth else free.since + LINGER_MS
    return max(ripe, taken_at + WORTH_MS)


def drawn_wait(free: Free, speed: Speed, draw: float) -> float:
    """How long (ms) to wait, and look again, so that not all take at once; draw: 0 … 1.

    What counts is how many batches are free: if one take leaves nothing, all others would write for nothing.
    """
    batches = free.messages / count(free, speed)
    return draw * 2.0 * speed.answer_ms * max(0.0, free.idle / max(1.0, batches) - 1.0)


def count(free: Free, speed: Speed) -> int:
    """How many of the free messages to take: with others at work, not more than half of this member's part."""
    fair = ceil(free.messages / (2 * max(1, free.sharers)))
    return max(1, speed.worth, min(speed.full, fair))
