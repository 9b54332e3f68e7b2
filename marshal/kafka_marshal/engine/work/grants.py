"""At most once: batches that the log grants before they are handed out."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol

from kafka_marshal.engine.inputs import given
from kafka_marshal.engine.plane import Settles
from kafka_marshal.engine.settings import TURN_MS
from kafka_marshal.engine.work.assignment import Assignment, Grant, Mover, Run, Stage
from kafka_marshal.engine.work.in_lanes import InLanes
from kafka_marshal.engine.work.open_messages import Entries
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.types import Key
from rationalizer import codes
from rationalizer.limits import NOTHING_DONE

#: Messages of the first batch if several partitions are held: it shows how long a message takes.
FIRST_TURN = 100


class GrantedAssignment(Assignment):
    """A partition of which each batch is claimed before it is handed out: by then it is done for the log."""

    __slots__ = ()

    at_most_once = True
    is_done_early = True
    comes_again = "nobody gets it again"

    def done_through(self) -> int:
        return NOTHING_DONE if self.tracker.runs or self.grant is not None else super().done_through()

    def commit_ranges(self, now: float) -> None:
        self.tracker.follow()

    def reopen(self) -> None:
        super().reopen()
        if self.tracker.runs:
            self.buffer.go_on_at(self.tracker.open_from())
        else:  # batches whose claim was refused meanwhile are claimed again
            self.consumer.positions.begin(self)


class Turns(Protocol):
    """Decides whose turn it is."""

    @property
    def in_lanes(self) -> InLanes: ...

    def next_open(self, now: float) -> Assignment | None: ...


class Grants:
    """The grants and claims for batches of one consumer. All methods are called under the shell's lock."""

    def __init__(self, consumer: Mover, turns: Turns) -> None:
        self._consumer = consumer
        self._turns = turns
        #: The granted run being handed out.
        self.granted: Run | None = None
        #: When it was taken up, and how long each message of the previous one took (ms); None: there was none.
        self._began = 0.0
        self._pace_ms: float | None = None
        #: Granted runs that wait: the user paused their partitions, or another run comes first. In order.
        self._held_back: list[Run] = []
        #: Ended granted runs of which a thread may hold messages not yet handed out; the offsets reported as lost.
        self._undecided: list[tuple[Run, set[int]]] = []
        #: The assignment whose ClaimingMessages is under way, or answered and not collected; one at a time.
        self.proposed: Assignment | None = None
        #: Offsets granted and never handed out, lost for the group: (topic, partition, first, last) (C13).
        self.unprocessed: list[tuple[str, int, int, int]] = []
        #: Given-up grants that the log has not accepted and still may: (key, epoch, first, last offset).
        self._given_up: list[tuple[Key, int, int, int]] = []
        #: Grants that ``abandon`` gave up before the log answered: (key, epoch, last offset).
        self.awaited: set[tuple[Key, int, int]] = set()

    def propose(self, now: float) -> Assignment | None:
        """At most once: claim the next batch of one partition, unless one is claimed already.

        Returns the assignment whose answer to wait for; None: nothing to claim.
        """
        if self.proposed is not None:
            return self.proposed
        assignment = self._turns.next_open(now)
        if assignment is None:
            return None
        run = assignment.take(self._turn(), False, now)
        if self.granted is not None:
            run.since = inf  # claimed ahead: it is handled only after the granted run has ended
        assignment.tracker.hand_out(run)
        assignment.grant = Grant(run, run.last, now)
        self._consumer.schedule.look_after(assignment)
        self.proposed = assignment
        self.send(assignment, now)
        return assignment

    def _turn(self) -> int:
        """How many messages to claim: if there are other partitions, at most one turn at the pace of the last run."""
        most = self._consumer.settings.batch_size
        if len(self._consumer.assignments) < 2:
            return most
        return min(most, FIRST_TURN if self._pace_ms is None else max(1, int(TURN_MS / max(self._pace_ms, 1e-6))))

    def send(self, assignment: Assignment, now: float) -> None:
        """Append the ClaimingMessages under way, possibly again; any accepted copy counts."""
        grant = assignment.grant
        self._consumer.positions.marks.ahead(assignment, now)
        if grant is not None and grant.run.is_open:
            grant.sent_at = now
            entries = Entries(done=((grant.run.covers_from, grant.last_offset),))
            self._consumer.source.reports.settle(assignment.lease, entries, now)
        elif grant is not None:
            grant.sent_at = now
            self._consumer.source.reports.grant(assignment.lease, grant.last_offset, now)

    def applied(self, assignment: Assignment, last_offset: int, accepted: bool, code: str, now: float) -> None:
        """Our replica applied a ClaimingMessages of this member.

        STALE and PAUSED are temporary: the same proposal is sent again, because copies of it may still be under way.
        If the assignment is being released, they count as a refusal.
        """
        grant = assignment.grant
        if grant is None or grant.last_offset != last_offset:
            self.answered_late(assignment.key, assignment.epoch, last_offset, accepted)
        elif accepted:
            grant.accepted = True
        elif code not in (codes.STALE, codes.PAUSED) or assignment.stage is Stage.REVOKING:
            grant.accepted = grant.accepted or False
        if accepted and assignment.lease.held:
            self._consumer.source.reports.beat(assignment.lease, last_offset, now)

    def settled(self, assignment: Assignment, entries: Settles, answers: Sequence[str]) -> None:
        """Our replica applied a record of this member about open messages: any accepted copy grants one (U3)."""
        grant = assignment.grant
        for (_, last), code in zip(entries.done, answers, strict=False):
            if grant is None or not grant.run.is_open or grant.last_offset != last:
                self.answered_late(assignment.key, None, last, code == codes.OK)
            else:
                grant.accepted = grant.accepted or code == codes.OK

    def answered_late(self, key: Key, epoch: int | None, last_offset: int, accepted: bool) -> None:
        """Our replica applied a grant that was given up. epoch: None if the log does not name it."""

        def is_it(of: Key, under: int, last: int) -> bool:
            return (of, last) == (key, last_offset) and epoch in (None, under)

        self.awaited -= {entry for entry in self.awaited if is_it(*entry)}
        for entry in [x for x in self._given_up if accepted and is_it(x[0], x[1], x[3])]:
            self._given_up.remove(entry)
            self.report(key, entry[2], last_offset)

    def give_up(self, assignment: Assignment, now: float) -> None:
        """Its lease is over or released at once: report what is granted and not handed out yet as lost."""
        self._give_up_proposal(assignment)
        for run in self._granted_of(assignment):
            self._finish(run, now)

    def _give_up_proposal(self, assignment: Assignment) -> Grant | None:
        grant = self._end_proposal(assignment)
        if grant is not None and grant.accepted:
            self.report(assignment.key, grant.run.first, grant.last_offset)
        elif grant is not None:
            self.remember(assignment, grant)
        return grant

    def _granted_of(self, assignment: Assignment) -> list[Run]:
        runs = [self.granted, *self._held_back]
        return [run for run in runs if run is not None and run.assignment is assignment]

    def _end_proposal(self, assignment: Assignment) -> Grant | None:
        if self.proposed is assignment:
            self.proposed = None
        grant, assignment.grant = assignment.grant, None
        return grant

    def remember(self, assignment: Assignment, grant: Grant) -> None:
        """Remember a given-up grant that the log may still accept."""
        entry = (assignment.key, assignment.epoch, grant.run.first, grant.last_offset)
        self._given_up = [x for x in self._given_up if x[0] != assignment.key]  # those of older epochs are settled
        self._given_up.append(entry)

    def collect(self, assignment: Assignment, now: float) -> Run | None:
        """The granted run, to be handed out; None: it was refused (it is read again), or the lease is over."""
        grant = self._end_proposal(assignment)
        if grant is None:
            return None
        if grant.accepted and (assignment.user_paused or self.granted is not None):
            self._put_aside(grant.run)  # another thread's comes first
            return grant.run
        if grant.accepted:
            self.granted, self._began = grant.run, now
            self._turns.in_lanes.loops.began(grant.run, now)
            return grant.run
        assignment.tracker.requeue(grant.run)
        self.remember(assignment, grant)
        self._consumer.positions.reread(assignment)
        self._consumer.revocation.try_finish(assignment, now)
        return None

    def report(self, key: Key, first: int, last: int) -> None:
        """Report granted messages that no member will ever hand out."""
        topic, partition = key
        self.unprocessed.append((topic, partition, first, last))
        self._consumer.warn(
            f"{topic} [{partition}]: offsets {first} to {last} were granted and not handed out; at most once means "
            "that nobody will get them"
        )

    def hold_back(self, assignment: Assignment) -> None:
        """The user pauses this partition: the rest of its granted run waits."""
        if self.granted is not None and self.granted.assignment is assignment:
            self.granted.recall()
            self._put_aside(self.granted)
            self.granted = None

    @property
    def is_waiting(self) -> bool:
        """Whether there is a granted run to be handed out now."""
        return self.granted is not None or any(not run.assignment.user_paused for run in self._held_back)

    def _put_aside(self, run: Run) -> None:
        run.since = inf  # no thread handles it, so no handler is slow
        self._held_back.append(run)

    def take_up(self, now: float) -> None:
        """At most once: continue a granted run that no longer has to wait."""
        run = next((run for run in self._held_back if not run.assignment.user_paused), None)
        if run is not None and self.granted is None:
            self._held_back.remove(run)
            run.resume(run.astray())
            self.granted, run.since, self._began = run, now, now
            self._turns.in_lanes.loops.began(run, now)

    @property
    def is_handing_out(self) -> bool:
        """Whether a granted run is handed out now."""
        return self.granted is not None

    def has_granted(self) -> bool:
        """Whether the granted run has messages left, including those that an exception kept in the library."""
        run = self.granted
        if run is None:
            return False
        if again := run.astray():
            run.resume(again)
        elif run.recalled:
            run.resume()
        return run.handed_out < len(run.messages)

    def finish_granted(self, now: float) -> None:
        """End the granted run: it was handed out to its end, or no more of it will be."""
        if self.granted is not None:
            self._finish(self.granted, now)

    def abandon(self, now: float) -> None:
        """Hand out nothing more, but keep the leases; the log may still grant what is in ``awaited``."""
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
            self._pace_ms = (now - self._began) / max(1, run.handed_out)
            self._turns.in_lanes.loops.ended(run, now)
        else:
            self._held_back.remove(run)
        self._undecided.append((run, set()))
        self.decide()
        run.assignment.tracker.mark_run(run)
        if self.proposed is not None and self.proposed.grant is not None:
            self.proposed.grant.run.since = now  # claimed ahead: its time in flight starts now
        self._consumer.revocation.try_finish(run.assignment, now)

    @given
    def decide(self, is_final: bool = False) -> None:
        """Report the messages of ended granted runs that no thread will hand out; is_final: withhold what remains."""
        withheld: dict[int, tuple[list[int], list[int]]] = {}
        for entry in list(self._undecided):
            run, told = entry
            if is_final:
                run.withhold(withheld)
            lost = [*run.recall(), *run.astray(final=is_final)]
            offsets = sorted({offset_of(message) for message in lost} - told)
            told.update(offsets)
            at = 0
            while at < len(offsets):  # stretches of offsets that are neighbours in the run
                first, place = offsets[at], run.index(offsets[at]) or 0
                while at + 1 < len(offsets) and run.index(offsets[at + 1]) == place + 1:
                    at, place = at + 1, place + 1
                self.report(run.assignment.key, first, offsets[at])
                at += 1
            if is_final or run.left + len(told) >= len(run.messages):
                self._undecided.remove(entry)
