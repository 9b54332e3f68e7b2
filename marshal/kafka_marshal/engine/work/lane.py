"""One lane: the messages of one key of one partition that are in flight; and the lanes of one partition.

Keys that take more than half of what one handler can do are hot (U14): their messages are handled one after another.
Each partition counts the time of its handlers by key with Space-Saving: a new key takes the place of the smallest of 32
counters, and counts on from there. What a counter has beyond that is certain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from math import inf
from operator import length_hint
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from kafka_marshal.engine.work.assignment import Assignment
from kafka_marshal.engine.work.run import Run, offset_of
from kafka_marshal.ports import Message
from kafka_marshal.runtime import Lock
from kafka_marshal.types import BatchToken

#: Counters of a partition.
COUNTERS = 32

#: A key that one handler has for more than this part of the time is hot.
HOT = 0.5

#: Times are counted over this long (ms); what was found holds for three times that, unless it is counted again.
WINDOW_MS = 10_000.0

#: One message counts for at most this part of a window: a slow one, or one of before a stop, makes no key hot.
MOST_OF_ONE = 0.2

#: How many handled messages wait to be counted.
MOST_NOTED = 1_000


#: Messages of one run of a loop that are counted: neighbours, at a place that moves from run to run.
SAMPLE = 32
_SPREAD = 2_654_435_761


#: How often what a loop has taken is counted (ms), beside the ends of its runs.
COUNTED_EVERY_MS = 500.0


class HotKey(NamedTuple):
    """A key whose messages take more than half of what one handler can do."""

    topic: str
    partition: int
    key: bytes | str
    #: For which part of the last seconds a handler had a message of it: 0.5 … 1.
    load: float
    #: Its part of the time that handlers had messages of the partition, of the keys that this member has: 0 … 1.
    share: float

    def __str__(self) -> str:
        return (
            f"{self.topic} [{self.partition}]: key {self.key!r} keeps a handler busy for {self.load:.0%} of the time, "
            f"and is {self.share:.0%} of the partition's work here. Messages of one key are handled one after another: "
            "more handlers or members do not speed it up. Make its handler faster, or divide the key"
        )


class SpaceSaving:
    """The largest of many amounts by key, in a fixed number of counters."""

    def __init__(self, counters: int = COUNTERS) -> None:
        self._counters = counters
        #: Key → amount, and how much of that may be of other keys.
        self._amounts: dict[bytes | str, list[float]] = {}
        #: All that was counted.
        self.total: float = 0.0

    def add(self, key: bytes | str, amount: float) -> None:
        """Count an amount for a key."""
        self.total += amount
        found = self._amounts.get(key)
        if found is not None:
            found[0] += amount
        elif len(self._amounts) < self._counters:
            self._amounts[key] = [amount, 0.0]
        else:
            smallest = min(self._amounts, key=lambda each: self._amounts[each][0])
            least = self._amounts.pop(smallest)[0]
            self._amounts[key] = [least + amount, least]

    def largest(self) -> tuple[bytes | str, float] | None:
        """The key of which most is certain, and how much; None: nothing was counted."""
        if not self._amounts:
            return None
        amount, key = max((amount - error, key) for key, (amount, error) in self._amounts.items())
        return key, amount


class HotKeys:
    """The hot keys of one run. Any thread calls it; reading ``found`` takes no lock."""

    def __init__(self, lock: Lock | AbstractContextManager[None]) -> None:
        self._lock = lock
        #: (topic, partition), key, ms: not counted yet. An append is atomic.
        self._noted: deque[tuple[tuple[str, int], bytes | str, float]] = deque()
        self._counts: dict[tuple[str, int], SpaceSaving] = {}
        #: When the present window began (ms, own clock); None: nothing was noted.
        self._since: float | None = None
        self._is_counting = False
        #: The hottest key of each partition that has one, at the end of the last window, and when that was.
        self.found: tuple[HotKey, ...] = ()
        self._found_at = 0.0

    def note(self, where: tuple[str, int], key: bytes | str | None, ms: float, now: float) -> None:
        """A handler has had a message of this key for so many ms."""
        if key is None:
            return  # messages without a key wait for no other
        if self._since is None:
            self._since = now - ms
        self._noted.append((where, key, min(ms, MOST_OF_ONE * WINDOW_MS)))
        self._count_if_due(now)

    def note_run(self, where: tuple[str, int], messages: Sequence[Message], ms: float, now: float) -> None:
        """A loop has had these messages, one after another, for so many ms: some neighbours stand for all of them."""
        if not messages or ms <= 0:
            return
        chosen = messages
        if len(messages) > SAMPLE:
            place = (messages[0].offset() or 0) * _SPREAD % (len(messages) - SAMPLE)
            chosen = messages[place : place + SAMPLE]
        each = min(ms / len(messages), MOST_OF_ONE * WINDOW_MS) * len(messages) / len(chosen)
        if self._since is None:
            self._since = now - ms
        self._noted.extend((where, key, each) for message in chosen if (key := message.key()) is not None)
        self._count_if_due(now)

    def _count_if_due(self, now: float) -> None:
        is_due = len(self._noted) >= MOST_NOTED or (self._since is not None and now >= self._since + WINDOW_MS)
        if is_due and not self._is_counting:  # one thread counts, and the others need not wait for it
            self._count(now)

    def _count(self, now: float) -> None:
        with self._lock:
            self._is_counting = True
            try:
                with suppress(IndexError):
                    for _ in range(len(self._noted)):
                        where, key, ms = self._noted.popleft()
                        self._counts.setdefault(where, SpaceSaving()).add(key, ms)
                if self._since is not None and (window := now - self._since) >= WINDOW_MS:
                    self.found, self._found_at = tuple(self._hot(window)), now
                    self._counts, self._since = {}, now
            finally:
                self._is_counting = False

    def _hot(self, window: float) -> list[HotKey]:
        found = []
        for (topic, partition), counts in sorted(self._counts.items()):
            largest = counts.largest()
            if largest is not None and largest[1] > HOT * window:
                key, ms = largest
                found.append(HotKey(topic, partition, key, min(1.0, ms / window), ms / counts.total))
        return found

    def at(self, now: float) -> tuple[HotKey, ...]:
        """The hot keys, if they were counted lately (any thread; no lock)."""
        return self.found if now < self._found_at + 3 * WINDOW_MS else ()


class LoopKeys:
    """The hot keys of loops, ``poll`` and batches of one consumer: of each run, what was taken of it, and its time."""

    def __init__(self) -> None:
        self.hot: HotKeys = HotKeys(nullcontext())
        #: Run → how many of its messages were counted, and since when (own clock, ms) a loop has had it.
        self._runs: WeakKeyDictionary[Run[Any], tuple[int, float]] = WeakKeyDictionary()
        self._counted_at = 0.0

    def began(self, run: Run[Any], now: float) -> None:
        """A run was handed out."""
        self._runs[run] = (0, now)

    def ended(self, run: Run[Any], now: float) -> None:
        """A loop has left a run, or a batch is done. What others counted meanwhile takes none of its time twice."""
        if run not in self._runs:
            return
        counted, since = self._runs[run]
        # Not ``Run.ahead``: that decides, and so a recording writes it down.
        gone = len(run.messages) - len(run.recalled) - length_hint(run._ahead)
        if gone > counted:
            self.hot.note_run(run.assignment.key, run.messages[counted:gone], now - max(since, self._counted_at), now)
            self._runs[run], self._counted_at = (gone, since), now

    def look(self, now: float) -> None:
        """Count what was taken of runs that have not ended."""
        if now >= self._counted_at + COUNTED_EVERY_MS:
            for run in [run for run in self._runs if length_hint(run._ahead)]:
                self.ended(run, now)


#: Where one message is tried at a time, a handler that has worked for longer than this (ms) does not count.
HANGS_MS = 10_000.0


class HeldBack(NamedTuple):
    """A partition whose progress waits for one message, while later ones are done or wait."""

    topic: str
    partition: int
    #: The offset of the message that all others wait for, and its key.
    offset: int
    key: bytes | str | None
    #: For how long it has been with a handler, or waited for its next try (ms).
    for_ms: float
    #: How many messages of this partition are in flight.
    in_hand: int
    #: Why the partition is being released, which also waits for that message (``revoke_timeout``); "": it is not.
    releasing: str = ""
    #: In a run with transactions: how many later messages are handled, and how many bytes of output wait with them.
    finished: int = 0
    finished_bytes: int = 0
    #: What else it waits for: a transaction that is not committed yet; "": the message's handler.
    why: str = ""

    def __str__(self) -> str:
        return (
            f"{self.topic} [{self.partition}]: held back at offset {self.offset} for {lasting(self.for_ms)} by "
            + (self.why or f"key {self.key!r}")
            + (
                f"; {self.finished:,} later message(s) are handled, and {self.finished_bytes:,} bytes of output wait "
                "with them"
            )
            * bool(self.finished)
            + (f"; it is to be released ({self.releasing}), which waits for that" * bool(self.releasing))
        )


class RateLimited(NamedTuple):
    """A rate of ``run`` that is what limits at present; ``str()`` is for people."""

    #: "": of all topics.
    topic: str
    #: Tries a second of this member; and how many members share the group's rate (1 without ``of_group``).
    per_second: float
    members: int
    #: How many messages wait for it: of each lane (key), the first.
    waiting: int
    #: Of ``Rate(key=…)``: for how many values it limits, and that with most waiting; None: it has no key.
    values: int = 1
    value: str | None = None

    def __str__(self) -> str:
        whose = "" if self.members == 1 else f", its part of the group's, which {self.members} members share"
        each = f" for each value; {self.values} value(s) reach it, most waits for {self.value}"
        each *= self.value is not None
        return (
            f"{self.topic or 'all topics'}: limited by rate= of run(…), {self.per_second:g} a second{whose}{each}. "
            f"{self.waiting:,} message(s), of each key the first, wait for that, and nothing else does. If the lag "
            "grows, raise the rate"
        )


def given_up(message: Message) -> str:
    """What holds a partition back where a message was taken away from a handler that has not returned."""
    return (
        f"key {message.key()!r}: a handler has had this message since before the partition was taken away "
        "(handler_timeout?), and has not returned; the key waits for it. Nothing is lost. Find out what it waits for, "
        "or restart the process"
    )


def lasting(ms: float) -> str:
    """A duration, for people: "12 s", "3 min", "5.5 h"."""
    seconds = ms / 1000
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class LeftBehind(NamedTuple):
    """Messages of a partition that a handler has not finished within ``handler_timeout``: others may have them."""

    topic: str
    partition: int
    #: Their offsets, and the key if it is one message.
    first: int
    last: int
    key: bytes | str | None
    #: Since when (ms, own clock) the handler has had them.
    since: float

    def text(self, now: float) -> str:
        """For people."""
        what = f"offset {self.first} (key {self.key!r})" if self.first == self.last else f"{self.first} to {self.last}"
        return (
            f"{self.topic} [{self.partition}] {what}: with a handler for {lasting(now - self.since)}, longer than "
            "handler_timeout. Nothing is lost: it is given to others, and what this handler reports later has no "
            "effect. Find out what it waits for; if it needs longer, raise handler_timeout"
        )


class Lane:
    """The messages of one key of one partition that are in flight."""

    __slots__ = (
        "ahead",
        "assignment",
        "before",
        "began",
        "behind",
        "due",
        "is_left",
        "is_single",
        "key",
        "message",
        "number",
        "partition",
        "rest",
        "running",
        "since",
        "timer",
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
        #: The lanes with the messages before and after its own, of the same key, that were in a batch with it and are
        #: not done: it begins when the one ahead is over. What waits (``rest``), and the key, are with the last one.
        self.ahead: Lane | None = None
        self.behind: Lane | None = None
        #: Its message was in a batch that failed as a whole: it is tried by itself.
        self.is_single: bool = False
        #: How many tries have begun, of all messages of the lane.
        self.turn: int = 0
        #: When the first try of the message, and the latest one, began (ms, own clock); 0: none has.
        self.since: float = 0.0
        self.began: float = 0.0
        #: When (ms, own clock) the message may be tried, as the log says or was asked to; None: it says nothing.
        self.due: float | None = None
        #: The number of the timer that its next try waits for; 0: it waits for none.
        self.timer: int = 0

    def line(self) -> list[Message]:
        """Its message, and all that come after it in its key."""
        found: list[Message] = []
        lane: Lane | None = self
        while lane is not None:
            found += [each for each in (lane.message, *(lane.rest or ())) if each is not None]
            lane = lane.behind
        return found


class LaneRun(Protocol):
    """A run, as its lanes see it."""

    #: Whether it begins no more tries; whether it has ended.
    is_ending: bool
    is_over: bool


class Handlers(Protocol):
    """Calls the handlers of a run."""

    @property
    def count(self) -> tuple[int, int]:
        """How many handlers there are, and how many there should be (any thread; no lock)."""

    @property
    def limits(self) -> tuple[RateLimited, ...]:
        """The rates of the run that limit it now (any thread; no lock)."""

    def put(self, lanes: Iterable[Lane]) -> None:
        """These lanes are ready (any thread)."""


class Partition:
    """The lanes of one partition."""

    __slots__ = (
        *("assignment", "closes_to", "done_to", "due", "finish_to", "lanes", "parked", "probe", "running", "skipped"),
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
        #: Offset → when (own clock, ms) it may be tried, of messages that are open in the log and wait; 0: at once.
        self.due: dict[int, float] = {}
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

    def pass_to(self, assignment: Assignment) -> None:
        """From now on messages of this assignment wait here."""
        self.assignment = assignment
        self.finish_to = self.closes_to = self.done_to = -1
        self.tried.clear()
        self.due.clear()
        self.skipped.clear()
        self.unlogged.clear()

    def may_begin(self, lane: Lane, offset: int, now: float) -> bool:
        """Whether a try of this message may begin now."""
        lease = lane.assignment.lease
        is_to_finish = offset <= self.finish_to or offset <= self.closes_to
        until = lease.proven_until if is_to_finish else lease.hand_out_until
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
