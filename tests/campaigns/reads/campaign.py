"""The campaign: processes with several members, what befalls them and the broker, a calm time, and the account."""

from __future__ import annotations

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
from kafka_marshal.admin import Admin
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.testing import RunningKafka
from rationalizer.routing import key_range
from tests.campaigns.crew import AWAY, BrokerFaults, Crew, Operator, Place
from tests.campaigns.modes.account import Account
from tests.campaigns.on_a_broker import Result, Say, run_on_a_broker

__all__ = ["Options", "Result", "run_campaign"]

KEYS, STILL_S = 100, 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """What a campaign is like."""

    seconds: float = 60.0
    rate: int = 1_000
    #: Messages that are there before the first worker is.
    backlog: int = 10_000
    processes: int = 2
    members: int = 2
    partitions: int = 2
    seed: int = 1
    hi_ms: int = 500
    kill_every_s: float = 8.0
    stop_every_s: float = 8.0
    broker_every_s: float = 15.0
    #: Members only open and close: then no message comes twice.
    gentle: bool = False
    #: Off: each member reads by itself, to compare.
    shared: bool = True
    keep: bool = False


class _Campaign:
    def __init__(self, options: Options, folder: Path, kafka: RunningKafka, may_kill: bool, say: Say) -> None:
        self.options, self.folder, self.say = options, folder, say
        self.rng, self.counts, self.hi_s = Random(options.seed), Counter[str](), options.hi_ms / 1000
        name = uuid.uuid4().hex[:6]
        self.log, self.group, self.topic = f"__marshal-{name}", f"group-{name}", f"jobs-{name}"
        self.bootstrap = kafka.bootstrap_servers
        kinds = {f"p{number}": "keys" for number in range(options.processes)}
        module = "tests.campaigns.reads.worker"
        self.crew = Crew(module, folder, kinds, self.job, rng=self.rng, hi_s=self.hi_s, counts=self.counts)
        with closing(KafkaCluster(self.bootstrap)) as cluster:
            create_topic(cluster, self.log, 2, 20)
            cluster.create_topic(self.topic, options.partitions, 1, {}, 20)
        self.written = dict.fromkeys(range(options.partitions), 0)
        self.calm, self.ended = folder / "calm", threading.Event()
        faults = BrokerFaults(kafka, self.rng, self.hi_s)
        is_whole = options.gentle or not may_kill
        self.broker = Operator(
            [faults.freeze, faults.restart], 1e9 if is_whole else options.broker_every_s, self.rng, self.counts, say
        )

    def job(self, place: Place) -> dict[str, object]:
        options, number = self.options, int(place.name[1:])
        parts = options.processes * options.members
        return {
            "bootstrap": self.bootstrap,
            "group": self.group,
            "log": self.log,
            "topic": self.topic,
            "partitions": options.partitions,
            "spans": [key_range(number * options.members + part, parts) for part in range(options.members)],
            "hi_ms": options.hi_ms * (4 if options.gentle else 1),  # on a full machine, too, nothing is unproven
            "calm": str(self.calm),
            "shared": options.shared,
        }

    def key_of(self, partition: int, offset: int) -> int:
        """The key's number: drawn, and the same for the account."""
        return Random(f"{self.options.seed} {partition} {offset}").randrange(KEYS)

    def write(self) -> None:
        """A backlog, then messages at a rate, until it ends."""
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "linger.ms": 20,
                "message.timeout.ms": 300_000,
                "enable.idempotence": True,
                "log_level": 0,
            }
        )
        began, number = time.monotonic() - self.options.backlog / self.options.rate, 0
        while not self.ended.is_set():
            while number < (time.monotonic() - began) * self.options.rate:
                offset, partition = divmod(number, self.options.partitions)
                key = b"k%d" % self.key_of(partition, offset)
                producer.produce(self.topic, value=b"x" * 100, key=key, partition=partition)
                self.written[partition] = offset + 1
                number += 1
            producer.poll(0)
            self.ended.wait(0.02)
        producer.flush()

    def run(self) -> Result:
        options, began = self.options, time.monotonic()
        writer = threading.Thread(target=self.write)
        left = "it did not come so far"
        try:
            writer.start()
            self.crew.tend()
            self.broker.start()
            self._faults(began)
            self.broker.ended.set()
            self.broker.join()
            self.ended.set()
            writer.join()
            left = self._peace()
        finally:
            self.broker.ended.set()
            self.ended.set()
            self.crew.end()
        if self.broker.failure is not None:
            raise self.broker.failure
        account = Account(self.key_of)
        for life in self.crew.lives:
            account.read(life)
        for file in self.folder.glob("*.reads"):
            for line in file.read_text().splitlines():
                hits, misses = line.split()
                self.counts += Counter({"read by another": int(hits), "not": int(misses), "members": 1})
        violations = [*([left] if left else []), *self.crew.errors]
        # What is unproven for a moment, on a full machine, is dropped and comes again.
        is_once = options.gentle and not account.dropped
        violations += account.violations(self.written, set(), is_gentle=is_once)
        self.counts["messages"] = sum(self.written.values())
        self.counts["handled"] = account.handled.total()
        self.counts["dropped unproven"] = account.dropped
        return Result("reads", options.seed, violations, time.monotonic() - began, counts=self.counts)

    def _faults(self, began: float) -> None:
        options = self.options
        kill_at, stop_at = began + 5.0, began + options.stop_every_s
        while (now := time.monotonic()) < began + options.seconds:
            self.crew.tend()
            if not options.gentle and now >= kill_at:
                self.crew.kill()
                kill_at = now + options.kill_every_s * self.rng.uniform(0.3, 1.7)
            if not options.gentle and now >= stop_at:
                self.crew.stop()
                stop_at = now + options.stop_every_s * self.rng.uniform(0.3, 1.7)
            time.sleep(0.05)

    def _peace(self) -> str:
        """Without faults all is done. Returns what is not."""
        self.calm.touch()
        moved, before, stable = time.monotonic(), None, dict[int, int | None]()
        while time.monotonic() < moved + STILL_S:
            self.crew.tend(is_calm=True)
            with suppress(*AWAY), Admin(self.bootstrap, topic=self.log) as admin:
                stable = {x.partition: x.stable for x in admin.progress(self.group)}
            if all(stable.get(x) == end - 1 for x, end in self.written.items()):
                return ""
            if stable != before:
                before, moved = stable, time.monotonic()
            time.sleep(0.5)
        return f"liveness: {stable} of {self.written}"


def run_campaign(options: Options, kafka: RunningKafka | None = None, *, say: Say = lambda _: None) -> Result:
    """Run it, on a separate broker, which is killed, too; or on one that is not."""

    def run(folder: Path, broker: RunningKafka, may_kill: bool) -> Result:
        return _Campaign(options, folder, broker, may_kill, say).run()

    return run_on_a_broker("reads", run, kafka, options.keep, say)
