"""Virtual time, and threads that run one at a time, in an order decided by the seed.

A *task* is a thread of the simulation: a greenlet. It runs until it waits for something; then the scheduler advances
the time to the earliest event and continues there. Nothing ever sleeps, so an hour takes as long as the code that
runs in it. Processes own tasks: those of a stopped process get no turn until it continues, those of a dead one never.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

from kafka_marshal.errors import needs

try:
    from greenlet import GreenletExit, getcurrent, greenlet
except ModuleNotFoundError:
    needs("simulation", "greenlet")
    raise

#: Raised in a waiting task when the simulation is over.
Over = GreenletExit


#: A task with more turns than this within this many ms burns a processor: it waits for nothing.
MAX_TURNS = 1_500
WINDOW_MS = 300.0


class Scheduled(Protocol):
    """The part of a process that the scheduler uses."""

    dead: bool
    #: Virtual time (ms) until which none of its tasks gets a turn.
    stopped_until: float


class Task:
    """One thread of one process."""

    __slots__ = ("done", "greenlet", "held", "joining", "name", "process", "raising", "token", "turns", "window")

    def __init__(self, process: Scheduled, name: str, run: Callable[[], object], hub: greenlet) -> None:
        self.process: Scheduled = process
        self.name: str = name
        self.greenlet: greenlet = greenlet(run, hub)  # continues there when a task ends
        #: Changes with every turn: what was planned for an earlier wait does not end a later one.
        self.token: int = 0
        self.done: bool = False
        #: Number of locks held: with one, no other task runs in between.
        self.held: int = 0
        #: Turns within the current window.
        self.turns: int = 0
        self.window: float = 0.0
        #: Tasks that wait for its end.
        self.joining: list[Task] = []
        #: Error that its next wait raises, for a signal handler.
        self.raising: BaseException | None = None


class Scheduler:
    """The event loop and its clock."""

    def __init__(self) -> None:
        #: Virtual time in ms.
        self.now: float = 0.0
        self.current: Task | None = None
        self.over: bool = False
        #: Called with a task that takes turn after turn without time passing.
        self.on_spin: Callable[[Task], object] = lambda task: None
        self._halted = False
        self._interrupted = False
        self._hub = getcurrent()
        self._agenda: list[tuple[float, int, Task | None, int, Callable[[], object] | None]] = []
        self._numbers = 0
        self._tasks: list[Task] = []
        #: Stopped process → tasks whose turn came meanwhile, with the token of the ended wait.
        self._held: dict[Scheduled, list[tuple[Task, int]]] = {}

    def call_at(self, at: float, function: Callable[[], object]) -> None:
        """Schedule an event outside tasks: of the network, or a fault."""
        self._numbers += 1
        heappush(self._agenda, (at, self._numbers, None, 0, function))

    def spawn(self, process: Scheduled, name: str, target: Callable[[], object]) -> Task:
        """A new task; its first turn comes right after the current one."""

        def run() -> None:
            try:
                target()
            finally:
                task.done = True
                for other in task.joining:
                    self.wake(other, self.now)

        task = Task(process, name, run, self._hub)
        self._tasks.append(task)
        self.wake(task, self.now)
        return task

    def wake(self, task: Task, at: float) -> None:
        """End the task's current wait at this time, unless it ends before."""
        self._numbers += 1
        heappush(self._agenda, (at, self._numbers, task, task.token, None))

    def raise_in(self, task: Task, error: BaseException) -> None:
        """End the task's current or next wait with this error; a wait for a lock continues."""
        if not task.done:
            task.raising = error
            self.wake(task, self.now)

    def park(self, until: float | None, *, for_lock: bool = False) -> None:
        """Suspend the current task until it is woken, or until this time (ms)."""
        task = self.current
        if self.over or task is None:
            raise Over
        if until is not None:
            self._numbers += 1
            heappush(self._agenda, (until, self._numbers, task, task.token, None))
        self._hub.switch()
        if self.over:
            raise Over
        if task.raising is not None and not for_lock:
            error, task.raising = task.raising, None
            raise error

    def run_until(self, until: float) -> None:
        """Run everything due until then."""
        agenda = self._agenda
        while agenda and agenda[0][0] <= until and not self._halted:
            at, _, task, token, function = heappop(agenda)
            if at > self.now:
                self.now = at
            if function is not None:
                function()
                continue
            if task is None or task.token != token or task.done or task.process.dead:
                continue
            if task.process.stopped_until > at:
                self._hold(task, token)
                continue
            task.token += 1
            task.turns += 1
            if task.turns > MAX_TURNS:
                if at < task.window + WINDOW_MS:
                    self.on_spin(task)
                task.window, task.turns = at, 0
            self.current = task
            task.greenlet.switch()
            self.current = None
        if self._interrupted:
            raise KeyboardInterrupt
        if not self._halted:
            self.now = max(self.now, until)

    def _hold(self, task: Task, token: int) -> None:
        """Postpone its turn until its process continues."""
        held = self._held.setdefault(task.process, [])
        if not held:
            self.call_at(task.process.stopped_until, lambda: self.go_on(task.process))
        held.append((task, token))

    def go_on(self, process: Scheduled) -> None:
        """Give turns to tasks that were due while this process was stopped, unless it is stopped again."""
        held = self._held.pop(process, None)
        if held is None:
            return
        if process.stopped_until > self.now:
            self._held[process] = held
            self.call_at(process.stopped_until, lambda: self.go_on(process))
            return
        for task, token in held:
            self._numbers += 1
            heappush(self._agenda, (self.now, self._numbers, task, token, None))

    def halt(self) -> None:
        """Nothing more happens."""
        self._halted = True

    def interrupt(self) -> None:
        """End after the current turn, and raise KeyboardInterrupt in the caller of ``run_until``."""
        self._halted = self._interrupted = True

    def close(self) -> None:
        """End every task; what it does while unwinding has no effect."""
        self.over = True
        for task in self._tasks:
            self.current = task
            task.done = True
            if task.greenlet and not task.greenlet.dead:
                task.greenlet.throw(Over)
        self.current = None
        self._tasks.clear()
        self._agenda.clear()
        self._held.clear()
