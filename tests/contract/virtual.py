"""A contract test on virtual time: its body and the threads that it starts are tasks of the simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kafka_marshal.testing.simulation.network import BROKER_EPOCH_MS
from kafka_marshal.testing.simulation.process import Process
from kafka_marshal.testing.simulation.scheduler import Scheduler, Task

__all__ = ["VirtualThreading", "VirtualTime", "play"]

#: Virtual time that no test reaches (ms).
LIMIT_MS = 600_000.0

#: Poll interval of a wait (ms).
LOOK_MS = 1.0


def play(process: Process, body: Callable[[], object]) -> None:
    """Run body as a task of this process until it ends, with everything it starts; raises what it raised."""
    raised: list[BaseException] = []
    scheduler = process.scheduler

    def run() -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - pytest's exceptions are among them
            raised.append(error)
        scheduler.halt()

    task = scheduler.spawn(process, "test", run)
    scheduler.run_until(LIMIT_MS)
    assert task.done, f"not over after {LIMIT_MS / 1000:g} s of virtual time"
    if raised:
        raise raised[0]


class VirtualTime:
    """The functions of the module time that tests use."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def monotonic(self) -> float:
        return self._scheduler.now / 1000

    def time(self) -> float:
        return (BROKER_EPOCH_MS + self._scheduler.now) / 1000

    def sleep(self, seconds: float) -> None:
        self._scheduler.park(self._scheduler.now + max(LOOK_MS, seconds * 1000))


class VirtualThreading:
    """The classes of the module threading that tests use."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def get_ident(self) -> int:
        return id(self._process.scheduler.current)

    def Event(self) -> _Event:
        return _Event(self._process.scheduler)

    def Thread(
        self,
        target: Callable[..., object],
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool = False,
    ) -> _Thread:
        return _Thread(self._process, lambda: target(*args, **(kwargs or {})))


def _wait(scheduler: Scheduler, met: Callable[[], bool], timeout: float | None) -> bool:
    until = LIMIT_MS if timeout is None else scheduler.now + timeout * 1000
    while not met() and scheduler.now < until:
        scheduler.park(min(until, scheduler.now + LOOK_MS))
    return met()


class _Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        return _wait(self._scheduler, self.is_set, timeout)


class _Thread:
    def __init__(self, process: Process, target: Callable[[], object]) -> None:
        self._process = process
        self._target = target
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._process.scheduler.spawn(self._process, "test's thread", self._target)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        _wait(self._process.scheduler, lambda: not self.is_alive(), timeout)
