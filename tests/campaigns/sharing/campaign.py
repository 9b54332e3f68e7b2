"""The campaign: workers, what befalls them and the broker, an operator, a calm time, and the account."""

from __future__ import annotations

import sqlite3
import threading
import time
import uuid
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from confluent_kafka import Producer

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.admin import Admin, Move
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.sinks import SqliteSink
from kafka_marshal.testing import RunningKafka
from tests.campaigns.crew import AWAY, BrokerFaults, Crew, Operator, Place
from tests.campaigns.on_a_broker import Result, Say, run_on_a_broker
from tests.campaigns.process import POISON
from tests.campaigns.sharing.account import Account

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


class _Campaign:
    def __init__(self, options: Options, folder: Path, kafka: RunningKafka, may_kill: bool, say: Say) -> None:
        self.options, self.folder, self.kafka, self.may_kill, self.say = options, folder, kafka, may_kill, say
        self.rng = Random(options.seed)
        self.hi_s = options.hi_ms / 1000
        name = uuid.uuid4().hex[:6]
        self.log, self.group, self.topic = f"__marshal-{name}", f"group-{name}", f"jobs-{name}"
        self.bootstrap = kafka.bootstrap_servers
        self.counts: Counter[str] = Counter()
        kinds = {f"w{n}": "run" if n % 4 == 3 else "batches" for n in range(options.workers)}
        module = "tests.campaigns.sharing.worker"
        self.crew = Crew(module, folder, kinds, self.job, rng=self.rng, hi_s=self.hi_s, counts=self.counts)
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
        acts = [self.redrive, self.discard, self.reposition]
        if may_kill:
            faults = BrokerFaults(kafka, self.rng, self.hi_s)
            acts += [faults.freeze, faults.restart]
        self.operator = Operator(acts, options.operator_every_s, self.rng, self.counts, say)

    # The workers.

    def job(self, place: Place) -> dict[str, object]:
        options = self.options
        return {
            "bootstrap": self.bootstrap,
            "group": self.group,
            "log": self.log,
            "topic": self.topic,
            "hi_ms": options.hi_ms,
            "work_ms": options.work_ms,
            "calm": str(self.calm),
            "timeout_s": 30.0,
            "database": str(self.database) if options.sink else "",
            "watchdog": place.name in ("w0", "w3"),
        }

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

    # The operator.

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

    # All of it.

    def run(self) -> Result:
        options, began = self.options, time.monotonic()
        writer = threading.Thread(target=self.write)
        try:
            self.crew.tend()
            writer.start()
            self.operator.start()
            self._faults(began)
            self.operator.ended.set()
            writer.join()
            self.operator.join()
            left = self._peace()
        finally:
            self.operator.ended.set()
            self.crew.end()
        if self.operator.failure is not None:
            raise self.operator.failure
        self.account.errors += self.crew.errors
        for life in self.crew.lives:
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
        return Result("sharing", options.seed, violations, time.monotonic() - began, counts=self.counts)

    def _faults(self, began: float) -> None:
        options = self.options
        kill_at, stop_at, told = began + 5.0, began + options.stop_every_s, began
        while (now := time.monotonic()) < began + options.most_s:
            self.crew.tend()
            if now >= kill_at:
                self.crew.kill()
                kill_at = now + options.kill_every_s * self.rng.uniform(0.3, 1.7)
            if now >= stop_at:
                self.crew.stop()
                stop_at = now + options.stop_every_s * self.rng.uniform(0.3, 1.7)
            if now > told + 10:
                told = now
                done = self._done()
                self.say(f"{now - began:.0f} s: {done:,} done; {dict(self.counts)}")
                if self.counts["kills"] >= options.kills and done > 0.95 * sum(self.written.values()):
                    return
            time.sleep(0.05)

    def _done(self) -> int:
        with suppress(*AWAY), self.admin() as admin:
            return sum((x.stable or -1) + 1 for x in admin.progress(self.group))
        return 0

    def _peace(self) -> str:
        """Without faults all is done, also what was set aside. Returns what is not."""
        self.calm.touch()
        moved, before, left = time.monotonic(), None, "nothing was seen"
        while time.monotonic() < moved + STILL_S:
            self.crew.tend(is_calm=True)
            with suppress(*AWAY), self.admin() as admin:
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


def run_campaign(options: Options, kafka: RunningKafka | None = None, *, say: Say = lambda _: None) -> Result:
    """Run it, on a separate broker, which is killed, too; or on one that is not."""

    def run(folder: Path, broker: RunningKafka, may_kill: bool) -> Result:
        return _Campaign(options, folder, broker, may_kill, say).run()

    return run_on_a_broker("sharing", run, kafka, options.keep, say)
