"""A turn that never ends: real time passes, and virtual time does not.

Tasks run one at a time, so one that waits for a lock of the interpreter's own, or goes round without asking for
anything, stops them all. Real time says so, and only that: no history has anything of it.
"""

from __future__ import annotations

import signal
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kafka_marshal.testing.simulation.checks import Checks
from kafka_marshal.testing.simulation.scheduler import Over, Scheduler

__all__ = ["HANGS", "noticed_when_hanging"]

#: The promise that such a turn breaks.
HANGS = "hangs"
#: Real time after which a turn is looked at; the next time it is over. Turns take milliseconds, and a machine that is
#: overloaded or asleep for a while must not look like a worker that hangs.
LOOK_AFTER_S = 15.0


@contextmanager
def noticed_when_hanging(scheduler: Scheduler, checks: Checks) -> Iterator[None]:
    """A turn that goes on for 15 to 30 s of real time fails the story, and ends.

    Where this is not the main thread, or SIGALRM has a handler already, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGALRM) != signal.SIG_DFL:
        yield
        return
    seen: tuple[object, ...] = ()

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        task = scheduler.current
        before, seen = seen, (scheduler.now, task, task and task.token)
        if task is None or seen != before:
            return
        who = f"a thread ({task.name}) of {getattr(task.process, 'name', '')}"
        checks.fail(
            HANGS,
            f"{who} lets no virtual time pass: it goes round and round, or waits for a lock or queue that is not the "
            f"simulation's ({_where(frame)}); job.sleep lets others go on",
        )
        raise Over

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_AFTER_S, LOOK_AFTER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _where(frame: FrameType | None) -> str:
    """The innermost line that is nobody's library: the worker's own, most often."""
    stack = traceback.extract_stack(frame)
    library = sysconfig.get_path("stdlib")
    own = [line for line in stack if not line.filename.startswith(library)] or stack
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}"
