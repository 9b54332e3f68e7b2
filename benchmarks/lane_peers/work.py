"""The work of a record, and the final report. Uses only the standard library, as peers run in other environments.

A record's value begins with the offset of its predecessor with the same key, −1 for the first. A record that begins
before its predecessor has ended is out of order: an inversion.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import NoReturn

__all__ = ["FailedError", "Order", "Work"]

#: Seconds between two checks for the end.
LOOK_S = 0.02


@dataclass(frozen=True)
class Order:
    """A contestant's task."""

    side: str
    bootstrap: str
    topic: str
    group: str
    coordination: str
    #: Number of records, and of those without the stuck key.
    records: int
    others: int
    #: 0: a handler that only counts.
    work_ms: float
    concurrency: int
    #: Offset of the record whose handler never returns, and its key; −1: none.
    stuck: int
    stuck_key: str
    #: One in this many records fails, once; 0: none.
    fail_every: int
    #: After this time without a record (s), it has stopped.
    quiet_s: float
    #: Longest measurement (s).
    limit_s: float

    def arguments(self) -> list[str]:
        """Arguments of the contestant's program."""
        return [f"{name}={value}" for name, value in asdict(self).items()]

    @classmethod
    def given(cls) -> Order:
        """From the command line."""
        found = dict(argument.split("=", 1) for argument in sys.argv[1:])
        types: dict[str, type] = {"str": str, "int": int, "float": float}
        return cls(**{name: types[kind](found[name]) for name, kind in cls.__annotations__.items()})


class FailedError(Exception):
    """A record failed, as ordered."""


class Work:
    """Called by all threads; shared attributes are changed atomically."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.work_s = order.work_ms / 1000
        self._stuck_key = order.stuck_key.encode()
        self._has_ended = bytearray(order.records)
        self._has_failed: set[int] = set()
        self._inversions: list[int] = []
        self._count = itertools.count(1)
        #: End of each record without the stuck key.
        self._ended: list[float] = []
        self._began = self._last = 0.0
        self._over = threading.Event()

    def count(self) -> None:
        """Count a record, without other measurements."""
        number = next(self._count)
        if number == 1:
            self._began = time.perf_counter()
        elif number == self.order.others:
            self._last = time.perf_counter()
            self._over.set()

    def _begin(self, offset: int, value: bytes) -> None:
        self._began = self._began or time.perf_counter()
        before = int(value[:10])
        if before >= 0 and not self._has_ended[before]:
            self._inversions.append(offset)
        if self.order.fail_every and offset % self.order.fail_every == 1 and offset not in self._has_failed:
            self._has_failed.add(offset)
            raise FailedError(f"offset {offset} fails once")

    def _end(self, offset: int, key: bytes) -> None:
        if not self._has_ended[offset]:
            self._has_ended[offset] = 1
            if key != self._stuck_key:
                self._ended.append(time.perf_counter())

    def handle(self, offset: int, key: bytes, value: bytes) -> None:
        """In a thread."""
        if not self.work_s:
            if offset == self.order.stuck:
                threading.Event().wait()
            self.count()
            return
        self._begin(offset, value)
        if offset == self.order.stuck:
            threading.Event().wait()
        time.sleep(self.work_s)
        self._end(offset, key)

    async def handle_async(self, offset: int, key: bytes, value: bytes) -> None:
        """In a task."""
        if not self.work_s:
            if offset == self.order.stuck:
                await asyncio.Event().wait()
            self.count()
            return
        self._begin(offset, value)
        if offset == self.order.stuck:
            await asyncio.Event().wait()
        await asyncio.sleep(self.work_s)
        self._end(offset, key)

    def wait(self) -> None:
        """Wait until all records without the stuck key are done, nothing more is done, or the time is up."""
        order, began = self.order, time.perf_counter()
        seen, seen_at = 0, began
        while not self._over.wait(LOOK_S):
            now, done = time.perf_counter(), len(self._ended)
            if self.work_s and done != seen:
                seen, seen_at = done, now
            is_quiet = bool(self.work_s and self._began) and now > max(seen_at, self._began) + order.quiet_s
            if done >= order.others or is_quiet or now > (self._began or began + order.limit_s) + order.limit_s:
                return

    def tell_and_end(self) -> NoReturn:
        """Print the result as a line of JSON and end the process, whatever its handlers do."""
        now = time.perf_counter()
        if self.work_s:
            done = len(self._ended)
            last = self._ended[-1] if done >= self.order.others else now
        else:
            done = self.order.others if self._last else next(self._count) - 1
            last = self._last or now
        found = {
            "done": done,
            "seconds": last - (self._began or now - 1),
            "inversions": len(self._inversions),
            "cpu_s": sum(os.times()[:2]),
            "peak_mb": peak_mb(),
        }
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        os._exit(0)


def peak_mb() -> float:
    """Peak memory of this process; 0 if unknown."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            [line] = [line for line in status if line.startswith("VmHWM")]
    except (OSError, ValueError):
        return 0.0
    return int(line.split()[1]) / 1000
