"""What of a share's batches waits to be delivered, and what is in flight."""

from __future__ import annotations

from collections.abc import Callable

from kafka_marshal.engine.work.assignment import Tracker
from kafka_marshal.engine.work.buffer import Buffer
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.ports import Message
from rationalizer import Progress


class BatchBuffer(Buffer):
    """Messages of our batches, in offset order. ``fetch_next``: the next one from the reader."""

    __slots__ = ("is_ours", "on_drop")

    size: int

    def __init__(self, is_ours: Callable[[int], bool], on_drop: Callable[[int], object]) -> None:
        super().__init__()
        self.is_ours: Callable[[int], bool] = is_ours
        self.on_drop: Callable[[int], object] = on_drop

    def put_back(self, messages: list[Message], covers_from: int) -> None:
        ours = [message for message in messages if self.is_ours(offset_of(message))]
        super().put_back(ours, covers_from)

    def count_to(self, last: int) -> int:
        """How many of the first messages lie at or below an offset."""
        found = 0
        for messages, _ in self._parts:
            if offset_of(messages[-1]) > last:
                return found + sum(offset_of(message) <= last for message in messages)
            found += len(messages)
        return found

    def forget(self, first: int, last: int) -> None:
        """Drop the messages of a batch that is no longer ours; a newer one may have some of them."""
        parts = [
            ([m for m in messages if not first <= (at := offset_of(m)) <= last or self.is_ours(at)], covers)
            for messages, covers in self._parts
        ]
        self._parts.clear()
        self._parts.extend((messages, at) for messages, at in parts if messages)
        self.size = sum(len(messages) for messages, _ in self._parts)

    def take_all(self) -> list[tuple[list[Message], int]]:
        """Take all messages out, as (consecutive messages of one batch, first offset that they cover)."""
        parts = list(self._parts)
        self.clear()
        return parts

    def give_up(self, in_hand_to: int) -> None:
        """Drop the messages of batches that have not begun; the reader fetches them again."""
        self.is_given_up = True
        while self._parts and self._parts[-1][1] > in_hand_to:
            messages, covers_from = self._parts.pop()
            self.size -= len(messages)
            self.on_drop(covers_from)


class BatchTracker(Tracker):
    """Collects what is done, until the desk takes it over."""

    done: Progress

    @property
    def has_news(self) -> bool:
        return True  # the desk knows

    def take_done(self) -> list[tuple[int, int]]:
        """What was done since the last call, as intervals."""
        self.follow()
        done, self.done = self.done, Progress()
        return [(0, done.stable)] * (done.stable >= 0) + list(done.ranges)
