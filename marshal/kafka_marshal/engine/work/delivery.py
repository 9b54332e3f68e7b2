"""Handing messages out, and hearing that they are done: the part of a consumer that users' threads drive.

At least once: a run is in hand until it is done; what is done travels with the beats (C14).
At most once: a batch is first granted by the log (C12), then handed out message by message or whole; a granted
message is handed out or reported, never repeated (C13).
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from math import inf
from typing import TYPE_CHECKING

from kafka_marshal.engine.work.assignment import Assignment, Grant, Stage
from kafka_marshal.engine.work.tracker import Run, offset_of
from kafka_marshal.ports import Message
from rationalizer import ClaimingMessages, codes

if TYPE_CHECKING:
    from kafka_marshal.engine.work.consumer import ConsumerEngine

__all__ = ["Delivery"]

Key = tuple[str, int]


class Delivery:
    """The hand-out side of one consumer. All methods are called under the shell's lock."""

    def __init__(self, consumer: ConsumerEngine, batch_size: int) -> None:
        self._consumer = consumer
        self._batch_size = batch_size
        #: Assignments in the order in which they get their next turn: a member may have thousands.
        self._turns: OrderedDict[Assignment, None] = OrderedDict()
        #: At least once: so many messages may be in hand, and one of each partition in any case.
        self.most_in_hand = sys.maxsize
        #: No fewer than are in hand: counting them takes a look at each assignment.
        self._in_hand_at_most = 0
        #: The granted run being handed out (at most once).
        self.granted: Run | None = None
        #: Granted runs of partitions that the user holds back, in order; what is left of them is recalled.
        self._held_back: list[Run] = []
        #: Granted runs that have ended while a thread had a message that it had not handed out yet.
        self._undecided: list[tuple[Run, set[int]]] = []
        #: Whose ClaimingMessages is under way, or answered and not collected; one at a time.
        self.proposed: Assignment | None = None
        #: What was granted and never handed out, lost to everybody: (topic, partition, first, last) (C13).
        self.unprocessed: list[tuple[str, int, int, int]] = []
        #: Calls of done() for messages of a lease that ended, or done before; they commit nothing.
        self.ignored_done: Counter[Key] = Counter()
        #: Whether the user has ever said of anything that it is done; and how many messages it has dropped until then.
        self.is_done_said = False
        self.dropped = 0
        #: Grants given up that the log has not accepted, and may yet: (key, epoch, first, last offset).
        self._given_up: list[tuple[Key, int, int, int]] = []
        #: Of these, what ``abandon`` gave up before the log answered: (key, epoch, last offset).
        self.awaited: set[tuple[Key, int, int]] = set()
        #: Assignments that an operator took away while something of them was in hand, and when (C18).
        self.evicted: list[tuple[Assignment, float]] = []
        #: A handler took too long, and no user's thread was heard of since; see is_hung().
        self._overdue = False
        self._heard_at = 0.0

    def fetched(self, key: Key, messages: list[Message]) -> None:
        """Consecutive messages of one partition came from the reader."""
        assignment = self._consumer.assignments.get(key)
        if assignment is not None and assignment.stage in (Stage.ASSIGNING, Stage.ACTIVE):
            assignment.put(messages)
            self._turns.setdefault(assignment)

    def ready(self, now: float) -> bool:
        """Is there anything to hand out without another fetch? A user's thread asks."""
        self._heard(now)
        waiting = self.granted is not None or any(not run.assignment.user_paused for run in self._held_back)
        return waiting or any(True for _ in self._open(now))

    def fullest(self, now: float) -> int:
        """Messages that can be handed out now from one partition, at most. A user's thread asks."""
        self._heard(now)
        return max((x.buffered for x in self._open(now)), default=0)

    def _open(self, now: float) -> Iterator[Assignment]:
        """Those of which something can be handed out now, in their turn."""
        is_full = self._room_in_hand() <= 0
        return (x for x in self._turns if x.can_hand_out(now) and not (is_full and x.tracker.in_hand))

    def _room_in_hand(self) -> int:
        if self._in_hand_at_most >= self.most_in_hand:
            self._in_hand_at_most = self.in_hand(self._consumer.assignments.values())
        return self.most_in_hand - self._in_hand_at_most

    @property
    def is_full(self) -> bool:
        """Whether no more is handed out before something that is in hand is done, though there is more."""
        return self._room_in_hand() <= 0 and any(x.buffered and x.tracker.in_hand for x in self._turns)

    @property
    def buffered(self) -> int:
        """Messages that were fetched and not handed out, of all partitions."""
        return sum(x.buffered for x in self._turns)

    @property
    def is_waiting(self) -> bool:
        """Is there anything that was fetched and not handed out, whether or not it may be handed out now (T4, T5)?"""
        return any(x.buffered and not x.over and not x.user_paused for x in self._turns)

    def _heard(self, now: float) -> None:
        """A user's thread was here."""
        self._heard_at = now
        if self._overdue:
            self._overdue = False
            self._consumer.placement.dirty = True

    def overdue(self) -> None:
        """A handler took too long, or what it has in hand was lost: from now on it has to show that it lives."""
        self._overdue = True

    def taken_away(self, assignment: Assignment, now: float) -> None:
        """Its lease was taken from us: nothing is claimed until what is in hand of it has come back (C18)."""
        if not self._consumer.at_most_once:
            self.recall(assignment, keep=False)
        if assignment.tracker.runs:
            self.evicted.append((assignment, now))

    def has_returned(self) -> bool:
        """Whether nothing that was taken away is in hand; where that can't be known, whether a thread came back."""
        is_told = not self._consumer.at_most_once and self._consumer.ranges is None
        self.evicted = [
            (assignment, since)
            for assignment, since in self.evicted
            if (bool(assignment.tracker.runs) if is_told else self._heard_at <= since)
        ]
        return not self.evicted

    def is_hung(self, now: float, handler_timeout_ms: float) -> bool:
        """Does a handler hang (``overdue``), and was no thread of the user's heard of for as long as one may take?"""
        if not self._overdue or now < self._heard_at + handler_timeout_ms:
            return False
        seen = (x.tracker.last_moved for x in self._consumer.assignments.values())
        return now >= max(seen, default=0.0) + handler_timeout_ms

    def _next(self, now: float) -> Assignment | None:
        self._heard(now)
        for empty in [x for x in self._turns if not x.buffered or x.over]:
            del self._turns[empty]
        assignment = next(self._open(now), None)
        if assignment is not None:
            self._turns.move_to_end(assignment)
        return assignment

    def next_run(self, max_messages: int, iterating: bool, now: float, *, shared: bool = False) -> Run | None:
        """At least once: the next messages of one partition, in hand from here on; None: nothing to hand out.

        shared: threads take them from ``walk``, one by one; else, but for iterating, they are handed out together.
        """
        assignment = self._next(now)
        if assignment is None:
            return None
        run = assignment.take(max(1, min(max_messages, self._room_in_hand())), iterating, now)
        self._in_hand_at_most += run.size
        assignment.tracker.hand_out(run)
        if not (iterating or shared):
            run.take(run.size)
        return run

    def recall(self, assignment: Assignment, *, keep: bool = True) -> bool:
        """At least once: what was to be taken by threads from explicit runs, and was not, is not in hand any more.

        keep: it is handed out again, and so is what an exception kept from leaving the library. Whether nothing is
        between a run and the library's door any more.
        """
        settled = True
        for run in [run for run in assignment.tracker.runs.values() if run.is_marked]:
            back = [*run.recall(), *run.astray()]
            settled = settled and len(back) - len(run.recalled) >= run.handed_out - run.left
            for messages, covers_from in assignment.tracker.split(run, back):
                if keep:
                    self._put_back(assignment, messages, covers_from)
        return settled

    def reclaim(self, before: float, now: float) -> None:
        """At least once: what was handed out before that time and the user has dropped without done comes again.

        A cancelled task drops a message that it never saw; nobody can say any more that such a one is done.
        """
        evicted = [assignment for assignment, _ in self.evicted]
        for assignment in [*(x for x in self._consumer.assignments.values() if x.tracker.runs), *evicted]:
            for run in [run for run in assignment.tracker.runs.values() if run.is_marked and not run.has_left]:
                dropped = run.dropped(before)
                self.dropped += len(dropped)
                for messages, covers_from in assignment.tracker.split(run, dropped):
                    if assignment.stage is not Stage.REVOKING and not assignment.over:
                        self._put_back(assignment, messages, covers_from)
            self._consumer.try_finish(assignment, now)

    def undo_run(self, run: Run, now: float) -> None:
        """A run that was on its way to a thread, and that no thread got: it is handed out again."""
        assignment = run.assignment
        if self._consumer.at_most_once or assignment.tracker.runs.get(run.first) is not run:
            return
        if run.iterating:
            self.leave_run(run, now)
            return
        for messages, covers_from in assignment.tracker.split(run, run.messages):
            if not assignment.over and assignment.stage is not Stage.REVOKING:
                self._put_back(assignment, messages, covers_from)
        self._consumer.try_finish(assignment, now)

    def _put_back(self, assignment: Assignment, messages: list[Message], covers_from: int) -> None:
        assignment.put_back(messages, covers_from)
        if assignment not in self._turns:
            self._turns[assignment] = None
            self._turns.move_to_end(assignment, last=False)

    def propose(self, now: float) -> Assignment | None:
        """At most once: claim the next batch of one partition (C12), unless one is claimed already.

        Whose answer is to be waited for; None: nothing to claim.
        """
        if self.proposed is not None:
            return self.proposed
        assignment = self._next(now)
        if assignment is None:
            return None
        run = assignment.take(self._batch_size, False, now)
        assignment.tracker.hand_out(run)
        assignment.grant = Grant(run, run.last, now)
        assignment.consumer.look_after(assignment)
        self.proposed = assignment
        self.send_grant(assignment, now)
        return assignment

    def send_grant(self, assignment: Assignment, now: float) -> None:
        """Append (once more) the ClaimingMessages under way; any accepted copy counts (C17)."""
        grant = assignment.grant
        if grant is not None:
            grant.sent_at = now
            claim = ClaimingMessages(*self._consumer.ids, *assignment.key, assignment.epoch, grant.last_offset)
            self._consumer.append(assignment, claim)

    def grant_applied(self, assignment: Assignment, last_offset: int, accepted: bool, code: str, now: float) -> None:
        """Our replica applied a ClaimingMessages of ours.

        STALE and PAUSED pass: the same proposal is sent again, for another one must not be made while copies of this
        one may be under way, unless the assignment is being let go.
        """
        grant = assignment.grant
        if grant is None or grant.last_offset != last_offset:
            self.answered_late(assignment.key, assignment.epoch, last_offset, accepted)
        elif accepted:
            grant.accepted = True
        elif code not in (codes.STALE, codes.PAUSED) or assignment.stage is Stage.REVOKING:
            grant.accepted = grant.accepted or False
        if accepted and assignment.lease.held:
            self._consumer.beat(assignment, last_offset, now)

    def answered_late(self, key: Key, epoch: int, last_offset: int, accepted: bool) -> None:
        """Our replica applied a ClaimingMessages that nobody waits for any more."""
        self.awaited.discard((key, epoch, last_offset))
        for entry in [x for x in self._given_up if x[0] == key and x[1] == epoch and x[3] == last_offset and accepted]:
            self._given_up.remove(entry)
            self._report(key, entry[2], last_offset)

    def give_up(self, assignment: Assignment, now: float) -> None:
        """Its lease is over, or being let go at once: what is granted and not handed out yet, nobody will get (C13)."""
        self._give_up_proposal(assignment)
        for run in self._granted_of(assignment):
            self._finish(run, now)

    def _give_up_proposal(self, assignment: Assignment) -> Grant | None:
        grant = self._end_proposal(assignment)
        if grant is not None and grant.accepted:
            self._report(assignment.key, grant.run.first, grant.last_offset)
        elif grant is not None:
            self._remember(assignment, grant)
        return grant

    def _granted_of(self, assignment: Assignment) -> list[Run]:
        runs = [self.granted, *self._held_back]
        return [run for run in runs if run is not None and run.assignment is assignment]

    def _end_proposal(self, assignment: Assignment) -> Grant | None:
        if self.proposed is assignment:
            self.proposed = None
        grant, assignment.grant = assignment.grant, None
        return grant

    def _remember(self, assignment: Assignment, grant: Grant) -> None:
        entry = (assignment.key, assignment.epoch, grant.run.first, grant.last_offset)
        self._given_up = [x for x in self._given_up if x[0] != assignment.key]  # those of older epochs are settled
        self._given_up.append(entry)

    def collect(self, assignment: Assignment, now: float) -> Run | None:
        """The granted run, to be handed out; None: it was refused (whoever reads on gets it), or the lease is over."""
        grant = self._end_proposal(assignment)
        if grant is None:
            return None
        if grant.accepted and (assignment.user_paused or self.granted is not None):
            self._put_aside(grant.run)  # another thread's comes first
            return grant.run
        if grant.accepted:
            self.granted = grant.run
            return grant.run
        assignment.tracker.throw_back(grant.run)
        self._remember(assignment, grant)
        self._consumer.reread(assignment)
        self._consumer.try_finish(assignment, now)
        return None

    def waited_too_long(self, key: Key, messages: list[Message]) -> None:
        """Granted messages that waited for others to be handed out with, and whose lease ended meanwhile (T4)."""
        self._report(key, offset_of(messages[0]), offset_of(messages[-1]))

    def _report(self, key: Key, first: int, last: int) -> None:
        """Granted messages that nobody will get (C13)."""
        topic, partition = key
        self.unprocessed.append((topic, partition, first, last))
        self._consumer.warn(
            f"{topic} [{partition}]: offsets {first} to {last} were granted and not handed out; at most once means "
            "that nobody will get them"
        )

    def hold_back(self, assignment: Assignment) -> None:
        """The user wants nothing of this partition until ``resume``: what it has in hand ahead is handed out then."""
        assignment.user_paused = True
        for run in assignment.tracker.runs.values():
            if run.iterating:
                run.recall()
        if not self._consumer.at_most_once:
            self.recall(assignment)
        if self.granted is not None and self.granted.assignment is assignment:
            self.granted.recall()
            self._put_aside(self.granted)
            self.granted = None

    def _put_aside(self, run: Run) -> None:
        run.since = inf  # nobody handles it, so nobody takes long
        self._held_back.append(run)

    def take_up(self, now: float) -> None:
        """At most once: go on with a granted run that was held back, and is not any more."""
        run = next((run for run in self._held_back if not run.assignment.user_paused), None)
        if run is not None and self.granted is None:
            self._held_back.remove(run)
            run.resume(run.astray())
            self.granted, run.since = run, now

    @property
    def granted_next(self) -> int:
        """How many messages of the granted run were handed out."""
        return 0 if self.granted is None else self.granted.handed_out

    @property
    def is_handing_out(self) -> bool:
        """Whether a granted run is handed out now."""
        return self.granted is not None

    def has_granted(self) -> bool:
        """Whether the granted run has messages left; what an exception kept from leaving the library is among them."""
        run = self.granted
        if run is None:
            return False
        if again := run.astray():
            run.resume(again)
        elif run.recalled:
            run.resume()
        return run.handed_out < len(run.messages)

    def next_granted(self, run: Run, max_messages: int, now: float) -> list[Message]:
        """The next messages of the granted run; none, if it has ended, or is held back, in this very moment."""
        if self.granted is not run:
            return []
        run.since = now
        return run.take(max_messages)

    def finish_granted(self, now: float) -> None:
        """The granted run was handed out to its end, or as far as it ever will be."""
        if self.granted is not None:
            self._finish(self.granted, now)

    def abandon(self, now: float) -> None:
        """Nothing more is handed out, though leases are kept; of ``awaited`` the log may grant more yet."""
        self.finish_granted(now)
        for run in list(self._held_back):
            self._finish(run, now)
        for assignment in self._consumer.assignments.values():
            grant = self._give_up_proposal(assignment)
            if grant is not None and grant.accepted is None:
                self.awaited.add((assignment.key, assignment.epoch, grant.last_offset))

    def _finish(self, run: Run, now: float) -> None:
        if run is self.granted:
            self.granted = None
        else:
            self._held_back.remove(run)
        self._undecided.append((run, set()))
        self.decide()
        run.assignment.tracker.mark_run(run)
        if self.proposed is not None and self.proposed.grant is not None:
            self.proposed.grant.run.since = now  # claimed ahead: from here on somebody is to handle it
        self._consumer.try_finish(run.assignment, now)

    def decide(self, *, final: bool = False) -> None:
        """Of granted runs that have ended: report what no thread hands out any more (final: nor will; C13)."""
        withheld: dict[int, tuple[list[int], list[int]]] = {}
        for entry in list(self._undecided):
            run, told = entry
            if final:
                run.withhold(withheld)
            lost = [*run.recall(), *run.astray(final=final)]
            offsets = sorted({offset_of(message) for message in lost} - told)
            told.update(offsets)
            at = 0
            while at < len(offsets):  # runs of offsets that follow each other in the run
                first, place = offsets[at], run.index(offsets[at]) or 0
                while at + 1 < len(offsets) and run.index(offsets[at + 1]) == place + 1:
                    at, place = at + 1, place + 1
                self._report(run.assignment.key, first, offsets[at])
                at += 1
            out = sum(min(len(taken.messages), taken.out[0]) for taken in run.taken)
            if final or out + len(told) >= len(run.messages):
                self._undecided.remove(entry)

    def done(self, message: Message, now: float) -> None:
        """A message handed out by poll, consume or batches is done."""
        self._heard(now)
        self.is_done_said = True
        key = (message.topic() or "", -1 if (partition := message.partition()) is None else partition)
        assignment = self._consumer.assignments.get(key)
        if assignment is None or assignment.over or not assignment.tracker.mark(message):
            self.ignored_done[key] += 1
            for evicted, _ in self.evicted:
                evicted.tracker.mark(message)
            return
        if assignment.stage is Stage.REVOKING:
            self._consumer.try_finish(assignment, now)

    def done_run(self, run: Run, now: float) -> None:
        """A whole run (a batch) is done."""
        self._heard(now)
        self.is_done_said = True
        assignment = run.assignment
        if not assignment.tracker.mark_run(run) or assignment.over:
            self.ignored_done[assignment.key] += run.size
            return
        if assignment.stage is Stage.REVOKING:
            self._consumer.try_finish(assignment, now)

    def leave_run(self, run: Run, now: float) -> None:
        """A thread leaves its run, iterating, or none of it handed out; the rest comes again, here or elsewhere."""
        assignment = run.assignment
        covers_from = run.covered(run.cursor, run.cursor)[0] if run.cursor < len(run.messages) else 0
        not_committed = run.cursor - run.done_count
        rest = assignment.tracker.close_run(run)
        self._heard(now)
        if assignment.over:
            self.ignored_done[assignment.key] += not_committed
        elif assignment.stage is Stage.REVOKING:
            self._consumer.try_finish(assignment, now)
        elif rest:
            self._put_back(assignment, rest, covers_from)

    def in_hand(self, assignments: Iterable[Assignment]) -> int:
        """Messages handed out and not done."""
        total = 0
        for assignment in assignments:
            assignment.tracker.follow()
            total += assignment.tracker.in_hand
        return total
