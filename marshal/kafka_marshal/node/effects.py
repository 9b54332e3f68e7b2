"""Carries out what the engine wants done.

Blocking look-ups and the user's callbacks run on separate threads: neither may hold up a heartbeat.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

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
from kafka_marshal.guard import report
from kafka_marshal.logs import log
from kafka_marshal.node.appends import Appends
from kafka_marshal.node.engine_lock import ConsumerPort, EngineLock
from kafka_marshal.node.events import Events
from kafka_marshal.node.look_ups import LookUps
from kafka_marshal.node.pacing import Pacing
from kafka_marshal.node.replica import Replica
from kafka_marshal.node.user_calls import UserCall, UserCalls
from kafka_marshal.ports import Cluster
from kafka_marshal.rate_limit import RateLimitedLog
from kafka_marshal.runtime import Executor
from kafka_marshal.types import Key


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
        self._lock = lock
        self._pacing = pacing
        #: The rate-limited log.
        self.rate_limited = rate_limited
        self._look_ups = LookUps(cluster, replica, lock, rate_limited, lookups)
        self._now_ms = cluster.runtime.now_ms

    def carry_out(self, effects: list[Effect]) -> None:
        """Carry these out, in order; the lock is held."""
        # Partitions move in groups: the consumer's reader and the user get one call for all of them.
        fetching: dict[int, dict[Key, int | None]] = {}
        calls: list[tuple[int, Callback | SaveState | RestoreState | CheckpointCompleted, list[Piece]]] = []
        wanted: list[LookUp] = []
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
                    wanted.append(effect)
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
