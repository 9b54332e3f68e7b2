"""Messages of one partition that were fetched and are not handed out yet."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any

from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.engine.work.tracker import Tracker
from kafka_marshal.ports import Message


class Buffer:
    """Messages in offset order, between the reader and the user."""

    __slots__ = ("_covered_to", "_open", "_parts", "fetch_next", "is_given_up", "size")

    def __init__(self) -> None:
        #: (messages, first offset they cover), in offset order.
        self._parts: deque[tuple[list[Message], int]] = deque()
        #: Open messages that were fetched again, each with the first offset it covers: they come before all others.
        self._open: deque[tuple[Message, int]] = deque()
        #: How many messages it has.
        self.size: int = 0
        #: The first offset that no message in the buffer covers yet.
        self._covered_to = 0
        #: The next offset to come from the reader.
        self.fetch_next: int = 0
        #: Fetched messages were dropped; nothing is read until there is room again.
        self.is_given_up: bool = False

    @property
    def first(self) -> int | None:
        """The offset of the next message to be handed out; None: there is none."""
        if self._open:
            return offset_of(self._open[0][0])
        return offset_of(self._parts[0][0][0]) if self._parts else None

    def peek(self) -> Message | None:
        """The next message to be handed out; None: there is none. Any thread may call this, without the lock."""
        try:
            return self._open[0][0] if self._open else self._parts[0][0][0]
        except IndexError:
            return None

    def go_on_at(self, offset: int) -> None:
        """Fetch from offset next; all offsets between the buffered messages and that one are done or gone."""
        self.fetch_next = self._covered_to = offset

    def clear(self) -> None:
        """Drop the buffered messages."""
        self._parts.clear()
        self._open.clear()
        self.size = 0

    def give_up(self, in_hand_to: int) -> None:
        """Drop the buffered messages; the reader fetches them again.

        in_hand_to: the last offset in flight. Messages before it (which were put back) are kept: to fetch them again
        would also fetch messages in flight a second time.
        """
        self.is_given_up = True
        while self._parts and self._parts[-1][1] > in_hand_to:
            messages, covers_from = self._parts.pop()
            self.size -= len(messages)
            self.go_on_at(covers_from)

    def put(
        self, messages: list[Message], tracker: Tracker[Any], wants: Callable[[Message], bool] | None = None
    ) -> None:
        """Add fetched messages, except those that are done or were fetched under an older assignment.

        wants: for a partition shared by key, whether a message is ours; others count as never delivered by Kafka.
        """
        self.is_given_up = False
        first = offset_of(messages[0])
        if first < self.fetch_next:
            messages = [m for m in messages if offset_of(m) >= self.fetch_next]
            if not messages:
                return
        self.fetch_next = offset_of(messages[-1]) + 1
        done = tracker.done
        if tracker.has_islands or done.stable >= offset_of(messages[0]):
            messages = [m for m in messages if not done.is_done(offset_of(m))]
        if wants is not None:
            messages = [m for m in messages if wants(m)]
        if messages:
            self._parts.append((messages, self._covered_to))
            self._covered_to = offset_of(messages[-1]) + 1
            self.size += len(messages)
        if wants is not None and self._covered_to < self.fetch_next:
            tracker.pass_over(self._covered_to, self.fetch_next - 1)

    def reached(self, end: int, tracker: Tracker[Any]) -> None:
        """The reader has passed all offsets below end; those it did not receive do not exist for any reader."""
        if end > self.fetch_next:
            self.fetch_next = end
            tracker.pass_over(self._covered_to, end - 1)

    def put_back(self, messages: list[Message], covers_from: int) -> None:
        """Put back messages that were taken and not handed out, or not done; they keep their place by offset."""
        if messages:
            place = bisect_left(self._parts, covers_from, key=lambda entry: entry[1])
            self._parts.insert(place, (messages, covers_from))
            self.size += len(messages)

    def put_open(self, message: Message, covers_from: int) -> None:
        """Add an open message; it is taken before all that was fetched in order, and by itself."""
        self._open.append((message, covers_from))
        self.size += 1

    def drop_open(self, first: int, last: int) -> None:
        """Drop the open messages of these offsets."""
        if self._open:
            kept = [each for each in self._open if not first <= offset_of(each[0]) <= last]
            self.size -= len(self._open) - len(kept)
            self._open = deque(kept)

    @property
    def has_open(self) -> bool:
        """Whether the next message to be taken is an open one."""
        return bool(self._open)

    def skip_to(self, offset: int) -> None:
        """Drop the messages below offset, except open ones."""
        kept = [([m for m in messages if offset_of(m) >= offset], covers) for messages, covers in self._parts]
        self._parts = deque((messages, max(covers, offset)) for messages, covers in kept if messages)
        self.size = sum(len(messages) for messages, _ in self._parts) + len(self._open)
        self.fetch_next = max(self.fetch_next, offset)
        self._covered_to = max(self._covered_to, offset)

    def take(self, max_messages: int) -> tuple[list[Message], int]:
        """The next messages, and the first offset that they cover; the buffer must not be empty."""
        if self._open:
            self.size -= 1
            message, covers_from = self._open.popleft()
            return [message], covers_from
        messages, covers_from = self._parts.popleft()
        if len(messages) > max_messages:
            rest = messages[max_messages:]
            messages = messages[:max_messages]
            self._parts.appendleft((rest, offset_of(messages[-1]) + 1))
        self.size -= len(messages)
        parts = [messages]
        room = max_messages - len(messages)
        while self._parts and room > 0 and self._parts[0][1] <= offset_of(parts[-1][-1]) + 1:
            more, _ = self._parts.popleft()
            if len(more) > room:
                self._parts.appendleft((more[room:], offset_of(more[room - 1]) + 1))
                more = more[:room]
            parts.append(more)
            room -= len(more)
            self.size -= len(more)
        if len(parts) > 1:
            messages = list(chain.from_iterable(parts))
        return messages, covers_from
