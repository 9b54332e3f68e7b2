"""A log to audit directly from Kafka: Spark's connector reads `__marshal` and its snapshots topic (L4, S2)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.archive import Archive, ArchivedLog
from kafka_marshal.errors import AuditError, TopicChangedError, TopicMissingError
from kafka_marshal.node.log_reader import bounds
from kafka_marshal.pipeline.audit.archived import Below, read_archive
from kafka_marshal.pipeline.audit.files import Piece, pieces_of
from kafka_marshal.pipeline.audit.job import Runner
from kafka_marshal.pipeline.audit.plan import SourceLog
from kafka_marshal.pipeline.audit.sources import (
    Opened,
    by_partition,
    count_by_marker,
    parquet_files,
    records_of_parquet,
)
from kafka_marshal.pipeline.kafka_options import kafka_options
from kafka_marshal.topic_names import DEFAULT_TOPIC, snapshots_topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["KafkaSource"]

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

    def open(self, runner: Runner, spark: SparkSession | None, work: Path) -> Opened:
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
        opened = Opened(SourceLog(self.topic, len(ends), log, {cp: low for cp, (low, _) in ends.items()}), snapshots)
        return opened if below is None else below.under(opened)

    def _archived(self, runner: Runner, work: Path) -> tuple[dict[int, tuple[int, int]], Below]:
        """(log start, high watermark) of each partition, and what the archive has below that."""
        cluster = KafkaCluster(self.bootstrap_servers, dict(self.config))
        try:
            log = ArchivedLog(cluster, self.topic, self.timeout_s, Archive.at(self.archive))
        finally:
            cluster.close()
        return {cp: (low, log.ends[cp]) for cp, low in log.starts.items()}, read_archive(
            log, self.archive, runner, work
        )

    def log_ends(self, partitions: Sequence[tuple[str, int]], times: Sequence[int]) -> dict[tuple[str, int], list[int]]:
        """End offsets of these data partitions at these times (ms), as far as they still exist.

        Raises KafkaUnavailableError. Omits deleted topics.
        """
        cluster = KafkaCluster(self.bootstrap_servers, dict(self.config))
        try:
            there = cluster.topic_info(sorted({topic for topic, _ in partitions}), self.timeout_s)
            wanted = [each for each in partitions if each[0] in there and each[1] < there[each[0]].partitions]
            found: dict[tuple[str, int], list[int]] = {each: [] for each in wanted}
            for time_ms in times:
                for each, offset in cluster.offsets_for_time(wanted, time_ms, self.timeout_s).items():
                    found[each].append(offset)
        finally:
            cluster.close()
        return {each: offsets for each, offsets in found.items() if len(offsets) == len(times)}

    def _bounds(self, topic: str) -> dict[int, tuple[int, int]] | None:
        """(log start, high watermark) of each partition; None if there is no such topic."""
        cluster = KafkaCluster(self.bootstrap_servers, dict(self.config))
        try:
            return bounds(cluster, topic, self.timeout_s)
        finally:
            cluster.close()

    def _copy(
        self, spark: SparkSession, topic: str, marks: Mapping[int, tuple[int, int]], folder: Path
    ) -> dict[int, list[Piece]]:
        """Copy the records between the marks into files of one partition each, ascending."""
        from pyspark.errors import PySparkException

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
            if isinstance(error, PySparkException) or type(error).__module__.startswith("py4j."):
                raise AuditError(
                    f"Spark could not read {topic!r} from {self.bootstrap_servers}: {str(error).splitlines()[0]} "
                    "Nothing was concluded. Where the log was cut meanwhile (prune), run it again."
                ) from error
            raise
        return by_partition(pieces_of(parquet_files(folder)))
