"""Lanes keep order if many handlers work on one consumer's messages: each key has a separate lane.

A lane has the messages of one key of one partition, in offset order; its first message waits or is with a handler.
The next message begins when that one has ended, so order is kept across retries. No lane waits for another one.
Messages in lanes are in flight (:mod:`.tracker`) until they are done or recalled.

One run at a time owns the lanes. A handler that an earlier run left behind may return during a later one; the later
run then handles the rest of its lane.

When an assignment ends, its waiting messages are recalled. Messages that a handler still has stay here: if the
partition comes back to this member, messages of the same key wait for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from heapq import heappop, heappush
from typing import Literal

from kafka_marshal.engine.inputs import reading
from kafka_marshal.engine.work.assignment import Assignment, Stage
from kafka_marshal.engine.work.lane import (
    HANGS_MS,
    Handlers,
    HeldBack,
    HotKeys,
    Lane,
    LaneRun,
    LeftBehind,
    Partition,
    given_up,
)
from kafka_marshal.engine.work.open_messages import hash_of
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.ports import Message
from kafka_marshal.runtime import Lock
from kafka_marshal.types import BatchToken, Key

#: Messages that are handled one after another: those with the same key, those of a partition, or none.
Order = Literal["key", "partition", "none"]

#: A message that holds its partition back for this long (ms) is reported; this is checked as often.
HELD_BACK_MS = 1_000.0


class Lanes:
    """All lanes of one consumer. Workers call it without another lock, the engine under the shell's lock."""

    def __init__(
        self, order: Order, lock: Lock | AbstractContextManager[None], stop_signal: list[bool], grace_ms: float
    ) -> None:
        """lock: guards the lanes. stop_signal: once it is not empty, no try begins.

        grace_ms: the lease is lost this long after ``handler_timeout``, at which the handler is cancelled.
        """
        #: Nothing succeeds: of each partition one try begins at a time, this long (ms) after the one before; None: as
        #: many as there are handlers. And since when (ms, own clock).
        self.pace_ms: float | None = None
        self.failing_since: float = 0.0
        #: How many handlers the run has; the most tries that owners begin of a message.
        self.concurrency: int = 1
        self.most_tries: int | None = None
        #: A partition of which this number of lanes waits for a first try is not delivered further; None: no limit.
        self.most_waiting: int | None = None
        #: Messages that are tried one after another, with nothing else in flight → whether such a try has ended well,
        #: and the log does not show that: a death now would count against it.
        self._alone: dict[tuple[Key, int], bool] = {}
        #: Tries of the run are logged.
        self.is_durable: bool = False
        self._lock = lock
        #: Keys that take more than half of what one handler can do.
        self.hot: HotKeys = HotKeys(lock)
        self._stop = stop_signal
        self._grace_ms = grace_ms
        self.order = order
        self._partitions: dict[Key, Partition] = {}
        #: Retries to come: (when, a number that breaks ties, lane).
        self._retries: list[tuple[float, int, Lane]] = []
        self._count = 0
        #: Something waits for its time: the timer of the run is to return it. The feeder clears it.
        self.has_due: bool = False
        #: Such a message has come back, and its report is to come first.
        self.has_waits: bool = False
        #: Lanes ready for a first try. Retries do not count: many of them due is no reason to stop reading.
        self.ready: int = 0
        #: How many messages are with a handler.
        self.running: int = 0
        #: The run whose workers may begin tries; None: there is none under way.
        self.owner: LaneRun | None = None
        #: The handlers of that run.
        self.handlers: Handlers | None = None
        #: No more tries begin: no run is under way.
        self.is_ended: bool = True
        #: A try has failed: a partition being released need not wait for the next try.
        self.has_returned: bool = False
        #: Messages that failed after their assignments had ended; they will never be done here.
        self.dropped: deque[tuple[Assignment, Message]] = deque()
        #: Lanes whose handlers were left behind with their messages, and have not returned.
        self.left: dict[Lane, LeftBehind] = {}
        #: Lanes that wait for no message ahead any more.
        self._freed: deque[Lane] = deque()

    def open(
        self,
        owner: LaneRun,
        *,
        is_durable: bool = False,
        concurrency: int = 1,
        most_tries: int | None = None,
        most_waiting: int | None = None,
    ) -> None:
        """A run begins; lanes that were ready for the previous one no longer are.

        is_durable: its tries are logged. most_tries: a message of which so many have begun, and none has ended, is set
        aside; None: none is.
        """
        with self._lock:
            self.owner, self.is_ended, self.ready, self.is_durable = owner, False, 0, is_durable
            self.pace_ms, self.concurrency, self.most_tries = None, concurrency, most_tries
            self.most_waiting = most_waiting
            self._alone.clear()

    def close(self, owner: LaneRun) -> None:
        """This run has ended."""
        with self._lock:
            if self.owner is owner:
                self.owner, self.handlers, self.is_ended, self.pace_ms = None, None, True, None
                self.most_waiting = None

    def pace(self, pace_ms: float | None, now: float) -> None:
        """Begin one try of a partition at a time, this long (ms) after the one before; None: as many as handlers."""
        if self.pace_ms is None:
            self.failing_since = now
        self.pace_ms = pace_ms

    @reading
    def put(
        self,
        assignment: Assignment,
        messages: Iterable[Message],
        tried: Mapping[int, int] | None = None,
        token: BatchToken | None = None,
        due: Mapping[int, float] | None = None,
    ) -> list[Lane]:
        """Add messages that are in flight from now on. Returns the lanes that became ready.

        tried: by offset, how many tries had begun before, as the log shows. token: of a batch of a share.
        due: by offset, when (ms) they may be tried, of those that wait for their time.
        """
        ready: list[Lane] = []
        by_key, by_partition = self.order == "key", self.order == "partition"
        with self._lock:
            partition = self._partition_of(assignment)
            if tried:
                partition.tried.update(tried)
            if due:
                partition.due.update(due)
            lanes = partition.lanes
            for message in messages:
                key: Hashable = message.key() if by_key else None
                if key is None and not by_partition:
                    key = offset_of(message)
                lane = lanes.get(key)
                if lane is None:
                    lanes[key] = lane = Lane(partition, key, message)
                    lane.before = partition.tried.get(offset_of(message), 0) if partition.tried else 0
                    lane.token = token
                    if not (due and self._waits_for_time(lane)):
                        ready.append(lane)
                elif lane.rest is None:
                    lane.rest = deque((message,))
                else:
                    lane.rest.append(message)
            self.ready += len(ready)
        return ready

    def _waits_for_time(self, lane: Lane) -> bool:
        """Whether the first message of a lane waits for its time: then the timer of the run returns it (``due``)."""
        if lane.partition.due and lane.message is not None:
            lane.due = lane.partition.due.pop(offset_of(lane.message), None)
        if lane.due:
            self.has_due = True
            self._set_timer(lane, lane.due)
        return bool(lane.due)

    def _set_timer(self, lane: Lane, due: float) -> None:
        self._count += 1
        lane.timer = self._count
        heappush(self._retries, (due, self._count, lane))

    def _partition_of(self, assignment: Assignment) -> Partition:
        """The lanes of its partition, in which messages of an earlier assignment may still be with handlers."""
        partition = self._partitions.get(assignment.key)
        if partition is None:
            self._partitions[assignment.key] = partition = Partition(assignment)
        if partition.assignment is not assignment:
            partition.pass_to(assignment)
        return partition

    def begin(self, lane: Lane, now: float, owner: LaneRun) -> Message | None:
        """A worker begins a try of a ready lane. Returns its message; None: not now, or never."""
        with self._lock:
            if self.owner is not owner:
                return None  # waiting messages were recalled when that run ended
            self.ready -= lane.number == 1
            message = lane.message
            if message is None or lane.running or lane.timer:  # it was returned before, too
                return None
            partition, offset = lane.partition, offset_of(message)
            stops = owner.is_ending or (self._stop and offset > partition.closes_to)
            stops = stops or (self.pace_ms is not None and self._waits(partition, now, lane))
            stops = stops or (bool(self._alone) and self._is_held_for_others(lane, now))
            stops = stops or lane.ahead is not None
            if not stops and offset in partition.unlogged:
                partition.unlogged[offset] = lane  # ``admit`` returns it: thousands may wait so
                return None
            if stops or not partition.may_begin(lane, offset, now):
                lane.partition.parked.append(lane)
                return None
            self._begin(lane, now)
            return message

    def _begin(self, lane: Lane, now: float) -> None:
        lane.turn += 1  # first: an exception after this line belongs to this try
        lane.running, lane.began = True, now
        if not lane.since:
            lane.since = now
            lane.partition.started.add(lane)
        lane.partition.running.add(lane)
        lane.partition.tried_at, lane.partition.probe = now, None
        self.running += 1

    def along(self, lane: Lane, now: float, owner: LaneRun) -> Lane | None:
        """Begin the message after that of a lane that has begun, for the same batch; None: there is none, or not now.

        It gets a lane for itself, which has the key and all that follows. Its next try waits for the one ahead.
        """
        with self._lock:
            partition, message, rest = lane.partition, lane.message, lane.rest
            if message is None or not rest or not lane.running or self.owner is not owner or owner.is_ending:
                return None
            offset = offset_of(rest[0])
            stops = bool(self._stop) or self.pace_ms is not None or bool(self._alone) or offset in partition.tried
            stops = stops or lane.is_single or lane.number > 1 or lane.assignment is not partition.assignment
            if stops or not partition.may_begin(lane, offset, now):
                return None
            behind = Lane(partition, lane.key, rest.popleft())
            behind.rest, behind.token, lane.rest = rest, lane.token, None
            lane.key = ("in a batch", offset_of(message))  # no key of a user is a tuple
            partition.lanes[behind.key], partition.lanes[lane.key] = behind, lane
            behind.ahead, lane.behind = lane, behind
            self._begin(behind, now)
            return behind

    def apart(self, lane: Lane, owner: LaneRun, *, is_single: bool) -> bool:
        """A try in a batch does not count: its message is tried again at once, after those ahead of it in its key.

        is_single: by itself. Returns whether the lane is ready.
        """
        with self._lock:
            if (is_ready := self._not_done(lane, owner)) is not None:
                return is_ready
            lane.is_single = is_single
            if self.owner is not owner or self.is_ended or lane.ahead is not None:
                lane.partition.parked.append(lane)
                return False
            self.ready += lane.number == 1
            return True

    def freed(self, now: float) -> list[Lane]:
        """Lanes that have waited for the message ahead of theirs, which is over, and are ready now."""
        found: list[Lane] = []
        with self._lock if self._freed else nullcontext():
            while self._freed:
                lane = self._freed.popleft()
                is_here = not self.is_ended and self.pace_ms is None and lane in lane.partition.parked
                if is_here and self._is_open(lane, now):
                    lane.partition.parked.remove(lane)
                    self.ready += lane.number == 1
                    found.append(lane)
        return found

    @reading
    def watch(self, assignment: Assignment, unlogged: Iterable[int], alone: Sequence[int]) -> None:
        """Begin these messages, which follow, when the log has their tries (``admit``); the last ones alone."""
        with self._lock:
            self._partition_of(assignment).unlogged.update(dict.fromkeys(unlogged))
            self._alone.update({(assignment.key, offset): False for offset in alone})

    def admit(self, assignment: Assignment, offset: int) -> None:
        """The log has the try of this message that is about to begin, or shows that it has ended."""
        with self._lock:
            if self._alone.get(place := (assignment.key, offset)):
                del self._alone[place]
            partition = self._partitions.get(assignment.key)
            lane = None if partition is None else partition.unlogged.pop(offset, None)
            if lane is None or lane.message is None or offset_of(lane.message) != offset:
                return
            if (handlers := self.handlers) is None:
                lane.partition.parked.append(lane)
                return
            self.ready += lane.number == 1
        handlers.put((lane,))

    @reading
    def next_alone(self, now: float) -> tuple[str, int, int, int] | None:
        """The message that is tried alone next, as soon as the log has its try; None: no such try may begin now.

        Its topic, partition, offset and key hash: what a batch has left has none in the log.
        """
        with self._lock:
            is_ending = self.is_ended or self._stop or self.owner is None or self.owner.is_ending
            waiting = next((place for place, has_ended in self._alone.items() if not has_ended), None)
            if waiting is None or self.running or is_ending:
                return None
            key, offset = waiting
            partition = self._partitions.get(key)
            if partition is None or offset not in partition.unlogged or self._waits(partition, now):
                return None
            if now >= partition.assignment.lease.hand_out_until:
                return None
            lanes = [lane for lane in partition.lanes.values() if lane.ahead is None]
            firsts = [lane.message for lane in lanes if lane.message is not None]
            return next(((*key, offset, hash_of(each)) for each in firsts if offset_of(each) == offset), None)

    def _is_held_for_others(self, lane: Lane, now: float) -> bool:
        """Whether the first message of a lane waits for one that is tried alone, or until the log shows its end.

        What comes before that one in its lane is tried first, by itself, too.
        """
        if not self._alone or lane.message is None:
            return False
        if any(self._alone.values()):
            return True
        if self.running and not _are_at_work(self._partitions.values(), now):
            return False
        key, offset = next(iter(self._alone))
        is_its_lane = lane.assignment.key == key and _has(lane.line(), offset)
        return not is_its_lane or self.running > 0

    def _waits(self, partition: Partition, now: float, lane: Lane | None = None) -> bool:
        """Whether no try of a partition (lane: none but that of its probe) may begin now, since nothing succeeds."""
        pace_ms = self.pace_ms
        return pace_ms is not None and partition.waits(lane, now, pace_ms, self.failing_since)

    def _is_open(self, lane: Lane, now: float) -> bool:
        """Whether a lane that waits may begin."""
        if lane.message is None or lane.ahead is not None:
            return False
        if not lane.partition.may_begin(lane, offset_of(lane.message), now):
            return False
        if self._stop and offset_of(lane.message) > lane.partition.closes_to:
            return False  # ``begin`` would park it again, and the two would go round and round
        return not self._is_held_for_others(lane, now)

    def done(self, lane: Lane, owner: LaneRun) -> bool:
        """The message of a running lane is done. Returns whether the lane is ready again, for workers of this run."""
        with self._lock:
            partition, message, assignment = lane.partition, lane.message, lane.assignment
            if message is not None and assignment is partition.assignment:
                offset = offset_of(message)
                partition.skipped.discard(offset)
                if assignment.lease.is_cut_whole:
                    partition.done_to = max(partition.done_to, offset)
                if self._alone and (assignment.key, offset) in self._alone and not assignment.over:
                    self._alone[assignment.key, offset] = True
            return self._rest(lane) and self._go_on(lane, owner)

    def failed(
        self, lane: Lane, due: float | None, owner: LaneRun, *, waits: bool = False, has_begun: bool = True
    ) -> bool:
        """A try has failed; due: when the next one may begin (ms), None: never. Returns whether the lane is ready.

        waits: its message waits for that time, and holds nothing up. has_begun: False: the handler was not called.
        Nothing is retried under an assignment that has ended. (Checked under the lock: either this finds the
        assignment over, or ``recall``, which runs after its end, finds this lane waiting.)
        """
        with self._lock:
            self.has_waits = self.has_waits or waits
            if (is_ready := self._not_done(lane, owner)) is not None:
                return is_ready
            if self.owner is not owner and not waits:
                lane.before += self.is_durable
                lane.partition.parked.append(lane)
                return False
            lane.number += has_begun
            if waits:
                lane.due, lane.since, self.has_due = due, 0.0, True
                lane.partition.started.discard(lane)
            if due is not None:
                self._set_timer(lane, due)
            return False

    @reading
    def hasten(self, assignment: Assignment, offset: int, attempts: int) -> None:
        """An operator has this message tried now, which waits for its time. attempts: the tries that count."""
        with self._lock:
            partition = self._partitions.get(assignment.key)
            if partition is None or partition.assignment is not assignment:
                return
            partition.tried[offset], partition.due[offset] = attempts, 0.0
            waiting = [x for _, number, x in self._retries if x.timer == number and x.partition is partition]
            lane = next((x for x in waiting if x.message is not None and offset_of(x.message) == offset), None)
            if lane is None:
                return
            del partition.due[offset]
            lane.due, lane.before, lane.number, lane.timer = 0.0, attempts, 1, 0
            if (handlers := self.handlers) is None:
                partition.parked.append(lane)
                return
            self.ready += 1
        handlers.put((lane,))

    def give_back(self, lane: Lane, owner: LaneRun) -> bool:
        """A try does not count: it begins again once the lease is proven (``reopened``), or elsewhere.

        Returns whether the lane is ready.
        """
        with self._lock:
            if (is_ready := self._not_done(lane, owner)) is not None:
                return is_ready
            lane.partition.parked.append(lane)
            return False

    def _not_done(self, lane: Lane, owner: LaneRun) -> bool | None:
        """A try ended and its message is not done. Returns whether the lane is ready; None: its message stays."""
        if not self._rest(lane):
            return False
        self.has_returned = True
        if lane.assignment.over or self._is_skipped(lane):
            return self._drop(lane, owner)
        if self.owner is not owner:
            lane.before += lane.number - 1 if self.is_durable else 0  # else tries end with their run
            lane.number = 1
        return None

    def abandon(self, lane: Lane, turn: int) -> None:
        """An exception ended this try at any point: no handler has its message any more.

        turn: the lane's ``turn`` at that try; if another try has begun since, this has no effect.
        """
        with self._lock:
            if lane.turn != turn:
                return
            lane.turn += 1
            lane.running = False
            lane.partition.running.discard(lane)
            self.running = sum(len(partition.running) for partition in self._partitions.values())
            self.has_returned = True
            self._end_alone(lane)
            self.left.pop(lane, None)
            if lane.message is None or lane.partition.lanes.get(lane.key) is not lane:
                return
            if lane.assignment.over:
                self._drop(lane, None)
            else:
                lane.partition.parked.append(lane)

    @staticmethod
    def _is_skipped(lane: Lane) -> bool:
        if not lane.partition.skipped or lane.message is None:
            return False
        offset = offset_of(lane.message)
        is_skipped = offset in lane.partition.skipped
        lane.partition.skipped.discard(offset)
        return is_skipped

    @reading
    def skip(self, assignment: Assignment, offset: int) -> None:
        """An operator has set this message aside: no handler gets it again; one that has it may finish."""
        with self._lock:
            partition, ready = self._partitions.get(assignment.key), []
            if partition is None or partition.assignment is not assignment:
                return
            partition.unlogged.pop(offset, None)
            for lane in partition.lanes.values():
                if lane.message is not None and offset_of(lane.message) == offset:
                    if lane.running:
                        partition.skipped.add(offset)
                        return
                    self.has_returned = True
                    self._end_alone(lane)
                    ready = [lane] if self._drop(lane, self.owner) else []
                    break
                if lane.rest and (waiting := [x for x in lane.rest if offset_of(x) == offset]):
                    lane.rest.remove(waiting[0])
                    self.has_returned = True
                    self._alone.pop((assignment.key, offset), None)
                    self.dropped.append((assignment, waiting[0]))
                    return
        if ready and (handlers := self.handlers) is not None:
            handlers.put(ready)

    @reading
    def tries(self, assignment: Assignment, blocking: int | None, ends: bool) -> tuple[tuple[int, int, int], ...]:
        """Messages that wait for their next try, with the tries that have begun, and their key hashes.

        blocking: this one, too. ends: those with a handler, too, without the try under way. Those with a handler that
        come before such a message of their key, too: the next owner begins with what the log has.
        """
        found: list[tuple[int, int, int]] = []
        # A failed try has killed no process: of those that it may begin, the last one is for such a try (U1).
        most = self.most_tries and self.most_tries - 1
        with self._lock:
            partition = self._partitions.get(assignment.key)
            for lane in () if partition is None else partition.started:
                if lane.message is None or lane.assignment is not assignment:
                    continue
                offset = offset_of(lane.message)
                begun = lane.before + lane.number - 1
                logged = begun if most is None else min(begun, most)
                if ends if lane.running else begun > lane.partition.tried.get(offset, 0):
                    found.append((offset, logged, hash_of(lane.message)))
                elif lane.behind is not None and lane.running and _is_ahead_of_tried(lane):
                    found.append((offset, max(1, logged), hash_of(lane.message)))
                elif offset == blocking:
                    found.append((offset, lane.before + lane.number, hash_of(lane.message)))
        return tuple(found)

    def _drop(self, lane: Lane, owner: LaneRun | None) -> bool:
        """Remove the first message from the lane: its assignment is over, or it was set aside."""
        if lane.message is not None:
            self.dropped.append((lane.assignment, lane.message))
        return self._go_on(lane, owner)

    def _go_on(self, lane: Lane, owner: LaneRun | None) -> bool:
        partition = lane.partition
        partition.started.discard(lane)
        if not lane.rest:
            if lane.ahead is lane.behind:  # neither: it is in no list of messages
                lane.message, lane.timer = None, 0
                del partition.lanes[lane.key]
            else:
                self._remove(lane)
            return False
        lane.message, lane.assignment = lane.rest.popleft(), partition.assignment
        lane.number, lane.since, lane.is_single = 1, 0.0, False
        lane.before = partition.tried.get(offset_of(lane.message), 0) if partition.tried else 0
        lane.due, lane.timer = None, 0
        if partition.due and self._waits_for_time(lane):
            return False
        if self.owner is not owner or self.is_ended or lane.ahead is not None:
            partition.parked.append(lane)
            return False
        self.ready += 1
        return True

    def _remove(self, lane: Lane) -> None:
        """A lane is over: the one behind waits for it no longer. If it was the last, its key goes to the one ahead."""
        lanes, ahead, behind = lane.partition.lanes, lane.ahead, lane.behind
        lane.message = lane.ahead = lane.behind = None
        lane.timer = 0
        del lanes[lane.key]
        if behind is not None:
            behind.ahead = ahead
            if ahead is None:
                self._freed.append(behind)
        if ahead is not None:
            ahead.behind = behind
            if behind is None:
                del lanes[ahead.key]
                ahead.key = lane.key
                lanes[ahead.key] = ahead

    def _rest(self, lane: Lane) -> bool:
        """End the try under way. False: there is none."""
        if not lane.running:
            self.left.pop(lane, None)
            return False
        lane.running = False
        lane.partition.running.discard(lane)
        self.running -= 1
        self._end_alone(lane)
        return True

    def _end_alone(self, lane: Lane) -> None:
        """The message of this lane was tried, or is not: others may begin."""
        if self._alone and lane.message is not None:
            place = (lane.assignment.key, offset_of(lane.message))
            if self._alone.get(place) is False:
                del self._alone[place]

    def due(self, now: float, owner: LaneRun) -> list[Lane]:
        """Lanes whose retry may begin now."""
        found: list[Lane] = []
        with self._lock:
            if self.owner is not owner:
                return found
            while self._retries and (self._retries[0][0] <= now or self._retries[0][1] != self._retries[0][2].timer):
                _, number, lane = heappop(self._retries)
                if lane.message is not None and lane.timer == number:
                    lane.timer = 0
                    found.append(lane)
            self.ready += sum(lane.number == 1 for lane in found)
        return found

    @property
    def next_due(self) -> float | None:
        """When the next retry may begin (ms); None: there is none."""
        with self._lock:
            return self._retries[0][0] if self._retries else None

    def reopened(self, now: float) -> list[Lane]:
        """Parked lanes that are ready again because their leases are proven, or the limit of ``hold`` has moved."""
        found: list[Lane] = []
        if self.is_ended:
            return found
        with self._lock:
            for partition in self._partitions.values():
                lease = partition.assignment.lease
                is_held_up = max(partition.finish_to, partition.closes_to) < 0
                until = lease.hand_out_until if is_held_up else lease.proven_until
                if not partition.parked or now >= until:
                    continue
                if self.pace_ms is not None:
                    fit = [] if self._waits(partition, now) else [x for x in partition.parked if self._is_open(x, now)]
                    found += partition.choose_probe(fit)
                    continue
                parked, partition.parked = partition.parked, []
                for lane in parked:
                    if lane.message is not None:
                        (found if self._is_open(lane, now) else partition.parked).append(lane)
            self.ready += sum(lane.number == 1 for lane in found)
        return found

    def hold(self, key: Key, up_to: float) -> None:
        """Begin no tries of this partition above this offset; inf: all may begin."""
        with self._lock:
            if (partition := self._partitions.get(key)) is not None:
                partition.up_to = up_to

    def finish(self, key: Key, is_on: bool) -> None:
        """Begin what waits below a message that is done or with a handler, though the partition is held up."""
        with self._lock:
            if (partition := self._partitions.get(key)) is not None:
                partition.finish_to = partition.gaps_to() if is_on else -1

    def close_gaps(self) -> bool:
        """The run ends: begin only what waits below a message that is done or with a handler, where a cut has no gaps.

        Returns whether any of it is to come.
        """
        are_open = False
        with self._lock:
            for partition in self._partitions.values():
                assignment = partition.assignment
                if assignment.over or not assignment.lease.is_cut_whole or assignment.lease.is_paused:
                    partition.closes_to = -1
                    continue
                partition.closes_to = last = partition.gaps_to()
                waiting = [x.message for x in partition.lanes.values() if x.message is not None and not x.running]
                are_open = (
                    are_open
                    or bool(partition.with_handlers(assignment))
                    or any(offset_of(each) < last for each in waiting)
                )
        return are_open

    @reading
    def are_enough(self, key: Key) -> bool:
        """Whether nothing more of a partition is delivered, since enough of its lanes wait for a first try."""
        if self.most_waiting is None or (partition := self._partitions.get(key)) is None:
            return False
        if len(partition.lanes) - len(partition.started) < self.most_waiting:
            return False
        with self._lock:  # what waits for its time is no reason
            found = sum(x.due is None and x not in partition.started for x in partition.lanes.values())
            return found >= self.most_waiting

    @reading
    def waiting(self, key: Key) -> int:
        """How many messages of a partition wait, also for their next try: no handler has them."""
        with self._lock:
            partition = self._partitions.get(key)
            lanes = () if partition is None else partition.lanes.values()
            return sum(len(x.rest or ()) + (x.message is not None and not x.running) for x in lanes)

    @reading
    def failing(self, key: Key) -> int:
        """How many messages of a partition wait for another try."""
        with self._lock:
            partition = self._partitions.get(key)
            return 0 if partition is None else len(partition.started - partition.running)

    @reading
    def is_running(self, key: Key) -> bool:
        """Whether a handler has a message of this partition, of whichever assignment."""
        with self._lock:
            return (partition := self._partitions.get(key)) is not None and bool(partition.running)

    @reading
    def recall(self, assignment: Assignment) -> list[Message]:
        """Remove and return the messages of an assignment that wait, and are not with a handler, by offset."""
        found: list[Message] = []
        with self._lock:
            partition = self._partitions.get(assignment.key)
            if partition is None or partition.assignment is not assignment:
                return found
            partition.parked.clear()
            partition.unlogged.clear()
            self._alone = {place: has_ended for place, has_ended in self._alone.items() if place[0] != assignment.key}
            for lane in list(partition.lanes.values()):
                if lane.rest:
                    found += lane.rest
                    lane.rest.clear()
                if not lane.running:
                    if lane.message is not None:
                        found.append(lane.message)
                    partition.started.discard(lane)
                    self._remove(lane)
        return sorted(found, key=offset_of)

    @reading
    def oldest(self, assignment: Assignment) -> float | None:
        """Since when (ms, own clock) a handler has had a message of this assignment; None: none has."""
        with self._lock:
            partition = self._partitions.get(assignment.key)
            running = () if partition is None else partition.running
            times = (lane.began + self._grace_ms for lane in running if lane.assignment is assignment)
            return min(times, default=None)

    @reading
    def leave(self, assignment: Assignment, before: float) -> list[Message]:
        """Remove and return messages of single lanes that handlers have had since before that time (ms, own clock).

        They are still in flight; what their handlers do has no effect. (Without an order each lane has one message.)
        """
        found: list[Message] = []
        with self._lock:
            partition = self._partitions.get(assignment.key)
            for lane in [] if partition is None else list(partition.running):
                message = lane.message
                if message is None or lane.assignment is not assignment or lane.began + self._grace_ms > before:
                    continue
                offset = offset_of(message)
                self._rest(lane)
                self.left[lane] = LeftBehind(*assignment.key, offset, offset, message.key(), lane.began)
                lane.is_left = True
                self._go_on(lane, None)
                found.append(message)
        return found

    @reading
    def disown(self, assignment: Assignment) -> None:
        """What handlers have of this assignment is given to others: they no longer hold it."""
        with self._lock:
            partition = self._partitions.get(assignment.key)
            for lane in () if partition is None else partition.running:
                lane.is_left = lane.is_left or lane.assignment is assignment

    @reading
    def with_handlers(self, assignment: Assignment) -> list[int]:
        """The offsets of this assignment's messages that handlers have."""
        with self._lock:
            partition = self._partitions.get(assignment.key)
            return [] if partition is None else partition.with_handlers(assignment)

    def hanging(self, before: float) -> list[Lane]:
        """Lanes that have been with a handler since before that time (ms, own clock)."""
        with self._lock:
            running = (lane for x in self._partitions.values() for lane in x.running)
            return [lane for lane in (*running, *self.left) if lane.began < before]

    def held_back(self, now: float, longer_than: float) -> tuple[HeldBack, ...]:
        """Partitions whose lowest started message was first tried this long ago (ms), by topic and partition."""
        found = []
        with self._lock:
            for (topic, number), partition in self._partitions.items():
                assignment = partition.assignment
                if assignment.stage not in (Stage.ACTIVE, Stage.REVOKING) or not partition.started:
                    continue
                started = [
                    (offset_of(x.message), x.since, x.message) for x in partition.started if x.message is not None
                ]
                offset, since, message = min(started, key=lambda one: one[:2])
                if now >= since + longer_than:
                    about = assignment.tracker.in_hand, assignment.releasing
                    why = given_up(message) if partition.has_left(offset) else ""
                    found.append(HeldBack(topic, number, offset, message.key(), now - since, *about, why=why))
        return tuple(sorted(found, key=lambda one: one[:2]))


def _is_ahead_of_tried(lane: Lane) -> bool:
    """Whether a message after its own in its key was tried, and waits."""
    behind = lane.behind
    while behind is not None and (behind.running or not behind.since):
        behind = behind.behind
    return behind is not None


def _has(messages: Iterable[Message], offset: int) -> bool:
    return any(offset_of(message) == offset for message in messages)


def _are_at_work(partitions: Iterable[Partition], now: float) -> bool:
    return any(now < lane.began + HANGS_MS for partition in partitions for lane in partition.running)
