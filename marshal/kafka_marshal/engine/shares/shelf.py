"""What a sharer has read of its partition, where its reader is, and where the log ends (U9).

The reader continues from batch to batch by reading if the gap is small, else by a seek. Without a batch to read it
stays at the first offset that no member has taken: that shows how much is free, and is there when we take it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple, Protocol

from kafka_marshal.engine.shares.tracking import BatchBuffer
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.ports import Message

#: The reader continues to the next batch by reading if it is at most this many offsets away, else by a seek.
READ_ON = 1_000

#: The most messages that are read ahead of what is taken.
MOST_AHEAD = 4_000


class Room(Protocol):
    """The memory of a consumer."""

    @property
    def room_ahead(self) -> int:
        """How many messages there is memory for, ahead of what is taken."""


class NewMessages(NamedTuple):
    """What no member has taken yet."""

    offsets: int
    #: How many messages they have, as far as it is known.
    messages: int
    #: The last offset that our reader may read.
    up_to: int
    #: Since when (own clock, ms) the first of them is there; inf: there are none.
    since: float


class Shelf:
    """Called under the shell's lock."""

    def __init__(self, buffer: BatchBuffer, room: Room, fetch: Callable[[int | None], object]) -> None:
        """fetch: has the reader continue at an offset; None: has it rest."""
        self._buffer = buffer
        self._room = room
        self._fetch = fetch
        #: Read, and of no batch here. From ``first`` to ``buffer.fetch_next`` everything was read.
        self.messages: deque[Message] = deque()
        self.first: int = 0
        self._is_resting = False
        #: Where the partition's log starts, if it may be above what is wanted; and where it ends.
        self.low: int = 0
        self._end = 0
        #: (end, when it was first seen): how long new messages have waited.
        self._seen: deque[tuple[int, float]] = deque()
        #: How many messages an offset has, on average of the last reads.
        self._density = 1.0

    def begin(self, offset: int) -> None:
        """Nothing is read; the reader continues there."""
        self.messages.clear()
        self._seen.clear()
        self._buffer.go_on_at(offset)
        self.first = offset
        self._is_resting = False

    def put(self, messages: list[Message], now: float) -> bool:
        """The reader has passed these messages. Returns whether they are new."""
        known = self._buffer.fetch_next
        if offset_of(messages[0]) < known:
            messages = [message for message in messages if offset_of(message) >= known]
            if not messages:
                return False
        last = offset_of(messages[-1])
        if len(messages) > 1:
            self._density += (len(messages) / (last + 1 - offset_of(messages[0])) - self._density) / 4
        self.messages.extend(messages)
        return self.reached(last + 1, now)

    def reached(self, end: int, now: float) -> bool:
        """The reader has passed all offsets below end. Returns whether that is new."""
        if end <= self._buffer.fetch_next:
            return False
        self._buffer.fetch_next = end
        self.ends_at(end, now)
        return True

    def ends_at(self, end: int, now: float) -> None:
        """The log ends there, or later."""
        if end > self._end:
            self._end = end
            self._seen.append((end, now))

    def has(self, offset: int) -> bool:
        """Whether this offset was read."""
        return self.first <= offset < self._buffer.fetch_next

    def take(self, first: int, end: int) -> list[Message]:
        """Take the messages of these offsets; end: exclusive."""
        kept: list[Message] = []
        found: list[Message] = []
        while self.messages and offset_of(self.messages[0]) < end:
            message = self.messages.popleft()
            (found if offset_of(message) >= first else kept).append(message)
        self.messages.extendleft(reversed(kept))
        return found

    def trim(self, below: int) -> None:
        """Drop what other members have taken."""
        while self.messages and offset_of(self.messages[0]) < below:
            self.messages.popleft()
        self.first = max(self.first, min(below, self._buffer.fetch_next))

    def taken_to(self, offset: int) -> None:
        """All offsets up to this one were taken by some member."""
        while self._seen and self._seen[0][0] <= offset + 1:
            self._seen.popleft()

    def move_reader(self, unread: int | None, free: int) -> None:
        """Have the reader continue where something is wanted: at a batch, or at the first offset that is free."""
        if self._buffer.is_given_up:
            return
        target, at = max(free, self.low) if unread is None else unread, self._buffer.fetch_next
        is_read = self.first <= target <= at
        most = min(MOST_AHEAD, self._room.room_ahead)
        if not is_read and not at < target <= at + READ_ON:
            self.messages.clear()
            self._buffer.fetch_next = self.first = target
            self._is_resting = False
            self._fetch(target)
        elif not is_read or unread is not None or len(self.messages) < most / 2:
            self._rest(False)
        elif len(self.messages) >= most:
            self._rest(True)

    def _rest(self, is_resting: bool) -> None:
        if is_resting != self._is_resting:
            self._is_resting = is_resting
            self._fetch(None if is_resting else self._buffer.fetch_next)

    def new(self, begin: int) -> NewMessages:
        """What is free from this offset on."""
        is_read = self.first <= begin <= self._buffer.fetch_next
        end = max(self._end, self._buffer.fetch_next if is_read else 0, self.low)
        read = len(self.messages) if is_read else 0
        beyond = max(0, end - (self._buffer.fetch_next if is_read else begin))
        messages = read + int(beyond * self._density)
        if self.low > begin:  # retention removed them: they cost a record, and no work
            messages = max(1, messages)
        offsets = max(0, end - begin)
        since = self._seen[0][1] if self._seen and offsets else inf
        return NewMessages(offsets, messages or int(offsets > 0), end - 1, since)

    def offsets_for(self, messages: int, begin: int) -> int:
        """How many offsets from this one on have that number of messages."""
        if self.low > begin:
            return self.low - begin
        if len(self.messages) >= messages and self.first <= begin:
            return max(1, offset_of(self.messages[messages - 1]) + 1 - begin)
        return max(1, round(messages / max(self._density, 0.001)))
