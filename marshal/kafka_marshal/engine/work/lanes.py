"""Who waits for whom where many handlers work on one consumer's messages: each key is a lane of its own.

A lane has the messages of one key of one partition, in offset order; its first message is waiting, or with a handler.
The next one begins when that has ended, so order is kept across retries; and no lane waits for another one. What is
handed in here is in hand (:mod:`.tracker`) until it is done or recalled.

One run at a time owns the lanes. A handler that an earlier run has left behind may return during a later one: what
follows in its lane is the later run's.

A partition that ends gives back what waits. What a handler has still is kept here: should the partition come back to
this member, messages of the same key wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from heapq import heappop, heappush
from types import TracebackType
from typing import Literal, NamedTuple, Protocol

from kafka_marshal.engine.effects import Key
from kafka_marshal.engine.work.assignment import Assignment, Stage
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.ports import Message

__all__ = ["Handlers", "HeldBack", "Lane", "Lanes", "Order", "Owner"]

#: Of which messages one must have ended before the next begins: of those with one key, of a partition, or of none.
Order = Literal["key", "partition", "none"]


class Lock(Protocol):
    """What guards lanes."""

    def __enter__(self) -> object: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None, /
    ) -> object: ...


class Owner(Protocol):
    """A run, as its lanes see it."""

    #: It begins nothing more. It has ended.
    is_ending: bool
    is_over: bool


class Handlers(Protocol):
    """What calls the handlers of a run."""

    @property
    def count(self) -> tuple[int, int]:
        """How many there are, and how many there should be (any thread; no lock)."""


class HeldBack(NamedTuple):
    """A partition whose progress waits for one message, while later ones are done or wait."""

    topic: str
    partition: int
    #: The message that all wait for, and its key.
    offset: int
    key: bytes | str | None
    #: For how long it has been with a handler, or waited for its next try (ms).
    for_ms: float
    #: How many messages of this partition are in hand.
    in_hand: int
    #: Why the partition is being let go, which waits for that message, too (``revoke_timeout``); "": it is not.
    releasing: str = ""

    def __str__(self) -> str:
        return (
            f"{self.topic} [{self.partition}]: held back at offset {self.offset} for {lasting(self.for_ms)} by key "
            f"{self.key!r}"
            + (f"; it is to be released ({self.releasing}), which waits for that" * bool(self.releasing))
        )


def lasting(ms: float) -> str:
    """A duration, for people: "12 s", "3 min", "5.5 h"."""
    seconds = ms / 1000
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Lane:
    """The messages of one key of one partition, in hand."""

    __slots__ = ("assignment", "began", "key", "message", "number", "partition", "rest", "running", "since", "turn")

    def __init__(self, partition: _Partition, key: Hashable, message: Message) -> None:
        self.partition: _Partition = partition
        self.key: Hashable = key
        #: The first one; None: the lane is over.
        self.message: Message | None = message
        #: Whose it is.
        self.assignment: Assignment = partition.assignment
        #: Those after it; None: there was never more than one.
        self.rest: deque[Message] | None = None
        #: Which try of the first one is the next, or under way.
        self.number: int = 1
        self.running: bool = False
        #: How many tries have begun, of all its messages.
        self.turn: int = 0
        #: When its first try, and the one under way, began (ms, own clock); 0: none has.
        self.since: float = 0.0
        self.began: float = 0.0


class _Partition:
    """The lanes of one partition."""

    __slots__ = ("assignment", "lanes", "parked", "running", "started")

    def __init__(self, assignment: Assignment) -> None:
        #: Under which what waits is in hand.
        self.assignment: Assignment = assignment
        self.lanes: dict[Hashable, Lane] = {}
        #: Those with a handler.
        self.running: set[Lane] = set()
        #: Those whose first message has been tried and is not done.
        self.started: set[Lane] = set()
        #: Those that came up while nothing might be handed out (T4).
        self.parked: list[Lane] = []


class Lanes:
    """All lanes of one consumer. Workers call it with no other lock in hand, the engine under the shell's."""

    def __init__(self, order: Order, lock: Lock, stop_signal: list[bool], grace_ms: float):
        """lock: what guards it. stop_signal: not empty: nothing more is begun.

        grace_ms: so much longer than ``handler_timeout`` a handler may take before its lease goes: it is cancelled
        first.
        """
        self._lock = lock
        self._stop = stop_signal
        self._grace_ms = grace_ms
        self.order = order
        self._partitions: dict[Key, _Partition] = {}
        #: Tries to come: (when, a number that keeps them apart, lane).
        self._retries: list[tuple[float, int, Lane]] = []
        self._count = 0
        #: Lanes that a worker may begin with a first try: that many retries are due is no reason not to read on.
        self.ready: int = 0
        #: Messages with a handler.
        self.running: int = 0
        #: The run whose workers may begin something; None: none is under way.
        self.owner: Owner | None = None
        #: Of that run.
        self.handlers: Handlers | None = None
        #: Nothing more is begun.
        self.is_ended: bool = False
        #: A try has failed: what is being let go need not wait for the next one.
        self.has_returned: bool = False
        #: What failed after its assignment had ended: nobody says of it that it is done.
        self.dropped: deque[tuple[Assignment, Message]] = deque()

    def open(self, owner: Owner) -> None:
        """A run begins; what the one before had ready is ready no more."""
        with self._lock:
            self.owner, self.is_ended, self.ready = owner, False, 0

    def close(self, owner: Owner) -> None:
        """This run has ended."""
        with self._lock:
            if self.owner is owner:
                self.owner, self.is_ended = None, True

    def put(self, assignment: Assignment, messages: Iterable[Message]) -> list[Lane]:
        """Messages came in hand; the lanes that have become ready."""
        ready: list[Lane] = []
        by_key, by_partition = self.order == "key", self.order == "partition"
        with self._lock:
            partition = self._partitions.get(assignment.key)
            if partition is None:
                self._partitions[assignment.key] = partition = _Partition(assignment)
            partition.assignment = assignment
            lanes = partition.lanes
            for message in messages:
                key: Hashable = message.key() if by_key else None
                if key is None and not by_partition:
                    key = offset_of(message)
                lane = lanes.get(key)
                if lane is None:
                    lanes[key] = lane = Lane(partition, key, message)
                    ready.append(lane)
                elif lane.rest is None:
                    lane.rest = deque((message,))
                else:
                    lane.rest.append(message)
            self.ready += len(ready)
        return ready

    def begin(self, lane: Lane, now: float, owner: Owner) -> Message | None:
        """A worker takes up a ready lane: its message; None: not now, or never."""
        with self._lock:
            if self.owner is not owner:
                return None  # what waited was recalled as that run ended
            self.ready -= lane.number == 1
            message = lane.message
            if message is None or lane.running:
                return None
            if owner.is_ending or self._stop or now >= lane.assignment.lease.hand_out_until:
                lane.partition.parked.append(lane)
                return None
            lane.turn += 1  # first: an exception from here on is this try's
            lane.running, lane.began = True, now
            if not lane.since:
                lane.since = now
                lane.partition.started.add(lane)
            lane.partition.running.add(lane)
            self.running += 1
            return message

    def done(self, lane: Lane, owner: Owner) -> bool:
        """The message of a running lane is done: whether the lane is ready again, for workers of this run."""
        with self._lock:
            return self._rest(lane) and self._go_on(lane, owner)

    def failed(self, lane: Lane, due: float | None, owner: Owner) -> bool:
        """A try has failed; due: when the next one may begin (ms), None: never. Whether the lane is ready (for others).

        Under an assignment that has ended nothing is tried again. (Asked under the lock: once it has ended, ``recall``
        takes what waits, and must find this lane waiting, or this must find the assignment over.)
        """
        with self._lock:
            if (is_ready := self._not_done(lane, owner)) is not None:
                return is_ready
            if self.owner is not owner:
                lane.partition.parked.append(lane)
                return False
            lane.number += 1
            if due is not None:
                self._count += 1
                heappush(self._retries, (due, self._count, lane))
            return False

    def give_back(self, lane: Lane, owner: Owner) -> bool:
        """A try counts for nothing: it begins again once the lease is proven (``reopened``), or elsewhere.

        Returns whether the lane is ready (for others).
        """
        with self._lock:
            if (is_ready := self._not_done(lane, owner)) is not None:
                return is_ready
            lane.partition.parked.append(lane)
            return False

    def _not_done(self, lane: Lane, owner: Owner) -> bool | None:
        """A try has ended without its message being done. Whether the lane is ready; None: its message stays in it."""
        if not self._rest(lane):
            return False
        self.has_returned = True
        if lane.assignment.over:
            return self._drop(lane, owner)
        if self.owner is not owner:
            lane.number = 1
        return None

    def abandon(self, lane: Lane, turn: int) -> None:
        """An exception may have left this try anywhere on its way to its end: no handler has its message any more.

        turn: the lane's, of that try; where another one has begun since, that one stays.
        """
        with self._lock:
            if lane.turn != turn:
                return
            lane.turn += 1
            lane.running = False
            lane.partition.running.discard(lane)
            self.running = sum(len(partition.running) for partition in self._partitions.values())
            self.has_returned = True
            if lane.message is None or lane.partition.lanes.get(lane.key) is not lane:
                return
            if lane.assignment.over:
                self._drop(lane, None)
            else:
                lane.partition.parked.append(lane)

    def _drop(self, lane: Lane, owner: Owner | None) -> bool:
        """Nothing more of this message here: its assignment is over."""
        if lane.message is not None:
            self.dropped.append((lane.assignment, lane.message))
        return self._go_on(lane, owner)

    def _go_on(self, lane: Lane, owner: Owner | None) -> bool:
        partition = lane.partition
        partition.started.discard(lane)
        if not lane.rest:
            lane.message = None
            del partition.lanes[lane.key]
            return False
        lane.message, lane.assignment = lane.rest.popleft(), partition.assignment
        lane.number, lane.since = 1, 0.0
        if self.owner is not owner or self.is_ended:
            partition.parked.append(lane)
            return False
        self.ready += 1
        return True

    def _rest(self, lane: Lane) -> bool:
        """Its try has ended. False: it had before."""
        if not lane.running:
            return False
        lane.running = False
        lane.partition.running.discard(lane)
        self.running -= 1
        return True

    def due(self, now: float, owner: Owner) -> list[Lane]:
        """Lanes whose next try may begin."""
        found: list[Lane] = []
        with self._lock:
            if self.owner is not owner:
                return found
            while self._retries and (self._retries[0][0] <= now or self._retries[0][2].message is None):
                lane = heappop(self._retries)[2]
                if lane.message is not None:
                    found.append(lane)
        return found

    @property
    def next_due(self) -> float | None:
        """When the next try may begin (ms); None: none waits."""
        with self._lock:
            return self._retries[0][0] if self._retries else None

    def reopened(self, now: float) -> list[Lane]:
        """Parked lanes that are ready again (T4)."""
        found: list[Lane] = []
        if self.is_ended:
            return found
        with self._lock:
            for partition in self._partitions.values():
                if partition.parked and now < partition.assignment.lease.hand_out_until:
                    found += [lane for lane in partition.parked if lane.message is not None]
                    partition.parked.clear()
            self.ready += sum(lane.number == 1 for lane in found)
        return found

    def recall(self, assignment: Assignment) -> list[Message]:
        """What waits under an assignment, and no handler has: it is not to be begun any more."""
        found: list[Message] = []
        with self._lock:
            partition = self._partitions.get(assignment.key)
            if partition is None or partition.assignment is not assignment:
                return found
            partition.parked.clear()
            for lane in list(partition.lanes.values()):
                if lane.rest:
                    found += lane.rest
                    lane.rest.clear()
                if not lane.running:
                    if lane.message is not None:
                        found.append(lane.message)
                    lane.message = None
                    partition.started.discard(lane)
                    del partition.lanes[lane.key]
        return found

    def oldest(self, assignment: Assignment) -> float | None:
        """Since when (ms, own clock) a handler has had a message of this assignment; None: none has."""
        with self._lock:
            partition = self._partitions.get(assignment.key)
            running = () if partition is None else partition.running
            times = (lane.began + self._grace_ms for lane in running if lane.assignment is assignment)
            return min(times, default=None)

    def hanging(self, before: float) -> list[Lane]:
        """Lanes that have been with a handler since before that time (ms, own clock)."""
        with self._lock:
            return [lane for x in self._partitions.values() for lane in x.running if lane.began < before]

    def held_back(self, now: float, longer_than: float) -> tuple[HeldBack, ...]:
        """Partitions whose oldest message in hand has been tried for so long (ms), by topic and partition."""
        found = []
        with self._lock:
            for (topic, number), partition in self._partitions.items():
                assignment = partition.assignment
                if assignment.stage not in (Stage.ACTIVE, Stage.REVOKING) or not partition.started:
                    continue
                started = [
                    (offset_of(x.message), x.since, x.message) for x in partition.started if x.message is not None
                ]
                offset, since, message = min(started, key=lambda one: one[:2])
                if now >= since + longer_than:
                    about = assignment.tracker.in_hand, assignment.releasing
                    found.append(HeldBack(topic, number, offset, message.key(), now - since, *about))
        return tuple(sorted(found, key=lambda one: one[:2]))
