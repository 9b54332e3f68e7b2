"""Detects a turn that never ends: real time passes, and virtual time does not.

Tasks run one at a time, so one that waits for a real lock, or loops without entering the simulation, stops them all.
Only real time shows it; histories don't depend on it.
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

#: The promise that such a turn breaks.
HANGS = "hangs"
#: Real time between two checks; a turn found by two of them hangs. Turns take milliseconds, and an overloaded or
#: sleeping machine must not be taken for a worker that hangs.
LOOK_AFTER_S = 15.0


@contextmanager
def failing_on_hangs(scheduler: Scheduler, checks: Checks) -> Iterator[None]:
    """End a turn that takes 15 to 30 s of real time, and fail the story.

    Has no effect outside the main thread, or if SIGALRM already has a handler.
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
            f"simulation's ({_where(frame)}); job.sleep lets others run",
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
    """The innermost line outside libraries, usually of the worker."""
    stack = traceback.extract_stack(frame)
    library = sysconfig.get_path("stdlib")
    own = [line for line in stack if not line.filename.startswith(library)] or stack
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}"
