"""The next step of a thread that wants messages. Only the thread waits, reads, and knows a clock.

A pull is one call for messages by a thread, task or lane. Its driver calls :meth:`Pull.next` under the lock, takes the
returned step without the lock, and calls it again::

    Take        hand this run out
    Fetch       read what is there; if there is nothing, wait for it (or not); then call again
    Wait        wait until messages come, and read them; then call again
    AwaitGrant  wait for the log's answer, reading meanwhile; call ``answered``, then call again
    End         there is nothing for this call

Threads of one consumer share a run and take messages from it: by ``poll``, and in all ways at most once. When memory
runs out, partitions are no longer fetched, so that others continue: what librdkafka had fetched ahead is dropped, and
fetched again once there is room.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import inf
from typing import NamedTuple, Protocol

from kafka_marshal.engine.inputs import given
from kafka_marshal.engine.work.assignment import Grant, Mover, Run, drop_buffered
from kafka_marshal.engine.work.delivery import Delivery, waited_ms
from kafka_marshal.ports import Message
from kafka_marshal.types import Key

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
        if self.run is not None:
            self.size = max(LEAST_HAND, min(2 * self.run.handed_out, HAND_SIZE))
            self.run = None
        for assignment in [x for x in work.assignments.values() if x.tracker.runs]:
            if not work.delivery.recall(assignment):
                self.in_doubt = True  # a thread is about to hand a message out, or a traceback still refers to it
            work.revocation.try_finish(assignment, now)


class GrantedHand(Hand):
    """At most once: messages that may not have left the library come again only where no thread can deliver them."""

    __slots__ = ()

    @given
    def regather(self, work: Delivers, now: float) -> None:
        self.in_doubt = False
        work.delivery.grants.decide()


#: The most messages read, without waiting, after a turn was ended early: other partitions may have some.
READ_BETWEEN_TURNS = 10_000


class Wanted(NamedTuple):
    """A request for messages, and its time."""

    #: The most messages (at least once). At most once, ``batch_size`` applies instead.
    max_messages: int
    #: At least once: for a loop, in which to ask for the next message means that the last one is done.
    iterating: bool = False
    #: Now (s), by the clock of timeouts, which stops while the machine is suspended.
    at: float = 0.0
    #: How many messages and faults the last ``Fetch`` returned; None: the last step was no ``Fetch``.
    came: int | None = None
    #: When the last wait began (s, same clock); None: there was none. If it began past the deadline, it was the last.
    waited: float | None = None


class Take(NamedTuple):
    """Hand this run out: it is in flight now, or granted."""

    run: Run


class Fetch(NamedTuple):
    """Read what is there, without waiting: at most ``room`` messages (0 or less: none)."""

    room: int
    #: If there is nothing, wait until then (s, clock of ``Wanted.at``); None: do not wait.
    until: float | None


class Wait(NamedTuple):
    """Wait until there is something to read, and read it."""

    until: float


class AwaitGrant(NamedTuple):
    """Wait until ``grant.is_answered``."""

    grant: Grant


class PullEnd(NamedTuple):
    """The time is up, or the lease of a collected run ends."""


Step = Take | Fetch | Wait | AwaitGrant | PullEnd


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
        """hand: threads share the run (None: it is handed out as a whole, or to a loop).

        deadline: when to end without a run (s, clock of ``Wanted.at``). fill_s: how long a run may wait until it is
        full (s). collected: runs whose messages the thread has taken and not handed out; the pull ends instead of
        waiting if one of their leases ends.
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
        """Whether its runs are for a hand that threads share."""
        return self._hand is not None

    @given
    def next(self, wanted: Wanted, now: float) -> Step:
        """The next step; now: own clock, ms."""
        if self._is_late(wanted):
            return self._take(wanted, now) or PullEnd()
        hand, delivery = self._hand, self._delivery
        if hand is not None and (run := hand.open_run(now)) is not None:
            return Take(run)  # another thread has got one meanwhile
        if delivery.is_turn_over and wanted.came is None:
            delivery.is_turn_over = False
            return Fetch(READ_BETWEEN_TURNS, None)
        fullest = delivery.fullest(now)
        if fullest and self._fill_until is None:
            self._fill_until = wanted.at + self.fill_s - max(0.0, waited_ms(delivery, now)) / 1000
        elif not fullest and not delivery.is_waiting:
            self._fill_until = None  # the messages are gone; while a lease is only in doubt, they still wait
        if fullest and self._is_enough(fullest, wanted) and (taken := self._take(wanted, now)) is not None:
            return taken
        if self._is_to_end(now):
            return PullEnd()
        filled = self._fill_until if fullest and self._fill_until is not None else inf
        # Read a backlog first: each run that is handed over costs two thread switches.
        return Fetch(wanted.max_messages - fullest, min(self.deadline, filled))

    @given
    def after(self, left: Run, wanted: Wanted, now: float) -> Step:
        """The next step of a thread that has left this run."""
        self._delivery.undo_run(left, now)
        return self.next(wanted, now)

    @given
    def come(self, key: Key, messages: list[Message], mean_bytes: float, wanted: Wanted, now: float) -> Step:
        """Consecutive messages of one partition, of this mean size, came from the reader; the next step."""
        self._delivery.memory.read(len(messages), mean_bytes)
        self._delivery.fetched(key, messages, now)
        return self.next(wanted, now)

    def _is_enough(self, fullest: int, wanted: Wanted) -> bool:
        return (
            fullest >= wanted.max_messages
            or not self.fill_s
            or self._delivery.memory.room(self._delivery.buffered) <= 0
            or wanted.at >= (self._fill_until or 0.0)
        )

    def _take(self, wanted: Wanted, now: float) -> Take | None:
        """The next run, if there is one; threads share it from now on if there is a hand."""
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

    @given
    def room(self, now: float) -> int:
        """How many messages are worth reading while waiting for a grant."""
        return 0

    @given
    def answered(self, grant: Grant, now: float) -> None:
        """The awaited grant was answered, or never will be."""


class GrantedPull(Pull):
    """At most once: the granted run that is being handed out, or the next one that the log grants.

    It takes no further run if the lease of a collected run ends: an admin may then move the position back, and the
    log would grant the collected messages again before they are handed out.
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
        #: A batch was granted: claim the next one before handing it out.
        self._is_ahead = False

    @given
    def next(self, wanted: Wanted, now: float) -> Step:
        step = self._next(wanted, now)
        if self._hand is not None and isinstance(step, Take | PullEnd):
            self._hand.run = step.run if isinstance(step, Take) else None
        return step

    def _next(self, wanted: Wanted, now: float) -> Step:
        if self._is_late(wanted) and not (self._delivery.fullest(now) or self._grants.is_waiting):
            return PullEnd()
        if self._is_ahead and wanted.came != 0:
            return self._claim_ahead(now)
        is_ahead, self._is_ahead = self._is_ahead, False
        if wanted.came == 0 and not is_ahead and (self._settings.claim_ahead or not self._grants.is_handing_out):
            return self._claim(now)
        if (take := self._go_on(now)) is not None:
            return take
        # Read a backlog first, so that full batches are claimed.
        return Fetch(self._missing(now) if self._grants.proposed is None else 0, None)

    def _go_on(self, now: float) -> Take | PullEnd | None:
        """Continue the granted run, if any of it may still be handed out."""
        grants = self._grants
        while (run := grants.granted) is not None or not self._is_to_end(now):
            if run is None:
                grants.take_up(now)
                if grants.granted is None:
                    return None
            elif grants.has_granted() and now < run.assignment.lease.proven_until:  # also while it is released (T4, T5)
                return Take(run)
            else:
                grants.finish_granted(now)
                self._delivery.memory.spent = list(run.messages)
        return PullEnd()

    def _claim(self, now: float) -> AwaitGrant | Wait:
        """Claim the next batch, unless one is claimed. Returns what to wait for."""
        waiting = self._grants.propose(now)
        if waiting is not None and waiting.grant is not None:
            return AwaitGrant(waiting.grant)
        return Wait(self.deadline)

    def _claim_ahead(self, now: float) -> Fetch:
        """Claim the batch after the one that is about to be handed out, if a full one is buffered (C13)."""
        room = self._missing(now) if self._grants.is_handing_out else 0
        if room <= 0 and self._grants.is_handing_out:
            self._grants.propose(now)
        return Fetch(room, None)

    def _missing(self, now: float) -> int:
        """How many messages are missing for a full batch of one partition."""
        return self._settings.batch_size - self._delivery.fullest(now)

    @given
    def room(self, now: float) -> int:
        """At most the next batch: reading takes the interpreter from the thread that reads the answer."""
        return self._missing(now)

    @given
    def answered(self, grant: Grant, now: float) -> None:
        """Collect the grant, unless another thread did: then the next claim, not answered yet, is under way."""
        if grant.run.assignment.grant is grant:
            self._grants.collect(grant.run.assignment, now)
        self._is_ahead = self._settings.claim_ahead


@given
def hold_up(
    consumer: Delivers, fetched: Collection[Key], held_up: Collection[Key], room: int, now: float
) -> dict[Key, int | None]:
    """Partitions to change when ``room`` more messages may be fetched: the offset to fetch from; None: stop."""
    assignments, delivery = consumer.assignments, consumer.delivery
    if room <= 0:
        full = [key for key in fetched if (x := assignments.get(key)) is not None and x.buffer.size]
        if full and delivery.is_full:
            consumer.warn(
                f"max_bytes_in_flight ({consumer.settings.max_bytes_in_flight} bytes) is reached: nothing more is "
                "handed out of partitions of which messages are in hand, until some of those are done"
            )
        _give_up(consumer, full)
        return dict.fromkeys(full)
    ready = [
        x
        for key in held_up
        if (x := assignments.get(key)) is not None
        and (not x.buffer.size or room >= delivery.memory.half / 2)
        and not delivery.in_lanes.holds_up(x)
    ]
    for assignment in ready:
        assignment.buffer.is_given_up = False
    return {x.key: x.fetch_from for x in ready}


@given
def hold_up_stuck(consumer: Delivers, fetched: Collection[Key], now: float) -> dict[Key, int | None]:
    """Stop fetching partitions that wait for messages in lanes, so that a read can wait for the others."""
    full = [
        key
        for key in fetched
        if (x := consumer.assignments.get(key)) is not None and x.buffer.size and consumer.delivery.in_lanes.holds_up(x)
    ]
    _give_up(consumer, full)
    return dict.fromkeys(full)


#: What is fetched ahead of a partition that is held up by what waits in its lanes.
ENOUGH_AHEAD = 2_000


@given
def hold_up_ahead(consumer: Delivers, fetched: Collection[Key], now: float) -> dict[Key, int | None]:
    """Stop fetching partitions of which enough waits in lanes and here, so that others have the memory."""
    assignments, in_lanes = consumer.assignments, consumer.delivery.in_lanes
    found = [(key, assignments[key]) for key in fetched if key in assignments]
    return dict.fromkeys(key for key, x in found if x.buffer.size >= ENOUGH_AHEAD and in_lanes.holds_up(x))


def _give_up(consumer: Delivers, keys: Iterable[Key]) -> None:
    """Drop the buffers of partitions that wait for messages in lanes: they are fetched again in their turn."""
    for key in keys:
        assignment = consumer.assignments[key]
        if consumer.delivery.in_lanes.holds_up(assignment):
            drop_buffered(assignment)
