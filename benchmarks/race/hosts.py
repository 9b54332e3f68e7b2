"""The parent's side of :mod:`benchmarks.race.worker`."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from benchmarks.race.contestants import Contestant

__all__ = ["Host", "RaceError"]

ROOT = Path(__file__).parents[2]

#: How long anything may take that is not itself measured to be slow.
TIMEOUT_S = 90.0


class RaceError(Exception):
    """A contestant failed or did not answer: there is no figure."""


class Host(AbstractContextManager["Host"]):
    """One process with workers in it. Events wait until somebody asks for them."""

    def __init__(self) -> None:
        """Start the process and wait until it has imported everything."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.race.worker"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "marshal", ROOT)))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._early: list[dict[str, Any]] = []
        self._sides: dict[str, str] = {}
        threading.Thread(target=self._listen, daemon=True).start()
        self.wait("ready", "")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def order(self, do: str, worker: str = "", **more: object) -> None:
        """Send one order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, "worker": worker, **more}) + "\n")
        self._process.stdin.flush()

    def wait(self, event: str, worker: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """The next event of this kind about this worker; others stay where they are."""
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
        """Have a worker made; "made" and "first" come as events."""
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
            **more,
        )

    def close(self, worker: str) -> float:
        """Have it leave; when that began."""
        self.order("close", worker)
        return float(self.wait("closing", worker)["at"])

    def closed(self, worker: str) -> None:
        """Wait until it has left."""
        self.wait("closed", worker)

    def watch(self, worker: str, partitions: list[int] | None) -> None:
        """Be told of the next record of these partitions."""
        self._early = [x for x in self._early if x["worker"] != worker or x["event"] not in ("seen", "first")]
        self.order("watch", worker, partitions=partitions)
        self.wait("watching", worker)

    def report(self, *, seen: bool = False) -> Mapping[str, Any]:
        """What each worker holds, and when that changed last; what it saw since it was asked for that last."""
        self.order("report", seen=seen)
        workers: Mapping[str, Any] = self.wait("report", "")["workers"]
        return workers

    def cpu_s(self) -> tuple[float, float]:
        """Processor seconds used so far, and when."""
        self.order("cpu")
        found = self.wait("cpu", "")
        return float(found["seconds"]), float(found["at"])

    def signal(self, number: signal.Signals) -> float:
        """Send a signal; the moment before."""
        at = monotonic()
        self._process.send_signal(number)
        return at

    def end(self) -> None:
        """Kill it if it still runs."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()
