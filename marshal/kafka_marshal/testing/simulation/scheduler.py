"""Virtual time, and threads that run one at a time, in an order that the seed decides.

A *task* is a thread of the simulation: a greenlet. It runs until it waits for something; then the scheduler takes the
earliest thing that is due, moves the time to it, and goes on there. Nothing ever sleeps, so an hour takes as long as
the code that runs in it. Processes own tasks: one that is stopped gets no turn until it goes on, a dead one never.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

from kafka_marshal.extras import needs

try:
    from greenlet import GreenletExit, getcurrent, greenlet
except ModuleNotFoundError:
    needs("simulation", "greenlet")
    raise

__all__ = ["Over", "Scheduler", "Task"]

#: Raised in a task that waits when the simulation is over.
Over = GreenletExit


#: A task that gets more turns than this within so many ms burns a processor: it waits for nothing.
MAX_TURNS = 1_500
WINDOW_MS = 300.0


class Owner(Protocol):
    """What the scheduler needs of a process."""

    dead: bool
    #: Virtual time (ms) until which none of its tasks gets a turn.
    stopped_until: float


class Task:
    """One thread of one process."""

    __slots__ = ("done", "greenlet", "held", "joining", "name", "process", "raising", "token", "turns", "window")

    def __init__(self, process: Owner, name: str, run: Callable[[], object], hub: greenlet) -> None:
        self.process: Owner = process
        self.name: str = name
        self.greenlet: greenlet = greenlet(run, hub)  # where it goes on when a task ends
        #: Changes with every turn: what was planned for an earlier wait does not end a later one.
        self.token: int = 0
        self.done: bool = False
        #: Locks held: with one, no other task is let in between.
        self.held: int = 0
        #: Turns within the present window.
        self.turns: int = 0
        self.window: float = 0.0
        #: Who waits for its end.
        self.joining: list[Task] = []
        #: What its next wait raises: a signal's handler wants it so.
        self.raising: BaseException | None = None


class Scheduler:
    """The one loop, and the time it keeps."""

    def __init__(self) -> None:
        #: Virtual time in ms.
        self.now: float = 0.0
        self.current: Task | None = None
        self.over: bool = False
        #: Told of a task that gets turn after turn and lets no time pass.
        self.on_spin: Callable[[Task], object] = lambda task: None
        self._halted = False
        self._interrupted = False
        self._hub = getcurrent()
        self._agenda: list[tuple[float, int, Task | None, int, Callable[[], object] | None]] = []
        self._numbers = 0
        self._tasks: list[Task] = []
        #: By stopped process: tasks whose turn came meanwhile, with the token of the wait that is over.
        self._held: dict[Owner, list[tuple[Task, int]]] = {}

    def call_at(self, at: float, function: Callable[[], object]) -> None:
        """Have something happen that is no task's doing: the network, a fault."""
        self._numbers += 1
        heappush(self._agenda, (at, self._numbers, None, 0, function))

    def spawn(self, process: Owner, name: str, target: Callable[[], object]) -> Task:
        """A new task; it gets its first turn at once, after the present one."""

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
        """End the task's present wait at this time, if nothing ends it before."""
        self._numbers += 1
        heappush(self._agenda, (at, self._numbers, task, task.token, None))

    def raise_in(self, task: Task, error: BaseException) -> None:
        """End the task's present wait, or its next one, with this error; one for a lock goes on."""
        if not task.done:
            task.raising = error
            self.wake(task, self.now)

    def park(self, until: float | None, *, for_lock: bool = False) -> None:
        """The current task waits until somebody wakes it, or for this time (ms) to come."""
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
        """Let everything happen that is due by then."""
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
        """Its turn comes when its process goes on."""
        held = self._held.setdefault(task.process, [])
        if not held:
            self.call_at(task.process.stopped_until, lambda: self.go_on(task.process))
        held.append((task, token))

    def go_on(self, process: Owner) -> None:
        """Whoever had a turn while this process was stopped has it now, unless it is stopped for longer by now."""
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
        """After the present turn nothing more happens, and who runs this gets KeyboardInterrupt."""
        self._halted = self._interrupted = True

    def close(self) -> None:
        """End every task where it stands; what it does on the way out reaches nobody."""
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
