"""A week of log in fast motion, kept short by its members.

Members work while a load of heartbeats makes the log grow. They remove what is too old, and are killed with -9 at every
step of that, again and again. Meanwhile replicas start, and the log is read from its beginning, as it is cut. A replica
that has read all of it from the first record knows what must hold:

* states are the same from the snapshots that are left, and from the beginning of what is left;
* who owned what is still known for what is left;
* no cut takes what was not too old;
* no member ends but by its kill, and all handle messages to the end.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

from confluent_kafka import Producer

from kafka_marshal import Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.errors import MarshalError, TopicChangedError
from kafka_marshal.node import kept, log_keeper
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.node.kept import keep_settings
from kafka_marshal.node.log_reader import bounds, read_range
from kafka_marshal.node.replica import Begin, Replica
from kafka_marshal.observe.ownership import Ownership
from kafka_marshal.ports import Cluster
from kafka_marshal.snapshots import publisher
from kafka_marshal.testing import LocalBroker
from kafka_marshal.testing.fail_points import PRUNE_STEPS, CallMoment, Doom, dying
from rationalizer import ClaimingPartition, Heartbeat, Outcome, encode, route_lease, snapshot_log
from rationalizer.history import LeaseKey, Owners, Span
from tests.campaigns.frame import Result, Say

CPS = 2
PARTITIONS = 4
LOADS = 8
HI_MS = 1_000
TIMEOUT_S = 30.0

#: Every step, in order; a member that prunes opens several tails.
POINTS = [
    (step, moment, times)
    for step in PRUNE_STEPS
    for moment in CallMoment
    for times in ((1, 4) if step == "replay" else (1,))
]


_FAST: dict[ModuleType, dict[str, float]] = {
    kept: {"LEAST_KEEP_MS": 1},
    log_keeper: {"SHORTEST_LOOK_MS": 100.0, "SHARE": 0.5},
    publisher: {"JITTER_MS": 200.0, "LOOK_MS": 1_000.0, "RETRY_MS": 1_000.0},
}


@contextmanager
def fast_motion(interval: int) -> Iterator[None]:
    """In this process: a snapshot after each `interval` records, no shortest time to keep, turns at once."""
    with ExitStack() as stack:
        for module, values in _FAST.items():
            for name, value in values.items():
                stack.enter_context(patch.object(module, name, value))
        for module in (snapshot_log, log_keeper):
            stack.enter_context(patch.object(module, "SNAPSHOT_INTERVAL", interval))
        yield


# -- members -----------------------------------------------------------------------------------------------------


def work(options: dict[str, Any]) -> int:
    """A member, in a separate process."""
    doom = (
        Doom(options["step"], CallMoment(options["moment"]), options["times"], linger_s=0.002)
        if options["step"]
        else None
    )
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with (
        fast_motion(options["interval"]),
        dying(options["bootstrap"], doom),
        Marshal(
            options["bootstrap"],
            group_id="workers",
            client_id=options["name"],
            topic=options["topic"],
            heartbeat_interval=HI_MS / 1000,
        ) as marshal,
        marshal.consumer([options["data"]]) as consumer,
    ):
        while not ended.is_set():
            for message in consumer.consume(500, 0.2):
                consumer.done(message)
        health = marshal.health()
        if health.needs_restart or marshal.alarms:
            print(health, marshal.alarms, file=sys.stderr)
            return 1
    return 0


# -- the truth ---------------------------------------------------------------------------------------------------


class Truth:
    """A replica that has read everything, and the owners that it saw."""

    def __init__(self, cluster: Cluster, topic: str, keys: list[LeaseKey], interval: int) -> None:
        self._interval = interval
        self.replica = Replica(cluster, topic, TIMEOUT_S, Begin.HISTORY)
        self._keys = {cp: [k for k in keys if _cp(k) == cp] for cp in range(CPS)}
        self._owners = {cp: Owners() for cp in range(CPS)}
        self.spans: dict[LeaseKey, list[Span]] = {key: [] for key in keys}
        #: CP → next offset → log time there.
        self.log_times: dict[int, dict[int, int]] = {cp: {0: 0} for cp in range(CPS)}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self.failure: BaseException | None = None

    def __enter__(self) -> Truth:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.replica.close()

    def _follow(self) -> None:
        try:
            while not self._ended.is_set():
                self.replica.apply(self.replica.read(0.2), self._applied, history=True)
        except BaseException as error:
            self.failure = error
            raise

    def _applied(self, cp: int, offset: int, outcome: Outcome) -> None:
        world = self.replica.worlds[cp]
        if (offset + 1) % self._interval == 0:
            self.log_times[cp][offset + 1] = world.log_time
        if outcome.message is not None and outcome.message.group_id == "load":
            return
        for key in self._keys[cp]:
            if (begun := self._owners[cp].see(key, world, outcome)) is not None:
                self.spans[key].append(begun)

    def caught_up(self, ends: dict[int, int]) -> bool:
        return all(self.replica.worlds[cp].next_offset >= end for cp, end in ends.items())


def _cp(key: LeaseKey) -> int:
    return route_lease(key[1], key[2], CPS)


# -- the campaign ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class KeepingResult(Result):
    """What was seen."""

    violations: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)

    def details(self) -> Iterator[str]:
        yield from Result.details(self)
        yield f"killed as they pruned: {dict(sorted(self.kills.items()))}; reads of the whole log: {dict(self.reads)}"


class Campaign:
    """One run on one broker."""

    def __init__(self, bootstrap: str, *, interval: int, keep_ms: int, rate: int, members: int, rng: Random) -> None:
        self.bootstrap = bootstrap
        self.interval, self.keep_ms, self.rate, self.members, self.rng = interval, keep_ms, rate, members, rng
        self.topic, self.data = (f"{name}-{uuid.uuid4().hex[:8]}" for name in ("__marshal", "orders"))
        self.result = KeepingResult("keeping", 0)
        self._ended = threading.Event()
        self._points = [*POINTS]
        self._workers: dict[str, tuple[subprocess.Popen[bytes], str]] = {}
        self._made = 0
        self._failures: list[str] = []
        self.folder = Path(tempfile.mkdtemp(prefix="kafka-marshal-keeping-"))

    def run(self, records: int, kills: int, minutes: float = inf, say: Say = lambda _: None) -> KeepingResult:
        """Work until the log has grown by `records`, and `kills` members were killed as they pruned; or for minutes."""
        began = time.monotonic()
        until = began + 60 * minutes
        with ExitStack() as stack:
            stack.enter_context(fast_motion(self.interval))
            cluster = stack.enter_context(closing(KafkaCluster(self.bootstrap)))
            create_topic(cluster, self.topic, CPS, 30)
            cluster.create_topic(self.data, PARTITIONS, 1, {}, 30)
            cluster.alter_topic(self.topic, keep_settings(self.keep_ms), 30)
            keys = [("workers", self.data, partition) for partition in range(PARTITIONS)]
            truth = stack.enter_context(Truth(cluster, self.topic, keys, self.interval))
            threads = [threading.Thread(target=each) for each in (self._feed, self._start_replicas, self._read_all)]
            loading = threading.Thread(target=self._load, args=(truth,))
            for thread in (*threads, loading):
                thread.start()
            try:
                for number in range(self.members):
                    self._start_worker(doomed=number > 0)
                starts = dict.fromkeys(range(CPS), 0)
                spoken = time.monotonic()
                while sum(self.result.kills.values()) < kills or self._loaded < records or not all(starts.values()):
                    self._replace_the_killed()
                    self._watch_cuts(cluster, truth, starts)
                    is_wrong = self._failures or truth.failure is not None or self.result.violations
                    if is_wrong or time.monotonic() > until:
                        break
                    if time.monotonic() > spoken + 10:
                        spoken = time.monotonic()
                        say(f"{self._loaded:,} records, {dict(self.result.counts)}, kills {dict(self.result.kills)}")
                    time.sleep(0.05)
            finally:
                self._ended.set()
                for thread in (*threads, loading):
                    thread.join()
                self._end_workers()
            self.result.counts["records"] = self._loaded
            self.result.violations += self._failures
            if truth.failure is not None:
                self.result.violations.append(f"the truth ended: {truth.failure!r}")
            else:
                self._judge(cluster, truth, keys)
        self.result.seconds = time.monotonic() - began
        return self.result

    # Members.

    def _start_worker(self, *, doomed: bool) -> None:
        self._made += 1
        if not self._points:
            self._points = [*POINTS]
        step, moment, times = self._points.pop(self.rng.randrange(len(self._points))) if doomed else ("", "", 0)
        name = f"worker-{self._made}"
        options = {
            "bootstrap": self.bootstrap,
            "topic": self.topic,
            "data": self.data,
            "name": name,
            "interval": self.interval,
            "step": step,
            "moment": moment,
            "times": times,
        }
        path = self.folder / f"{name}.log"
        with path.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.campaigns.keeping", json.dumps(options)],
                stdout=log,
                stderr=log,
            )
        self._workers[name] = process, f"{step} {moment}".strip()

    def _replace_the_killed(self) -> None:
        for name, (process, point) in list(self._workers.items()):
            if process.poll() is None:
                continue
            del self._workers[name]
            if process.returncode == -signal.SIGKILL and point:
                self.result.kills[point] += 1
            else:
                self._failures.append(f"{name} ended with {process.returncode}: {self._said(name)}")
            self._start_worker(doomed=True)

    def _said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-2_000:]

    def _end_workers(self) -> None:
        for process, _ in self._workers.values():
            process.send_signal(signal.SIGTERM)
        for name, (process, point) in self._workers.items():
            process.wait(timeout=120)
            if process.returncode not in (0, -signal.SIGTERM, *[-signal.SIGKILL] * bool(point)):
                self._failures.append(f"{name} ended with {process.returncode}: {self._said(name)}")

    # Traffic.

    _loaded = 0

    def _feed(self) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap})
        while not self._ended.wait(0.1):
            for partition in range(PARTITIONS):
                producer.produce(self.data, b"x", partition=partition)
            producer.poll(0)
        producer.flush(10)

    def _load(self, truth: Truth) -> None:
        """Heartbeats of members that claim, as fast as asked for."""
        producer = Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 20, "acks": "all"})
        who = ("load-1", "load", "load")
        for each in range(LOADS):
            cp = route_lease("t", each, CPS)
            producer.produce(self.topic, encode(ClaimingPartition(*who, "t", each, 60_000)), b"", cp)
        producer.flush(10)
        epochs: dict[int, int] = {}
        while len(epochs) < LOADS and not self._ended.wait(0.05):
            for each in range(LOADS):
                lease = truth.replica.worlds[route_lease("t", each, CPS)].lease("load", "t", each)
                if lease is not None:
                    epochs[each] = lease.epoch
        began, step = time.monotonic(), max(1, self.rate // 50)
        while not self._ended.is_set():
            for _ in range(step):
                number, each = divmod(self._loaded, LOADS)
                value = encode(Heartbeat(*who, "t", each, epochs[each], number))
                while True:
                    try:
                        producer.produce(self.topic, value, b"", route_lease("t", each, CPS))
                        break
                    except BufferError:
                        producer.poll(0.1)
                self._loaded += 1
            producer.poll(0)
            self._ended.wait(max(0.0, began + self._loaded / self.rate - time.monotonic()))
        producer.flush(30)

    # Readers while it is cut.

    def _start_replicas(self) -> None:
        """A start needs no part of the log that a cut takes."""
        with closing(KafkaCluster(self.bootstrap)) as cluster:
            while not self._ended.wait(0.5):
                try:
                    replica = Replica(cluster, self.topic, TIMEOUT_S, Begin.SNAPSHOT)
                    try:
                        replica.catch_up(TIMEOUT_S)
                        self._failures += [f"a start found {each}" for each in replica.differences]
                    finally:
                        replica.close()
                    self.result.counts["starts"] += 1
                except MarshalError as error:
                    self._failures.append(f"a start failed: {error!r}")

    def _read_all(self) -> None:
        """`log`, `who`, `dump` and an audit: whole, or they say that it was cut."""
        with closing(KafkaCluster(self.bootstrap)) as cluster:
            while not self._ended.wait(1.0):
                ranges = bounds(cluster, self.topic, TIMEOUT_S)
                assert ranges is not None
                try:
                    read = sum(len(entries) for _, entries in read_range(cluster, self.topic, ranges, TIMEOUT_S))
                    whole = read == sum(high - low for low, high in ranges.values())
                    self.result.reads["whole" if whole else "LACKS SOME"] += 1
                    if not whole:
                        self._failures.append(f"a reader got {read} of {ranges} and was not told")
                except TopicChangedError:
                    self.result.reads["said to be cut"] += 1

    # What must hold.

    def _watch_cuts(self, cluster: Cluster, truth: Truth, starts: dict[int, int]) -> None:
        marks = cluster.watermarks([(self.topic, cp) for cp in range(CPS)], TIMEOUT_S)
        now_ms = time.time() * 1000
        for (_, cp), (low, _) in marks.items():
            if low == starts[cp] or truth.replica.worlds[cp].next_offset < low:
                continue  # nothing new, or not known there yet
            starts[cp] = low
            self.result.counts["cuts"] += 1
            log_time = truth.log_times[cp].get(low)
            if log_time is None:
                self.result.violations.append(f"partition {cp} was cut at {low}, where no snapshot is")
            elif log_time > now_ms - self.keep_ms:
                self.result.violations.append(f"partition {cp} was cut at {low}, only {now_ms - log_time:.0f} ms old")

    def _judge(self, cluster: Cluster, truth: Truth, keys: list[LeaseKey]) -> None:
        found = bounds(cluster, self.topic, TIMEOUT_S)
        assert found is not None
        until = time.monotonic() + 120
        while not truth.caught_up({cp: high for cp, (_, high) in found.items()}):
            assert time.monotonic() < until and truth.failure is None
            time.sleep(0.05)
        self.result.counts["records left"] = sum(high - low for low, high in found.values())
        if not all(low for low, _ in found.values()):
            self.result.violations.append(f"not every partition was cut: {found}")
        for begin in (Begin.SNAPSHOT, Begin.CHECK):
            replica = Replica(cluster, self.topic, TIMEOUT_S, begin)
            try:
                replica.catch_up(TIMEOUT_S)
                self.result.violations += [f"{begin}: {each}" for each in replica.differences]
                for cp, world in replica.worlds.items():
                    if world.digest() != truth.replica.worlds[cp].digest():
                        self.result.violations.append(f"{begin}: partition {cp} differs at {world.next_offset}")
            finally:
                replica.close()
        for key in keys:
            self._judge_owners(cluster, key, found[_cp(key)][1], truth.spans[key])

    def _judge_owners(self, cluster: Cluster, key: LeaseKey, end: int, spans: list[Span]) -> None:
        """As `who` does: from the snapshot at the beginning of what is left."""
        cp = _cp(key)
        start = Replica(cluster, self.topic, TIMEOUT_S, Begin.HISTORY, only=[cp])
        start.close()
        ownership = Ownership(key, cp, CPS)
        ownership.begin(start.worlds[cp])
        begin, before = start.worlds[cp].next_offset, len(ownership.spans)
        for _, entries in read_range(cluster, self.topic, {cp: (begin, end)}, TIMEOUT_S):
            ownership.take(entries)
        ownership.end()
        left = ownership.spans[before:]
        wanted = [each for each in spans if each.since_offset >= begin]
        if [_facts(each) for each in left] != [_facts(each) for each in wanted]:
            self.result.violations.append(f"who says of {key}: {left}, and it was {wanted}")


def _facts(span: Span) -> tuple[object, ...]:
    return (span.held, span.client_id, span.epoch, span.since, span.since_offset, span.until, str(span.ended))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of its command."""
    parser.add_argument("--records", type=int, default=5_000_000)
    parser.add_argument("--rate", type=int, default=10_000, help="records a second")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=inf, help="at most")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--interval", type=int, default=10_000, help="records between two snapshots")
    parser.add_argument("--keep", type=float, default=60.0, help="seconds of log that are kept")


def runs(chosen: argparse.Namespace, say: Say) -> Iterator[KeepingResult]:
    """What the command runs."""
    with LocalBroker() as broker:
        campaign = Campaign(
            broker.bootstrap_servers,
            interval=chosen.interval,
            keep_ms=int(chosen.keep * 1000),
            rate=chosen.rate,
            members=chosen.members,
            rng=Random(chosen.seed),
        )
        yield campaign.run(chosen.records, chosen.kills, chosen.minutes, say)


if __name__ == "__main__":
    sys.exit(work(json.loads(sys.argv[1])))
