"""The run that threads of one consumer share and take messages from: by ``poll``, and in all ways at most once."""

from __future__ import annotations

from typing import Protocol

from kafka_marshal.engine.inputs import given
from kafka_marshal.engine.work.assignment import Mover, Run
from kafka_marshal.engine.work.delivery import Delivery

#: The most messages of a hand. An interrupt puts back all messages that have not left: the next hand is then smaller,
#: twice what was handed out of the last one, at least LEAST_HAND. The size doubles with each hand.
HAND_SIZE = 10_000
LEAST_HAND = 64


class Delivers(Mover, Protocol):
    """A consumer, as its hand and its pulls see it."""

    @property
    def delivery(self) -> Delivery: ...


class Hand:
    """The run that threads share. They read ``run`` and set ``in_doubt`` at any time; the rest needs the lock."""

    __slots__ = ("in_doubt", "run", "size")

    def __init__(self) -> None:
        #: The run that threads take messages from; None: there is none.
        self.run: Run | None = None
        #: An exception may have kept a message that was taken from the run in the library.
        self.in_doubt: bool = False
        #: The most messages that the next run may have.
        self.size: int = HAND_SIZE

    def open_run(self, now: float) -> Run | None:
        """At least once: the run, if threads may take more messages from it now."""
        run = self.run
        return run if run is not None and run.has_left and now < run.assignment.lease.hand_out_until else None

    def change(self, run: Run) -> None:
        """Let threads take messages from this run from now on."""
        self.run = run
        self.size = min(2 * self.size, HAND_SIZE)

    @given
    def settle(self, work: Delivers, is_collecting: bool, in_doubt: bool, now: float) -> None:
        """At least once: before the next run, take back messages of the last one that may be lost in the library.

        is_collecting: the calling thread has messages of it, to hand out with those of the next run. in_doubt: whether
        the hand was in doubt when the thread checked.
        """
        run = self.run
        if run is not None and not run.has_left:
            work.delivery.in_lanes.loops.ended(run, now)
            in_doubt = in_doubt or not (is_collecting or run.is_settled)
            self.run = None
        if in_doubt:
            self.regather(work, now)

    @given
    def regather(self, work: Delivers, now: float) -> None:
        """Take back messages that threads took and that may not have left the library; they come next."""
        self.in_doubt = False
        if work.at_most_once:
            work.delivery.grants.decide()
            return
        if self.run is not None:
            self.size = max(LEAST_HAND, min(2 * self.run.handed_out, HAND_SIZE))
            self.run = None
        for assignment in [x for x in work.assignments.values() if x.tracker.runs]:
            if not work.delivery.recall(assignment):
                self.in_doubt = True  # a thread is about to hand a message out, or a traceback still refers to it
            work.revocation.try_finish(assignment, now)
