"""The workers of a campaign: places whose worker is replaced when it has died, and how each worker dies."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from kafka_marshal.testing.errors import LocalBrokerError
from kafka_marshal.testing.fail_points import points_of
from tests.campaigns.chaos.worker import KINDS, OWN_STATUSES, WORKER, Job
from tests.child import Child

#: Weights of a new worker's end: at a fail point, by kill -9 at any moment, by SIGTERM.
DOOMED, KILLED, ASKED = 70, 20, 10

#: A worker that has not reached its fail point after this time (s) is killed anywhere; while none reaches one, as on a
#: busy machine, the time grows.
PATIENCE_S, MOST_PATIENCE_S = 5.0, 60.0

#: A worker ends within this time after SIGTERM (s).
ENDS_S = 30.0

#: Largest occurrence of a step that may be the last one.
MOST_TIMES = 4

#: This many workers sent to a fail point count as one that died there: a point that is hard to reach is tried more
#: often than others, but takes no more than its share if no worker ever reaches it.
TRIES = 16

#: Steps that keep a lease fresh.
BEATS = ("claim", "takeover", "beat", "idle beat")

#: Bytes at the end of a worker's file that show how it ended and reach back to its last heartbeat.
LAST_BYTES = 30_000


@dataclass(frozen=True, slots=True)
class Stop:
    """A worker was stopped by SIGSTOP: begin and end (wall clock, ms)."""

    pid: int
    began: float
    ended: float


@dataclass(slots=True)
class Place:
    """A place in the fleet: one worker at a time."""

    name: str
    template: Job
    #: Never killed: observed by a soak.
    steady: bool = False
    pid: int = 0
    job: Job | None = None
    #: When (monotonic) its worker is replaced.
    due: float = 0.0
    #: When (monotonic) its worker is killed or asked to end.
    kill_at: float = float("inf")
    ask_at: float = float("inf")
    stopped_until: float = 0.0
    stopped_since: float = 0.0
    generation: int = 0
    #: The next worker's fail point ("": none), its other end, and its name.
    doom: str = ""
    fate: int = DOOMED
    client_id: str = ""
    #: Signals that were sent to the worker.
    sent: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Counts:
    """Counts of workers' ends."""

    started: int = 0
    #: Ends by kill -9, at fail points and anywhere.
    kills: int = 0
    #: Fail point → kills there.
    points: Counter[str] = field(default_factory=Counter)
    stops: int = 0
    closed: int = 0
    #: Exit status → number of workers that ended by themselves otherwise.
    others: Counter[int] = field(default_factory=Counter)


class Fleet:
    """All places, and the fork server that fills them. ``turn`` is to be called often, by one thread."""

    def __init__(
        self,
        places: list[Place],
        folder: Path,
        rng: Random,
        without: Collection[str] = (),
        *,
        kinds: Mapping[str, str] = KINDS,
        module: str = WORKER,
    ) -> None:
        """without: steps at which no worker is killed. kinds: of the jobs, run by ``module`` → whose fail points."""
        self.places = places
        self.counts = Counts()
        self.stops: list[Stop] = []
        #: Every file of lines → the process that wrote it.
        self.files: dict[Path, int] = {}
        #: Files of workers killed by -9.
        self.killed: set[Path] = set()
        self.errors: list[str] = []
        #: Descriptions of unexpected ends.
        self.unexplained: list[str] = []
        #: Changes a job before it begins.
        self.arrange: Callable[[Job], Job] = lambda job: job
        #: No more faults: workers started now stay.
        self.calm = False
        self._ending = False
        self._patience_s = PATIENCE_S
        self._folder = folder
        self._rng = rng
        self._kinds = kinds
        self._dooms = {x: _Dooms(x, rng, without) for x in sorted(set(kinds.values()))}
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._ended: dict[int, int] = {}
        self._pids: dict[str, int] = {}
        command = [sys.executable, "-m", "tests.campaigns.chaos.forkserver", str(folder / "workers.log"), module]
        self._forkserver = Child(command, self._hear)

    def _hear(self, event: Mapping[str, Any]) -> None:
        if "ready" in event:
            self._ready.set()
            return
        with self._lock:
            if "started" in event:
                self._pids[event["started"]] = event["pid"]
            else:
                self._ended[event["exited"]] = event["status"]

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until workers can be started: otherwise one due to be killed after a second would not exist yet."""
        if not self._ready.wait(timeout_s):
            raise LocalBrokerError(f"The process that starts workers was not ready within {timeout_s:g} s.")

    def _ask(self, **request: object) -> None:
        if self._forkserver.process.poll() is not None:
            raise LocalBrokerError("The process that starts workers has ended by itself; the campaign can't go on.")
        self._forkserver.tell(**request)

    def signal(self, place: Place, number: signal.Signals) -> None:
        """Send a signal to the worker of a place."""
        if place.pid:
            place.sent.add(int(number))
            self._ask(signal=int(number), pid=place.pid)

    # Their lives.

    def turn(self) -> None:
        """Record ended workers, fill empty places, do what is due."""
        with self._lock:
            ended, self._ended = self._ended, {}
            pids, self._pids = self._pids, {}
        now = time.monotonic()
        for place in self.places:
            if place.job is not None and place.job.client_id in pids:
                place.pid = pids[place.job.client_id]
                self.files[Path(place.job.out)] = place.pid
            if place.pid in ended:
                self._note_end(place, ended[place.pid], now)
            if place.job is None and now >= place.due and not self._ending:
                self._fill(place, now)
            elif place.stopped_until:
                if now >= place.stopped_until or self.calm:
                    self._go_on(place)
            elif place.pid and now >= place.kill_at:
                place.kill_at = float("inf")
                self.signal(place, signal.SIGKILL)
            elif place.pid and now >= place.ask_at:
                place.ask_at = float("inf")
                self.signal(place, signal.SIGTERM)

    def _note_end(self, place: Place, status: int, now: float) -> None:
        assert place.job is not None
        if place.stopped_until:
            self._note_stop(place)
        path = Path(place.job.out)
        point, beaten_at = _last_words(path)
        if place.job.doom:
            self._patience_s = PATIENCE_S if point else min(MOST_PATIENCE_S, 1.5 * self._patience_s)
        if status == -signal.SIGKILL:
            self.counts.kills += 1
            self.killed.add(path)
            if point is not None:
                self.counts.points[point] += 1
        elif status == 0:
            self.counts.closed += 1
        else:
            self.counts.others[status] += 1
        sent = place.sent | ({int(signal.SIGKILL)} if point is not None else set())
        if (why := unexplained(status, sent)) is not None:
            self.unexplained.append(f"{path.stem}: {why}")
        hi_ms = place.template.heartbeat_interval_ms
        self._plan(place, now, status == -signal.SIGKILL and time.time() * 1000 - beaten_at < hi_ms / 2)
        place.pid, place.job, place.stopped_until, place.sent = 0, None, 0.0, set()

    def _plan(self, place: Place, now: float, leaves_fresh: bool) -> None:
        """Plan the next worker. leaves_fresh: whether the last one's leases stay fresh for long enough (C7)."""
        rng = self._rng
        place.doom = ""
        place.fate = rng.randrange(DOOMED + KILLED + ASKED)
        if place.steady or self.calm:
            place.due = now
            return
        if place.fate < DOOMED:
            place.doom = self._dooms[self._kinds[place.template.kind]].next(self.counts.points, takeovers=leaves_fresh)
        # Some restart at once and take over fresh leases (C7); some leave them to others.
        delay = 0.0 if "takeover" in place.doom else rng.choice((0.0, 0.5, 2.5)) * rng.random()
        place.due = now + delay * place.template.heartbeat_interval_ms / 1000
        # Half keep their name; a new name has no predecessor.
        if "takeover" not in place.doom and rng.random() < 0.5:
            place.client_id = f"{place.name}.{place.generation + 1}"

    def _fill(self, place: Place, now: float) -> None:
        place.generation += 1
        rng = self._rng
        job = replace(
            place.template,
            client_id=place.client_id or place.name,
            out=str(self._folder / f"{place.name}-{place.generation:04}.jsonl"),
            seed=rng.getrandbits(32),
            handling_s=rng.choice((0.001, 0.003, 0.02)),
        )
        place.kill_at = place.ask_at = float("inf")
        if not self.calm and not place.steady:
            if place.doom:
                stop_after_s = rng.uniform(0.5, 2.0) if "release" in place.doom else 0.0
                # Some steps are rare in a worker.
                times = (
                    1
                    if any(x in place.doom for x in ("takeover", "release", "assigned"))
                    else rng.randint(1, MOST_TIMES)
                )
                linger_s = rng.choice((0.0, rng.random())) * job.heartbeat_interval_ms / 1000
                job = replace(job, doom=place.doom, times=times, stop_after_s=stop_after_s, linger_s=linger_s)
                place.kill_at = now + self._patience_s
            elif place.fate < DOOMED + KILLED:
                place.kill_at = now + rng.uniform(0.1, 4.0)
            else:
                place.ask_at = now + rng.uniform(0.5, 5.0)
        place.job = job = self.arrange(job)
        self.counts.started += 1
        self._ask(spawn=asdict(job))

    def alive(self) -> list[Place]:
        """Places with a running worker."""
        return [place for place in self.places if place.pid and not place.stopped_until]

    def stop_one(self, seconds: float) -> None:
        """Stop a random worker for ``seconds`` by SIGSTOP."""
        candidates = self.alive()
        if not candidates:
            return
        place = self._rng.choice(candidates)
        self.signal(place, signal.SIGSTOP)
        place.stopped_since = time.time() * 1000
        place.stopped_until = time.monotonic() + seconds
        self.counts.stops += 1

    def _go_on(self, place: Place) -> None:
        self.signal(place, signal.SIGCONT)
        self._note_stop(place)

    def _note_stop(self, place: Place) -> None:
        self.stops.append(Stop(place.pid, place.stopped_since, time.time() * 1000))
        place.stopped_until = 0.0

    # The end.

    def settle(self) -> None:
        """No more faults: replace workers with a planned death, keep the others."""
        self.calm = True
        for place in self.places:
            if place.job is not None and place.job.doom:
                place.kill_at = 0.0
            else:
                place.kill_at = place.ask_at = float("inf")

    def ask_all(self, within_s: float, turn: Callable[[], object]) -> list[str]:
        """Send SIGTERM to all; returns the files of those that have not ended in time."""
        self._ending = True
        until = time.monotonic() + within_s
        while any(place.job is not None for place in self.places) and time.monotonic() < until:
            for place in self.places:  # one that has just begun has no PID yet
                if signal.SIGTERM not in place.sent:
                    self.signal(place, signal.SIGTERM)
            turn()
            time.sleep(0.02)
        return [Path(place.job.out).name for place in self.places if place.job is not None]

    def tend(self, *, is_calm: bool = False) -> None:
        """``turn``; after the last fault (is_calm) workers stay."""
        if is_calm and not self.calm:
            self.settle()
        self.turn()

    def end_all(self) -> None:
        """SIGTERM to all, and the end (*blocking*)."""
        if self._ending:
            return
        late = self.ask_all(ENDS_S, self.turn)
        self.errors += [f"{name} did not end within {ENDS_S:g} s of SIGTERM" for name in late]
        self.errors += self.unexplained
        self.close()

    def close(self) -> None:
        """Kill what still runs."""
        self._forkserver.hang_up()
        self._forkserver.wait(30)


class _Dooms:
    """Chooses the next fail point for workers of one kind: the one with the fewest deaths so far."""

    def __init__(self, delivery: str, rng: Random, without: Collection[str] = ()) -> None:
        self._points = [name for name in points_of(delivery) if not any(step in name for step in without)]
        self._rng = rng
        self._tried: Counter[str] = Counter()

    def next(self, died: Mapping[str, int], *, takeovers: bool) -> str:
        """died: deaths by fail point; takeovers: whether there may be leases to take over."""
        points = [name for name in self._points if takeovers or "takeover" not in name]
        self._rng.shuffle(points)  # the seed decides among equals
        name = min(points, key=lambda x: died.get(x, 0) + self._tried[x] / TRIES)
        self._tried[name] += 1
        return name


def unexplained(status: int, sent: Collection[int]) -> str | None:
    """Why a worker's end is unexpected; None: it is fine, by itself or by a signal that was sent."""
    if status in OWN_STATUSES or -status in sent:
        return None
    if status >= 0:
        return f"worker ended with status {status}"
    return f"worker died of signal {-status} ({signal.strsignal(-status)}), which nobody had sent"


def _last_words(path: Path) -> tuple[str | None, float]:
    """The fail point of a worker's death (None: killed elsewhere), and its last heartbeat (ms; 0: never)."""
    point, beaten_at = None, 0.0
    if path.exists():  # else it was killed before its first line
        with path.open("rb") as file:
            begin = max(0, path.stat().st_size - LAST_BYTES)
            file.seek(begin)
            # The last line is incomplete or empty; so is the first one, if the file begins earlier.
            for line in file.read().split(b"\n")[bool(begin) : -1]:
                match json.loads(line):
                    case ["die", _, name]:
                        point = name
                    case ["sent", at, _, step, _] if step in BEATS:
                        beaten_at = at
    return point, beaten_at
