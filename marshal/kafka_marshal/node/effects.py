"""Appends records for the engine, and collects the results."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from math import inf
from typing import Any

from kafka_marshal.engine.effects import (
    Append,
    Call,
    Callback,
    CheckpointCompleted,
    CloseProducer,
    Effect,
    LookUp,
    Note,
    Piece,
    RestoreState,
    SaveState,
    StartFetch,
    StopFetch,
    TakeOver,
    Warn,
)
from kafka_marshal.engine.groups.checkpoints.cuts import places
from kafka_marshal.errors import AuthorizationError, MarshalError, grant
from kafka_marshal.guard import report
from kafka_marshal.logs import RateLimitedLog, log
from kafka_marshal.node.engine_lock import ConsumerPort, DriverPart, Shared
from kafka_marshal.node.events import Events
from kafka_marshal.node.life import place_of
from kafka_marshal.node.pacing import Pacing
from kafka_marshal.node.topics import LOOKUP_TIMEOUT_S
from kafka_marshal.ports import Ack, Appender, Cluster
from kafka_marshal.runtime import Executor, Runtime
from kafka_marshal.types import Key
from rationalizer import ClaimingPartition, encode


class AppendFailures:
    """Logs failures, rate-limited by reason, and keeps the result of the last append."""

    def __init__(self, topic: str, rate_limited: RateLimitedLog) -> None:
        self._topic = topic
        self._rate_limited = rate_limited
        #: Why appends fail, and since when (own clock, ms); None: the last one succeeded. Read without a lock.
        self.failing: tuple[str, float] | None = None
        #: When the last one failed (own clock, ms).
        self.failed_at: float = 0.0

    def hear(self, reason: str | None, now: float) -> None:
        """The result of an append: why it failed, None: it did not. now: own clock, ms."""
        if reason is None:
            self.failing = None
            return
        self.failed_at = now
        self.failing = (reason, now if self.failing is None else self.failing[1])
        # "… (after 3ms in state CONNECT)": the time does not make it another reason.
        text = f"an append to {self._topic} failed: {reason}"
        self._rate_limited.unanswered("append_failed", ("append", reason.partition(" (after ")[0]), text)


class Appends(DriverPart):
    """The appender of one driver; it is replaced if it has failed for good (C17)."""

    def __init__(self, shared: Shared, pacing: Pacing) -> None:
        super().__init__(shared)
        self._topic: str = self._replica.topic
        self._pacing = pacing
        self.failures: AppendFailures = AppendFailures(self._topic, self._rate_limited)
        self._appender = self._new()
        self._retired: list[Appender] = []
        self._is_broken = False

    def _new(self) -> Appender:
        interval_ms = self._lock.engine.settings.heartbeat_interval_ms
        return self._cluster.appender(self._topic, delivery_timeout_ms=interval_ms)

    def append(self, wanted: Append) -> None:
        """Append a record; the lock is held."""
        self._pacing.appended(wanted)
        self._appender.append(wanted.cp, encode(wanted.record), partial(self._acked, wanted.cp, wanted.token))

    def _acked(self, cp: int, token: int, ack: Ack) -> None:
        now_ms = self._cluster.runtime.now_ms
        self.failures.hear(ack.error, now := now_ms())
        self._is_broken = self._is_broken or ack.fatal
        if ack.forbidden:
            self._lock.fail(
                AuthorizationError(
                    f"appending to {self._topic!r} is forbidden: {ack.error}. Without it nothing can be claimed, kept "
                    f"or changed; leases of this process end. {grant('WRITE', 'topic', [self._topic])}"
                )
            )
        with self._lock.condition:
            self._pacing.answered()
            if ack.error is None or ack.refused:
                self._events.heard(now)
            else:
                self._events.trouble(ack.error, now)
            if ack.offset is not None:
                self._replica.tail.monitor.knows(cp, ack.offset)
            self._lock.engine.take(None, self._lock.engine.acked, token, ack.offset, now_ms())

    def poll(self) -> None:
        """Collect acknowledgements; the lock is held."""
        self._appender.poll()

    def replace_broken(self) -> None:
        """Continue with another appender if this one has failed for good; the lock is held."""
        if self._is_broken:
            self._is_broken = False
            self._retired.append(self._appender)
            self._appender = self._new()

    def flush(self, timeout_s: float) -> None:
        """Wait until what was appended is acknowledged (*blocking*)."""
        self._appender.flush(timeout_s)

    def close(self) -> None:
        """Drop what is not acknowledged; free the connections."""
        for appender in (*self._retired, self._appender):
            appender.close()


#: This long after a topic grew, at the latest, all working members know its new partitions and claim them: twice the
#: interval of their checks.
GROWTH_SEEN_MS = 10_000

#: As many look-ups as this that come together are asked for together: the first member of a fleet begins with all
#: partitions, and can hand over none before it knows their starts.
MANY = 16
#: How many are asked for in one request: their answers are taken under one lock.
TOGETHER = 100
#: How long they wait for their leaders (s) before each asks for itself.
TOGETHER_S = 2.0


class LookUps(DriverPart):
    """The look-ups of one driver."""

    def __init__(self, shared: Shared, threads: Executor) -> None:
        super().__init__(shared)
        self._threads = threads

    def start(self, wanted: Sequence[LookUp]) -> None:
        """Answer these, which the engine wants at the same time; the lock is held."""
        if len(wanted) < MANY:
            for each in wanted:
                self._threads.submit(self._look_up, each)
            return
        for first in range(0, len(wanted), TOGETHER):
            self._threads.submit(self._look_up_together, wanted[first : first + TOGETHER])

    def end(self) -> None:
        """Look up nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _look_up_together(self, wanted: Sequence[LookUp]) -> None:
        """On a look-up thread. What is not answered, or needs another question, is looked up for itself."""
        lock = self._lock
        asked = [each for each in wanted if lock.engine.is_asked(each)]
        if lock.life.ended or not asked:
            return
        try:
            marks = self._cluster.watermarks([each.key for each in asked], TOGETHER_S)
        except MarshalError:  # each says so if it still fails
            marks = {}
        with lock.locked():
            for each in asked:
                if each.start == "earliest" and each.key in marks:
                    low, high = marks[each.key]
                    lock.engine.take(None, lock.engine.located, each, low, high, low, self._now_ms())
                elif not lock.life.ended:
                    self._threads.submit(self._look_up, each)

    def _look_up(self, wanted: LookUp) -> None:
        """On a look-up thread."""
        key, lock, topic = wanted.key, self._lock, self._replica.topic
        while not lock.life.ended and lock.engine.is_asked(wanted):
            try:
                marks = self._cluster.watermarks([key], LOOKUP_TIMEOUT_S)
                if key in marks:
                    log_time = max(world.log_time for world in list(self._replica.worlds.values()))
                    first = _first_offset(self._cluster, topic, log_time, wanted, marks[key], LOOKUP_TIMEOUT_S)
                    with lock.locked():
                        lock.engine.take(None, lock.engine.located, wanted, *marks[key], first, self._now_ms())
                    break
                self._rate_limited.warn(
                    "no_leader", key, f"{key[0]} [{key[1]}]: has no leader at the moment; asking again"
                )
            except MarshalError as error:
                text = f"{key[0]} [{key[1]}]: log start and end not found, asking again: {error}"
                self._rate_limited.unanswered("look_up_failed", key, text)
                self._events.waits[key] = text
            with lock.condition:
                lock.condition.wait(0.2)
        self._events.waits.pop(key, None)


def _first_offset(
    cluster: Cluster, coordination: str, log_time: int, wanted: LookUp, marks: tuple[int, int], timeout_s: float
) -> int:
    """Where a group begins on a partition that it never held (P9, *blocking*).

    marks: log start and end. log_time: the newest of all CPs.
    """
    low, high = marks
    key, start = wanted.key, wanted.start
    if start == "earliest" or _is_old(cluster, coordination, log_time, wanted.claims_before, timeout_s):
        return low
    if isinstance(start, datetime):
        return cluster.offsets_for_time([key], int(start.timestamp() * 1000), timeout_s).get(key, high)
    return high


def _is_old(cluster: Cluster, coordination: str, log_time: int, claims: Mapping[int, int], timeout_s: float) -> bool:
    """Whether one of these records of the coordination topic, an offset by CP, is older than GROWTH_SEEN_MS."""
    if not claims:
        return False
    places: list[Key] = [(coordination, cp) for cp in claims]
    young = cluster.offsets_for_time(places, max(0, log_time - GROWTH_SEEN_MS), timeout_s)
    return any(offset < young.get((coordination, cp), 0) for cp, offset in claims.items())


#: What is claimed or looked up is read ahead, unless it is more than this at a time: a start loses claims to others.
MOST_EXPECTED = 16

#: A callback that has not returned for this long is logged, and from then on this often (ms).
LATE_MS = 10_000.0
SAID_EVERY_MS = 600_000.0

#: What to do about a callback that does not return, by its name; others: work on another thread.
_REMEDIES = {
    "on_checkpoint": "Return a Future for what takes long",
    "on_restore": "Find out what it waits for: its partitions deliver nothing before their state is there",
}


class UserCall:
    """One call of one callback."""

    __slots__ = ("began_at", "dropped", "named", "port", "run", "said_at", "thread_id")

    def __init__(
        self,
        named: str,
        run: Callable[[], object],
        port: ConsumerPort | None,
        dropped: Callable[[float], object] | None = None,
    ) -> None:
        #: For people: ``on_revoke of flights [3], flights [4]``.
        self.named: str = named
        self.run: Callable[[], object] = run
        self.port: ConsumerPort | None = port
        #: Gives the engine what it takes if it is never called, at that time (own clock, ms); None: nothing.
        self.dropped: Callable[[float], object] | None = dropped
        #: When it began (own clock, ms).
        self.began_at: float = 0.0
        self.thread_id: int | None = None
        #: When the log said last that it has not returned.
        self.said_at: float = -inf

    def described(self, now: float) -> str:
        """For people: ``on_revoke of flights [3] has not returned for 2.0 s (it stands at …)``."""
        ran_s = (now - self.began_at) / 1000
        return f"{self.named} has not returned for {ran_s:.1f} s{place_of(self.thread_id)}"


class UserCalls:
    """Runs callbacks in the order of their requests."""

    def __init__(self, runtime: Runtime) -> None:
        self._now_ms = runtime.now_ms
        self._executor = runtime.executor(1, "kafka-marshal-callback")
        self._waiting: deque[UserCall] = deque()
        #: The callback that runs now; read without a lock.
        self.running: UserCall | None = None

    def submit(self, call: UserCall) -> None:
        """Have it called soon."""
        self._waiting.append(call)
        self._executor.submit(self._carry_out)

    def _carry_out(self) -> None:
        try:
            call = self._waiting.popleft()
        except IndexError:
            return  # it was dropped
        call.began_at, call.thread_id = self._now_ms(), threading.get_ident()
        self.running = call
        try:
            call.run()
        finally:
            self.running = None

    def late(self, now: float) -> str | None:
        """What the log is to say of a callback that does not return; None: nothing now."""
        call = self.running
        if call is None or now < max(call.began_at + LATE_MS, call.said_at + SAID_EVERY_MS):
            return None
        call.said_at = now
        return self.late_text(call, now)

    def late_text(self, call: UserCall, now: float) -> str:
        """What it means that a callback has not returned, for people."""
        name = call.named.partition(" ")[0]
        saves = any(each.named.startswith("on_checkpoint") for each in (call, *list(self._waiting)))
        pauses = ", and those to be saved for a checkpoint pause" if saves else ""
        return (
            f"{call.described(now)}, and no other callback begins before that: partitions to be released stay here, "
            f"new ones deliver nothing{pauses}. Nothing is lost. Let it return. "
            f"{_REMEDIES.get(name, 'Do what takes long on another thread')}"
        )

    def drop(self, ports: Sequence[Any]) -> list[UserCall]:
        """Cancel the calls of these consumers that have not begun; returns them."""
        dropped = []
        for call in list(self._waiting):
            if not any(call.port is port for port in ports):
                continue
            try:
                self._waiting.remove(call)
            except ValueError:
                continue  # it has begun meanwhile
            dropped.append(call)
        return dropped

    def shutdown(self, wait: bool = True) -> None:
        """Accept no further callback; those requested before are called."""
        self._executor.shutdown(wait=wait)


class Effects(DriverPart):
    """Carries out the effects of one engine."""

    def __init__(self, shared: Shared, pacing: Pacing, lookups: Executor) -> None:
        super().__init__(shared)
        self.appends: Appends = Appends(shared, pacing)
        #: Events of the member, for people.
        self.events: Events = shared.events
        self.callbacks: UserCalls = UserCalls(shared.cluster.runtime)
        self._pacing = pacing
        #: The rate-limited log.
        self.rate_limited: RateLimitedLog = shared.rate_limited
        self._look_ups = LookUps(shared, lookups)

    def carry_out(self, effects: list[Effect]) -> None:
        """Carry these out, in order; the lock is held."""
        # Partitions move in groups: the consumer's reader and the user get one call for all of them.
        fetching: dict[int, dict[Key, int | None]] = {}
        calls: list[tuple[int, Callback | SaveState | RestoreState | CheckpointCompleted, list[Piece]]] = []
        wanted: list[LookUp] = []
        expected: list[Key] = []
        self._pacing.carry_out(effects)
        for effect in effects:
            match effect:
                case Append(record=record):
                    self.appends.append(effect)
                    if isinstance(record, ClaimingPartition):
                        expected.append((record.topic, record.partition))
                case StartFetch(consumer=number, key=key, offset=offset):
                    fetching.setdefault(number, {})[key] = offset
                case StopFetch(consumer=number, key=key):
                    fetching.setdefault(number, {})[key] = None
                case LookUp(key=key):
                    wanted.append(effect)
                    expected.append(key)
                case TakeOver(consumer=number):
                    if (port := self._lock.ports.get(number)) is not None:
                        port._take_over(effect)
                case CloseProducer(consumer=number, key=key, token=token):
                    if (port := self._lock.ports.get(number)) is not None:
                        port._close_producer(key, token)
                case SaveState(consumer=number) | RestoreState(consumer=number) | CheckpointCompleted(consumer=number):
                    calls.append((number, effect, []))  # in order with the others: on_lost comes before on_restore
                case Call(consumer=number, callback=callback, pieces=pieces):
                    if not calls or calls[-1][:2] != (number, callback):
                        calls.append((number, callback, []))
                    calls[-1][2].extend(pieces)
                case Note():
                    self.events.note(effect, self._now_ms())
                case Warn(message=message, is_error=is_error):
                    self.rate_limited.say(logging.ERROR if is_error else logging.WARNING, "warning", message, message)
        self._look_ups.start(wanted)
        ahead = self._expected(expected) if 0 < len(expected) <= MOST_EXPECTED else {}
        for number in dict.fromkeys((*fetching, *ahead)):
            if (port := self._lock.ports.get(number)) is not None:
                port._fetch(fetching.get(number, {}), ahead.get(number, {}))
        for number, what, called in calls:
            port = self._lock.ports.get(number)
            match what:
                case Callback():
                    self._submit(port, Call(number, what, tuple(called)))
                case SaveState() if port is not None:
                    port._save_state(what)
                case RestoreState() if port is not None:
                    port._restore_state(what)
                case CheckpointCompleted(checkpoint=checkpoint) if port is not None:
                    port._completed(checkpoint)

    def _expected(self, keys: list[Key]) -> dict[int, dict[Key, int]]:
        """Where their consumers will begin on these, as far as the log says it now."""
        found: dict[int, dict[Key, int]] = {}
        for number, consumer in self._lock.engine.consumers.items():
            view = consumer.source.view
            for key in keys:
                assignment, progress = consumer.assignments.get(key), view.progress(key)
                # A claim of what another holds only asks for it.
                if assignment is not None and progress and (assignment.lease.held or not view.is_held(key)):
                    found.setdefault(number, {})[key] = progress.stable + 1
        return found

    def _called(self, call: Call) -> Callable[[float], object]:
        """What the engine takes when the call has returned, or is dropped, at that time (own clock, ms)."""
        return partial(self._lock.engine.take, None, self._lock.engine.called, call)

    def _submit(self, port: ConsumerPort | None, call: Call) -> None:
        text = f"{call.callback} of {places(piece.key for piece in call.pieces)}"
        self.callbacks.submit(UserCall(text, partial(self._call, port, call), port, self._called(call)))

    def _call(self, port: ConsumerPort | None, call: Call) -> None:
        """On the callback thread."""
        try:
            if port is not None:
                port._call(call)
        except BaseException as error:  # noqa: BLE001 - the user's, on a thread of the library
            report(str(call.callback), error)
        finally:
            with self._lock.condition:
                self._called(call)(self._now_ms())
                self._lock.settle()

    def check(self, now: float) -> None:
        """Say that a callback does not return: what waits for it pauses."""
        if (text := self.callbacks.late(now)) is not None:
            log(logging.WARNING, "callback_late", "%s", text)

    def end(self) -> None:
        """Look up nothing more; callbacks that were asked for are called."""
        self._look_ups.end()
        self.callbacks.shutdown(wait=False)
