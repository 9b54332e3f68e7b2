"""Whether a driver may continue: not after a fork or the interpreter's end; and whether its background thread turns."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from kafka_marshal.errors import ForkedError, MarshalError
from kafka_marshal.logs import LOGGER, RateLimit, log
from kafka_marshal.runtime import THREADS, Runtime, is_ours

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
        #: The Marshal; None: there is none, or nothing refers to it any more.
        self.owner: Callable[[], Any] = lambda: None
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


#: Of several outages in a row, one is logged in this time (ms).
SAID_EVERY_MS = 10_000.0

#: A thread may turn this late after the end of its wait (ms), as the machine may be busy.
LATE_MS = 500.0

#: A user's thread reports an outage only if it sees it twice, this long apart (ms). If the whole process was stopped,
#: the background thread has turned by the second time.
AGAIN_MS = 500.0

#: A user's thread waits this long for its report to be written (s).
SAYING_S = 1.0


class Pulse:
    """When the background thread last turned (ran its loop), and when it should turn again; reports if it does not.

    Any thread may call this, also in a signal handler: it uses atomic stores only, and no lock.
    """

    def __init__(self, runtime: Runtime, whose: str, heartbeat_interval_ms: int) -> None:
        """whose: the member, for people."""
        self._runtime = runtime
        self._whose = whose
        self._interval_ms = heartbeat_interval_ms
        #: When it last turned (own clock, ms).
        self.turned_at: float = runtime.now_ms()
        self._due_at = self.turned_at
        #: The thread has ended with an error.
        self.over: bool = False
        self.thread_id: int | None = None
        #: An outage that a user's thread has seen: the turn it began with, and when that was.
        self._seen = (0.0, 0.0)
        self._said_of = 0.0
        self._repeats = RateLimit(SAID_EVERY_MS)

    def begin(self) -> None:
        """The thread begins."""
        is_ours.set(True)
        self.thread_id = threading.get_ident()

    def ended_by(self, error: BaseException) -> Exception:
        """The thread ends with this error; returns the one that user threads raise from now on."""
        self.over = True
        if isinstance(error, MarshalError):
            return error
        text = "the background thread of %s failed; all its leases are over"
        log(logging.ERROR, "failed", text, self._whose, error=error)
        if isinstance(error, Exception):
            return error
        found = MarshalError(
            f"the background thread of {self._whose} was ended by {type(error).__name__}, raised by a callback or a "
            "log handler. Its leases are over: other members repeat the messages in flight. Make a new Marshal"
        )
        found.__cause__ = error
        return found

    def turned(self, wait_s: float) -> float:
        """The thread turns, and will wait this long for the log; returns wait_s."""
        self.turned_at = now = self._runtime.now_ms()
        self._due_at = now + wait_s * 1000
        return wait_s

    def is_stalled(self, now: float) -> bool:
        """Whether it has not turned for a heartbeat interval, and is LATE_MS late."""
        return now > max(self.turned_at + self._interval_ms, self._due_at + LATE_MS)

    def place(self) -> str:
        """Where the thread is, for people: `` (it stands at FILE:LINE in FUNCTION)``; "": not known."""
        return place_of(self.thread_id)

    def stalled_text(self, now: float) -> str:
        """What an outage means, for people."""
        return (
            f"the background thread of {self._whose} has not turned for {(now - self.turned_at) / 1000:.1f} s, more "
            f"than its heartbeat interval of {self._interval_ms / 1000:g} s{self.place()}. Meanwhile no heartbeat goes "
            "out: two intervals after the last one its leases are over, it delivers nothing more, and others take "
            "the partitions over, and repeat messages in flight. A policy, a callback of librdkafka or a "
            "log handler that does not return holds the thread up, or the machine is too busy: let it return, or "
            "restart the process"
        )

    def check(self) -> None:
        """Called by a user's thread that waits for an answer: report an outage, once (*blocking*, briefly)."""
        now = self._runtime.now_ms()
        turn = self.turned_at
        if self.over or self._said_of == turn or not self.is_stalled(now):
            return
        if self._seen[0] != turn:
            self._seen = (turn, now)
        elif now - self._seen[1] >= min(AGAIN_MS, self._interval_ms):
            self._said_of = turn
            if self._repeats.due("stalled", now) is not None:
                text = f"{self.stalled_text(now)}. Marshal.health() says how it is now"
                say(self._runtime, logging.ERROR, "stalled", text)


#: The thread that holds a lock, as ``repr`` of it says.
_OWNER = re.compile(r"owner=(\d+)")


def place_of(thread_id: int | None, locks: int = 2) -> str:
    """Where a thread is, as `` (it stands at FILE:LINE in FUNCTION)``; "": not known.

    Of one that waits for a lock: where its holder is. locks: as many are followed.
    """
    frame = None if thread_id is None else sys._current_frames().get(thread_id)
    if frame is not None and locks and frame.f_code is threading.Condition.__enter__.__code__:
        owner = _OWNER.search(repr(frame.f_locals["self"]))
        if owner is not None and (where := place_of(int(owner[1]), locks - 1)):
            return f" (it waits for a lock whose holder{where.removeprefix(' (it')}"
    # Most waits are in the standard library; its caller is more useful.
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in sys.stdlib_module_names:
        frame = frame.f_back
    if frame is None:
        return ""
    return f" (it stands at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name})"


def say(runtime: Runtime, level: int, event: str, text: str) -> None:
    """Log from a user's thread (*blocking*, briefly).

    Another thread writes it: if this one were interrupted within ``logging``, it would keep the lock of a handler for
    ever, and every thread of the library that logs would wait for it.
    """
    write = partial(log, level, event, "%s", text)
    try:
        thread = runtime.start(write, "kafka-marshal-log")
    except RuntimeError:  # no thread can be started any more
        write()
    else:
        thread.join(SAYING_S)
