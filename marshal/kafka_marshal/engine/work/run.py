"""A run: consecutive messages of one partition under one epoch, delivered together.

Plain iteration has a cursor: everything before it is done. The cursor is the position of Python's own list iterator, so
it costs nothing per message. All other ways are explicit: ``done(message)`` in any order, from any thread.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from math import inf
from operator import length_hint
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from kafka_marshal.engine.inputs import reading
from kafka_marshal.ports import Message
from kafka_marshal.types import BatchToken, Key

#: In ``Taken.out``: all of its messages have left.
ALL = sys.maxsize

#: What getrefcount returns for a message that only its run refers to: the run's list, and getrefcount's argument.
OWN_REFERENCES = 2


def offset_of(message: Message) -> int:
    """The offset of a fetched message. Raises ValueError if it has none: it was not fetched."""
    offset = message.offset()
    if offset is None:
        raise ValueError("a message without an offset was not fetched from Kafka; it can't be tracked")
    return offset


def runs(messages: list[Message], one: Key | None, topics: set[str]) -> Iterator[tuple[Key, list[Message]]]:
    """Split the messages at every change of partition or topic, as cheaply as possible.

    one: the only partition fetched, before and after the read; None: there are others. The unbound methods of the
    messages' own type run in C, in a tenth of the time of a Python key function.
    """
    if not messages:
        return
    if one is not None and (messages[0].topic(), messages[0].partition()) == one:
        yield one, messages
        return
    kind = type(messages[0])
    for partition, group in groupby(messages, kind.partition):
        run = list(group)
        parts = [(run[0].topic(), run)] if len(topics) == 1 else groupby(run, kind.topic)
        for topic, part in parts:
            yield (topic or "", partition or 0), list(part)


def _offset_in_c(messages: Sequence[Message]) -> Callable[[Message], Any]:
    """``offset_of`` for messages of this type: the type's own method, which runs no Python code."""
    return type(messages[0]).offset


class Taken(NamedTuple):
    """Messages that one call of a user's thread took from a run."""

    messages: list[Message]
    #: One number: how many of them have left the library. It is stored one instruction before they leave; that store
    #: fails if ``withhold`` has removed the number.
    out: list[int]
    #: When they were taken (ms, own clock).
    at: float


class Counted(Protocol):
    """An assignment, as its runs see it."""

    @property
    def at_most_once(self) -> bool: ...


A = TypeVar("A", bound=Counted)


class Run(Generic[A]):
    """Consecutive messages of one assignment, handed out together.

    User threads take messages only from ``walk``. One step of its iterator is one step of the interpreter, which no
    signal or other thread can interrupt. ``recall`` takes the rest in one such step, too.
    """

    #: Of a batch of a share: the token of its messages.
    token: BatchToken | None = None

    __slots__ = (
        "__weakref__",
        "_ahead",
        "_cursor",
        "_is_piece",
        "_is_settled",
        "aside",
        "assignment",
        "covers_from",
        "done_count",
        "first",
        "given_up",
        "holder",
        "in_lanes",
        "is_open",
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
        #: The iterator from which user threads take messages; see ``handed_out``.
        self.walk: Iterator[Message] = iter(messages)
        #: The iterator whose length is the number of messages left in ``walk``.
        self._ahead: Iterator[object] = self.walk
        #: The last messages, taken back from ``walk`` before any thread took them.
        self.recalled: list[Message] = []
        #: Messages that a thread took from ``walk`` and must no longer hand out.
        self.refused: list[Message] = []
        #: What each call took (unused by iteration at least once, which the cursor follows).
        self.taken: list[Taken] = []
        #: Offsets of the first and the last message.
        self.first: int
        self.last: int
        self.first, self.last = (offset_of(messages[0]), offset_of(messages[-1])) if messages else (covers_from,) * 2
        #: How many messages are in flight: each may be done before its neighbours are.
        self.size: int = len(messages)
        #: The first offset that is done together with the first message.
        self.covers_from: int = covers_from
        #: Followed by its cursor (plain iteration); else explicitly.
        self.iterating: bool = iterating
        self._cursor = 0
        #: Returns the user's batch object, None once it is dropped; only that object can say done. None: no batch.
        self.holder: Callable[[], object] | None = None
        #: A loop was left with the message under the cursor, by break or an exception: it may have changed what the
        #: program keeps, and comes again.
        self.given_up: bool = False
        #: Each message waits in a lane, or is with a handler (:mod:`.lanes`).
        self.in_lanes: bool = False
        #: Indices of messages that are set aside, without lanes: they are not done with the others.
        self.aside: set[int] = set()
        #: One open message, which progress has passed: it comes by itself.
        self.is_open: bool = False
        #: A piece of a split run; it shares ``taken`` with that run, so threads' notes there apply to both.
        self._is_piece = False
        #: All messages are known to have been taken and to have left the library.
        self._is_settled = False
        #: Since when (ms, own clock) the message under the cursor, or the run, is in flight.
        self.since: float = now
        self.seen_cursor: int = 0
        self.done_count: int = 0
        #: For explicit runs: which messages are done.
        self.marks: bytearray = bytearray(0 if iterating else len(messages))

    @property
    def is_marked(self) -> bool:
        """Whether threads mark each message as done."""
        return not (self.iterating or self.in_lanes) and bool(self.messages) and not self.assignment.at_most_once

    @property
    @reading
    def ahead(self) -> int:
        """How many messages threads may still take from ``walk``."""
        return length_hint(self._ahead)

    @property
    def has_left(self) -> bool:
        """Whether threads may take more from ``walk``."""
        return self.ahead > 0

    @property
    def has_more(self) -> bool:
        """Whether threads may take more of an explicit run from ``walk``."""
        return self.is_marked and self.handed_out < len(self.messages)

    @property
    def handed_out(self) -> int:
        """How many messages threads have taken from ``walk``."""
        return len(self.messages) - len(self.recalled) - self.ahead

    @property
    @reading
    def cursor(self) -> int:
        """Messages before this index are done: at least those before the last message taken from ``walk``."""
        return max(self._cursor, self.handed_out - 1)

    @cursor.setter
    def cursor(self, cursor: int) -> None:
        """This many are done."""
        self._cursor = cursor

    @property
    @reading
    def is_given_up(self) -> bool:
        """``given_up``, which a user's thread sets."""
        return self.given_up

    def walked(self, last: Message | None) -> None:
        """``walk`` has ended, so the last message taken from it (None: there is none) is done, too."""
        if last is not None:
            self._cursor = bisect_right(self.messages, offset_of(last), key=offset_of)

    def recall(self) -> list[Message]:
        """End ``walk`` before its next message. Returns the messages that no thread has taken."""
        self.recalled = self.take_rest() + self.recalled
        return self.recalled

    @reading
    def take_rest(self) -> list[Message]:
        """Take all messages left in ``walk``, in one step."""
        return list(self.walk)

    def resume(self, again: Sequence[Message] = ()) -> None:
        """Continue ``walk`` with what was recalled, and with these, which no thread received."""
        numbers = sorted(
            bisect_left(self.messages, offset_of(message), key=offset_of) for message in (*self.recall(), *again)
        )
        self.recalled = []
        self.refused.clear()
        self._is_settled = False
        # By index: a new list of messages would add a reference to each, which ``astray`` would count.
        ahead: Iterator[int] = iter(numbers)
        self._ahead, self.walk = ahead, map(self.messages.__getitem__, ahead)

    def into_lanes(self) -> list[Message]:
        """Return all messages, for lanes, which from now on track which handler has which."""
        self.in_lanes = self._is_settled = True
        self.taken, self.walk, self._ahead = [], iter(()), iter(())
        return self.messages

    def take(self, count: int) -> list[Message]:
        """Take the next messages of ``walk``; they count as handed out."""
        messages = list(islice(self.walk, count))
        self.taken.append(Taken(messages, [ALL], self.since))
        return messages

    def withhold(self, withheld: dict[int, tuple[list[int], list[int]]]) -> None:
        """Keep in the library what has not left it: a thread that is about to hand it out fails.

        withheld: by its id, each removed number and its value; one call may take messages from several runs.
        """
        for place, taken in enumerate(self.taken):
            if id(taken.out) not in withheld:
                withheld[id(taken.out)] = taken.out, [taken.out.pop()]
            self.taken[place] = taken._replace(out=withheld[id(taken.out)][1])

    def astray(self, *, final: bool = False) -> list[Message]:
        """Recall ``walk``, and return messages that threads took from it and that will never leave the library.

        An exception ended the call in between, and dropped every reference but our own. Messages that a thread is
        about to hand out, or that a traceback still refers to, are included only with final.
        """
        if self.is_settled:
            return []
        return self.strays(self.recall(), final)

    @reading
    def strays(self, recalled: list[Message], final: bool) -> list[Message]:
        """Messages that threads have taken and that will never leave the library; see ``astray``."""
        ahead = {id(message) for message in recalled}
        noted = {id(message) for taken in self.taken for message in taken.messages}
        lost = set(map(id, self.refused))
        found = []
        for index in range(len(self.messages)):
            name = id(self.messages[index])
            if name in ahead:
                continue
            if name in lost or final or sys.getrefcount(self.messages[index]) <= OWN_REFERENCES + (name in noted):
                found.append(self.messages[index])
        # Read last: a thread that delivered one and dropped it while we counted has noted it before.
        left = {id(message) for taken in self.taken for message in taken.messages[: taken.out[0]]}
        return [message for message in found if id(message) not in left]

    @property
    def is_settled(self) -> bool:
        """Whether all messages that threads have taken have left the library."""
        if not self._is_settled:
            is_taken = not self.has_left  # asked first: another thread may take the last one meanwhile
            settled = self.handed_out == self.left
            self._is_settled = is_taken and settled  # for good
            return settled
        return True

    @property
    @reading
    def left(self) -> int:
        """How many of the messages that threads have taken have left the library."""
        if not self._is_piece:
            return sum(min(len(taken.messages), taken.out[0]) for taken in self.taken)
        left = {id(message) for taken in self.taken for message in taken.messages[: taken.out[0]]}
        return sum(id(message) in left for message in self.messages)

    def dropped(self, before: float, since: float = -inf) -> list[Message]:
        """Messages delivered before that time (ms, own clock), and since then, not done, that the user has dropped."""
        if (is_dropped := self.is_batch_dropped(before, since)) is not None:
            return [x for x, mark in zip(self.messages, self.marks, strict=True) if not mark] if is_dropped else []
        return self.unreferenced(before, since) if self.is_settled else []

    @reading
    def is_batch_dropped(self, before: float, since: float) -> bool | None:
        """Whether the user has dropped a batch that was delivered at that time; None: it is no batch."""
        return None if self.holder is None else since <= self.since < before and self.holder() is None

    @reading
    def unreferenced(self, before: float, since: float) -> list[Message]:
        """Messages delivered at that time and not done, to which only the library still refers."""
        old = {id(message) for taken in self.taken if since <= taken.at < before for message in taken.messages}
        return [
            self.messages[index]
            for index in range(len(self.messages))
            if not self.marks[index]
            and id(self.messages[index]) in old
            and sys.getrefcount(self.messages[index]) <= OWN_REFERENCES + 1
        ]

    @reading
    def begun_at(self) -> float:
        """``since``, which a user's thread sets for what it delivers at most once."""
        return self.since

    @reading
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
        """The messages at index first … last, all of which threads have taken, as a separate run."""
        covers_from, _ = self.covered(first, last)
        piece = Run(self.assignment, self.messages[first : last + 1], covers_from, False, self.begun_at())
        piece._is_piece, piece.in_lanes, piece.is_open = True, self.in_lanes, self.is_open
        piece.aside = {index - first for index in self.aside if first <= index <= last}
        piece.walk, piece._ahead = iter(()), iter(())
        piece.marks = self.marks[first : last + 1]
        piece.done_count = sum(piece.marks)
        piece.taken, piece.refused = self.taken, self.refused
        return piece

    def index(self, offset: int) -> int | None:
        """The index of the message with this offset; None: it is not in this run."""
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


def first_in_hand(runs: Mapping[float, Run[A]]) -> tuple[int, bytes | str | None] | None:
    """Offset and key of the first message in flight (of a range: no key); None: there is none. Any thread may ask."""
    run = min(list(runs.values()), key=lambda run: run.first, default=None)
    if run is None or not run.messages:
        return None if run is None else (run.first, None)
    index = run.cursor if run.iterating else run.marks.find(0)
    message = run.messages[min(max(index, 0), len(run.messages) - 1)]
    return offset_of(message), message.key()
