"""The page of an audit: the verdict, then its basis. It opens without a network.

It is made from the tables alone. The amount drawn is bounded, however long the log; the page says what it omits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from kafka_marshal.observe.report import Report
from kafka_marshal.pipeline.audit.findings import Findings, Violation
from kafka_marshal.pipeline.audit.plots import Bar, Line, bars, histogram, lines
from rationalizer.holes import NO_KEY
from rationalizer.limits import MAX_KEY_HASH

_LEASE: Final = ["group", "topic", "topic_partition"]

#: Leases and tenures in the chart of tenures.
_MOST_LEASES, _MOST_BARS = 48, 4_000

#: Lines in the chart of lag, and moments at which it is computed.
_MOST_LINES, _TIMES = 8, 120

_MOST_ROWS = 40

#: Names in the table of statistics → texts of the page.
_WAITS: Final = {
    "takeover_ms": "taken over from a silent holder, since its last heartbeat",
    "handover_ms": "handed over, since the release",
    "restart_ms": "taken over by a restarted worker, since the old one's last heartbeat",
    "unowned_ms": "without a holder",
}

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

#: End offsets of data partitions at some times (ms): {(topic, partition): [end at each time]}. Some may be missing.
LogEnds = Callable[[Sequence[tuple[str, int]], Sequence[int]], Mapping[tuple[str, int], Sequence[int]]]


@dataclass(frozen=True, slots=True)
class _Picture:
    title: str
    image: str
    caption: str


def write_report(findings: Findings, path: Path, log_ends: LogEnds | None = None, group: str | None = None) -> Path:
    """Write the page; the tables of `findings` must exist. `log_ends`: if the data's end offsets are known.

    group: charts and lists show only this group's leases. The audit is of the whole log nevertheless.
    """
    wanted = None if group is None else pc.field("group") == group
    report = Report(f"Audit: {findings.verdict}", findings.verdict, good=findings.is_clean)
    report.paragraph(
        f"{findings.source}, topic {findings.topic}, {len(findings.partitions)} partitions. The whole log was replayed "
        "by the rationalizer that every worker runs, and each of its conclusions was held against what the log had "
        "said before."
    )
    if findings.unvouched:
        report.heading("Not vouched for")
        report.bullets(findings.unvouched)
    if findings.notices:
        report.heading("Good to know")
        report.bullets(findings.notices)
    _add_violations(report, findings)
    if group is not None:
        report.note(
            f"Pictures and lists of partitions below show the group {group} only; the verdict is of the whole log."
        )
    for picture in (
        _timeline(findings, wanted),
        _assignments(findings, wanted),
        _shares(findings, wanted),
        _takeovers(findings, wanted),
        _lag(findings, log_ends, wanted),
        _open_messages(findings, wanted),
    ):
        if picture is not None:
            report.heading(picture.title)
            report.picture(picture.image, picture.title, picture.caption)
    _add_partitions(report, findings)
    statistics = findings.table("statistics").to_table()
    codes = _rows(statistics, ["rejected"], ["partition", "code", "count"])
    statistics = statistics if wanted is None else statistics.filter(wanted)
    _add_waits(report, _rows(statistics, list(_WAITS), None))
    _add_rebalances(report, findings.table("generations").to_table(filter=wanted))
    _add_set_aside(report, findings.table("holes"), wanted)
    _add_tenures(report, _rows(statistics, ["tenures"], [*_LEASE, "count"]))
    _add_refused(report, codes)
    report.heading("Tables")
    report.paragraph("Parquet beside this page, for Spark, pandas or any other reader:")
    report.bullets(f"{name}/, {_number(findings.table(name).count_rows())} rows" for name in findings.tables)
    report.write(path)
    return path


def _add_violations(report: Report, findings: Findings) -> None:
    if not findings.examples:
        return
    report.heading("Violations")
    columns = ("kind", "partition", "offset", "log time, UTC", "partition", "holder until then", "what")
    rows = [
        (
            each.kind,
            each.partition,
            each.offset,
            time_text(each.time_ms),
            "" if each.group is None else _lease_name(each),
            "" if each.client is None else f"{each.client}/{each.instance}, {each.epoch}",
            each.detail,
        )
        for each in findings.examples
    ]
    report.table(columns, rows, {1, 2})
    if findings.violation_count > len(rows):
        report.note(f"The first {len(rows)} of {_number(findings.violation_count)}; all are in the table violations.")


def _add_partitions(report: Report, findings: Findings) -> None:
    report.heading("Partitions of the log")
    columns = (
        "partition",
        "records",
        "next offset",
        "log time, UTC",
        "digest",
        "segments",
        "snapshots compared",
        "wrong",
    )
    rows = [
        (
            each.partition,
            _number(each.records),
            each.next_offset,
            time_text(each.log_time),
            each.digest,
            each.segments,
            each.snapshots,
            each.snapshots_wrong,
        )
        for each in findings.partitions
    ]
    report.table((*columns, "wrong"), rows, {0, 1, 2, 5, 6, 7})
    report.note(
        "A digest is that of the state: every replica that has read as far has the same. kafka-marshal replay --state "
        "prints it for a dump."
    )


def _add_waits(report: Report, waits: Sequence[Mapping[str, Any]]) -> None:
    if waits:
        report.heading("How long each partition waited for its next holder")
        columns = ("how it came to it", "partition", "count", "min, ms", "median, ms", "max, ms", "total, ms")
        rows = [
            (
                _WAITS[row["name"]],
                _lease_name(row),
                *(_number(row[name]) for name in ("count", "min", "median", "max", "total")),
            )
            for row in waits[:_MOST_ROWS]
        ]
        report.table(columns, rows, {2, 3, 4, 5, 6})
        _add_left(report, len(waits), "statistics")


def _add_rebalances(report: Report, found: pa.Table) -> None:
    if found.num_rows:
        report.heading("Rebalances of coordinated groups")
        columns = ("log time, UTC", "group", "generation", "reason", "client", "found dead", "members")
        newest = found.sort_by([("time", "descending"), ("generation", "descending")]).slice(0, _MOST_ROWS)
        rows = [
            (
                time_text(row["time"]),
                *(row[name] for name in ("group", "generation", "reason", "client")),
                ", ".join(row["died"]),
                row["members"],
                _number(row["moved"]),
                _number(row["revoked"]),
            )
            for row in newest.to_pylist()
        ]
        report.table((*columns, "moved at once", "revoked"), rows, {2, 6, 7, 8})
        report.note(
            "The newest first. Moved at once: pieces whose owner had left, died or was replaced. Revoked: pieces whose "
            "owner finished its work first and then released them. All others stayed."
        )
        _add_left(report, found.num_rows, "generations")


def _add_tenures(report: Report, tenures: Sequence[Mapping[str, Any]]) -> None:
    if tenures:
        report.heading("How often each partition got a holder")
        rows = [(_lease_name(row), _number(row["count"])) for row in tenures[:_MOST_ROWS]]
        report.table(("partition", "times"), rows, {1})
        _add_left(report, len(tenures), "statistics")


def _add_set_aside(report: Report, holes: ds.Dataset, wanted: pc.Expression | None) -> None:
    """Open messages that an operator or a reposition had to do with, or that are lost; batches as such are too many."""
    unusual = (pc.field("parks") > 0) | pc.field("ended").isin(["discarded", "repositioned", "forgotten", "lost"])
    found = holes.to_table(filter=unusual if wanted is None else unusual & wanted)
    if not found.num_rows:
        return
    report.heading("Messages that were set aside, discarded, or lost")
    columns = (
        "open since, UTC",
        "until",
        "partition",
        "offsets",
        "tries",
        "parks",
        "redrives",
        "reason",
        "last had by",
    )
    newest = found.sort_by([("from_time", "descending"), ("first", "ascending")]).slice(0, _MOST_ROWS)
    rows = [
        (
            time_text(row["from_time"]),
            time_text(row["to_time"]),
            _lease_name(row),
            f"{row['first']}" if row["first"] == row["last"] else f"{row['first']}-{row['last']}",
            *(row[name] for name in ("tries", "parks", "redrives")),
            row["reason"] or "–",
            row["client"] or "–",
            row["ended"],
        )
        for row in newest.to_pylist()
    ]
    report.table((*columns, "now"), rows, {4, 5, 6})
    report.note("The newest first. Tries are those that the log has; done: settled later by a worker, after a redrive.")
    _add_left(report, found.num_rows, "holes")


def _add_refused(report: Report, codes: Sequence[Mapping[str, Any]]) -> None:
    if codes:
        report.heading("Requests that the log refused")
        rows = [(row["partition"], row["code"], _number(row["count"])) for row in codes]
        report.table(("partition", "code", "records"), rows, {0, 2})
        report.note(
            "A refusal is the protocol at work: a request that comes too late changes nothing. docs/protocol explains "
            "the codes."
        )


def _add_left(report: Report, rows: int, table: str) -> None:
    if rows > _MOST_ROWS:
        report.note(f"{_number(rows - _MOST_ROWS)} more are in the table {table}.")


def time_text(time_ms: int | None) -> str:
    """UTC to the millisecond; the plain number beyond the calendar."""
    if time_ms is None:
        return "–"
    try:
        return (_EPOCH + timedelta(milliseconds=time_ms)).isoformat(sep=" ", timespec="milliseconds")[:23]
    except OverflowError:
        return f"{time_ms} ms"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _rows(statistics: pa.Table, names: Sequence[str], columns: list[str] | None) -> list[dict[str, Any]]:
    """Rows of `statistics`, largest counts first."""
    found = statistics.filter(pc.field("name").isin(names))
    found = found.sort_by([("count", "descending"), ("partition", "ascending")])
    rows: list[dict[str, Any]] = (found if columns is None else found.select(columns)).to_pylist()
    return rows


def _lease_name(row: Mapping[str, Any] | Violation) -> str:
    if isinstance(row, Violation):
        return row.group or "" if row.topic is None else f"{row.group}: {row.topic}/{row.topic_partition}"
    name = f"{row['group']}: {row['topic']}/{row['topic_partition']}"
    if row.get("lo", 0) == 0 and row.get("hi", MAX_KEY_HASH) == MAX_KEY_HASH:
        return name
    if row["lo"] == NO_KEY:
        return f"{name} by batches, {row['client']}"
    share = [f"{100 * key / MAX_KEY_HASH:.3g}" for key in (row["lo"], row["hi"])]
    return f"{name} keys {share[0]}-{share[1]} %"


def _timeline(findings: Findings, wanted: pc.Expression | None) -> _Picture | None:
    return _bars(
        findings,
        "ownership",
        _LEASE,
        wanted,
        "Who held which partition when",
        "Every bar is one worker's time with one partition without a break (one epoch), by the broker's clock.",
    )


def _assignments(findings: Findings, wanted: pc.Expression | None) -> _Picture | None:
    return _bars(
        findings,
        "assignments",
        [*_LEASE, "lo", "hi"],
        wanted,
        "Which member of a coordinated group owned which partition when",
        "Every bar is one member's time with one partition, or the keys of one, under one fencing token.",
    )


def _shares(findings: Findings, wanted: pc.Expression | None) -> _Picture | None:
    return _bars(
        findings,
        "shares",
        [*_LEASE, "lo", "hi", "client"],
        wanted,
        "Who shared which partition when",
        "Every bar is one worker's share of one partition, by batches or of some keys.",
    )


def _bars(
    findings: Findings, name: str, columns: list[str], wanted: pc.Expression | None, title: str, caption: str
) -> _Picture | None:
    known = pc.field("from_time").is_valid()
    table = findings.table(name).to_table(
        columns=list(dict.fromkeys([*columns, "client", "from_time", "to_time"])),
        filter=known if wanted is None else known & wanted,
    )
    for key in {"lo", "hi"}.intersection(columns):  # a join finds no nulls
        table = table.set_column(table.schema.get_field_index(key), key, pc.fill_null(table[key], NO_KEY))
    if not table.num_rows:
        return None
    counted = table.group_by(columns).aggregate([("from_time", "count")]).sort_by([("from_time_count", "descending")])
    shown = counted.slice(0, _MOST_LEASES).select(columns)
    rows = table.join(shown, keys=columns, join_type="inner").sort_by([(each, "ascending") for each in columns])
    end = max(each.log_time for each in findings.partitions)
    found = [
        Bar(_lease_name(row), row["client"], row["from_time"], max(row["from_time"], row["to_time"] or end))
        for row in rows.slice(0, _MOST_BARS).to_pylist()
    ]
    if counted.num_rows > _MOST_LEASES:
        caption += f" The {_MOST_LEASES} of {counted.num_rows} that changed hands most often."
    if rows.num_rows > _MOST_BARS:
        caption += f" {_MOST_BARS:,} of {rows.num_rows:,} bars; all are in the table {name}."
    return _Picture(title, bars(found), caption)


def _takeovers(findings: Findings, wanted: pc.Expression | None) -> _Picture | None:
    table = findings.table("takeovers").to_table(columns=["how", "silent_ms", "unowned_ms"], filter=wanted)
    groups = []
    for how, column, name in (
        ("handed over", "unowned_ms", "Handed over: from the release to the next holder"),
        ("replaced", "silent_ms", "Taken over from a silent holder: from its last heartbeat to the next holder"),
        ("restarted", "silent_ms", "Taken over by a restarted worker: from the old one's last heartbeat"),
    ):
        values = table.filter(pc.field("how") == how)[column].drop_null().to_pylist()
        if values:
            groups.append((name, values))
    if not groups:
        return None
    caption = (
        "How long it took until a partition had its next holder; each chart has its own scale. A silent holder "
        "keeps its partitions for two of its heartbeat intervals."
    )
    title = "How long partitions waited for their next holder"
    return _Picture(title, histogram(groups, "time until the next holder"), caption)


def _lag(findings: Findings, log_ends: LogEnds | None, wanted: pc.Expression | None) -> _Picture | None:
    columns = [*_LEASE, "time", "stable"]
    progress = findings.table("progress")
    span = progress.to_table(columns=["time"], filter=wanted)["time"]
    if not len(span):
        return None
    limits = pc.min_max(span).as_py()
    begin, end = limits["min"], limits["max"]
    width = max(1, -(-(end - begin + 1) // _TIMES))
    steps: dict[tuple[str, str, int], dict[int, int]] = {}
    for batch in progress.to_batches(columns=columns, filter=wanted):
        bucket = pc.divide(pc.subtract(batch.column("time"), begin), width)
        table = pa.table({**{name: batch.column(name) for name in columns}, "bucket": bucket})
        latest = table.group_by([*_LEASE, "bucket"], use_threads=False).aggregate([("stable", "last")])
        for row in latest.to_pylist():
            lease = (row["group"], row["topic"], row["topic_partition"])
            steps.setdefault(lease, {})[row["bucket"]] = row["stable_last"]
    times = [begin + width * (number + 1) for number in range(_TIMES)]
    partitions = sorted({(topic, partition) for _, topic, partition in steps})
    ends = log_ends(partitions, times) if log_ends is not None else None
    lost = _lost(steps, ends)
    found = _lag_of_groups({lease: known for lease, known in steps.items() if lease not in lost}, times, ends)
    if not found:
        return None
    largest = sorted(found, key=lambda line: -max(value for _, value in line.points))[:_MOST_LINES]
    if ends is None:
        title, ylabel = "How much was still to do", "messages still to do"
        caption = (
            "Per group, over all of its partitions: what was done later in this log, and was not yet done then. (How "
            "far the data's own log reached is not known to a dump.)"
        )
    else:
        title, ylabel = "How far groups were behind", "messages behind"
        caption = "Per group, over all of its partitions: the end of the data's log at that time, less what was done."
    if lost:
        caption += (
            f" Left out: {', '.join(f'{group}: {topic}/{partition}' for group, topic, partition in sorted(lost)[:8])}, "
            f"{len(lost)} in all, whose position lies beyond the end of the log that is there (position lost)."
        )
    return _Picture(title, lines(largest, ylabel), caption)


def _open_messages(findings: Findings, wanted: pc.Expression | None) -> _Picture | None:
    """Per group, the messages that were open at some times: of workers' batches, waiting for a try, or set aside."""
    holes = findings.table("holes")
    ends = holes.to_table(columns=["from_time", "to_time"], filter=wanted)
    begin = pc.min(ends["from_time"]).as_py()
    if begin is None:
        return None
    end = max(each.log_time for each in findings.partitions)
    width = max(1, -(-(end - begin + 1) // _TIMES))
    changes: dict[str, list[int]] = {}
    for batch in holes.to_batches(columns=["group", "first", "last", "from_time", "to_time"], filter=wanted):
        amounts = pc.add(pc.subtract(batch.column("last"), batch.column("first")), 1)
        for name, sign in (("from_time", 1), ("to_time", -1)):
            at = batch.column(name) if sign < 0 else pc.fill_null(batch.column(name), begin)
            bucket = pc.divide(pc.subtract(at, begin), width)
            table = pa.table({"group": batch.column("group"), "bucket": bucket, "amount": amounts})
            summed = table.filter(pc.field("bucket").is_valid()).group_by(["group", "bucket"])
            for row in summed.aggregate([("amount", "sum")]).to_pylist():
                change = changes.setdefault(row["group"], [0] * (_TIMES + 1))
                change[min(max(row["bucket"], 0), _TIMES)] += sign * row["amount_sum"]
    found = [
        Line(group, [(begin + width * (at + 1), float(sum(change[: at + 1]))) for at in range(_TIMES)])
        for group, change in sorted(changes.items())
    ]
    largest = sorted(found, key=lambda line: -max(value for _, value in line.points))[:_MOST_LINES]
    caption = (
        "Per group: messages in a worker's batch, that waited for their next try, or that were set aside. A line that "
        "stays up is of messages that are never settled: kafka-marshal open-messages lists them."
    )
    return _Picture("How many messages were open", lines(largest, "open messages"), caption)


def _lost(
    steps: Mapping[tuple[str, str, int], Mapping[int, int]], ends: Mapping[tuple[str, int], Sequence[int]] | None
) -> set[tuple[str, str, int]]:
    """Leases whose last position is outside the data's present log."""
    return {
        lease
        for lease, known in steps.items()
        if ends is not None and lease[1:] in ends and known[max(known)] >= ends[lease[1:]][-1]
    }


def _lag_of_groups(
    steps: Mapping[tuple[str, str, int], Mapping[int, int]],
    times: Sequence[int],
    ends: Mapping[tuple[str, int], Sequence[int]] | None,
) -> list[Line]:
    """Offsets not done at each of the times, as a sum for each group."""
    groups: dict[str, list[float]] = {}
    for (group, topic, partition), known in sorted(steps.items()):
        if ends is None:
            end = [max(known.values()) + 1] * len(times)
        elif (topic, partition) in ends:
            end = list(ends[topic, partition])
        else:
            continue
        total = groups.setdefault(group, [0.0] * len(times))
        # Before its first report, a partition counts from where that report began.
        done = known[min(known)] + 1
        for number in range(len(times)):
            done = known.get(number, done - 1) + 1
            total[number] += max(0, end[number] - done)
    return [Line(group, list(zip(times, total, strict=True))) for group, total in groups.items()]
