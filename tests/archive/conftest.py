"""A log in memory that is archived and pruned."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from uuid import uuid4

import pytest

from kafka_marshal.adapters.memory import MemoryCluster, MemoryMessage
from kafka_marshal.archive import Archive, Archived, ArchivedLog, write_archive
from kafka_marshal.archive import writer as writing
from kafka_marshal.ports import LogEntry
from rationalizer import World
from tests.audit.logs import SNAPSHOTS, TOPIC, WholeLog, random_log
from tests.checkpoints.conftest import s3
from tests.cli.conftest import command, environment
from tests.stored_snapshot import encode_snapshot

__all__ = ["FILE", "TIMEOUT_S", "TOPIC", "Kept", "command", "environment", "s3"]

TIMEOUT_S = 5.0

#: Offsets of a file of these archives.
FILE = 100


@cache
def a_log() -> WholeLog:
    return random_log(7, 700)


@dataclass
class Kept:
    """A log of two partitions, of which the first `written` records are in Kafka; and where it is archived."""

    log: WholeLog
    place: str
    options: dict[str, object] | None = None
    cluster: MemoryCluster = field(default_factory=MemoryCluster)

    def __post_init__(self) -> None:
        for topic in (TOPIC, SNAPSHOTS):
            self.cluster.broker.create_topic(topic, self.log.partitions, settings={"retention.ms": "-1"})
        self.written = dict.fromkeys(self.log.entries, 0)

    def write(self, records: int) -> None:
        """Append this number of records to each partition, with a snapshot behind them."""
        for cp, entries in self.log.entries.items():
            partition = self.cluster.broker.existing[TOPIC].partitions[cp]
            for offset, stamp, value in entries[self.written[cp] : self.written[cp] + records]:
                partition.messages.append(MemoryMessage(TOPIC, cp, offset, None, value, (2, stamp)))
                partition.offsets.append(offset)
                partition.arrivals.append(stamp)
                partition.end = offset + 1
            self.written[cp] += records
            for value in encode_snapshot(self.log.world(cp, self.written[cp])):
                self.cluster.broker.produce(SNAPSHOTS, cp, value)

    def prune(self, records: int) -> None:
        """Remove this number of records of each partition."""
        for cp, entries in self.log.entries.items():
            self.cluster.broker.delete_records(TOPIC, cp, entries[records - 1][0] + 1)

    def recreate(self) -> None:
        self.cluster.broker.delete_topic(TOPIC)
        self.cluster.broker.create_topic(TOPIC, self.log.partitions, settings={"retention.ms": "-1"})
        self.written = dict.fromkeys(self.log.entries, 0)

    def at(self, *, make: bool = False) -> Archive:
        return Archive.at(self.place, make=make, storage_options=self.options)

    def archive(self, *, verify: bool = False) -> Archived:
        return write_archive(self.cluster, TOPIC, self.at(make=True), TIMEOUT_S, verify=verify)

    def joined(self, **at: int) -> ArchivedLog:
        return ArchivedLog(self.cluster, TOPIC, TIMEOUT_S, self.at(), **at)

    def history(self, **at: int) -> dict[int, list[LogEntry]]:
        """All records that are read of the archive and the log, after the state that they begin from."""
        log = self.joined(**at)
        worlds = log.first_worlds(range(log.partitions))
        found: dict[int, list[LogEntry]] = {cp: [] for cp in worlds}
        for cp, entries in log.read({cp: world.next_offset for cp, world in worlds.items()}):
            found[cp] += entries
            worlds[cp].apply_many(entries)
        self.worlds = worlds
        return found

    def digests(self) -> dict[int, str]:
        """At the end of what `history` has read."""
        return {cp: world.digest() for cp, world in self.worlds.items()}

    def truth(self, cp: int) -> World:
        return self.log.world(cp, self.written[cp])

    def paths(self) -> list[Path]:
        """The files of the archive in a folder, in order."""
        return sorted(path for path in Path(self.place).rglob("*") if path.is_file())


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "FILE_OFFSETS", FILE)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    """Nothing is written or archived yet."""
    return Kept(a_log(), str(tmp_path / "archive"))


@pytest.fixture
def bucket(s3: dict[str, object]) -> Kept:
    """The same, in a bucket."""
    return Kept(a_log(), f"s3://states/{uuid4().hex}", s3)
