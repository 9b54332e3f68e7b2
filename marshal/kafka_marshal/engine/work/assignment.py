"""One partition that a consumer works on, from the granted lease to its end.

::

    (lease granted) ─▶ IDENTIFYING ─▶ LOCATING ─▶ POSITIONING ─▶ ASSIGNING ─▶ ACTIVE ─▶ REVOKING ─▶ RELEASED
                       the topic's    ask the     beat start−1   on_assign    hand     finish what
                       id (P12)       leader      (P9)           returns      out      is in hand
    any of them ─▶ LOST (fenced, not proven in time, handler too slow, position lost)

IDENTIFYING is skipped where the id is known or there is nothing to compare it with, LOCATING where the log knows a
position, POSITIONING where that position is stable + 1, ASSIGNING where there is no callback. Nothing is handed out
outside ACTIVE, nor at a moment when the lease is not proven (T4).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING

from kafka_marshal.engine.claims.leases import OwnLease
from kafka_marshal.engine.effects import Key, Piece
from kafka_marshal.engine.settings import MAX_IN_HAND_MESSAGES
from kafka_marshal.engine.work.tracker import Run, Tracker, offset_of
from kafka_marshal.ports import Message
from rationalizer.limits import NOTHING_DONE

if TYPE_CHECKING:
    from kafka_marshal.engine.work.consumer import ConsumerEngine

__all__ = ["REPORTING", "Assignment", "Grant", "Stage"]


class Stage(StrEnum):
    """Where an assignment stands."""

    CLAIMING = "claiming"
    IDENTIFYING = "identifying"
    LOCATING = "locating"
    POSITIONING = "positioning"
    ASSIGNING = "assigning"
    ACTIVE = "active"
    REVOKING = "revoking"
    RELEASED = "released"
    LOST = "lost"


#: What was done is told to the log. (LOCATING: thrown out of range in the midst of work; else there is nothing new.)
REPORTING = (Stage.LOCATING, Stage.ACTIVE, Stage.REVOKING)


class Grant:
    """A ClaimingMessages under way, and the messages it is for (C12, C13)."""

    __slots__ = ("accepted", "last_offset", "run", "sent_at")

    def __init__(self, run: Run, last_offset: int, sent_at: float) -> None:
        self.run = run
        self.last_offset = last_offset
        self.sent_at = sent_at
        #: None: the log has not answered yet.
        self.accepted: bool | None = None


class Assignment:
    """State of one assigned partition. Only its consumer engine changes it."""

    __slots__ = (
        "_buffer",
        "_covered_to",
        "buffered",
        "callbacks_running",
        "consumer",
        "fetch_next",
        "first_claim",
        "grant",
        "is_new",
        "key",
        "lease",
        "look_up_at",
        "asked_at",
        "asked_end",
        "log_end",
        "mark_sent_at",
        "looked_up",
        "meter",
        "quiet",
        "ranges_due",
        "releasing",
        "reported_ranges",
        "shown",
        "stage",
        "start_beat",
        "start_beat_sent",
        "tracker",
        "user_paused",
    )

    def __init__(self, key: Key, consumer: ConsumerEngine) -> None:
        self.key = key
        self.consumer = consumer
        self.stage = Stage.CLAIMING
        self.lease: OwnLease = None  # type: ignore[assignment]  # set by the consumer engine right after
        self.tracker = Tracker(-1, ())
        #: (messages, first offset they cover), in offset order.
        self._buffer: deque[tuple[list[Message], int]] = deque()
        self.buffered = 0
        #: The first offset that no message in the buffer covers yet.
        self._covered_to = 0
        #: The next offset to come from the reader.
        self.fetch_next = 0
        #: Nobody of the group ever held this lease: ``start=`` decides where to begin (P9).
        self.first_claim = False
        #: That it begins, where nothing is done, at the log's start: nobody missed what was there before the group.
        self.is_new = False
        #: The last_offset of the P9 beat under way; None: none is.
        self.start_beat: int | None = None
        self.start_beat_sent = 0.0
        self.grant: Grant | None = None
        #: Callbacks of the user that were called and have not returned.
        self.callbacks_running = 0
        #: Why it is being let go, for people; "": it is not.
        self.releasing = ""
        #: on_assign was called, or would have been.
        self.shown = False
        #: What the last CommitRanges told the log, and when to tell it again if it does not know it by then.
        self.reported_ranges: list[tuple[int, int]] = []
        self.ranges_due = 0.0
        #: When the mark of its topic was sent (P12); None: it was not, or the log shows it.
        self.mark_sent_at: float | None = None
        #: The offset that came next when it was last looked, and since when (StuckPartitions).
        self.quiet: tuple[int, float] | None = None
        #: The position at which the leader was last asked what its log holds, and when; the next time it is to be.
        self.looked_up: tuple[int, float] = (-1, 0.0)
        self.look_up_at: float | None = None
        self.user_paused = False
        self.log_end: int | None = None
        #: Where the leader said that it ends, and when it was last asked (or the reader last heard of it).
        self.asked_end = 0
        self.asked_at = 0.0
        #: (time, done, log end) at the start of the present cycle, for Cycle.
        self.meter: tuple[float, int, int] | None = None

    # What a lease tells its owner (LeaseOwner) goes to the consumer engine.

    def granted(self, now: float) -> None:
        self.consumer.on_granted(self, now)

    def refused(self, code: str, now: float) -> None:
        self.consumer.on_refused(self, code, now)

    def lost(self, reason: str, now: float) -> None:
        self.consumer.on_lost(self, reason, now)

    def released(self, now: float) -> None:
        self.consumer.on_released(self, now)

    def beaten(self, last_offset: int | None, accepted: bool, now: float) -> None:
        self.consumer.on_beaten(self, last_offset, accepted, now)

    def progress_to_report(self) -> int | None:
        """The last_offset for a beat: what is done without a gap, where the log does not know it yet (C14)."""
        if self.stage not in REPORTING:
            return None
        done = self.done_through()
        return done if done > self.consumer.known_stable(self.key) else None

    def done_through(self) -> int:
        """What is done without a gap. (At most once the log knows it by grants (C12), but for a log's end (P6).)"""
        if self.consumer.at_most_once and (self.tracker.runs or self.grant is not None):
            return NOTHING_DONE
        self.tracker.follow()
        return self.tracker.done.stable

    # The buffer between the reader and the user.

    def begin(self, offset: int, stable: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Start anew at offset, with what the log says is done."""
        self.tracker = Tracker(stable, ranges)
        self.drop_buffer()
        self.go_on_at(offset)

    def go_on_at(self, offset: int) -> None:
        """What is fetched next begins at offset; all between that and the buffer is done or gone."""
        self.fetch_next = self._covered_to = offset

    def drop_buffer(self) -> None:
        """Forget what was fetched and not handed out."""
        self._buffer.clear()
        self.buffered = 0

    def put(self, messages: list[Message]) -> None:
        """Take in fetched messages, without those that are done (P6) or were fetched under an older assignment."""
        first = offset_of(messages[0])
        if first < self.fetch_next:
            messages = [m for m in messages if offset_of(m) >= self.fetch_next]
            if not messages:
                return
        self.fetch_next = offset_of(messages[-1]) + 1
        done = self.tracker.done
        if self.tracker.has_islands or done.stable >= offset_of(messages[0]):
            messages = [m for m in messages if not done.is_done(offset_of(m))]
        if messages:
            self._buffer.append((messages, self._covered_to))
            self._covered_to = offset_of(messages[-1]) + 1
            self.buffered += len(messages)

    def reached(self, end: int) -> None:
        """The reader has passed everything below end; what it was not given, nobody is (P6)."""
        if end > self.fetch_next and self.stage in (Stage.ASSIGNING, Stage.ACTIVE):
            self.fetch_next = end
            self.tracker.pass_over(self._covered_to, end - 1)

    def put_back(self, messages: list[Message], covers_from: int) -> None:
        """Messages that were taken and not handed out, or not done, come first next time."""
        if messages:
            place = bisect_left(self._buffer, covers_from, key=lambda entry: entry[1])
            self._buffer.insert(place, (messages, covers_from))
            self.buffered += len(messages)

    def skip_to(self, offset: int) -> None:
        """Forget buffered messages below offset."""
        kept = [([m for m in messages if offset_of(m) >= offset], covers) for messages, covers in self._buffer]
        self._buffer = deque((messages, max(covers, offset)) for messages, covers in kept if messages)
        self.buffered = sum(len(messages) for messages, _ in self._buffer)
        self.fetch_next = max(self.fetch_next, offset)
        self._covered_to = max(self._covered_to, offset)

    def can_hand_out(self, now: float) -> bool:
        """Whether there is something that may be handed out now (T4)."""
        return self.buffered > 0 and self.is_open(now)

    def is_open(self, now: float) -> bool:
        """Whether anything of this partition may be handed out now (T4)."""
        return (
            self.stage is Stage.ACTIVE
            and not self.user_paused
            and now < self.lease.hand_out_until
            and self.tracker.in_hand < MAX_IN_HAND_MESSAGES
        )

    def take(self, max_messages: int, iterating: bool, now: float) -> Run:
        """The next messages, as one run that is not in hand yet; can_hand_out() must hold."""
        messages, covers_from = self._buffer.popleft()
        if len(messages) > max_messages:
            rest = messages[max_messages:]
            messages = messages[:max_messages]
            self._buffer.appendleft((rest, offset_of(messages[-1]) + 1))
        self.buffered -= len(messages)
        parts = [messages]
        room = max_messages - len(messages)
        while self._buffer and room > 0 and self._buffer[0][1] <= offset_of(parts[-1][-1]) + 1:
            more, _ = self._buffer.popleft()
            if len(more) > room:
                self._buffer.appendleft((more[room:], offset_of(more[room - 1]) + 1))
                more = more[:room]
            parts.append(more)
            room -= len(more)
            self.buffered -= len(more)
        if len(parts) > 1:
            messages = list(chain.from_iterable(parts))
        return Run(self, messages, covers_from, iterating, now)

    @property
    def epoch(self) -> int:
        """The lease's epoch (C9)."""
        return self.lease.epoch

    @property
    def piece(self) -> Piece:
        """As effects name it."""
        return Piece(self.key, self.epoch, self.position)

    @property
    def position(self) -> int:
        """The offset of the next message to be handed out."""
        ahead = [offset_of(run.messages[run.handed_out]) for run in self.tracker.runs.values() if run.has_more]
        return min(ahead, default=offset_of(self._buffer[0][0][0]) if self._buffer else self.fetch_next)

    @property
    def is_at_work(self) -> bool:
        """Whether its messages are handed out, as far as it goes."""
        return self.stage is Stage.ACTIVE and self.lease.held

    @property
    def over(self) -> bool:
        """Whether the assignment has ended: released, or lost."""
        return self.stage in (Stage.RELEASED, Stage.LOST)
