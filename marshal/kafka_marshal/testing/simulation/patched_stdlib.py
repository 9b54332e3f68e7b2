"""Simulated clocks, sleep and signals for a worker; it can't start threads."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from kafka_marshal.testing.simulation.network import BROKER_EPOCH_MS
from kafka_marshal.testing.simulation.process import Process, Worker
from kafka_marshal.testing.simulation.scheduler import Scheduler

_NS = 1_000_000_000


@contextmanager
def simulated_stdlib(scheduler: Scheduler, worker: Worker | None) -> Iterator[None]:
    """Within simulated processes, ``time``, ``signal`` and ``threading`` are simulated; all other code gets the real.

    Functions that the worker's module imported from these (``from time import sleep``) are replaced, too.
    """
    thread = threading.get_ident()

    def process() -> Process | None:
        # Other threads of this process are not simulated, such as those of a library.
        task = scheduler.current if threading.get_ident() == thread else None
        return task.process if task is not None and isinstance(task.process, Process) else None

    simulated = {**_clocks(process, scheduler), (signal, "signal"): _signal(process)}
    with ExitStack() as stack:
        theirs = _globals_of(worker)
        for (module, name), function in simulated.items():
            real = getattr(module, name)
            places = [(vars(module), name), *((theirs, taken) for taken, value in theirs.items() if value is real)]
            for where, known_as in places:
                stack.callback(where.__setitem__, known_as, real)
                where[known_as] = function
        stack.callback(setattr, threading.Thread, "start", threading.Thread.start)
        setattr(threading.Thread, "start", _no_thread(process))  # noqa: B010 - a method is not assigned otherwise
        yield


def _globals_of(worker: Worker | None) -> dict[str, Any]:
    found = getattr(worker, "__globals__", None)
    return found if isinstance(found, dict) else {}


def _clocks(
    process: Callable[[], Process | None], scheduler: Scheduler
) -> Mapping[tuple[Any, str], Callable[..., object]]:
    def sleep(seconds: float) -> None:
        if (mine := process()) is not None:
            mine.sleep(seconds)
        else:
            real_sleep(seconds)

    def clock(name: str, seconds: Callable[[Process], float]) -> Callable[[], float]:
        real = getattr(time, name)

        def simulated() -> float:
            mine = process()
            if mine is None:
                found: float = real()
                return found
            return int(seconds(mine) * _NS) if name.endswith("_ns") else seconds(mine)

        return simulated

    def own(mine: Process) -> float:
        return mine.runtime.monotonic()

    def of_day(_: Process) -> float:
        return (BROKER_EPOCH_MS + scheduler.now) / 1000

    real_sleep = time.sleep
    clocks = {"monotonic": own, "perf_counter": own, "time": of_day}
    names = [(name + end, seconds) for name, seconds in clocks.items() for end in ("", "_ns")]
    return {(time, "sleep"): sleep, **{(time, name): clock(name, seconds) for name, seconds in names}}


def _signal(process: Callable[[], Process | None]) -> Callable[[int, Any], Any]:
    """Keep a worker's signal handler for the simulation, which calls it."""
    real = signal.signal

    def simulated(number: int, handler: Any) -> Any:
        mine = process()
        if mine is None:
            return real(number, handler)
        before = mine.work.handlers.get(number, signal.SIG_DFL)
        mine.work.handlers[number] = handler
        return before

    return simulated


def _no_thread(process: Callable[[], Process | None]) -> Callable[[threading.Thread], None]:
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if process() is not None:
            raise RuntimeError(
                "a worker in the simulation started a thread, which has no place in virtual time. Nothing of it ran; "
                "job.start(function) runs a function beside the others"
            )
        real(self)

    return start
