"""What a client lives in: its clock, its threads, its chance. A cluster brings it along (``Cluster.runtime``).

A call that blocks on a cluster blocks the thread that called, until the cluster's time moves on: so the two belong
together. :data:`THREADS` is the real one, of the Kafka adapter. The simulator (:mod:`kafka_marshal.testing.simulation`)
has one whose time is virtual and whose threads run one at a time, in an order that a seed decides; the shell does not
see a difference.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from types import TracebackType
from typing import Any, Protocol, TypeVar

from kafka_marshal.clock import CLOCK_ID

__all__ = ["EMPTY", "THREADS", "Condition", "Executor", "Lock", "Mailbox", "Runtime", "Thread", "Threads"]

T = TypeVar("T")


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


#: What a mailbox gives when nothing came in time.
EMPTY: Any = object()


class Mailbox(Protocol):
    """Things from one thread to another. Both calls are one step, which no signal can part."""

    def put(self, thing: Any, /) -> None: ...

    def get(self, timeout: float | None, /) -> Any:
        """The oldest thing; EMPTY after timeout seconds (None: wait until there is one)."""


class Thread(Protocol):
    """A thread that was started."""

    def join(self, timeout: float | None = None) -> None: ...


class Executor(Protocol):
    """The part of ThreadPoolExecutor that the shell uses."""

    def submit(self, function: Callable[..., T], /, *args: Any) -> Future[T]: ...
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None: ...
    def __enter__(self) -> Executor: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None, /
    ) -> object: ...


class Runtime(Protocol):
    """Time, threads and chance."""

    #: For loops that look at the clock before every message: seconds of the clock with this id (T4).
    clock_gettime: Callable[[int], float]
    clock_id: int
    #: Whether a member that is alone in its process keeps its lock for all news of the log that came at once.
    whole_batches: bool

    def now_ms(self) -> float:
        """Our own clock (T4): milliseconds since some fixed point in the past; it counts suspend."""

    def monotonic(self) -> float:
        """For timeouts: seconds since some fixed point in the past."""

    def random(self) -> Random:
        """A source of chance of one's own."""

    def new_instance_id(self) -> str:
        """Names one run of one Marshal, for ever."""

    def condition(self) -> Condition:
        """A condition whose lock may be taken again by its owner."""

    def lock(self) -> Lock: ...

    def mailbox(self) -> Mailbox: ...

    def start(self, target: Callable[[], object], name: str) -> Thread:
        """Run target in a thread of its own, one that does not keep the process alive."""

    def give_way(self) -> None:
        """Let other threads that wait for a lock, or for the interpreter, go first."""

    def is_current(self, thread: Thread) -> bool:
        """Whether the caller runs in this thread."""

    def executor(self, threads: int, name: str) -> Executor:
        """Runs functions in up to so many threads."""


class _Mailbox:
    """A queue written in C."""

    __slots__ = ("_get", "put")

    def __init__(self) -> None:
        things: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.put = things.put
        self._get = things.get

    def get(self, timeout: float | None) -> Any:
        try:
            return self._get(True, timeout)
        except queue.Empty:
            return EMPTY


class Threads:
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
        return uuid.uuid4().hex

    def condition(self) -> threading.Condition:
        return threading.Condition(threading.RLock())

    def lock(self) -> threading.Lock:
        return threading.Lock()

    def mailbox(self) -> _Mailbox:
        return _Mailbox()

    def start(self, target: Callable[[], object], name: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def give_way(self) -> None:
        time.sleep(GIVE_WAY_S)

    def is_current(self, thread: Thread) -> bool:
        return thread is threading.current_thread()

    def executor(self, threads: int, name: str) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(threads, name)


#: Of everything that does not say otherwise.
THREADS = Threads()
