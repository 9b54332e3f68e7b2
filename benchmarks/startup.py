"""Milliseconds until a member is ready: started from snapshots (S3), divided by a full replay of the same log:

    python -m benchmarks.startup [--records N] [--leases N] [--rounds N] [--json FILE]

One CP, 1,000 leases, a million heartbeats (10 million: --records 10000000, about a minute to fill). Ready means: made,
the log read to its end as it was, able to claim. Both start in one process after a first, unmeasured one; they take
turns, and times are medians over the rounds. The log ends half an interval behind the newest snapshot, so a start reads
one and a half intervals; members wrote the snapshots.

The other rows: a log of a tenth of the length, which should take as long; and the cost of a snapshot: the time for
which a member reads no log (state to bytes, under the lock), beside its heartbeat interval.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Sequence
from statistics import median

from confluent_kafka import Producer

from benchmarks.common import Row, bench_kafka, report
from kafka_marshal import Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.node.replica import Begin, Replica
from kafka_marshal.snapshots import publisher
from kafka_marshal.snapshots.reader import SnapshotReader
from kafka_marshal.topic_names import snapshots_topic
from rationalizer import ClaimingPartition, Heartbeat, World, encode
from rationalizer.limits import SNAPSHOT_INTERVAL

GROUP = "delays-by-carrier"
TOPIC = "flights"
CLIENTS = 20
HEARTBEAT_INTERVAL_MS = 3_000

#: Starts per round: a start is short, so that other load of the machine shows in it more than in a replay.
STARTS_A_ROUND = 5


def fill(bootstrap: str, topic: str, records: int, leases: int) -> None:
    """Write claims, then heartbeats with progress, up to this number of records including the marker of `init`."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "linger.ms": 5,
            "batch.size": 1_000_000,
            "batch.num.messages": 10_000,
            "queue.buffering.max.messages": 500_000,
        }
    )

    def put(value: bytes) -> None:
        while True:
            try:
                return producer.produce(topic, value, b"", 0)
            except BufferError:
                producer.poll(0.05)

    who = [(f"{n:02d}-5f0e9a3c1b7d42e8", f"delays-worker-{n:02d}", GROUP) for n in range(CLIENTS)]
    for number in range(leases):
        put(encode(ClaimingPartition(*who[number % CLIENTS], TOPIC, number, HEARTBEAT_INTERVAL_MS)))
    if producer.flush(60) > 0:
        raise RuntimeError("the claims were not written in time")
    for offset in range(leases + 1, records):
        number = (offset - 1) % leases
        # A lease's claim is right behind the marker, and its offset is the epoch.
        put(encode(Heartbeat(*who[number % CLIENTS], TOPIC, number, number + 1, offset)))
        if offset % 5_000 == 0:
            producer.poll(0)
    if producer.flush(600) > 0:
        raise RuntimeError("the log was not written in time")


class Log:
    """A filled coordination topic of one partition, with members' snapshots."""

    def __init__(self, bootstrap: str, records: int, leases: int) -> None:
        self.bootstrap = bootstrap
        self.records = records
        self.topic = f"__marshal-startup-{uuid.uuid4().hex[:8]}"
        self.cluster = KafkaCluster(bootstrap, {})
        create_topic(self.cluster, self.topic, 1, 30)
        fill(bootstrap, self.topic, records, leases)

    def replay(self) -> float:
        """Milliseconds of a start without snapshots: a replica that reads everything."""
        begun = time.perf_counter()
        cluster = KafkaCluster(self.bootstrap, {})
        replica = Replica(cluster, self.topic, 30, Begin.HISTORY)
        replica.catch_up(30)
        milliseconds = (time.perf_counter() - begun) * 1000
        self._check(replica, 0)
        replica.close()
        cluster.close()
        return milliseconds

    def start(self, at_least: int = 1) -> float:
        """Milliseconds until a member is ready."""
        begun = time.perf_counter()
        member = Marshal(self.bootstrap, group_id="startup", topic=self.topic)
        milliseconds = (time.perf_counter() - begun) * 1000
        self._check(member._driver.replica, at_least)
        member.close()
        return milliseconds

    def _check(self, replica: Replica, at_least: int) -> None:
        start, world = replica.starts[0], replica.worlds[0]
        if start.begun_at < at_least or start.differences or world.next_offset < self.records:
            raise AssertionError(f"no such start: began at {start.begun_at}, read up to {world.next_offset}")

    def write_snapshots(self) -> None:
        """Let a member write due snapshots."""
        publisher.JITTER_MS = 0.0
        name = snapshots_topic(self.topic)
        with Marshal(self.bootstrap, group_id="startup", topic=self.topic):
            until = time.monotonic() + 60
            while True:
                reader = SnapshotReader.find(self.cluster, name, 10)
                if reader is not None:
                    reader.read_newest(2)
                    if reader.partitions[0].distinct() >= 2:
                        return
                if time.monotonic() > until:
                    raise RuntimeError("no snapshots were written within 60 s")
                time.sleep(0.05)

    def delete(self) -> None:
        """Delete the topic: ten million records are a gigabyte."""
        self.cluster.close()
        Probe(self.bootstrap).delete_topics([self.topic, snapshots_topic(self.topic)])


def stall(leases: int, rounds: int) -> float:
    """Time in which a replica with this number of leases encodes its state (ms)."""
    world = World(0, 1)
    for number in range(leases):
        world.apply(number, 1_000, encode(ClaimingPartition("5f0e9a3c1b7d42e8", "worker", GROUP, TOPIC, number, 3_000)))
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        world.snapshot()
        found.append((time.perf_counter() - begun) * 1000)
    return median(found)


def measure(bootstrap: str, records: int, leases: int, rounds: int) -> list[Row]:
    """All rows."""
    # The newest snapshot is half an interval behind the end: neither the best nor the worst case for a start.
    long, short = (
        Log(bootstrap, size // SNAPSHOT_INTERVAL * SNAPSHOT_INTERVAL + SNAPSHOT_INTERVAL // 2, leases)
        for size in (records, records // 10)
    )
    for log in (long, short):
        log.write_snapshots()
        log.start()
    replays, starts, shorts = [], [], []
    for _ in range(rounds):
        replays.append(long.replay())
        for _ in range(STARTS_A_ROUND):
            starts.append(long.start())
            shorts.append(short.start())
    for log in (long, short):
        log.delete()
    ready, whole, tenth = median(starts), median(replays), median(shorts)
    stalled = stall(leases, 50)
    return [
        Row("ready from snapshots / full replay", ready, whole, ready / whole, 0.05, "ms", at_most=True),
        Row("the same / a log of a tenth", ready, tenth, ready / tenth, 1.3, "ms", at_most=True),
        Row(
            f"state of {leases:,} leases to bytes / HI",
            stalled,
            HEARTBEAT_INTERVAL_MS,
            stalled / HEARTBEAT_INTERVAL_MS,
            0.01,
            "ms",
            at_most=True,
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--leases", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(arguments)
    with bench_kafka() as bootstrap:
        rows = measure(bootstrap, options.records, options.leases, options.rounds)
    report("startup", rows, options.json, records=options.records, leases=options.leases, rounds=options.rounds)


if __name__ == "__main__":
    main()
