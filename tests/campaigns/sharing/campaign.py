"""The campaign: workers, what befalls them and the broker, an operator, a calm time, and the account."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from confluent_kafka import KafkaException, Producer

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.admin import Admin, Move
from kafka_marshal.errors import AdminError, KafkaUnavailableError
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.sinks import SqliteSink
from kafka_marshal.testing import RunningKafka
from tests.campaigns.on_a_broker import Say, run_on_a_broker
from tests.campaigns.sharing.account import Account, Life
from tests.campaigns.sharing.worker import POISON

__all__ = ["Options", "Result", "run_campaign"]

READY_S, STILL_S = 60.0, 90.0


@dataclass(frozen=True, slots=True)
class Options:
    """What a campaign is like."""

    messages: int = 1_000_000
    kills: int = 150
    workers: int = 8
    partitions: int = 4
    seed: int = 1
    hi_ms: int = 500
    work_ms: float = 2.0
    kill_every_s: float = 3.0
    stop_every_s: float = 7.0
    operator_every_s: float = 6.0
    poisons: int = 2
    #: Rows go to SQLite, each once.
    sink: bool = False
    most_s: float = 3_600.0
    keep: bool = False


@dataclass(slots=True)
class Result:
    """The figures, and what was broken."""

    options: Options
    violations: list[str]
    seconds: float = 0.0
    folder: str = ""
    counts: Counter[str] = field(default_factory=Counter)

    def tell(self) -> str:
        """One line of figures."""
        counts = ", ".join(f"{name} {times:,}" for name, times in sorted(self.counts.items()))
        end = f"{len(self.violations)} violations; seed {self.options.seed}"
        return f"sharing: {self.seconds / 60:.1f} min; {counts}; {end}"


@dataclass(slots=True)
class _Place:
    """A worker, in one process after the other."""

    name: str
    kind: str
    process: subprocess.Popen[bytes] | None = None
    life: Life | None = None
    stopped_until: float = 0.0


class _Campaign:
    def __init__(self, options: Options, folder: Path, kafka: RunningKafka, may_kill: bool, say: Say) -> None:
        self.options, self.folder, self.kafka, self.may_kill, self.say = options, folder, kafka, may_kill, say
        self.rng = Random(options.seed)
        self.hi_s = options.hi_ms / 1000
        name = uuid.uuid4().hex[:6]
        self.log, self.group, self.topic = f"__marshal-{name}", f"group-{name}", f"jobs-{name}"
        self.bootstrap = kafka.bootstrap_servers
        self.counts: Counter[str] = Counter()
        self.lives: list[Life] = []
        kinds = ["batches", "batches", "batches", "run"]
        self.places = [_Place(f"w{n}", kinds[n % 4]) for n in range(options.workers)]
        with closing(KafkaCluster(self.bootstrap)) as cluster:
            create_topic(cluster, self.log, 2, 20)
            cluster.create_topic(self.topic, options.partitions, 1, {}, 20)
        self.written = dict.fromkeys(range(options.partitions), options.messages // options.partitions)
        self.account = Account(self.written)
        self.calm = folder / "calm"
        self.database = folder / "rows.db"
        if options.sink:
            with closing(sqlite3.connect(self.database)) as database:
                database.executescript("PRAGMA journal_mode=WAL; CREATE TABLE rows (place, at, token);")
        self.ended = threading.Event()
        self.failure: BaseException | None = None

    # The workers.

    def start(self, place: _Place) -> None:
        options = self.options
        self.counts["processes"] += 1
        life = Life(place.name, self.folder / f"{place.name}-{self.counts['processes']}.txt")
        job = {
            "bootstrap": self.bootstrap,
            "group": self.group,
            "log": self.log,
            "topic": self.topic,
            "name": place.name,
            "kind": place.kind,
            "hi_ms": options.hi_ms,
            "work_ms": options.work_ms,
            "out": str(life.out),
            "calm": str(self.calm),
            "seed": self.rng.random(),
            "timeout_s": 30.0,
            "database": str(self.database) if options.sink else "",
            "watchdog": place.name in ("w0", "w3"),
        }
        life.out.touch()
        with (self.folder / f"{place.name}.stderr").open("ab") as errors:
            command = [sys.executable, "-m", "tests.campaigns.sharing.worker", json.dumps(job)]
            place.process = subprocess.Popen(command, stderr=errors)
        place.life = life
        self.lives.append(life)

    def tend(self) -> None:
        """Restart what has died, and continue what was stopped for long enough."""
        for place in self.places:
            process, now = place.process, time.monotonic()
            if process is None or process.poll() is not None:
                if process is not None and process.returncode not in (-signal.SIGKILL, 0):
                    self.counts["ended by an error"] += 1
                self.start(place)
            elif place.stopped_until and now > place.stopped_until:
                os.kill(process.pid, signal.SIGCONT)
                place.stopped_until = 0.0

    def kill(self) -> None:
        place = self.rng.choice(self.places)
        if place.process is not None and place.life is not None and place.life.out.stat().st_size:
            place.stopped_until = 0.0
            place.process.kill()
            place.process.wait()
            self.counts["kills"] += 1

    def stop(self) -> None:
        place = self.rng.choice(self.places)
        if place.process is not None and not place.stopped_until and place.process.poll() is None:
            os.kill(place.process.pid, signal.SIGSTOP)
            since = time.monotonic()
            place.stopped_until = since + self.hi_s * self.rng.uniform(0.5, 6.0)
            if place.life is not None:
                place.life.stops.append((since, place.stopped_until + 1.0))
            self.counts["stops"] += 1

    def write(self) -> None:
        """All messages, some of them poison."""
        producer = Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 50, "message.timeout.ms": 300_000})
        share = self.options.messages // self.options.partitions
        places = range(self.options.poisons)
        poisons = {(n % self.options.partitions, share // 50 + n * 997 % (share // 4)) for n in places}
        for offset in range(share):
            for partition in range(self.options.partitions):
                value = POISON if (partition, offset) in poisons else b"x"
                while True:
                    try:
                        producer.produce(self.topic, value=value, key=b"%d" % (offset % 100), partition=partition)
                        break
                    except BufferError:
                        producer.poll(0.1)
            producer.poll(0)
        producer.flush()

    # The operator, and the broker.

    def operate(self) -> None:
        acts = [self.redrive, self.discard, self.reposition, self.freeze]
        if self.may_kill:
            acts += [self.restart]
        number = 0
        while not self.ended.wait(self.options.operator_every_s * self.rng.uniform(0.7, 1.3)):
            act = acts[number % len(acts)]
            number += 1
            try:
                act()
            except (AdminError, KafkaException, KafkaUnavailableError) as error:
                self.counts[f"{act.__name__} refused"] += 1
                self.say(f"{act.__name__}: {error}"[:300])
            except Exception as error:  # noqa: BLE001 - raised in the end
                self.failure = error
                return
            else:
                self.counts[act.__name__] += 1

    def admin(self) -> Admin:
        return Admin(self.bootstrap, topic=self.log)

    def redrive(self) -> None:
        with self.admin() as admin:
            found = admin.open_messages(self.group, parked=True)[:20]
            for each in found:  # before: it may be carried out, and its answer lost
                self.account.redriven[each.partition, each.offset] += 1
            if found:
                admin.redrive(self.group, [(x.topic, x.partition, x.offset) for x in found])

    def discard(self) -> None:
        with self.admin() as admin:
            found = [x for x in admin.open_messages(self.group, parked=True) if x.reason != "CRASHED"][:2]
            self.account.discarded |= {(x.partition, x.offset) for x in found}
            if found:
                admin.discard(self.group, [(x.topic, x.partition, x.offset) for x in found])

    def reposition(self) -> None:
        """Backwards, and below what waits for its next member: it would count as done (C11)."""
        with self.admin() as admin, admin.pause(self.group, expires_in=60) as pause:
            pause.wait_released(30)
            found = [x for x in admin.progress(self.group) if (x.stable or 0) > 500]
            if not found:
                return
            info = self.rng.choice(found)
            waiting = [x for x in admin.open_messages(self.group) if x.state != "parked"]
            lowest = min((x.offset for x in waiting if x.partition == info.partition), default=info.stable or 0)
            position = min(lowest, (info.stable or 0) - self.rng.randint(1, 400))
            self.account.repositions[info.partition].append((position, info.stable or 0))
            moves = pause.reposition({(self.topic, info.partition): position})
            if self.options.sink:
                self._rewind(moves)

    def _rewind(self, moves: list[Move]) -> None:
        """The sink stands where the group does; then rows of what comes again go: a stopped worker writes none more."""
        SqliteSink(self.database).rewind(
            self.group,
            {move.key: move.last_offset for move in moves},
            epochs={move.key: move.epoch for move in moves},
            parked={move.key: move.parked for move in moves},
            kind="claimed",
        )
        with closing(sqlite3.connect(self.database, 60.0)) as database, database:
            for move in moves:
                database.execute("DELETE FROM rows WHERE place = ? AND at > ?", (move.key[1], move.last_offset))

    def freeze(self) -> None:
        if self.may_kill:
            self.kafka.pause()
            time.sleep(self.rng.choice((0.3, 3.0 * self.hi_s)))
            self.kafka.resume()

    def restart(self) -> None:
        self.kafka.kill()
        time.sleep(self.rng.choice((0.1, 3.0 * self.hi_s)))
        self.kafka.restart()

    # All of it.

    def run(self) -> Result:
        options, began = self.options, time.monotonic()
        threads = [threading.Thread(target=self.write), threading.Thread(target=self.operate)]
        try:
            for place in self.places:
                self.start(place)
            for thread in threads:
                thread.start()
            self._faults(began)
            self.ended.set()
            threads[0].join()
            threads[1].join()
            left = self._peace()
        finally:
            self.ended.set()
            for place in self.places:
                self._end(place)
        if self.failure is not None:
            raise self.failure
        for life in self.lives:
            self.account.read(life)
        violations = ([left] if left else []) + list(self.account.violations())
        if options.sink:
            violations += self.account.of_rows(self.database)
            self.counts["refused by the sink"] = self.account.refused
        self.counts["messages"] = sum(self.written.values())
        self.counts["handled"] = self.account.handled
        self.counts["killed by poison"] = self.account.poisoned
        self.counts["dropped unproven"] = self.account.dropped
        self.counts["set aside"] = len(self.account.parked)
        return Result(options, violations, time.monotonic() - began, counts=self.counts)

    def _faults(self, began: float) -> None:
        options = self.options
        kill_at, stop_at, told = began + 5.0, began + options.stop_every_s, began
        while (now := time.monotonic()) < began + options.most_s:
            self.tend()
            if now >= kill_at:
                self.kill()
                kill_at = now + options.kill_every_s * self.rng.uniform(0.3, 1.7)
            if now >= stop_at:
                self.stop()
                stop_at = now + options.stop_every_s * self.rng.uniform(0.3, 1.7)
            if now > told + 10:
                told = now
                done = self._done()
                self.say(f"{now - began:.0f} s: {done:,} done; {dict(self.counts)}")
                if self.counts["kills"] >= options.kills and done > 0.95 * sum(self.written.values()):
                    return
            time.sleep(0.05)

    def _done(self) -> int:
        with suppress(AdminError, KafkaException, KafkaUnavailableError), self.admin() as admin:
            return sum((x.stable or -1) + 1 for x in admin.progress(self.group))
        return 0

    def _peace(self) -> str:
        """Without faults all is done, also what was set aside. Returns what is not."""
        self.calm.touch()
        moved, before, left = time.monotonic(), None, "nothing was seen"
        while time.monotonic() < moved + STILL_S:
            for place in self.places:
                if place.stopped_until:
                    place.stopped_until = time.monotonic()
            self.tend()
            with suppress(AdminError, KafkaException, KafkaUnavailableError), self.admin() as admin:
                found = admin.open_messages(self.group)
                parked = [(x.topic, x.partition, x.offset) for x in found if x.state == "parked"]
                for _, partition, offset in parked:
                    self.account.redriven[partition, offset] += 1
                if parked:
                    admin.redrive(self.group, parked)
                stable = {x.partition: x.stable for x in admin.progress(self.group)}
                if not found and all(stable.get(x) == end - 1 for x, end in self.written.items()):
                    return ""
                now = (stable, len(found))
                if now != before:
                    before, moved = now, time.monotonic()
                left = f"liveness: {now} of {self.written}, open: {found[:3]}"
            time.sleep(0.5)
        return left

    def _end(self, place: _Place) -> None:
        process = place.process
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
            process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            self.account.errors.append(f"{place.name} did not end within 30 s of SIGTERM")
            process.kill()


def run_campaign(options: Options, kafka: RunningKafka | None = None, *, say: Say = lambda _: None) -> Result:
    """Run it, on a separate broker, which is killed, too; or on one that is not."""

    def run(folder: Path, broker: RunningKafka, may_kill: bool) -> Result:
        return _Campaign(options, folder, broker, may_kill, say).run()

    return run_on_a_broker("sharing", run, kafka, options.keep, say)
