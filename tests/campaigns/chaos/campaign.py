"""Workers in processes on a real broker, killed at every numbered step, stopped, cut off; their broker is killed, too.

What each did with each message is written down outside, and checked after a time without faults.
"""

from __future__ import annotations

import argparse
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.errors import MarshalError
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.ports import Ack, LogEntry
from kafka_marshal.testing.broker import LocalCluster
from kafka_marshal.testing.errors import LocalBrokerError
from kafka_marshal.testing.fail_points import points_of
from kafka_marshal.testing.proxy import Direction, TcpProxy
from tests.campaigns.chaos.check import Findings, Life, Mode, Story, check, replay_in_cuts
from tests.campaigns.chaos.fleet import Fleet, Place
from tests.campaigns.chaos.history import LogHistory
from tests.campaigns.chaos.log import Follower, read_topic, write_dump
from tests.campaigns.chaos.worker import GRANT, KINDS, Job
from tests.campaigns.frame import Result, Say, in_a_folder

# -- The testbed of a campaign: brokers behind proxies, topics, a writer of messages, and their faults ------------


COORDINATION = "__marshal"

#: Time-out of requests to the broker without faults.
PATIENCE_S = 30.0

#: Messages of a burst, and how many times as many are written singly in between.
BURST = 60
BURST_EVERY = 3


class Ground:
    """One broker or three, each behind a proxy. ``fault`` breaks something for a while; any thread may call it."""

    def __init__(self, brokers: int, coordination_partitions: int, topics: Mapping[str, int], rng: Random) -> None:
        self.counts: Counter[str] = Counter()
        #: (name, begin, end) of all faults (wall clock, ms).
        self.outages: list[tuple[str, float, float]] = []
        self._count = brokers
        self._coordination_partitions = coordination_partitions
        self._topics = dict(topics)
        self._rng = rng
        self._stack = ExitStack()
        self._proxies: list[TcpProxy] = []
        self._cluster: LocalCluster | None = None
        self._fault: threading.Thread | None = None
        self._failure: Exception | None = None

    def __enter__(self) -> Self:
        try:
            self._proxies = [self._stack.enter_context(TcpProxy()) for _ in range(self._count)]
            advertised = {i + 1: proxy.port for i, proxy in enumerate(self._proxies)}
            cluster = self._stack.enter_context(LocalCluster(self._count, advertised_ports=advertised))
            for i, proxy in enumerate(self._proxies):
                proxy.target_port = cluster.port_of(i + 1)
            self._cluster = cluster
            kafka = KafkaCluster(self.bootstrap)
            try:
                create_topic(kafka, COORDINATION, self._coordination_partitions, PATIENCE_S)
            finally:
                kafka.close()
            probe = Probe(self.bootstrap)
            for topic, partitions in self._topics.items():
                probe.create_topic(topic, partitions, min(3, self._count), {})
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._fault is not None:
            self._fault.join(60)
        self._stack.close()

    @property
    def bootstrap(self) -> str:
        """The proxies' addresses, for clients."""
        assert self._cluster is not None
        return self._cluster.bootstrap_servers

    # What goes wrong.

    def fault(self, heartbeat_interval_s: float, *, brokers: bool) -> bool:
        """Begin a fault of the network or (brokers) of a broker; False if another one is active."""
        if self._fault is not None and self._fault.is_alive():
            return False
        self.check()
        kind = "broker" if brokers else self._rng.choice(("cut", "delay", "lost acks", "lost requests", "split"))
        proxy = self._rng.randrange(self._count)
        lasts = heartbeat_interval_s * self._rng.uniform(0.2, 3.0)
        self._fault = threading.Thread(target=self._run, args=(kind, proxy, lasts), daemon=True)
        self._fault.start()
        return True

    def _run(self, kind: str, which: int, lasts: float) -> None:
        began = time.time() * 1000
        proxy = self._proxies[which]
        try:
            match kind:
                case "broker":
                    assert self._cluster is not None
                    self._cluster.kill(which + 1)
                    time.sleep(lasts)
                    self._cluster.restart(which + 1)
                case "cut":
                    proxy.cut()
                case "delay":
                    proxy.delay(min(lasts, 1.0) * 0.2)
                case "lost acks":
                    proxy.black_hole(Direction.TO_CLIENT)
                case "lost requests":
                    proxy.black_hole(Direction.TO_BROKER)
                case "split":
                    proxy.black_hole()
            if kind != "broker":
                time.sleep(lasts)
                if kind in ("lost acks", "split"):
                    proxy.cut()  # answers sent meanwhile never arrive
                proxy.restore()
        except (LocalBrokerError, OSError) as error:  # raised by check(), in the thread that can react to it
            self._failure = error
        self.counts[kind] += 1
        self.outages.append((kind, began, time.time() * 1000))

    def check(self) -> None:
        """Raise an error of a fault itself."""
        if self._failure is not None:
            raise self._failure

    def heal(self) -> None:
        """Wait for the end of an active fault."""
        if self._fault is not None:
            self._fault.join(60)
        self.check()


class Writer:
    """A thread that writes numbered messages to topics, evenly, and records acknowledgements."""

    def __init__(self, bootstrap: str, topics: Mapping[str, int], messages_a_second: float) -> None:
        #: (topic, partition) → offset → acknowledged number.
        self.acknowledged: dict[tuple[str, int], dict[int, int]] = {
            (topic, partition): {} for topic, count in topics.items() for partition in range(count)
        }
        self.written = 0
        self.refused = 0
        self._cluster = KafkaCluster(bootstrap)
        self._appenders = {topic: self._cluster.appender(topic, delivery_timeout_ms=60_000) for topic in topics}
        self._places = sorted(self.acknowledged)
        self._pause_s = 1.0 / messages_a_second
        self._end = threading.Event()
        self._failure: MarshalError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._end.is_set():
                # Sometimes a burst for one partition: its holder has many messages in flight when a fault occurs.
                burst = BURST if self.written % (BURST_EVERY * BURST) < len(self._places) else 1
                due = max(due + burst * self._pause_s, time.monotonic() - 1.0)
                place = self._places[self.written % len(self._places)]
                for _ in range(burst):
                    self._write(*place)
                self._end.wait(max(0.0, due - time.monotonic()))
        except MarshalError as error:
            self._failure = error

    def _write(self, topic: str, partition: int) -> None:
        number = self.written
        self.written += 1

        def answered(ack: Ack) -> None:
            if ack.error is not None:
                self.refused += 1
            elif ack.offset is not None:
                self.acknowledged[topic, partition][ack.offset] = number

        self._appenders[topic].append(partition, str(number).encode(), answered)
        for appender in self._appenders.values():
            appender.poll()

    def close(self) -> None:
        """Stop writing and wait for acknowledgements. Raises the thread's error."""
        self._end.set()
        self._thread.join(30)
        try:
            for appender in self._appenders.values():
                appender.flush(60.0)
        finally:
            for appender in self._appenders.values():
                appender.close()
            self._cluster.close()
        if self._failure is not None:
            raise self._failure


#: Topic → (partitions, group, mode). Those of "by hand" exist by name only.
TOPICS: dict[str, tuple[int, str, Mode]] = {
    "chaos-again": (6, "again", "at least once"),
    "chaos-sink": (4, "sink", "sink"),
    "chaos-once": (4, "once", "at most once"),
}
BY_HAND = ("chaos-by-hand", 4, "by hand")

CPS = 3

#: Violations of each kind that are printed; all of them are in the file of --json.
SHOWN = 20

#: The fail points of these workers.
POINTS = [name for delivery in dict.fromkeys(KINDS.values()) for name in points_of(delivery)]

#: name, kind, topic: the fleet.
FLEET = (
    ("again-1", "iterate", "chaos-again"),
    ("again-2", "iterate", "chaos-again"),
    ("again-3", "batches", "chaos-again"),
    ("sink-1", "sink", "chaos-sink"),
    ("sink-2", "sink", "chaos-sink"),
    ("once-1", "once", "chaos-once"),
    ("once-2", "once", "chaos-once"),
    ("once-3", "once ahead", "chaos-once"),
    ("hand-1", "by hand", BY_HAND[0]),
    ("hand-2", "by hand", BY_HAND[0]),
)

#: Coordinated groups: places, strategies, and skipped steps (their claims are JoinGroups).
MEMBERS = FLEET[:7]
STRATEGIES = {"again": "sticky", "sink": "roundrobin", "once": "range"}
NOT_DONE = ("takeover", "grant")

#: After the last fault, everything has an owner within this many HI (plus the workers' start, which depends on the
#: machine), and undrained partitions progress within as many: the backlog depends on the machine.
OWNED_INTERVALS = 20
STILL_INTERVALS = 60
STARTING_S = 60.0
#: Time-out of the fork server's start, which imports everything; on a busy machine it takes as long as some campaigns.
READY_S = 120.0
#: Longest wait for the drain.
DRAINED_S = 900.0


@dataclass(frozen=True, slots=True)
class Options:
    """What a campaign is like."""

    minutes: float = 5.0
    seed: int = 1
    brokers: int = 1
    heartbeat_interval_ms: int = 500
    messages_a_second: float = 150.0
    #: Mean seconds between stops of workers, faults of the network, deaths of brokers (0: none).
    stop_every_s: float = 2.0
    network_every_s: float = 8.0
    broker_every_s: float = 45.0
    #: All groups are coordinated.
    groups: bool = False
    #: The least of kills, of those at points, stops and faults by kind: until then it lasts up to ten times as long.
    least: Mapping[str, int] = field(default_factory=dict)
    #: Names of places whose workers are never killed.
    steady: tuple[str, ...] = ()
    #: Keep the folder, even if every promise was kept.
    keep: bool = False


@dataclass(slots=True)
class ChaosResult(Result):
    """What came of it."""

    findings: Findings = field(default_factory=Findings)
    points: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    ended_otherwise: dict[int, int] = field(default_factory=dict)
    owned_hi: float = 0.0
    drained_hi: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)

    @property
    def unmet(self) -> list[str]:
        """Fail points at which no worker died."""
        return [name for name in POINTS if not self.points.get(name)]

    def details(self) -> Iterator[str]:
        yield from (f"{times:6} {name}" for name, times in sorted(self.points.items()))
        if self.unmet:
            yield f"nobody died at: {', '.join(self.unmet)}"
        by_promise: dict[str, list[str]] = {}
        for each in self.findings.violations:
            by_promise.setdefault(each.promise, []).append(str(each))
        for messages in by_promise.values():
            yield from messages[:SHOWN]
            if len(messages) > SHOWN:
                yield f"… and {len(messages) - SHOWN} more of these"
        yield f"owned after {self.owned_hi:.1f} HI, drained after {self.drained_hi:.1f} HI; faults: {self.faults}"

    def to_json(self) -> dict[str, object]:
        return {
            **Result.to_json(self),
            "points": {name: self.points.get(name, 0) for name in POINTS},
            "faults": self.faults,
            "exit_statuses": self.ended_otherwise,
            "checked": dict(sorted(self.findings.counts.items())),
            "outcomes": dict(sorted(self.outcomes.items())),
            "owned_hi": round(self.owned_hi, 1),
            "drained_hi": round(self.drained_hi, 1),
        }


Look = Callable[[Fleet, float], object]


class _Campaign:
    def __init__(self, options: Options, folder: Path, look: Look | None, say: Callable[[str], object]) -> None:
        self.options = options
        self.folder = folder
        self.look = look
        self.say = say
        self.rng = Random(options.seed)
        self.hi_s = options.heartbeat_interval_ms / 1000
        self.database = str(folder / "sink.db")

    def run(self) -> ChaosResult:
        """All of it."""
        options = self.options
        self._prepare_sink()
        partitions = {topic: count for topic, (count, _, _) in TOPICS.items()}
        with Ground(options.brokers, CPS, partitions, self.rng) as ground:
            follower = Follower(ground.bootstrap, COORDINATION, CPS)
            writer = Writer(ground.bootstrap, partitions, options.messages_a_second)
            fleet = Fleet(self._places(ground.bootstrap), self.folder, self.rng, NOT_DONE if options.groups else ())
            try:
                fleet.wait_until_ready(READY_S)
                began = time.monotonic()
                self._faults(ground, fleet, began)
                ground.heal()
                writer.close()
                ends = {key: max(there, default=-1) for key, there in self._messages(ground.bootstrap).items()}
                owned, drained = self._peace(fleet, follower, ends)
                seconds = time.monotonic() - began
                stubborn = fleet.ask_all(30.0, fleet.turn)
            finally:
                fleet.close()
                follower.close()
            result, log = self._account(ground, fleet, writer, seconds, owned, drained)
            for name in stubborn:
                result.findings.say("liveness", f"{name} did not end within 30 s of SIGTERM")
            if options.keep or result.violations:
                write_dump(self.folder / "log.dump", log)
            return result

    def _prepare_sink(self) -> None:
        connection = sqlite3.connect(self.database)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(
            "CREATE TABLE handled (id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT, partition INTEGER, "
            '"offset" INTEGER, epoch INTEGER, number INTEGER)'
        )
        connection.commit()
        connection.close()

    def _places(self, bootstrap: str) -> list[Place]:
        places = []
        for name, kind, topic in MEMBERS if self.options.groups else FLEET:
            count, group, _ = TOPICS.get(topic, (BY_HAND[1], BY_HAND[2], ""))
            job = Job(
                bootstrap,
                COORDINATION,
                group,
                topic,
                count,
                kind,
                name,
                self.options.heartbeat_interval_ms,
                "",
                0,
                database=self.database,
                strategy=STRATEGIES[group] if self.options.groups else "",
            )
            places.append(Place(name, job, steady=name in self.options.steady))
        return places

    def _faults(self, ground: Ground, fleet: Fleet, began: float) -> None:
        """Inject faults until the minutes are over."""
        options, rng = self.options, self.rng
        every = {
            "stop": options.stop_every_s,
            "network": options.network_every_s,
            "broker": options.broker_every_s,
        }
        due = {name: began + mean * rng.uniform(0.5, 1.5) for name, mean in every.items() if mean}
        told = began
        while (now := time.monotonic()) < began + options.minutes * 60 * (1 if self._is_enough(fleet, ground) else 10):
            fleet.turn()
            for name in [name for name, at in due.items() if now >= at]:
                if name == "stop":
                    fleet.stop_one(self.hi_s * rng.uniform(2.2, 4.0))
                elif not ground.fault(self.hi_s, brokers=name == "broker"):
                    continue  # another fault is active; this one follows it
                due[name] = now + every[name] * rng.uniform(0.5, 1.5)
            if self.look is not None:
                self.look(fleet, now - began)
            if now > told + 10:
                told = now
                self.say(
                    f"{now - began:.0f} s: {fleet.counts.kills} kills, {fleet.counts.stops} stops, {ground.counts}"
                )
            time.sleep(0.02)

    def _is_enough(self, fleet: Fleet, ground: Ground) -> bool:
        ends = fleet.counts
        counts = Counter(kills=ends.kills, points=ends.points.total(), stops=ends.stops) + ground.counts
        return all(counts[name] >= times for name, times in self.options.least.items())

    def _peace(self, fleet: Fleet, follower: Follower, ends: dict[tuple[str, int], int]) -> tuple[float, float]:
        """Without faults: (HI until everything is owned, HI until everything is done), infinite if never."""
        fleet.settle()
        began = time.monotonic()
        owned = drained = float("inf")
        patience = STARTING_S + STILL_INTERVALS * self.hi_s
        moved = dict.fromkeys(ends, (-1, began))
        while (now := time.monotonic()) < began + DRAINED_S and drained == float("inf"):
            fleet.turn()
            leases = follower.leases()
            mine = {key: leases.get((TOPICS[key[0]][1], *key)) for key in ends}
            passed = (now - began) / self.hi_s
            if owned == float("inf") and all(x is not None and x[2] in ("fresh", "unknown") for x in mine.values()):
                owned = passed
            left = [key for key, x in mine.items() if x is None or x[1] < ends[key]]
            for key in left:
                stable = -1 if (lease := mine[key]) is None else lease[1]
                if stable > moved[key][0]:
                    moved[key] = stable, now
            if owned < float("inf") and not left:
                drained = passed
            elif any(now > moved[key][1] + patience for key in left):
                break
            time.sleep(0.02)
        return owned, drained

    def _messages(self, bootstrap: str) -> dict[tuple[str, int], dict[int, int]]:
        return {
            (topic, partition): {offset: int(value or b"-1") for offset, _, value in entries}
            for topic, (count, _, _) in TOPICS.items()
            for partition, entries in read_topic(bootstrap, topic, range(count)).items()
        }

    def _account(
        self, ground: Ground, fleet: Fleet, writer: Writer, seconds: float, owned: float, drained: float
    ) -> tuple[ChaosResult, Mapping[int, list[LogEntry]]]:
        lives = [Life.read(path, pid, path in fleet.killed) for path, pid in sorted(fleet.files.items())]
        log = {cp: list(entries) for cp, entries in read_topic(ground.bootstrap, COORDINATION, range(CPS)).items()}
        history = LogHistory(log, [(cp, at) for life in lives for cp, at, _ in life.digests])
        modes: dict[tuple[str, str, int], Mode] = {
            (group, topic, partition): mode
            for topic, (count, group, mode) in TOPICS.items()
            for partition in range(count)
        }
        name, count, group = BY_HAND
        modes |= {(group, name, p): "at most once" if p % 2 else "at least once" for p in range(count)}
        story = Story(
            self.options.heartbeat_interval_ms,
            modes,
            lives,
            history,
            self._messages(ground.bootstrap),
            writer.acknowledged,
            fleet.stops,
            self._rows(),
            GRANT,
            drained < float("inf"),
            fleet.unexplained,
        )
        findings = check(story)
        findings.violations.extend(replay_in_cuts(log, history, self.options.seed))
        if owned > OWNED_INTERVALS + STARTING_S / self.hi_s:
            findings.say("liveness", f"not everything was owned {owned:.0f} HI after the last fault")
        if drained == float("inf"):
            findings.say("liveness", f"something stood still for more than {STILL_INTERVALS} HI after the last fault")
        ends = fleet.counts
        counts = {"kills": ends.kills, "at fail points": ends.points.total(), "stops": ends.stops}
        counts |= {"processes": ends.started, "written": writer.written, "records": history.records}
        counts |= {name: findings.counts[name] for name in ("repeats", "lost")}
        result = ChaosResult(
            "chaos",
            self.options.seed,
            findings.violations,
            seconds,
            counts=Counter(counts),
            findings=findings,
            points=dict(sorted(ends.points.items())),
            faults=dict(sorted(ground.counts.items())),
            ended_otherwise=dict(sorted(ends.others.items())),
            owned_hi=owned,
            drained_hi=drained,
            outcomes=history.outcomes,
        )
        return result, log

    def _rows(self) -> list[tuple[str, int, int, int, int]]:
        connection = sqlite3.connect(self.database)
        try:
            query = 'SELECT topic, partition, "offset", epoch, number FROM handled ORDER BY id'
            return list(connection.execute(query))
        finally:
            connection.close()


def run_campaign(options: Options, *, look: Look | None = None, say: Say = lambda _: None) -> ChaosResult:
    """Run it. look(fleet, seconds since the beginning): called often. say: called with progress every ten seconds."""
    return in_a_folder("chaos", lambda folder: _Campaign(options, folder, look, say).run(), options.keep, say)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of its command."""
    parser.add_argument("--minutes", type=float, default=5.0, help="how long things go wrong (5)")
    parser.add_argument("--cluster3", action="store_true", help="three brokers, min.insync.replicas 2: leaders change")
    parser.add_argument("--heartbeat-interval-ms", type=int, default=500, help="HI (500)")
    parser.add_argument("--messages", type=float, default=150.0, help="written a second (150)")
    parser.add_argument("--groups", action="store_true", help="members of coordinated groups (mode=Group())")


def runs(chosen: argparse.Namespace, say: Say) -> Iterator[ChaosResult]:
    """What the command runs."""
    options = Options(
        minutes=chosen.minutes,
        seed=chosen.seed,
        brokers=3 if chosen.cluster3 else 1,
        broker_every_s=20.0 if chosen.cluster3 else 45.0,  # two of three continue: leaders change
        heartbeat_interval_ms=chosen.heartbeat_interval_ms,
        messages_a_second=chosen.messages,
        groups=chosen.groups,
        keep=chosen.keep,
    )
    yield run_campaign(options, say=say)
