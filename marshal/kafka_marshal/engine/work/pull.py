"""What a thread that wants messages is to do next, as one step at a time: it alone waits, reads, and knows a clock.

A pull is the call for messages of one thread, task or lane. Its driver asks :meth:`Pull.next` under the lock, does what
that says without it, and asks again::

    Take        hand this run out
    Fetch       read what is there; where that is nothing, wait for it (or not), then ask again
    Wait        read, waiting for something to come, then ask again
    AwaitGrant  wait for the log's answer (C13), reading meanwhile; tell ``answered``, then ask again
    End         there is nothing for this call
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from kafka_marshal.engine.work.assignment import Grant, Run
from kafka_marshal.engine.work.hand import Delivers, Hand

__all__ = ["AwaitGrant", "End", "Fetch", "GrantedPull", "Pull", "Step", "Take", "Wait", "Wanted"]


#: Messages that are read, if they are there, when a turn was ended early: of other partitions, too.
READ_BETWEEN_TURNS = 10_000


class Wanted(NamedTuple):
    """What is asked for, and when."""

    #: At least once; at most once, ``batch_size`` says it.
    max_messages: int
    #: At least once: by a loop, which has done a message when it asks for the next one.
    iterating: bool = False
    #: By the clock that timeouts are counted by (s), which stands still while the machine is suspended.
    at: float = 0.0
    #: How many messages and faults the ``Fetch`` before has brought; None: there was none.
    came: int | None = None
    #: When the wait before has begun (s, same clock); None: there was none. With the time up, it was the last.
    waited: float | None = None


class Take(NamedTuple):
    """Hand this run out: in hand from here on, or granted."""

    run: Run


class Fetch(NamedTuple):
    """Read what is there, without waiting, for so many messages at most (0 or less: none)."""

    room: int
    #: Where nothing is there, wait for it until then (s, clock of ``Wanted.at``); None: not at all.
    until: float | None


class Wait(NamedTuple):
    """Wait until something is there to be read, and read it."""

    until: float


class AwaitGrant(NamedTuple):
    """Wait until ``grant.is_answered``."""

    grant: Grant


class End(NamedTuple):
    """The time is up, or a lease that was collected from ends."""


Step = Take | Fetch | Wait | AwaitGrant | End


class Pull:
    """At least once. All methods are called under the shell's lock."""

    def __init__(
        self,
        work: Delivers,
        hand: Hand | None = None,
        *,
        deadline: float = inf,
        fill_s: float = 0.0,
        collected: Sequence[Run] = (),
    ) -> None:
        """hand: the run is shared by threads (None: it is handed out as a whole, or to a loop).

        deadline: when to end without a run (s, clock of ``Wanted.at``). fill_s: so long a run may wait until it is
        full. collected: runs whose messages the thread has taken and not handed out; it waits for no more while a lease
        of theirs ends.
        """
        self.work: Delivers = work
        self._delivery = work.delivery
        self._hand = hand
        self.deadline: float = deadline
        self.collected: Sequence[Run] = collected
        self.fill_s: float = fill_s
        self._fill_until: float | None = None

    @property
    def is_shared(self) -> bool:
        """Whether its runs are for the hand, which threads share."""
        return self._hand is not None

    def next(self, wanted: Wanted, now: float) -> Step:
        """The next step; now: own clock, ms."""
        if self._is_late(wanted):
            return self._take(wanted, now) or End()
        hand, delivery = self._hand, self._delivery
        if hand is not None and (run := hand.open_run(now)) is not None:
            return Take(run)  # another thread has got one meanwhile
        if delivery.is_turn_over and wanted.came is None:
            delivery.is_turn_over = False
            return Fetch(READ_BETWEEN_TURNS, None)
        fullest = delivery.fullest(now)
        if fullest and self._fill_until is None:
            self._fill_until = wanted.at + self.fill_s
        elif not fullest and not delivery.is_waiting:
            self._fill_until = None  # what was there is not any more. (While a lease is in doubt, it waits on.)
        if fullest and self._is_enough(fullest, wanted) and (taken := self._take(wanted, now)) is not None:
            return taken
        if self._is_to_end(now):
            return End()
        filled = self._fill_until if fullest and self._fill_until is not None else inf
        # Where a backlog is there, it is read first: each run that is handed over costs two turns of threads.
        return Fetch(wanted.max_messages - fullest, min(self.deadline, filled))

    def _is_enough(self, fullest: int, wanted: Wanted) -> bool:
        return (
            fullest >= wanted.max_messages
            or not self.fill_s
            or self._delivery.memory.room(self._delivery.buffered) <= 0
            or wanted.at >= (self._fill_until or 0.0)
        )

    def _take(self, wanted: Wanted, now: float) -> Take | None:
        """The next run, if there is one; a shared one is the hand from here on."""
        hand, is_shared = self._hand, self._hand is not None
        if hand is not None and hand.run is not None and hand.run.has_left:
            hand.regather(self.work, now)
        run = self._delivery.next_run(wanted.max_messages, wanted.iterating, now, shared=is_shared)
        if run is None:
            return None
        if hand is not None:
            hand.change(run)
        return Take(run)

    def _is_late(self, wanted: Wanted) -> bool:
        return wanted.waited is not None and wanted.waited >= self.deadline

    def _is_to_end(self, now: float) -> bool:
        return any(run.assignment.lease.is_ending(now) for run in self.collected)

    def room(self, now: float) -> int:
        """How many messages are worth reading while a grant is waited for."""
        return 0

    def answered(self, grant: Grant, now: float) -> None:
        """What was waited for has come, or never will."""


class GrantedPull(Pull):
    """At most once: the run being handed out, or the next one, granted by the log (C13).

    No further one while a lease of those collected ends: an admin may move the position back meanwhile, and what waits
    here would be granted anew before it is handed out.
    """

    def __init__(
        self,
        work: Delivers,
        hand: Hand | None = None,
        *,
        deadline: float = inf,
        collected: Sequence[Run] = (),
    ) -> None:
        super().__init__(work, hand, deadline=deadline, collected=collected)
        self._settings = work.settings
        self._grants = self._delivery.grants
        #: A batch was claimed: the one after it is to be claimed before it is handed out.
        self._is_ahead = False

    def next(self, wanted: Wanted, now: float) -> Step:
        step = self._next(wanted, now)
        if self._hand is not None and isinstance(step, Take | End):
            self._hand.run = step.run if isinstance(step, Take) else None
        return step

    def _next(self, wanted: Wanted, now: float) -> Step:
        if self._is_late(wanted) and not (self._delivery.fullest(now) or self._grants.is_waiting):
            return End()
        if self._is_ahead and wanted.came != 0:
            return self._claim_ahead(now)
        is_ahead, self._is_ahead = self._is_ahead, False
        if wanted.came == 0 and not is_ahead and (self._settings.claim_ahead or not self._grants.is_handing_out):
            return self._claim(now)
        if (take := self._go_on(now)) is not None:
            return take
        # A backlog is read first: full batches are claimed.
        return Fetch(self._missing(now) if self._grants.proposed is None else 0, None)

    def _go_on(self, now: float) -> Take | End | None:
        """With what is granted, if anything of it may be handed out still."""
        grants = self._grants
        while (run := grants.granted) is not None or not self._is_to_end(now):
            if run is None:
                grants.take_up(now)
                if grants.granted is None:
                    return None
            elif grants.has_granted() and now < run.assignment.lease.proven_until:  # also while it is let go (T4, T5)
                return Take(run)
            else:
                grants.finish_granted(now)
                self._delivery.memory.spent = list(run.messages)
        return End()

    def _claim(self, now: float) -> AwaitGrant | Wait:
        """Claim the next batch, unless one is claimed; what there is to wait for."""
        waiting = self._grants.propose(now)
        if waiting is not None and waiting.grant is not None:
            return AwaitGrant(waiting.grant)
        return Wait(self.deadline)

    def _claim_ahead(self, now: float) -> Fetch:
        """Claim the batch after the one that is about to be handed out, if a full one is there to be had (C13)."""
        room = self._missing(now) if self._grants.is_handing_out else 0
        if room <= 0 and self._grants.is_handing_out:
            self._grants.propose(now)
        return Fetch(room, None)

    def _missing(self, now: float) -> int:
        """How many messages a full batch of one partition lacks."""
        return self._settings.batch_size - self._delivery.fullest(now)

    def room(self, now: float) -> int:
        """No more than the next batch: reading keeps the interpreter from the thread that reads the answer."""
        return self._missing(now)

    def answered(self, grant: Grant, now: float) -> None:
        """Another thread may be faster: then what is under way is the claim after this one, not answered yet."""
        if grant.run.assignment.grant is grant:
            self._grants.collect(grant.run.assignment, now)
        self._is_ahead = self._settings.claim_ahead
