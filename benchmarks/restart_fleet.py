"""A fleet of a coordinated group on a real broker: its start, and restarts as a deploy and the drain of a node do them.

    python -m benchmarks.restart_fleet [--members 200] [--partitions N] [--only start,drain,rolling,all] [--json FILE]

Ten members a process. `start`: all join at random within ten seconds, from the end of their imports. `drain`: a quarter
of the processes get SIGTERM at once, and start again ten seconds later. `rolling`: five processes in turn, each after
the one before is ready. `all`: SIGTERM to all at once; each starts again when all have ended. Clients keep their names.
Pieces moved: in the log, also if one moved twice. A pause: from a member's on_revoke until another's (or its own)
on_assign; those of all partitions that paused. Sessions lost: members that the log shows as silent for longer than
their session.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.phantoms import is_even
from benchmarks.start_fleet import spent
from kafka_marshal import Group, GroupConsumer, Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.errors import KafkaUnavailableError
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.testing.broker import LocalBroker
from kafka_marshal.testing.simulate import where_it_ran
from rationalizer import World, route_group
from rationalizer.groups.history import Assignments

CPS, A_PROCESS = 8, 10
SESSION_MS, OVER_S = 10_000, 10.0
AWAY_S, ROLLED = 10.0, 5
LIMIT_S = 900.0

Note = Callable[[str], Callable[[Any, Any], None]]


def hold(about: dict[str, Any]) -> None:
    """Run the members of one process until SIGTERM; then write when their partitions came and went."""
    events: list[tuple[float, str, int]] = []
    lines = _Lines()
    logging.getLogger("kafka_marshal").addHandler(lines)
    logging.getLogger("kafka_marshal").setLevel(logging.INFO)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())

    def note(kind: str) -> Callable[[Any, Any], None]:
        return lambda _, pieces: events.extend((time.monotonic(), kind, piece.partition) for piece in pieces)

    print("ready", flush=True)
    sys.stdin.readline()
    begun, rng = time.monotonic(), random.Random(about["first"])
    members: list[tuple[Marshal, GroupConsumer]] = []
    for at in sorted(rng.random() * about["over_s"] for _ in range(A_PROCESS)):
        ended.wait(max(0.0, begun + at - time.monotonic()))
        members.append(member_of(about, f"m-{about['first'] + len(members):04}", note))
    print("joined", flush=True)
    ended.wait()
    closing = [threading.Thread(target=lambda m=m, c=c: (c.close(), m.close())) for m, c in members]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()
    with Path(about["file"]).open("a", encoding="utf-8") as file:
        file.write("".join(f"{at} {kind} {partition}\n" for at, kind, partition in events))
        file.write(f"{time.monotonic()} lines {lines.count}\n")


def member_of(about: dict[str, Any], name: str, note: Note) -> tuple[Marshal, GroupConsumer]:
    """One member. If Kafka does not answer in time, it tries again, as its supervisor would."""
    while True:
        marshal = None
        try:
            marshal = Marshal(about["bootstrap"], group_id=about["group"], client_id=name, topic=about["coordination"])
            consumer = marshal.consumer(
                [about["topic"]],
                mode=Group(session_timeout=SESSION_MS / 1000),
                on_assign=note("assign"),
                on_revoke=note("revoke"),
                on_lost=note("lost"),
            )
        except KafkaUnavailableError:
            if marshal is not None:
                marshal.close()
        else:
            return marshal, consumer


class _Lines(logging.Handler):
    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


class Watcher:
    """Follows the log beside the fleet."""

    def __init__(self, bootstrap: str, coordination: str, group: str, topics: dict[str, int]) -> None:
        self._cluster = KafkaCluster(bootstrap, {})
        home = route_group(group, CPS)
        self._tail = self._cluster.tail(coordination, {home: 0})
        self.world = World(home, CPS)
        self.seen = Assignments(group, keep=1_000_000)
        self.group, self.topics, self._coordination = group, topics, coordination

    def wait(self, members: int, since: float) -> float:
        """Until all are even (*blocking*): seconds since then."""
        home = (self._coordination, self.world.partition)
        _, end = self._cluster.watermarks([home], 30)[home]
        while self.world.next_offset < end or not is_even(self.world.group(self.group), self.topics, members):
            for entries in self._tail.read(0.05).records.values():
                for offset, timestamp_ms, value in entries:
                    self.seen.see(self.world, self.world.apply(offset, timestamp_ms, value))
            if time.monotonic() - since > LIMIT_S:
                raise RuntimeError("the group was not even in time")
        return time.monotonic() - since

    def close(self) -> None:
        """Free what was opened."""
        self._tail.close()
        self._cluster.close()


@dataclass(frozen=True)
class Scene:
    """What one scene has shown."""

    name: str
    members: int
    partitions: int
    even_s: float
    records: int
    generations: int
    moved: int
    silent: int
    paused: int
    pause_median_s: float
    pause_p95_s: float
    pause_max_s: float
    broker_s: float

    def line(self) -> str:
        """For people."""
        return (
            f"{self.name:8} {self.even_s:7.1f} {self.records:8,} {self.generations:6,} {self.moved:7,} {self.silent:7} "
            f"{self.paused:7,} {self.pause_median_s:9.2f} {self.pause_p95_s:7.2f} {self.pause_max_s:7.2f} "
            f"{self.broker_s:9.1f}"
        )


class Fleet:
    """The processes, and what they did."""

    def __init__(self, broker: LocalBroker, members: int, partitions: int, folder: Path) -> None:
        self._broker, self.members, self.partitions = broker, members, partitions
        self.topic, self.group = f"t-{uuid.uuid4().hex[:8]}", f"fleet-{uuid.uuid4().hex[:8]}"
        coordination, bootstrap = f"__{self.topic}", broker.bootstrap_servers
        cluster = KafkaCluster(bootstrap, {})
        create_topic(cluster, coordination, CPS, 60)
        cluster.create_topic(self.topic, partitions, 1, {}, 60)
        cluster.close()
        self._about = {"bootstrap": bootstrap, "group": self.group, "topic": self.topic, "coordination": coordination}
        self._folder = folder
        self.watcher = Watcher(bootstrap, coordination, self.group, {self.topic: partitions})
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._joins_at = 0.0

    def begin(self, numbers: Sequence[int], over_s: float, *, wait: bool = False) -> None:
        """Start these processes; with their imports done, they join within this time."""
        for number in numbers:
            about = {**self._about, "first": number * A_PROCESS, "over_s": over_s, "file": f"{self._folder}/{number}"}
            command = [sys.executable, "-m", "benchmarks.restart_fleet", "--hold", json.dumps(about)]
            self._processes[number] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        for number in numbers:
            self._await(number, "ready")
        self._joins_at = time.monotonic()
        for number in numbers:
            stdin = self._processes[number].stdin
            assert stdin is not None
            stdin.write("join\n")
            stdin.flush()
        if wait:
            for number in numbers:
                self._await(number, "joined")

    def _await(self, number: int, what: str) -> None:
        stdout = self._processes[number].stdout
        assert stdout is not None
        assert stdout.readline() == f"{what}\n", f"process {number} has ended"

    def end(self, numbers: Sequence[int]) -> None:
        """SIGTERM to these, and wait until they have ended."""
        for number in numbers:
            self._processes[number].send_signal(signal.SIGTERM)
        for number in numbers:
            assert self._processes[number].wait(120) == 0

    def kill(self) -> None:
        """What is left."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        self.watcher.close()

    def scene(self, name: str, play: Callable[[Fleet], object]) -> tuple[Scene, tuple[float, float]]:
        """Play it, until the group is even again; pauses are not known before the members have ended."""
        offset, before = self.watcher.world.next_offset, len(self.watcher.seen.rebalances)
        began, used = time.monotonic(), sum(spent(self._broker.pid_of(1)))
        play(self)
        even_s = self.watcher.wait(self.members, self._joins_at if name == "start" else began)
        found = self.watcher.seen.rebalances[before:]
        moved = sum(1 for each in found for move in each.moved if move.before is not None)
        silent = sum(len(each.silent) for each in found)
        records = self.watcher.world.next_offset - offset
        used = sum(spent(self._broker.pid_of(1))) - used
        scene = Scene(
            name, self.members, self.partitions, even_s, records, len(found), moved, silent, 0, 0.0, 0.0, 0.0, used
        )
        return scene, (began, time.monotonic())

    @property
    def all(self) -> range:
        """All processes by number."""
        return range(self.members // A_PROCESS)

    def drain(self) -> None:
        """A node is drained: a quarter of the processes, and they come back."""
        some = self.all[: max(1, len(self.all) // 4)]
        self.end(some)
        time.sleep(AWAY_S)
        self.begin(some, 0.0)

    def roll(self) -> None:
        """A deploy, one process after the other."""
        for number in self.all[:ROLLED]:
            self.end([number])
            self.begin([number], 0.0, wait=True)

    def deploy_all(self) -> None:
        """A deploy, all at once."""
        self.end(self.all)
        self.begin(self.all, 0.0)

    def pauses(self, within: tuple[float, float]) -> list[float]:
        """How long each partition that a member gave up in this time had none."""
        events: dict[int, list[tuple[float, str]]] = defaultdict(list)
        for file in self._folder.iterdir():
            for when, kind, partition in map(str.split, file.read_text(encoding="utf-8").splitlines()):
                if kind != "lines":
                    events[int(partition)].append((float(when), kind))
        found: list[float] = []
        for each in events.values():
            gone: float | None = None
            for at, kind in sorted(each):
                if kind != "assign" and within[0] <= at < within[1]:
                    gone = at if gone is None else gone
                elif kind == "assign" and gone is not None:
                    found.append(at - gone)
                    gone = None
        return found

    def lines(self) -> int:
        """How many log lines all processes wrote."""
        texts = [file.read_text(encoding="utf-8").split() for file in self._folder.iterdir()]
        return sum(int(words[at + 1]) for words in texts for at, word in enumerate(words) if word == "lines")


def with_pauses(scene: Scene, pauses: Sequence[float]) -> Scene:
    """Add what the members wrote."""
    if not pauses:
        return scene
    p95 = quantiles(pauses, n=20)[-1] if len(pauses) > 1 else pauses[0]
    return replace(scene, paused=len(pauses), pause_median_s=median(pauses), pause_p95_s=p95, pause_max_s=max(pauses))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and say it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=200)
    parser.add_argument("--partitions", type=int, help="default: two a member")
    parser.add_argument("--only", default="start,drain,rolling,all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hold", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.hold:
        hold(json.loads(args.hold))
        return
    plays: dict[str, Callable[[Fleet], object]] = {
        "start": lambda fleet: fleet.begin(fleet.all, OVER_S),
        "drain": Fleet.drain,
        "rolling": Fleet.roll,
        "all": Fleet.deploy_all,
    }
    with TemporaryDirectory() as folder, LocalBroker() as broker, ExitStack() as stack:
        fleet = Fleet(broker, args.members, args.partitions or 2 * args.members, Path(folder))
        stack.callback(fleet.kill)
        found = []
        for name in args.only.split(","):
            found.append(fleet.scene(name, plays[name]))
            print(found[-1][0].line(), flush=True)
        fleet.end(fleet.all)
        scenes = [with_pauses(scene, fleet.pauses(within)) for scene, within in found]
        print(f"{args.members} members, {fleet.partitions} partitions; {fleet.lines()} log lines of all processes")
    print("scene     even s  records  gener.   moved  silent  paused  median s   p95 s   max s  broker s")
    print("\n".join(scene.line() for scene in scenes))
    if args.json:
        rows = {"benchmark": "restart_fleet", "machine": where_it_ran(), "rows": [asdict(scene) for scene in scenes]}
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
