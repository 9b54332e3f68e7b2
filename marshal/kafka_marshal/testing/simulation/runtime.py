"""The clock, the threads and the random source of one simulated process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kafka_marshal.node.driver import Driver
from kafka_marshal.runtime import EMPTY
from kafka_marshal.testing.simulation.interrupting import Interrupting
from kafka_marshal.testing.simulation.scheduler import Over, Scheduler, Task
from kafka_marshal.types import T

if TYPE_CHECKING:
    from kafka_marshal.testing.simulation.living import Living


#: Longest time that a woken thread takes to run (ms).
WAKE_MS = 0.05
#: Shortest wait (ms): clocks of different rates must not lead to an endless series of waits.
SHORTEST_MS = 0.002
#: Probability that another thread runs before one takes a lock, and for how long at most.
PREEMPTION = 0.01
PREEMPTION_MS = 0.3


class _Lock:
    """A reentrant lock. Even if it is free, another task sometimes comes first."""

    def __init__(self, scheduler: Scheduler, rng: Random) -> None:
        self._scheduler = scheduler
        self._chance = rng.random
        self._owner: Task | None = None
        self._depth = 0
        self._queue: deque[Task] = deque()

    def __enter__(self) -> Self:
        scheduler = self._scheduler
        task = scheduler.current
        if scheduler.over or task is None:
            return self  # an unwinding task is alone
        if self._owner is task:
            self._depth += 1
            return self
        if task.held == 0 and self._chance() < PREEMPTION:
            scheduler.park(scheduler.now + PREEMPTION_MS * self._chance(), for_lock=True)
        if self._owner is None:
            self._owner = task
            self._depth = 1
            task.held += 1
        else:
            self._take(task, 1)
        return self

    def _take(self, task: Task, depth: int) -> None:
        if self._owner is None:
            self._owner = task
        else:
            self._queue.append(task)
            while self._owner is not task:
                self._scheduler.park(None, for_lock=True)
        self._depth = depth
        task.held += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        if self._scheduler.over:
            return
        self._depth -= 1
        if self._depth > 0:
            return
        if self._queue:
            self._let_go()
        elif self._owner is not None:
            self._owner.held -= 1
            self._owner = None

    def _let_go(self) -> None:
        if self._owner is not None:
            self._owner.held -= 1
        self._owner = self._queue.popleft() if self._queue else None
        if self._owner is not None:
            self._scheduler.wake(self._owner, self._scheduler.now)


class _Condition(_Lock):
    def __init__(self, scheduler: Scheduler, rng: Random, rate: float) -> None:
        super().__init__(scheduler, rng)
        self._rate = rate
        self._waiting: dict[Task, bool] = {}

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        task = scheduler.current
        if scheduler.over or task is None:
            raise Over
        depth, self._depth = self._depth, 0
        self._waiting[task] = False
        self._let_go()
        try:
            scheduler.park(None if timeout is None else scheduler.now + max(SHORTEST_MS, timeout * 1000 / self._rate))
        except BaseException:
            if not scheduler.over:
                del self._waiting[task]
                self._take(task, depth)
            raise
        notified = self._waiting.pop(task)
        self._take(task, depth)
        return notified

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        until = None if timeout is None else self._scheduler.now + timeout * 1000 / self._rate
        while not (found := predicate()):
            if until is not None and until <= self._scheduler.now:
                break
            self.wait(None if until is None else (until - self._scheduler.now) * self._rate / 1000)
        return found

    def notify_all(self) -> None:
        for task, notified in self._waiting.items():
            if not notified:
                self._waiting[task] = True
                self._scheduler.wake(task, self._scheduler.now + WAKE_MS * self._chance())


class _Mailbox:
    """A queue between tasks."""

    def __init__(self, scheduler: Scheduler, rng: Random, rate: float, interrupting: Interrupting) -> None:
        self._scheduler = scheduler
        self._interrupting = interrupting
        self._chance = rng.random
        self._rate = rate
        self._things: deque[Any] = deque()
        self._waiting: list[Task] = []

    def put(self, thing: Any) -> None:
        self._interrupting.point()
        self._things.append(thing)
        if self._waiting:
            self._scheduler.wake(self._waiting[0], self._scheduler.now + WAKE_MS * self._chance())
        self._interrupting.point()

    def get(self, timeout: float | None = None) -> Any:
        scheduler, task = self._scheduler, self._scheduler.current
        if scheduler.over or task is None:
            raise Over
        self._interrupting.point()
        until = None if timeout is None else scheduler.now + max(SHORTEST_MS, timeout * 1000 / self._rate)
        rings = self._interrupting.rings_at()
        while not self._things:
            if until is not None and scheduler.now >= until:
                return EMPTY
            if rings is not None and scheduler.now >= rings:
                self._interrupting.ring()
            self._waiting.append(task)
            try:
                scheduler.park(until if rings is None or (until is not None and until < rings) else rings)
            finally:
                self._waiting.remove(task)
                if self._things and self._waiting and not scheduler.over:  # it was woken for two
                    scheduler.wake(self._waiting[0], scheduler.now)
        thing = self._things.popleft()
        self._interrupting.point()
        return thing


class _Future(Future[Any]):
    """A future that a task waits for, not a thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def result(self, timeout: float | None = None) -> Any:
        task = self._scheduler.current
        if not self.done() and task is not None:
            self.add_done_callback(lambda _: self._scheduler.wake(task, self._scheduler.now))
            until = None if timeout is None else self._scheduler.now + timeout * 1000
            while not self.done() and (until is None or self._scheduler.now < until):
                self._scheduler.park(until)
        return super().result(0)


class _Executor:
    """Runs each function in a new task, at most ``threads`` at a time."""

    def __init__(self, scheduler: Scheduler, process: Living, threads: int, name: str) -> None:
        self._scheduler = scheduler
        self._process = process
        self._threads = threads
        self._name = name
        self._queue: deque[tuple[_Future, Callable[..., Any], tuple[Any, ...]]] = deque()
        self._running = 0
        self._closed = False

    def submit(self, function: Callable[..., T], /, *args: Any) -> Future[T]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = _Future(self._scheduler)
        self._queue.append((future, function, args))
        if self._running < self._threads:
            self._running += 1
            self._scheduler.spawn(self._process, self._name, self._work)
        return future

    def _work(self) -> None:
        while self._queue:
            future, function, args = self._queue.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function(*args)
            except Exception as error:  # noqa: BLE001 - passed to the future's result
                future.set_exception(error)
            else:
                future.set_result(result)
        self._running -= 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        if cancel_futures:
            while self._queue:
                self._queue.popleft()[0].cancel()

    def __enter__(self) -> _Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class _Thread:
    """A started task."""

    def __init__(self, scheduler: Scheduler, task: Task) -> None:
        self._scheduler = scheduler
        self.task = task

    def join(self, timeout: float | None = None) -> None:
        current = self._scheduler.current
        until = None if timeout is None else self._scheduler.now + timeout * 1000
        if current is not None:
            self.task.joining.append(current)
            while not self.task.done and (until is None or self._scheduler.now < until):
                self._scheduler.park(until)


class SimulatedRuntime:
    """Clock, threads and random source of a process; the clock has its own rate and start."""

    def __init__(self, scheduler: Scheduler, process: Living, rng: Random, rate: float) -> None:
        self.clock_id = 0
        self.clock_gettime: Callable[[int], float] = self._clock_gettime
        #: False, so that other tasks may run between the records of a batch.
        self.whole_batches = False
        self._scheduler = scheduler
        self._process = process
        self._rng = rng
        self.rate = rate
        self._interrupting = process.interrupting
        self._offset = rng.uniform(0, 1e6)
        self._instances = 0
        if process.host.is_interrupted:
            self._interrupt_clock_reads()

    def _interrupt_clock_reads(self) -> None:
        """Make each read of the clock a point, too; only in interrupted processes, as there are millions of reads."""
        point = self._interrupting.point
        looks: dict[str, Callable[..., float]] = {
            "now_ms": self.now_ms,
            "monotonic": self.monotonic,
            "clock_gettime": self._clock_gettime,
        }

        def at(look: Callable[..., float]) -> Callable[..., float]:
            def looked(*args: object) -> float:
                point()
                return look(*args)

            return looked

        for name, look in looks.items():
            setattr(self, name, at(look))

    def _clock_gettime(self, clock_id: int) -> float:
        return (self._offset + self._scheduler.now * self.rate) / 1000.0

    def now_ms(self) -> float:
        return self._offset + self._scheduler.now * self.rate

    def monotonic(self) -> float:
        return (self._offset + self._scheduler.now * self.rate) / 1000.0

    def random(self) -> Random:
        return Random(self._rng.random())

    def new_instance_id(self) -> str:
        self._instances += 1
        return f"{self._process.name}.{self._instances}"

    def condition(self) -> _Condition:
        return _Condition(self._scheduler, self._rng, self.rate)

    def lock(self) -> _Lock:
        return _Lock(self._scheduler, self._rng)

    def mailbox(self) -> _Mailbox:
        return _Mailbox(self._scheduler, self._rng, self.rate, self._interrupting)

    def box(self) -> _Mailbox:
        return self.mailbox()

    def start(self, target: Callable[[], object], name: str) -> _Thread:
        owner = getattr(target, "__self__", None)
        if isinstance(owner, Driver):  # a driver's thread makes a member of this process
            self._process.joined(owner)
        return _Thread(self._scheduler, self._scheduler.spawn(self._process, name, target))

    def launch(self, target: Callable[[], object], name: str) -> None:
        self.start(target, name)

    def give_way(self) -> None:
        """Nothing: taking a lock gives way here."""

    def is_current(self, thread: object) -> bool:
        return isinstance(thread, _Thread) and thread.task is self._scheduler.current

    def executor(self, threads: int, name: str) -> _Executor:
        return _Executor(self._scheduler, self._process, threads, name)
