"""One consumer's logic: the stages of its assignments, and the callbacks of the user.

Each assignment passes through the stages of :mod:`.assignment`: :mod:`.positions` moves it to its start,
:mod:`.revocation` to its end or when time is up. :mod:`.pull` asks :mod:`.delivery` for messages. A
:class:`~kafka_marshal.engine.plane.PartitionSource` decides which partitions the consumer works on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import NamedTuple

from kafka_marshal.engine.effects import Call, Callback, CloseProducer, Outbox, Piece, Warn
from kafka_marshal.engine.figures import MessageTotals
from kafka_marshal.engine.holding import Holding, Owner
from kafka_marshal.engine.inputs import given
from kafka_marshal.engine.plane import HUNG, UNSUBSCRIBED, PartitionSource, Settles
from kafka_marshal.engine.redone import RedoneMessages
from kafka_marshal.engine.settings import ConsumerSettings, EngineSettings
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.engine.work.assignment import Assignment, Origin, Run, Stage, stable_of
from kafka_marshal.engine.work.delivery import Delivery
from kafka_marshal.engine.work.grants import GrantedAssignment
from kafka_marshal.engine.work.lane import Lane
from kafka_marshal.engine.work.positions import Positions
from kafka_marshal.engine.work.pull import GrantedHand, GrantedPull, Hand, Pull
from kafka_marshal.engine.work.ranges import RangeDelivery
from kafka_marshal.engine.work.revocation import Revocation, Schedule
from kafka_marshal.engine.work.settlements import Settlements
from kafka_marshal.types import Key
from rationalizer import Progress


class Cutting:
    """A :class:`~kafka_marshal.engine.plane.Cuttable`. Called under the shell's lock."""

    def __init__(self, consumer: ConsumerEngine) -> None:
        self._consumer = consumer

    def _of(self, key: Key) -> Assignment | None:
        assignment = self._consumer.assignments.get(key)
        return None if assignment is None or assignment.over else assignment

    def take_back(self, key: Key) -> None:
        """Take back what was handed out and no thread has; messages in lanes wait there, with their tries."""
        if (assignment := self._of(key)) is not None:
            self._consumer.delivery.recall(assignment, lanes=False)

    def close_gaps(self, key: Key, is_on: bool) -> None:
        """Handle what waits in lanes below something that is done, or with a handler, though nothing else begins."""
        if self._of(key) is not None:
            self._consumer.delivery.in_lanes.lanes.finish(key, is_on)

    def is_in_hand(self, key: Key) -> bool:
        """Whether something of it was handed out and is not done; what waits in a lane for its try is not."""
        if (assignment := self._of(key)) is None:
            return False
        # First: what a handler ends meanwhile is missing in the second number, until it is known here as done.
        waiting = self._consumer.delivery.in_lanes.lanes.waiting(key)
        assignment.tracker.follow()
        return assignment.tracker.in_hand > waiting

    def is_in_doubt(self, key: Key) -> bool:
        """Whether a loop was left with a message of it, or one was dropped, and it has not come again."""
        assignment = self._of(key)
        return assignment is not None and assignment.tracker.doubt > assignment.tracker.done.stable

    def done_of(self, key: Key) -> Progress:
        """What is done of it."""
        assignment = self._consumer.assignments[key]
        assignment.tracker.follow()
        return assignment.tracker.done

    def awaits_restore(self, key: Key) -> bool:
        """Whether it is where its state is to be restored, and nothing of before is in flight."""
        assignment = self._of(key)
        return assignment is not None and assignment.stage is Stage.RESTORING and not self._is_before(key)

    def _is_before(self, key: Key) -> bool:
        """Whether something that was handed out under an earlier holding is still in flight."""
        delivery = self._consumer.delivery
        delivery.owed.has_returned()
        return any(x.key == key for x in delivery.owed) or delivery.in_lanes.lanes.is_running(key)

    def begin(self, key: Key) -> int:
        """Begin with the progress in the log, at least at the log start. Returns the next offset."""
        assignment = self._consumer.assignments[key]
        self._consumer.positions.begin(assignment)
        start = assignment.origin.log_start
        if start > assignment.buffer.fetch_next:
            assignment.tracker.done.through(start - 1)
            assignment.buffer.go_on_at(start)
        return assignment.buffer.fetch_next

    def restored(self, key: Key) -> None:
        """Its state is restored: deliver."""
        assignment = self._of(key)
        if assignment is not None and assignment.stage is Stage.RESTORING:
            self._consumer.positions.assign(assignment)

    def has_handed_out(self, key: Key, stable: int) -> bool:
        """Whether something of it was handed out since it was at this offset."""
        assignment = self._of(key)
        return assignment is not None and (bool(assignment.tracker.runs) or assignment.tracker.done.stable > stable)


def done_of(consumer: ConsumerEngine, assignment: Assignment) -> tuple[tuple[int, int], ...]:
    """What of its partition is done for every key, and not open: ascending, inclusive (F4). It may be over.

    At most once: nothing, since the log calls done what is yet to be handled.
    """
    is_unknown = assignment.is_done_early or assignment.over
    progress = None if is_unknown else consumer.source.view.whole_progress(assignment.key)
    if progress is None:
        return ()
    stable, found, at = stable_of(assignment), list[tuple[int, int]](), 0
    for hole in progress.open:
        if hole.first > stable:
            break
        found += [(at, hole.first - 1)] * (at < hole.first)
        at = hole.last + 1
    return (*found, (at, stable)) if at <= stable else tuple(found)


class Supply(NamedTuple):
    """How messages of a consumer's partitions come; decided once, when the consumer is made."""

    assignment: type[Assignment] = Assignment
    delivery: type[Delivery] = Delivery
    schedule: type[Schedule] = Schedule
    hand: type[Hand] = Hand
    pull: type[Pull] = Pull


#: At least once: a partition is held whole, and each message is done when the program says so.
WHOLE = Supply()

#: At most once: the log grants each batch before it is handed out.
GRANTED = Supply(assignment=GrantedAssignment, hand=GrantedHand, pull=GrantedPull)


class ConsumerEngine:
    """All assignments of one subscription. Called under the shell's lock, with our own clock's now (ms)."""

    def __init__(
        self,
        number: int,
        settings: ConsumerSettings,
        subscription: Subscription,
        source: PartitionSource,
        about: EngineSettings,
        outbox: Outbox,
        want_ids: Callable[[], object],
    ) -> None:
        self.number = number
        self.settings = settings
        self.subscription = subscription
        self.source = source
        self.outbox = outbox
        self.assignments: dict[Key, Assignment] = {}
        self.supply: Supply = self._supply(settings)
        self.delivery: Delivery = self.supply.delivery(self)
        #: Hands out ranges; None: messages are handed out.
        self.ranges: RangeDelivery | None = self.delivery if isinstance(self.delivery, RangeDelivery) else None
        #: The run that threads take messages from (not used by iteration and batches at least once).
        self.hand: Hand = self.supply.hand()
        #: For a caller with one call at a time that never waits; threads, tasks and lanes have one for each call.
        self.pull: Pull = self.supply.pull(self)
        #: Errors that the user's next calls raise, oldest first.
        self.errors: list[Exception] = []
        self.positions: Positions = Positions(self, subscription, about, want_ids)
        #: Callbacks of the user that were called and have not returned, also those of assignments lost since.
        self.callbacks_running: int = 0
        self.closing: bool = False
        self.schedule: Schedule = self.supply.schedule(self, about.heartbeat_interval_ms)
        self.revocation: Revocation = Revocation(self)
        #: What it wants the log to show of open messages.
        self.settlements: Settlements = Settlements(self, self.positions.gaps)
        #: For a group that takes checkpoints.
        self.cutting: Cutting = Cutting(self)
        #: What an operator has opened again; the engine's.
        self.redone: RedoneMessages = RedoneMessages(about.group_id)

    def _supply(self, settings: ConsumerSettings) -> Supply:
        supply = GRANTED if settings.at_most_once else WHOLE
        return supply._replace(delivery=RangeDelivery) if settings.ranges else supply

    @property
    def at_most_once(self) -> bool:
        """Whether batches are claimed before they are handed out."""
        return self.settings.at_most_once

    @given
    def warn(self, message: str) -> None:
        """Warn the user."""
        self.outbox.add(Warn(message))

    def known_stable(self, key: Key) -> int:
        """The last offset done without a gap, as our replica knows it; -1: none."""
        progress = self.source.view.progress(key)
        return -1 if progress is None else progress.stable

    @property
    def parts(self) -> Mapping[Key, Assignment]:
        """The assignments, as the source sees them."""
        return self.assignments

    @property
    def blocked(self) -> Collection[Key]:
        """Partitions that are not worked on until an admin sets their positions."""
        return self.positions.blocked

    @property
    def owes(self) -> bool:
        """Whether messages of a partition that was taken away are still in flight."""
        return bool(self.delivery.owed)

    @property
    def is_hung(self) -> bool:
        """Whether no thread of the user comes back within handler_timeout."""
        return self.schedule.let_go_why == HUNG

    @property
    def takes_on(self) -> bool:
        """Whether it claims partitions: it is neither closing nor releasing everything."""
        return not (self.closing or self.schedule.let_go_why)

    def enter(self, assignment: Assignment, stage: Stage) -> None:
        assignment.enter(stage)
        if stage is not Stage.ACTIVE:
            self.schedule.look_after(assignment)

    def call(self, callback: Callback, assignment: Assignment) -> None:
        if callback in self.settings.callbacks:
            assignment.callbacks_running += 1
            self.callbacks_running += 1
            self.outbox.add(Call(self.number, callback, (assignment.piece,)))

    @given
    def spread(self, run: Run, now: float) -> list[Lane]:
        """Spread a run over lanes. Returns those that became ready."""
        wary = self.settlements.look_after(run, now)
        ready = self.delivery.in_lanes.spread(run, wary, now)
        if wary is not None:
            self.settlements.send(run.assignment, now)
        return ready

    @property
    def handles_open(self) -> bool:
        """Whether it handles open messages: not in transactions, nor as ranges (U3, U6)."""
        return not (self.settings.transactions or self.settings.ranges)

    @given
    def park(self, key: Key, token: int, offset: int, key_hash: int, attempts: int, reason: str, now: float) -> bool:
        """Set a message in flight aside. Returns whether it was in flight here."""
        assignment = self.assignments.get(key) if token < 0 else self.of(key, token)
        if assignment is None or assignment.over:
            self.delivery.owed.came_back(key, offset)
            return False
        return self.delivery.set_aside(assignment, offset, key_hash, attempts, reason, now)

    @given
    def later(
        self, key: Key, token: int, offset: int, key_hash: int, attempts: int, wait_ms: float, now: float
    ) -> None:
        """The next try of a message waits for this long: the log is to show it. attempts: those that have begun."""
        if (assignment := self.of(key, token)) is not None:
            most = self.delivery.in_lanes.lanes.most_tries
            counted = attempts if most is None else min(attempts, most - 1)
            due = self.source.view.log_time(assignment.lease.cp, now) + wait_ms
            assignment.opened.later(offset, key_hash, counted, due)

    @given
    def untake(self, key: Key, token: int, is_known: bool, now: float) -> None:
        """The partition's transactional producer is gone: take it over again."""
        if (assignment := self.of(key, token)) is not None:
            self.positions.take_overs.untake(assignment, is_known, now)

    def take_on(
        self,
        key: Key,
        is_first: bool,
        want: Callable[[Owner], Holding],
        claims_before: Mapping[int, int] | None = None,
    ) -> None:
        """Claim a partition; want: called once, with the lease's owner."""
        assignment = self.supply.assignment(key, self, self.delivery.moved.setdefault(key, MessageTotals()))
        assignment.origin = Origin(is_first, claims_before)
        assignment.origin.after_death = not is_first and self.source.view.is_left(key)
        assignment.wary = 0 if is_first else None
        assignment.lease = want(assignment)
        self.assignments[key] = assignment
        self.schedule.look_after(assignment)

    def messages_opened(self, key: Key, entries: Settles, answers: Sequence[str] | None, now: float) -> None:
        """Messages were opened, parked or settled by a record. answers: of our own one, what the log says of each."""
        self.positions.messages_opened(key, entries, answers, now)

    def of(self, key: Key, token: int) -> Assignment | None:
        """The assignment with this epoch; None: it is over."""
        assignment = self.assignments.get(key)
        return assignment if assignment is not None and assignment.epoch == token and not assignment.over else None

    def knows(self, assignment: Assignment) -> bool:
        """Whether it is worked on, or was taken away while something of it was in flight."""
        is_current = self.assignments.get(assignment.key) is assignment
        return is_current or any(each is assignment for each in self.delivery.owed)

    def called(self, piece: Piece, now: float) -> None:
        """A callback of the user has returned (or raised)."""
        self.callbacks_running -= 1
        assignment = self.of(piece.key, piece.token)
        if assignment is None or assignment.piece[3:] != piece[3:]:
            return  # it is over; a share that was begun again with other keys may have its token
        assignment.callbacks_running -= 1
        if assignment.stage is Stage.ASSIGNING and not assignment.callbacks_running:
            assignment.enter(Stage.ACTIVE)
        elif assignment.stage is Stage.REVOKING:
            self.revocation.try_finish(assignment, now)

    @given
    def subscribe(self, topics: tuple[str, ...], now: float) -> None:
        """Read these topics in place of others. Partitions of those are released; what stays never stops."""
        self.subscription.change(topics)
        if self.settings.group is None:  # else the group takes them away, once we have joined with these topics
            for key in [key for key in self.assignments if not self.subscription.has(key)]:
                self.let_go(key, UNSUBSCRIBED, now)
        self.source.look_again()

    def let_go(self, key: Key, why: str, now: float) -> None:
        """The source wants a partition released; why is "": no longer."""
        if (assignment := self.assignments.get(key)) is None:
            return
        if why:
            self.revocation.revoke(assignment, why, now)
        elif assignment.releasing and not assignment.over:
            self.revocation.take_back(assignment, now)

    def on_answered(self, assignment: Assignment, last_offset: int, accepted: bool, code: str, now: float) -> None:
        """A ClaimingMessages was applied."""
        self.delivery.grants.applied(assignment, last_offset, accepted, code, now)

    @given
    def reached(self, key: Key, end: int, now: float) -> None:
        """The reader has passed all offsets below end."""
        if (assignment := self.assignments.get(key)) is not None:
            assignment.reached(end)

    @given
    def log_ends(self, key: Key, log_end: int, now: float) -> None:
        """The reader reported where a partition's log ends."""
        if (assignment := self.assignments.get(key)) is not None:
            assignment.watch.log_end = log_end
            self.source.measured(assignment.lease, assignment.tracker.done.stable, log_end, now)

    def remove(self, assignment: Assignment) -> None:
        """Forget an assignment that is over."""
        if self.assignments.get(assignment.key) is assignment:
            del self.assignments[assignment.key]
            if assignment.taking.attempt:
                self.outbox.add(CloseProducer(self.number, assignment.key, assignment.epoch))
            self.schedule.pending.pop(assignment.key, None)
            self.positions.stuck.let_go(assignment.key)
        self.source.look_again(assignment.key)

    @given
    def pause(self, keys: Collection[Key] | None, is_paused: bool, now: float) -> list[Key]:
        """Pause or resume these partitions (None: all). Returns those that are fetched."""
        chosen = [x for key, x in self.assignments.items() if keys is None or key in keys]
        for assignment in chosen:
            if is_paused:
                self.delivery.hold_back(assignment)
            else:
                assignment.user_paused = False
        return [x.key for x in chosen if x.shown and not x.over]

    @given
    def seek(self, key: Key, offset: int) -> bool:
        """Move forward: everything below offset counts as done. False: not assigned, being released, or backwards."""
        assignment = self.assignments.get(key)
        if assignment is not None:
            self.delivery.recall(assignment)
        if assignment is None or not assignment.shown or assignment.releasing or offset < assignment.position:
            return False
        assignment.tracker.done.through(offset - 1)
        ahead = offset > assignment.buffer.fetch_next
        assignment.buffer.skip_to(offset)
        if ahead and assignment.stage in (Stage.ASSIGNING, Stage.ACTIVE):
            assignment.refetch()
        return True

    @given
    def close(self, now: float, leave_by: float = inf) -> None:
        """Release everything at once: what is in flight and not done stays not done."""
        self.closing = True
        self.schedule.closes(now)
        if (checkpoints := self.source.checkpoints) is not None:
            checkpoints.close(leave_by)
        if self.source.takes_checkpoints:
            return
        for assignment in list(self.assignments.values()):
            self.delivery.grants.give_up(assignment, now)
            self.revocation.revoke(assignment, "the consumer closes", now)

    @given
    def abandon(self, now: float) -> None:
        """Deliver nothing more, and release nothing."""
        self.delivery.grants.abandon(now)
        self.closing = True

    @given
    def take_error(self, now: float) -> Exception | None:
        """The oldest error that the user's call must raise, once; None: there is none."""
        return self.errors.pop(0) if self.errors else None

    @property
    def closed(self) -> bool:
        """Whether it has closed and no assignment is left: the log shows their releases."""
        return self.closing and not self.assignments
