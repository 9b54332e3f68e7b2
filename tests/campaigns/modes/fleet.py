"""Workers in processes: started, killed, stopped, continued, and started again when they have died."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.campaigns.crew import Life

__all__ = ["Fleet", "Place"]


@dataclass(slots=True)
class Place:
    """A worker, in one process after the other."""

    name: str
    kind: str
    process: subprocess.Popen[bytes] | None = None
    life: Life | None = None
    stopped_until: float = 0.0

    @property
    def is_at_work(self) -> bool:
        """Whether its process has written something down."""
        return self.process is not None and self.life is not None and self.life.out.stat().st_size > 0


class Fleet:
    """All workers of a campaign. What a module named `module` is started with is a job."""

    def __init__(
        self,
        folder: Path,
        module: str,
        job: Callable[[Place], dict[str, Any]],
        rng: Random,
        hi_s: float,
        counts: Counter[str],
    ) -> None:
        self.folder, self.module, self.job, self.rng, self.hi_s = folder, module, job, rng, hi_s
        self.counts = counts
        self.places: list[Place] = []
        self.lives: list[Life] = []

    def start(self, place: Place) -> None:
        """Start its next process."""
        self.counts["processes"] += 1
        life = Life(place.name, self.folder / f"{place.name}-{self.counts['processes']}.txt")
        life.out.touch()
        job = {"name": place.name, "kind": place.kind, "out": str(life.out), "seed": self.rng.random()}
        with (self.folder / f"{place.name}.stderr").open("ab") as errors:
            command = [sys.executable, "-m", self.module, json.dumps({**job, **self.job(place)})]
            place.process = subprocess.Popen(command, stderr=errors)
        place.life = life
        self.lives.append(life)

    def tend(self) -> None:
        """Restart what has died, and continue what was stopped for long enough."""
        for place in self.places:
            process, now = place.process, time.monotonic()
            if process is None or process.poll() is not None:
                if process is not None and process.returncode not in (-signal.SIGKILL, 0):
                    self.counts["ended by an error"] += 1
                self.start(place)
            elif place.stopped_until and now > place.stopped_until:
                os.kill(process.pid, signal.SIGCONT)
                place.stopped_until = 0.0

    def calm(self) -> None:
        """Continue what is stopped, now."""
        for place in self.places:
            if place.stopped_until:
                place.stopped_until = time.monotonic()
        self.tend()

    def kill(self, place: Place | None = None) -> None:
        """Kill one that is at work."""
        place = place or self.rng.choice(self.places)
        if place.process is not None and place.is_at_work:
            place.stopped_until = 0.0
            place.process.kill()
            place.process.wait()
            self.counts["kills"] += 1

    def stop(self) -> None:
        """Stop one (SIGSTOP) for a while."""
        place = self.rng.choice(self.places)
        if place.process is not None and not place.stopped_until and place.process.poll() is None:
            os.kill(place.process.pid, signal.SIGSTOP)
            since = time.monotonic()
            place.stopped_until = since + self.hi_s * self.rng.uniform(0.5, 6.0)
            if place.life is not None:
                place.life.stops.append((since, place.stopped_until + 1.0))
            self.counts["stops"] += 1

    def end(self, place: Place) -> str:
        """End it as an operator does. Returns what was wrong with that, or ""."""
        process, place.process, place.stopped_until = place.process, None, 0.0
        if process is None:
            return ""
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
            process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"{place.name} did not end within 30 s of SIGTERM"
        return ""
