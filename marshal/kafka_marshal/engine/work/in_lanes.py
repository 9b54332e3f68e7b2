"""The messages of one consumer that are spread over lanes (:mod:`.lanes`), apart from those its threads take."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from kafka_marshal.engine.inputs import given
from kafka_marshal.engine.readings import reading
from kafka_marshal.engine.settings import MAX_IN_HAND_MESSAGES
from kafka_marshal.engine.work.assignment import Assignment, Mover, Run, Stage
from kafka_marshal.engine.work.behind import HeldBack
from kafka_marshal.engine.work.hot_keys import LoopKeys
from kafka_marshal.engine.work.lane import Handlers, Lane, Owner
from kafka_marshal.engine.work.lanes import Lanes
from kafka_marshal.engine.work.memory import InFlight
from kafka_marshal.engine.work.open_messages import Try, Wary, hash_of, is_mine, take_back
from kafka_marshal.engine.work.purgatory import Purgatory
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.ports import Message
from kafka_marshal.types import BatchToken, Key

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
        #: The lanes; None: no run with many handlers has begun yet.
        self.lanes: Lanes | None = None
        #: The keys that keep a loop busy, while there is no such run.
        self.loops: LoopKeys = LoopKeys()
        #: Partitions whose progress waits for one message, at the last check. Replaced, never changed.
        self.held_back: tuple[HeldBack, ...] = ()

    @property
    def is_active(self) -> bool:
        """Whether messages are spread over lanes at present."""
        return self.lanes is not None and not self._have_ended()

    @property
    def handlers(self) -> Handlers | None:
        """The handlers of the run that is under way; None: there is none."""
        return None if self.lanes is None else self.lanes.handlers

    @property
    def owner(self) -> Owner | None:
        """The run that is under way; None: there is none."""
        return None if self.lanes is None else self.lanes.owner

    @given
    def open(self, lanes: Lanes) -> None:
        """A run with many handlers begins."""
        self.lanes = lanes

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
        if self.lanes is not None:
            self.lanes.hold(key, up_to)

    def finish(self, key: Key, is_on: bool) -> None:
        """Begin what is a gap of this partition, though it is held up."""
        if self.lanes is not None:
            self.lanes.finish(key, is_on)

    def spread(self, run: Run, wary: Wary | None = None) -> list[Lane]:
        """Spread a run that was handed out over lanes. Returns the lanes that became ready."""
        opened, messages = run.assignment.open, run.into_lanes()
        tried: Mapping[int, int] | None = None if opened is None else opened.tried
        if wary is not None:
            tried = {**(tried or {}), **wary.tried}
            messages = [message for message in messages if offset_of(message) not in wary.crashed]
        return self._put(run.assignment, messages, tried, wary, run.token)

    # What workers change without the shell's lock.

    @reading
    def _have_ended(self) -> bool:
        return self.lanes is not None and self.lanes.is_ended

    @property
    @reading
    def has_returned(self) -> bool:
        """Whether a try has ended without its message being done since the last ``returned``."""
        return self.lanes is not None and self.lanes.has_returned

    @reading
    def _put(
        self,
        assignment: Assignment,
        messages: list[Message],
        tried: Mapping[int, int] | None = None,
        wary: Wary | None = None,
        token: BatchToken | None = None,
    ) -> list[Lane]:
        if self.lanes is None:
            return []
        if wary is not None:
            self.lanes.watch(assignment, wary.tried, wary.alone)
        return self.lanes.put(assignment, messages, tried, token)

    @reading
    def hashes(self, messages: Sequence[Message]) -> list[int]:
        """Where messages lie among the key hashes of their partition."""
        return [hash_of(message) for message in messages]

    def next_alone(self, now: float) -> tuple[str, int, int, int] | None:
        """The message that is tried alone next, when the log has its try; None: there is none.

        Its topic, partition, offset and key hash: what a batch has left has none in the log.
        """
        return self._next_alone(now) if self.is_durable else None

    @reading
    def _next_alone(self, now: float) -> tuple[str, int, int, int] | None:
        if self.lanes is None or (found := self.lanes.next_alone(now)) is None:
            return None
        key, message = found
        return *key, offset_of(message), hash_of(message)

    def admit(self, assignment: Assignment, offset: int) -> None:
        """The log has the try of this message that is about to begin."""
        ready = [] if self.lanes is None else self.lanes.admit(assignment, offset)
        if ready and (handlers := self.handlers) is not None:
            handlers.put(ready)

    @reading
    def _skip(self, assignment: Assignment, offset: int) -> list[Lane]:
        return [] if self.lanes is None else self.lanes.skip(assignment, offset)

    @reading
    def _tries(self, assignment: Assignment, blocking: int | None, ends: bool) -> tuple[tuple[int, int, int], ...]:
        found = () if self.lanes is None else self.lanes.tries(assignment, blocking, ends)
        return tuple([(offset, attempts, hash_of(message)) for offset, attempts, message in found])

    @reading
    def _waiting(self, assignment: Assignment) -> list[Message]:
        return [] if self.lanes is None else sorted(self.lanes.recall(assignment), key=offset_of)

    @reading
    def _oldest(self, assignment: Assignment) -> float | None:
        return None if self.lanes is None else self.lanes.oldest(assignment)

    @reading
    def leave(self, assignment: Assignment, before: float) -> list[Message]:
        """Leave behind what handlers have had since before that time; it is still in flight."""
        return [] if self.lanes is None else self.lanes.leave(assignment, before)

    @reading
    def waiting(self, assignment: Assignment) -> int:
        """How many messages of a partition wait in lanes, also for their next try: no handler has them."""
        return 0 if self.lanes is None else self.lanes.waiting(assignment.key)

    @reading
    def failing(self, assignment: Assignment) -> int:
        """How many messages of a partition wait for another try."""
        return 0 if self.lanes is None else self.lanes.failing(assignment.key)

    @property
    @reading
    def are_all_failing(self) -> bool:
        """Whether nothing succeeds: tries begin one at a time."""
        return self.lanes is not None and self.lanes.pace_ms is not None

    @reading
    def is_with_handler(self, key: Key) -> bool:
        """Whether a handler has a message of this partition, of whichever assignment."""
        return self.lanes is not None and self.lanes.is_running(key)

    @reading
    def disown(self, assignment: Assignment) -> None:
        """What handlers have of this assignment is given to others: they no longer hold it."""
        if self.lanes is not None:
            self.lanes.disown(assignment)

    @reading
    def with_handlers(self, assignment: Assignment) -> list[int]:
        """The offsets of this assignment's messages that handlers have."""
        return [] if self.lanes is None else self.lanes.with_handlers(assignment)

    @reading
    def _dropped(self) -> list[tuple[Assignment, Message]]:
        """Messages that failed after their assignments had ended, since the last call."""
        found: list[tuple[Assignment, Message]] = []
        if self.lanes is not None:
            self.lanes.has_returned = False
            while self.lanes.dropped:
                found.append(self.lanes.dropped.popleft())
        return found

    # Effects of the above, under the shell's lock.

    @property
    def is_durable(self) -> bool:
        """Whether tries are logged (U1)."""
        return self.lanes is not None and self.lanes.is_durable and self._consumer.handles_open

    def tries(self, assignment: Assignment, *, ends: bool = False) -> list[Try]:
        """Tries of a partition that are to be logged. ends: its lease ends in order; those under way do not count."""
        if not self.is_durable:
            return []
        found = [Try(*each) for each in self._tries(assignment, assignment.tracker.blocking(BLOCKED), ends)]
        return [each for each in found if each.attempts or is_mine(assignment.opened, each.offset)]

    def skip(self, assignment: Assignment, offset: int) -> None:
        """An operator has set this message aside: no handler gets it again; one that has it may finish."""
        ready = self._skip(assignment, offset)
        if ready and (handlers := self.handlers) is not None:
            handlers.put(ready)

    def recall(self, assignment: Assignment, *, keep: bool) -> None:
        """Take back what waits in lanes: it is no longer in flight. keep: it is handed out again."""
        tracker = assignment.tracker
        if keep and (tries := self.tries(assignment)):
            assignment.opened.log_tries(tries)
        waiting = [] if self.lanes is None else self._waiting(assignment)
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
        if self.lanes is None or not self.has_returned:
            return
        for assignment, message in self._dropped():
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
        since, taken = self._oldest(assignment), None if self.is_active else assignment.tracker.oldest_in_hand(now)
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
        if not self.is_active or in_hand == 0 or self.purgatory.waits_for_buffered(assignment):
            return False
        most, taken = min(MAX_IN_HAND_MESSAGES, assignment.lease.most_intervals - 1), self._taken(assignment)
        return in_hand >= most or (taken >= self._room() and taken >= self._room(exactly=True))
