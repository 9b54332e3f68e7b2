"""The findings of an audit: the verdict, its basis, the tables, and which hashes confirm the log (S4, D5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow.compute as pc

from kafka_marshal.pipeline.audit.files import TABLES, TAKEOVERS, Row, table_at
from kafka_marshal.pipeline.audit.invariants import Breach
from kafka_marshal.pipeline.audit.plan import Evidence, SourceLog
from kafka_marshal.pipeline.audit.task import TaskResult
from rationalizer import World
from rationalizer.intervals import union
from rationalizer.limits import SNAPSHOT_INTERVAL
from rationalizer.log_hash import LogHash

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class AuditViolation:
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
        return cls(time_ms=row["time"], **{name: row[name] for name in cls.__match_args__ if name != "time_ms"})


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
    examples: list[AuditViolation] = field(default_factory=list)
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
        found = self.table("violations").to_table()
        rows = found.sort_by([("partition", "ascending"), ("offset", "ascending")]).slice(0, most).to_pylist()
        self.examples = [AuditViolation.of(row) for row in rows]

    def table(self, name: str) -> Any:
        """A table as a pyarrow dataset: `.to_table(filter=…)`, `.to_batches()`, `.count_rows()`."""
        return table_at(self.tables[name], name)

    def groups(self) -> list[str]:
        """All groups that ever held a lease in this log."""
        tables = [self.table(name).to_table(columns=["group"])["group"] for name in ("ownership", "generations")]
        return sorted({group for each in tables for group in pc.unique(each).to_pylist()})

    def waits(self, group: str | None = None) -> dict[str, dict[str, float]]:
        """How long leases waited for their next holder, by kind of takeover: count, median and max (ms)."""
        wanted = None if group is None else pc.field("group") == group
        takeovers = self.table("takeovers").to_table(columns=["how", "silent_ms", "unowned_ms"], filter=wanted)
        found = {}
        for how, (_, column) in TAKEOVERS.items():
            values = takeovers.filter(pc.field("how") == how)[column].drop_null()
            if len(values):
                median = pc.quantile(values, 0.5)[0].as_py()
                found[how] = {"count": len(values), "median": median, "max": pc.max(values).as_py()}
        return found

    def register(self, spark: SparkSession, prefix: str = "") -> dict[str, DataFrame]:
        """Make each table a temporary view, named `prefix` + its name; returns them."""
        from pyspark.sql.pandas.types import from_arrow_schema

        found = {}
        for name, folder in self.tables.items():  # without its schema, Spark would run a job for each
            frame = spark.read.schema(from_arrow_schema(TABLES[name])).parquet(str(folder))
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


#: Ranges that are listed one by one.
_NAMED = 5


def changes(claims: Mapping[int, Evidence], results: Sequence[TaskResult]) -> list[AuditViolation]:
    """Ranges of the log that differ from what a member read or a dump contained."""
    found = []
    for result in results:
        for stored, ours in result.hashes_wrong:
            of_member = result.partition in claims and stored in claims[result.partition].hashes
            whose = "that a member stored" if of_member else "that the dump carries"
            what = "a member had read them (or the hash is forged)" if of_member else "the dump was written"
            detail = (
                f"offsets {stored.since} to {stored.next_offset - 1} of partition {stored.partition}: the hash {whose} "
                f"is {stored.digest}, that of the records is {ours}: records were removed, added, altered or moved in "
                f"time after {what}"
            )
            found.append(AuditViolation(str(Breach.LOG_CHANGED), stored.partition, stored.since, None, detail))
    return sorted(found, key=lambda each: (each.partition, each.offset, each.detail))


def vouched(claims: Evidence | None, results: Sequence[TaskResult]) -> int:
    """Number of offsets covered by members' hashes that match the log."""
    stored = () if claims is None else claims.hashes
    held = [each for result in results for each in result.hashes_held if each in stored]
    return sum(last - first + 1 for first, last in _ranges(held))


@dataclass(slots=True)
class Vouching:
    """What no hash vouches for: `unvouched` although one should, and `notices` of what none could cover yet."""

    unvouched: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def vouching(log: SourceLog, claims: Mapping[int, Evidence], results: Mapping[int, Sequence[TaskResult]]) -> Vouching:
    """Where a change of the log, or of the dump, would not be noticed: by CP, against the hashes that should be there.

    A dump should carry its own up to its last record (D5). Members store one every 10,000 offsets (S4), in the topic of
    snapshots: one that is late by less than twice the longest of them is not missing.
    """
    found = Vouching()
    young, own_only = [], []
    for cp, each in sorted(results.items()):
        if not (pieces := log.pieces.get(cp)):
            continue
        first, last = pieces[0].first, pieces[-1].last
        checked = [x for result in each for x in (*result.hashes_held, *(wrong for wrong, _ in result.hashes_wrong))]
        stored = [x for x in checked if cp in claims and x in claims[cp].hashes]
        own = [x for x in checked if x in log.hashes.get(cp, ())]
        if log.is_dump:
            bare = _without(first, last, _ranges(own))
            if bare:
                found.unvouched.append(
                    f"partition {cp}: the dump carries no hash of offsets {_named(bare)}, where kafka-marshal dump "
                    "writes one every 10,000 offsets and with the last record: a change there is not noticed"
                )
            if cp not in claims:
                own_only.append(cp)
                continue
        late = 2 * max([SNAPSHOT_INTERVAL, *(x.next_offset - x.since for x in stored)])
        bare = _without(first, last, _ranges(stored if log.is_dump else [*stored, *own]))
        # The first hash may begin below what is left of the log, and the next one is due later.
        begun = bare.pop(0) if bare and 0 < first == bare[0][0] and bare[0][1] - first < late else None
        behind = bare.pop() if bare and bare[-1][1] == last and last - bare[-1][0] < late else None
        if bare:
            found.unvouched.append(
                f"partition {cp}: no stored hash covers offsets {_named(bare)}, where members store one every 10,000 "
                "offsets beside their snapshots: a change there is not noticed"
            )
        young += [f"{cp} from offset {span[0]} to {span[1]}" for span in (begun, behind) if span is not None]
    if young:
        found.notices.append(
            f"no hash of members covers partition(s) {_listed(young)} yet (they store one every 10,000 offsets): a "
            "change there is not noticed"
        )
    if own_only:
        found.notices.append(
            "the hashes of the dump show changes since it was written. Whether its records are those that members "
            "read, their hashes show: name the dump of the log of snapshots (--snapshots)"
        )
    return found


def notices_of_offsets(results: Mapping[int, Sequence[TaskResult]]) -> list[str]:
    """Missing offsets between records."""
    found = []
    for cp, each in sorted(results.items()):
        missing = sum(result.missing for result in each)
        if missing:
            first, last = next(result.first_missing for result in each if result.first_missing is not None)
            found.append(
                f"partition {cp}: {missing:,} offset(s) between the first and the last record have none, the first of "
                f"them {first} to {last}: these records were removed or compacted, or are markers of Kafka's own"
            )
    return found


def cuts(log: SourceLog) -> list[str]:
    """Where a dump lacks what the log had when it was written (D5), or does not say what that was."""
    found = []
    if log.is_dump and not log.bounds:
        found.append(
            "the dump does not say where its log began and ended, as kafka-marshal dump writes it: whether its first "
            "and last records are there is not known"
        )
    for cp, (first, end) in enumerate(log.bounds):
        pieces = log.pieces.get(cp, ())
        begin, last = (pieces[0].first, pieces[-1].last + 1) if pieces else (end, first)
        if last < end:
            found.append(
                f"partition {cp}: the dump ends at offset {last}, and the log reached to {end} when it was written: it "
                "was cut"
            )
        if pieces and begin > first:
            found.append(
                f"partition {cp}: the dump begins at offset {begin}, and the log at {first} when it was written: what "
                "was between is missing"
            )
    return found


def _ranges(hashes: Sequence[LogHash]) -> list[tuple[int, int]]:
    """The offsets that they cover: first and last of each run."""
    if not hashes:
        return []
    firsts, lasts = union([(each.since, each.next_offset - 1) for each in hashes])
    return list(zip(firsts, lasts, strict=True))


def _without(first: int, last: int, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What of first … last is in none of these ranges, which ascend."""
    found = []
    for low, high in ranges:
        if low > first:
            found.append((first, low - 1))
        first = max(first, high + 1)
    return [*found, (first, last)] if first <= last else found


def _named(ranges: Sequence[tuple[int, int]]) -> str:
    return _listed([f"{first} to {last}" for first, last in ranges])


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return ", ".join(texts[:_NAMED]) + more
