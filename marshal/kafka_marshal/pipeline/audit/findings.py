"""The findings of an audit: the verdict, its basis, and the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow.compute as pc
import pyarrow.dataset as ds

from kafka_marshal.pipeline.audit.schemas import TABLES, Row
from rationalizer import World

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation (invariants.py). `time_ms`: log time, None if it has none."""

    kind: str
    partition: int
    offset: int
    time_ms: int | None
    detail: str
    group: str | None = None
    topic: str | None = None
    topic_partition: int | None = None
    client: str | None = None
    instance: str | None = None
    epoch: int | None = None

    def row(self) -> Row:
        """As a row of `violations`."""
        lease = (self.group, self.topic, self.topic_partition)
        holder = (self.client, self.instance, self.epoch)
        return (self.kind, self.partition, self.offset, self.time_ms, *lease, *holder, self.detail)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """The violation of a row of `violations`."""
        return cls(time_ms=row["time"], **{name: row[name] for name in cls.__slots__ if name != "time_ms"})


@dataclass(frozen=True, slots=True)
class PartitionFindings:
    """The findings of one CP, as far as it was replayed."""

    partition: int
    records: int
    next_offset: int
    log_time: int
    level: int
    #: Equal to a live replica's at next_offset, and to that of `kafka-marshal replay`.
    digest: str
    #: Number of segments that were replayed in parallel.
    segments: int
    #: Snapshots that were compared, and those of them that are wrong.
    snapshots: int
    snapshots_wrong: int
    #: Offsets covered by members' hashes that match the log: nothing there was changed since members read it.
    vouched: int
    #: The level required by the Upgrade at which the replay stopped; None: it reached the end (E4).
    required_level: int | None = None

    @classmethod
    def empty(cls, partition: int) -> Self:
        """A CP without records."""
        return cls(partition, 0, 0, 0, 1, World(partition, partition + 1).digest(), 0, 0, 0, 0)


@dataclass(slots=True)
class Findings:
    """The findings of an audit. Tables are Parquet below `out` and, with Spark, views of the same names."""

    #: Description of the source, and the coordination topic.
    source: str
    topic: str
    records: int
    #: By kind; empty: none.
    violations: dict[str, int]
    partitions: list[PartitionFindings]
    #: Limits of the audit that are no violations.
    notices: list[str]
    #: What no hash vouches for although one should (S4, D5), and what a dump lacks: a change there goes unnoticed.
    unvouched: list[str]
    #: Name → folder.
    tables: dict[str, Path]
    out: Path | None
    #: The first violations, in the order of the log.
    examples: list[Violation] = field(default_factory=list)
    #: Peak memory of the process of any task, in bytes.
    peak_memory: int = 0
    #: Duration of each stage, in seconds.
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def violation_count(self) -> int:
        """Of all kinds."""
        return sum(self.violations.values())

    @property
    def stopped(self) -> dict[int, int]:
        """CPs whose replay stopped before an Upgrade → the level it requires (E4)."""
        return {each.partition: each.required_level for each in self.partitions if each.required_level is not None}

    @property
    def is_clean(self) -> bool:
        """Whether there is no violation and everything was replayed."""
        return not self.violations and not self.stopped

    @property
    def digests(self) -> dict[int, str]:
        """Of each CP (S1)."""
        return {each.partition: each.digest for each in self.partitions}

    @property
    def verdict(self) -> str:
        """One line: the number and kinds of violations, and where the first one is."""
        if not self.violations:
            text = f"0 violations in {self.records:,} records"
        else:
            kinds = ", ".join(f"{count:,} × {kind}" for kind, count in sorted(self.violations.items()))
            plural = "violation" if self.violation_count == 1 else "violations"
            text = f"{self.violation_count:,} {plural} in {self.records:,} records: {kinds}"
            if self.examples:
                first = self.examples[0]
                text += f"; first at partition {first.partition}, offset {first.offset}"
        if self.stopped:
            levels = ", ".join(f"partition {cp} (level {level})" for cp, level in self.stopped.items())
            text += f"; not complete, stopped before an Upgrade that this release does not know: {levels}"
        if self.unvouched:
            text += "; not all of it is vouched for"
        return text

    def add_examples(self, most: int) -> None:
        """Load the first violations from their table."""
        found = _table(self.tables["violations"], "violations").to_table()
        rows = found.sort_by([("partition", "ascending"), ("offset", "ascending")]).slice(0, most).to_pylist()
        self.examples = [Violation.of(row) for row in rows]

    def table(self, name: str) -> Any:
        """A table as a pyarrow dataset: `.to_table(filter=…)`, `.to_batches()`, `.count_rows()`."""
        return _table(self.tables[name], name)

    def groups(self) -> list[str]:
        """All groups that ever held a lease in this log."""
        tables = [self.table(name).to_table(columns=["group"])["group"] for name in ("ownership", "generations")]
        return sorted({group for each in tables for group in pc.unique(each).to_pylist()})

    def waits(self, group: str | None = None) -> dict[str, dict[str, float]]:
        """How long leases waited for their next holder, by kind of takeover: count, median and max (ms)."""
        wanted = None if group is None else pc.field("group") == group
        takeovers = self.table("takeovers").to_table(columns=["how", "silent_ms", "unowned_ms"], filter=wanted)
        found = {}
        for how, column in (("replaced", "silent_ms"), ("handed over", "unowned_ms"), ("restarted", "silent_ms")):
            values = takeovers.filter(pc.field("how") == how)[column].drop_null()
            if len(values):
                median = pc.quantile(values, 0.5)[0].as_py()
                found[how] = {"count": len(values), "median": median, "max": pc.max(values).as_py()}
        return found

    def register(self, spark: SparkSession, prefix: str = "") -> dict[str, DataFrame]:
        """Make each table a temporary view, named `prefix` + its name; returns them."""
        found = {}
        for name, folder in self.tables.items():
            frame = spark.read.parquet(str(folder))
            frame.createOrReplaceTempView(prefix + name)
            found[name] = frame
        return found

    def summary(self) -> dict[str, Any]:
        """The JSON that `kafka-marshal audit --json` prints and `audit.json` beside the tables holds."""
        return {
            "verdict": self.verdict,
            "clean": self.is_clean,
            "source": self.source,
            "topic": self.topic,
            "records": self.records,
            "violations": self.violations,
            "examples": [asdict(each) for each in self.examples],
            "partitions": [asdict(each) for each in self.partitions],
            "notices": self.notices,
            "unvouched": self.unvouched,
            "tables": {name: str(path) for name, path in self.tables.items()},
            "task_memory_bytes": self.peak_memory,
            "seconds": {name: round(seconds, 3) for name, seconds in self.timings.items()},
        }


def _table(folder: Path, name: str) -> Any:
    return ds.dataset(folder, format="parquet", schema=TABLES[name])
