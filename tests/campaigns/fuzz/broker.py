"""Hostile records into a real coordination log, at full speed, while workers work; and their effect on workers.

The flood is a hostile writer: logs of :class:`Author` in every CP, and records about the workers' own leases by clients
that hold none of them, or that win one and say nothing. What only a holder may do these clients cannot do. (No log can
distinguish a client that lies about both its ids, or that claims and reports work that it has not done: that is what
ACLs are for.)
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from confluent_kafka import KafkaError, Message, Producer

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.node.replica import Begin, Replica
from kafka_marshal.testing.select_broker import open_kafka
from kafka_marshal.topic_names import snapshots_topic
from rationalizer import (
    BeatEntry,
    ClaimingMessages,
    ClaimingPartition,
    CommitRanges,
    Heartbeat,
    HeartbeatBatch,
    Outcome,
    Record,
    ReleasingPartition,
    encode,
    route_lease,
)
from tests.campaigns.fuzz.author import GROUPS, Author
from tests.campaigns.fuzz.worker import DIGEST_EVERY

# -- Writes messages to one topic: to a given partition, as fast as the broker takes them -------------------------


class Writer:
    """An idempotent producer. A context manager; each delivery must succeed."""

    def __init__(self, topic: str, bootstrap: str, config: Mapping[str, object] | None = None) -> None:
        self._topic = topic
        self._failures: list[KafkaError] = []
        settings: dict[str, Any] = {**(config or {}), "bootstrap.servers": bootstrap, "enable.idempotence": True}
        self._producer = Producer(settings)

    def write(self, value: bytes | None, key: bytes | None, partition: int) -> None:
        """Queue a message; waits while the queue is full."""
        while True:
            try:
                self._producer.produce(self._topic, value, key, partition, on_delivery=self._delivered)
                break
            except BufferError:
                self._producer.poll(0.05)
        self._producer.poll(0)

    def flush(self) -> None:
        """Wait until every message is acknowledged."""
        left = self._producer.flush(60)
        assert not left and not self._failures, f"{left} messages are open; {self._failures[:3]}"

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._failures.append(error)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._producer.flush(1)


CPS: Final = 8
PARTITIONS: Final = 4
WORKERS: Final = ("worker-1", "worker-2")
HI_MS: Final = 3_000
TIMEOUT_S: Final = 20.0

#: Records between two checks of their outcomes; messages for the workers in each partition, meanwhile.
BURST: Final = 400
MESSAGES: Final = 1
#: Records between two lines about how far it is: whole bursts.
TELL_EVERY: Final = 50 * BURST
#: Most records in transit: a flood that outruns its own reader learns no outcomes.
WINDOW: Final = 10_000
#: One record in this number is about the workers' leases.
INTRUDE_EVERY: Final = 25
#: In a flood, one in this number is above 1 kB.
LARGE_EVERY: Final = 2_000
#: Largest growth of a worker (MB) after the first fifth of the flood: librdkafka's queues hold unread records.
RSS_LIMIT_MB: Final = 64.0
#: After the flood everything is handled within this time, or something is stuck.
DRAIN_S: Final = 60.0


@dataclass(slots=True)
class FloodReport:
    """What a flood has shown."""

    records: int = 0
    bytes: int = 0
    seconds: float = 0.0
    #: Outcomes of all records, the workers' too, by the flood's replica.
    codes: Counter[str] = field(default_factory=Counter)
    messages: int = 0
    repeated: int = 0
    lost: int = 0
    #: Leases that were reported to workers as lost.
    leases_lost: int = 0
    digests: int = 0
    #: Durations of claims by hand beside the flood (ms, ascending); number of those rejected or unanswered.
    claims_ms: list[float] = field(default_factory=list)
    refused: int = 0
    #: Largest growth and largest size of a worker (MB).
    grown_mb: float = 0.0
    rss_mb: float = 0.0
    #: Worker → its largest size in each tenth of the flood (MB). A leak grows in all of them.
    rss_by_tenth_mb: dict[str, list[float]] = field(default_factory=dict)
    #: Time of a later start until it has caught up (s).
    start_s: float = 0.0
    #: What is wrong.
    problems: list[str] = field(default_factory=list)

    def claim_ms(self, share: float) -> float:
        """The quantile of the durations of claims by hand (ms)."""
        return self.claims_ms[min(len(self.claims_ms) - 1, int(share * len(self.claims_ms)))] if self.claims_ms else 0.0

    def tell(self) -> str:
        """One line of figures."""
        return (
            f"{self.records:,} hostile records ({self.bytes / 1e6:,.0f} MB) in {self.seconds:,.0f} s, "
            f"{self.records / max(1e-9, self.seconds):,.0f}/s; {len(self.problems)} problems; {self.messages:,} "
            f"messages, {self.lost} lost, {self.repeated} repeated, {self.leases_lost} leases lost; {self.digests} "
            f"digests compared; {len(self.claims_ms)} claims meanwhile: {self.claim_ms(0.5):.0f} ms (median), "
            f"{self.claim_ms(0.99):.0f} ms (p99), {self.refused} refused; workers' memory {self.grown_mb:+.0f} MB, at "
            f"most {self.rss_mb:.0f} MB; a start afterwards {self.start_s:.1f} s"
        )

    def figures(self) -> dict[str, Any]:
        """The same, for a file."""
        return {
            "records": self.records,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 1),
            "records_per_s": round(self.records / max(1e-9, self.seconds)),
            "outcomes": dict(sorted(self.codes.items())),
            "problems": self.problems,
            "messages": self.messages,
            "lost": self.lost,
            "repeated": self.repeated,
            "leases_lost": self.leases_lost,
            "digests_compared": self.digests,
            "claims": len(self.claims_ms),
            "claim_median_ms": round(self.claim_ms(0.5), 1),
            "claim_p99_ms": round(self.claim_ms(0.99), 1),
            "claims_refused": self.refused,
            "start_afterwards_s": round(self.start_s, 2),
            "worker_rss_growth_MB": round(self.grown_mb, 1),
            "worker_rss_limit_MB": RSS_LIMIT_MB,
            "worker_rss_max_MB": round(self.rss_mb, 1),
            "worker_rss_by_tenth_MB": self.rss_by_tenth_mb,
        }


def fuzz_a_broker(
    records: int,
    *,
    seed: int = 0,
    bootstrap: str | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> FloodReport:
    """Flood a new coordination log with this number of hostile records, while two workers work (*blocking*).

    bootstrap: a Kafka that runs; None: one is started. progress is called with how far it is.
    """
    if bootstrap is not None:
        with tempfile.TemporaryDirectory(prefix="kafka-marshal-fuzz-") as folder:
            return _Flood(bootstrap, records, seed, Path(folder), progress).run()
    kafka = open_kafka(1)
    try:
        return fuzz_a_broker(records, seed=seed, bootstrap=kafka.bootstrap_servers, progress=progress)
    finally:
        kafka.stop()


class _Flood:
    def __init__(
        self, bootstrap: str, records: int, seed: int, folder: Path, progress: Callable[[str], object]
    ) -> None:
        self.bootstrap = bootstrap
        self.wanted = records
        self.folder = folder
        self.progress = progress
        self.rng = random.Random(~seed)
        self.report = FloodReport()
        name = f"{os.getpid()}-{time.time_ns():x}"
        self.group = f"workers-{name}"
        self.coordination = f"__marshal-fuzz-{name}"
        self.alo, self.amo = f"fuzz-alo-{name}", f"fuzz-amo-{name}"
        self.authors = [Author(seed * CPS + cp, cp, CPS, large_every=LARGE_EVERY, upgrades=False) for cp in range(CPS)]
        self.cluster = KafkaCluster(bootstrap, {})
        self.workers: list[subprocess.Popen[bytes]] = []
        self.written = 0
        #: The workers were asked to end.
        self.ending = False

    def run(self) -> FloodReport:
        create_topic(self.cluster, self.coordination, CPS, TIMEOUT_S)
        probe = Probe(self.bootstrap)
        for topic in (self.alo, self.amo):
            probe.create_topic(topic, PARTITIONS, 1, {})
        try:
            self.flood()
            self.check_replays()
        finally:
            for worker in self.workers:
                worker.kill()
                worker.wait()
            probe.delete_topics([self.alo, self.amo, self.coordination, snapshots_topic(self.coordination)])
            self.cluster.close()
        return self.report

    # -- the flood ---------------------------------------------------------------------------------------------

    def flood(self) -> None:
        """Start workers, flood the log, let them finish, and check their output."""
        self.replica = Replica(self.cluster, self.coordination, TIMEOUT_S, Begin.HISTORY)
        self.replica.catch_up(TIMEOUT_S)
        for client_id in WORKERS:
            self.start_worker(client_id)
        self.wait_for(self.shared, "the workers hold their partitions")
        config = {"message.max.bytes": 2_000_000}
        with (
            Writer(self.coordination, self.bootstrap, config) as log,
            Writer(self.alo, self.bootstrap) as alo,
            Writer(self.amo, self.bootstrap) as amo,
        ):
            began = time.monotonic()
            while self.report.records < self.wanted:
                self.burst(log, (alo, amo))
                if self.report.records % TELL_EVERY == 0:
                    self.progress(f"{self.report.records:,} of {self.wanted:,} records")
            for writer in (log, alo, amo):
                writer.flush()
            self.read_to_end()
            self.report.seconds = time.monotonic() - began
        self.drain()
        self.end_workers()
        self.judge()
        self.read_to_end()
        self.replica.close()

    def burst(self, log: Writer, writers: tuple[Writer, ...]) -> None:
        """Write hostile records to all CPs and some messages, and read the outcomes so far."""
        for _ in range(BURST):
            cp = self.rng.randrange(CPS)
            payload: bytes | None
            if self.rng.random() < 1 / INTRUDE_EVERY:
                cp, payload = self.intrusion()
            else:
                payload = self.authors[cp].next()
            log.write(payload, b"", cp)
            self.report.records += 1
            self.report.bytes += len(payload or b"")
        for writer in writers:
            for partition in range(PARTITIONS):
                for _ in range(MESSAGES):
                    writer.write(b"%d" % self.report.records, b"", partition)
                    self.report.messages += 1
        self.written += BURST
        self.take_in(0.0)
        while self.behind() > WINDOW:
            self.take_in(0.05)

    def behind(self) -> int:
        """Minimum number of written records that the flood's replica has not seen."""
        return self.written - sum(world.next_offset for world in self.replica.worlds.values())

    def take_in(self, timeout_s: float) -> None:
        self.replica.apply(self.replica.read(timeout_s), self.hear, history=True)

    def hear(self, cp: int, offset: int, outcome: Outcome) -> None:
        self.report.codes[outcome.code] += 1
        author = self.authors[cp]
        author.log_time = outcome.log_time
        message = outcome.message
        if message is not None and message.group_id in GROUPS:
            author.hear(offset, outcome)

    def intrusion(self) -> tuple[int, bytes]:
        """Something about a lease of the workers, by a client that does not hold it; and its CP."""
        topic, partition = self.rng.choice((self.alo, self.amo)), self.rng.randrange(PARTITIONS)
        cp = route_lease(topic, partition, CPS)
        lease = self.replica.worlds[cp].lease(self.group, topic, partition)
        intruder = (f"intruder-{self.rng.randrange(2)}", "intruder", self.group)
        claim = ClaimingPartition(*intruder, topic, partition, 100)
        if lease is None or lease.client_id == "intruder":
            return cp, encode(claim)
        epoch = lease.epoch
        far = lease.progress.stable + self.rng.randrange(1, 1_000)
        # One of them has the holder's own instance id, under another client id.
        who = self.rng.choice((intruder, (lease.instance_id or "intruder-0", "intruder", self.group)))
        records: list[Record] = [
            claim,
            Heartbeat(*who, topic, partition, epoch, far),
            Heartbeat("intruder-2", "a third", self.group, topic, partition, None, far),
            ReleasingPartition(*who, topic, partition, epoch, far),
            ClaimingMessages(*who, topic, partition, epoch, far),
            CommitRanges(*who, topic, partition, epoch, ((far, far + 5),)),
            HeartbeatBatch(*who, (BeatEntry(topic, partition, epoch, far),)),
        ]
        return cp, encode(self.rng.choice(records))

    # -- workers -----------------------------------------------------------------------------------------------

    def start_worker(self, client_id: str) -> None:
        arguments = {
            "bootstrap": self.bootstrap,
            "group": self.group,
            "client_id": client_id,
            "coordination": self.coordination,
            "alo": self.alo,
            "amo": self.amo,
            "hi": HI_MS,
            "out": str(self.folder / client_id),
        }
        argv = [sys.executable, "-m", "tests.campaigns.fuzz.worker", json.dumps(arguments)]
        self.workers.append(subprocess.Popen(argv))

    def shared(self) -> bool:
        """Whether the workers share the partitions, half each."""
        self.take_in(0.1)
        leases = [lease for world in self.replica.worlds.values() for lease in world.leases()]
        holders = Counter(lease.client_id for lease in leases if lease.topic in (self.alo, self.amo))
        return holders == dict.fromkeys(WORKERS, PARTITIONS)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + DRAIN_S
        while not condition():
            ended = [
                client_id for client_id, each in zip(WORKERS, self.workers, strict=False) if each.poll() is not None
            ]
            if ended and not self.ending:
                raise TimeoutError(f"{what}: {', '.join(ended)} ended by itself")
            if time.monotonic() > until:
                raise TimeoutError(f"not within {DRAIN_S:.0f} s: {what}")

    def notes(self) -> list[dict[str, Any]]:
        """The workers' output, complete lines only."""
        found = []
        for client_id in WORKERS:
            path = self.folder / client_id
            lines = path.read_text().split("\n")[:-1] if path.exists() else []
            found += [{"worker": client_id, **json.loads(line)} for line in lines]
        return found

    def handled(self) -> Counter[tuple[str, int, int]]:
        """How often each message was handled, by topic, partition and offset."""
        return Counter((n["topic"], n["partition"], n["offset"]) for n in self.notes() if n["what"] == "handled")

    def published(self) -> set[tuple[str, int, int]]:
        """All messages for the workers: as many in each partition."""
        each = self.report.messages // (2 * PARTITIONS)
        return {
            (topic, partition, offset)
            for topic in (self.alo, self.amo)
            for partition in range(PARTITIONS)
            for offset in range(each)
        }

    def read_to_end(self) -> None:
        """Let the flood's replica read everything written so far."""
        cps = [(self.coordination, cp) for cp in range(CPS)]
        ends = self.cluster.watermarks(cps, TIMEOUT_S)

        def read() -> bool:
            self.take_in(0.1)
            return all(self.replica.worlds[cp].next_offset >= ends[topic, cp][1] for topic, cp in cps)

        self.wait_for(read, "the log is read to its end")

    def drain(self) -> None:
        """Wait until the workers have handled everything, or the log says that none will."""

        def done() -> bool:
            self.take_in(0.2)
            leases = [
                self.replica.worlds[route_lease(topic, partition, CPS)].lease(self.group, topic, partition)
                for topic in (self.alo, self.amo)
                for partition in range(PARTITIONS)
            ]
            each = self.report.messages // (2 * PARTITIONS)
            if not all(lease is not None and lease.progress.stable >= each - 1 for lease in leases):
                return False
            # At most once, what is granted is done for the log: the worker that got it may have handled none of it yet.
            return self.handled().keys() >= self.published() or any(note["what"] == "lost" for note in self.notes())

        try:
            self.wait_for(done, "all messages are done")
        except TimeoutError as error:
            self.report.problems.append(str(error))

    def end_workers(self) -> None:
        self.ending = True
        for worker, client_id in zip(self.workers, WORKERS, strict=True):
            if worker.poll() is not None:
                self.report.problems.append(f"{client_id} ended by itself, with status {worker.returncode}")
                continue
            worker.send_signal(signal.SIGTERM)
        for worker, client_id in zip(self.workers, WORKERS, strict=True):
            try:
                if worker.wait(30) != 0:
                    self.report.problems.append(f"{client_id} ended with status {worker.returncode}")
            except subprocess.TimeoutExpired:
                self.report.problems.append(f"{client_id} does not end at SIGTERM")

    def judge(self) -> None:
        """Compare the workers' output with the published messages."""
        report = self.report
        notes = self.notes()
        report.problems += [f"{note['worker']}: {note['text']}" for note in notes if note["what"] == "error"]
        handled = self.handled()
        missing = self.published() - handled.keys()
        twice = {place for place, times in handled.items() if times > 1}
        report.lost, report.repeated = len(missing), len(twice)
        report.leases_lost = sum(note["what"] == "lost" for note in notes)
        # A machine that is too slow for the leases' time costs leases: then at most once may lose, and at least once
        # may repeat, what was in flight. Never the other way round.
        amiss = {place for place in missing if place[0] == self.alo or not report.leases_lost}
        amiss_twice = {place for place in twice if place[0] == self.amo or not report.leases_lost}
        if amiss:
            report.problems.append(f"{len(amiss)} messages were not handled, such as {min(amiss)}")
        if amiss_twice:
            report.problems.append(f"{len(amiss_twice)} messages were handled twice, such as {min(amiss_twice)}")
        report.claims_ms = sorted(note["ms"] for note in notes if note["what"] == "claimed")
        report.refused = sum(note["what"] == "refused" for note in notes)
        if not report.claims_ms:
            report.problems.append("nobody could claim anything")
        for client_id in WORKERS:
            memory = [n["mb"] for n in notes if n["what"] == "memory" and n["worker"] == client_id]
            warm = memory[len(memory) // 5 :] or [0.0]
            report.grown_mb = max(report.grown_mb, max(warm) - warm[0])
            report.rss_mb = max(report.rss_mb, *warm)
            tenth = -(-len(memory) // 10) or 1
            report.rss_by_tenth_mb[client_id] = [
                round(max(memory[at : at + tenth]), 1) for at in range(0, len(memory), tenth)
            ]
        if report.grown_mb > RSS_LIMIT_MB:
            report.problems.append(f"a worker grew by {report.grown_mb:.0f} MB, {RSS_LIMIT_MB:.0f} are allowed")

    # -- afterwards --------------------------------------------------------------------------------------------

    def check_replays(self) -> None:
        """Two fresh replays, from the beginning and from snapshots, agree with each other and with the workers."""
        digests: dict[tuple[int, int], str] = {}
        due = dict.fromkeys(range(CPS), DIGEST_EVERY)
        history = Replica(self.cluster, self.coordination, TIMEOUT_S, Begin.HISTORY)

        def listen(cp: int, offset: int, _: Outcome) -> None:
            if offset + 1 >= due[cp]:
                due[cp] = ((offset + 1) // DIGEST_EVERY + 1) * DIGEST_EVERY
                digests[cp, offset] = history.worlds[cp].digest()

        history.catch_up(TIMEOUT_S, applied=listen)
        history.close()
        began = time.monotonic()
        shortcut = Replica(self.cluster, self.coordination, TIMEOUT_S, Begin.SNAPSHOT)
        shortcut.catch_up(TIMEOUT_S)
        self.report.start_s = time.monotonic() - began
        shortcut.close()
        for difference in (*history.differences, *shortcut.differences):
            self.report.problems.append(f"a snapshot differs: {difference}")
        for cp in range(CPS):
            found = {each.worlds[cp].digest() for each in (history, shortcut, self.replica)}
            self.report.digests += 2
            if len(found) > 1:
                self.report.problems.append(f"replays of CP {cp} differ: {sorted(found)}")
        for note in self.notes():
            if note["what"] == "digest":
                self.report.digests += 1
                if digests.get((note["cp"], note["offset"])) != note["digest"]:
                    self.report.problems.append(
                        f"{note['worker']} had another state than a replay, CP {note['cp']} at {note['offset']}"
                    )
