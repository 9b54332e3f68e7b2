"""Closes a handle that nothing refers to any more, with a warning: a notebook cell that runs again drops one.

Otherwise threads of the library would work for it for ever, and keep its leases. So they never refer to the user's
object: to a Marshal only weakly, to a consumer by a twin that shares its state. The garbage collector may run anywhere,
with any lock held; what it calls here takes no lock, and leaves the rest to a thread of the library.

A program whose main() returns drops its handles, too, just before the interpreter ends. That is no mistake: the thread
waits for a moment, and the interpreter's end releases everything without a warning.
"""

from __future__ import annotations

import logging
import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial

from kafka_marshal.logs import log
from kafka_marshal.node.driver import Driver
from kafka_marshal.node.fork_guard import exiting
from kafka_marshal.runtime import THREADS

#: A dropped handle is closed after this time (s), as the interpreter may be about to end.
GRACE_S = 1.0


def close_if_dropped(handle: object, driver: Driver, is_closed: Callable[[], bool], end: Callable[[], object]) -> None:
    """If nothing refers to an open handle any more, have a thread of the library warn, and call end().

    is_closed and end must not refer to the handle. It has no effect in a simulation, where a process ends as if killed.
    """
    if driver.cluster.runtime is THREADS:
        weakref.finalize(handle, _dropped, driver, is_closed, end, repr(handle)).atexit = False


def _dropped(driver: Driver, is_closed: Callable[[], bool], end: Callable[[], object], name: str) -> None:
    """The collector has taken the handle (any thread, any lock may be held)."""
    if not (is_closed() or driver.is_over or driver.life.forked or exiting or sys.is_finalizing()):
        driver.servants.post(partial(_close, driver, is_closed, end, name))


def _close(driver: Driver, is_closed: Callable[[], bool], end: Callable[[], object], name: str) -> None:
    until = driver.monotonic() + GRACE_S
    with driver.condition:
        while not (is_closed() or driver.is_over) and (left := until - driver.monotonic()) > 0:
            driver.condition.wait(left)
    if is_closed() or driver.is_over or exiting:
        return
    text = (
        f"{name} was dropped without close(): nothing in this program refers to it any more. What it holds is released "
        "now; what was handed out and is not done comes again, here or at another member. Close it, best by a with "
        "block, or keep a reference as long as it is to work"
    )
    log(logging.WARNING, "dropped", "%s", text)
    try:
        warnings.warn(text, ResourceWarning, stacklevel=1)
    except ResourceWarning:  # a filter turns it into an error, but there is no caller to get it; the log has it
        log(logging.DEBUG, "dropped", "%s: as an error, it reaches nobody", name)
    end()
