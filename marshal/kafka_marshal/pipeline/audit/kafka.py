"""A log to audit directly from Kafka: Spark's connector reads `__marshal` and its snapshots topic (L4, S2).

The archive below it becomes Parquet file by file, in tasks. The hash of each file is compared with its records,
archived or live; the state before it is one more snapshot to be compared with the replay, and to begin a segment at.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.archive import Archive, ArchivedLog
from kafka_marshal.errors import AuditError, TopicChangedError, TopicMissingError
from kafka_marshal.node.log_reader import bounds
from kafka_marshal.pipeline.audit.files import LogPiece, LogWriter, pieces_of
from kafka_marshal.pipeline.audit.plan import SourceLog
from kafka_marshal.pipeline.audit.sources import (
    OpenedLog,
    by_partition,
    count_by_marker,
    parquet_files,
    records_of_parquet,
)
from kafka_marshal.pipeline.audit.task import TaskRunner
from kafka_marshal.pipeline.session import is_of_spark, kafka_options
from kafka_marshal.topic_names import DEFAULT_TOPIC, snapshots_topic
from rationalizer.dump import DumpHeader
from rationalizer.log_hash import LogHash
from rationalizer.snapshot_log import encode_state

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kafka_marshal.archive.stored import FileName
    from kafka_marshal.pipeline.audit.plan import SnapshotRecord
    from kafka_marshal.pipeline.audit.task import TaskRunner

__all__ = ["KafkaSource"]


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the archive, and which of its offsets are wanted."""

    place: str
    name: FileName
    begin: int
    end: int
    folder: str

    @property
    def records(self) -> int:
        """How much work it is."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class _Converted:
    """The Parquet file, the hash of all its records, and the file of the state before them with its next offset."""

    path: Path
    hash: LogHash
    state: Path
    next_offset: int


@dataclass(frozen=True, slots=True)
class Below:
    """What an archive has below a log, by CP."""

    starts: Mapping[int, int]
    pieces: Mapping[int, list[LogPiece]]
    hashes: Mapping[int, list[LogHash]]
    #: (CP, next offset, canonical bytes in this file)
    states: tuple[tuple[int, int, Path], ...]

    def under(self, live: OpenedLog) -> OpenedLog:
        """One log of both; the states of the archive are snapshots, too."""
        log = live.log
        pieces = {cp: [*self.pieces.get(cp, ()), *log.pieces.get(cp, ())] for cp in range(log.partitions)}
        pieces = {cp: each for cp, each in pieces.items() if each}
        starts = {**log.starts, **self.starts}
        return OpenedLog(
            SourceLog(log.topic, log.partitions, pieces, starts, self.hashes), lambda: self._snapshots(live)
        )

    def _snapshots(self, live: OpenedLog) -> Iterator[SnapshotRecord]:
        place = -1
        for cp, next_offset, path in self.states:
            for value in encode_state(cp, next_offset, path.read_bytes()):
                yield cp, place, value
                place -= 1
        yield from () if live.snapshots is None else live.snapshots()


def read_archive(log: ArchivedLog, place: str, runner: TaskRunner, work: Path) -> Below:
    """Convert what is below the live log into files in `work`. Raises ArchiveError."""
    wanted = []
    hashes: dict[int, list[LogHash]] = {}
    for cp in range(log.partitions):
        log.refuse_longer(cp)
        run, live_from = log.chosen.get(cp), log.starts[cp]
        first = live_from if run is None else run.first
        hashes[cp] = list(log.hashes(cp, first, live_from, log.ends[cp]))
        for name, begin in () if run is None else run.parts:
            if begin < live_from:
                wanted.append(_File(place, name, begin, min(name.end, live_from), str(work)))
    pieces: dict[int, list[LogPiece]] = {}
    states = []
    for file, found in zip(wanted, runner.map("reading the archive", _convert, wanted, work), strict=True):
        cp = file.name.partition
        pieces.setdefault(cp, []).extend(pieces_of([found.path]))
        if file.name.end <= log.starts[cp]:
            hashes[cp].append(found.hash)
        if found.next_offset:
            states.append((cp, found.next_offset, found.state))
    starts = {cp: run.first for cp, run in log.chosen.items()}
    return Below(starts, pieces, hashes, tuple(states))


def _convert(file: _File) -> _Converted:
    stored = Archive.at(file.place).read(file.name)
    stem = f"archived-{file.name.partition}-{file.name.first:019}-{os.getpid()}"
    path, state = (Path(file.folder, f"{stem}.{kind}") for kind in ("parquet", "state"))
    writer = LogWriter(path, file.name.partition, DumpHeader(stored.topic, stored.partitions))
    for entries in stored.entries(file.begin, file.end):
        for entry in entries:
            writer.add(*entry)
    writer.close()
    state.write_bytes(stored.state or b"")
    return _Converted(path, stored.log_hash, state, stored.world().next_offset)


#: Tasks per core that read a Kafka partition, each a run of offsets.
_READERS_PER_CORE = 2

#: Size of row groups: tasks read parts of them, so they should not be large.
_GROUP_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class KafkaSource:
    """The coordination topic of a cluster, up to its end when the audit begins.

    `archive`: what it has below the log's beginning is audited, too. `config`: librdkafka's properties (TLS, SASL, …),
    translated for Spark, too. `timeout_s`: how long to wait for a broker. Needs Spark with its Kafka connector
    (kafka_marshal.pipeline.session).
    """

    bootstrap_servers: str
    config: Mapping[str, object] = field(default_factory=dict, repr=False)
    topic: str = DEFAULT_TOPIC
    timeout_s: float = 10.0
    #: The place of its archive, a folder or a URL; "": none is read.
    archive: str = ""

    @property
    def name(self) -> str:
        return f"{self.topic} at {self.bootstrap_servers}"

    def open(self, runner: TaskRunner, spark: SparkSession | None, work: Path) -> OpenedLog:
        """Copy both topics into Parquet files.

        Raises TopicMissingError, TopicChangedError (L2), KafkaUnavailableError, ArchiveError, and AuditError if Spark
        could not read everything.
        """
        if spark is None:
            raise AuditError("a log in Kafka is read by Spark, and there is no session. Nothing was read; give one.")
        # The snapshots' ends first: no hash may reach beyond what is read of the log.
        marks, ends, below = self._bounds(stored := snapshots_topic(self.topic)), self._bounds(self.topic), None
        if ends is None:
            raise TopicMissingError(
                f"there is no topic {self.topic!r} at {self.bootstrap_servers}. Nothing was read. Name the "
                "coordination topic, or make one: kafka-marshal init."
            )
        if self.archive:
            ends, below = self._archived(runner, work)
        log = self._copy(spark, self.topic, ends, work / "log")
        said = count_by_marker(log)
        if said is not None and said != len(ends):
            raise TopicChangedError(
                f"{self.topic!r} has {len(ends)} partitions, but its first record says that it was made with {said}: "
                "which of its records count can't be said. Nothing was concluded. Make a new topic."
            )
        snapshots = None
        if marks is not None:
            snapshots = partial(records_of_parquet, self._copy(spark, stored, marks, work / "snapshots"))
        opened = OpenedLog(SourceLog(self.topic, len(ends), log, {cp: low for cp, (low, _) in ends.items()}), snapshots)
        return opened if below is None else below.under(opened)

    def _archived(self, runner: TaskRunner, work: Path) -> tuple[dict[int, tuple[int, int]], Below]:
        """(log start, high watermark) of each partition, and what the archive has below that."""
        with self._cluster() as cluster:
            log = ArchivedLog(cluster, self.topic, self.timeout_s, Archive.at(self.archive))
        return {cp: (low, log.ends[cp]) for cp, low in log.starts.items()}, read_archive(
            log, self.archive, runner, work
        )

    def log_ends(self, partitions: Sequence[tuple[str, int]], times: Sequence[int]) -> dict[tuple[str, int], list[int]]:
        """End offsets of these data partitions at these times (ms), as far as they still exist.

        Raises KafkaUnavailableError. Omits deleted topics.
        """
        with self._cluster() as cluster:
            there = cluster.topic_info(sorted({topic for topic, _ in partitions}), self.timeout_s)
            wanted = [each for each in partitions if each[0] in there and each[1] < there[each[0]].partitions]
            found: dict[tuple[str, int], list[int]] = {each: [] for each in wanted}
            for time_ms in times:
                for each, offset in cluster.offsets_for_time(wanted, time_ms, self.timeout_s).items():
                    found[each].append(offset)
        return {each: offsets for each, offsets in found.items() if len(offsets) == len(times)}

    def _bounds(self, topic: str) -> dict[int, tuple[int, int]] | None:
        """(log start, high watermark) of each partition; None if there is no such topic."""
        with self._cluster() as cluster:
            return bounds(cluster, topic, self.timeout_s)

    def _cluster(self) -> AbstractContextManager[KafkaCluster]:
        return closing(KafkaCluster(self.bootstrap_servers, dict(self.config)))

    def _copy(
        self, spark: SparkSession, topic: str, marks: Mapping[int, tuple[int, int]], folder: Path
    ) -> dict[int, list[LogPiece]]:
        """Copy the records between the marks into files of one partition each, ascending."""
        full = {partition: mark for partition, mark in marks.items() if mark[0] < mark[1]}
        if not full:
            return {}
        places = len(full) + spark.sparkContext.defaultParallelism * _READERS_PER_CORE
        reader = spark.read.format("kafka").options(
            assign=json.dumps({topic: sorted(full)}),
            startingOffsets=json.dumps({topic: {str(each): low for each, (low, _) in full.items()}}),
            endingOffsets=json.dumps({topic: {str(each): high for each, (_, high) in full.items()}}),
            failOnDataLoss="true",
            minPartitions=str(places),
        )
        options = {**kafka_options(self.bootstrap_servers, self.config), "kafka.isolation.level": "read_uncommitted"}
        try:
            (
                reader.options(**options)
                .load()
                # Only the broker's timestamps count (T1); timestampType 1 is LogAppendTime.
                .selectExpr(
                    "partition",
                    "offset",
                    "CASE WHEN timestampType = 1 THEN unix_millis(timestamp) ELSE -1L END AS timestamp",
                    "value",
                )
                .write.option("parquet.block.size", _GROUP_BYTES)
                .parquet(str(folder))
            )
        except Exception as error:
            if is_of_spark(error):
                raise AuditError(
                    f"Spark could not read {topic!r} from {self.bootstrap_servers}: {str(error).splitlines()[0]} "
                    "Nothing was concluded. Where the log was cut meanwhile (prune), run it again."
                ) from error
            raise
        return by_partition(pieces_of(parquet_files(folder)))
