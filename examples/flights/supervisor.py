"""Worker and driver processes, as their parent sees them: started, listened to, killed, ended.

A Spark driver has a process below it, the JVM: it ends when its driver does, however that went, and this is seen to.
So does a watchdog, which has no parent: it ends as soon as it has appended its releases.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Final

from flights.check import Range
from flights.errors import DemoError
from flights.options import FAILURE, ProcessSettings

__all__ = ["ENVIRONMENT", "GRACE_S", "READY", "Crew", "Event", "WorkerProcess"]

#: In which a process of this package finds it.
ENVIRONMENT: Final = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])),
}

#: How long workers may take to release their partitions and end, once asked to.
GRACE_S = 10.0

#: How long a JVM may take to notice that its driver is gone, before it is killed, too.
JVM_GRACE_S = 15.0

#: How long a watchdog may take to get its releases written: where the broker is gone, too, it tries for HI and 2 s.
WATCHDOG_GRACE_S = 10.0

#: How the line begins that a watchdog writes to its worker's log.
_WATCHDOG_SAYS = "kafka-marshal watchdog: "

#: A driver's first report: Spark is up.
READY = "ready"


@dataclass(frozen=True, slots=True)
class Event:
    """A worker's report: what is in flight ("begun"), how far it is, and how it ended ("written", "fenced")."""

    client_id: str
    what: str
    #: What the transaction is about: one range of a worker's batch, several of a driver's round.
    ranges: tuple[Range, ...] = ()
    #: Of what was written: rows that the database had already.
    skipped: int = 0

    @property
    def batch(self) -> tuple[str, tuple[Range, ...]]:
        """Names the batch."""
        return self.client_id, self.ranges

    @property
    def rows(self) -> int:
        """Offsets in it."""
        return sum(last - first + 1 for _, first, last in self.ranges)


class WorkerProcess:
    """One worker or driver. Its errors and warnings go to a file; its reports go to the crew."""

    def __init__(self, settings: ProcessSettings, log: Path, tell: Callable[[Event], None]) -> None:
        """Start it. Raises DemoError."""
        self.client_id: str = settings.client_id
        self.log = log
        #: We killed it, or asked it to end: its end is no surprise.
        self.expected_to_end: bool = False
        #: Why it ended by itself, "" if it did not say; and whether another would end so, too.
        self.failure: str = ""
        self.failure_lasts: bool = False
        #: It has reported that it is ready to work (a worker always is).
        self.ready: bool = False
        try:
            with log.open("wb") as errors:
                self.process: subprocess.Popen[bytes] = subprocess.Popen(
                    [sys.executable, "-P", "-m", settings.program],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=ENVIRONMENT,
                    # A terminal's Ctrl-C is for the parent, which ends its workers in order.
                    start_new_session=True,
                )
        except OSError as error:
            raise DemoError(
                f"{error.filename or log}: {error.strerror}. The worker {self.client_id} was not started."
            ) from error
        self._listener = threading.Thread(target=self._listen, args=(tell,), daemon=True)
        self._listener.start()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already
            # Not as arguments: config may hold a password. The pipe stays open: it ends when this process does.
            self.process.stdin.write(json.dumps(asdict(settings)).encode() + b"\n")
            self.process.stdin.flush()

    def _listen(self, tell: Callable[[Event], None]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith(b"\n"):  # else it was killed while it said this
                self._hear(json.loads(line), tell)

    def _hear(self, said: Mapping[str, Any], tell: Callable[[Event], None]) -> None:
        if said["event"] == FAILURE:
            self.failure, self.failure_lasts = said["why"], said["lasts"]
        elif said["event"] == READY:
            self.ready = True
        else:
            ranges = tuple((partition, first, last) for partition, first, last in said.get("ranges", ()))
            tell(Event(self.client_id, said["event"], ranges, said.get("skipped", 0)))

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def kill(self) -> None:
        """kill -9; returns when it is gone and all its reports have been read. Its JVM: see end_rest."""
        self.expected_to_end = True
        self.process.send_signal(signal.SIGKILL)
        self.wait(30.0)

    def end_rest(self, grace_s: float = JVM_GRACE_S) -> int | None:
        """Wait until everything below it, which has ended, is gone, too: its JVM. After how many ms it was.

        None: something did not end within grace_s and was killed.
        """
        begun = time.monotonic()
        while _group_runs(self.process.pid):
            if time.monotonic() > begun + grace_s:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                return None
            time.sleep(0.02)
        return round((time.monotonic() - begun) * 1000)

    def end_watchdog(self, grace_s: float) -> bool:
        """Wait until the watchdog of this worker, which has ended, is gone, too. False: it had to be killed."""
        until = time.monotonic() + grace_s
        while found := _watchdogs_of(self.process.pid):
            if time.monotonic() > until:
                for pid in found:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return False
            time.sleep(0.02)
        return True

    def ask_to_end(self) -> None:
        """SIGTERM: it finishes its batch and releases its partitions."""
        self.expected_to_end = True
        if self.running:
            self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ends within timeout_s. Then all it said has been heard, unless others hold its output."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._listener.join(timeout_s)
        if not self._listener.is_alive():
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            with suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process.stdout.close()
        return True

    def last_words(self) -> str:
        """Why it ended, as it reported; else the last thing it wrote to its log, "" for nothing.

        What its watchdog wrote there after its death does not count.
        """
        if self.failure:
            return self.failure
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        own = [line for line in lines if not line.startswith(_WATCHDOG_SAYS)]
        return own[-1][:600] if own else ""


class Crew:
    """All worker processes of a run. A context manager: at its end, whatever that end is, none of them runs."""

    def __init__(self, settings: Callable[[str], ProcessSettings], folder: Path) -> None:
        """settings: for a client_id. folder: for the workers' logs."""
        self._settings = settings
        self._folder = folder
        self._events: Queue[Event] = Queue()
        self.workers: dict[str, WorkerProcess] = {}

    def start(self, client_id: str) -> WorkerProcess:
        """Start a worker. Raises DemoError."""
        worker = WorkerProcess(self._settings(client_id), self._folder / f"{client_id}.log", self._events.put)
        self.workers[client_id] = worker
        return worker

    def next_event(self, timeout_s: float) -> Event | None:
        """The next report of a worker, None if there was none within timeout_s."""
        try:
            return self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
        except Empty:
            return None

    def running(self) -> list[str]:
        """The workers that have not ended."""
        return [name for name, worker in self.workers.items() if worker.running]

    def ended_by_themselves(self) -> list[WorkerProcess]:
        """Workers that ended although they were not asked to."""
        return [worker for worker in self.workers.values() if not worker.running and not worker.expected_to_end]

    def end(self, grace_s: float = GRACE_S) -> list[str]:
        """Ask all to end; kill those that do not within grace_s, and name them."""
        for worker in self.workers.values():
            worker.ask_to_end()
        until = time.monotonic() + grace_s
        late = [name for name, worker in self.workers.items() if not worker.wait(max(0.0, until - time.monotonic()))]
        for name in late:
            self.workers[name].kill()
        self._end_rests()
        return late

    def _end_rests(self) -> None:
        for worker in self.workers.values():
            worker.end_rest()
            worker.end_watchdog(WATCHDOG_GRACE_S)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        # Nothing is lost by it: what was in flight was neither written nor done.
        for worker in self.workers.values():
            if worker.running:
                worker.kill()
        self._end_rests()


def _group_runs(group: int) -> bool:
    """Whether any process of a group runs. (One that has ended and was not waited for does not.)"""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    stats = list(Path("/proc").glob("[0-9]*/stat"))
    return not stats or any(_is_alive_in(stat, group) for stat in stats)


def _watchdogs_of(worker: int) -> list[int]:
    """Process ids of the watchdog of a process: one, or none. (docs/watchdog.md says how it is found.)"""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue  # it ended while we looked
        if f"--worker={worker}".encode() in words and any(word.endswith(b"watchdog/process.py") for word in words):
            found.append(int(path.parent.name))
    return found


def _is_alive_in(stat: Path, group: int) -> bool:
    try:
        state, _, found = stat.read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return False  # it ended while we looked
    return int(found) == group and state not in "ZX"
