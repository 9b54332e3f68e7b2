"""Asynchronous exceptions in a worker's calls of the library and in reads, and Ctrl-C of the story itself.

A signal handler can raise between any two instructions of a user's thread. Here it raises where that thread enters
the simulation: at each read of the clock, and before, within and after each wait for an answer, whose result is
then dropped. The worker continues with the same consumer.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import FrameType
from typing import TYPE_CHECKING

from kafka_marshal.ports import Message
from kafka_marshal.types import T

if TYPE_CHECKING:
    from kafka_marshal.testing.simulation.living import Trouble
    from kafka_marshal.testing.simulation.scheduler import Scheduler, Task


#: An interrupted call is interrupted at one of its first points, at most this one.
POINTS = 8
#: Longest time after which a wait is interrupted (ms).
LONGEST_WAIT_MS = 60.0


class Interrupted(Exception):  # noqa: N818  (as KeyboardInterrupt is called)
    """Raised within a call of the library."""


class TornReadError(Interrupted):
    """Raised by a reader that has already taken messages, as if a callback raised within librdkafka."""


class Interrupting:
    """Decides in which calls of a process an exception is raised, by its random source and its present trouble."""

    def __init__(self, scheduler: Scheduler, trouble: Trouble, rng: Random) -> None:
        self._scheduler = scheduler
        self._trouble = trouble
        self._rng = rng
        #: Tasks within a call that will be interrupted → points left until then.
        self._left: dict[Task, int] = {}
        #: Called with the kind of each exception.
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

    def point(self) -> None:
        """The current task reaches a point."""
        task = self._scheduler.current
        if task is None or (left := self._left.get(task)) is None:
            return
        self._left[task] = left - 1
        if left == 1:
            self._raise(task)

    def rings_at(self) -> float | None:
        """Virtual time (ms) at which the wait that the current task begins is interrupted; None: it is not."""
        task = self._scheduler.current
        if task is None or self._left.get(task) != 1:
            return None
        return self._scheduler.now + self._rng.random() * LONGEST_WAIT_MS

    def ring(self) -> None:
        """Interrupt the current wait."""
        if (task := self._scheduler.current) is not None:
            self._raise(task)

    def _raise(self, task: Task) -> None:
        del self._left[task]
        self.on_raised("interrupted")
        raise Interrupted

    def tear(self, messages: list[Message]) -> None:
        """Perhaps raise in a reader that has taken these."""
        if messages and self._trouble.torn_reads and self._rng.random() < self._trouble.torn_reads:
            self.on_raised("torn")
            raise TornReadError


@contextmanager
def interrupted_between(on_signal: Callable[[], object] = lambda: None) -> Iterator[None]:
    """A first Ctrl-C calls ``on_signal`` and raises KeyboardInterrupt at the end of this; a second one raises at once.

    Raised within a turn, KeyboardInterrupt would belong to a simulated worker: its ``with`` would close the consumer
    and the story would continue. Raised during garbage collection, it would be lost in a destructor.
    Has no effect outside the main thread, or if SIGINT already has a handler other than Python's.
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
        on_signal()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_asked:
        raise KeyboardInterrupt
