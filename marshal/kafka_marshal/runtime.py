"""What a client lives in: its clock, its threads, its random source. A cluster brings it along (``Cluster.runtime``).

A call that blocks on a cluster blocks the thread that called, until the cluster's time moves on: so the two belong
together. :data:`THREADS` is the real one, of the Kafka adapter. The simulator (:mod:`kafka_marshal.testing.simulation`)
has one whose time is virtual and whose threads run one at a time, in an order that a seed decides; the shell does not
see a difference.
"""

from __future__ import annotations

import _thread
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from random import Random
from types import TracebackType
from typing import Any, Protocol

from kafka_marshal.instance import new_instance_id
from kafka_marshal.types import T

#: CLOCK_BOOTTIME where there is one (Linux). Elsewhere the monotonic clock, which may stop in suspend.
CLOCK_ID: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

#: A record's timestamp is any 64-bit number. Within these (years 1 to 9999, less a day for time zones) Python's
#: datetime and Spark have a moment for it.
LEAST_STAMP_MS = -62_135_510_400_000
MOST_STAMP_MS = 253_402_214_399_999


def is_moment(stamp_ms: int) -> bool:
    """Whether a record's timestamp (ms) is a moment that datetime and Spark can represent."""
    return LEAST_STAMP_MS <= stamp_ms <= MOST_STAMP_MS


def time_of_day_ms() -> float:
    """The time of day (ms), which people may set back."""
    return time.time() * 1000


#: Whether this thread belongs to the library, at its own work: it may hold the engine's lock, so it must not wait for
#: another thread of the library. The user's code gets there all the same: a destructor, run by the collector, that
#: calls ``close()``.
is_ours: ContextVar[bool] = ContextVar("is_ours", default=False)

#: Long enough that a thread that waits is awake by then; with 0 the lock would be ours again before that.
GIVE_WAY_S = 50e-6


class Lock(Protocol):
    """The part of threading.Lock that the shell uses."""

    def __enter__(self) -> object: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None, /
    ) -> object: ...


class Condition(Lock, Protocol):
    """The part of threading.Condition (with a lock that its owner may take again) that the shell uses."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T: ...
    def notify_all(self) -> None: ...


#: What a box gives when nothing came in time.
EMPTY: Any = object()


class Mailbox(Protocol):
    """Jobs for threads of the library. To put one is one step, which no signal can split."""

    def put(self, thing: Any, /) -> None: ...

    def get(self) -> Any:
        """The oldest thing, as soon as there is one."""


class Box(Protocol):
    """One thing, put once, for one thread. A signal may interrupt its wait anywhere."""

    def put(self, thing: Any, /) -> None: ...

    def get(self, timeout: float, /) -> Any:
        """The thing; EMPTY if it has not come after timeout seconds."""


class Thread(Protocol):
    """A thread that was started."""

    def join(self, timeout: float | None = None) -> None: ...


class Executor(Protocol):
    """The part of concurrent.futures.Executor that the shell uses."""

    def submit(self, function: Callable[..., T], /, *args: Any) -> Future[T]: ...
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None: ...
    def __enter__(self) -> Executor: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None, /
    ) -> object: ...


class Runtime(Protocol):
    """Time, threads and randomness."""

    #: For loops that read the clock before every message: seconds of the clock with this id (T4).
    clock_gettime: Callable[[int], float]
    clock_id: int
    #: Whether a member that is alone in its process keeps its lock for all records fetched together.
    whole_batches: bool

    def now_ms(self) -> float:
        """Our own clock (T4): milliseconds since some fixed point in the past; it counts suspend."""

    def monotonic(self) -> float:
        """For timeouts: seconds since some fixed point in the past."""

    def random(self) -> Random:
        """A separate random source."""

    def new_instance_id(self) -> str:
        """Names one run of one Marshal, for ever."""

    def condition(self) -> Condition:
        """A condition whose lock may be taken again by its owner."""

    def lock(self) -> Lock: ...

    def mailbox(self) -> Mailbox: ...
    def box(self) -> Box: ...

    def start(self, target: Callable[[], object], name: str) -> Thread:
        """Run target in a new thread, one that does not keep the process alive."""

    def launch(self, target: Callable[[], object], name: str) -> None:
        """The same, from a thread that a signal may interrupt: in one step, and without a word of it."""

    def give_way(self) -> None:
        """Let other threads that wait for a lock, or for the interpreter, go first."""

    def is_current(self, thread: Thread) -> bool:
        """Whether the caller runs in this thread."""

    def executor(self, threads: int, name: str) -> Executor:
        """Runs functions in up to this many threads."""


class _Mailbox:
    """A queue written in C."""

    __slots__ = ("get", "put")

    def __init__(self) -> None:
        things: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.put: Callable[..., None] = things.put
        self.get: Callable[..., Any] = things.get


class _Box:
    """A lock, for its wait: that of a queue written in C never ends if a signal is handled as the time runs out."""

    __slots__ = ("_lock", "_thing")

    def __init__(self) -> None:
        self._thing: Any = EMPTY
        self._lock = threading.Lock()
        self._lock.acquire()

    def put(self, thing: Any) -> None:
        self._thing = thing
        self._lock.release()

    def get(self, timeout: float) -> Any:
        self._lock.acquire(True, timeout)
        thing, self._thing = self._thing, EMPTY  # an error in it would lead back here, and keep its caller's frames
        return thing


class _Pool:
    """Up to this many threads, and their jobs."""

    def __init__(self, threads: int, name: str) -> None:
        self._most = threads
        self._name = name
        self._news = threading.Condition(threading.Lock())
        self._jobs: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._idle = 0
        self._closed = False
        self.threads: list[threading.Thread] = []

    def submit(self, function: Callable[..., T], args: tuple[Any, ...]) -> Future[T]:
        future: Future[T] = Future()
        with self._news:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if self._idle <= len(self._jobs) and len(self.threads) < self._most:
                self._start()
            self._jobs.append((future, function, args))
            self._news.notify()
        return future

    def _start(self) -> None:
        name = f"{self._name}_{len(self.threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the limit of threads: the running ones suffice
            if not self.threads:
                raise
            return
        self.threads.append(thread)

    def _work(self) -> None:
        is_ours.set(True)
        while True:
            with self._news:
                self._idle += 1
                while not self._jobs and not self._closed:
                    self._news.wait()
                self._idle -= 1
                if not self._jobs:
                    return
                future, function, args = self._jobs.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    result = function(*args)
                except BaseException as error:  # noqa: BLE001 - raised to the caller that asks for the result
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del future, function, args

    def close(self, cancel: bool = False) -> None:
        with self._news:
            self._closed = True
            if cancel:
                while self._jobs:
                    self._jobs.popleft()[0].cancel()
            self._news.notify_all()


class _Executor:
    """Runs functions in a limited number of daemon threads, which end with it.

    The interpreter's end waits for none of them. For the threads of a ThreadPoolExecutor it waits without limit, and
    that refuses to submit anything from then on: ``close()`` in an atexit handler could not call ``on_revoke``.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = _Pool(threads, name)
        self._end = weakref.finalize(self, self._pool.close)
        self._end.atexit = False

    def submit(self, function: Callable[..., T], /, *args: Any) -> Future[T]:
        return self._pool.submit(function, args)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.close(cancel_futures)
        self._end.detach()  # else the thread that drops the last reference, most likely a user's, ends it once more
        if wait:
            for thread in self._pool.threads:
                thread.join()

    def __enter__(self) -> _Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class MachineRuntime:
    """The machine's own clock and threads."""

    def __init__(self) -> None:
        self.clock_gettime: Callable[[int], float] = time.clock_gettime
        self.clock_id = CLOCK_ID
        self.whole_batches = True

    def now_ms(self) -> float:
        return time.clock_gettime(CLOCK_ID) * 1000.0

    def monotonic(self) -> float:
        return time.monotonic()

    def random(self) -> Random:
        return Random()

    def new_instance_id(self) -> str:
        return new_instance_id()

    def condition(self) -> threading.Condition:
        return threading.Condition(threading.RLock())

    def lock(self) -> threading.Lock:
        return threading.Lock()

    def mailbox(self) -> _Mailbox:
        return _Mailbox()

    def box(self) -> _Box:
        return _Box()

    def start(self, target: Callable[[], object], name: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def launch(self, target: Callable[[], object], name: str) -> None:
        # Thread.start() waits for the thread under a lock that an interrupt would leave locked: here another one waits.
        thread = threading.Thread(target=target, name=name, daemon=True)

        def begin() -> None:
            try:
                thread.start()
            except RuntimeError:  # the limit of threads: this one will do
                target()

        _thread.start_new_thread(begin, ())

    def give_way(self) -> None:
        time.sleep(GIVE_WAY_S)

    def is_current(self, thread: Thread) -> bool:
        return thread is threading.current_thread()

    def executor(self, threads: int, name: str) -> _Executor:
        return _Executor(threads, name)


#: Of everything that does not say otherwise.
THREADS = MachineRuntime()
