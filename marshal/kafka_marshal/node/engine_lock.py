"""The lock around one engine: on leaving it, what the engine wants done is carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Protocol, TypeVar

from kafka_marshal.engine.effects import Call, Effect, Key
from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.inputs import Failed, RaiseError, Step
from kafka_marshal.errors import ClosedError
from kafka_marshal.node.fork_guard import Life
from kafka_marshal.runtime import Condition

__all__ = ["ConsumerPort", "EngineLock", "LockUse", "under_lock"]

T = TypeVar("T")

#: Whether this thread runs code of the user's with the lock held (a predicate of ``WorldView.wait_for``).
under_lock: ContextVar[bool] = ContextVar("under_lock", default=False)


class ConsumerPort(Protocol):
    """What the node needs of a consumer of the shell."""

    def _fetch(self, changes: Mapping[Key, int | None]) -> None:
        """Fetch these from an offset on, or (None) no more."""

    def _call(self, call: Call) -> None:
        """Run the user's callback; runs on the callback thread."""

    #: When a read last took all that had come (own clock, ms); 0: nothing is read.
    _drained_at: float

    def _log_end(self, key: Key) -> int | None: ...

    def _reclaim(self, before: float) -> None:
        """Deliver again what was delivered before that time (ms) and dropped; the lock is held."""

    def _drain(self) -> None:
        """Pass on to the engine what user threads have reported since; the lock is held."""


class LockUse:
    """The lock as a context manager; see ``EngineLock.locked``.

    A class, and one made once: four of them come with each run of messages, and a generator takes five times as long.
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
    """One engine, its lock, and the consumers that use it. All but ``locked`` and ``fail``: the lock is held."""

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
        """Use the engine; on leaving, what it wants done is carried out.

        With step=False what is due by time is left to the background thread: for delivering and reading, which are
        frequent.
        """
        return self._use_and_step if step else self._use

    def drain(self) -> None:
        """Pass on to the engine what user threads have reported since."""
        for port in list(self.ports.values()):
            port._drain()

    def empty_outbox(self) -> None:
        """Carry out what the engine wants done, if anything."""
        if self.engine.outbox.effects:
            self.carry_out(self.engine.take_effects())
            self.condition.notify_all()

    def settle(self) -> None:
        """Let the engine do what is due, and carry it out."""
        if self.started and not self.life.ended:
            self.engine.take(Step(), self._now_ms())
        self.carry_out(self.engine.take_effects())
        self.condition.notify_all()

    def fail(self, error: Exception) -> None:
        """End for good: every lease is over (any thread)."""
        with self.condition:
            if self.engine.failure is None:
                self.engine.take(Failed(error), self._now_ms())
            self.carry_out(self.engine.take_effects())
            self.condition.notify_all()

    def raise_in_consumers(self, error: Exception) -> None:
        """Each consumer raises this, once."""
        self.engine.take(RaiseError(error), self._now_ms())

    def check(self) -> None:
        """Raise why the engine can't continue, if it can't."""
        if self.life.ended:
            raise ClosedError("this Marshal is closed; make a new one")
        if self.engine.failure is not None:
            raise self.engine.failure

    def wait_for(self, predicate: Callable[[], T], timeout_s: float | None) -> T:
        """Wait until predicate() is true, the engine fails, its driver ends or the time is up; its last value."""
        self.condition.wait_for(lambda: predicate() or self.engine.failure is not None or self.life.ended, timeout_s)
        return predicate()
