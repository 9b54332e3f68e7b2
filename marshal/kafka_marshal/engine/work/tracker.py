"""What of one assignment is in hand, and what is done (C14, P6).

Messages are handed out in *runs*: consecutive messages of one partition under one epoch. A run is followed in one of
two ways. Plain iteration has a cursor: everything before it is done, and asking Python's own list iterator where it
stands costs nothing a message. All other ways are explicit: ``done(message)`` in any order, from any thread.

Offsets that Kafka never delivers (compaction, transaction markers) are done with the next delivered one (P6).
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from operator import length_hint
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from kafka_marshal.engine.figures import Moved
from kafka_marshal.ports import Message
from rationalizer import Progress
from rationalizer.limits import MAX_OFFSET

__all__ = ["ALL", "Run", "Taken", "Tracker", "beyond", "first_in_hand", "offset_of"]

#: In ``Taken.out``: all of its messages.
ALL = sys.maxsize

#: What getrefcount says of a message that nobody but its run has: the run's list, and getrefcount's argument.
OWN_REFERENCES = 2


def offset_of(message: Message) -> int:
    """The offset of a fetched message, which always has one."""
    offset = message.offset()
    if offset is None:
        raise ValueError("a message without an offset was not fetched from Kafka; it can't be tracked")
    return offset


def _offset_in_c(messages: Sequence[Message]) -> Callable[[Message], Any]:
    """``offset_of``, for these messages, of one type: its own method, without a step of the interpreter."""
    return type(messages[0]).offset


def _consecutive(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and the last of each stretch of ascending numbers without a gap."""
    first = last = numbers[0]
    for number in numbers:
        if number > last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


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


class Taken(NamedTuple):
    """Messages that one call of a user's thread took from a run."""

    messages: list[Message]
    #: One number: how many of them have left the library. Stored in the instruction before they leave it, which fails
    #: where ``withhold`` has taken the number away.
    out: list[int]
    #: When they were taken (ms, own clock).
    at: float


class Counted(Protocol):
    """What a run needs to know of its assignment."""

    @property
    def at_most_once(self) -> bool: ...


A = TypeVar("A", bound=Counted)


class Run(Generic[A]):
    """Consecutive messages of one assignment, handed out together.

    User threads take messages from ``walk`` and nothing else; one step of an iterator is one step of the
    interpreter, which no signal and no other thread can part. ``recall`` takes the rest in one such step, too.
    """

    __slots__ = (
        "_ahead",
        "_cursor",
        "_is_piece",
        "_is_settled",
        "assignment",
        "covers_from",
        "done_count",
        "first",
        "holder",
        "in_lanes",
        "iterating",
        "last",
        "marks",
        "messages",
        "recalled",
        "refused",
        "seen_cursor",
        "since",
        "size",
        "taken",
        "walk",
    )

    def __init__(self, assignment: A, messages: list[Message], covers_from: int, iterating: bool, now: float):
        self.assignment: A = assignment
        self.messages: list[Message] = messages
        #: What user threads take the messages from; see ``handed_out``.
        self.walk: Iterator[Message] = iter(messages)
        #: What says how many are left in it.
        self._ahead: Iterator[object] = self.walk
        #: The last messages, taken back from ``walk`` before any thread got them.
        self.recalled: list[Message] = []
        #: What a thread took from ``walk`` and must not hand out any more.
        self.refused: list[Message] = []
        #: What calls have taken (not while iterating at least once, which the cursor follows).
        self.taken: list[Taken] = []
        #: Offsets of the first and the last message.
        self.first: int
        self.last: int
        self.first, self.last = (offset_of(messages[0]), offset_of(messages[-1])) if messages else (covers_from,) * 2
        #: How many things are in hand: each may be done before its neighbours are.
        self.size: int = len(messages)
        #: The first offset that is done together with the first message.
        self.covers_from: int = covers_from
        #: Followed by its cursor (plain iteration); else explicitly.
        self.iterating: bool = iterating
        self._cursor = 0
        #: What is asked for whether the user has the batch still, which alone can say that it is done; None: no batch.
        self.holder: Callable[[], object] | None = None
        #: Each message waits in a lane, or is with a handler (:mod:`.lanes`).
        self.in_lanes: bool = False
        #: Split off a run that threads took messages from: what they note there is about this one, too.
        self._is_piece = False
        #: Known of a run of which nothing is left to be taken.
        self._is_settled = False
        #: Since when (ms, own clock) the message under the cursor, or the run, is in hand.
        self.since: float = now
        self.seen_cursor: int = 0
        self.done_count: int = 0
        #: For explicit runs: which messages are done.
        self.marks: bytearray = bytearray(0 if iterating else len(messages))

    @property
    def is_marked(self) -> bool:
        """Whether threads say of each message that it is done."""
        return not (self.iterating or self.in_lanes) and bool(self.messages) and not self.assignment.at_most_once

    @property
    def has_left(self) -> bool:
        """Whether threads may take more from ``walk``."""
        return length_hint(self._ahead) > 0

    @property
    def has_more(self) -> bool:
        """Whether threads may take more of an explicit run from ``walk``."""
        return self.is_marked and self.handed_out < len(self.messages)

    @property
    def handed_out(self) -> int:
        """How many messages threads have taken from ``walk``."""
        return len(self.messages) - len(self.recalled) - length_hint(self._ahead)

    @property
    def cursor(self) -> int:
        """Messages before this index are done: those before the one that ``walk`` gave out last, at least."""
        return max(self._cursor, self.handed_out - 1)

    @cursor.setter
    def cursor(self, cursor: int) -> None:
        """So many are done."""
        self._cursor = cursor

    def walked(self, last: Message | None) -> None:
        """``walk`` came to its end, and the message that it gave out last (None: it gave none) is done, too."""
        if last is not None:
            self._cursor = bisect_right(self.messages, offset_of(last), key=offset_of)

    def recall(self) -> list[Message]:
        """End ``walk`` before its next message; what no thread has taken."""
        self.recalled = list(self.walk) + self.recalled
        return self.recalled

    def resume(self, again: Sequence[Message] = ()) -> None:
        """Have ``walk`` go on with what was recalled, and with these, which no thread got."""
        numbers = sorted(
            bisect_left(self.messages, offset_of(message), key=offset_of) for message in (*self.recall(), *again)
        )
        self.recalled = []
        self.refused.clear()
        self._is_settled = False
        # By number: a list of messages would count as one that has them all (``astray``).
        ahead: Iterator[int] = iter(numbers)
        self._ahead, self.walk = ahead, map(self.messages.__getitem__, ahead)

    def into_lanes(self) -> list[Message]:
        """All messages, for lanes: they alone know who has which."""
        self.in_lanes = self._is_settled = True
        self.taken, self.walk, self._ahead = [], iter(()), iter(())
        return self.messages

    def take(self, count: int) -> list[Message]:
        """The next messages of ``walk``, as handed out."""
        messages = list(islice(self.walk, count))
        self.taken.append(Taken(messages, [ALL], self.since))
        return messages

    def withhold(self, withheld: dict[int, tuple[list[int], list[int]]]) -> None:
        """What has not left the library by now never will: the thread that is about to hand it out fails to.

        withheld: by its id, each number that was taken away, and what it was; one call may take from several runs.
        """
        for place, taken in enumerate(self.taken):
            if id(taken.out) not in withheld:
                withheld[id(taken.out)] = taken.out, [taken.out.pop()]
            self.taken[place] = taken._replace(out=withheld[id(taken.out)][1])

    def astray(self, *, final: bool = False) -> list[Message]:
        """What a thread has taken from ``walk``, which is recalled by this, and will never leave the library.

        An exception has ended the call in between, and with it the last reference but our own. What a thread is
        about to hand out, or a traceback still shows, is not among them yet, but with final.
        """
        if self.is_settled:
            return []
        ahead = {id(message) for message in self.recall()}
        noted = {id(message) for taken in self.taken for message in taken.messages}
        lost = set(map(id, self.refused))
        found = []
        for index in range(len(self.messages)):
            name = id(self.messages[index])
            if name in ahead:
                continue
            if name in lost or final or sys.getrefcount(self.messages[index]) <= OWN_REFERENCES + (name in noted):
                found.append(self.messages[index])
        # Asked last: a thread that has handed one out, and let go of it while we counted, has said so before.
        left = {id(message) for taken in self.taken for message in taken.messages[: taken.out[0]]}
        return [message for message in found if id(message) not in left]

    @property
    def is_settled(self) -> bool:
        """Whether all that threads have taken has left the library."""
        if not self._is_settled:
            is_taken = not self.has_left  # asked first: another thread may take the last one meanwhile
            settled = self.handed_out == self.left
            self._is_settled = is_taken and settled  # for good
            return settled
        return True

    @property
    def left(self) -> int:
        """How many of the messages that threads have taken have left the library."""
        if not self._is_piece:
            return sum(min(len(taken.messages), taken.out[0]) for taken in self.taken)
        left = {id(message) for taken in self.taken for message in taken.messages[: taken.out[0]]}
        return sum(id(message) in left for message in self.messages)

    def dropped(self, before: float) -> list[Message]:
        """What was handed out before that time, is not done, and nobody has any more who could say so."""
        if self.holder is not None:
            return self.messages if self.since < before and self.holder() is None else []
        if not self.is_settled:
            return []
        old = {id(message) for taken in self.taken if taken.at < before for message in taken.messages}
        return [
            self.messages[index]
            for index in range(len(self.messages))
            if not self.marks[index]
            and id(self.messages[index]) in old
            and sys.getrefcount(self.messages[index]) <= OWN_REFERENCES + 1
        ]

    def in_hand_since(self) -> float | None:
        """Since when (ms, own clock) the first message that is not done was taken; None: all that were taken are."""
        if self._is_piece:
            undone = {id(message) for message, mark in zip(self.messages, self.marks, strict=True) if not mark}
            return min((x.at for x in self.taken if any(id(m) in undone for m in x.messages)), default=self.since)
        place = 0
        for taken in self.taken:
            end = place + len(taken.messages)
            if self.marks.find(0, place, end) >= 0:
                return taken.at
            place = end
        return None

    @property
    def first_undone(self) -> Message | None:
        """The first message that threads have taken and not done; None: there is none, or lanes have it."""
        if self.in_lanes or self.assignment.at_most_once:
            return None
        taken = self.messages[: self.handed_out]
        if self.iterating:
            return taken[self.cursor] if self.cursor < len(taken) else None
        return next((message for message, mark in zip(taken, self.marks, strict=False) if not mark), None)

    def piece(self, first: int, last: int) -> Run[A]:
        """The messages at index first … last, all of which threads have taken, as a run of their own."""
        covers_from, _ = self.covered(first, last)
        piece = Run(self.assignment, self.messages[first : last + 1], covers_from, False, self.since)
        piece._is_piece, piece.in_lanes = True, self.in_lanes
        piece.walk, piece._ahead = iter(()), iter(())
        piece.marks = self.marks[first : last + 1]
        piece.done_count = sum(piece.marks)
        piece.taken, piece.refused = self.taken, self.refused
        return piece

    def index(self, offset: int) -> int | None:
        """Where the message with this offset stands, None if it is not here."""
        messages = self.messages
        guess = offset - self.first
        if 0 <= guess < len(messages) and messages[guess].offset() == offset:
            return guess
        place = bisect_left(messages, offset, key=_offset_in_c(messages))
        return place if place < len(messages) and messages[place].offset() == offset else None

    def covered(self, first: int, last: int) -> tuple[int, int]:
        """The offsets that are done when the messages at index first … last are."""
        start = self.covers_from if first == 0 else offset_of(self.messages[first - 1]) + 1
        return start, offset_of(self.messages[last])


def first_in_hand(runs: Mapping[int, Run[A]]) -> tuple[int, bytes | str | None] | None:
    """Offset and key of the first message in hand (of a range: no key); None: none is. Any thread may ask."""
    run = min(list(runs.values()), key=lambda run: run.first, default=None)
    if run is None or not run.messages:
        return None if run is None else (run.first, None)
    index = run.cursor if run.iterating else run.marks.find(0)
    message = run.messages[min(max(index, 0), len(run.messages) - 1)]
    return offset_of(message), message.key()


class Tracker(Generic[A]):
    """Follows the messages of one assignment from hand-out to done."""

    def __init__(self, stable: int, ranges: Sequence[tuple[int, int]], moved: Moved | None = None) -> None:
        """moved: counts what is done."""
        #: What is done, as far as we know: the log's progress at the start, and what was done here since.
        self.done: Progress = Progress()
        if stable >= 0:
            self.done.through(stable)
        if ranges:
            self.done.commit(list(ranges), MAX_OFFSET)
        #: In hand, by first offset, in the order in which they were handed out.
        self.runs: dict[int, Run[A]] = {}
        #: What is done is counted there, and nowhere else: once for each message.
        self.moved: Moved = moved or Moved()
        #: What was handed out and has not come back, and what had been done before that.
        self._out = self.moved.done
        #: The same first offsets, ascending: runs do not overlap.
        self._firsts: list[int] = []
        self._iterating = 0
        #: Offsets behind the last message, of which a reader is never given any (P6): done when all before is.
        self._tail: tuple[int, int] | None = None
        #: When (ms, own clock) an iterating thread was last seen to go on.
        self.last_moved: float = 0.0

    @property
    def in_hand(self) -> int:
        """How many messages were handed out and are not done."""
        return self._out - self.moved.done

    def detach(self) -> None:
        """The assignment is over: what is said to be done from now on counts for nothing."""
        self.moved = Moved(done=self.moved.done)

    @property
    def has_news(self) -> bool:
        """May there be anything to commit beyond a gap: an island, or what an iterating thread has got done since?"""
        return self._iterating > 0 or self.has_islands

    @property
    def has_islands(self) -> bool:
        """Is anything done beyond a gap?"""
        return len(self.done.intervals) > 0

    def hand_out(self, run: Run[A]) -> None:
        """A run goes to the user."""
        self._add(run)
        self._iterating += run.iterating
        self._out += run.size

    def _take_back(self, run: Run[A]) -> bool:
        """A run is not in hand any more. False: it was not."""
        if self.runs.get(run.first) is not run:
            return False
        del self.runs[run.first]
        del self._firsts[bisect_left(self._firsts, run.first)]
        self._iterating -= run.iterating
        return True

    def mark(self, messages: Iterable[Message]) -> list[Message]:
        """These, of explicit runs, are done. Returns those that are not in hand here, or were done before."""
        refused: list[Message] = []
        marked: dict[Run[A], list[int]] = {}
        run: Run[A] | None = None
        for message in messages:
            offset = offset_of(message)
            if run is None or not run.first <= offset <= run.last:
                run = self.run_at(offset)
            index = None if run is None or run.iterating else run.index(offset)
            if run is None or index is None or run.messages[index] is not message or run.marks[index]:
                refused.append(message)
                continue
            run.marks[index] = 1
            marked.setdefault(run, []).append(index)
        if marked:
            self._marked(marked)
        return refused

    def _marked(self, marked: Mapping[Run[A], list[int]]) -> None:
        """These indices of runs were marked as done."""
        done: list[tuple[int, int]] = []
        for run, indices in marked.items():
            indices.sort()
            done += [run.covered(first, last) for first, last in _consecutive(indices)]
            run.done_count += len(indices)
            self.moved.done += len(indices)
            if run.done_count == len(run.messages):
                self._take_back(run)
            elif run.in_lanes and run.done_count * 2 >= len(run.messages):
                self._shrink(run)
        if len(done) == 1:
            self._commit_offsets(*done[0])
        else:  # all at once: each change of the set costs more than the offsets in it
            self.done.commit(done, MAX_OFFSET)

    def _shrink(self, run: Run[A]) -> None:
        """Half of a run is done: what is not becomes a run of its own, so that one message does not keep all."""
        self._take_back(run)
        first = run.marks.find(0)
        left = [message for message, is_done in zip(run.messages, run.marks, strict=True) if not is_done]
        rest = Run(run.assignment, left, run.covered(first, first)[0], False, run.since)
        rest.into_lanes()
        self._add(rest)

    def _add(self, piece: Run[A]) -> None:
        self.runs[piece.first] = piece
        insort(self._firsts, piece.first)

    def run_at(self, offset: int) -> Run[A] | None:
        """The run in hand that may have this offset."""
        place = bisect_right(self._firsts, offset)
        return self.runs[self._firsts[place - 1]] if place else None

    def mark_run(self, run: Run[A]) -> bool:
        """A whole run is done. False: it is not in hand here (any more)."""
        if not self._take_back(run):
            return False
        self.moved.done += run.size - run.done_count
        self._commit_offsets(run.covers_from, run.last)
        return True

    def requeue(self, run: Run[A]) -> None:
        """A run that was never handed out is not in hand any more, nor done."""
        if self._take_back(run):
            self._out -= run.size

    def pass_over(self, first: int, last: int) -> None:
        """The reader has passed these offsets, and will be given none of them (P6)."""
        self._tail = (first, last)
        self.follow()

    def follow(self) -> None:
        """Take over what iterating threads have got done since the last look."""
        if self._iterating:
            for run in self.runs.values():
                if run.iterating:
                    self._follow(run)
        if self._tail is not None and self.done.stable + 1 >= self._tail[0]:
            self.done.through(max(self.done.stable, self._tail[1]))
            self._tail = None

    def _follow(self, run: Run[A]) -> None:
        cursor = run.cursor
        if cursor > run.done_count:
            self._commit(run, run.done_count, cursor - 1)
            # In this order: who reads both meanwhile counts none of them twice.
            count, run.done_count = cursor - run.done_count, cursor
            self.moved.done += count

    def close_run(self, run: Run[A]) -> list[Message]:
        """An iterating thread leaves its run; what it has not got done comes back, to be handed out again."""
        if not self._take_back(run):
            return []
        self._follow(run)
        rest = run.messages[run.cursor :]
        self._out -= len(rest)
        return rest

    def split(self, run: Run[A], back: Collection[Message]) -> list[tuple[list[Message], int]]:
        """These messages of an explicit run are not in hand any more, nor done.

        Returns them as (consecutive messages, first offset they cover). What stays in hand becomes runs of its own.
        """
        if not back or not self._take_back(run):
            return []
        returned: list[tuple[list[Message], int]] = []
        ids = set(map(id, back))
        for is_back, group in groupby(range(len(run.messages)), key=lambda index: id(run.messages[index]) in ids):
            indices = list(group)
            piece = run.piece(indices[0], indices[-1])
            if is_back:
                self._out -= piece.size - piece.done_count
                returned.append((piece.messages, piece.covers_from))
            elif piece.done_count < piece.size:
                self._add(piece)
        return returned

    def _commit(self, run: Run[A], first: int, last: int) -> None:
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

    @property
    def in_hand_to(self) -> int:
        """The last offset in hand; -1: none is."""
        return self.runs[self._firsts[-1]].last if self._firsts else -1

    def next_in_hand(self, offset: int) -> int | None:
        """The first offset in hand above offset, None: nothing above it is."""
        place = bisect_right(self._firsts, offset)
        return self._firsts[place] if place < len(self._firsts) else None

    def oldest_in_hand(self, now: float) -> float | None:
        """Since when (ms, own clock) something is in hand; None: nothing is.

        For the message under a cursor: since it was first seen there, which is at most one look too late.
        """
        oldest: float | None = None
        for run in self.runs.values():
            if run.is_marked:
                since = run.in_hand_since()
            else:
                if run.iterating and run.cursor != run.seen_cursor:
                    run.seen_cursor, run.since, self.last_moved = run.cursor, now, now
                since = run.since
            if since is not None and (oldest is None or since < oldest):
                oldest = since
        return oldest
