"""Ends drivers when their process forks, or its interpreter ends."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable

from kafka_marshal.errors import ForkedError
from kafka_marshal.logs import LOGGER, log
from kafka_marshal.runtime import THREADS, Runtime

#: No further Marshal is closed once the interpreter's end has taken this long (s).
EXIT_S = 5.0

#: Not empty: the interpreter ends, and we have closed what had no other owner.
exiting: list[bool] = []


class Life:
    """Whether one driver may continue: not after its end, a fork, or the interpreter's end."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        #: This is a forked child's copy.
        self.forked: bool = False
        self.ended = False
        #: Called in a forked child.
        self.on_fork: Callable[[], object] = lambda: None
        #: Called at the interpreter's end, unless the driver has ended by then.
        self.at_exit: Callable[[], object] | None = None

    def refuse_fork(self) -> None:
        """Raise ForkedError in a forked child: its copy of the lock may be held for ever."""
        if self.forked:
            raise ForkedError(
                "this Marshal was made in the parent process and can't be used after a fork: its leases belong to the "
                "parent. Make a new Marshal in the child"
            )

    def mark_forked(self) -> None:
        """In a forked child: what the parent had fetched, and its leases, belong to the parent alone."""
        self.forked = True
        self.on_fork()


#: The lives of all drivers of this process that have not ended.
WATCHED: weakref.WeakSet[Life] = weakref.WeakSet()


def _mark_forked() -> None:
    for life in WATCHED:
        life.mark_forked()


def _end_all() -> None:
    """At the interpreter's end: release what is still held. Our threads continue until this has returned."""
    exiting.append(True)
    if not LOGGER.hasHandlers():  # otherwise programs that have not configured logging would get lines now
        LOGGER.addHandler(logging.NullHandler())
    until = THREADS.monotonic() + EXIT_S
    for life in list(WATCHED):
        is_real = life.runtime is THREADS and not life.forked  # otherwise it is a simulation's, or the parent's
        at_exit = life.at_exit  # a thread of the library may end the driver meanwhile
        if at_exit is None or not is_real or life.ended or THREADS.monotonic() >= until:
            continue
        try:
            at_exit()
        except Exception as error:  # noqa: BLE001 - the interpreter ends, and others are to be closed, too
            text = "a Marshal was not closed at the interpreter's end; its leases end by themselves"
            log(logging.ERROR, "not_closed", text, error=error)


os.register_at_fork(after_in_child=_mark_forked)
atexit.register(_end_all)
