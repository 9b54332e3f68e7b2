"""Carries out what the engine wants done.

Blocking look-ups and the user's callbacks run on separate threads: neither may hold up a heartbeat.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime
from functools import partial

from kafka_marshal.engine.effects import (
    Append,
    Call,
    Callback,
    CheckpointCompleted,
    CloseProducer,
    Effect,
    Key,
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
from kafka_marshal.engine.inputs import Called, Located
from kafka_marshal.errors import MarshalError
from kafka_marshal.guard import report
from kafka_marshal.logs import log
from kafka_marshal.node.appends import Appends
from kafka_marshal.node.engine_lock import ConsumerPort, EngineLock
from kafka_marshal.node.events import Events
from kafka_marshal.node.pacing import Pacing
from kafka_marshal.node.replica import Replica
from kafka_marshal.node.topics import LOOKUP_TIMEOUT_S
from kafka_marshal.node.user_calls import UserCall, UserCalls
from kafka_marshal.ports import Cluster
from kafka_marshal.rate_limit import RateLimitedLog
from kafka_marshal.runtime import Executor

__all__ = ["Effects"]


#: This long after a topic grew, at the latest, all working members know its new partitions and claim them: twice the
#: interval of their checks.
GROWTH_SEEN_MS = 10_000


class Effects:
    """Carries out the effects of one engine."""

    def __init__(
        self,
        cluster: Cluster,
        replica: Replica,
        lock: EngineLock,
        pacing: Pacing,
        appends: Appends,
        events: Events,
        rate_limited: RateLimitedLog,
        lookups: Executor,
    ) -> None:
        self.appends = appends
        #: Events of the member, for people.
        self.events = events
        self.callbacks: UserCalls = UserCalls(cluster.runtime)
        self._cluster = cluster
        self._replica = replica
        self._lock = lock
        self._pacing = pacing
        #: The rate-limited log.
        self.rate_limited = rate_limited
        self._lookups = lookups
        self._now_ms = cluster.runtime.now_ms

    def carry_out(self, effects: list[Effect]) -> None:
        """Carry these out, in order; the lock is held."""
        # Partitions move in groups: the consumer's reader and the user get one call for all of them.
        fetching: dict[int, dict[Key, int | None]] = {}
        calls: list[tuple[int, Callback | SaveState | RestoreState | CheckpointCompleted, list[Piece]]] = []
        self._pacing.carry_out(effects)
        for effect in effects:
            match effect:
                case Append():
                    self.appends.append(effect)
                case StartFetch(consumer=number, key=key, offset=offset):
                    fetching.setdefault(number, {})[key] = offset
                case StopFetch(consumer=number, key=key):
                    fetching.setdefault(number, {})[key] = None
                case LookUp():
                    self._lookups.submit(self._look_up, effect)
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
        for number, changes in fetching.items():
            if (port := self._lock.ports.get(number)) is not None:
                port._fetch(changes)
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
                        lock.engine.take(Located(wanted, *marks[key], first), self._now_ms())
                    return
                self.rate_limited.warn(
                    "no_leader", key, f"{key[0]} [{key[1]}]: has no leader at the moment; asking again"
                )
            except MarshalError as error:
                text = f"{key[0]} [{key[1]}]: log start and end not found, asking again: {error}"
                self.rate_limited.unanswered("look_up_failed", key, text)
            with lock.condition:
                lock.condition.wait(0.2)

    def _submit(self, port: ConsumerPort | None, call: Call) -> None:
        text = f"{call.callback} of {places(piece.key for piece in call.pieces)}"
        self.callbacks.submit(UserCall(text, partial(self._call, port, call), port, Called(call)))

    def _call(self, port: ConsumerPort | None, call: Call) -> None:
        """On the callback thread."""
        try:
            if port is not None:
                port._call(call)
        except BaseException as error:  # noqa: BLE001 - the user's, on a thread of the library
            report(str(call.callback), error)
        finally:
            with self._lock.condition:
                self._lock.engine.take(Called(call), self._now_ms())
                self._lock.settle()

    def check(self, now: float) -> None:
        """Say that a callback does not return: what waits for it pauses."""
        if (text := self.callbacks.late(now)) is not None:
            log(logging.WARNING, "callback_late", "%s", text)

    def end(self) -> None:
        """Look up nothing more; callbacks that were asked for are called."""
        self._lookups.shutdown(wait=False, cancel_futures=True)
        self.callbacks.shutdown(wait=False)


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
