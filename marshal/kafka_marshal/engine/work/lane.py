"""One lane: the messages of one key of one partition that are in flight; and the lanes of one partition."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from math import inf
from types import TracebackType
from typing import Protocol

from kafka_marshal.engine.work.assignment import Assignment
from kafka_marshal.engine.work.behind import HANGS_MS
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.ports import Message
from kafka_marshal.types import BatchToken


class Lane:
    """The messages of one key of one partition that are in flight."""

    __slots__ = (
        "assignment",
        "before",
        "began",
        "is_left",
        "key",
        "message",
        "number",
        "partition",
        "rest",
        "running",
        "since",
        "token",
        "turn",
    )

    def __init__(self, partition: Partition, key: Hashable, message: Message) -> None:
        self.partition: Partition = partition
        self.key: Hashable = key
        #: The first one; None: the lane is over.
        self.message: Message | None = message
        #: The assignment of the first one.
        self.assignment: Assignment = partition.assignment
        #: Those after it; None: there was never more than one.
        self.rest: deque[Message] | None = None
        #: The number of its try that is the next, or under way, without those of earlier owners.
        self.number: int = 1
        #: How many tries of it had begun before, as the log shows.
        self.before: int = 0
        #: Of a batch of a share, whose lanes have one message each: its token.
        self.token: BatchToken | None = None
        self.running: bool = False
        #: Its handler was left behind with the message: what it does has no effect.
        self.is_left: bool = False
        #: How many tries have begun, of all messages of the lane.
        self.turn: int = 0
        #: When the first try of the message, and the latest one, began (ms, own clock); 0: none has.
        self.since: float = 0.0
        self.began: float = 0.0


class Lock(Protocol):
    """Guards lanes."""

    def __enter__(self) -> object: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None, /
    ) -> object: ...


class Owner(Protocol):
    """A run, as its lanes see it."""

    #: Whether it begins no more tries; whether it has ended.
    is_ending: bool
    is_over: bool


class Handlers(Protocol):
    """Calls the handlers of a run."""

    @property
    def count(self) -> tuple[int, int]:
        """How many handlers there are, and how many there should be (any thread; no lock)."""

    def put(self, lanes: Iterable[Lane]) -> None:
        """These lanes are ready (any thread)."""


class Partition:
    """The lanes of one partition."""

    __slots__ = (
        *("assignment", "closes_to", "done_to", "finish_to", "lanes", "parked", "probe", "running", "skipped"),
        *("started", "tried", "tried_at", "unlogged", "up_to"),
    )

    def __init__(self, assignment: Assignment) -> None:
        #: The assignment of the messages that wait.
        self.assignment: Assignment = assignment
        self.lanes: dict[Hashable, Lane] = {}
        #: Lanes whose first message is with a handler.
        self.running: set[Lane] = set()
        #: Offset → how many tries had begun before, as the log shows.
        self.tried: dict[int, int] = {}
        #: Messages whose tries begin when the log has them → the lane whose turn came before that.
        self.unlogged: dict[int, Lane | None] = {}
        #: Messages with a handler that an operator has set aside: their tries are the last.
        self.skipped: set[int] = set()
        #: Lanes whose first message has been tried and is not done.
        self.started: set[Lane] = set()
        #: Lanes whose turn came while nothing might be handed out (T4), or only messages below theirs.
        self.parked: list[Lane] = []
        #: When the latest try began (ms, own clock); and, while nothing succeeds, the lane that may begin the next one.
        self.tried_at: float = -inf
        self.probe: Lane | None = None
        #: Tries of messages above this offset do not begin.
        self.up_to: float = inf
        #: Tries of messages up to this offset begin though the partition is held up (X13).
        self.finish_to: int = -1
        #: The run ends, and tries of messages up to this offset still begin; and the last one that a handler has done.
        #: (Only of pieces whose cut must have no gaps.)
        self.closes_to: int = -1
        self.done_to: int = -1

    def may_begin(self, lane: Lane, offset: int, now: float) -> bool:
        """Whether a try of this message may begin now."""
        lease = lane.assignment.lease
        until = lease.proven_until if offset <= max(self.finish_to, self.closes_to) else lease.hand_out_until
        return now < until and offset <= self.up_to and offset not in self.unlogged

    def gaps_to(self) -> int:
        """The highest offset that is done or with a handler: what waits below it is a gap; −1: nothing is."""
        beyond = [last for _, last in self.assignment.tracker.done.ranges]
        return max((self.done_to, *self.with_handlers(self.assignment), *beyond))

    def with_handlers(self, assignment: Assignment) -> list[int]:
        """The offsets of its messages that handlers have."""
        messages = (lane.message for lane in self.running if lane.assignment is assignment)
        return sorted(offset_of(message) for message in messages if message is not None)

    def waits(self, lane: Lane | None, now: float, pace_ms: float, failing_since: float) -> bool:
        """While nothing succeeds: whether no try may begin now, but for one of this lane.

        A handler that hangs holds no others up for ever.
        """
        if (lane is not None and lane is not self.probe) or now < max(self.tried_at, failing_since) + pace_ms:
            return True
        return any(now < each.began + HANGS_MS for each in self.running)

    def choose_probe(self, lanes: list[Lane]) -> list[Lane]:
        """Choose, and take out, the lane that shows first whether anything succeeds: with the newest untried message.

        (What was written last is the least like what has failed; and no good message waits for a bad one's back-off.)
        """
        if not lanes:
            return []
        self.probe = found = max(lanes, key=_as_a_probe)
        self.parked.remove(found)
        return [found]

    def has_left(self, offset: int) -> bool:
        """Whether a handler still has a message that was taken away from it."""
        running = (x.message for x in self.running if x.assignment is not self.assignment and x.message is not None)
        return any(offset_of(message) == offset for message in running)


def _as_a_probe(lane: Lane) -> tuple[bool, float]:
    if not lane.since and lane.message is not None:
        return True, offset_of(lane.message)
    return False, -lane.began
