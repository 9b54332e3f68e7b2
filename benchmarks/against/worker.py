"""A process of one side: what :mod:`benchmarks.race.worker` does, reading a backlog, and replaying a log.

It must run with older trees, too, so that it imports what users import, and nothing of the testing tools.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import msgpack

import rationalizer
from benchmarks.race.worker import Host, serve, tell
from benchmarks.replay import Written, replay
from kafka_marshal import Marshal

__all__ = ["Worker"]

#: At most once, this many are claimed at a time.
BATCH = 10_000

#: The kinds of threads whose processor time is separated.
THREADS = ("caller", "library", "librdkafka")


class Worker(Host):
    """Knows three more orders: "read", "replay" and "replay-group"."""

    def obey(self, order: dict[str, Any]) -> None:
        """Carry out one order."""
        match order["do"]:
            case "read":
                tell("read", "", **read(**order["options"]))
            case "replay":
                log = written(order["records"])
                tell("replayed", "", rate=len(log.beats) / replay(log.claims, log.beats))
            case "replay-group":
                tell("replayed", "", rate=group_rate(order["file"]))
            case _:
                super().obey(order)


@cache
def written(records: int) -> Written:
    """Made once."""
    return Written(records)


@cache
def of_file(file: str) -> list[list[Any]]:
    """The log of a group, in two parts: what is replayed before, and what is measured."""
    found: list[list[Any]] = msgpack.unpackb(Path(file).read_bytes(), use_list=False)
    return found


def group_rate(file: str) -> float:
    """Records a second; 0: this tree knows no groups."""
    if not hasattr(rationalizer, "JoinGroup"):
        return 0.0
    begin, work = of_file(file)
    return len(work) / replay(begin, work, 0, 1)


def read(bootstrap: str, coordination: str, topic: str, records: int, delivery: str) -> dict[str, float]:
    """A topic of one partition by plain iteration: messages a second, and nanoseconds of a processor for each."""
    options = {"batch_size": BATCH} if delivery == "at-most-once" else {}
    total = 0
    with (
        Marshal(bootstrap, group_id=f"g-{uuid.uuid4().hex[:8]}", topic=coordination) as marshal,
        marshal.consumer([topic], delivery=delivery, **options) as consumer,  # type: ignore[call-overload]
    ):
        messages = iter(consumer)
        next(messages)  # everything has been opened
        used, began = cpu_ns(), perf_counter()
        for seen, message in enumerate(messages, 2):
            total += len(message.value() or b"") + (message.offset() or 0)
            if seen == records:
                break
        took, after = perf_counter() - began, cpu_ns()
    return {"rate": (records - 1) / took, **{whose: (after[whose] - used[whose]) / records for whose in THREADS}}


def cpu_ns() -> Counter[str]:
    """Processor time so far: of this thread, of the other Python threads, and of all others (librdkafka's)."""
    found: Counter[str] = Counter()
    mine = threading.get_native_id()
    python = {thread.native_id for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        number = int(task.name)
        whose = "caller" if number == mine else "library" if number in python else "librdkafka"
        found[whose] += int((task / "schedstat").read_text().split()[0])
    return found


if __name__ == "__main__":
    serve(Worker())
