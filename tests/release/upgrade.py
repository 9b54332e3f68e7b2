"""`make upgrade REV=…`: workers of an earlier commit's wheel and of this one in one group, some killed and stopped.

A claimed and a coordinated group handle all of one topic, at the level of the old release: all old, one after the other
replaced by a new one, back again, and forward; then the level is raised, and more are struck. Each must be handled, and
twice only where a worker was struck that had it. What the old release has written, this one reads.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from kafka_marshal.testing.broker import LocalBroker
from tests.release.__main__ import say
from tests.release.installed import Installed
from tests.release.packages import build, commit_of, tree_of

#: Both releases understand it. A line for each message, written at once.
PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
bootstrap, kind, name, out = sys.argv[1:]
lines = os.open(out, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
from kafka_marshal import Marshal

try:
    marshal = Marshal(bootstrap, group_id=kind, client_id=name, heartbeat_interval=1.0)
except TypeError:  # until release 0.3
    marshal = Marshal(bootstrap, group_id=kind, client_id=name, heartbeat_interval_ms=1000)
signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
with marshal:
    if kind == "claimed":
        consumer = marshal.consumer(["jobs"])
    elif hasattr(marshal, "group_consumer"):
        consumer = marshal.group_consumer(["jobs"], session_timeout_ms=6000)
    else:
        from kafka_marshal import Group
        consumer = marshal.consumer(["jobs"], mode=Group(session_timeout=6.0))
    with consumer:
        for message in consumer:
            os.write(lines, b"%d %d\\n" % (message.partition(), message.offset()))
"""

KINDS = ("claimed", "coordinated")

#: Of each group; partitions of the topic; messages in a second.
WORKERS, PARTITIONS, RATE = 3, 6, 60.0

#: A fault in each step befalls one of both groups; within this time (s) all must be handled again.
STILL_S = 120.0

#: Three heartbeat intervals (s): the leases of a member that is stopped end meanwhile.
STOPPED_S = 3.0

Place = tuple[int, int]


@dataclass(slots=True)
class Worker:
    """One place in a group, and the processes that it had."""

    kind: str
    name: str
    lives: list[Path] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None


class Fleet:
    """Workers of both groups; each place has a process of one of the releases."""

    def __init__(self, folder: Path, bootstrap: str, releases: dict[str, Installed]) -> None:
        self.folder, self.bootstrap, self.releases = folder, bootstrap, releases
        self.workers = [Worker(kind, f"w{number}") for kind in KINDS for number in range(WORKERS)]
        #: Files of processes that were killed or stopped: what these had may come twice.
        self.struck: set[Path] = set()
        self.rng = random.Random(1)
        #: Partition → messages that are in the topic.
        self.written: dict[int, int] = {}

    def start(self, worker: Worker, release: str) -> None:
        """Start its next process."""
        installed = self.releases[release]
        out = self.folder / f"{worker.kind}-{worker.name}-{len(worker.lives)}-{release}.txt"
        arguments = [installed.program("worker.py", PROGRAM), self.bootstrap, worker.kind, worker.name, str(out)]
        with out.with_suffix(".stderr").open("wb") as errors:
            worker.process = subprocess.Popen(
                [str(installed.python), *arguments], cwd=installed.folder, env=installed.environment, stderr=errors
            )
        worker.lives.append(out)
        while not out.exists():  # from then on SIGTERM is an orderly end
            time.sleep(0.1)

    def end(self, worker: Worker) -> None:
        """SIGTERM; it must end well."""
        assert worker.process is not None
        worker.process.send_signal(signal.SIGTERM)
        if worker.process.wait(60):
            said = worker.lives[-1].with_suffix(".stderr").read_text()
            raise SystemExit(f"{worker.lives[-1].name} ended with {worker.process.returncode}:\n{said[-2000:]}")

    def roll(self, release: str) -> None:
        """Replace each by one of this release, one after the other; in each step one is killed, and one stopped."""
        for number in range(WORKERS):
            for worker in [each for each in self.workers if each.name == f"w{number}"]:
                self.end(worker)
                self.start(worker, release)
            self.strike()
            self.until_handled(f"one more is {release}")

    def strike(self) -> None:
        """kill -9 a worker of one group, and stop one of the other for three heartbeat intervals."""
        killed, stopped = (
            self.rng.choice([each for each in self.workers if each.kind == kind]) for kind in self.rng.sample(KINDS, 2)
        )
        assert killed.process is not None and stopped.process is not None
        self.struck |= {killed.lives[-1], stopped.lives[-1]}
        stopped.process.send_signal(signal.SIGSTOP)
        killed.process.kill()
        killed.process.wait()
        until = time.monotonic() + STOPPED_S
        while time.monotonic() < until:
            time.sleep(0.1)
        stopped.process.send_signal(signal.SIGCONT)
        self.start(killed, killed.lives[-1].stem.rpartition("-")[2])

    def handled(self, kind: str) -> dict[Place, list[Path]]:
        """(partition, offset) → the processes that have handled it."""
        found: dict[Place, list[Path]] = defaultdict(list)
        for worker in [each for each in self.workers if each.kind == kind]:
            for life in worker.lives:
                for line in life.read_text().splitlines():
                    partition, offset = map(int, line.split())
                    found[partition, offset].append(life)
        return found

    def until_handled(self, what: str) -> None:
        """Until each group has handled what is written now; each worker that runs has its part in it."""
        ends = dict(self.written)
        moved, before = time.monotonic(), dict[str, int]()
        while True:
            left = {}
            for kind in KINDS:
                found = self.handled(kind)
                left[kind] = sum((p, at) not in found for p, end in ends.items() for at in range(end))
            if not any(left.values()):
                break
            if left != before:
                moved, before = time.monotonic(), left
            if time.monotonic() > moved + STILL_S:
                words = ", ".join(f"{kind}: {count} not handled" for kind, count in left.items() if count)
                raise SystemExit(f"{what}: {words}; {self.folder}")
            time.sleep(0.3)
        say(f"{what}: {sum(ends.values()):,} messages are handled by both groups")

    def judge(self) -> None:
        """No message is missing, and none came twice but from a process that was struck."""
        for kind in KINDS:
            again = {place: lives for place, lives in self.handled(kind).items() if len(lives) > 1}
            wrong = {place: [x.name for x in lives] for place, lives in again.items() if not self.struck & set(lives)}
            if wrong:
                raise SystemExit(f"{kind}: {len(wrong)} came twice, no worker was struck: {list(wrong.items())[:5]}")
            say(f"{kind}: {len(again)} came twice, each from a worker that was killed or stopped")


def write(bootstrap: str, written: dict[int, int], ended: threading.Event) -> None:
    """Messages, until it has ended."""
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    while not ended.wait(PARTITIONS / RATE):
        for partition in range(PARTITIONS):
            producer.produce("jobs", b"x", partition=partition)
        if producer.flush(60):
            raise AssertionError("messages were not written within 60 s")
        for partition in range(PARTITIONS):
            written[partition] = written.get(partition, 0) + 1


def wheel_of(revision: str, folder: Path) -> Path:
    """The wheel of a commit."""
    epoch = tree_of(commit_of(revision), folder / "tree")
    build(folder / "tree", folder / "out", epoch, "--wheel")
    (wheel,) = (folder / "out").glob("*.whl")
    return wheel


def reads(old: Installed, new: Installed) -> None:
    """What the old release has written of the log is read alike by both."""
    old.command("dump", "--output", "old.dump")
    dump = str(old.folder / "old.dump")
    for how in ((), ("--state",)):
        if old.command("replay", *how, dump) != new.command("replay", *how, dump):
            raise SystemExit(f"replay {' '.join(how)}: the releases do not agree about {dump}")
    new.command("who", "claimed", "jobs", "0", "--from-dump", dump)


def levels(old: Installed, new: Installed) -> Iterator[str]:
    """Raise the level, as an operator would."""
    yield new.command("upgrade", "--dry-run").strip()
    yield new.command("upgrade", "--yes").strip()
    old.run("-m", "kafka_marshal", "status", fails=1)  # it says that it does not know the level


def story(fleet: Fleet, old: Installed, new: Installed) -> None:
    """All of it."""
    for worker in fleet.workers:
        fleet.start(worker, "old")
    while fleet.written.get(0, 0) < 20:
        time.sleep(0.1)
    fleet.until_handled("all are old")
    reads(old, new)
    say("a dump of the old release is read alike by both")
    for release in ("new", "old", "new"):
        fleet.roll(release)
    for line in levels(old, new):
        say(line)
    for _ in range(3):
        fleet.strike()
        fleet.until_handled("the level is raised")


def main() -> int:
    """Build both wheels, and let them work together."""
    parser = argparse.ArgumentParser(prog="python -m tests.release.upgrade", description=__doc__)
    parser.add_argument("revision", help="the old commit")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kafka-marshal-upgrade-") as name, LocalBroker() as broker:
        folder, bootstrap = Path(name), broker.bootstrap_servers
        old, new = (
            Installed(folder / release, wheel_of(revision, folder / f"{release}-built"), "cli")
            for release, revision in (("old", chosen.revision), ("new", "HEAD"))
        )
        say(f"both are built and installed: {old.command('--version').strip()}, {new.command('--version').strip()}")
        for each in (old, new):
            each.environment["KAFKA_MARSHAL_BOOTSTRAP"] = bootstrap
        old.command("init")
        create_jobs(bootstrap)
        fleet, ended = Fleet(folder, bootstrap, {"old": old, "new": new}), threading.Event()
        writer = threading.Thread(target=write, args=(bootstrap, fleet.written, ended), daemon=True)
        writer.start()
        try:
            story(fleet, old, new)
            ended.set()
            writer.join()
            fleet.until_handled("nothing more is written")
            for worker in fleet.workers:
                fleet.end(worker)
            fleet.judge()
        finally:
            ended.set()
            for worker in fleet.workers:
                if worker.process is not None:
                    worker.process.kill()
    return 0


def create_jobs(bootstrap: str) -> None:
    """The topic."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic("jobs", PARTITIONS, 1)])["jobs"].result(30)


if __name__ == "__main__":
    sys.exit(main())
