"""What becomes of drivers when their process forks, or its interpreter ends."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable
from typing import Protocol

from kafka_marshal.logs import LOGGER, log
from kafka_marshal.runtime import THREADS, Runtime

__all__ = ["WATCHED", "exiting"]

#: No further Marshal is closed once the interpreter's end has taken this long (s).
EXIT_S = 5.0

#: Not empty: the interpreter ends, and we have closed what nobody else had.
exiting: list[bool] = []


class Watched(Protocol):
    """A driver, as far as it goes."""

    runtime: Runtime
    forked: bool
    #: Called at the interpreter's end, unless it has ended by then.
    at_exit: Callable[[], object] | None

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""

    def mark_forked(self) -> None:
        """This process is a forked child."""


#: All drivers of this process that have not ended.
WATCHED: weakref.WeakSet[Watched] = weakref.WeakSet()


def _mark_forked() -> None:
    for driver in WATCHED:
        driver.mark_forked()


def _end_all() -> None:
    """The interpreter ends: release what nobody has released. Our threads go on until this has returned."""
    exiting.append(True)
    if not LOGGER.hasHandlers():  # else those who have not asked for any log would get some now
        LOGGER.addHandler(logging.NullHandler())
    until = THREADS.monotonic() + EXIT_S
    for driver in list(WATCHED):
        is_real = driver.runtime is THREADS and not driver.forked  # else a simulation's, or the parent's
        if driver.at_exit is None or not is_real or driver.is_over or THREADS.monotonic() >= until:
            continue
        try:
            driver.at_exit()
        except Exception as error:  # noqa: BLE001 - the interpreter ends, and others are to be closed, too
            text = "a Marshal was not closed at the interpreter's end; its leases end by themselves"
            log(logging.ERROR, "not_closed", text, error=error)


os.register_at_fork(after_in_child=_mark_forked)
atexit.register(_end_all)
