"""The parent's side of :mod:`benchmarks.race.worker`."""

from __future__ import annotations

import os
import queue
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from benchmarks.race.contestants import Contestant
from tests.child import Child

__all__ = ["Host", "RaceError"]

ROOT = Path(__file__).parents[2]

#: Where a process finds its packages; it works in the last folder.
PACKAGES = (ROOT / "marshal", ROOT)

#: Time-out of everything that is not measured.
TIMEOUT_S = 90.0


class RaceError(Exception):
    """A contestant failed or did not answer, so there is no figure."""


class Host(AbstractContextManager["Host"]):
    """One process with workers. Events are queued until they are requested."""

    def __init__(self, module: str = "benchmarks.race.worker", packages: Sequence[Path] = PACKAGES) -> None:
        """Start the process and wait until it has imported everything, from these folders."""
        self._events: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
        self._early: list[Mapping[str, Any]] = []
        self._sides: dict[str, str] = {}
        self._child = Child(
            [sys.executable, "-m", module],
            self._events.put,
            partial(self._events.put, None),
            cwd=packages[-1],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, packages))},
        )
        self.wait("ready", "")

    @property
    def pid(self) -> int:
        """The process."""
        return self._child.process.pid

    def order(self, do: str, worker: str = "", **more: object) -> None:
        """Send one order."""
        self._child.tell(do=do, worker=worker, **more)

    def wait(self, event: str, worker: str, timeout_s: float = TIMEOUT_S) -> Mapping[str, Any]:
        """The next event of this kind of this worker; others stay queued."""
        deadline = monotonic() + timeout_s
        for place, early in enumerate(self._early):
            if (early["event"], early["worker"]) == (event, worker):
                return self._early.pop(place)
        while True:
            try:
                found = self._events.get(timeout=max(0.0, deadline - monotonic()))
            except queue.Empty:
                raise RaceError(f"{worker or 'the host'} did not tell {event!r} within {timeout_s:g} s") from None
            if found is None:
                raise RaceError(f"the process of {worker!r} has ended before it told {event!r}")
            if (found["event"], found["worker"]) == (event, worker):
                return found
            if found["event"] == "failed":
                raise RaceError(f"{found['worker']}: {found['why']}")
            self._early.append(found)

    def open(
        self,
        contestant: Contestant,
        worker: str,
        bootstrap: str,
        *,
        topics: list[str],
        group: str,
        coordination: str,
        **more: object,
    ) -> None:
        """Make a worker; "made" and "first" are events."""
        self.order(
            "open",
            worker,
            side=contestant.side.value,
            bootstrap=bootstrap,
            group=group,
            client=worker,
            coordination=coordination,
            topics=topics,
            config=dict(contestant.config),
            options=dict(contestant.options),
            member=dict(contestant.member),
            **more,
        )

    def close(self, worker: str) -> float:
        """Let it leave; returns when that began."""
        self.order("close", worker)
        return float(self.wait("closing", worker)["at"])

    def closed(self, worker: str) -> None:
        """Wait until it has left."""
        self.wait("closed", worker)

    def watch(self, worker: str, partitions: list[int] | None) -> None:
        """Report the next record of these partitions."""
        self._early = [x for x in self._early if x["worker"] != worker or x["event"] not in ("seen", "first")]
        self.order("watch", worker, partitions=partitions)
        self.wait("watching", worker)

    def report(self, *, seen: bool = False) -> Mapping[str, Any]:
        """Each worker's partitions and time of the last change; with seen, its records since the last report."""
        self.order("report", seen=seen)
        workers: Mapping[str, Any] = self.wait("report", "")["workers"]
        return workers

    def cpu_s(self) -> tuple[float, float]:
        """Processor seconds used so far, and when."""
        self.order("cpu")
        found = self.wait("cpu", "")
        return float(found["seconds"]), float(found["at"])

    def signal(self, number: signal.Signals) -> float:
        """Send a signal; returns the moment before."""
        at = monotonic()
        self._child.process.send_signal(number)
        return at

    def end(self) -> None:
        """Kill it if it still runs."""
        self._child.process.kill()
        self._child.wait(TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()
