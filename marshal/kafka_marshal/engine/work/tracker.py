"""The messages of one assignment that wait to be handed out or are in flight, and the offsets that are done.

Messages are handed out in *runs* (:mod:`.run`).
Offsets that Kafka never delivers (compaction, transaction markers) are done with the next delivered one.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from math import ceil, inf
from typing import Any, Generic, TypeVar

from kafka_marshal.engine.figures import MessageTotals
from kafka_marshal.engine.inputs import given
from kafka_marshal.engine.work.run import Counted, Run, offset_of
from kafka_marshal.ports import Message
from rationalizer import Progress
from rationalizer.limits import MAX_OFFSET, NOTHING_DONE


def _consecutive(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and last number of each stretch without a gap; the numbers must ascend."""
    first = last = numbers[0]
    for number in numbers:
        if number > last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def beyond(islands: Sequence[tuple[int, int]], known: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of the islands that no known interval covers. Both inputs must ascend; the result does, too."""
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


def that_fit(new: list[tuple[int, int]], known: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """The new intervals with which the log keeps at most ``most``: the lowest, and all that widen a known one.

    It would refuse all of them if it could not keep one (G15).
    """
    room = most - len(known)
    if room >= len(new):
        return new
    firsts, lasts = {first - 1 for first, _ in known}, {last + 1 for _, last in known}
    found = []
    for first, last in new:
        widens = first in lasts or last in firsts
        if widens or room > 0:
            found.append((first, last))
            room -= not widens
    return found


A = TypeVar("A", bound=Counted)

#: An open message may be the first of a run in flight, which has it done: then it stands this far behind that one.
BESIDE = 0.5


class Tracker(Generic[A]):
    """Follows the messages of one assignment from hand-out to done."""

    def __init__(self, stable: int, ranges: Sequence[tuple[int, int]], moved: MessageTotals | None = None) -> None:
        """moved: the counters to use; moved.done counts messages that are done."""
        #: All that we know to be done: the log's progress at the start, and offsets done here since.
        self.done: Progress = Progress()
        if stable >= 0:
            self.done.through(stable)
        if ranges:
            self.done.commit(list(ranges), MAX_OFFSET)
        #: Runs in flight by first offset (or BESIDE it), in the order in which they were handed out.
        self.runs: dict[float, Run[A]] = {}
        #: The only counter of messages that are done; counts each message once.
        self.moved: MessageTotals = moved or MessageTotals()
        #: moved.done at the start, plus messages handed out since, less those that came back.
        self._out = self.moved.done
        #: The first offsets of the runs, ascending: they do not overlap. (Without runs of one open message.)
        self._firsts: list[int] = []
        self._iterating = 0
        #: Offsets after the last message that no reader ever receives (P6): done once all before them are.
        self._tail: tuple[int, int] | None = None
        #: When (ms, own clock) an iterating thread was last seen to advance.
        self.last_moved: float = 0.0
        #: Called with messages that are done; None: nothing of the partition is open in the log.
        self.watch: Callable[[Sequence[Message]], object] | None = None
        #: Up to here messages were given up: it is not known whether the program's state has them, until they are done.
        self.doubt: int = NOTHING_DONE

    @property
    def in_hand(self) -> int:
        """How many messages were handed out and are not done."""
        return self._out - self.moved.done

    @property
    def has_news(self) -> bool:
        """Whether there may be something to commit beyond a gap: an island, or progress of an iterating thread."""
        return self._iterating > 0 or self.has_islands

    @property
    def has_islands(self) -> bool:
        """Whether anything is done beyond a gap."""
        return len(self.done.intervals) > 0

    def hand_out(self, run: Run[A]) -> None:
        """Hand out a run: it is in flight from now on."""
        self._add(run)
        self._iterating += run.iterating
        self._out += run.size

    def has(self, run: Run[A]) -> bool:
        """Whether this run is in flight: neither done as a whole, nor taken back."""
        return self._place(run) is not None

    def _place(self, run: Run[A]) -> float | None:
        return next((at for at in (run.first, run.first + BESIDE) if self.runs.get(at) is run), None)

    def _take_back(self, run: Run[A]) -> bool:
        """Remove a run from those in flight. False: it was not in flight."""
        place = self._place(run)
        if place is None:
            return False
        del self.runs[place]
        if not run.is_open:
            del self._firsts[bisect_left(self._firsts, run.first)]
        self._iterating -= run.iterating
        return True

    def mark(self, messages: Iterable[Message]) -> list[Message]:
        """These messages of explicit runs are done. Returns those not in flight here, or done before."""
        refused: list[Message] = []
        marked: dict[Run[A], list[int]] = {}
        run: Run[A] | None = None
        for message in messages:
            offset = offset_of(message)
            # An open message, a run by itself, may lie between the messages of the run before.
            if run is None or not run.first <= offset <= run.last or offset in self.runs:
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
        """Commit and count these indices of runs, which were marked as done."""
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
            if self.watch is not None:
                self.watch([run.messages[index] for index in indices])
        if len(done) == 1:
            self._commit_offsets(*done[0])
        else:  # all at once: each change of the set costs more than the offsets in it
            self.done.commit(done, MAX_OFFSET)

    def _shrink(self, run: Run[A]) -> None:
        """Half of a run is done: move the rest to a new run, so that one message does not keep all in memory."""
        self._take_back(run)
        first = run.marks.find(0)
        left = [message for message, is_done in zip(run.messages, run.marks, strict=True) if not is_done]
        rest = Run(run.assignment, left, run.covered(first, first)[0], False, run.begun_at())
        rest.into_lanes()
        self._add(rest)

    def _add(self, piece: Run[A]) -> None:
        if piece.is_open:
            self.runs[piece.first + BESIDE if piece.first in self.runs else piece.first] = piece
            return
        if piece.first in self.runs:
            self.runs[piece.first + BESIDE] = self.runs.pop(piece.first)
        self.runs[piece.first] = piece
        insort(self._firsts, piece.first)

    def _open_at(self, offset: int) -> Run[A] | None:
        """The run in flight of this open message alone; None: there is none."""
        for at in (offset, offset + BESIDE):
            if (run := self.runs.get(at)) is not None and run.is_open:
                return run
        return None

    def run_at(self, offset: int) -> Run[A] | None:
        """The run in flight that may have this offset; None: there is none."""
        if (run := self._open_at(offset)) is not None:
            return run
        place = bisect_right(self._firsts, offset)
        return self.runs[self._firsts[place - 1]] if place else None

    def mark_run(self, run: Run[A]) -> bool:
        """A whole run is done. False: it is not, or no longer, in flight here."""
        if not self._take_back(run):
            return False
        self.moved.done += run.size - run.done_count
        if self.watch is not None:
            self.watch(run.messages)
        if run.aside:
            self._commit_but_aside(run, 0, len(run.messages) - 1)
        else:
            self._commit_offsets(run.covers_from, run.last)
        return True

    def requeue(self, run: Run[A]) -> None:
        """Take back a run that was never handed out: it is neither in flight nor done."""
        if self._take_back(run):
            self._out -= run.size

    def pass_over(self, first: int, last: int) -> None:
        """The reader has passed these offsets, and will never receive any of them."""
        self._tail = (first, last)
        self.follow()

    def follow(self) -> None:
        """Record what iterating threads have done since the last call."""
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
            self._commit_but_aside(run, run.done_count, cursor - 1)
            if self.watch is not None:
                self.watch(run.messages[run.done_count : cursor])
            # In this order, so that a concurrent reader of both counts no message twice.
            count, run.done_count = cursor - run.done_count, cursor
            self.moved.done += count

    def close_run(self, run: Run[A]) -> list[Message]:
        """An iterating thread leaves its run. Returns the messages that are not done, to be handed out again."""
        if not self._take_back(run):
            return []
        self._follow(run)
        rest = run.messages[run.cursor :]
        self._out -= len(rest)
        return [each for index, each in enumerate(rest, run.cursor) if index not in run.aside] if run.aside else rest

    def split(self, run: Run[A], back: Collection[Message]) -> list[tuple[list[Message], int]]:
        """Take back these messages of an explicit run: they are neither in flight nor done.

        Returns them as (consecutive messages, first offset they cover). The others stay in flight, as new runs.
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

    def set_aside(self, offset: int) -> int | None:
        """Remove a message of an explicit run: it is neither in flight nor done. Returns the first offset it covers.

        None: it is not in flight.
        """
        run = self.run_at(offset)
        place = None if run is None else run.index(offset)
        if run is None or place is None or place in run.aside:
            return None
        if run.done_count > place if run.iterating else run.marks[place]:
            return None
        covers_from, _ = run.covered(place, place)
        if run.in_lanes:
            self.split(run, [run.messages[place]])
            return covers_from
        run.aside.add(place)
        if not run.iterating:
            run.marks[place] = 1
            run.done_count += 1
            self._out -= 1
            if run.done_count == len(run.messages):
                self._take_back(run)
        return covers_from

    def blocking(self, at_least: int) -> int | None:
        """The message in flight that this many later offsets, or more, wait for; they are done. None: there is none."""
        if not self._firsts or sum(last - first + 1 for first, last in self.done.ranges) < at_least:
            return None
        run = self.runs[self._firsts[0]]
        return None if run.iterating or (place := run.marks.find(0)) < 0 else offset_of(run.messages[place])

    def _commit_but_aside(self, run: Run[A], first: int, last: int) -> None:
        """The messages at index first … last are done, except those that are set aside."""
        if not run.aside:
            self._commit_offsets(*run.covered(first, last))
        elif indices := [index for index in range(first, last + 1) if index not in run.aside]:
            for one, other in _consecutive(indices):
                self._commit_offsets(*run.covered(one, other))

    def open_in_log(self, first: int, last: int) -> None:
        """The log shows these offsets as open: progress passes them. What is in flight of them stays so."""
        run = self.run_at(last)
        if run is not None and (place := run.index(last)) is not None:
            first = min(first, run.covered(place, place)[0])
        self._commit_offsets(first, last)

    def _commit_offsets(self, first: int, last: int) -> None:
        if first <= self.done.stable + 1 <= last:
            self.done.through(last)
        else:
            # The log limits intervals (P5), we do not: offsets stay known as done here until the log accepts them.
            self.done.commit([(first, last)], MAX_OFFSET)

    def open_from(self) -> int:
        """The lowest offset that is neither done nor in flight."""
        offset = self.done.stable + 1
        while True:
            offset = self.done.intervals.end_of_run(offset - 1) + 1
            place = bisect_right(self._firsts, offset)
            if place == 0 or (last := self.runs[self._firsts[place - 1]].last) < offset:
                return offset
            offset = last + 1

    @property
    def in_hand_to(self) -> int:
        """The last offset in flight; -1: there is none."""
        return self.runs[self._firsts[-1]].last if self._firsts else -1

    def next_in_hand(self, offset: int) -> int | None:
        """The lowest first offset, above this one, of a run in flight; None: there is none."""
        place = bisect_right(self._firsts, offset)
        return self._firsts[place] if place < len(self._firsts) else None

    def oldest_in_hand(self, now: float) -> float | None:
        """Since when (ms, own clock) the oldest message in flight has been so; None: nothing is in flight.

        For the message under a cursor: since it was first seen there, which is late by at most one call of this.
        Of what is in lanes, these know when a handler got it.
        """
        oldest: float | None = None
        for run in self.runs.values():
            if run.in_lanes:
                continue
            if run.is_marked:
                since = run.in_hand_since()
            else:
                if run.iterating and run.cursor != run.seen_cursor:
                    run.seen_cursor, run.since, self.last_moved = run.cursor, now, now
                since = run.begun_at()
            if since is not None and (oldest is None or since < oldest):
                oldest = since
        return oldest


def room(of: Tracker[A], most: int) -> int:
    """How many more intervals beyond a gap the log keeps, if it keeps that many, one of them the topic's mark."""
    return most - 1 - len(of.done.intervals)


class Buffer:
    """Messages in offset order, between the reader and the user."""

    __slots__ = ("_covered_to", "_open", "_parts", "came_at", "early", "fetch_next", "is_given_up", "size")

    def __init__(self) -> None:
        #: (messages, first offset they cover), in offset order.
        self._parts: deque[tuple[list[Message], int]] = deque()
        #: Open messages that were fetched again, each with the first offset it covers: they come before all others.
        self._open: deque[tuple[Message, int]] = deque()
        #: Those that wait for their time, by offset; they count only once they are released.
        self.early: dict[int, tuple[Message, int]] = {}
        #: How many messages it has.
        self.size: int = 0
        #: When (own clock, ms) it had none and the first came, or some were handed out.
        self.came_at: float = inf
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
        self.early.clear()
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

    def put_open(self, message: Message, covers_from: int, *, is_early: bool = False) -> None:
        """Add an open message; it is taken before all that was fetched in order and all later open ones, and by itself.

        is_early: once ``release`` says so.
        """
        if is_early:
            self.early[offset_of(message)] = message, covers_from
            return
        # One that was put back, or waited for its time, may come before others.
        insort(self._open, (message, covers_from), key=lambda each: offset_of(each[0]))
        self.size += 1

    def drop_open(self, first: int, last: int) -> None:
        """Drop the open messages of these offsets."""
        for offset in [each for each in self.early if first <= each <= last]:
            del self.early[offset]
        if self._open:
            kept = [each for each in self._open if not first <= offset_of(each[0]) <= last]
            self.size -= len(self._open) - len(kept)
            self._open = deque(kept)

    def release(self, offsets: Iterable[int]) -> None:
        """Messages that wait for their time may be taken, those of these offsets."""
        for offset in sorted(offsets):
            self.put_open(*self.early.pop(offset))

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
        return ceil(size / self.message_bytes) if self.message_bytes else 0

    def _free(self, count: int) -> None:
        """Free as many messages of the previous batch as new ones came; all of them if none came.

        This way the garbage collector sees no growth and does not run. Freed all at once, they would make room for a
        full batch of new objects, and the collector would scan each one, which took a fifth of all time.
        """
        if self.spent:
            del self.spent[-count if count else 0 :]
