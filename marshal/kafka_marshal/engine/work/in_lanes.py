"""The messages of one consumer that are spread over lanes (:mod:`.lanes`), apart from those its threads take.

Handlers finish in any order, but a transaction covers a partition's messages from its position on, without a gap (M4 to
M6). So a message that is finished early waits for those before it: the purgatory of the KIP. It stays in flight
(:mod:`.tracker`) until a transaction has committed it with what its handler has produced.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from kafka_marshal.engine.inputs import given, reading
from kafka_marshal.engine.settings import MAX_IN_HAND_MESSAGES
from kafka_marshal.engine.work.assignment import Assignment, Mover, Run, Stage, Tracker
from kafka_marshal.engine.work.lane import HeldBack, Lane, LoopKeys
from kafka_marshal.engine.work.lanes import Lanes
from kafka_marshal.engine.work.open_messages import Try, Wary, hash_of, is_mine, take_back, waits_until
from kafka_marshal.engine.work.run import Run as RunOf
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.engine.work.tracker import InFlight
from kafka_marshal.ports import Message
from kafka_marshal.types import Key

#: A transaction has at most this many messages.
BLOCK_MESSAGES = 500

#: A transaction that is not full begins this long (ms, own clock) after the one before it, or after a first message.
GATHER_MS = 100.0


class Finished(NamedTuple):
    """A message whose handler has returned, or which is a dead letter."""

    message: Message
    #: How many bytes it holds back until its transaction.
    size: int
    #: What it holds back. The engine keeps it, and does not look into it.
    held: object


class Block(NamedTuple):
    """Messages for one transaction, in flight until it is committed or dropped."""

    run: Run
    #: Those of ``run``, in order, with what they hold back.
    finished: list[Finished]


@dataclass(slots=True)
class _Waiting:
    """The finished messages of one assignment."""

    tracker: Tracker
    #: When the last block was taken, or the first of these messages came (ms, own clock).
    since: float
    #: By offset.
    finished: dict[int, Finished] = field(default_factory=dict)
    #: The block whose transaction is under way.
    block: Block | None = None
    #: How many bytes they hold back, those of the block included.
    size: int = 0
    #: The most messages of the next block: fewer while it is sought which of them can't be committed.
    most: int = BLOCK_MESSAGES


class Purgatory:
    """The finished messages of one consumer. Called under the shell's lock."""

    def __init__(
        self,
        consumer: Mover,
        put_back: Callable[[Assignment, list[Message], int], None],
        memory: InFlight,
        hold: Callable[[Key, float], None],
    ) -> None:
        """put_back: hands messages out again; the first one covers from this offset on.

        hold: lets no handler begin above this offset of a partition.
        """
        self._consumer = consumer
        self._put_back = put_back
        self._memory = memory
        self._hold = hold
        #: Assignments of which only the first message may be tried, for what later ones hold back takes much memory.
        self._held: set[Assignment] = set()
        #: In the order of their turns.
        self._waiting: dict[Assignment, _Waiting] = {}
        #: Whether transactions follow. If not, what is finished comes again.
        self._is_open = False
        #: How many bytes all finished messages hold back.
        self.size: int = 0

    # What a run does.

    @given
    def open(self) -> None:
        """A run with transactions begins."""
        self._is_open = True

    @given
    def close(self, now: float) -> None:
        """It has ended: what no transaction has taken comes again."""
        self._is_open = False
        for assignment in list(self._waiting):
            self._back(assignment, -1, keep=not assignment.over)
            if self._waiting[assignment].block is None:
                self._forget(assignment)
            self._consumer.revocation.try_finish(assignment, now)
        self._limit()

    def finish(self, finished: Sequence[Finished], ignored: Callable[[Message], None], now: float) -> None:
        """These messages are finished. ignored: called with each that is not in flight here, or no longer."""
        for each in finished:
            message = each.message
            assignment = self._consumer.assignments.get((message.topic() or "", message.partition() or 0))
            if assignment is None or assignment.over or not _is_in_flight(assignment.tracker, message):
                ignored(message)
                continue
            waiting = self._of(assignment, now)
            if not waiting.finished:
                waiting.since = max(waiting.since, now)
            self._put(waiting, each)
            if not self._is_open or assignment.stage is Stage.REVOKING:
                self._back(assignment, assignment.tracker.open_from() if self._is_open else -1, keep=True)
                self._consumer.revocation.try_finish(assignment, now)
        self._limit()

    @given
    def next_block(self, is_hurried: bool, now: float) -> Block | float:
        """The messages for the next transaction, or when to ask again (ms; inf: once anything is finished).

        is_hurried: take what there is, the run ends.
        """
        self._limit()
        due = inf
        for assignment, waiting in list(self._waiting.items()):
            if assignment.over or waiting.tracker is not assignment.tracker:
                self._forget(assignment)
                continue
            is_ours = assignment.stage in (Stage.ACTIVE, Stage.REVOKING) and now < assignment.lease.proven_until
            if not waiting.finished or not is_ours:
                continue
            if waiting.block is not None:
                due = min(due, now + GATHER_MS)
                continue
            is_urgent = is_hurried or assignment.stage is Stage.REVOKING or self._is_full(waiting)
            at = now if is_urgent else waiting.since + GATHER_MS
            if now < at and len(waiting.finished) < waiting.most:
                due = min(due, at)
                continue
            ready = _ready(assignment.tracker, waiting.finished, waiting.most)
            if ready and (now >= at or len(ready) >= waiting.most):
                return self._take(assignment, waiting, ready, now)
            due = min(due, at if now < at else now + GATHER_MS)
        return due

    def _take(self, assignment: Assignment, waiting: _Waiting, ready: list[Message], now: float) -> Block:
        finished = [waiting.finished.pop(offset_of(message)) for message in ready]
        run = _carved(assignment, ready)
        waiting.block, waiting.since = (block := Block(run, finished)), now
        self._waiting[assignment] = self._waiting.pop(assignment)
        return block

    @given
    def committed(self, run: Run, now: float) -> bool:
        """The transaction of a block is committed. Returns whether its messages were still in flight here."""
        self._end(run)
        was_here = run.assignment.tracker.mark_run(run) and not run.assignment.over
        self._consumer.revocation.try_finish(run.assignment, now)
        return was_here

    @given
    def failed(self, run: Run, most: int, now: float) -> None:
        """The transaction of a block is not committed.

        Its messages wait for another one, and the next has at most this many; 0: they are handled again.
        """
        assignment, block = run.assignment, self._end(run)
        if block is not None and most and self._is_open:
            waiting = self._waiting[assignment]
            waiting.most = most
            for each in block.finished:
                self._put(waiting, each)
            return
        for messages, covers_from in assignment.tracker.split(run, run.messages):
            if not assignment.over:
                self._put_back(assignment, messages, covers_from)
        self.cut(assignment)
        self._consumer.revocation.try_finish(assignment, now)

    def _end(self, run: Run) -> Block | None:
        """The transaction of this block has ended. None: it is not in flight here any more."""
        waiting = self._waiting.get(run.assignment)
        if waiting is None or waiting.block is None or waiting.block.run is not run:
            return None
        block, waiting.block, waiting.most = waiting.block, None, BLOCK_MESSAGES
        self._count(waiting, -sum(each.size for each in block.finished))
        return block if waiting.tracker.has(run) and not run.assignment.over else None

    # What the engine does.

    def cut(self, assignment: Assignment) -> None:
        """Its release waits for no message that was put back: what is finished behind one comes again, too."""
        if assignment.stage is Stage.REVOKING:
            self._back(assignment, assignment.tracker.open_from(), keep=True)

    def take_back(self, assignment: Assignment, first: int) -> None:
        """What is finished from this offset on, and not in a transaction, comes again."""
        self._back(assignment, first - 1, keep=True)

    def drop(self, assignment: Assignment) -> None:
        """It is over: what is finished, and not in a transaction, is no longer in flight."""
        self._back(assignment, -1, keep=False)

    def _back(self, assignment: Assignment, above: int, *, keep: bool) -> None:
        """Take back what is finished above this offset. keep: it is handed out again."""
        if (waiting := self._waiting.get(assignment)) is None:
            return
        for offset in sorted(x for x in waiting.finished if x > above):
            each = waiting.finished.pop(offset)
            self._count(waiting, -each.size)
            run = waiting.tracker.run_at(offset)
            for messages, covers_from in () if run is None else waiting.tracker.split(run, [each.message]):
                if keep and waiting.tracker is assignment.tracker:
                    self._put_back(assignment, messages, covers_from)

    def _of(self, assignment: Assignment, now: float) -> _Waiting:
        waiting = self._waiting.get(assignment)
        if waiting is not None and waiting.tracker is assignment.tracker:
            return waiting
        self._forget(assignment)
        self._waiting[assignment] = waiting = _Waiting(assignment.tracker, now)
        return waiting

    def _put(self, waiting: _Waiting, each: Finished) -> None:
        """Add a message, or replace it."""
        before = waiting.finished.get(offset_of(each.message))
        waiting.finished[offset_of(each.message)] = each
        self._count(waiting, each.size - (0 if before is None else before.size))

    def _count(self, waiting: _Waiting, size: int) -> None:
        waiting.size += size
        self.size += size

    def _forget(self, assignment: Assignment) -> None:
        if (waiting := self._waiting.pop(assignment, None)) is not None:
            self.size -= waiting.size

    def _limit(self) -> None:
        """Let no handler begin that is not needed, where finished messages hold back too much."""
        full = {assignment for assignment, waiting in self._waiting.items() if self._is_full(waiting)}
        for assignment in self._held | full:
            self._hold(assignment.key, self._first_unfinished(assignment) if assignment in full else inf)
        self._held = full

    # Looking.

    def size_of(self, assignment: Assignment) -> int:
        """How many bytes the finished messages of this assignment hold back."""
        waiting = self._waiting.get(assignment)
        return 0 if waiting is None else waiting.size

    def _is_full(self, waiting: _Waiting) -> bool:
        """Whether they hold back more than is left of half the memory, as ``holds_up`` limits messages in flight."""
        return waiting.size > 0 and waiting.size >= self._memory.half_bytes - self.size

    def count_of(self, assignment: Assignment) -> int:
        """How many of its messages are finished, and in no transaction yet."""
        waiting = self._waiting.get(assignment)
        return 0 if waiting is None else len(waiting.finished)

    def _first_unfinished(self, assignment: Assignment) -> float:
        """The offset of its first message in flight that is not finished; inf: there is none."""
        waiting = self._waiting.get(assignment)
        finished = {} if waiting is None else waiting.finished
        block = None if waiting is None or waiting.block is None else waiting.block.run
        for run in (run for _, run in sorted(assignment.tracker.runs.items()) if run is not block):
            for message, is_done in zip(run.messages, run.marks, strict=True):
                if not is_done and offset_of(message) not in finished:
                    return offset_of(message)
        return inf

    def has(self, assignment: Assignment, offset: int) -> bool:
        """Whether this message is finished, and its transaction not committed."""
        if (waiting := self._waiting.get(assignment)) is None:
            return False
        block = waiting.block
        return offset in waiting.finished or (block is not None and block.run.first <= offset <= block.run.last)

    def waits_for_buffered(self, assignment: Assignment) -> bool:
        """Whether something finished waits for a message that was put back: that one must be handed out."""
        waiting, first = self._waiting.get(assignment), assignment.buffer.first
        return waiting is not None and first is not None and any(offset > first for offset in waiting.finished)


def _is_in_flight(tracker: Tracker, message: Message) -> bool:
    """Whether this very message is in flight."""
    run = tracker.run_at(offset_of(message))
    index = None if run is None else run.index(offset_of(message))
    return run is not None and index is not None and run.messages[index] is message and not run.marks[index]


def _ready(tracker: Tracker, finished: Container[int], most: int) -> list[Message]:
    """The next messages without a gap, at most this many, of those whose offsets are finished."""
    found: list[Message] = []
    following = tracker.done.stable + 1
    for _, run in sorted(tracker.runs.items()):
        if run.covers_from > following:
            following = tracker.done.intervals.end_of_run(following - 1) + 1
        if run.covers_from > following:
            break
        for message, is_done in zip(run.messages, run.marks, strict=True):
            if not is_done:
                if len(found) == most or offset_of(message) not in finished:
                    return found
                found.append(message)
        following = run.last + 1
    return found


def _carved(assignment: Assignment, ready: list[Message]) -> Run:
    """Make one run of these messages, the first in flight: they stay so, and are done together."""
    tracker, last = assignment.tracker, offset_of(ready[-1])
    runs = [run for first, run in sorted(tracker.runs.items()) if first <= last]
    for run in runs:
        tracker.split(run, ready)
    block = RunOf(assignment, ready, runs[0].covers_from, False, 0.0)
    block.into_lanes()
    tracker.hand_out(block)
    return block


#: A message in flight that this many later ones wait for is logged as open: one hole, and not a gap for each.
BLOCKED = 1_000


class InLanes:
    """One consumer's side of its lanes. All methods are called under the shell's lock."""

    def __init__(
        self,
        consumer: Mover,
        put_back: Callable[[Assignment, list[Message], int], None],
        room: Callable[..., int],
        memory: InFlight,
    ) -> None:
        """put_back: hands messages out again; the first one covers from this offset on.

        room: how many more messages may be in flight; with ``exactly=True`` it counts, else the result may be too low.
        """
        self._consumer = consumer
        self._put_back = put_back
        self._room = room
        self._memory = memory
        #: Messages that wait for a transaction, if the run has transactions.
        self.purgatory: Purgatory = Purgatory(consumer, put_back, memory, self._hold)
        #: Those of the run with many handlers; before the first one none is open.
        self.lanes: Lanes = Lanes("key", nullcontext(), [], 0.0)
        #: Whether there ever was one: a message of a loop passes no lanes.
        self.are_used: bool = False
        #: The keys that keep a loop busy, while there is no such run.
        self.loops: LoopKeys = LoopKeys()
        #: Partitions whose progress waits for one message, at the last check. Replaced, never changed.
        self.held_back: tuple[HeldBack, ...] = ()

    @property
    def is_active(self) -> bool:
        """Whether messages are spread over lanes at present."""
        return not self._have_ended()

    @given
    def open(self, lanes: Lanes) -> None:
        """A run with many handlers begins."""
        self.lanes, self.are_used = lanes, True

    @given
    def note(self, found: tuple[HeldBack, ...]) -> frozenset[Key]:
        """Store which partitions' progress waits for one message. Returns those that hand out nothing more."""
        self.held_back = found = tuple(self._with_finished(one) for one in found)
        assignments = (self._consumer.assignments.get((one.topic, one.partition)) for one in found)
        return frozenset(x.key for x in assignments if x is not None and self.holds_up(x))

    def _with_finished(self, one: HeldBack) -> HeldBack:
        assignment = self._consumer.assignments.get((one.topic, one.partition))
        if assignment is None:
            return one
        count, size = self.purgatory.count_of(assignment), self.purgatory.size_of(assignment)
        return one._replace(in_hand=assignment.tracker.in_hand, finished=count, finished_bytes=size)

    def _hold(self, key: Key, up_to: float) -> None:
        self.lanes.hold(key, up_to)

    def spread(self, run: Run, wary: Wary | None = None, now: float = 0.0) -> list[Lane]:
        """Spread a run that was handed out over lanes. Returns the lanes that became ready."""
        opened, messages = run.assignment.open, run.into_lanes()
        # Only its own: of what waits, the log may have the next try, which would count twice.
        logged = {} if opened is None or not opened.tried else opened.tried
        tried = {offset: logged[offset] for offset in map(offset_of, messages) if offset in logged} if logged else {}
        if wary is not None:
            tried |= wary.tried
            messages = [message for message in messages if offset_of(message) not in wary.crashed]
            self.lanes.watch(run.assignment, wary.tried, wary.alone)
        return self.lanes.put(run.assignment, messages, tried, run.token, self._due_times(run, now))

    def _due_times(self, run: Run, now: float) -> dict[int, float] | None:
        """When (own clock, ms) messages of a run may be tried, of those that wait for their time."""
        opened = run.assignment.open
        if opened is None or not opened.tried:  # as for nearly all runs
            return None
        found: dict[int, float] = {}
        log_time = self._consumer.source.view.log_time(run.assignment.lease.cp, now)
        for offset in map(offset_of, run.messages):
            if (until := waits_until(opened, offset)) is not None and until > log_time:
                found[offset] = now + until - log_time
        return found

    # What workers change without the shell's lock.

    @reading
    def _have_ended(self) -> bool:
        return self.lanes.is_ended

    @property
    @reading
    def are_all_failing(self) -> bool:
        """Whether nothing succeeds: tries begin one at a time."""
        return self.lanes.pace_ms is not None

    @reading
    def hashes(self, messages: Sequence[Message]) -> list[int]:
        """Where messages lie among the key hashes of their partition."""
        return [hash_of(message) for message in messages]

    @reading
    def _dropped(self) -> list[tuple[Assignment, Message]] | None:
        """Messages that failed after their assignments had ended; None: since the last call no try has failed."""
        found: list[tuple[Assignment, Message]] = []
        if not self.lanes.has_returned:
            return None
        self.lanes.has_returned = self.lanes.has_waits = False
        while self.lanes.dropped:
            found.append(self.lanes.dropped.popleft())
        return found

    # Effects of the above, under the shell's lock.

    @property
    def is_durable(self) -> bool:
        """Whether tries are logged (U1)."""
        return self.lanes.is_durable and self._consumer.handles_open

    def tries(self, assignment: Assignment, *, ends: bool = False) -> list[Try]:
        """Tries of a partition that are to be logged. ends: its lease ends in order; those under way do not count."""
        if not self.is_durable:
            return []
        found = [Try(*each) for each in self.lanes.tries(assignment, assignment.tracker.blocking(BLOCKED), ends)]
        return [each for each in found if each.attempts or is_mine(assignment.opened, each.offset)]

    def recall(self, assignment: Assignment, *, keep: bool) -> None:
        """Take back what waits in lanes: it is no longer in flight. keep: it is handed out again."""
        tracker = assignment.tracker
        if keep and (tries := self.tries(assignment)):
            assignment.opened.log_tries(tries)
        waiting = self.lanes.recall(assignment)
        if assignment.open is not None and take_back(assignment.open, waiting) and keep:
            assignment.wary = None  # if they come again here, their tries are logged again
        for message in [x for x in waiting if (run := tracker.run_at(offset_of(x))) is not None and run.is_open]:
            waiting.remove(message)
            self._split(assignment, [message], keep=keep)
        place = 0
        while place < len(waiting):
            run = tracker.run_at(offset_of(waiting[place]))
            end = place + 1 if run is None else max(place + 1, bisect_right(waiting, run.last, key=offset_of))
            self._split(assignment, waiting[place:end], keep=keep)
            place = end
        if keep:
            self.purgatory.cut(assignment)
        else:
            self.purgatory.drop(assignment)

    def _split(self, assignment: Assignment, back: list[Message], *, keep: bool) -> None:
        """Take back these messages of one run."""
        run = assignment.tracker.run_at(offset_of(back[0]))
        for messages, covers_from in () if run is None else assignment.tracker.split(run, back):
            if keep:
                self._put_back(assignment, messages, covers_from)

    @given
    def returned(self, now: float) -> None:
        """Take back messages whose try has failed if their partition is being released: they are not retried here."""
        if (dropped := self._dropped()) is None:
            return
        for assignment, message in dropped:
            run = assignment.tracker.run_at(offset_of(message)) if self._consumer.knows(assignment) else None
            if run is not None:
                assignment.tracker.split(run, [message])
        for assignment in [x for x in self._consumer.assignments.values() if x.stage is Stage.REVOKING]:
            self.recall(assignment, keep=True)
            self._consumer.revocation.try_finish(assignment, now)
        if (checkpoints := self._consumer.source.checkpoints) is not None:
            checkpoints.came_back(None, now)

    def oldest(self, assignment: Assignment, now: float) -> float | None:
        """Since when (ms, own clock) a handler or thread has had a message of this partition; None: none has."""
        since, taken = self.lanes.oldest(assignment), None if self.is_active else assignment.tracker.oldest_in_hand(now)
        return taken if since is None else since if taken is None else min(since, taken)

    def share(self, assignment: Assignment, wanted: int) -> int:
        """How many more messages a partition may have in flight: until it has as many as are left for all others."""
        taken = self._taken(assignment)
        share = (self._room() - taken) // 2
        return share if share >= wanted else (self._room(exactly=True) - taken) // 2

    def _taken(self, assignment: Assignment) -> int:
        """The memory that a partition takes, as a number of messages: those in flight, and what they hold back."""
        return assignment.tracker.in_hand + self._memory.messages_in(self.purgatory.size_of(assignment))

    def holds_up(self, assignment: Assignment) -> bool:
        """Whether a partition hands out nothing more until some of its messages in flight have ended.

        Each message in flight may become a gap, and the log keeps a limited number of gaps. Besides, a partition may
        have as many in flight as there is room left for all others: one that waits for a stuck message takes at most
        half of the memory, two take a third each (the dynamic threshold of Choudhury and Hahne, 1998).
        """
        in_hand = assignment.tracker.in_hand
        if self.lanes.most_waiting is not None and self.lanes.are_enough(assignment.key):
            return True
        if not self.is_active or in_hand == 0 or self.purgatory.waits_for_buffered(assignment):
            return False
        most, taken = min(MAX_IN_HAND_MESSAGES, assignment.lease.most_intervals - 1), self._taken(assignment)
        return in_hand >= most or (taken >= self._room() and taken >= self._room(exactly=True))
