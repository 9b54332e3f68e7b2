"""Helpers of the demo's tests: messages without Kafka, and the demo as a process."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AdminClient

from flights.data import COLUMNS, encode
from flights.supervisor import ENVIRONMENT

#: The demo with options that the command lacks: faster, and with shorter leases.
PROGRAM = """
import json, sys
from pathlib import Path
from kafka_marshal.cli import failures
from flights.options import DemoOptions
from flights.run import run
options = json.loads(sys.argv[1])
options["directory"] = Path(options["directory"])
try:
    sys.exit(run(DemoOptions(**options)))
except KeyboardInterrupt:
    sys.exit(130)
except Exception as error:
    status, text = failures.explain(error) or (70, repr(error))
    print(f"error: {text}", file=sys.stderr)
    sys.exit(status)
"""


@dataclass(frozen=True, slots=True)
class FakeMessage:
    """A message without Kafka."""

    at: int
    data: bytes | None

    def topic(self) -> str:
        return "flights"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self.at

    def key(self) -> bytes | None:
        return None

    def value(self) -> bytes | None:
        return self.data


def row(**values: str) -> list[str]:
    """A row of the file; by default a flight that was on time."""
    usual = dict.fromkeys(COLUMNS, "1") | {"carrier": "UA", "tailnum": "N1", "origin": "EWR", "dest": "IAH"}
    usual |= {"time_hour": "2013-01-01T10:00:00Z", "dep_delay": "0", "arr_delay": "0"}
    return [(usual | values)[name] for name in COLUMNS]


def messages(rows: Sequence[list[str]], first: int = 0) -> list[FakeMessage]:
    """Rows as messages, from an offset on."""
    return [FakeMessage(first + number, encode(each)[1]) for number, each in enumerate(rows)]


def eventually(met: Callable[[], Any], timeout_s: float = 40.0, what: str = "it") -> Any:
    """Wait for a condition instead of a fixed time; returns its value."""
    until = time.monotonic() + timeout_s
    while not (value := met()):
        assert time.monotonic() < until, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.02)
    return value


def ask(database: Path, question: str) -> list[tuple[Any, ...]]:
    """Query a database that others write; [] while it does not exist yet."""
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=10)) as db:
            return db.execute(question).fetchall()
    except sqlite3.OperationalError:
        return []


def state_of(folder: Path) -> str:
    [(state,)] = ask(folder / "delays.sqlite", "SELECT state FROM run")
    return str(state)


def rows_done(folder: Path) -> int:
    found = ask(folder / "delays.sqlite", "SELECT coalesce(sum(rows), 0) FROM batches")
    return int(found[0][0]) if found else 0


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def descendants(pid: int) -> Iterator[int]:
    """All processes below one."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return  # it has ended
    for thread in threads:
        try:
            children = (thread / "children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from descendants(child)


def is_worker(pid: int) -> bool:
    """Whether a process is one of the demo's workers."""
    try:
        return b"flights.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def is_driver(pid: int) -> bool:
    """Whether a process is one of the demo's Spark drivers (not its JVM)."""
    try:
        return b"flights.driver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def is_spark(pid: int) -> bool:
    """Whether a process is a JVM that runs Spark."""
    try:
        return b"org.apache.spark.deploy.SparkSubmit" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def watchdogs_of(workers: Sequence[int]) -> list[int]:
    """Process ids of these processes' watchdogs: no one's children, found as in docs/watchdog.md."""
    found = []
    for pid in workers:
        done = subprocess.run(
            ["pgrep", "-f", rf"watchdog/process\.py.*--worker={pid}( |$)"], capture_output=True, text=True, check=False
        )
        assert done.returncode in (0, 1), done.stderr
        found += [int(line) for line in done.stdout.split() if alive(int(line))]
    return found


def watchdog_of(worker: int) -> int:
    """Process id of a worker's watchdog, once it is connected and detached: it can release leases from then on."""

    def met() -> list[int]:
        kin = set(descendants(worker))
        return [pid for pid in watchdogs_of([worker]) if pid not in kin and _connections(pid) > 0]

    return int(eventually(met, what="its watchdog")[0])


def _connections(pid: int) -> int:
    """Connections to brokers, without the initial one to the worker."""
    found = {f"socket:[{line.split()[9]}]" for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]}
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            count += os.readlink(descriptor) in found
    return count


def topics_of(bootstrap: str) -> set[str]:
    """Topics that runs of the demo created there."""
    names = AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=20).topics
    return {name for name in names if name.startswith("kafka-marshal-demo-")}


def demo_command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run kafka-marshal demo … to its end; with a named Kafka only if variables name one."""
    program = "import sys; from kafka_marshal.cli import main; sys.exit(main(['demo', *sys.argv[1:]]))"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, **variables},
    )


class Run:
    """The demo as a process."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.folder = folder / "demo"
        plain = {"plain": True, "heartbeat_interval_ms": 500, "batch_size": 200, "pace": 2_000}
        settings = {"directory": str(self.folder), **({} if options.get("plain") is False else plain)}
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps({**settings, "json": True, **options})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)

    @property
    def said(self) -> str:
        """Its messages so far."""
        return "".join(self._lines)

    def says(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until it says this."""

        def met() -> bool:
            if self.process.poll() is not None:
                self._reader.join(10)
            assert text in self.said or self.process.poll() is None, f"it ended and never said {text!r}: {self.said}"
            return text in self.said

        eventually(met, timeout_s, f"saying {text!r}")

    def ends(self, timeout_s: float = 100.0) -> int:
        """Wait for its end; returns its exit status."""
        status = self.process.wait(timeout_s)
        self._reader.join(10)
        return status

    def result(self, timeout_s: float = 100.0) -> dict[str, Any]:
        """Wait until it ends successfully; returns its result."""
        status = self.ends(timeout_s)
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        assert status == 0, f"{self.said}\n{out}"
        found: dict[str, Any] = json.loads(out)
        return found

    def workers(self) -> list[int]:
        """Process ids of running workers."""
        return [pid for pid in descendants(self.process.pid) if is_worker(pid) and alive(pid)]

    def drivers(self) -> list[int]:
        """Process ids of running Spark drivers."""
        return [pid for pid in descendants(self.process.pid) if is_driver(pid) and alive(pid)]

    def close(self) -> None:
        """End it if a failed test left it running."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(10)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
