"""Clock and threads of a worker in a test: it can be paused, as by SIGSTOP, and killed, as by SIGKILL.

No thread can be stopped from outside, so each stops when it reads the clock next: the library does before each message,
heartbeat and call. The clock is the machine's, and what a test has added to it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from enum import Enum, auto

from kafka_marshal.node.driver import Driver
from kafka_marshal.runtime import CLOCK_ID, MachineRuntime, is_ours


class Killed(BaseException):
    """Raised in each thread and task of a worker that was killed."""


class Doing(Enum):
    """Of a worker."""

    RUNNING = auto()
    PAUSED = auto()
    KILLED = auto()


class Time:
    """Time that passes as the machine's, and can be put forward."""

    #: Seconds.
    added: float = 0.0

    def of_day_ms(self) -> float:
        """The brokers' clock."""
        return (time.time() + self.added) * 1000


class StoppableRuntime(MachineRuntime):
    """The runtime of one worker."""

    def __init__(self, time: Time) -> None:
        super().__init__()
        self.clock_gettime: Callable[[int], float] = lambda _: self.now_ms() / 1000
        self.state: Doing = Doing.RUNNING
        #: Of the Marshals (and sessions of Admins) that were opened here.
        self.drivers: list[Driver] = []
        self._time = time
        self._changed = threading.Condition()
        #: The thread that has paused or killed it.
        self._outside = 0
        self._conditions: list[threading.Condition] = []

    def change(self, state: Doing) -> None:
        """Pause, resume or kill."""
        with self._changed:
            self._outside, self.state = threading.get_ident(), state
            self._changed.notify_all()

    def wake(self) -> None:
        """Have threads check whether the time of their wait is over."""
        for each in list(self._conditions):
            with each:
                each.notify_all()

    def _look(self) -> None:
        """Wait while the worker is paused; raise Killed if it was killed: not in the library's threads, which end."""
        if self.state is Doing.PAUSED:
            if threading.get_ident() == self._outside:
                raise RuntimeError("this worker is paused, and answers nothing: resume() lets it continue")
            with self._changed:
                self._changed.wait_for(lambda: self.state is not Doing.PAUSED)
        if self.state is Doing.KILLED and not is_ours.get() and threading.get_ident() != self._outside:
            raise Killed

    # What the library calls.

    def now_ms(self) -> float:
        self._look()
        return (time.clock_gettime(CLOCK_ID) + self._time.added) * 1000

    def monotonic(self) -> float:
        self._look()
        return time.monotonic() + self._time.added

    def condition(self) -> threading.Condition:
        self._conditions.append(made := super().condition())
        return made

    def start(self, target: Callable[[], object], name: str) -> threading.Thread:
        if isinstance(driver := getattr(target, "__self__", None), Driver):
            self.drivers.append(driver)
        return super().start(lambda: self.run(target), name)

    def launch(self, target: Callable[[], object], name: str) -> None:
        super().launch(lambda: self.run(target), name)

    def run(self, target: Callable[[], object]) -> None:
        """Call it in a thread of this worker."""
        _mine.set(self)
        with suppress(Killed):
            target()


_mine: ContextVar[StoppableRuntime | None] = ContextVar("_mine", default=None)


def is_of_the_living(record: object) -> bool:
    """A filter of log lines: a worker that was killed writes none."""
    runtime = _mine.get()
    return runtime is None or runtime.state is not Doing.KILLED
