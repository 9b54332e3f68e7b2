"""Exactly once into Kafka: workers killed or stopped at each step of a transaction, then a time without faults.

A read_committed reader finds each output once and in order. Half of the kills are in a claimed group, half in a
coordinated one.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from kafka_marshal.admin import Admin, Pause
from kafka_marshal.engine.work.topic_mark import KAFKA_COUNTS
from kafka_marshal.errors import KafkaUnavailableError
from kafka_marshal.testing.fail_points import CallMoment, points_of
from tests.campaigns.chaos.fleet import Fleet, Place
from tests.campaigns.chaos.worker import Job as PlainJob
from tests.campaigns.frame import Campaign, Result, Say, Settings, Violation, run_campaign
from tests.campaigns.transactions.check import Partition, check
from tests.campaigns.transactions.ground import Ground, Offsets, Reader, Writer
from tests.campaigns.transactions.worker import KINDS, WORKER, Job

# -- What operators and others do to a group at work: repositions, dropped offsets, foreign commits ---------------


#: How far a reposition goes at most.
JUMP = 60

#: How long the owner of a partition with a foreign commit is watched.
WATCHED_S = 3.0


class Acts:
    """What is done to the group; each waits until a worker has begun."""

    def __init__(self, ground: Ground, reader: Reader, rng: Random) -> None:
        #: Partition → where the group was set to, in order.
        self.restarts: dict[int, list[int]] = defaultdict(list)
        self.violations: list[Violation] = []
        #: While it is set, no worker may be stopped: a stopped owner would overwrite a foreign commit.
        self.none_stopped = threading.Event()
        self._ground = ground
        self._reader = reader
        self._rng = rng
        self._offsets = Offsets(ground)
        #: Partitions whose offset in Kafka counts. (Without the mark the next owner sets it, whatever it is.)
        self._marked: list[int] = []

    def all(self) -> list[Callable[[], None]]:
        """One after the other."""
        return [self.backwards, self.forwards, self.drop, self.foreign]

    def close(self) -> None:
        """Nothing is under way."""
        self._offsets.close()

    def _begun(self, admin: Admin) -> Admin:
        """When a worker has begun: an operator's positions of an unknown group would make it a claimed one."""
        if not admin.progress(self._ground.group):
            raise KafkaUnavailableError("no worker has begun")
        return admin

    @contextmanager
    def _paused(self) -> Iterator[tuple[Pause, dict[int, int]]]:
        """The group is paused; and the next offset of each partition by the log."""
        ground = self._ground
        with (
            Admin(ground.bootstrap, topic=ground.coordination) as admin,
            self._begun(admin).pause(ground.group, expires_in=60) as pause,
        ):
            pause.wait_released(30)
            following = dict.fromkeys(range(ground.partitions), 0)
            infos = admin.progress(ground.group)
            self._marked = [x.partition for x in infos if x.ranges and x.ranges[-1][1] == KAFKA_COUNTS]
            following |= {x.partition: (-1 if x.stable is None else x.stable) + 1 for x in infos}
            yield pause, following

    def _set(self, pause: Pause, partition: int, offset: int) -> None:
        self.restarts[partition].append(offset)
        pause.reposition({(self._ground.topic, partition): offset})

    def backwards(self) -> None:
        with self._paused() as (pause, following):
            partition = self._rng.choice(sorted(following))
            self._set(pause, partition, max(0, following[partition] - self._rng.randint(1, JUMP)))

    def forwards(self) -> None:
        """By at most what is there."""
        with self._paused() as (pause, following):
            partition = self._rng.choice(sorted(following))
            last = max((each.offset for each in list(self._reader.inputs[partition])), default=0)
            self._set(pause, partition, min(last, following[partition] + self._rng.randint(1, JUMP)))

    def drop(self) -> None:
        """Kafka's offsets of the group are dropped: it falls back to the log's."""
        with self._paused() as (_, following):
            committed = self._offsets.committed()
            for partition, offset in following.items():
                if committed.get(partition, offset) != offset:  # killed before its report to the log
                    self.restarts[partition].append(offset)
            self._offsets.drop()

    def foreign(self) -> None:
        """Another program commits: the partition stops, until it is repositioned."""
        self.none_stopped.set()
        try:
            time.sleep(0.2)
            with self._paused() as (_, following):
                committed = self._offsets.committed()
                if not self._marked:
                    return
                partition = self._rng.choice(self._marked)
                offset = committed.get(partition, following[partition])
                self._offsets.set(partition, max(0, offset + self._rng.choice((-7, 0, 5))))
                since = time.time() * 1000
            time.sleep(WATCHED_S)
            if later := sum(at > since for at in list(self._reader.times[partition])):
                what = f"[{partition}] went on with {later} outputs after another program committed"
                self.violations.append(Violation("foreign commit", what))
            with self._paused() as (pause, _):
                self._set(pause, partition, offset)
        finally:
            self.none_stopped.clear()


#: Steps that a claimed or a coordinated group does not have: its claims are JoinGroups.
NOT_CLAIMED, NOT_COORDINATED = (), ("takeover",)

POINTS = points_of("transactions")

READY_S = 120.0

#: A process dies during a call at most this long after its beginning.
CALL_S = 0.06

#: After the last fault, an output must come within this time, until all are there.
STILL_S = 60.0


@dataclass(frozen=True, slots=True)
class Options(Settings):
    """What a campaign is like."""

    partitions: int = 4
    hi_ms: int = 400
    kills: int = 300
    coordinated: bool = False
    #: The kind of each worker: blocks of consumer.transaction(), or consumer.run().
    workers: tuple[str, ...] = ("blocks", "run", "blocks")
    messages_a_second: float = 200.0
    stop_every_s: float = 5.0
    operator_every_s: float = 6.0
    #: Share of fail points at which the worker stops for longer than its lease, and continues.
    stopping: float = 0.15
    #: It ends without the rest of its kills after this time.
    most_s: float = 3_600.0


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


class Transactions(Campaign[Options]):
    """One run."""

    NAME = "transactions"
    turn_s = 0.02
    is_counted = True

    def story(self) -> None:
        options = self.options
        outputs = [f"{self.topic}-{name}" for name in ("out", "two", "letters")]
        self.make_topics(*outputs)
        self.ground = Ground(self.bootstrap, self.log, self.group, self.topic, options.partitions, *outputs)
        self.reader = Reader(self.ground)
        self.writer = Writer(self.ground, options.messages_a_second, Random(options.seed + 1))
        self.acts = Acts(self.ground, self.reader, Random(options.seed + 2))
        without = NOT_COORDINATED if options.coordinated else NOT_CLAIMED
        self.fleet = Fleet(self._places(), self.folder, self.rng, without, kinds=KINDS, module=WORKER)
        self.fleet.arrange = self._arrange
        self.crews.append(self.fleet)
        self.fleet.wait_until_ready(READY_S)
        self.began = time.monotonic()
        self.operator.start()
        self.befall()
        self.end_threads()
        self.acts.close()
        self.writer.close()
        self.reader.last = self.writer.last
        self.quiet()

    def _places(self) -> list[Place]:
        ground, options = self.ground, self.options
        plain = (ground.bootstrap, ground.coordination, ground.group, ground.topic, ground.partitions)
        more: dict[str, Any] = {"ordered": ground.ordered, "second": ground.second, "letters": ground.letters}
        strategy = "sticky" if options.coordinated else ""
        return [
            Place(f"w{number}", Job(*plain, kind, f"w{number}", options.hi_ms, "", 0, strategy=strategy, **more))
            for number, kind in enumerate(options.workers, 1)
        ]

    def faults(self) -> Mapping[Callable[[], None], float]:
        return {self.stop: self.options.stop_every_s}

    def operates(self) -> Mapping[Callable[[], None], float]:
        acts = [*self.acts.all(), *([self.restart] if self.may_kill else [])]
        return dict.fromkeys(acts, len(acts) * self.options.operator_every_s)

    def goes_on(self) -> bool:
        is_late = time.monotonic() >= self.began + self.options.most_s
        return self.fleet.counts.kills < self.options.kills and not is_late

    def progress(self) -> str:
        outputs = sum(map(len, self.reader.ordered.values()))
        return f"{self.fleet.counts.kills} kills, {outputs} outputs, {dict(self.counts)}"

    def stop(self) -> None:
        """SIGSTOP a worker, unless an owner must not be stopped now."""
        if not self.acts.none_stopped.is_set():
            self.fleet.stop_one(self.hi_s * self.rng.uniform(2.2, 5.0))

    def tend(self, *, is_calm: bool = False) -> None:
        """Workers that have stopped themselves at a fail point continue when their leases are over."""
        super().tend(is_calm=is_calm)
        now = time.monotonic()
        for place in self.fleet.places:
            if place.pid and not place.stopped_until and _is_stopped(place.pid):
                place.stopped_since = time.time() * 1000
                place.stopped_until = now + self.hi_s * self.rng.uniform(2.2, 5.0)
                place.kill_at = place.stopped_until + 5.0
                self.fleet.counts.stops += 1
            if place.stopped_until and self.acts.none_stopped.is_set():
                place.stopped_until = now
        self.reader.read(0.0)

    def _arrange(self, job: PlainJob) -> PlainJob:
        """Some workers stop at their fail point; and the time within a call is that of a broker."""
        assert isinstance(job, Job)
        linger_s = self.rng.random() * CALL_S if CallMoment.DURING in job.doom else job.linger_s
        return replace(job, linger_s=linger_s, stops=bool(job.doom) and self.rng.random() < self.options.stopping)

    def quiet(self) -> None:
        """All outputs come."""

        def look() -> tuple[object, list[str]]:
            behind = self.reader.behind
            outputs = sum(map(len, self.reader.ordered.values()))
            return outputs, [f"liveness: no output came for {STILL_S:g} s; left: {behind}"] if behind else []

        self.violations += self.until_quiet(look, STILL_S)

    def judge(self) -> None:
        self.reader.close()
        reader = Reader(self.ground)  # from the beginning, apart from the one that was there all the time
        while reader.read(3.0):
            pass
        partitions = {
            partition: Partition(reader.inputs[partition], self.acts.restarts[partition])
            for partition in range(self.ground.partitions)
        }
        self.violations += [*self.acts.violations, *check(partitions, reader.found())]
        ends, outputs = self.fleet.counts, sum(map(len, reader.ordered.values()))
        self.counts += Counter({"kills": ends.kills, "at fail points": ends.points.total(), "stops": ends.stops})
        self.counts += Counter(inputs=self.writer.written, outputs=outputs, letters=len(reader.found().letters))
        reader.close()

    def result(self) -> TransactionsResult:
        is_coordinated = self.options.coordinated
        return TransactionsResult(
            f"transactions, {'coordinated' if is_coordinated else 'claimed'} group",
            self.options.seed,
            self.violations,
            self.seconds,
            counts=self.counts,
            coordinated=is_coordinated,
            points=dict(sorted(self.fleet.counts.points.items())),
        )


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of its command."""
    parser.add_argument("--kills", type=int, default=300, help="of workers (300)")
    parser.add_argument("--minutes", type=float, default=60.0, help="most for each kind of group (60)")
    parser.add_argument("--only", choices=("claimed", "coordinated"), help="one kind of group")
    parser.add_argument("--workers", default="blocks,run,blocks", help="the kind of each (blocks,run,blocks)")
    parser.add_argument("--heartbeat-interval-ms", type=int, default=400, help="HI (400)")


def runs(chosen: argparse.Namespace, say: Say) -> Iterator[Result]:
    """What the command runs."""
    kinds = [chosen.only] if chosen.only else ["claimed", "coordinated"]
    for kind in kinds:
        options = Options(
            kills=chosen.kills // len(kinds),
            seed=chosen.seed,
            coordinated=kind == "coordinated",
            workers=tuple(chosen.workers.split(",")),
            hi_ms=chosen.heartbeat_interval_ms,
            most_s=chosen.minutes * 60,
            keep=chosen.keep,
        )
        yield run_campaign(Transactions, options, say=say)
