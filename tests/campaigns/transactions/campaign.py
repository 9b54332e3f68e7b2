"""Exactly once into Kafka: workers killed or stopped at each step of a transaction, then a time without faults.

A read_committed reader finds each output once and in order. Half of the kills are in a claimed group, half in a
coordinated one.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.testing import RunningKafka
from kafka_marshal.testing.fail_points import CallMoment, points_of
from tests.campaigns.chaos.fleet import Fleet, Place
from tests.campaigns.chaos.worker import Job as PlainJob
from tests.campaigns.frame import Operator, Result, Say, Schedule, Violation, run_on_a_broker
from tests.campaigns.transactions.check import Partition, check
from tests.campaigns.transactions.ground import Ground, Reader, Writer
from tests.campaigns.transactions.operator import Acts
from tests.campaigns.transactions.worker import KINDS, WORKER, Job

__all__ = ["Options", "TransactionsResult", "add_arguments", "make_ground", "run_campaign", "runs"]

CPS = 2
PARTITIONS = 4

#: Steps that a claimed or a coordinated group does not have: its claims are JoinGroups.
NOT_CLAIMED, NOT_COORDINATED = (), ("takeover",)

POINTS = points_of("transactions")

READY_S = 120.0

#: A process dies during a call at most this long after its beginning.
CALL_S = 0.06

#: After the last fault, an output must come within this time, until all are there.
STILL_S = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """What a campaign is like."""

    kills: int = 300
    seed: int = 1
    coordinated: bool = False
    #: The kind of each worker: blocks of consumer.transaction(), or consumer.run().
    workers: tuple[str, ...] = ("blocks", "run", "blocks")
    heartbeat_interval_ms: int = 400
    messages_a_second: float = 200.0
    stop_every_s: float = 5.0
    operator_every_s: float = 6.0
    #: Share of fail points at which the worker stops for longer than its lease, and continues.
    stopping: float = 0.15
    #: It ends without the rest of its kills after this time.
    most_s: float = 3_600.0
    #: Keep the folder, even if every promise was kept.
    keep: bool = False


@dataclass(slots=True)
class TransactionsResult(Result):
    """What came of it."""

    coordinated: bool = False
    points: dict[str, int] = field(default_factory=dict)

    @property
    def unmet(self) -> list[str]:
        """Fail points at which no worker died."""
        without = NOT_COORDINATED if self.coordinated else NOT_CLAIMED
        return [name for name in POINTS if not self.points.get(name) and not any(x in name for x in without)]

    def details(self) -> Iterator[str]:
        yield from (f"{times:6} {name}" for name, times in self.points.items())
        if self.unmet:
            yield f"nobody died at: {', '.join(self.unmet)}"
        yield from Result.details(self)

    def to_json(self) -> dict[str, object]:
        return {**Result.to_json(self), "points": {name: self.points.get(name, 0) for name in POINTS}}


def make_ground(bootstrap: str, partitions: int = PARTITIONS) -> Ground:
    """New topics on this broker."""
    name = uuid.uuid4().hex[:6]
    ground = Ground(
        bootstrap, f"__marshal-{name}", f"group-{name}", f"in-{name}", partitions, f"out-{name}", f"two-{name}",
        f"letters-{name}",
    )  # fmt: skip
    with closing(KafkaCluster(bootstrap)) as cluster:
        create_topic(cluster, ground.coordination, CPS, 20)
        for topic in (ground.topic, ground.ordered, ground.second, ground.letters):
            cluster.create_topic(topic, partitions, 1, {}, 20)
    return ground


class _Campaign:
    def __init__(self, options: Options, folder: Path, kafka: RunningKafka, restarts: bool, say: Say) -> None:
        self.options = options
        self.folder = folder
        self.say = say
        self.rng = Random(options.seed)
        self.hi_s = options.heartbeat_interval_ms / 1000
        self.ground = make_ground(kafka.bootstrap_servers)
        self.reader = Reader(self.ground)
        self.writer = Writer(self.ground, options.messages_a_second, Random(options.seed + 1))
        self.violations: list[Violation] = []
        without = NOT_COORDINATED if options.coordinated else NOT_CLAIMED
        self.fleet = Fleet(self._places(), folder, self.rng, without, kinds=KINDS, module=WORKER)
        self.fleet.arrange = self._arrange
        rng = Random(options.seed + 2)
        self.acts = Acts(self.ground, self.reader, rng, kafka if restarts else None)
        every = dict.fromkeys(self.acts.all(), options.operator_every_s * len(self.acts.all()))
        self.operator = Operator(Schedule(every, rng, self.acts.counts, say, is_counted=True))
        self.operator.start()

    def _places(self) -> list[Place]:
        ground, options = self.ground, self.options
        return [
            Place(
                f"w{number}",
                Job(
                    ground.bootstrap,
                    ground.coordination,
                    ground.group,
                    ground.topic,
                    ground.partitions,
                    kind,
                    f"w{number}",
                    options.heartbeat_interval_ms,
                    "",
                    0,
                    strategy="sticky" if options.coordinated else "",
                    ordered=ground.ordered,
                    second=ground.second,
                    letters=ground.letters,
                ),
            )
            for number, kind in enumerate(options.workers, 1)
        ]

    def run(self) -> TransactionsResult:
        """All of it."""
        try:
            self.fleet.wait_until_ready(READY_S)
            began = time.monotonic()
            self._faults(began)
            self.operator.close()
            self.acts.close()
            self.writer.close()
            self.reader.last = self.writer.last
            self._peace()
            seconds = time.monotonic() - began
            for name in self.fleet.ask_all(30.0, self.fleet.turn):
                self.violations.append(Violation("liveness", f"{name} did not end within 30 s of SIGTERM"))
        finally:
            self.fleet.close()
        self.violations += [Violation("worker", text) for text in self.fleet.unexplained]
        self.violations += self.acts.violations
        reader = Reader(self.ground)  # from the beginning, apart from the one that was there all the time
        while reader.read(3.0):
            pass
        partitions = {
            partition: Partition(reader.inputs[partition], self.acts.restarts[partition])
            for partition in range(self.ground.partitions)
        }
        self.violations += check(partitions, reader.found())
        ends, kind = self.fleet.counts, "coordinated" if self.options.coordinated else "claimed"
        counts = self.acts.counts + Counter({"kills": ends.kills, "at fail points": ends.points.total()})
        counts += Counter({"stops": ends.stops, "inputs": self.writer.written})
        counts += Counter({"outputs": sum(map(len, reader.ordered.values())), "letters": len(reader.found().letters)})
        result = TransactionsResult(
            f"transactions, {kind} group",
            self.options.seed,
            self.violations,
            seconds,
            counts=counts,
            coordinated=self.options.coordinated,
            points=dict(sorted(ends.points.items())),
        )
        reader.close()
        self.reader.close()
        return result

    def _faults(self, began: float) -> None:
        options, fleet, told = self.options, self.fleet, began
        due = began + options.stop_every_s
        while fleet.counts.kills < options.kills and (now := time.monotonic()) < began + options.most_s:
            fleet.turn()
            self._stopped(now)
            if now >= due and not self.acts.none_stopped.is_set():
                fleet.stop_one(self.hi_s * self.rng.uniform(2.2, 5.0))
                due = now + options.stop_every_s * self.rng.uniform(0.5, 1.5)
            self.reader.read(0.0)
            if now > told + 10:
                told = now
                outputs = sum(map(len, self.reader.ordered.values()))
                acts = dict(self.acts.counts)
                self.say(f"{now - began:.0f} s: {fleet.counts.kills} kills, {outputs} outputs, {acts}")
            time.sleep(0.02)

    def _stopped(self, now: float) -> None:
        """Workers that have stopped themselves at a fail point continue when their leases are over."""
        for place in self.fleet.places:
            if place.pid and not place.stopped_until and _is_stopped(place.pid):
                place.stopped_since = time.time() * 1000
                place.stopped_until = now + self.hi_s * self.rng.uniform(2.2, 5.0)
                place.kill_at = place.stopped_until + 5.0
                self.fleet.counts.stops += 1
            if place.stopped_until and self.acts.none_stopped.is_set():
                place.stopped_until = now

    def _arrange(self, job: PlainJob) -> PlainJob:
        """Some workers stop at their fail point; and the time within a call is that of a broker."""
        assert isinstance(job, Job)
        linger_s = self.rng.random() * CALL_S if CallMoment.DURING in job.doom else job.linger_s
        return replace(job, linger_s=linger_s, stops=bool(job.doom) and self.rng.random() < self.options.stopping)

    def _peace(self) -> None:
        """Without faults, all outputs come."""
        self.fleet.settle()
        moved = time.monotonic()
        while (behind := self.reader.behind) and time.monotonic() < moved + STILL_S:
            self.fleet.turn()
            self._stopped(time.monotonic())
            if self.reader.read(0.05):
                moved = time.monotonic()
        if behind:
            self.violations.append(Violation("liveness", f"no output came for {STILL_S:g} s; left: {behind}"))


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def run_campaign(
    options: Options, kafka: RunningKafka | None = None, *, say: Say = lambda _: None
) -> TransactionsResult:
    """Run it, on a separate broker, which is killed, too; or on one that is not."""

    def run(folder: Path, broker: RunningKafka, restarts: bool) -> TransactionsResult:
        return _Campaign(options, folder, broker, restarts, say).run()

    return run_on_a_broker("transactions", run, kafka, options.keep, say)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of its command."""
    parser.add_argument("--kills", type=int, default=300, help="of workers (300)")
    parser.add_argument("--minutes", type=float, default=60.0, help="most for each kind of group (60)")
    parser.add_argument("--only", choices=("claimed", "coordinated"), help="one kind of group")
    parser.add_argument("--workers", default="blocks,run,blocks", help="the kind of each (blocks,run,blocks)")
    parser.add_argument("--heartbeat-interval-ms", type=int, default=400, help="HI (400)")


def runs(chosen: argparse.Namespace, say: Say) -> Iterator[TransactionsResult]:
    """What the command runs."""
    kinds = [chosen.only] if chosen.only else ["claimed", "coordinated"]
    for kind in kinds:
        options = Options(
            kills=chosen.kills // len(kinds),
            seed=chosen.seed,
            coordinated=kind == "coordinated",
            workers=tuple(chosen.workers.split(",")),
            heartbeat_interval_ms=chosen.heartbeat_interval_ms,
            most_s=chosen.minutes * 60,
            keep=chosen.keep,
        )
        yield run_campaign(options, say=say)
