"""What of one consumer is spread over lanes (:mod:`.lanes`), beside what its threads have in hand."""

from __future__ import annotations

from bisect import bisect_right

from kafka_marshal.engine.settings import MAX_IN_HAND_MESSAGES
from kafka_marshal.engine.work.assignment import Assignment, Run
from kafka_marshal.engine.work.lanes import HeldBack, Lane, Lanes
from kafka_marshal.engine.work.tracker import offset_of
from kafka_marshal.ports import Message

__all__ = ["InLanes"]


class InLanes:
    """All methods are called under the shell's lock."""

    def __init__(self) -> None:
        #: Who waits for whom; None: nobody has asked for that yet.
        self.lanes: Lanes | None = None
        #: Partitions whose progress waits for one message, as of the last look. Replaced, never changed.
        self.held_back: tuple[HeldBack, ...] = ()

    @property
    def is_active(self) -> bool:
        """Whether messages are spread over lanes at present."""
        return self.lanes is not None and not self.lanes.is_ended

    def spread(self, lanes: Lanes, run: Run) -> list[Lane]:
        """A run that was handed out goes to lanes; those that have become ready."""
        return lanes.put(run.assignment, run.into_lanes())

    def recall(self, assignment: Assignment) -> list[tuple[list[Message], int]]:
        """What waits in lanes is not in hand any more: (consecutive messages, first offset they cover)."""
        found: list[tuple[list[Message], int]] = []
        tracker = assignment.tracker
        waiting = [] if self.lanes is None else sorted(self.lanes.recall(assignment.key), key=offset_of)
        place = 0
        while place < len(waiting):
            run = tracker.run_at(offset_of(waiting[place]))
            end = place + 1 if run is None else max(place + 1, bisect_right(waiting, run.last, key=offset_of))
            if run is not None:
                found += tracker.split(run, waiting[place:end])
            place = end
        return found

    def take_returned(self) -> bool:
        """Whether a try has failed since this was asked last."""
        if self.lanes is None or not self.lanes.has_returned:
            return False
        self.lanes.has_returned = False
        return True

    def oldest(self, assignment: Assignment, now: float) -> float | None:
        """Since when (ms, own clock) somebody has had a message of this partition; None: nobody has."""
        if self.lanes is not None and self.is_active:
            return self.lanes.oldest(assignment.key)
        return assignment.tracker.oldest_in_hand(now)

    def is_full(self, assignment: Assignment, room: int) -> bool:
        """Whether a partition has in hand what it may: the limit, or as much as there is room for all others.

        So one that waits for a stuck message takes half of the memory at most, two a third each (the dynamic threshold
        of Choudhury and Hahne, 1998): the others go on.
        """
        in_hand = assignment.tracker.in_hand
        return in_hand >= MAX_IN_HAND_MESSAGES or (in_hand > 0 and in_hand >= room)
