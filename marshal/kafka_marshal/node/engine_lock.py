"""The lock around one engine: when it is released, its effects are carried out; and what a driver's parts share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from kafka_marshal.errors import ClosedError
from kafka_marshal.types import T

if TYPE_CHECKING:
    from kafka_marshal.engine.effects import Call, Effect, RestoreState, SaveState, TakeOver
    from kafka_marshal.engine.engine import Engine
    from kafka_marshal.logs import RateLimitedLog
    from kafka_marshal.node.events import Events
    from kafka_marshal.node.life import Life
    from kafka_marshal.node.replica import Replica
    from kafka_marshal.ports import Cluster
    from kafka_marshal.runtime import Condition
    from kafka_marshal.types import Key


#: Whether this thread runs the user's code with the lock held (a predicate of ``WorldView.wait_for``).
under_lock: ContextVar[bool] = ContextVar("under_lock", default=False)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the parts of one driver share."""

    cluster: Cluster
    replica: Replica
    lock: EngineLock
    events: Events
    rate_limited: RateLimitedLog


class DriverPart:
    """A part of one driver."""

    def __init__(self, shared: Shared) -> None:
        self._cluster, self._replica, self._lock = shared.cluster, shared.replica, shared.lock
        self._events, self._rate_limited = shared.events, shared.rate_limited
        self._now_ms: Callable[[], float] = shared.cluster.runtime.now_ms


class ConsumerPort(Protocol):
    """What the node needs of a consumer."""

    def _fetch(self, changes: Mapping[Key, int | None], expected: Mapping[Key, int]) -> None:
        """Fetch each partition from its offset on, or (None) stop fetching it; what is expected may be read ahead."""

    def _call(self, call: Call) -> None:
        """Run the user's callback; runs on the callback thread."""

    def _take_over(self, asked: TakeOver) -> None:
        """Carry out a step of taking over a partition, on another thread; the lock is held."""

    def _close_producer(self, key: Key, token: int) -> None:
        """Close the transactional producer of a holding that is over; the lock is held."""

    def _save_state(self, asked: SaveState) -> None:
        """Have the user's on_checkpoint called, on another thread; the lock is held."""

    def _restore_state(self, asked: RestoreState) -> None:
        """Have the user's on_restore called, on another thread; the lock is held."""

    def _completed(self, checkpoint: int) -> None:
        """Have the user's on_completed called, on another thread; the lock is held."""

    #: When a read last left nothing fetched behind (own clock, ms); 0: nothing is read.
    _drained_at: float

    def _log_end(self, key: Key) -> int | None: ...

    def _reclaim(self, before: float) -> None:
        """Deliver again what was delivered before that time (ms), and then dropped; the lock is held."""

    def _drain(self) -> None:
        """Pass what user threads have reported to the engine; the lock is held."""


class LockUse:
    """The lock as a context manager; see ``EngineLock.locked``.

    A class with one instance: each run of messages uses it four times, and a generator takes five times as long.
    """

    __slots__ = ("_lock", "_step")

    def __init__(self, lock: EngineLock, step: bool) -> None:
        self._lock = lock
        self._step = step

    def __enter__(self) -> Engine:
        lock = self._lock
        lock.life.refuse_fork()
        lock.condition.__enter__()
        try:
            lock.drain()
        except BaseException:
            lock.condition.__exit__(None, None, None)
            raise
        return lock.engine

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        lock = self._lock
        try:
            if kind is None:
                (lock.settle if self._step else lock.empty_outbox)()
        finally:
            lock.condition.__exit__(kind, error, tb)


class EngineLock:
    """One engine, its lock, and its consumers. The lock is held for methods, but ``locked``, ``check`` and ``fail``."""

    def __init__(self, condition: Condition, life: Life, engine: Engine, now_ms: Callable[[], float]) -> None:
        self.condition = condition
        self.life = life
        self.engine = engine
        self.ports: dict[int, ConsumerPort] = {}
        #: The replica has caught up, and the engine knows.
        self.started = False
        #: Set before the lock is first used.
        self.carry_out: Callable[[list[Effect]], object]
        self._now_ms = now_ms
        self._use, self._use_and_step = LockUse(self, step=False), LockUse(self, step=True)

    def locked(self, *, step: bool = True) -> LockUse:
        """Use the engine; at the end, its effects are carried out.

        step=False leaves what is due by time to the background thread: for deliveries and reads, which are frequent.
        """
        return self._use_and_step if step else self._use

    def drain(self) -> None:
        """Pass what user threads have reported to the engine."""
        for port in list(self.ports.values()):
            port._drain()

    def empty_outbox(self) -> None:
        """Carry out the engine's effects, if there are any."""
        if self.engine.outbox.effects:
            self.carry_out(self.engine.take_effects())
            self.condition.notify_all()

    def settle(self) -> None:
        """Have the engine do what is due, and carry out its effects."""
        if self.started and not self.life.ended:
            self.engine.take(None, self.engine.step, self._now_ms())
        self.carry_out(self.engine.take_effects())
        self.condition.notify_all()

    def fail(self, error: Exception) -> None:
        """End for good: every lease is over (any thread)."""
        with self.condition:
            if self.engine.failure is None:
                self.engine.take(None, self.engine.fail, error, self._now_ms())
            self.carry_out(self.engine.take_effects())
            self.condition.notify_all()

    def raise_in_consumers(self, error: Exception) -> None:
        """Each consumer raises this, once."""
        self.engine.take(None, self.engine.raise_error, error, None, self._now_ms())

    def check(self) -> None:
        """Raise the error that has ended the engine, if there is one (any thread)."""
        if self.life.ended:
            raise ClosedError("this Marshal is closed; make a new one")
        if self.engine.failure is not None:
            raise self.engine.failure

    def wait_for(self, predicate: Callable[[], T], timeout_s: float | None) -> T:
        """Wait until predicate() is true, the engine fails, its driver ends or the time is up; its last value."""
        self.condition.wait_for(lambda: predicate() or self.engine.failure is not None or self.life.ended, timeout_s)
        return predicate()
