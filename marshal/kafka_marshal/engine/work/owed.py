"""Partitions that were taken away while the program had messages of them, and what waits for those.

A batch that a loop skips without ``done()`` looks like one that a thread still works on: the loop's variable refers to
it until the next batch comes, which may be never. So it is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kafka_marshal.engine.effects import Warn
from kafka_marshal.engine.work.assignment import Assignment, Mover, Stage
from kafka_marshal.engine.work.behind import HeldBack, lasting
from kafka_marshal.engine.work.in_lanes import InLanes
from kafka_marshal.engine.work.run import first_in_hand
from kafka_marshal.engine.work.stuck import SAID_EVERY_MS
from kafka_marshal.types import Key

#: What to do, for people.
HANDLER = "Find out what its handler waits for, or restart the process"
THREAD = "Find out what the thread that has it waits for: its next call ends this"
LOOP = (
    "Call done(), which commits nothing any more, or drop the batch: the variable of a loop, as in `for batch in "
    "consumer.batches():`, keeps one that was skipped until the next one comes. If a handler hangs, find out what it "
    "waits for, or restart the process"
)

#: Reported if messages have not come back after this long (ms). Most handlers that work at the moment of a loss return
#: before; ``kafka-marshal check`` calls a partition stuck after as long.
OWED_AFTER_MS = 10_000.0


class _Waits(NamedTuple):
    """A partition that was taken away, and waits for messages of before."""

    key: Key
    #: When it was taken away, or when that was first seen (own clock, ms).
    since: float
    #: The first of the messages, if that is known, or where the partition is to continue.
    offset: int
    size: int
    #: What the program has of it, and what to do, for people.
    what: str
    remedy: str


class Owed:
    """The messages of one consumer that were taken away and have not come back (C18, G20, X17)."""

    def __init__(self, consumer: Mover, in_lanes: InLanes, heard_at: Callable[[], float]) -> None:
        """heard_at: when a user's thread last called (own clock, ms)."""
        self._consumer = consumer
        self._in_lanes = in_lanes
        self._heard_at = heard_at
        #: Assignments that were taken away with messages in flight, and when. Replaced, or added to.
        self.found: list[tuple[Assignment, float]] = []
        #: Since when a piece to be restored waits for a handler that was left behind (``handler_timeout``). Replaced.
        self._left_behind: dict[Key, float] = {}
        #: What was reported: since when, and when last.
        self._reported: dict[Key, tuple[float, float]] = {}

    def __bool__(self) -> bool:
        return bool(self.found)

    def __iter__(self) -> Iterator[Assignment]:
        """The assignments."""
        return iter([assignment for assignment, _ in self.found])

    def has_returned(self) -> bool:
        """Whether no message that was taken away is in flight; if that can't be known, whether a thread has called."""
        self.found = [(assignment, since) for assignment, since in self.found if self._is_out(assignment, since)]
        return not self.found

    def came_back(self, key: Key, offset: int) -> None:
        """A message that was taken away is not to be handled any more: its last try has failed."""
        for assignment in self:
            if assignment.key == key:
                assignment.tracker.set_aside(offset)

    def _is_out(self, assignment: Assignment, since: float) -> bool:
        is_known = not self._consumer.at_most_once and not self._consumer.settings.ranges
        return bool(assignment.tracker.runs) if is_known else self._heard_at() <= since

    def look(self, now: float) -> None:
        """Report what is overdue, and when nothing waits for it any more: every heartbeat interval."""
        waiting = {key: now for key in self._consumer.assignments if self._is_to_be_restored(key)}
        waiting = {key: now for key in waiting if self._in_lanes.is_with_handler(key)}
        self._left_behind = waiting | {key: at for key, at in self._left_behind.items() if key in waiting}
        overdue = {each.key: each for each in self._overdue(now)}
        for key in [key for key in self._reported if key not in overdue]:
            waited = lasting(now - self._reported.pop(key)[0])
            self._say(key, f"nothing waits any more for what was taken away, after {waited}")
        for key, each in overdue.items():
            if key not in self._reported or now >= self._reported[key][1] + SAID_EVERY_MS:
                self._reported[key] = each.since, now
                self._say(
                    key,
                    f"was taken away {lasting(now - each.since)} ago, and the program still has {each.what}. Before "
                    f"that has come back, {self._waits}. Nothing is lost: it is delivered again, here or elsewhere. "
                    f"{each.remedy}",
                )

    def _say(self, key: Key, text: str) -> None:
        self._consumer.outbox.add(Warn(f"{key[0]} [{key[1]}]: {text}"))

    def held_back(self, now: float) -> list[HeldBack]:
        """What is overdue, for display (any thread; no lock)."""
        why = "what the program still has of before it was taken away"
        return [HeldBack(*x.key, x.offset, None, now - x.since, x.size, why=why) for x in self._overdue(now)]

    def _overdue(self, now: float) -> Iterator[_Waits]:
        is_restored = self._consumer.source.takes_checkpoints and not self._consumer.source.has_left
        for assignment, since in list(self.found):
            if now < since + OWED_AFTER_MS or not self._is_out(assignment, since):
                continue
            if not is_restored or self._is_to_be_restored(assignment.key):
                yield self._of(assignment, since)
        for key, since in self._left_behind.items():
            current = self._consumer.assignments.get(key)
            is_known = any(each.key == key for each in self)
            if current is not None and now >= since + OWED_AFTER_MS and not is_known:
                yield _Waits(key, since, current.buffer.fetch_next, 1, "a message of it", HANDLER)

    def _is_to_be_restored(self, key: Key) -> bool:
        current = self._consumer.assignments.get(key)
        return current is not None and current.stage is Stage.RESTORING

    def _of(self, assignment: Assignment, since: float) -> _Waits:
        first, count = first_in_hand(assignment.tracker.runs), assignment.tracker.in_hand
        offset = assignment.buffer.fetch_next if first is None else first[0]
        what = "messages of it" if first is None else f"{count:,} message(s) of it, from offset {offset} on"
        if self._consumer.at_most_once or self._consumer.settings.ranges:
            return _Waits(assignment.key, since, offset, count, what, THREAD)
        is_in_lanes = any(run.in_lanes for run in list(assignment.tracker.runs.values()))
        return _Waits(assignment.key, since, offset, count, what, HANDLER if is_in_lanes else LOOP)

    @property
    def _waits(self) -> str:
        source = self._consumer.source
        if self._consumer.settings.group is None:
            return "this consumer claims nothing"
        if source.takes_checkpoints and not source.has_left:
            return "the state of this piece is not restored here, and nothing of it is delivered"
        return "this member takes up nothing, and does not join its group again"
