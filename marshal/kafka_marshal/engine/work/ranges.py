"""Handing out ranges of offsets instead of messages: for whoever reads by himself, such as Spark.

Coordination is the consumer engine's, as for messages; only what is handed out differs. What may be handed out of a
partition follows from three things at any moment: what is done, what is in hand, and where its log ends. So nothing
is buffered, and what is given back is simply open again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kafka_marshal.engine.effects import Key
from kafka_marshal.engine.work.assignment import Assignment, Grant, Mover
from kafka_marshal.engine.work.delivery import Delivery
from kafka_marshal.engine.work.run import Run as RunOf

__all__ = ["MAX_LEFT_OUT", "OffsetRange", "RangeDelivery", "RangeRun", "fair_shares"]

#: A range ends before it would leave out more intervals than this: each is a condition that every row is tested for.
MAX_LEFT_OUT = 100


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets first … last (inclusive) of one partition, in hand under one epoch."""

    topic: str
    partition: int
    first: int
    last: int
    #: The fencing token: store it, and last, with what is written (C9).
    epoch: int
    #: Intervals (first, last) inside that are done already and must be left out (P6), ascending.
    done: tuple[tuple[int, int], ...] = ()

    @property
    def count(self) -> int:
        """Offsets to be handled. (Kafka may hold fewer records: compaction, transaction markers.)"""
        return self.last - self.first + 1 - sum(last - first + 1 for first, last in self.done)


class RangeRun(RunOf[Assignment]):
    """A range of one assignment, in hand. It is done, or given back, as a whole."""

    __slots__ = ("left_out",)

    def __init__(
        self, assignment: Assignment, first: int, last: int, left_out: tuple[tuple[int, int], ...], now: float
    ) -> None:
        super().__init__(assignment, [], first, False, now)
        self.last = last
        self.size = 1
        self.left_out: tuple[tuple[int, int], ...] = left_out

    def offsets(self) -> OffsetRange:
        """As the user sees it."""
        return OffsetRange(*self.assignment.key, self.first, self.last, self.assignment.epoch, self.left_out)


def fair_shares(available: Sequence[int], limit: int) -> list[int]:
    """Share out limit records: nobody gets more than there is, nor less than another who could use more.

    What does not come out even goes to those in front; with fewer records than takers, one each.
    """
    shares = [0] * len(available)
    left = limit
    places = sorted(range(min(limit, len(available))), key=lambda place: (available[place], -place))
    for served, place in enumerate(places):
        # The least first, of equals the hindmost: so what is left over by rounding down reaches the front ones.
        shares[place] = min(available[place], left // (len(places) - served))
        left -= shares[place]
    return shares


class RangeDelivery(Delivery):
    """The hand-out side of a consumer of ranges. All methods are called under the shell's lock."""

    def __init__(self, consumer: Mover) -> None:
        super().__init__(consumer)
        #: At most once: what was granted and handed out, and is neither done nor given back; its lease may be over.
        self._granted: set[OffsetRange] = set()

    def open(self, now: float) -> list[Key]:
        """Partitions of which something could be handed out now, if their logs hold it. A user's thread asks."""
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
        """Take ranges of up to max_records in all in hand, shared fairly over the partitions.

        marks: (log start, where to end) of the partitions to take from. Those whose position lies below the log start
        are looked into by the consumer engine (P9). At most once, each range is proposed to the log: see
        ``collect_range``.
        """
        spans = self._spans(marks, now)
        shares = fair_shares([span.count for span in spans], max_records)
        runs = [span.run(share, now) for span, share in zip(spans, shares, strict=True) if share]
        for run in runs:
            self._hand_out(run, now)
        return runs

    def take_if(
        self, marks: Mapping[Key, tuple[int, int]], max_records: int, only_full: bool, now: float
    ) -> list[RangeRun]:
        """Take ranges; only_full: none unless they make max_records."""
        if only_full and self.available(marks, now) < max_records:
            return []
        return self.take(marks, max_records, now)

    def available(self, marks: Mapping[Key, tuple[int, int]], now: float) -> int:
        """How many records ``take`` could hand out, if it may hand out any number of them."""
        return sum(span.count for span in self._spans(marks, now))

    def _spans(self, marks: Mapping[Key, tuple[int, int]], now: float) -> list[Span]:
        """What may be handed out of each partition, in the order of their turns."""
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
            elif (span := Span.open_in(assignment, position, end)).count:
                spans.append(span)
        return spans

    def _hand_out(self, run: RangeRun, now: float) -> None:
        assignment = run.assignment
        assignment.tracker.hand_out(run)
        assignment.origin.is_new = False  # what goes from its log from here on was there for us, and is a gap (P9)
        assignment.buffer.go_on_at(assignment.tracker.open_from())
        self._turns.move_to_end(assignment)
        if self._consumer.at_most_once:
            assignment.grant = Grant(run, run.last, now)
            self._consumer.schedule.look_after(assignment)
            self.grants.send(assignment, now)

    def beyond_end(self, ends: Mapping[Key, int], now: float) -> None:
        """The logs end here; a position beyond its end is looked into (P11)."""
        for key, end in ends.items():
            assignment = self._consumer.assignments.get(key)
            if assignment is not None and assignment.is_open(now) and assignment.tracker.open_from() > end:
                assignment.buffer.go_on_at(assignment.tracker.open_from())
                self._consumer.positions.out_of_range(key, now)

    # At most once.

    @staticmethod
    def is_answered(run: RangeRun) -> bool:
        """Whether the log has answered the proposal of this range, or never will."""
        grant = run.assignment.grant
        return run.assignment.over or grant is None or grant.run is not run or grant.accepted is not None

    def collect_range(self, run: RangeRun, now: float) -> bool:
        """An answered proposal: True hands the range out; False: it was refused, or the lease is over (C13)."""
        assignment = run.assignment
        grant = assignment.grant
        if grant is None or grant.run is not run:
            return False  # given up, and reported then
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
        """A granted range will not reach anybody (C13)."""
        self._granted.discard(run.offsets())
        self.grants.report(run.assignment.key, run.first, run.last)
        self.done_run(run, now)

    # Both.

    def find(self, given: OffsetRange) -> RangeRun | None:
        """The run that was handed out as this range; None: its lease is over, or it is not in hand any more."""
        assignment = self._consumer.assignments.get((given.topic, given.partition))
        if assignment is None or assignment.over or assignment.epoch != given.epoch:
            return None
        run = assignment.tracker.runs.get(given.first)
        return run if isinstance(run, RangeRun) and run.last == given.last else None

    def done_range(self, given: OffsetRange, now: float) -> bool:
        """A range is done. False: its lease is over, or it was done before; that commits nothing and is counted."""
        self.heard(now)
        self._granted.discard(given)
        run = self.find(given)
        if run is None:
            self.ignored_done[given.topic, given.partition] += 1
            return False
        self.done_run(run, now)
        return True

    def give_back_ranges(self, ranges: Iterable[OffsetRange], now: float) -> None:
        """These ranges are in hand no longer."""
        for found in ranges:
            self.give_back_range(found, now)

    def lose(self, granted: Sequence[RangeRun], waiting: Sequence[RangeRun], now: float) -> None:
        """These were granted and will not reach anybody; these others wait for their grants no more (C13)."""
        for run in granted:
            self.never_handed_out(run, now)
        for run in waiting:
            self.grants.give_up(run.assignment, now)

    def give_back_range(self, given: OffsetRange, now: float) -> None:
        """A range is in hand no longer, and not done: it comes again. (At most once it can't: it is reported.)"""
        self.heard(now)
        run = self.find(given)
        if run is None:
            if given in self._granted:  # nobody gets it, though its lease is over
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
        self._consumer.revocation.try_finish(assignment, now)


@dataclass(frozen=True, slots=True)
class Span:
    """Open offsets of a partition from first on, before end, less the intervals that are done."""

    assignment: Assignment
    first: int
    end: int
    done: tuple[tuple[int, int], ...]

    @classmethod
    def open_in(cls, assignment: Assignment, first: int, end: int) -> Span:
        """What lies between first (which is open) and end, the next range in hand, or too many done intervals."""
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
        """Open offsets in it."""
        return self.end - self.first - sum(last - first + 1 for first, last in self.done)

    def run(self, count: int, now: float) -> RangeRun:
        """The range of the first count open offsets; 1 <= count <= self.count."""
        last = self.first + count - 1
        left_out = []
        for gap in self.done:
            if gap[0] > last:
                break
            last += gap[1] - gap[0] + 1
            left_out.append(gap)
        return RangeRun(self.assignment, self.first, last, tuple(left_out), now)
