"""The frame of a campaign: a broker, workers in processes, what befalls both, an operator, and how it ends.

A story is a :class:`Campaign`: what is written, what its workers do (a :class:`~tests.campaigns.process.Process`), what
befalls them, when all is quiet again, and what is judged (an account). ``python -m tests.campaigns`` runs each.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path
from random import Random
from typing import Any, Generic, Protocol, TypeVar

from confluent_kafka import KafkaException, Producer

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.admin import Admin
from kafka_marshal.errors import AdminError, KafkaUnavailableError
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.testing import RunningKafka, open_kafka

#: What an operator's command raises while no broker answers, or where another one was faster.
AWAY = (AdminError, KafkaException, KafkaUnavailableError)

#: How long a worker may take to end after SIGTERM (s), also while the broker is away.
LEAVES_S = 45.0

#: By this time at most (s) faults last longer, until the least that a campaign asks for has happened.
MOST_LATE_S = 180.0

#: Without faults something changes within this time (s), or the group is stuck.
STILL_S = 90.0

#: Between two times at which it reads what is left (s).
LOOK_S = 0.3

#: Nothing is done before this time (s).
BEGINS_S = 4.0

#: Partitions of the coordination topic.
CPS = 2

Say = Callable[[str], object]


class StuckError(Exception):
    """The campaign ends here: what is stuck is its last violation."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a campaign is like."""

    seed: int = 1
    partitions: int = 2
    hi_ms: int = 500
    #: The least of what is counted while faults last: a busy machine does less in the same time.
    least: Mapping[str, int] = field(default_factory=dict)
    #: Keep the folder, even if every promise was kept.
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise."""

    promise: str
    message: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.message}"


@dataclass(slots=True)
class Result:
    """The figures, and what was broken."""

    name: str
    seed: int
    violations: Sequence[object]
    seconds: float = 0.0
    folder: str = ""
    counts: Counter[str] = field(default_factory=Counter)

    def tell(self) -> str:
        """The figures, for people."""
        counts = ", ".join(f"{name} {times:,}" for name, times in sorted(self.counts.items()))
        end = f"{len(self.violations)} violations; seed {self.seed}"
        return f"{self.name}: {self.seconds / 60:.1f} min; {counts}; {end}"

    def details(self) -> Iterator[str]:
        """What is shown before them."""
        return map(str, self.violations[:40])

    def to_json(self) -> dict[str, object]:
        """For a file."""
        return {
            "line": self.tell(),
            "seconds": round(self.seconds, 1),
            "counts": dict(self.counts),
            "violations": [str(each) for each in self.violations],
        }


# -- workers -----------------------------------------------------------------------------------------------------


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


class Workers(Protocol):
    """A crew; or a fleet that a fork server starts (:mod:`tests.campaigns.chaos.fleet`)."""

    errors: list[str]

    def tend(self, *, is_calm: bool = False) -> None: ...
    def end_all(self) -> None: ...


class Crew:
    """Workers, each of which is started again when it has ended."""

    def __init__(
        self,
        worker: str,
        folder: Path,
        kinds: Mapping[str, str],
        job: Callable[[Place], Mapping[str, object]],
        *,
        rng: Random,
        hi_s: float,
        counts: Counter[str],
    ) -> None:
        """worker: the module of its class, which is given a job as JSON. kinds: name → kind."""
        self._worker, self._folder, self._job = worker, folder, job
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
            job_json = json.dumps({**job, **self._job(place)})
            command = [sys.executable, "-m", "tests.campaigns.process", self._worker, job_json]
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
                self._is_late(place)

    def _one(self) -> Place | None:
        """One that has begun to work."""
        found = [x for x in self.places if x.runs and x.life is not None and x.life.out.stat().st_size]
        return self._rng.choice(found) if found else None

    def kill(self, place: Place | None = None) -> None:
        """kill -9 it, or one."""
        place = place or self._one()
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
        self.end_all()
        for place in self.places:
            self.start(place)

    def end(self, places: Iterable[Place]) -> None:
        """SIGTERM to these (*blocking*)."""
        asked = list(places)
        for place in asked:
            self._ask(place)
        for place in asked:
            if place.process is None:
                continue
            try:
                place.process.wait(LEAVES_S)
            except subprocess.TimeoutExpired:
                self._is_late(place)

    def end_all(self) -> None:
        """SIGTERM to all (*blocking*)."""
        self.end(self.places)

    def _is_late(self, place: Place) -> None:
        self.errors.append(f"{place.name} did not end within {LEAVES_S:g} s of SIGTERM")
        if place.process is not None:
            place.process.kill()
            place.process.wait()


# -- what happens ------------------------------------------------------------------------------------------------


class Schedule:
    """Acts that are done again and again; one that no broker answers, or that comes too late, is not done."""

    def __init__(
        self,
        acts: Mapping[Callable[[], None], float],
        rng: Random,
        counts: Counter[str],
        say: Say,
        *,
        is_counted: bool = False,
    ) -> None:
        """acts: each with the mean time between two of it (s). is_counted: each by its name."""
        began = time.monotonic() + BEGINS_S
        self._acts, self._rng, self._counts, self._say, self._is_counted = acts, rng, counts, say, is_counted
        self._due = {act: began + every_s * rng.uniform(0.0, 1.0) for act, every_s in acts.items()}

    def turn(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        for act in [act for act, at in self._due.items() if now >= at]:
            try:
                act()
                self._counts[act.__name__] += self._is_counted
            except AWAY as error:
                self._counts[f"{act.__name__} refused"] += 1
                self._say(f"{act.__name__}: {error}"[:300])
            self._due[act] = time.monotonic() + self._acts[act] * self._rng.uniform(0.3, 1.7)


class Operator(threading.Thread):
    """A schedule in a thread, until ``ended``; an error that an act may not raise is ``failure``."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(daemon=True)
        self._schedule = schedule
        self.ended = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        """The thread."""
        try:
            while not self.ended.wait(0.1):
                self._schedule.turn()
        except BaseException as error:  # noqa: BLE001 - raised in the end
            self.failure = error

    def close(self) -> None:
        """Finish what has begun. Raises its failure."""
        self.ended.set()
        if self.ident is not None:
            self.join()
        if self.failure is not None:
            raise self.failure


# -- a campaign --------------------------------------------------------------------------------------------------

SettingsT = TypeVar("SettingsT", bound=Settings)


class Campaign(Generic[SettingsT]):
    """One run on one broker: new topics, workers, what befalls them, and the end. A story overrides what it has."""

    NAME = ""
    #: Messages in a second; those that are there at the beginning; and how many there are at most.
    rate = inf
    backlog = 0
    most = 10**12
    #: Between two turns of the workers (s).
    turn_s = 0.05
    #: Whether the operator's acts are counted by their names.
    is_counted = False

    def __init__(self, options: SettingsT, folder: Path, kafka: RunningKafka, may_kill: bool, say: Say) -> None:
        self.options, self.folder, self.kafka, self.may_kill, self.say = options, folder, kafka, may_kill, say
        self.rng, self.counts, self.hi_s = Random(options.seed), Counter[str](), options.hi_ms / 1000
        name = uuid.uuid4().hex[:6]
        self.log, self.group, self.topic = f"__marshal-{name}", f"group-{name}", f"jobs-{name}"
        self.bootstrap = kafka.bootstrap_servers
        with closing(KafkaCluster(self.bootstrap)) as cluster:
            create_topic(cluster, self.log, CPS, 20)
            cluster.create_topic(self.topic, options.partitions, 1, {}, 20)
        #: Partition → messages that are written.
        self.written = dict.fromkeys(range(options.partitions), 0)
        self.violations: list[Any] = []
        #: It exists when there are no more faults; and set when nothing more is written.
        self.calm, self.ended = folder / "calm", threading.Event()
        self.crews: list[Workers] = []
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []
        self.began = time.monotonic()

    @cached_property
    def operator(self) -> Operator:
        """Does what the story says."""
        return Operator(Schedule(self.operates(), self.rng, self.counts, self.say, is_counted=self.is_counted))

    # What a story has.

    def story(self) -> None:
        """Faults while messages come, then quiet."""
        self.tend()
        self.start(self.write)
        self.operator.start()
        self.befall()
        self.end_threads()
        self.quiet()

    def faults(self) -> Mapping[Callable[[], None], float]:
        """What befalls the workers, and how often (s)."""
        return {}

    def operates(self) -> Mapping[Callable[[], None], float]:
        """What befalls the broker, or is done by an operator, in a thread; and how often (s)."""
        return {}

    def goes_on(self) -> bool:
        """Whether there are more faults."""
        raise NotImplementedError

    def message(self, partition: int, offset: int) -> tuple[bytes, bytes]:
        """Key and value of a message."""
        raise NotImplementedError

    def quiet(self) -> None:
        """Wait until all is done, without faults."""
        raise NotImplementedError

    def judge(self) -> None:
        """Add to ``violations`` and ``counts``, when all workers have ended."""
        raise NotImplementedError

    def progress(self) -> object:
        """What is said every ten seconds."""
        return dict(self.counts)

    # Workers.

    def crew(self, kinds: Mapping[str, str], job: Callable[[Place], Mapping[str, object]]) -> Crew:
        """Workers of this story. kinds: name → kind."""
        worker = f"tests.campaigns.{self.NAME}.worker"
        made = Crew(worker, self.folder, kinds, job, rng=self.rng, hi_s=self.hi_s, counts=self.counts)
        self.crews.append(made)
        return made

    def job(self, **more: object) -> dict[str, object]:
        """What each worker is started with, and more."""
        return {
            "bootstrap": self.bootstrap,
            "group": self.group,
            "log": self.log,
            "topic": self.topic,
            "partitions": self.options.partitions,
            "hi_ms": self.options.hi_ms,
            "calm": str(self.calm),
            "watchdog": False,
        } | more

    def tend(self, *, is_calm: bool = False) -> None:
        """Keep all crews at work."""
        for crew in self.crews:
            crew.tend(is_calm=is_calm)

    # Messages.

    def write(self) -> None:
        """Write messages, numbered through all partitions, until it ends; the number says their offset."""
        config = {"enable.idempotence": True, "linger.ms": 20, "message.timeout.ms": 300_000, "log_level": 0}
        producer = Producer({"bootstrap.servers": self.bootstrap, **config})
        began, number = time.monotonic() - self.backlog / self.rate, 0
        while number < self.most and not self.ended.is_set():
            due = min(self.most, (time.monotonic() - began) * self.rate)
            while number < due:
                offset, partition = divmod(number, self.options.partitions)
                key, value = self.message(partition, offset)
                try:
                    producer.produce(self.topic, value=value, key=key, partition=partition)
                except BufferError:
                    producer.poll(0.1)
                    continue
                self.written[partition] = max(self.written[partition], offset + 1)
                number += 1
                producer.poll(0)
            producer.poll(0)
            self.ended.wait(0.02)
        if producer.flush(120):
            raise AssertionError("messages were not written within 120 s")

    # What befalls them.

    def _crew(self) -> Crew:
        return self.rng.choice([each for each in self.crews if isinstance(each, Crew)])

    def kill(self) -> None:
        """kill -9 a worker."""
        self._crew().kill()

    def stop(self) -> None:
        """SIGSTOP a worker for a while."""
        self._crew().stop()

    def leave(self) -> None:
        """SIGTERM a worker."""
        self._crew().leave(self.rng.choice((0.0, 3.0)))

    def freeze(self) -> None:
        """The broker hangs, for up to 3 heartbeat intervals."""
        self.kafka.pause()
        time.sleep(self.rng.choice((0.3, 3.0 * self.hi_s)))
        self.kafka.resume()
        self.counts["freezes"] += 1

    def restart(self) -> None:
        """The broker is killed, and is away for up to 3 heartbeat intervals."""
        self.kafka.kill()
        time.sleep(self.rng.choice((0.1, 3.0 * self.hi_s)))
        self.kafka.restart()
        self.counts["restarts"] += 1

    def befall(self) -> None:
        """Faults, until ``goes_on`` says that there are no more."""
        schedule, told = Schedule(self.faults(), self.rng, self.counts, self.say), time.monotonic()
        late = None
        while self.operator.failure is None and not self._failures:
            if not self.goes_on():
                late = late or time.monotonic() + MOST_LATE_S
                if time.monotonic() > late or all(self.counts[x] >= n for x, n in self.options.least.items()):
                    break
            self.tend()
            schedule.turn()
            if (now := time.monotonic()) > told + 10:
                told = now
                self.say(f"{now - self.began:.0f} s: {self.progress()}")
            time.sleep(self.turn_s)

    # Others.

    def admin(self) -> Admin:
        """An operator's client."""
        return Admin(self.bootstrap, topic=self.log)

    def make_topics(self, *names: str) -> None:
        """More topics, each with as many partitions."""
        with closing(KafkaCluster(self.bootstrap)) as cluster:
            for name in names:
                cluster.create_topic(name, self.options.partitions, 1, {}, 20)

    def stable(self, group: str = "") -> dict[int, int]:
        """Partition → the offset up to which all is done, by the log."""
        found: dict[int, int] = {}
        with self.admin() as admin:
            for each in admin.progress(group or self.group):
                at = -1 if each.stable is None else each.stable
                found[each.partition] = min(at, found.get(each.partition, at))
        return found

    def start(self, work: Callable[[], object]) -> None:
        """In a thread, which ends by itself when ``ended`` is set."""

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised in the end
                self._failures.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def end_threads(self) -> None:
        """Nothing more is written, and no operator acts. Raises their failures."""
        self.ended.set()
        self.operator.ended.set()
        for thread in self._threads:
            thread.join()
        self.operator.close()
        if self._failures:
            raise self._failures[0]

    def until_quiet(self, look: Callable[[], tuple[object, list[str]]], still_s: float = STILL_S) -> list[str]:
        """Keep the crews at work until nothing is left. Returns what is, if it is stuck.

        look: what moves, and what is left.
        """
        moved, before, left = time.monotonic(), None, ["nothing was seen"]
        while time.monotonic() < moved + still_s:
            until = time.monotonic() + LOOK_S
            while time.monotonic() < until:
                self.tend(is_calm=True)
                time.sleep(self.turn_s)
            with suppress(*AWAY):
                now, left = look()
                if not left:
                    return []
                if now != before:
                    before, moved = now, time.monotonic()
        return left

    def run(self) -> Result:
        """All of it."""
        try:
            self.story()
        except StuckError as error:
            self.violations.append(str(error))
        finally:
            try:
                self.end_threads()
            finally:
                for workers in self.crews:
                    workers.end_all()
        self.seconds = time.monotonic() - self.began
        self.violations += [error for workers in self.crews for error in workers.errors]
        self.judge()
        return self.result()

    def result(self) -> Result:
        """What came of it."""
        return Result(self.NAME, self.options.seed, self.violations, self.seconds, counts=self.counts)


ResultT = TypeVar("ResultT", bound=Result)


def in_a_folder(name: str, run: Callable[[Path], ResultT], keep: bool, say: Say) -> ResultT:
    """Call run(folder). If a promise was broken, or with keep, the folder stays, with what the workers wrote down."""
    folder = Path(tempfile.mkdtemp(prefix=f"kafka-marshal-{name}-"))
    is_kept = True
    try:
        result = run(folder)
        is_kept = keep or bool(result.violations)
        result.folder = str(folder) if is_kept else ""
        return result
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            say(f"what was written down: {folder}")


def run_campaign(
    story: type[Campaign[SettingsT]],
    options: SettingsT,
    kafka: RunningKafka | None = None,
    *,
    say: Say = lambda _: None,
) -> Result:
    """Run it on a broker made for it, which is killed, too; or on one that is not."""
    own = open_kafka(1, controllable=True) if kafka is None else None
    broker: Any = kafka or own
    try:
        return in_a_folder(
            story.NAME, lambda folder: story(options, folder, broker, own is not None, say).run(), options.keep, say
        )
    finally:
        if own is not None:
            own.stop()
