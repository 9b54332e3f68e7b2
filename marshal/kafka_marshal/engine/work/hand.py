"""The run that the threads of one consumer take messages from, one by one: ``poll``, and all ways at most once."""

from __future__ import annotations

from typing import Protocol

from kafka_marshal.engine.work.assignment import Mover, Run
from kafka_marshal.engine.work.delivery import Delivery

__all__ = ["Hand", "Delivers"]

#: Messages that a hand has at most. An interrupt has all of these that have not left given back, so after one it is
#: twice what was handed out since the one before, or the least; it doubles with each hand.
HAND_SIZE = 10_000
LEAST_HAND = 64


class Delivers(Mover, Protocol):
    """A consumer, as its hand and its pulls see it."""

    @property
    def delivery(self) -> Delivery: ...


class Hand:
    """What threads share. They read ``run`` and set ``in_doubt`` at any time; all else is done under the lock."""

    __slots__ = ("in_doubt", "run", "size")

    def __init__(self) -> None:
        #: What threads take messages from; None: nothing.
        self.run: Run | None = None
        #: An exception may have kept a message taken from the run from leaving the library.
        self.in_doubt: bool = False
        #: How many messages the next one is to have.
        self.size: int = HAND_SIZE

    def open_run(self, now: float) -> Run | None:
        """At least once: the run, if threads may take more from it now (T4)."""
        run = self.run
        return run if run is not None and run.has_left and now < run.assignment.lease.hand_out_until else None

    def change(self, run: Run) -> None:
        """From here on threads take from this one."""
        self.run = run
        self.size = min(2 * self.size, HAND_SIZE)

    def settle(self, work: Delivers, is_collecting: bool, in_doubt: bool, now: float) -> None:
        """At least once: before the next run, see to what of the last one may have gone astray.

        is_collecting: the thread that asks has messages of it, which it will hand out with those of the next. in_doubt:
        whether the hand was in doubt, as the thread saw it.
        """
        run = self.run
        if run is not None and not run.has_left:
            in_doubt = in_doubt or not (is_collecting or run.is_settled)
            self.run = None
        if in_doubt:
            self.regather(work, now)

    def regather(self, work: Delivers, now: float) -> None:
        """Something that was taken from a run may not have left the library: it is the next again."""
        self.in_doubt = False
        if work.at_most_once:
            work.delivery.grants.decide()
            return
        if self.run is not None:
            self.size = max(LEAST_HAND, min(2 * self.run.handed_out, HAND_SIZE))
            self.run = None
        for assignment in [x for x in work.assignments.values() if x.tracker.runs]:
            if not work.delivery.recall(assignment):
                self.in_doubt = True  # a thread is about to hand something out, or a traceback still shows it
            work.revocation.try_finish(assignment, now)
