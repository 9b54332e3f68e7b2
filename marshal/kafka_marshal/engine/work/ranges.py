"""Hands out ranges of offsets instead of messages, to callers that do their own reading, such as Spark.

The consumer engine coordinates as for messages. The offsets of a partition that may be handed out follow from three
things: what is done, what is in flight, and where the log ends. So nothing is buffered, and offsets given back are
open again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kafka_marshal.engine.inputs import given
from kafka_marshal.engine.work.assignment import Assignment, Grant, Mover
from kafka_marshal.engine.work.delivery import Delivery
from kafka_marshal.engine.work.run import Run as RunOf
from kafka_marshal.types import Key

#: The most intervals that a range leaves out; it ends before the next one. Each is a condition checked for every row.
MAX_LEFT_OUT = 100


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets first … last (inclusive) of one partition, in flight under one epoch."""

    topic: str
    partition: int
    first: int
    last: int
    #: The fencing token: store it, and last, with what is written.
    epoch: int
    #: Intervals (first, last) inside the range that are done already and must be left out, ascending.
    done: tuple[tuple[int, int], ...] = ()

    @property
    def count(self) -> int:
        """How many offsets to handle. (Kafka may hold fewer records: compaction, transaction markers.)"""
        return self.last - self.first + 1 - sum(last - first + 1 for first, last in self.done)


class RangeRun(RunOf[Assignment]):
    """A range of one assignment that is in flight. It is done, or given back, as a whole."""

    __slots__ = ("left_out",)

    def __init__(
        self, assignment: Assignment, first: int, last: int, left_out: tuple[tuple[int, int], ...], now: float
    ) -> None:
        super().__init__(assignment, [], first, False, now)
        self.last = last
        self.size = 1
        self.left_out: tuple[tuple[int, int], ...] = left_out

    def offsets(self) -> OffsetRange:
        """The range, as the user sees it."""
        return OffsetRange(*self.assignment.key, self.first, self.last, self.assignment.epoch, self.left_out)


def fair_shares(available: Sequence[int], limit: int) -> list[int]:
    """Divide limit records by max-min fairness: small demands in full, the rest in equal shares.

    The remainder goes to the first ones; with fewer records than takers, the first ones get one each.
    """
    shares = [0] * len(available)
    left = limit
    places = sorted(range(min(limit, len(available))), key=lambda place: (available[place], -place))
    for served, place in enumerate(places):
        # Smallest first, of equals the last one: so the remainder of rounding down reaches the first partitions.
        shares[place] = min(available[place], left // (len(places) - served))
        left -= shares[place]
    return shares


class RangeDelivery(Delivery):
    """The hand-out side of a consumer of ranges. All methods are called under the shell's lock."""

    def __init__(self, consumer: Mover) -> None:
        super().__init__(consumer)
        #: At most once: ranges granted and handed out, neither done nor given back; their leases may be over.
        self._granted: set[OffsetRange] = set()

    @given
    def open(self, now: float) -> list[Key]:
        """Partitions that can hand out offsets now, if their logs hold any. Called by a user's thread."""
        self.heard(now)
        return [x.key for x in self._open_turns(now)]

    def _open_turns(self, now: float) -> list[Assignment]:
        """The open assignments, in the order of their turns."""
        present = self._consumer.assignments
        for gone in [x for x in self._turns if present.get(x.key) is not x]:
            del self._turns[gone]
        self._turns.update(dict.fromkeys(present.values()))
        return [x for x in self._turns if x.is_open(now) and x.grant is None]

    def take(self, marks: Mapping[Key, tuple[int, int]], max_records: int, now: float) -> list[RangeRun]:
        """Take ranges of at most max_records in all, in flight from now on, shared fairly over the partitions.

        marks: (log start, end, exclusive) of the partitions to take from. If a position lies below the log start, the
        consumer engine locates it. At most once, each range is proposed to the log: see ``collect_range``.
        """
        spans = self._spans(marks, now)
        shares = fair_shares([span.count for span in spans], max_records)
        runs = [span.run(share, now) for span, share in zip(spans, shares, strict=True) if share]
        for run in runs:
            self._hand_out(run, now)
        return runs

    @given
    def take_if(
        self, marks: Mapping[Key, tuple[int, int]], max_records: int, only_full: bool, now: float
    ) -> list[RangeRun]:
        """Take ranges; only_full: none unless max_records are available."""
        if only_full and self.available(marks, now) < max_records:
            return []
        return self.take(marks, max_records, now)

    def available(self, marks: Mapping[Key, tuple[int, int]], now: float) -> int:
        """How many records ``take`` could hand out without a limit."""
        return sum(span.count for span in self._spans(marks, now))

    def _spans(self, marks: Mapping[Key, tuple[int, int]], now: float) -> list[OpenSpan]:
        """The span that each partition can hand out, in the order of their turns."""
        self.heard(now)
        spans = []
        for assignment in self._open_turns(now):
            if assignment.key not in marks:
                continue
            low, end = marks[assignment.key]
            position = assignment.tracker.open_from()
            if position < low:
                assignment.buffer.go_on_at(position)
                self._consumer.positions.out_of_range(assignment.key, now)
            elif (span := OpenSpan.open_in(assignment, position, end)).count:
                spans.append(span)
        return spans

    def _hand_out(self, run: RangeRun, now: float) -> None:
        assignment = run.assignment
        assignment.tracker.hand_out(run)
        self._consumer.positions.marks.come(assignment)
        assignment.origin.is_new = False  # what its log loses from now on is a gap: it was there for us (P9)
        assignment.buffer.go_on_at(assignment.tracker.open_from())
        self._turns.move_to_end(assignment)
        if self._consumer.at_most_once:
            assignment.grant = Grant(run, run.last, now)
            self._consumer.schedule.look_after(assignment)
            self.grants.send(assignment, now)

    @given
    def beyond_end(self, ends: Mapping[Key, int], now: float) -> None:
        """The logs end at these offsets: a position beyond its end is checked with the leader."""
        for key, end in ends.items():
            assignment = self._consumer.assignments.get(key)
            if assignment is not None and assignment.is_open(now) and assignment.tracker.open_from() > end:
                assignment.buffer.go_on_at(assignment.tracker.open_from())
                self._consumer.positions.out_of_range(key, now)

    # At most once.

    @staticmethod
    def is_answered(run: RangeRun) -> bool:
        """Whether the log has answered the proposal of this range, or the answer no longer matters."""
        grant = run.assignment.grant
        return run.assignment.over or grant is None or grant.run is not run or grant.accepted is not None

    @given
    def collect_range(self, run: RangeRun, now: float) -> bool:
        """Collect the answer. True: granted, hand the range out; False: it was refused, or the lease is over."""
        assignment = run.assignment
        grant = assignment.grant
        if grant is None or grant.run is not run:
            return False  # it was given up, and reported when that happened
        if grant.accepted:
            assignment.grant = None
            self._granted.add(run.offsets())
            return True
        assignment.grant = None
        assignment.tracker.requeue(run)
        self.grants.remember(assignment, grant)
        stable = self._consumer.known_stable(assignment.key)
        if stable > assignment.tracker.done.stable:
            assignment.tracker.done.through(stable)
        self._settle(assignment, now)
        return False

    def never_handed_out(self, run: RangeRun, now: float) -> None:
        """Report a granted range as lost: it will never be handed out."""
        self._granted.discard(run.offsets())
        self.grants.report(run.assignment.key, run.first, run.last)
        self.done_run(run, now)

    # Both.

    def find(self, given: OffsetRange) -> RangeRun | None:
        """The run that was handed out as this range; None: its lease is over, or it is no longer in flight."""
        assignment = self._consumer.assignments.get((given.topic, given.partition))
        if assignment is None or assignment.over or assignment.epoch != given.epoch:
            return None
        run = assignment.tracker.runs.get(given.first)
        return run if isinstance(run, RangeRun) and run.last == given.last else None

    def done_range(self, given: OffsetRange, now: float) -> bool:
        """A range is done. False: its lease is over, or it was done before; nothing is committed, but it is counted."""
        self.heard(now)
        self._granted.discard(given)
        run = self.find(given)
        if run is None:
            self.ignored_done[given.topic, given.partition] += 1
            return False
        self.done_run(run, now)
        return True

    @given
    def give_back_ranges(self, ranges: Iterable[OffsetRange], now: float) -> None:
        """Give back these ranges, not done; see ``give_back_range``."""
        for found in ranges:
            self.give_back_range(found, now)

    @given
    def lose(self, granted: Sequence[RangeRun], waiting: Sequence[RangeRun], now: float) -> None:
        """Report the granted ranges as lost, and give up those that still wait for their grants."""
        for run in granted:
            self.never_handed_out(run, now)
        for run in waiting:
            self.grants.give_up(run.assignment, now)

    def give_back_range(self, given: OffsetRange, now: float) -> None:
        """Give back a range, not done: it comes again. (At most once it can't: it is reported as lost.)"""
        self.heard(now)
        run = self.find(given)
        if run is None:
            if given in self._granted:  # its lease is over, but it must still be reported as lost
                self._granted.discard(given)
                self.grants.report((given.topic, given.partition), given.first, given.last)
            return
        if self._consumer.at_most_once:
            self.never_handed_out(run, now)
            return
        run.assignment.tracker.requeue(run)
        self._settle(run.assignment, now)

    def _settle(self, assignment: Assignment, now: float) -> None:
        assignment.buffer.go_on_at(assignment.tracker.open_from())
        self._came_back(assignment, now)


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """The open offsets of a partition: first up to end (exclusive), without the intervals that are done."""

    assignment: Assignment
    first: int
    end: int
    done: tuple[tuple[int, int], ...]

    @classmethod
    def open_in(cls, assignment: Assignment, first: int, end: int) -> OpenSpan:
        """The span from first (open) up to end, the next range in flight, or MAX_LEFT_OUT done intervals."""
        in_hand = assignment.tracker.next_in_hand(first)
        if in_hand is not None:
            end = min(end, in_hand)
        done = assignment.tracker.done.intervals
        place = bisect_left(done.lasts, first)
        stop = bisect_right(done.firsts, end - 1)
        if stop - place > MAX_LEFT_OUT:
            stop = place + MAX_LEFT_OUT
            end = done.firsts[stop]
        inside = tuple((done.firsts[i], min(done.lasts[i], end - 1)) for i in range(place, stop))
        return cls(assignment, first, max(first, end), inside)

    @property
    def count(self) -> int:
        """How many offsets are open."""
        return self.end - self.first - sum(last - first + 1 for first, last in self.done)

    def run(self, count: int, now: float) -> RangeRun:
        """The range of the first ``count`` open offsets; 1 <= count <= self.count."""
        last = self.first + count - 1
        left_out = []
        for gap in self.done:
            if gap[0] > last:
                break
            last += gap[1] - gap[0] + 1
            left_out.append(gap)
        return RangeRun(self.assignment, self.first, last, tuple(left_out), now)
