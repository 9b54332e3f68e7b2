"""Logs for the audit's tests: written by the oracle's author, with the snapshots that replicas would have stored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rationalizer import World
from rationalizer.dump import DumpHeader, DumpRecord, header_line, record_line
from rationalizer.log_hash import RunningHash, encode_hash
from rationalizer.snapshot_log import encode_snapshot, encode_state
from tests.rationalizer.strategies import Entry, by_seed, write_log

TOPIC = "__marshal"
SNAPSHOTS = "__marshal_snapshots"


@dataclass
class WholeLog:
    """All CPs of a log, and its log of snapshots."""

    partitions: int
    entries: dict[int, list[Entry]]
    #: Values of the log of snapshots.
    snapshots: dict[int, list[bytes | None]] = field(default_factory=dict)

    @property
    def records(self) -> int:
        return sum(map(len, self.entries.values()))

    def store_snapshots(self, every: int, partitions: Iterable[int] | None = None) -> None:
        """A snapshot after each `every` records, and the hash of the records before it, as members store them."""
        for cp in range(self.partitions) if partitions is None else partitions:
            world = World(cp, self.partitions)
            found = self.snapshots.setdefault(cp, [])
            for count, entry in enumerate(self.entries[cp], start=1):
                world.apply(*entry)
                if count % every == 0:
                    found += encode_snapshot(world)
        self.store_hashes(every, partitions)

    def store_hashes(self, every: int, partitions: Iterable[int] | None = None) -> None:
        """The hash of each `every` records."""
        for cp in range(self.partitions) if partitions is None else partitions:
            since, entries = 0, self.entries[cp]
            for end in range(every, len(entries) + 1, every):
                running = RunningHash(since)
                running.take(entries[end - every : end])
                since = entries[end - 1][0] + 1
                self.snapshots.setdefault(cp, []).append(encode_hash(running.at(cp, since)))

    def world(self, cp: int, records: int | None = None) -> World:
        """One replica's, after so many records."""
        world = World(cp, self.partitions)
        world.apply_many(self.entries[cp][:records])
        return world

    def digests(self) -> dict[int, str]:
        """Of a live replica: what an audit must come to."""
        return {cp: self.world(cp).digest() for cp in range(self.partitions)}

    def write_dump(self, path: Path) -> Path:
        """CPs take turns, as they may (D1)."""
        lines = [header_line(DumpHeader(TOPIC, self.partitions))]
        longest = max(map(len, self.entries.values()), default=0)
        for place in range(longest):
            for cp, entries in self.entries.items():
                if place < len(entries):
                    lines.append(record_line(DumpRecord(cp, *entries[place])))
        path.write_text("\n".join(lines) + "\n")
        return path

    def write_snapshots(self, path: Path) -> Path:
        lines = [header_line(DumpHeader(SNAPSHOTS, self.partitions))]
        for cp, values in self.snapshots.items():
            lines += [record_line(DumpRecord(cp, offset, 0, value)) for offset, value in enumerate(values)]
        path.write_text("\n".join(lines) + "\n")
        return path


def random_log(seed: int, length: int, partitions: int = 2) -> WholeLog:
    """`length` records in each CP, plausible and near every edge (tests/rationalizer/strategies.py)."""
    found = {}
    for cp in range(partitions):
        found[cp], _ = write_log(by_seed(seed * 1000 + cp), length, cp, partitions)
    return WholeLog(partitions, found)


def forged(world: World) -> list[bytes]:
    """A snapshot of a state that this world never was in, and that holds together all the same."""
    lie = World.restore(world.snapshot(), world.partitions)
    lease = lie.leases()[0]
    lease.progress.through(lease.progress.stable + 1000)
    return encode_state(world.partition, world.next_offset, lie.snapshot())
