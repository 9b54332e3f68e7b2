"""The log for benchmarks.audit: the records of a few dozen workers in hours, generated in seconds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from kafka_marshal.pipeline.audit.files import LogWriter
from rationalizer import (
    BeatEntry,
    ClaimingMessages,
    ClaimingPartition,
    CommitRanges,
    Heartbeat,
    HeartbeatBatch,
    Record,
    ReleasingPartition,
    Tick,
    World,
    encode,
    route_lease,
)
from rationalizer.dump import DumpHeader, DumpRecord, header_line, record_line
from tests.stored_snapshot import encode_snapshot

__all__ = ["Entry", "entries", "write_log"]

PARTITIONS = 8
TOPIC = "flights"
GROUP = "delays-by-carrier"
LEASES = 24
CLIENTS = 12
HEARTBEAT_INTERVAL_MS = 3000
SNAPSHOT_EVERY = 10_000

Entry = tuple[int, int, bytes]

#: Mix of a hundred records: single heartbeats and batches, commits out of order, grants, leases that change holders,
#: rejected claims, ticks.
MIX = (("beat", 58), ("batch", 26), ("commit", 7), ("grant", 4), ("move", 2), ("refused", 2), ("tick", 1))


class _Author:
    """One CP's log."""

    def __init__(self, cp: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.who = [(f"{n:02d}-5f0e9a3c1b7d42e8", f"delays-worker-{n:02d}", GROUP) for n in range(CLIENTS)]
        self.leases = [n for n in range(LEASES * PARTITIONS * 4) if route_lease(TOPIC, n, PARTITIONS) == cp][:LEASES]
        self.holder = [n % CLIENTS for n in range(LEASES)]
        self.epoch = [0] * LEASES
        self.done = [self.rng.randrange(1_000_000) for _ in range(LEASES)]
        self.offset = 0

    def write(self) -> Iterator[Record]:
        """Records without end; self.offset is the next one's."""
        yield Tick("init-1", "init", f"partitions={PARTITIONS}")
        for lease in range(LEASES):
            yield self._claim(lease, self.holder[lease])
        names, weights = zip(*MIX, strict=True)
        while True:
            for name in self.rng.choices(names, weights, k=1000):
                yield from getattr(self, name)(self.rng.randrange(LEASES))

    def _claim(self, lease: int, client: int) -> Record:
        self.holder[lease], self.epoch[lease] = client, self.offset
        return ClaimingPartition(*self.who[client], TOPIC, self.leases[lease], HEARTBEAT_INTERVAL_MS)

    def _named(self, lease: int) -> tuple[str, str, str, str, int, int]:
        return *self.who[self.holder[lease]], TOPIC, self.leases[lease], self.epoch[lease]

    def beat(self, lease: int) -> Iterator[Record]:
        self.done[lease] += self.rng.randrange(2000)
        yield Heartbeat(*self._named(lease), self.done[lease])

    def batch(self, lease: int) -> Iterator[Record]:
        mine = [each for each in range(LEASES) if self.holder[each] == self.holder[lease]]
        found = []
        for each in mine[:4]:
            self.done[each] += self.rng.randrange(2000)
            found.append(BeatEntry(TOPIC, self.leases[each], self.epoch[each], self.done[each]))
        yield HeartbeatBatch(*self.who[self.holder[lease]], tuple(found))

    def commit(self, lease: int) -> Iterator[Record]:
        at = self.done[lease]
        yield CommitRanges(*self._named(lease), ((at + 10, at + 19), (at + 30, at + 49)))

    def grant(self, lease: int) -> Iterator[Record]:
        self.done[lease] += 500
        yield ClaimingMessages(*self._named(lease), self.done[lease])

    def move(self, lease: int) -> Iterator[Record]:
        yield ReleasingPartition(*self._named(lease), self.done[lease])
        yield self._claim(lease, self.rng.randrange(CLIENTS))

    def refused(self, lease: int) -> Iterator[Record]:
        other = (self.holder[lease] + 1) % CLIENTS
        yield ClaimingPartition(*self.who[other], TOPIC, self.leases[lease], HEARTBEAT_INTERVAL_MS)

    def tick(self, lease: int) -> Iterator[Record]:
        yield Tick(*self.who[self.holder[lease]])


def entries(cp: int, records: int, seed: int = 11) -> Iterator[Entry]:
    """The first `records` records of a CP's log."""
    author = _Author(cp, seed + cp)
    now = 1_700_000_000_000
    for offset, record in enumerate(author.write()):
        if offset == records:
            return
        author.offset = offset + 1
        now += author.rng.randrange(20)
        yield offset, now, encode(record)


def write_log(folder: Path, cps: int, records: int) -> tuple[list[Path], Path]:
    """A log of `records` records in `cps` CPs as Parquet, and the dump of its snapshots topic."""
    header = DumpHeader("__marshal", PARTITIONS)
    paths = []
    snapshots = folder / "snapshots.jsonl"
    with snapshots.open("w") as lines:
        lines.write(header_line(DumpHeader("__marshal_snapshots", PARTITIONS)) + "\n")
        for cp in range(cps):
            writer = LogWriter(folder / f"log-{cp}.parquet", cp, header)
            world = World(cp, PARTITIONS)
            run: list[Entry] = []
            stored = 0
            for entry in entries(cp, records // cps):
                writer.add(*entry)
                run.append(entry)
                if len(run) == SNAPSHOT_EVERY:
                    world.apply_many(run)
                    run.clear()
                    for value in encode_snapshot(world):
                        lines.write(record_line(DumpRecord(cp, stored, entry[1], value)) + "\n")
                        stored += 1
            writer.close()
            paths.append(writer.path)
    return paths, snapshots
