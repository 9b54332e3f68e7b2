"""What of one assignment is in hand, and what is done (C14, P6).

Messages are handed out in *runs*: consecutive messages of one partition under one epoch. A run is followed in one of
two ways. Plain iteration has a cursor: everything before it is done, and asking Python's own list iterator where it
stands costs nothing a message. All other ways are explicit: ``done(message)`` in any order, from any thread.

Offsets that Kafka never delivers (compaction, transaction markers) are done with the next delivered one (P6).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from kafka_marshal.adapters.interface import Message
from rationalizer import Progress
from rationalizer.limits import MAX_OFFSET

if TYPE_CHECKING:
    from kafka_marshal.engine.assignment import Assignment

__all__ = ["Run", "Tracker", "beyond", "offset_of"]

#: What a list iterator that has not ended says of itself: how to make one, of what, and the index of its next thing.
PLACE_FIELDS: Final = 3


def offset_of(message: Message) -> int:
    """The offset of a fetched message, which always has one."""
    offset = message.offset()
    if offset is None:
        raise ValueError("a message without an offset was not fetched from Kafka; it can't be tracked")
    return offset


def beyond(islands: Sequence[tuple[int, int]], known: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What of the islands is in none of the known intervals; both ascend, and so does the answer."""
    found: list[tuple[int, int]] = []
    place = 0
    for first, last in islands:
        while place < len(known) and known[place][1] < first:
            place += 1
        while place < len(known) and known[place][0] <= last:
            if first < known[place][0]:
                found.append((first, known[place][0] - 1))
            first = known[place][1] + 1
            if first > last:
                break
            place += 1
        if first <= last:
            found.append((first, last))
    return found


class Run:
    """Consecutive messages of one assignment, handed out together."""

    __slots__ = (
        "_ahead",
        "_cursor",
        "assignment",
        "covers_from",
        "done_count",
        "first",
        "iterating",
        "last",
        "marks",
        "messages",
        "seen_cursor",
        "since",
        "size",
        "walk",
    )

    def __init__(self, assignment: Assignment, messages: list[Message], covers_from: int, iterating: bool, now: float):
        self.assignment = assignment
        self.messages = messages
        self._ahead = messages.copy() if iterating else []
        #: What an iterating thread goes through, and the only one that does; see ``cursor``.
        self.walk: Iterator[Message] = iter(self._ahead)
        #: Offsets of the first and the last message.
        self.first, self.last = (offset_of(messages[0]), offset_of(messages[-1])) if messages else (covers_from,) * 2
        #: How many things are in hand: each may be done before its neighbours are.
        self.size = len(messages)
        #: The first offset that is done together with the first message.
        self.covers_from = covers_from
        #: Followed by its cursor (plain iteration); else explicitly.
        self.iterating = iterating
        self._cursor = 0
        #: Since when (ms, own clock) the message under the cursor, or the run, is in hand.
        self.since = now
        self.seen_cursor = 0
        self.done_count = 0
        #: For explicit runs: which messages are done.
        self.marks = bytearray(0 if iterating else len(messages))

    @property
    def cursor(self) -> int:
        """Messages before this index are done: those before the one that ``walk`` gave out last, at least.

        A list iterator tells where it stands (that is how it is pickled), unless it came to its end: then it is as
        it was seen last, until ``walked`` is called.
        """
        place: Any = self.walk.__reduce__()
        if len(place) == PLACE_FIELDS:
            self._cursor = max(self._cursor, place[2] - 1)
        return self._cursor

    @cursor.setter
    def cursor(self, cursor: int) -> None:
        self._cursor = cursor

    def walked(self, last: Message | None) -> None:
        """``walk`` came to its end, and the message that it gave out last (None: it gave none) is done, too."""
        if last is not None:
            self._cursor = bisect_right(self.messages, offset_of(last), key=offset_of)

    def cut_short(self) -> None:
        """End ``walk`` before its next message."""
        self._ahead.clear()

    def index(self, offset: int) -> int | None:
        """Where the message with this offset stands, None if it is not here."""
        messages = self.messages
        guess = offset - offset_of(messages[0])
        if 0 <= guess < len(messages) and messages[guess].offset() == offset:
            return guess
        place = bisect_left(messages, offset, key=offset_of)
        return place if place < len(messages) and messages[place].offset() == offset else None

    def covered(self, first: int, last: int) -> tuple[int, int]:
        """The offsets that are done when the messages at index first … last are."""
        start = self.covers_from if first == 0 else offset_of(self.messages[first - 1]) + 1
        return start, offset_of(self.messages[last])


class Tracker:
    """Follows the messages of one assignment from hand-out to done."""

    def __init__(self, stable: int, ranges: Sequence[tuple[int, int]]) -> None:
        #: What is done, as far as we know: the log's progress at the start, and what was done here since.
        self.done = Progress()
        if stable >= 0:
            self.done.through(stable)
        if ranges:
            self.done.commit(list(ranges), MAX_OFFSET)
        #: In hand, by first offset, in the order in which they were handed out.
        self.runs: dict[int, Run] = {}
        self.in_hand = 0
        #: The same first offsets, ascending: runs do not overlap.
        self._firsts: list[int] = []
        self._iterating = 0
        #: When (ms, own clock) an iterating thread was last seen to go on.
        self.last_moved = 0.0

    @property
    def has_news(self) -> bool:
        """May there be anything to commit beyond a gap: an island, or what an iterating thread has got done since?"""
        return self._iterating > 0 or self.has_islands

    @property
    def has_islands(self) -> bool:
        """Is anything done beyond a gap?"""
        return len(self.done.intervals) > 0

    def hand_out(self, run: Run) -> None:
        """A run goes to the user."""
        self.runs[run.first] = run
        insort(self._firsts, run.first)
        self._iterating += run.iterating
        self.in_hand += run.size

    def _take_back(self, run: Run) -> bool:
        """A run is not in hand any more. False: it was not."""
        if self.runs.get(run.first) is not run:
            return False
        del self.runs[run.first]
        del self._firsts[bisect_left(self._firsts, run.first)]
        self._iterating -= run.iterating
        return True

    def mark(self, message: Message) -> bool:
        """One explicitly handed-out message is done. False: it is not in hand here, or was done before."""
        offset = offset_of(message)
        place = bisect_right(self._firsts, offset)
        if place == 0:
            return False
        run = self.runs[self._firsts[place - 1]]
        index = None if run.iterating else run.index(offset)
        if index is None or run.messages[index] is not message or run.marks[index]:
            return False
        run.marks[index] = 1
        run.done_count += 1
        self.in_hand -= 1
        self._commit(run, index, index)
        if run.done_count == len(run.messages):
            self._take_back(run)
        return True

    def mark_run(self, run: Run) -> bool:
        """A whole run is done. False: it is not in hand here (any more)."""
        if not self._take_back(run):
            return False
        self.in_hand -= run.size - run.done_count
        self._commit_offsets(run.covers_from, run.last)
        return True

    def throw_back(self, run: Run) -> None:
        """A run that was never handed out is not in hand any more, nor done."""
        if self._take_back(run):
            self.in_hand -= run.size

    def follow(self) -> None:
        """Take over what iterating threads have got done since the last look."""
        if self._iterating:
            for run in self.runs.values():
                if run.iterating:
                    self._follow(run)

    def _follow(self, run: Run) -> None:
        cursor = run.cursor
        if cursor > run.done_count:
            self._commit(run, run.done_count, cursor - 1)
            self.in_hand -= cursor - run.done_count
            run.done_count = cursor

    def close_run(self, run: Run) -> list[Message]:
        """An iterating thread leaves its run; what it has not got done comes back, to be handed out again."""
        if not self._take_back(run):
            return []
        self._follow(run)
        rest = run.messages[run.cursor :]
        self.in_hand -= len(rest)
        return rest

    def _commit(self, run: Run, first: int, last: int) -> None:
        self._commit_offsets(*run.covered(first, last))

    def _commit_offsets(self, first: int, last: int) -> None:
        if first <= self.done.stable + 1 <= last:
            self.done.through(last)
        else:
            # The log's limit on intervals (P5) is not ours: what is done stays known here until the log takes it.
            self.done.commit([(first, last)], MAX_OFFSET)

    def open_from(self) -> int:
        """The lowest offset that is neither done nor in hand."""
        offset = self.done.stable + 1
        while True:
            offset = self.done.intervals.end_of_run(offset - 1) + 1
            place = bisect_right(self._firsts, offset)
            if place == 0 or (last := self.runs[self._firsts[place - 1]].last) < offset:
                return offset
            offset = last + 1

    def next_in_hand(self, offset: int) -> int | None:
        """The first offset in hand above offset, None: nothing above it is."""
        place = bisect_right(self._firsts, offset)
        return self._firsts[place] if place < len(self._firsts) else None

    def oldest_in_hand(self, now: float) -> float | None:
        """Since when (ms, own clock) something is in hand; None: nothing is.

        For the message under a cursor: since it was first seen there, which is at most one look too late.
        """
        if not self._iterating:
            return next((run.since for run in self.runs.values()), None)
        for run in self.runs.values():
            if run.iterating and run.cursor != run.seen_cursor:
                run.seen_cursor, run.since, self.last_moved = run.cursor, now, now
        return min(run.since for run in self.runs.values())
