"""The engine's lock as a context manager, and what the driver needs of those who use it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from kafka_marshal.engine.effects import Call, Key
from kafka_marshal.engine.engine import Engine

if TYPE_CHECKING:
    from kafka_marshal.node.driver import Driver

__all__ = ["ConsumerPort", "Hold", "under_lock"]

#: Whether this thread runs code of the user's with the lock held (a predicate of ``WorldView.wait_for``).
under_lock: ContextVar[bool] = ContextVar("under_lock", default=False)


class ConsumerPort(Protocol):
    """What the driver needs of a consumer of the shell."""

    def _fetch(self, changes: Mapping[Key, int | None]) -> None:
        """Fetch these from an offset on, or (None) no more."""

    def _call(self, call: Call) -> None:
        """Run the user's callback; runs on the callback thread."""

    #: When a read last took all that had come (own clock, ms); 0: nothing is read.
    _drained_at: float

    def _log_end(self, key: Key) -> int | None: ...

    def _reclaim(self, before: float) -> None:
        """Hand out again what was handed out before that time (ms), and dropped; the lock is held."""

    def _drain(self) -> None:
        """Tell the engine what user threads have said since; the lock is held."""


class Hold:
    """The lock, as a context manager around a use of the engine; see ``Driver.locked``.

    A class, and one made once: four of them come with each run of messages, and a generator takes five times as long.
    """

    __slots__ = ("_driver", "_step")

    def __init__(self, driver: Driver, step: bool) -> None:
        self._driver = driver
        self._step = step

    def __enter__(self) -> Engine:
        driver = self._driver
        driver.refuse_fork()
        driver.condition.__enter__()
        try:
            driver.drain()
        except BaseException:
            driver.condition.__exit__(None, None, None)
            raise
        return driver.engine

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        driver = self._driver
        try:
            if kind is None:
                (driver.settle if self._step else driver.empty_outbox)()
        finally:
            driver.condition.__exit__(kind, error, tb)
