"""The processes of a campaign, what befalls them and their broker, and an operator who acts meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from confluent_kafka import KafkaException

from kafka_marshal.errors import AdminError, KafkaUnavailableError
from kafka_marshal.testing import RunningKafka
from tests.campaigns.on_a_broker import Say

__all__ = ["AWAY", "BrokerFaults", "Crew", "Life", "Operator", "Place"]

#: What an operator's command raises while no broker answers, or where another one was faster.
AWAY = (AdminError, KafkaException, KafkaUnavailableError)

#: How long a worker may take to end after SIGTERM (s), also while the broker is away.
LEAVES_S = 45.0


@dataclass(slots=True)
class Life:
    """One process, from its start to its end."""

    name: str
    out: Path
    #: When it was stopped and continued (monotonic, s).
    stops: list[tuple[float, float]] = field(default_factory=list)


@dataclass(slots=True)
class Place:
    """A worker, in one process after the other."""

    name: str
    kind: str
    process: subprocess.Popen[bytes] | None = None
    life: Life | None = None
    stopped_until: float = 0.0
    #: It was asked to leave then (0: it was not), and is started again then.
    leaves_since: float = 0.0
    away_until: float = 0.0

    @property
    def runs(self) -> bool:
        """Whether its process runs, and has not been asked to leave."""
        return self.process is not None and self.process.poll() is None and not self.leaves_since


class Crew:
    """Workers, each of which is started again when it has ended."""

    def __init__(
        self,
        module: str,
        folder: Path,
        kinds: Mapping[str, str],
        job: Callable[[Place], dict[str, Any]],
        *,
        rng: Random,
        hi_s: float,
        counts: Counter[str],
    ) -> None:
        """module: what a worker runs, with a job as JSON. kinds: name → kind."""
        self._module, self._folder, self._job = module, folder, job
        self._rng, self._hi_s, self._counts = rng, hi_s, counts
        self.places = [Place(name, kind) for name, kind in kinds.items()]
        self.lives: list[Life] = []
        self.errors: list[str] = []

    def start(self, place: Place) -> None:
        """Start its next process."""
        self._counts["processes"] += 1
        life = Life(place.name, self._folder / f"{place.name}-{self._counts['processes']}.txt")
        job = {"name": place.name, "kind": place.kind, "out": str(life.out), "seed": self._rng.random()}
        life.out.touch()
        with (self._folder / f"{place.name}.stderr").open("ab") as errors:
            command = [sys.executable, "-m", self._module, json.dumps({**job, **self._job(place)})]
            place.process = subprocess.Popen(command, stderr=errors)
        place.life, place.leaves_since, place.stopped_until = life, 0.0, 0.0
        self.lives.append(life)

    def tend(self, *, is_calm: bool = False) -> None:
        """Start what has ended, and continue what was stopped for long enough, or at once (is_calm)."""
        for place in self.places:
            process, now = place.process, time.monotonic()
            if process is None or process.poll() is not None:
                if process is not None and process.returncode not in (-signal.SIGKILL, 0) and not place.away_until:
                    self._counts["ended by an error"] += 1
                if is_calm or now >= place.away_until:
                    place.away_until = 0.0
                    self.start(place)
            elif place.stopped_until and (is_calm or now > place.stopped_until):
                os.kill(process.pid, signal.SIGCONT)
                if place.life is not None:
                    since, _ = place.life.stops.pop()
                    place.life.stops.append((since, now))
                place.stopped_until = 0.0
            elif place.leaves_since and now > place.leaves_since + LEAVES_S:
                self.errors.append(f"{place.name} did not end within {LEAVES_S:g} s of SIGTERM")
                process.kill()
                process.wait()

    def _one(self) -> Place | None:
        """One that has begun to work."""
        found = [x for x in self.places if x.runs and x.life is not None and x.life.out.stat().st_size]
        return self._rng.choice(found) if found else None

    def kill(self) -> None:
        """kill -9 one."""
        place = self._one()
        if place is not None and place.process is not None:
            place.stopped_until = 0.0
            place.process.kill()
            place.process.wait()
            self._counts["kills"] += 1

    def stop(self) -> None:
        """SIGSTOP one, for up to 6 heartbeat intervals."""
        place = self._one()
        if place is not None and place.process is not None and place.life is not None and not place.stopped_until:
            os.kill(place.process.pid, signal.SIGSTOP)
            since = time.monotonic()
            place.stopped_until = since + self._hi_s * self._rng.uniform(0.5, 6.0)
            place.life.stops.append((since, place.stopped_until + 1.0))
            self._counts["stops"] += 1

    def leave(self, for_s: float = 0.0) -> None:
        """SIGTERM one; it is started again after that time."""
        place = self._one()
        if place is not None and not place.stopped_until:
            self._ask(place)
            place.away_until = time.monotonic() + for_s
            self._counts["leaves"] += 1

    @staticmethod
    def _ask(place: Place) -> None:
        if place.process is not None:
            with suppress(ProcessLookupError):
                os.kill(place.process.pid, signal.SIGCONT)
                place.process.terminate()
            place.leaves_since = time.monotonic()

    def deploy(self) -> None:
        """End all of them, and start them again (*blocking*)."""
        self.end()
        for place in self.places:
            self.start(place)

    def end(self) -> None:
        """SIGTERM to all (*blocking*)."""
        for place in self.places:
            self._ask(place)
        for place in self.places:
            if place.process is None:
                continue
            try:
                place.process.wait(LEAVES_S)
            except subprocess.TimeoutExpired:
                self.errors.append(f"{place.name} did not end within {LEAVES_S:g} s of SIGTERM")
                place.process.kill()
                place.process.wait()


class BrokerFaults:
    """What befalls the broker."""

    def __init__(self, kafka: RunningKafka, rng: Random, hi_s: float) -> None:
        self._kafka, self._rng, self._hi_s = kafka, rng, hi_s

    def freeze(self) -> None:
        """It hangs, for up to 3 heartbeat intervals."""
        self._kafka.pause()
        time.sleep(self._rng.choice((0.3, 3.0 * self._hi_s)))
        self._kafka.resume()

    def restart(self) -> None:
        """It is killed, and is away for up to 3 heartbeat intervals."""
        self._kafka.kill()
        time.sleep(self._rng.choice((0.1, 3.0 * self._hi_s)))
        self._kafka.restart()


class Operator(threading.Thread):
    """Does one act after the other, until ``ended``; an error that an act may not raise is ``failure``."""

    def __init__(
        self, acts: Sequence[Callable[[], object]], every_s: float, rng: Random, counts: Counter[str], say: Say
    ) -> None:
        super().__init__()
        self._acts, self._every_s, self._rng, self._counts, self._say = acts, every_s, rng, counts, say
        self.ended = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        """The thread."""
        number = 0
        while not self.ended.wait(self._every_s * self._rng.uniform(0.7, 1.3)):
            act = self._acts[number % len(self._acts)]
            name = act.__name__
            number += 1
            try:
                act()
            except AWAY as error:
                self._counts[f"{name} refused"] += 1
                self._say(f"{name}: {error}"[:300])
            except BaseException as error:  # noqa: BLE001 - raised in the end
                self.failure = error
                return
            else:
                self._counts[name] += 1
