"""Exceptions out of nowhere: within a worker's calls of the library, out of a read, and Ctrl-C upon the story itself.

A signal's handler raises between any two instructions of a user's thread. Here it is raised where that thread meets
the simulation: at each look at the clock, and before, within and after each wait for an answer, whose result is
dropped then. The worker goes on with the same consumer.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from kafka_marshal.ports import Message

if TYPE_CHECKING:
    from kafka_marshal.testing.simulation.living import Trouble
    from kafka_marshal.testing.simulation.scheduler import Scheduler, Task

__all__ = ["Interrupted", "Interrupting", "TornReadError", "interrupted_between"]

T = TypeVar("T")

#: A call that is interrupted is so at one of its first so many points, if it has them.
POINTS = 8
#: How long a wait goes on before it is interrupted, at most (ms).
LONGEST_WAIT_MS = 60.0


class Interrupted(Exception):  # noqa: N818  (as KeyboardInterrupt is called)
    """Raised within a call of the library's."""


class TornReadError(Interrupted):
    """Raised by a reader that has taken messages already, as where a callback raises within librdkafka."""


class Interrupting:
    """What raises in one process, and where: its random source decides, and how bad its trouble is at the moment."""

    def __init__(self, scheduler: Scheduler, trouble: Trouble, rng: Random) -> None:
        self._scheduler = scheduler
        self._trouble = trouble
        self._rng = rng
        #: Tasks within a call that is to be interrupted: how many points there are up to that one.
        self._left: dict[Task, int] = {}
        #: Told of each: what it was.
        self.on_raised: Callable[[str], object] = lambda what: None

    def call(self, function: Callable[..., T], *args: object) -> T:
        """Call the library on a user's thread."""
        task, share = self._scheduler.current, self._trouble.interrupts
        if task is None or share == 0.0 or self._rng.random() >= share:
            return function(*args)
        self._left[task] = self._rng.randint(1, POINTS)
        try:
            return function(*args)
        finally:
            self._left.pop(task, None)

    def come(self) -> None:
        """The present task comes to a point."""
        task = self._scheduler.current
        if task is None or (left := self._left.get(task)) is None:
            return
        self._left[task] = left - 1
        if left == 1:
            self._raise(task)

    def rings_at(self) -> float | None:
        """When (virtual ms) the wait that the present task begins is interrupted; None: it is not."""
        task = self._scheduler.current
        if task is None or self._left.get(task) != 1:
            return None
        return self._scheduler.now + self._rng.random() * LONGEST_WAIT_MS

    def ring(self) -> None:
        """That time has come."""
        if (task := self._scheduler.current) is not None:
            self._raise(task)

    def _raise(self, task: Task) -> None:
        del self._left[task]
        self.on_raised("interrupted")
        raise Interrupted

    def tear(self, messages: list[Message]) -> None:
        """A reader has taken these."""
        if messages and self._trouble.torn_reads and self._rng.random() < self._trouble.torn_reads:
            self.on_raised("torn")
            raise TornReadError


@contextmanager
def interrupted_between(tell: Callable[[], object] = lambda: None) -> Iterator[None]:
    """A first Ctrl-C calls tell, and raises KeyboardInterrupt at the end of this; a second one raises it at once.

    Raised within a turn, KeyboardInterrupt would be a simulated worker's own: its ``with`` closes its consumer, time
    passes for that, and the story goes on. Raised where garbage is collected, it would be lost in some destructor.
    Where this is not the main thread, or SIGINT has a handler already that is not Python's own, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    is_asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        is_asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        tell()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_asked:
        raise KeyboardInterrupt
