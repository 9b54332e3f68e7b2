"""Hands messages out and records that they are done: the part of a consumer that users' threads drive.

At least once: a run is in flight until it is done; beats report what is done.
At most once: the log first grants a batch, then it is handed out whole or message by message. A granted message is
handed out or reported as lost, never repeated.

A batch that a loop skips without ``done()`` looks like one that a thread still works on: the loop's variable refers to
it until the next batch comes, which may be never. So what was taken away with messages in flight is reported.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from kafka_marshal.engine.effects import Warn
from kafka_marshal.engine.figures import MessageTotals
from kafka_marshal.engine.inputs import given
from kafka_marshal.engine.settings import MAX_IN_HAND_MESSAGES, TURN_MS
from kafka_marshal.engine.work.assignment import Assignment, Mover, Run, Stage
from kafka_marshal.engine.work.grants import Grants
from kafka_marshal.engine.work.in_lanes import Finished, InLanes
from kafka_marshal.engine.work.lane import HeldBack, LeftBehind, lasting
from kafka_marshal.engine.work.open_messages import waits_until
from kafka_marshal.engine.work.run import first_in_hand, offset_of
from kafka_marshal.engine.work.stuck import SAID_EVERY_MS
from kafka_marshal.engine.work.tracker import InFlight
from kafka_marshal.engine.work.tracker import room as room_beyond
from kafka_marshal.ports import Message
from kafka_marshal.types import Key

#: What to do, for people.
HANDLER = "Find out what its handler waits for, or restart the process"
THREAD = "Find out what the thread that has it waits for: its next call ends this"
LOOP = (
    "Call done(), which commits nothing any more, or drop the batch: the variable of a loop, as in `for batch in "
    "consumer.batches():`, keeps one that was skipped until the next one comes. If a handler hangs, find out what it "
    "waits for, or restart the process"
)

#: Reported if messages have not come back after this long (ms). Most handlers that work at the moment of a loss return
#: before; ``kafka-marshal check`` calls a partition stuck after as long.
OWED_AFTER_MS = 10_000.0


class _Waits(NamedTuple):
    """A partition that was taken away, and waits for messages of before."""

    key: Key
    #: When it was taken away, or when that was first seen (own clock, ms).
    since: float
    #: The first of the messages, if that is known, or where the partition is to continue.
    offset: int
    size: int
    #: What the program has of it, and what to do, for people.
    what: str
    remedy: str


class Owed:
    """The messages of one consumer that were taken away and have not come back (C18, G20, X17)."""

    def __init__(self, consumer: Mover, in_lanes: InLanes, heard_at: Callable[[], float]) -> None:
        """heard_at: when a user's thread last called (own clock, ms)."""
        self._consumer = consumer
        self._in_lanes = in_lanes
        self._heard_at = heard_at
        #: Whether it is known which messages of an assignment are in flight: each is reported as done.
        self._is_known = not (consumer.at_most_once or consumer.settings.ranges)
        #: Assignments that were taken away with messages in flight, and when. Replaced, or added to.
        self.found: list[tuple[Assignment, float]] = []
        #: Since when a piece to be restored waits for a handler that was left behind (``handler_timeout``). Replaced.
        self._left_behind: dict[Key, float] = {}
        #: What was reported: since when, and when last.
        self._reported: dict[Key, tuple[float, float]] = {}

    def __bool__(self) -> bool:
        return bool(self.found)

    def __iter__(self) -> Iterator[Assignment]:
        """The assignments."""
        return iter([assignment for assignment, _ in self.found])

    def has_returned(self) -> bool:
        """Whether no message that was taken away is in flight; if that can't be known, whether a thread has called."""
        self.found = [(assignment, since) for assignment, since in self.found if self._is_out(assignment, since)]
        return not self.found

    def came_back(self, key: Key, offset: int) -> None:
        """A message that was taken away is not to be handled any more: its last try has failed."""
        for assignment in self:
            if assignment.key == key:
                assignment.tracker.set_aside(offset)

    def _is_out(self, assignment: Assignment, since: float) -> bool:
        return bool(assignment.tracker.runs) if self._is_known else self._heard_at() <= since

    def look(self, now: float) -> None:
        """Report what is overdue, and when nothing waits for it any more: every heartbeat interval."""
        waiting = {key: now for key in self._consumer.assignments if self._is_to_be_restored(key)}
        waiting = {key: now for key in waiting if self._in_lanes.lanes.is_running(key)}
        self._left_behind = waiting | {key: at for key, at in self._left_behind.items() if key in waiting}
        overdue = {each.key: each for each in self._overdue(now)}
        for key in [key for key in self._reported if key not in overdue]:
            waited = lasting(now - self._reported.pop(key)[0])
            self._say(key, f"nothing waits any more for what was taken away, after {waited}")
        for key, each in overdue.items():
            if key not in self._reported or now >= self._reported[key][1] + SAID_EVERY_MS:
                self._reported[key] = each.since, now
                self._say(
                    key,
                    f"was taken away {lasting(now - each.since)} ago, and the program still has {each.what}. Before "
                    f"that has come back, {self._waits}. Nothing is lost: it is delivered again, here or elsewhere. "
                    f"{each.remedy}",
                )

    def _say(self, key: Key, text: str) -> None:
        self._consumer.outbox.add(Warn(f"{key[0]} [{key[1]}]: {text}"))

    def held_back(self, now: float) -> list[HeldBack]:
        """What is overdue, for display (any thread; no lock)."""
        why = "what the program still has of before it was taken away"
        return [HeldBack(*x.key, x.offset, None, now - x.since, x.size, why=why) for x in self._overdue(now)]

    def _overdue(self, now: float) -> Iterator[_Waits]:
        is_restored = self._consumer.source.takes_checkpoints and not self._consumer.source.has_left
        for assignment, since in list(self.found):
            if now < since + OWED_AFTER_MS or not self._is_out(assignment, since):
                continue
            if not is_restored or self._is_to_be_restored(assignment.key):
                yield self._of(assignment, since)
        for key, since in self._left_behind.items():
            current = self._consumer.assignments.get(key)
            is_known = any(each.key == key for each in self)
            if current is not None and now >= since + OWED_AFTER_MS and not is_known:
                yield _Waits(key, since, current.buffer.fetch_next, 1, "a message of it", HANDLER)

    def _is_to_be_restored(self, key: Key) -> bool:
        current = self._consumer.assignments.get(key)
        return current is not None and current.stage is Stage.RESTORING

    def _of(self, assignment: Assignment, since: float) -> _Waits:
        first, count = first_in_hand(assignment.tracker.runs), assignment.tracker.in_hand
        offset = assignment.buffer.fetch_next if first is None else first[0]
        what = "messages of it" if first is None else f"{count:,} message(s) of it, from offset {offset} on"
        if not self._is_known:
            return _Waits(assignment.key, since, offset, count, what, THREAD)
        is_in_lanes = any(run.in_lanes for run in list(assignment.tracker.runs.values()))
        return _Waits(assignment.key, since, offset, count, what, HANDLER if is_in_lanes else LOOP)

    @property
    def _waits(self) -> str:
        source = self._consumer.source
        if self._consumer.settings.group is None:
            return "this consumer claims nothing"
        if source.takes_checkpoints and not source.has_left:
            return "the state of this piece is not restored here, and nothing of it is delivered"
        return "this member takes up nothing, and does not join its group again"


class Delivery:
    """The hand-out side of one consumer. All methods are called under the shell's lock."""

    def __init__(self, consumer: Mover) -> None:
        self._consumer = consumer
        #: At most once: batches that the log grants.
        self.grants: Grants = Grants(consumer, self)
        #: Assignments in the order in which they get their next turn: a member may have thousands.
        self._turns: OrderedDict[Assignment, None] = OrderedDict()
        #: Runs that threads take from one by one, or the first batch, and when their turn began.
        self._taking: list[tuple[Run, float]] = []
        #: A turn was ended early: first read what other partitions may have.
        self.is_turn_over: bool = False
        #: The memory that fetched messages and messages in flight may take.
        self.memory: InFlight = InFlight(consumer.settings.max_bytes_in_flight, at_most_once=consumer.at_most_once)
        #: Messages in lanes, if many handlers work at a time.
        self.in_lanes: InLanes = InLanes(consumer, self._put_back, self._room_in_hand, self.memory)
        #: At least the number of messages in flight: to count exactly visits each assignment.
        self._in_hand_at_most = 0
        #: Messages per partition whose done() committed nothing: their lease had ended, or they were done before.
        self.ignored_done: Counter[Key] = Counter()
        #: Counters of each partition that was ever claimed.
        self.moved: dict[Key, MessageTotals] = {}
        #: Whether the user has ever called done.
        self.is_done_said: bool = False
        #: What was taken away with messages in flight.
        self.owed: Owed = Owed(consumer, self.in_lanes, self._last_heard)
        #: A handler took too long, and no user's thread has called since; see is_hung().
        self._overdue = False
        self._heard_at = 0.0
        #: Assignments with open messages that wait for their time, in their buffers.
        self._early: dict[Assignment, None] = {}

    @given
    def fetched(self, key: Key, messages: list[Message], now: float) -> None:
        """Consecutive messages of one partition came from the reader."""
        assignment = self._consumer.assignments.get(key)
        if assignment is not None and assignment.stage in (Stage.ASSIGNING, Stage.ACTIVE):
            assignment.tracker.moved.fetched += len(messages)
            if not assignment.told.has_come:
                self._consumer.positions.marks.come(assignment)
            if not assignment.buffer.size:
                assignment.buffer.came_at = now
            assignment.put(messages)
            self._turns.setdefault(assignment)
            if assignment.buffer.early:
                self._early[assignment] = None

    def fullest(self, now: float) -> int:
        """The most messages that one partition can hand out now. Called by a user's thread.

        As many as anyone may want, if it is an open message: that comes by itself, and need not wait for others.
        """
        self.heard(now)
        found = (MAX_IN_HAND_MESSAGES if x.buffer.has_open else x.buffer.size for x in self._open(now))
        return max(found, default=0)

    def _open(self, now: float) -> Iterator[Assignment]:
        """Assignments that can hand out messages now, in the order of their turns."""
        if self.in_lanes.are_used and self.in_lanes.is_active:
            return (x for x in self._turns if x.can_hand_out(now) and not self.in_lanes.holds_up(x))
        is_full = self._room_in_hand() <= 0
        return (x for x in self._turns if x.can_hand_out(now) and not (is_full and x.tracker.in_hand))

    def _room_in_hand(self, *, exactly: bool = False) -> int:
        if exactly or self._in_hand_at_most >= self.memory.most_in_hand:
            self._in_hand_at_most = self.in_hand(self._consumer.assignments.values())
        size = self.in_lanes.purgatory.size
        held_back = self.memory.messages_in(size) if size else 0
        return self.memory.most_in_hand - self._in_hand_at_most - held_back

    @property
    def is_full(self) -> bool:
        """Whether buffered messages must wait until some messages in flight are done."""
        return self._room_in_hand() <= 0 and any(x.buffer.size and x.tracker.in_hand for x in self._turns)

    @property
    def buffered(self) -> int:
        """How many messages of all partitions were fetched and not handed out."""
        return sum(x.buffer.size for x in self._turns)

    @property
    def is_waiting(self) -> bool:
        """Whether fetched messages wait to be handed out, even if the lease does not allow it right now."""
        return any(x.buffer.size and not (x.over or x.releasing or x.user_paused) for x in self._turns)

    def is_held_up(self, now: float) -> bool:
        """Whether fetched messages wait for the end of a cut, or of a barrier, and nothing else can be handed out."""
        checkpoints = self._consumer.source.checkpoints
        return checkpoints is not None and not checkpoints.is_idle and self.is_waiting and not any(self._open(now))

    @given
    def heard(self, now: float) -> None:
        """A user's thread has called."""
        self._heard_at = now
        if self._early:
            self._release_early(now)
        if self.in_lanes.are_used and self.in_lanes.is_durable:
            self._consumer.settlements.log_alone(now)
        if self._overdue:
            self._overdue = False
            self._consumer.source.look_again()

    def _release_early(self, now: float) -> None:
        """Let open messages be taken that wait for their time: in lanes they keep their keys; otherwise when due."""
        is_for_lanes = self.in_lanes.are_used and self.in_lanes.is_active
        for assignment in list(self._early):
            at = inf if is_for_lanes else self._consumer.source.view.log_time(assignment.lease.cp, now)
            buffer, before = assignment.buffer, assignment.buffer.size
            buffer.release([x for x in buffer.early if (waits_until(assignment.open, x) or 0) <= at])
            if buffer.size > before and not assignment.over:
                buffer.came_at = buffer.came_at if before else now
                self._turns.setdefault(assignment)
            if assignment.over or not buffer.early:
                del self._early[assignment]

    @property
    def left_behind(self) -> list[LeftBehind]:
        """Messages that are given to others though a handler still has them. Any thread may ask."""
        return list(self.in_lanes.lanes.left.values())

    def _last_heard(self) -> float:
        return self._heard_at

    def overdue(self) -> None:
        """A handler took too long, or lost its messages in flight: it counts as hung unless a thread calls in time."""
        self._overdue = True

    def taken_away(self, assignment: Assignment, now: float) -> None:
        """Its lease was taken away: nothing is claimed until its messages in flight have come back."""
        self.recall(assignment, keep=False)
        if assignment.tracker.runs:
            self.owed.found.append((assignment, now))

    def is_hung(self, now: float, handler_timeout_ms: float) -> bool:
        """Whether a handler hangs (``overdue``) and no user's thread has called or moved for handler_timeout_ms."""
        if not self._overdue or now < self._heard_at + handler_timeout_ms:
            return False
        seen = (x.tracker.last_moved for x in self._consumer.assignments.values())
        return now >= max(seen, default=0.0) + handler_timeout_ms

    def next_open(self, now: float) -> Assignment | None:
        """The assignment whose turn it is, of those that can hand out messages now; None: there is none."""
        self.heard(now)
        for empty in [x for x in self._turns if not x.buffer.size or x.over]:
            del self._turns[empty]
        assignment = next(self._open(now), None)
        if assignment is not None:
            self._turns.move_to_end(assignment)
        return assignment

    def next_run(self, max_messages: int, iterating: bool, now: float, *, shared: bool = False) -> Run | None:
        """At least once: the next messages of one partition, in flight from now on; None: nothing to hand out.

        shared: threads take them one by one from ``walk``, as when iterating; otherwise all are handed out together.
        """
        assignment = self.next_open(now)
        if assignment is None:
            return None
        is_spread = self.in_lanes.are_used and self.in_lanes.is_active
        room = self.in_lanes.share(assignment, max_messages) if is_spread else self._room_in_hand()
        most = min(max_messages, room, MAX_IN_HAND_MESSAGES - assignment.tracker.in_hand)
        if shared:  # each may be done before its neighbours
            most = min(most, room_beyond(assignment.tracker, assignment.lease.most_intervals))
        run = assignment.take(max(1, most), iterating, now)
        assignment.buffer.came_at = now
        self._in_hand_at_most += run.size
        assignment.tracker.hand_out(run)
        if not is_spread and self._consumer.settings.sharing is None:
            self.in_lanes.loops.began(run, now)
        if iterating or shared:
            self._taking = [(taken, began) for taken, began in self._taking if taken.has_left]
            self._taking.append((run, now))
        else:
            run.take(run.size)
            if not (self._taking or is_spread):
                self._taking.append((run, now))
        return run

    def end_turns(self, now: float) -> None:
        """End the turns of partitions with slow messages: the rest of their runs comes in their next turns."""
        self.in_lanes.loops.look(now)
        if len(self._consumer.assignments) < 2:
            return
        ended = [run for run, began in self._taking if now >= began + TURN_MS]
        self._taking = [x for x in self._taking if x[0] not in ended]
        for run in ended:
            if not run.has_left:  # a batch: what the reader has fetched ahead of others comes before theirs
                others = self._consumer.assignments.values()
                self.is_turn_over |= any(x.is_open(now) and not x.buffer.size for x in others)
                continue
            if not run.assignment.tracker.has(run):
                continue
            self.is_turn_over = True
            if run.iterating:
                run.recall()  # the loop ends, and the rest is put back
            else:
                self.recall(run.assignment)

    def recall(self, assignment: Assignment, *, keep: bool = True, lanes: bool = True) -> bool:
        """Take back the messages of explicit runs that threads have not taken, or lanes not begun.

        keep: they are handed out again, as are messages that an exception kept in the library. lanes: also those that
        wait in lanes. Returns whether all messages that threads took have left the library or come back. At most once
        nothing comes back.
        """
        settled = True
        if lanes:
            self.in_lanes.recall(assignment, keep=keep)
        for run in [run for run in assignment.tracker.runs.values() if run.is_marked]:
            back = [*run.recall(), *run.astray()]
            settled = settled and len(back) - len(run.recalled) >= run.handed_out - run.left
            for messages, covers_from in assignment.tracker.split(run, back):
                if keep:
                    self._put_back(assignment, messages, covers_from)
        return settled

    @given
    def reclaim(self, before: float, since: float, now: float) -> None:
        """At least once: messages handed out since then and before that the user dropped without done come again.

        A cancelled task drops a message that it never saw; no one can call done for it any more.
        """
        for assignment in self.owed:  # calls that collected some of its messages must not hand them out
            self.recall(assignment, keep=False)
        for assignment in [*(x for x in self._consumer.assignments.values() if x.tracker.runs), *self.owed]:
            after = -inf if assignment.releasing or assignment.over else since
            marked = [run for run in assignment.tracker.runs.values() if after < inf and run.is_marked]
            for run in [run for run in marked if not run.has_left]:
                dropped = run.dropped(before, after)
                _give_up(assignment, dropped)
                for messages, covers_from in assignment.tracker.split(run, dropped):
                    if not assignment.over:
                        self._put_back(assignment, messages, covers_from)
            self._came_back(assignment, now)

    @given
    def give_back(self, now: float) -> None:
        """Take back what waits in lanes or for a thread; it comes again, here or at another member."""
        for assignment in list(self._consumer.assignments.values()):
            self.recall(assignment, keep=not assignment.over)
            self._consumer.revocation.try_finish(assignment, now)
        self.in_lanes.note(())

    @given
    def undo_run(self, run: Run, now: float) -> None:
        """Take back a run that was meant for a thread and reached none; it is handed out again."""
        assignment = run.assignment
        if not assignment.tracker.has(run):
            return
        if run.iterating:
            self.leave_run(run, now)
            return
        for messages, covers_from in assignment.tracker.split(run, run.messages):
            if not assignment.over:
                self._put_back(assignment, messages, covers_from)
        self._came_back(assignment, now)

    def drop(self, assignment: Assignment, first: int) -> None:
        """Take back all that is in flight from this offset on; it is handed out again.

        A release waits for what handlers have: that stays in flight until they return.
        """
        kept = self.in_lanes.lanes.with_handlers(assignment) if assignment.stage is Stage.REVOKING else ()
        self.in_lanes.recall(assignment, keep=True)
        self.in_lanes.purgatory.take_back(assignment, first)
        for run in [run for run in assignment.tracker.runs.values() if run.last >= first]:
            pairs = zip(run.messages, run.marks, strict=True)
            undone = [x for x, mark in pairs if not mark and offset_of(x) >= first and offset_of(x) not in kept]
            for messages, covers_from in assignment.tracker.split(run, undone):
                self._put_back(assignment, messages, covers_from)

    def _put_back(self, assignment: Assignment, messages: list[Message], covers_from: int) -> None:
        if len(messages) == 1 and assignment.tracker.done.is_done(offset_of(messages[0])):  # it is open in the log
            is_early = waits_until(assignment.open, offset_of(messages[0])) is not None
            assignment.buffer.put_open(messages[0], covers_from, is_early=is_early)
            if is_early:
                self._early[assignment] = None
        else:
            assignment.buffer.put_back(messages, covers_from)
        if assignment not in self._turns:
            self._turns[assignment] = None
            self._turns.move_to_end(assignment, last=False)

    def hold_back(self, assignment: Assignment) -> None:
        """The user pauses this partition: messages taken up but not handed out wait until ``resume``."""
        assignment.user_paused = True
        for run in assignment.tracker.runs.values():
            if run.iterating:
                run.recall()
        self.recall(assignment)
        self.grants.hold_back(assignment)

    @given
    def done(self, messages: Iterable[Message], now: float) -> None:
        """Messages from poll, consume, batches or lanes are done. Each costs less if there are many."""
        self.heard(now)
        self.is_done_said = True
        by_key: dict[Key, list[Message]] = {}
        for message in messages:
            key = (message.topic() or "", -1 if (partition := message.partition()) is None else partition)
            by_key.setdefault(key, []).append(message)
        for key, done in by_key.items():
            assignment = self._consumer.assignments.get(key)
            is_here = assignment is not None and not assignment.over
            refused = assignment.tracker.mark(done) if assignment is not None and is_here else done
            if refused:
                self.ignored_done[key] += len(refused)
                for evicted in self.owed:
                    evicted.tracker.mark(refused)
            if assignment is not None:
                self._came_back(assignment, now)

    @given
    def finish(self, finished: Sequence[Finished], now: float) -> None:
        """Handlers have finished these messages; a transaction follows."""
        self.heard(now)
        self.is_done_said = True

        def ignore(message: Message) -> None:
            self.ignored_done[message.topic() or "", message.partition() or 0] += 1
            for evicted in self.owed:
                evicted.tracker.mark([message])

        self.in_lanes.purgatory.finish(finished, ignore, now)

    def set_aside(
        self, assignment: Assignment, offset: int, key_hash: int, attempts: int, reason: str, now: float
    ) -> bool:
        """Set a message in flight aside. Returns whether it was in flight."""
        self.heard(now)
        self.is_done_said = True
        covers_from = assignment.tracker.set_aside(offset)
        if covers_from is None:
            self.ignored_done[assignment.key] += 1
        else:
            attempts = attempts or assignment.opened.tried.get(offset, 0) + 1
            assignment.opened.park(offset, covers_from, key_hash, attempts, reason)
            self._consumer.settlements.parked(assignment, offset, attempts, reason, now)
        self._came_back(assignment, now)
        return covers_from is not None

    def skip(self, assignment: Assignment, offset: int) -> None:
        """An operator has set this message aside: no handler gets it again; one that has it may finish."""
        self.in_lanes.lanes.skip(assignment, offset)

    def admit(self, assignment: Assignment, offset: int, redriven: int | None = None) -> None:
        """The log has the try of this message that is about to begin. redriven: the tries that count, if it waits."""
        if redriven is not None:
            self.in_lanes.lanes.hasten(assignment, offset, redriven)
        else:
            self.in_lanes.lanes.admit(assignment, offset)

    @given
    def done_run(self, run: Run, now: float) -> None:
        """A whole run (a batch) is done."""
        self.in_lanes.loops.ended(run, now)
        self.heard(now)
        self.is_done_said = True
        assignment = run.assignment
        if not assignment.tracker.mark_run(run) or assignment.over:
            self.ignored_done[assignment.key] += run.size
        self._came_back(assignment, now)

    def leave_run(self, run: Run, now: float) -> None:
        """A thread leaves its run (iterating, or with nothing handed out); the rest comes again, here or elsewhere."""
        self.in_lanes.loops.ended(run, now)
        assignment = run.assignment
        not_committed = run.cursor - run.done_count
        if run.is_given_up and run.cursor < run.handed_out:
            _give_up(assignment, [run.messages[run.cursor]])
        rest = assignment.tracker.close_run(run)
        self.heard(now)
        if assignment.over:
            self.ignored_done[assignment.key] += not_committed
        elif rest:
            place = run.index(offset_of(rest[0])) or 0
            self._put_back(assignment, rest, run.covered(place, place)[0])
        self._came_back(assignment, now)

    def _came_back(self, assignment: Assignment, now: float) -> None:
        """Messages of it are no longer in flight: its release, its cut, or its restore may wait for that."""
        if assignment.open is not None and assignment.open.is_urgent:
            assignment.open.is_urgent = False
            self._consumer.settlements.send(assignment, now)
        if assignment.stage is Stage.REVOKING:
            self._consumer.revocation.try_finish(assignment, now)
        elif (checkpoints := self._consumer.source.checkpoints) is not None:
            checkpoints.came_back(assignment.key, now)

    def in_hand(self, assignments: Iterable[Assignment]) -> int:
        """How many messages of these assignments were handed out and are not done."""
        total = 0
        for assignment in assignments:
            assignment.tracker.follow()
            total += assignment.tracker.in_hand
        return total


def _give_up(assignment: Assignment, messages: Iterable[Message]) -> None:
    """Note that these were delivered, and come again though it is not known what was done with them."""
    assignment.tracker.doubt = max((assignment.tracker.doubt, *map(offset_of, messages)))


def waited_ms(delivery: Delivery, now: float) -> float:
    """For how long the message that came first of those that can be handed out has been there."""
    return max((now - x.buffer.came_at for x in delivery._open(now) if x.buffer.size), default=0.0)
