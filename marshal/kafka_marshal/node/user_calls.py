"""Runs the user's callbacks one after another on one of our threads, and describes the running one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from kafka_marshal.node.engine_lock import ConsumerPort
from kafka_marshal.node.pulse import place_of
from kafka_marshal.runtime import Runtime

#: A callback that has not returned for this long is logged, and from then on this often (ms).
LATE_MS = 10_000.0
SAID_EVERY_MS = 600_000.0

#: What to do about a callback that does not return, by its name; others: work on another thread.
_REMEDIES = {
    "on_checkpoint": "Return a Future for what takes long",
    "on_restore": "Find out what it waits for: its partitions deliver nothing before their state is there",
}


class UserCall:
    """One call of one callback."""

    __slots__ = ("began_at", "dropped", "named", "port", "run", "said_at", "thread_id")

    def __init__(
        self,
        named: str,
        run: Callable[[], object],
        port: ConsumerPort | None,
        dropped: Callable[[float], object] | None = None,
    ) -> None:
        #: For people: ``on_revoke of flights [3], flights [4]``.
        self.named: str = named
        self.run: Callable[[], object] = run
        self.port: ConsumerPort | None = port
        #: Gives the engine what it takes if it is never called, at that time (own clock, ms); None: nothing.
        self.dropped: Callable[[float], object] | None = dropped
        #: When it began (own clock, ms).
        self.began_at: float = 0.0
        self.thread_id: int | None = None
        #: When the log said last that it has not returned.
        self.said_at: float = -inf

    def described(self, now: float) -> str:
        """For people: ``on_revoke of flights [3] has not returned for 2.0 s (it stands at …)``."""
        ran_s = (now - self.began_at) / 1000
        return f"{self.named} has not returned for {ran_s:.1f} s{place_of(self.thread_id)}"


class UserCalls:
    """Runs callbacks in the order of their requests."""

    def __init__(self, runtime: Runtime) -> None:
        self._now_ms = runtime.now_ms
        self._executor = runtime.executor(1, "kafka-marshal-callback")
        self._waiting: deque[UserCall] = deque()
        #: The callback that runs now; read without a lock.
        self.running: UserCall | None = None

    def submit(self, call: UserCall) -> None:
        """Have it called soon."""
        self._waiting.append(call)
        self._executor.submit(self._carry_out)

    def _carry_out(self) -> None:
        try:
            call = self._waiting.popleft()
        except IndexError:
            return  # it was dropped
        call.began_at, call.thread_id = self._now_ms(), threading.get_ident()
        self.running = call
        try:
            call.run()
        finally:
            self.running = None

    def late(self, now: float) -> str | None:
        """What the log is to say of a callback that does not return; None: nothing now."""
        call = self.running
        if call is None or now < max(call.began_at + LATE_MS, call.said_at + SAID_EVERY_MS):
            return None
        call.said_at = now
        return self.late_text(call, now)

    def late_text(self, call: UserCall, now: float) -> str:
        """What it means that a callback has not returned, for people."""
        name = call.named.partition(" ")[0]
        saves = any(each.named.startswith("on_checkpoint") for each in (call, *list(self._waiting)))
        pauses = ", and those to be saved for a checkpoint pause" if saves else ""
        return (
            f"{call.described(now)}, and no other callback begins before that: partitions to be released stay here, "
            f"new ones deliver nothing{pauses}. Nothing is lost. Let it return. "
            f"{_REMEDIES.get(name, 'Do what takes long on another thread')}"
        )

    def drop(self, ports: Sequence[Any]) -> list[UserCall]:
        """Cancel the calls of these consumers that have not begun; returns them."""
        dropped = []
        for call in list(self._waiting):
            if not any(call.port is port for port in ports):
                continue
            try:
                self._waiting.remove(call)
            except ValueError:
                continue  # it has begun meanwhile
            dropped.append(call)
        return dropped

    def shutdown(self, wait: bool = True) -> None:
        """Accept no further callback; those requested before are called."""
        self._executor.shutdown(wait=wait)
