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

from kafka_marshal.beside import file_beside
from kafka_marshal.pipeline.audit.findings import Findings, Violation
from kafka_marshal.pipeline.audit.page import TEMPLATE
from kafka_marshal.pipeline.audit.plots import Bar, Line, bars, histogram, lines
from kafka_marshal.visible import visible
from rationalizer.limits import MAX_KEY_HASH

__all__ = ["LogEnds", "write_report"]

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
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"lease": _lease_name, "time": time_text, "number": _number, "plain": _visible}
    wanted = None if group is None else pc.field("group") == group
    pictures = [
        _timeline(findings, wanted),
        _assignments(findings, wanted),
        _takeovers(findings, wanted),
        _lag(findings, log_ends, wanted),
    ]
    rebalances = findings.table("generations").to_table(filter=wanted)
    newest = rebalances.sort_by([("time", "descending"), ("generation", "descending")]).slice(0, _MOST_ROWS)
    statistics = findings.table("statistics").to_table()
    codes = _rows(statistics, ["rejected"], ["partition", "code", "count"])
    statistics = statistics if wanted is None else statistics.filter(wanted)
    waits = _rows(statistics, list(_WAITS), None)
    churn = _rows(statistics, ["tenures"], [*_LEASE, "count"])
    page = environment.from_string(TEMPLATE).render(
        findings=findings,
        group=group,
        wait_names=_WAITS,
        pictures=[picture for picture in pictures if picture is not None],
        rejected=codes,
        waits=waits[:_MOST_ROWS],
        waits_left=max(0, len(waits) - _MOST_ROWS),
        rebalances=newest.to_pylist(),
        rebalances_left=rebalances.num_rows - newest.num_rows,
        churn=churn[:_MOST_ROWS],
        churn_left=max(0, len(churn) - _MOST_ROWS),
        counts={name: findings.table(name).count_rows() for name in findings.tables},
    )
    with file_beside(path) as file:
        file.write(page.encode())
    return path


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


def _visible(text: object) -> str:
    """The text with invisible and direction-changing characters escaped."""
    return "–" if text is None else visible(str(text))


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


def _bars(
    findings: Findings, name: str, columns: list[str], wanted: pc.Expression | None, title: str, caption: str
) -> _Picture | None:
    known = pc.field("from_time").is_valid()
    table = findings.table(name).to_table(
        columns=[*columns, "client", "from_time", "to_time"], filter=known if wanted is None else known & wanted
    )
    if not table.num_rows:
        return None
    counted = table.group_by(columns).aggregate([("client", "count")]).sort_by([("client_count", "descending")])
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
        "How long it took until a partition had its next holder; each picture has a scale of its own. A silent holder "
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
