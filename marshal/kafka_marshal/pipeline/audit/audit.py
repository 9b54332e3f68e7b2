"""The audit of a whole history: cut, replay in parallel, compare, combine, report.

    with Audit(DumpSource(Path("log.jsonl")), spark=spark, out=Path("audit")) as audit:
        findings = audit.run()
        print(findings.verdict)
        spark.sql("SELECT * FROM ownership WHERE group = 'delays'").show()

Without `spark` it runs in this process: for small logs, and as a baseline for measurements.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow.compute as pc

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.files import FolderBeside, refuse_url
from kafka_marshal.pipeline.audit.files import TABLES, TAKEOVERS, Row, TableFiles, table_at
from kafka_marshal.pipeline.audit.findings import (
    AuditViolation,
    Findings,
    PartitionFindings,
    changes,
    cuts,
    notices_of_offsets,
    vouched,
    vouching,
)
from kafka_marshal.pipeline.audit.hole_observer import OpenRun, hole_row, with_history
from kafka_marshal.pipeline.audit.invariants import Breach, WatchedShare
from kafka_marshal.pipeline.audit.observer import ownership_row, share_row
from kafka_marshal.pipeline.audit.plan import CutLog, Evidence, SourceLog, claims_of, cut, extract
from kafka_marshal.pipeline.audit.sources import AuditSource, OpenedLog
from kafka_marshal.pipeline.audit.task import (
    InProcess,
    OnSpark,
    ReplayTask,
    Segment,
    SnapshotDigest,
    TaskResult,
    TaskRunner,
    run_task,
)
from kafka_marshal.pipeline.audit.watched_group import PieceSpan, Place, assignment_row, joined, parts_of
from rationalizer import World
from rationalizer.history import BEFORE, LeaseKey, Span

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Audit", "check_folder"]

#: The class that replays. A seam for tests, as Audit(world_type=…) is.
DEFAULT_WORLD: type[World] = World

#: Marks a folder as an audit's, and holds its findings.
SUMMARY = "audit.json"

#: The page, if one is written.
REPORT = "report.html"

#: Files in the folder of a table.
_TABLE_FILE = re.compile(r"_?(task-\d+|whole)-[0-9a-f]{32}\.parquet")

#: Snapshots to try when checking whether a log is complete.
_TRIED = 3

#: Violations that are listed one by one.
EXAMPLES = 20


@dataclass(slots=True)
class _Chain:
    """The segments of one CP and their results, in order."""

    segments: list[Segment]
    #: Tasks by the position of their segment.
    tasks: dict[int, ReplayTask] = field(default_factory=dict)
    results: dict[int, TaskResult] = field(default_factory=dict)

    def so_far(self) -> list[TaskResult]:
        """Results in order, up to the one that stopped before an Upgrade (E4): later ones were judged too early."""
        found = []
        for place in range(len(self.segments)):
            found.append(self.results[place])
            if found[-1].required_level is not None:
                break
        return found


class Audit:
    """One audit. A context manager: at its end its temporary files are removed, and without `out` the tables, too.

    `source`: the log (sources.py, kafka.py). `spark`: a session; None replays in this process. `out`: the folder for
    the tables and the report; it must be new, empty, or an earlier audit's. The new audit is written beside it and
    replaces it atomically when complete; until then the earlier one stays. `work`: a folder for temporary files; with
    `out`, all of Spark's executors must reach it. `tables`: False to only replay and compare. `records_per_task`: the
    shortest segment; None: by the number of records and cores.

    `world_type` is a seam for tests: the World to audit. The real one produces no violation but SNAPSHOT_DIFFERS; tests
    of the others use a World that is broken on purpose.
    """

    def __init__(
        self,
        source: AuditSource,
        *,
        spark: SparkSession | None = None,
        out: Path | None = None,
        work: Path | None = None,
        tables: bool = True,
        records_per_task: int | None = None,
        world_type: type[World] | None = None,
    ) -> None:
        self._source = source
        self._spark = spark
        self._runner: TaskRunner = InProcess() if spark is None else OnSpark(spark)
        self._tables = tables
        self._records_per_task = records_per_task
        self._world_type = world_type or DEFAULT_WORLD
        self._timings: dict[str, float] = {}
        if out is not None:
            check_folder(out)
        self._final = out
        self._scratch = FolderBeside(Path(tempfile.gettempdir()) if work is None else work, "kafka-marshal-audit-")
        self._work = self._scratch.path
        self._beside = None if out is None else FolderBeside.of(out)
        #: Where tables are written; never over an earlier audit's.
        self._out = self._work / "tables" if self._beside is None else self._beside.path
        self._opened: OpenedLog | None = None
        self._findings: Findings | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove temporary files."""
        self._scratch.drop()
        if self._beside is not None:
            self._beside.drop()

    def open(self) -> OpenedLog:
        """Convert the log into pieces, once. Raises what its source raises."""
        if self._opened is None:
            begun = time.perf_counter()
            folder = self._work / "log"
            folder.mkdir(parents=True)
            self._opened = self._source.open(self._runner, self._spark, folder)
            self._timings["read"] = time.perf_counter() - begun
        return self._opened

    def run(self, report: Callable[[Findings, Path], object] | None = None) -> Findings:
        """Audit the log, once. Tables are written and registered as Spark's views before it returns.

        report: called with the findings and the path for a page (`report.write_report`), which is published together
        with the tables.
        Raises AuditError if it failed, LogCutError if a log's beginning is gone and no snapshot replaces it, and what
        the source raises. Faults of the log are findings, not errors.
        """
        if self._findings is not None:
            return self._findings
        opened = self.open()
        begun = time.perf_counter()
        claims, plan, states = self._cut(opened)
        self._timings["plan"] = time.perf_counter() - begun
        begun = time.perf_counter()
        chains = self._replay(opened, plan, states)
        self._timings["replay"] = time.perf_counter() - begun
        begun = time.perf_counter()
        findings = self._conclude(opened, claims, plan, chains)
        self._timings["conclude"] = time.perf_counter() - begun
        self._findings = self._publish(findings, report)
        return self._findings

    def _publish(self, findings: Findings, report: Callable[[Findings, Path], object] | None) -> Findings:
        """Write the summary and the page beside the tables, and publish everything atomically."""
        if not self._tables:
            return findings
        if report is not None:
            report(findings, self._out / REPORT)
        if self._final is not None and self._beside is not None:
            findings = replace(findings, out=self._final, tables={name: self._final / name for name in TABLES})
        (self._out / SUMMARY).write_text(json.dumps(findings.summary(), indent=1) + "\n")
        if self._final is not None and self._beside is not None:
            self._beside.take_place(check_folder)
        if self._spark is not None:
            findings.register(self._spark)
        return findings

    # -- cutting ------------------------------------------------------------------------------------------------------

    def _cut(self, opened: OpenedLog) -> tuple[dict[int, Evidence], CutLog, dict[tuple[int, SnapshotDigest], str]]:
        """Segments, and files with their initial states."""
        records = opened.snapshots
        claims = {} if records is None else claims_of(records, opened.log.partitions)
        log = self._with_starts(opened.log, claims)
        states: dict[tuple[int, SnapshotDigest], str] = {}
        unusable: frozenset[tuple[int, SnapshotDigest]] = frozenset()
        while True:
            plan = cut(log, claims, self._runner.parallelism, unusable, self._records_per_task)
            wanted = {
                cp: [each.start for each in segments if each.start is not None and (cp, each.start) not in states]
                for cp, segments in plan.segments.items()
            }
            if records is not None:
                states |= extract(records, log.partitions, wanted, self._work)
            missing = {(cp, each) for cp, starts in wanted.items() for each in starts} - set(states)
            if not missing:
                return claims, plan, states
            unusable |= missing  # each time fewer snapshots are left

    def _with_starts(self, log: SourceLog, claims: dict[int, Evidence]) -> SourceLog:
        """A log that begins above offset 0 has a gap there if a replay from nothing agrees with a snapshot."""
        starts = dict(log.starts)
        for cp, claimed in claims.items():
            pieces = tuple(log.pieces.get(cp, ()))
            if not pieces or pieces[0].first == 0 or cp in starts:
                continue
            first = tuple(each for each in claimed.checkpoints if each.next_offset > pieces[0].first)[:_TRIED]
            if not first:
                continue
            end = first[-1].next_offset
            whole = Segment(cp, tuple(each for each in pieces if each.first < end), None, end, first)
            tried = run_task(replace(self._task(log, whole, 0, 0, None), out=None))
            if len(tried.differences) < tried.compared:
                starts[cp] = 0
        return replace(log, starts=starts)

    # -- replaying ----------------------------------------------------------------------------------------------------

    def _replay(
        self, opened: OpenedLog, plan: CutLog, states: dict[tuple[int, SnapshotDigest], str]
    ) -> dict[int, _Chain]:
        chains = {cp: _Chain(segments) for cp, segments in plan.segments.items()}
        tasks: list[ReplayTask] = []
        for chain in chains.values():
            for place, segment in enumerate(chain.segments):
                start = None if segment.start is None else states[segment.partition, segment.start]
                chain.tasks[place] = self._task(opened.log, segment, len(tasks), place, start)
                tasks.append(chain.tasks[place])
        number = 0
        while tasks:
            self._run(chains, tasks)
            number += len(tasks)
            corrected = [task for chain in chains.values() if (task := self._correction(chain)) is not None]
            tasks = [replace(task, number=number + place) for place, task in enumerate(corrected)]
        return chains

    def _task(self, log: SourceLog, segment: Segment, number: int, place: int, start: str | None) -> ReplayTask:
        out = str(self._out) if self._tables else None
        return ReplayTask(number, place, segment, log.partitions, start, out, str(self._work), self._world_type)

    def _run(self, chains: dict[int, _Chain], tasks: Sequence[ReplayTask]) -> None:
        """Run tasks, the longest first; results replace earlier ones, whose files are removed."""
        ordered = sorted(tasks, key=lambda task: -task.records)
        folder = self._work / f"run-{min(task.number for task in tasks)}"
        folder.mkdir()
        for task, result in zip(ordered, self._runner.map("replaying", run_task, ordered, folder), strict=True):
            chain = chains[task.segment.partition]
            before = chain.results.get(task.place)
            for name in () if before is None else before.files:
                (self._out / name).unlink(missing_ok=True)
            chain.tasks[task.place] = task
            chain.results[task.place] = result

    def _correction(self, chain: _Chain) -> ReplayTask | None:
        """The first segment that started from a wrong snapshot, as a task that starts from its predecessor's end.

        By induction: the first segment starts from a proven place. If such a segment ends in another digest than the
        next one started from, the snapshot between them is wrong, and so is everything concluded from it.
        """
        for place in range(len(chain.segments) - 1):
            result = chain.results[place]
            if result.required_level is not None:
                return None
            following = chain.tasks[place + 1]
            start = chain.segments[place + 1].start
            if start is None or result.digest == start.digest or following.start == result.end_state:
                continue
            return replace(following, start=result.end_state)
        return None

    # -- what follows -------------------------------------------------------------------------------------------------

    def _conclude(
        self, opened: OpenedLog, claims: dict[int, Evidence], plan: CutLog, chains: dict[int, _Chain]
    ) -> Findings:
        results = [result for chain in chains.values() for result in chain.so_far()]
        by_cp = {cp: chain.so_far() for cp, chain in chains.items()}
        lies = [*_lies(claims, chains), *changes(claims, results)]
        kinds = Counter(lie.kind for lie in lies)
        for result in results:
            kinds.update({str(kind): count for kind, count in result.violations.items()})
        if self._tables:
            self._write_rest(chains, results, lies)
        covered = vouching(opened.log, claims, by_cp)
        findings = Findings(
            source=self._source.name,
            topic=opened.log.topic,
            records=sum(result.records for result in results),
            violations=dict(kinds),
            partitions=[_partition_findings(cp, chains.get(cp), claims.get(cp)) for cp in range(opened.log.partitions)],
            notices=[
                *plan.notices,
                *_notices(claims),
                *_notices_of_records(results),
                *notices_of_offsets(by_cp),
                *covered.notices,
            ],
            unvouched=[*cuts(opened.log), *plan.unvouched, *covered.unvouched],
            tables={name: self._out / name for name in TABLES} if self._tables else {},
            out=self._out if self._tables else None,
            examples=lies[:EXAMPLES],
            peak_memory=max((result.peak_memory for result in results), default=0),
            timings=self._timings,
        )
        if self._tables:
            findings.add_examples(EXAMPLES)
        return findings

    def _write_rest(
        self, chains: dict[int, _Chain], results: Sequence[TaskResult], lies: Sequence[AuditViolation]
    ) -> None:
        """Write rows that no task could, and a file in each table, so that each exists with its columns."""
        unowned = {}
        whole: dict[str, list[Row]] = {name: [] for name in TABLES}
        for cp, chain in chains.items():
            stitched = stitch(chain.so_far())
            unowned[cp] = stitched.unowned
            for name, rows in stitched.rows.items():
                place = TABLES[name].get_field_index("partition")
                whole[name] += [(*row[:place], cp, *row[place:]) for row in rows]
        whole["violations"] = [lie.row() for lie in lies]
        kept = {name for result in results for name in result.files}
        files = TableFiles(self._out, "whole", None)
        for name, rows in whole.items():
            if name != "statistics":
                files.write(name, rows)
        kept |= set(files.close())
        self._sweep(kept)
        last = TableFiles(self._out, "whole", None)
        last.write("statistics", statistics_rows(self._out, results, unowned))
        last.close()

    def _sweep(self, kept: set[str]) -> None:
        """Remove files of tasks that were retried or whose segments do not count."""
        for table in TABLES:
            for path in (self._out / table).glob("*"):
                if f"{table}/{path.name}" not in kept:
                    path.unlink()


def _lies(claims: dict[int, Evidence], chains: dict[int, _Chain]) -> list[AuditViolation]:
    """Wrong snapshots, by CP and place."""
    found = []
    for cp, claimed in claims.items():
        found += [_lie(cp, each, None, f"its bytes don't match its digest {each.digest}") for each in claimed.broken]
    for cp, chain in chains.items():
        for result in chain.so_far():
            for difference in result.differences:
                why = f"it says {difference.checkpoint.digest}; the log replayed to there is {difference.digest}"
                if (start := chain.segments[0].start) is not None:
                    why += f" (from the snapshot at {start.next_offset} on, which nothing that is left can prove)"
                found.append(_lie(cp, difference.checkpoint, difference.log_time, why))
    return sorted(found, key=lambda lie: (lie.partition, lie.offset, lie.detail))


def _lie(partition: int, checkpoint: SnapshotDigest, time_ms: int | None, why: str) -> AuditViolation:
    where = f"the snapshot at next offset {checkpoint.next_offset}, stored at offset {checkpoint.place}"
    detail = f"{where} of partition {partition} of the log of snapshots: {why}"
    return AuditViolation(str(Breach.SNAPSHOT_DIFFERS), partition, checkpoint.next_offset, time_ms, detail)


def _partition_findings(cp: int, chain: _Chain | None, claims: Evidence | None) -> PartitionFindings:
    if chain is None:
        return PartitionFindings.empty(cp)
    results = chain.so_far()
    last, broken = results[-1], 0 if claims is None else len(claims.broken)
    return PartitionFindings(
        partition=cp,
        records=sum(result.records for result in results),
        next_offset=last.next_offset,
        log_time=last.log_time,
        level=last.level,
        digest=last.digest,
        segments=len(results),
        snapshots=sum(result.compared for result in results) + broken,
        snapshots_wrong=sum(len(result.differences) for result in results) + broken,
        vouched=vouched(claims, results),
        required_level=last.required_level,
    )


def _notices(claims: dict[int, Evidence]) -> list[str]:
    """Oddities of the snapshots topic that are no violations."""
    found = []
    for cp, claimed in sorted(claims.items()):
        if claimed.junk:
            found.append(f"partition {cp} of the log of snapshots: {claimed.junk} record(s) are no part of a snapshot")
        if claimed.unfinished:
            found.append(f"partition {cp} of the log of snapshots: {claimed.unfinished} snapshot(s) lack a part")
    return found


def _notices_of_records(results: Sequence[TaskResult]) -> list[str]:
    if any(result.records for result in results) and not any(result.accepted for result in results):
        return ["none of the records was accepted: is this a coordination log, and are its partitions all there?"]
    return []


def check_folder(out: Path) -> None:
    """Raise ConfigurationError unless an audit may replace this folder; nothing is changed.

    It may be missing, empty, or hold an earlier audit and nothing else.
    """
    refuse_url(out)
    nothing = "Nothing was written; name a new folder."
    place = out.resolve()
    if place.exists() and not place.is_dir():
        raise ConfigurationError(f"{out} is no folder. {nothing}")
    if place.is_mount() or Path.cwd().is_relative_to(place):
        what = "a mount point" if place.is_mount() else "the working directory, or above it"
        raise ConfigurationError(
            f"{out} is {what}: a new audit could not take its place at once. Nothing was written; name a folder in it."
        )
    for path in sorted(place.iterdir()) if place.exists() else ():
        foreign = _foreign(path)
        if foreign is not None:
            raise ConfigurationError(
                f"{out} holds something that is no audit ({str(foreign.relative_to(place))!r} …), and would be "
                f"replaced as a whole. {nothing}"
            )


def _foreign(path: Path) -> Path | None:
    """A file in this part of an earlier audit's folder that no audit wrote."""
    if path.name in TABLES and path.is_dir():
        return next((each for each in sorted(path.iterdir()) if not _TABLE_FILE.fullmatch(each.name)), None)
    return None if path.name in (SUMMARY, REPORT) and path.is_file() else path


# -- segments combined -----------------------------------------------------------------------------------------------

_TAKEOVERS = [name for name in TABLES["takeovers"].names if name != "partition"]
_TIME, _FROM, _UNOWNED = (_TAKEOVERS.index(name) for name in ("time", "from_client", "unowned_ms"))


@dataclass(slots=True)
class Stitched:
    """What no segment of one CP could produce alone."""

    #: Rows by table, without `partition`.
    rows: dict[str, list[Row]]
    #: Leases free at the log's end → for how long (ms of log time), if known.
    unowned: dict[LeaseKey, int]


def stitch(results: Iterable[TaskResult]) -> Stitched:
    """Combine the segments of one CP, which come in order."""
    ownership: list[Row] = []
    takeovers: list[Row] = []
    assignments: list[Row] = []
    ended_shares: list[Row] = []
    ended_holes: list[Row] = []
    now: dict[LeaseKey, Span] = {}
    pieces: dict[Place, list[PieceSpan]] = {}
    shares: dict[tuple[LeaseKey, int], int] = {}
    open_shares: list[WatchedShare] = []
    holes: dict[LeaseKey, list[OpenRun]] = {}
    log_time = 0
    for result in results:
        log_time = result.log_time
        ownership += [ownership_row(_whole(span, now)) for span in result.loose.ended]
        takeovers += [_from(row, now.get(row[:3])) for row in result.loose.takeovers]  # type: ignore[arg-type]
        now = {span.key: _whole(span, now) for span in result.loose.now}
        for end in result.loose.pieces_ended:
            parts = parts_of(end.span, pieces.get(end.place, ()))
            assignments += [assignment_row(end.place, part, end) for part in parts]
        pieces = _pieces_after(result, pieces)
        ended_shares += [share_row(_whole_share(share, shares)) for share in result.loose.shares_ended]
        open_shares = [_whole_share(share, shares) for share in result.loose.shares_now]
        for run_end in result.loose.holes_ended:
            parts_of_run = with_history(run_end.run, holes.get(run_end.key, ()))
            ended_holes += [hole_row(run_end.key, part, run_end) for part in parts_of_run]
        holes = {
            key: [part for run in runs for part in with_history(run, holes.get(key, ()))]
            for key, runs in result.loose.holes_now.items()
        }
        shares = {(share.key, share.epoch): share.since for share in open_shares}
    ended_shares += [share_row(share) for share in open_shares]
    ended_holes += [hole_row(key, run, None) for key, runs in holes.items() for run in runs]
    ownership += [ownership_row(span) for span in now.values() if span.held]
    owned = [(place, span) for place, spans in pieces.items() for span in spans if span.owned]
    assignments += [assignment_row(place, span, None) for place, span in owned]
    rows = {"ownership": ownership, "takeovers": takeovers, "assignments": assignments}
    rows |= {"shares": ended_shares, "holes": ended_holes}
    unowned = {key: log_time - span.since for key, span in now.items() if not span.held and span.since != BEFORE}
    return Stitched(rows, unowned)


def _whole(span: Span, before: Mapping[LeaseKey, Span]) -> Span:
    """A span, completed with how it began in an earlier segment."""
    known = before.get(span.key)
    if span.since != BEFORE or known is None or (known.held, known.epoch) != (span.held, span.epoch):
        return span
    names = (span.client_id, span.instance_id) if span.client_id else (known.client_id, known.instance_id)
    return replace(span, since=known.since, client_id=names[0], instance_id=names[1])


def _whole_share(share: WatchedShare, before: Mapping[tuple[LeaseKey, int], int]) -> WatchedShare:
    """A share, completed with when it began in an earlier segment. before: the log time, by lease and epoch."""
    since = before.get((share.key, share.epoch), BEFORE) if share.since == BEFORE else share.since
    return replace(share, since=since)


def _pieces_after(result: TaskResult, before: Mapping[Place, list[PieceSpan]]) -> dict[Place, list[PieceSpan]]:
    """The spans of pieces after a segment: its own, and unowned ones that it did not cover."""
    loose = result.loose
    found = {place: spans for place, spans in before.items() if place[0] not in loose.forgotten}
    for place, spans in loose.pieces_now.items():
        old = found.get(place, [])
        whole = [part for span in spans for part in parts_of(span, old)]
        found[place] = joined(sorted([*whole, *_uncovered(old, spans)]))
    return found


def _uncovered(old: Iterable[PieceSpan], new: list[PieceSpan]) -> Iterator[PieceSpan]:
    """The parts of unowned spans that no newer span covers."""
    for span in old:
        if span.owned:
            continue
        at = span.lo
        for each in new:
            if at < each.lo <= span.hi:
                yield span._replace(lo=at, hi=each.lo - 1)
            if each.lo <= span.hi and each.hi >= at:
                at = each.hi + 1
        if at <= span.hi:
            yield span._replace(lo=at)


def _from(row: Row, freed: Span | None) -> Row:
    """The row, completed with the lease's last holder in an earlier segment."""
    if freed is None or freed.held or freed.since == BEFORE:
        return row
    told = list(row)
    time = row[_TIME]
    assert isinstance(time, int)
    told[_FROM : _FROM + 2] = freed.client_id or None, freed.instance_id or None
    told[_UNOWNED] = time - freed.since
    return tuple(told)


_LEASE = ["partition", "group", "topic", "topic_partition"]


def statistics_rows(
    out: Path, results: Iterable[TaskResult], unowned: Mapping[int, Mapping[LeaseKey, int]]
) -> list[Row]:
    """All rows, with `partition`. `out`: the folder of the written tables."""
    rows: list[Row] = []
    open_gaps = {(cp, *key): ms for cp, gaps in unowned.items() for key, ms in gaps.items()}
    takeovers = table_at(out / "takeovers", "takeovers")
    for how, (name, column) in TAKEOVERS.items():
        found = takeovers.to_table(columns=[*_LEASE, column], filter=pc.field("how") == how).group_by(_LEASE)
        measured = found.aggregate([(column, each) for each in ("count", "sum", "min", "approximate_median", "max")])
        for row in measured.to_pylist():
            lease = tuple(row[each] for each in _LEASE)
            values = [row[f"{column}_{each}"] for each in ("count", "sum", "min", "approximate_median", "max")]
            rows.append((name, *lease, None, *values))
            if how == "handed over":
                gap = open_gaps.pop(lease, None)
                ms = values[1] or 0
                rows.append(_counted("unowned_ms", lease, values[0] + (gap is not None), ms + (gap or 0)))
    rows += [_counted("unowned_ms", lease, 1, gap) for lease, gap in open_gaps.items()]
    rows += _churn(out)
    rows += _codes(results)
    return sorted(rows, key=lambda row: tuple((value is not None, value) for value in row[:6]))


def _counted(name: str, lease: tuple[Any, ...], count: int, total: int | None = None) -> Row:
    return (name, *lease, None, count, total, None, None, None)


def _churn(out: Path) -> list[Row]:
    """Number of grants of each lease, and of its clients."""
    held = table_at(out / "ownership", "ownership").to_table(columns=[*_LEASE, "client"]).group_by(_LEASE)
    rows: list[Row] = []
    for row in held.aggregate([("client", "count"), ("client", "count_distinct")]).to_pylist():
        lease = tuple(row[each] for each in _LEASE)
        rows.append(_counted("tenures", lease, row["client_count"]))
        rows.append(_counted("owners", lease, row["client_count_distinct"]))
    return rows


def _codes(results: Iterable[TaskResult]) -> list[Row]:
    counts: dict[tuple[str, int, str], int] = {}
    for result in results:
        for name, found in (("accepted", result.accepted), ("rejected", result.rejected)):
            for code, count in found.items():
                counts[name, result.partition, code] = counts.get((name, result.partition, code), 0) + count
    return [
        (name, partition, None, None, None, code, count, None, None, None, None)
        for (name, partition, code), count in counts.items()
    ]
