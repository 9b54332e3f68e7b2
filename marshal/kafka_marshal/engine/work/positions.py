"""Where an assignment starts, and positions that are invalid in the partition's present log."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from shlex import quote
from typing import Protocol

from kafka_marshal.engine.effects import Callback, LookUp
from kafka_marshal.engine.inputs import given
from kafka_marshal.engine.plane import Loss, Settles
from kafka_marshal.engine.settings import EngineSettings
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.engine.work.assignment import Assignment, Deliveries, Mover, Stage
from kafka_marshal.engine.work.grants import Grants
from kafka_marshal.engine.work.stuck import LOOK_UP_AGAIN_MS, StuckPartitions
from kafka_marshal.engine.work.taking_over import TakeOvers
from kafka_marshal.engine.work.topic_mark import TopicMarks, kafka_counts, split
from kafka_marshal.types import Key, Start
from rationalizer import codes
from rationalizer.holes import Hole
from rationalizer.limits import MAX_OFFSET, NOTHING_DONE

#: Why a partition is released in which messages are open that its consumer does not handle.
IN_THE_WAY = "messages of it are open, which this consumer does not handle"
#: Why no position counts in a topic that was deleted and recreated.
RECREATED = "the topic was recreated"


class Positioned(Mover, Protocol):
    """A consumer, as Positions sees it."""

    @property
    def delivery(self) -> Granting: ...


class Granting(Deliveries, Protocol):
    """The delivery of a consumer, as far as its positions need it."""

    @property
    def grants(self) -> Grants: ...


class Positions:
    """Moves one consumer's assignments from the granted lease to work. Called under the shell's lock."""

    def __init__(
        self, consumer: Positioned, subscription: Subscription, about: EngineSettings, want_ids: Callable[[], object]
    ) -> None:
        self._consumer = consumer
        self._subscription = subscription
        self._group_id = about.group_id
        self._want_ids = want_ids
        self.marks: TopicMarks = TopicMarks(consumer.source, subscription, want_ids)
        self.stuck: StuckPartitions = StuckPartitions(consumer, about.group_id)
        #: Offsets that retention took before they were handed out, as (key, first, last) (P9).
        self.gaps: list[tuple[Key, int, int]] = []
        #: Takes over partitions that are processed in transactions.
        self.take_overs: TakeOvers = TakeOvers(consumer, about.log_name)
        #: Partitions with lost positions, not worked on until an admin sets them (P11).
        self.blocked: set[Key] = set()

    def granted(self, assignment: Assignment, now: float) -> None:
        """The log granted the lease: find out where to start."""
        origin, source = assignment.origin, self._consumer.source
        source.look_again(assignment.key)
        origin.is_first = origin.is_first and source.view.is_first(assignment.key)
        self.begin(assignment)
        origin.is_new = origin.is_first and not source.view.came_later(assignment.key)
        self.marks.begun(assignment)
        self.locate(assignment, now)

    def begin(self, assignment: Assignment) -> None:
        """Start again with the progress in the log."""
        progress = self._consumer.source.view.progress(assignment.key)
        stable, ranges = (NOTHING_DONE, []) if progress is None else (progress.stable, split(progress.ranges).ranges)
        assignment.begin(stable + 1, stable, ranges)
        holes = self._consumer.source.view.open(assignment.key)
        if holes or assignment.open is not None:
            assignment.opened.begin(holes if self._consumer.handles_open else [x for x in holes if x.is_parked])

    def locate(self, assignment: Assignment, now: float) -> None:
        """Find out where to start, in the topic that exists now."""
        is_made_anew = self.marks.is_made_anew(assignment.key)
        if is_made_anew is not False:
            self._consumer.enter(assignment, Stage.IDENTIFYING)
            if is_made_anew:
                self.position_lost(assignment, None, None, None, now)
                return
            self._want_ids()
        elif self._is_of_transactions(assignment):
            self._consumer.enter(assignment, Stage.IDENTIFYING)
            self._transactional(assignment, now)
            return
        elif open_messages := self._in_the_way(assignment):
            self._consumer.enter(assignment, Stage.IDENTIFYING)
            self._open(assignment, open_messages, now)
            return
        elif self._needs_start(assignment):
            self._consumer.enter(assignment, Stage.LOCATING)
            start = self._consumer.settings.start if assignment.origin.is_new else "earliest"
            self.look_up(assignment, start, assignment.origin.claims_before)
        elif not self._consumer.closing:
            self.assign(assignment)
        if self._consumer.closing and not self._consumer.source.takes_checkpoints:
            self._consumer.revocation.revoke(assignment, "the consumer closes", now)

    def _is_of_transactions(self, assignment: Assignment) -> bool:
        """Whether the log's position does not count for a consumer without transactions (M3)."""
        return not self._consumer.settings.transactions and kafka_counts(
            self._consumer.source.view.progress(assignment.key)
        )

    def _in_the_way(self, assignment: Assignment) -> list[Hole]:
        """Open messages that this consumer can't handle, nor pass (U3, U6)."""
        if self._consumer.handles_open:
            return []
        holes = self._consumer.source.view.open(assignment.key)
        return [hole for hole in holes if not hole.is_parked or self._consumer.settings.transactions]

    def messages_opened(self, key: Key, entries: Settles, answers: Sequence[str] | None, now: float) -> None:
        """Messages were opened, parked or settled by a record. answers: of our own one, what the log says of each."""
        assignment = self._consumer.assignments.get(key)
        if assignment is None or assignment.over or not assignment.lease.held:
            self.unblock([key])  # what still stands in the way is found again
            for (_, last), code in zip(entries.done, answers or (), strict=False):
                self._consumer.delivery.grants.answered_late(key, None, last, code == codes.OK)
        elif open_messages := self._in_the_way(assignment):
            self._open(assignment, open_messages, now)
        else:
            self.unblock([key])
            self._consumer.settlements.applied(assignment, entries, answers, now)

    def _needs_start(self, assignment: Assignment) -> bool:
        """Whether to ask the leader where to begin, instead of beginning at offset 0 or the known position."""
        if assignment.lease.is_claimed_with_start:
            return False
        if assignment.origin.is_new and self._consumer.settings.start != "earliest":
            return True
        # The state of a partition is restored with the log start: what lies below it can't come again (X17, X19).
        return self._has_no_start(assignment) or not assignment.lease.is_restored

    def _has_no_start(self, assignment: Assignment) -> bool:
        """Whether its start must be reported to the log, even if it is offset 0 (G22)."""
        source = self._consumer.source
        return source.reports.needs_start and source.view.is_first(assignment.key)

    def topics_told(self, now: float) -> None:
        """The ids of topics may be known now: locate the assignments that wait for them."""
        self.marks.identified()
        moving = self._consumer.schedule.pending.values()
        for assignment in [x for x in moving if x.stage is Stage.IDENTIFYING and x.lease.held]:
            if self.marks.is_made_anew(assignment.key) is not None:
                self.locate(assignment, now)

    def look_up(
        self, assignment: Assignment, start: Start = "earliest", claims_before: Mapping[int, int] | None = None
    ) -> None:
        """Ask the leader where the partition's log starts and ends."""
        self._consumer.outbox.add(
            LookUp(self._consumer.number, assignment.key, assignment.epoch, start, claims_before or {})
        )

    def located(self, assignment: Assignment, low: int, high: int, start: int, now: float) -> None:
        """The leader reported the partition's log start and end, and the requested start offset."""
        self.stuck.answered(assignment, high)
        if assignment.stage is not Stage.LOCATING or not assignment.lease.held:
            return
        if assignment.open is not None and assignment.open.reading and assignment.shown:
            assignment.open.below(low)
            self._consumer.settlements.report(assignment)
            self.assign(assignment)
            return
        position = assignment.buffer.fetch_next
        if assignment.origin.is_first:
            position = max(position, start)
        elif position > high:
            self.position_lost(assignment, position, low, high, now)
            return
        if position < low:
            if position > 0 or not assignment.origin.is_new:
                self.gap(assignment, position, low - 1)
            position = low
        assignment.origin.is_new = False
        assignment.origin.log_start = low
        if assignment.releasing:  # its release waited only for the start
            assignment.told.start_beat = position - 1
            self._consumer.enter(assignment, Stage.POSITIONING)
            self._consumer.revocation.revoke(assignment, assignment.releasing, now)
        elif position == assignment.buffer.fetch_next and not self._has_no_start(assignment):
            self.assign(assignment)
        elif assignment.tracker.runs or assignment.buffer.size or self._moves_at_a_cut(assignment):
            # Messages fetched before the gap are handed out first.
            assignment.tracker.done.commit([(assignment.buffer.fetch_next, position - 1)])
            assignment.buffer.go_on_at(position)
            self.assign(assignment)
        else:
            self.start_at(assignment, position, now)

    def _moves_at_a_cut(self, assignment: Assignment) -> bool:
        """Whether what only retention moves is reported with its next cut (X10)."""
        return self._consumer.source.takes_checkpoints and not self._has_no_start(assignment)

    def beat_start(self, assignment: Assignment, now: float) -> None:
        """Report to the log where it starts; called again if the log does not answer."""
        if assignment.told.start_beat is not None:
            assignment.told.start_beat_sent = now
            self._consumer.source.reports.beat(assignment.lease, assignment.told.start_beat, now)

    def beaten(self, assignment: Assignment, last_offset: int | None, accepted: bool, now: float) -> None:
        """A beat was applied; if it reported the start, the assignment begins."""
        if assignment.stage is Stage.POSITIONING and accepted and last_offset == assignment.told.start_beat:
            assignment.told.start_beat = None
            self.begin(assignment)
            self.assign(assignment)

    def start_at(self, assignment: Assignment, start: int, now: float) -> None:
        self._consumer.enter(assignment, Stage.POSITIONING)
        assignment.told.start_beat = start - 1
        self.beat_start(assignment, now)

    def assign(self, assignment: Assignment) -> None:
        if self.take_overs.is_needed(assignment):
            self.take_overs.begin(assignment)
            return
        if not assignment.lease.is_restored:
            self._consumer.enter(assignment, Stage.RESTORING)
            return
        self._consumer.source.look_again(assignment.key)
        if assignment.fetch_from <= MAX_OFFSET:
            assignment.refetch()
        if not assignment.shown:
            assignment.shown = True
            self._consumer.call(Callback.ASSIGN, assignment)
        self._consumer.enter(assignment, Stage.ASSIGNING if assignment.callbacks_running else Stage.ACTIVE)

    @given
    def out_of_range(self, key: Key, now: float) -> None:
        """The reader's position is not in the log: ask the leader where the log starts and ends."""
        assignment = self._consumer.assignments.get(key)
        if assignment is not None and assignment.stage in (Stage.ASSIGNING, Stage.ACTIVE):
            self._consumer.enter(assignment, Stage.LOCATING)
            assignment.origin.is_first = False
            position, asked_at = assignment.watch.looked_up
            # If the reader fails again at once at a position that the leader confirmed, wait before the next look-up.
            is_again = position == assignment.fetch_from and now < asked_at + LOOK_UP_AGAIN_MS
            assignment.watch.look_up_at = asked_at + LOOK_UP_AGAIN_MS if is_again else now
            self.look_up_if_due(assignment, now)

    def look_up_if_due(self, assignment: Assignment, now: float) -> None:
        """Ask the leader if a look-up is due; ``look_up_at`` limits how often."""
        if assignment.watch.look_up_at is not None and now >= assignment.watch.look_up_at:
            assignment.watch.looked_up, assignment.watch.look_up_at = (assignment.fetch_from, now), None
            self.look_up(assignment)

    @given
    def reader_found(self, topic: str, topic_id: str, now: float) -> None:
        """The reader found another topic of this name; the cluster may report that earlier or later."""
        if self._subscription.replaced(topic, topic_id):
            self.topic_recreated(topic, now)
            self._want_ids()

    def topic_recreated(self, topic: str, now: float) -> None:
        """A subscribed topic has another id: positions in it are invalid, whichever member holds the partitions."""
        for key in [key for key in self._subscription.partitions if key[0] == topic]:
            assignment, progress = self._consumer.assignments.get(key), self._consumer.source.view.progress(key)
            is_held = self._consumer.source.view.is_held(key)
            if assignment is not None and assignment.lease.held:
                self.position_lost(assignment, None, None, None, now)
            elif progress is not None and (self.marks.is_made_anew(key) or progress.stable >= 0):
                if assignment is not None:
                    self._consumer.revocation.revoke(assignment, "the topic was recreated", now)
                if not is_held:
                    position = progress.stable + 1
                    self.stuck.position_lost(key, position, self._text(key, position, RECREATED, "Set it"), now)
                self.blocked.add(key)
                self._consumer.source.look_again(key)

    def unblock(self, keys: Collection[Key]) -> None:
        """An admin has set the positions of these partitions."""
        self.blocked.difference_update(keys)
        self.stuck.forget(keys)

    def gap(self, assignment: Assignment, first: int, last: int) -> None:
        """Report what retention removed before it was delivered."""
        self.gaps.append((assignment.key, first, last))
        self._consumer.warn(
            f"{assignment.key[0]} [{assignment.key[1]}]: offsets {first} to {last} are gone from the log (retention or "
            "deletion) before this group handled them; going on at the log start"
        )

    def position_lost(
        self, assignment: Assignment, position: int | None, low: int | None, high: int | None, now: float
    ) -> None:
        """position: beyond the log; None: the topic is another one, and the log will have what is done by now."""
        if position is None:
            position = 1 + max(self._consumer.known_stable(assignment.key), assignment.done_through())
        where = RECREATED if high is None else f"the log holds offsets {low} to {high}"
        self._give_up(assignment, position, self._text(assignment.key, position, where, "Set it"), Loss.POSITION, now)

    def foreign_offset(self, assignment: Assignment, offset: int, metadata: str, other_log: str, now: float) -> None:
        """Another program committed in Kafka for this group (M7): deliver nothing until the position is set.

        other_log: the coordination topic of another group of this name that did so; "": it is not known.
        """
        where = (
            f"a group of this name on the coordination topic {other_log} has committed offset {offset} in Kafka, and "
            "may have produced what this one would produce again"
            if other_log
            else f"another program has committed offset {offset} for this group in Kafka (metadata {metadata!r}): a "
            "consumer of Kafka's own, --reset-offsets, a mirror, or a group of this name on another coordination topic"
        )
        position = assignment.buffer.fetch_next
        text = self._text(assignment.key, position, where, "Stop that program, and set it")
        self._give_up(assignment, position, text, Loss.KAFKA_OFFSET, now)

    def _transactional(self, assignment: Assignment, now: float) -> None:
        """The group processes in transactions, and this consumer does not (M3)."""
        topic, partition = assignment.key
        position = assignment.buffer.fetch_next
        text = (
            f"{topic} [{partition}]: this group processes it in transactions, and this consumer does not: Kafka's "
            f"offset counts, which may be ahead of the log's ({position}). Nothing of it is handed out here, and "
            "nothing is lost. Make this consumer with exactly_once=Transactions(). Or give up exactly once: set its "
            f"position: kafka-marshal release-group {quote(self._group_id)} --partition {topic}:{partition}=OFFSET"
        )
        self._give_up(assignment, position, text, Loss.KAFKA_OFFSET, now)

    def _open(self, assignment: Assignment, holes: Sequence[Hole], now: float) -> None:
        """There are open messages that this kind of consumer does not handle, and must not pass over (H1)."""
        if assignment.key in self.blocked:
            return
        topic, partition = assignment.key
        first, settings = holes[0], self._consumer.settings
        which = f"offset {first.first}" if first.first == first.last else f"offsets {first.first} to {first.last}"
        more = f", and {len(holes) - 1:,} more" if len(holes) > 1 else ""
        kind = "with transactions" if settings.transactions else "of ranges"
        text = (
            f"{topic} [{partition}]: messages are open that a consumer {kind} does not handle ({which}{more}): another "
            "worker has set them aside, or has not finished them. Nothing of this partition is delivered here, and "
            "nothing is lost. Let a worker without that handle them. Or give them up: kafka-marshal discard "
            f"{quote(self._group_id)} {topic}:{partition}:OFFSET"
        )
        if assignment.shown:  # redriven while it works: what is in flight is finished, and nothing after it begun
            self.stuck.position_lost(assignment.key, assignment.buffer.fetch_next, text, now)
            self.blocked.add(assignment.key)
            self._consumer.revocation.revoke(assignment, IN_THE_WAY, now)
        else:
            self._give_up(assignment, assignment.buffer.fetch_next, text, Loss.OPEN, now)

    def _give_up(self, assignment: Assignment, position: int, text: str, loss: Loss, now: float) -> None:
        """Deliver nothing until the position is set."""
        self.stuck.position_lost(assignment.key, position, text, now)
        self.blocked.add(assignment.key)
        self._consumer.source.lose(assignment.lease, loss, now)

    def _text(self, key: Key, position: int, where: str, remedy: str) -> str:
        topic, partition = key
        return (
            f"{topic} [{partition}]: position lost: this group continues at offset {position}, but {where}. Nothing "
            "of this partition is handed out to any member until its position is set; other partitions continue. "
            f"{remedy}: "
            f"kafka-marshal release-group {quote(self._group_id)} --partition {topic}:{partition}=OFFSET "
            "(or =earliest)"
        )

    def reread(self, assignment: Assignment) -> None:
        """Fetch again from the progress in the log."""
        if assignment.stage is Stage.ACTIVE:
            self.begin(assignment)
            self.assign(assignment)
