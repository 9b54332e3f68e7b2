"""The page of an audit: the verdict, then its basis. It opens without a network.

It is made from the tables alone. The amount drawn is bounded, however long the log; the page says what it omits.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from kafka_marshal.observe.report import ReportPage
from kafka_marshal.pipeline.audit.files import TAKEOVERS
from kafka_marshal.pipeline.audit.findings import Findings
from rationalizer.holes import NO_KEY
from rationalizer.limits import MAX_KEY_HASH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Colours that colour-blind people can distinguish, too (Okabe and Ito).
_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#7f7f7f")

_LONGEST_NAME = 38

_DAY_MS = 86_400_000

#: The end of the year 9999, the last of calendars.
_LAST_DAY_MS = 253_402_300_799_999

#: Characters in the legend for owners that share a colour.
_LONGEST_LINE: Final = 40

#: Characters below are Latin, without combining marks.
_FIRST_FOREIGN: Final = "\u0250"

#: (seconds, unit): the unit of a span of at most 2,000 ms, or else of at most 200 units.
_UNITS: Final = ((0.001, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h"), (86_400.0, "d"))


@dataclass(frozen=True, slots=True)
class Bar:
    """One holder's tenure of one lease, in ms of log time."""

    lease: str
    owner: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Line:
    """Values over time: (ms of log time, value), ascending."""

    name: str
    points: Sequence[tuple[int, float]]


def bars(found: Sequence[Bar]) -> str:
    """Chart of tenures: a row for each lease, a colour for each owner."""
    leases = list(dict.fromkeys(bar.lease for bar in found))
    owners = list(dict.fromkeys(bar.owner for bar in found))
    begin, end = min(bar.start for bar in found), max(bar.end for bar in found)
    figure, axes = _figure(1.2 + 0.26 * len(leases))
    clock = _Clock(axes, begin, end)
    for colour_number in range(min(len(_COLOURS), len(owners))):
        same = owners[colour_number :: len(_COLOURS)]
        mine = [bar for bar in found if bar.owner in same]
        axes.barh(
            [leases.index(bar.lease) for bar in mine],
            [clock.width(max(bar.end - bar.start, (end - begin) / 2000)) for bar in mine],
            left=[clock.place(bar.start) for bar in mine],
            height=0.7,
            color=_COLOURS[colour_number],
            edgecolor="white",
            linewidth=0.4,
            label=_labels(same),
        )
    axes.set_yticks(range(len(leases)))
    axes.set_yticklabels([_plain(lease) for lease in leases], parse_math=False)
    axes.invert_yaxis()
    clock.name_axis()
    _legend(axes, len(owners))
    return _png(figure)


def histogram(groups: Sequence[tuple[str, Sequence[float]]], xlabel: str) -> str:
    """Histograms of durations in ms. Each group has its own scale: they differ a thousandfold."""
    from matplotlib.ticker import MaxNLocator

    figure, rows = _figure(0.6 + 2.1 * len(groups), len(groups))
    for axes, (name, values), colour in zip(rows, groups, _COLOURS, strict=False):
        scale, unit = _unit(max(values))
        axes.hist([value / scale for value in values], bins=40, color=colour)
        axes.set_title(f"{name} ({len(values):,})", loc="left", fontsize="medium", parse_math=False)
        axes.set_xlim(left=0)
        axes.set_xlabel(f"{xlabel}, {unit}")
        axes.set_ylabel("how often")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    return _png(figure)


def lines(found: Sequence[Line], ylabel: str) -> str:
    """Values over log time."""
    begin = min(line.points[0][0] for line in found)
    end = max(line.points[-1][0] for line in found)
    figure, axes = _figure(3.4)
    clock = _Clock(axes, begin, end)
    for number, line in enumerate(found):
        axes.step(
            [clock.place(time) for time, _ in line.points],
            [value for _, value in line.points],
            where="post",
            color=_COLOURS[number % len(_COLOURS)],
            label=_label(line.name),
            linewidth=1.4,
        )
    clock.name_axis()
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    _legend(axes, len(found))
    return _png(figure)


class _Clock:
    """The time axis: UTC, or plain durations beyond the calendar."""

    def __init__(self, axes: Axes, begin: int, end: int) -> None:
        self._axes = axes
        self._begin = begin
        self._is_calendar = 0 <= begin < end <= _LAST_DAY_MS
        self._scale, self._unit = _unit(end - begin)

    def place(self, time_ms: int) -> float:
        """Where a time lies."""
        return time_ms / _DAY_MS if self._is_calendar else (time_ms - self._begin) / self._scale

    def width(self, span_ms: float) -> float:
        """How long a span is."""
        return span_ms / (_DAY_MS if self._is_calendar else self._scale)

    def name_axis(self) -> None:
        """Write the axis label."""
        if not self._is_calendar:
            self._axes.set_xlabel(f"since the first, {self._unit}")
            return
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

        locator = AutoDateLocator(tz="UTC")  # type: ignore[no-untyped-call]
        self._axes.xaxis.set_major_locator(locator)
        formatter = ConciseDateFormatter(locator, tz="UTC")  # type: ignore[no-untyped-call]
        formatter.formats[4:] = formatter.zero_formats[4:] = ["%H:%M:%S", "%H:%M:%S.%f"]
        self._axes.xaxis.set_major_formatter(formatter)
        self._axes.set_xlabel("clock time, UTC")


def _unit(span_ms: float) -> tuple[float, str]:
    """Length in ms and name of a unit that suits the span."""
    for seconds, name in _UNITS:
        if span_ms <= (2_000 if name == "ms" else 200_000 * seconds) or name == "d":
            return max(1.0, seconds * 1000), name
    raise AssertionError("the last unit fits everything")


def _figure(height: float, rows: int = 0) -> tuple[Figure, Any]:
    """A figure and its axes; a list of axes if `rows` is given."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, height), dpi=110, layout="constrained")
    made = figure.subplots(max(1, rows), squeeze=False)
    for axes in made[:, 0]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#e5e5e5", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, list(made[:, 0]) if rows else made[0, 0]


def _legend(axes: Axes, entries: int) -> None:
    legend = axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")
    for text in legend.get_texts():
        text.set_parse_math(False)
    if entries > len(_COLOURS):
        legend.set_title(f"{entries} names, {len(_COLOURS)} colours:\nthose in one line share one")
        legend.get_title().set_fontsize("small")


def _labels(names: Sequence[str]) -> str:
    """Names that share a colour, as far as there is room."""
    named = [_label(names[0])]
    for name in names[1:]:
        if len(", ".join([*named, _label(name)])) > _LONGEST_LINE:
            break
        named.append(_label(name))
    more = f" and {len(names) - len(named)} more" if len(names) > len(named) else ""
    return ", ".join(named) + more


def _plain(name: str) -> str:
    """Escape characters that the font lacks or that don't run from left to right, so that nothing is hidden."""
    plain = "".join(c if c.isprintable() and c < _FIRST_FOREIGN else c.encode("unicode_escape").decode() for c in name)
    return plain if len(plain) <= _LONGEST_NAME else f"{plain[: _LONGEST_NAME - 3]}..."


def _label(name: str) -> str:
    """A label for a legend, which would omit a name that begins with an underscore."""
    return _plain(name) if not name.startswith("_") else f" {_plain(name)}"


def _png(figure: Any) -> str:
    """The figure as a data URL."""
    from matplotlib import rc_context

    with io.BytesIO() as file, rc_context({"savefig.facecolor": "white"}):
        figure.savefig(file, format="png")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


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

#: A row of a table, and the columns of one on the page: title, a row's field or what to show of it, whether a number.
_Row = Mapping[str, Any]
_Columns = tuple[tuple[str, str | Callable[[_Row], object], bool], ...]

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
    report = ReportPage(f"Audit: {findings.verdict}", findings.verdict, good=findings.is_clean)
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
        *(_tenures(findings, name, wanted) for name in _TENURES),
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


def _add_violations(report: ReportPage, findings: Findings) -> None:
    if not findings.examples:
        return
    columns: _Columns = (
        ("kind", "kind", False),
        ("partition", "partition", True),
        ("offset", "offset", True),
        ("log time, UTC", lambda row: time_text(row["time_ms"]), False),
        ("partition", _lease_name, False),
        ("holder until then", _holder, False),
        ("what", "detail", False),
    )
    _add_table(report, "Violations", columns, list(map(asdict, findings.examples)))
    if (count := findings.violation_count) > (shown := len(findings.examples)):
        report.note(f"The first {shown} of {_number(count)}; all are in the table violations.")


def _holder(row: _Row) -> str:
    return "" if row["client"] is None else f"{row['client']}/{row['instance']}, {row['epoch']}"


def _add_partitions(report: ReportPage, findings: Findings) -> None:
    columns: _Columns = (
        ("partition", "partition", True),
        ("records", _count_of("records"), True),
        ("next offset", "next_offset", True),
        ("log time, UTC", lambda row: time_text(row["log_time"]), False),
        ("digest", "digest", False),
        ("segments", "segments", True),
        ("snapshots compared", "snapshots", True),
        ("wrong", "snapshots_wrong", True),
    )
    _add_table(report, "Partitions of the log", columns, list(map(asdict, findings.partitions)))
    report.note(
        "A digest is that of the state: every replica that has read as far has the same. kafka-marshal replay --state "
        "prints it for a dump."
    )


def _add_waits(report: ReportPage, waits: Sequence[_Row]) -> None:
    columns: _Columns = (
        ("how it came to it", lambda row: _WAITS[row["name"]], False),
        ("partition", _lease_name, False),
        ("count", _count_of("count"), True),
        *((f"{name}, ms", _count_of(name), True) for name in ("min", "median", "max", "total")),
    )
    if waits:
        heading = "How long each partition waited for its next holder"
        _add_table(report, heading, columns, waits[:_MOST_ROWS])
        _add_left(report, len(waits), "statistics")


def _add_rebalances(report: ReportPage, found: pa.Table) -> None:
    columns: _Columns = (
        ("log time, UTC", lambda row: time_text(row["time"]), False),
        ("group", "group", False),
        ("generation", "generation", True),
        ("reason", "reason", False),
        ("client", "client", False),
        ("found dead", lambda row: ", ".join(row["died"]), False),
        ("members", "members", True),
        ("moved at once", _count_of("moved"), True),
        ("revoked", _count_of("revoked"), True),
    )
    if found.num_rows:
        newest = found.sort_by([("time", "descending"), ("generation", "descending")]).slice(0, _MOST_ROWS)
        _add_table(report, "Rebalances of coordinated groups", columns, newest.to_pylist())
        report.note(
            "The newest first. Moved at once: pieces whose owner had left, died or was replaced. Revoked: pieces whose "
            "owner finished its work first and then released them. All others stayed."
        )
        _add_left(report, found.num_rows, "generations")


def _add_tenures(report: ReportPage, tenures: Sequence[_Row]) -> None:
    columns: _Columns = (("partition", _lease_name, False), ("times", _count_of("count"), True))
    if tenures:
        _add_table(report, "How often each partition got a holder", columns, tenures[:_MOST_ROWS])
        _add_left(report, len(tenures), "statistics")


def _add_set_aside(report: ReportPage, holes: ds.Dataset, wanted: pc.Expression | None) -> None:
    """Open messages that an operator or a reposition had to do with, or that are lost; batches as such are too many."""
    unusual = pc.field("ended").isin(["discarded", "repositioned", "forgotten", "lost"])
    unusual = unusual | (pc.field("parks") > 0) | pc.field("redone_by").is_valid()
    found = holes.to_table(filter=unusual if wanted is None else unusual & wanted)
    if not found.num_rows:
        return
    columns: _Columns = (
        ("open since, UTC", lambda row: time_text(row["from_time"]), False),
        ("until", lambda row: time_text(row["to_time"]), False),
        ("partition", _lease_name, False),
        ("offsets", _offsets, False),
        *((name, name, True) for name in ("tries", "parks", "redrives")),
        ("reason", lambda row: row["reason"] or "–", False),
        ("opened again by", lambda row: row["redone_by"] or "–", False),
        ("last had by", lambda row: row["client"] or "–", False),
        ("now", "ended", False),
    )
    newest = found.sort_by([("from_time", "descending"), ("first", "ascending")]).slice(0, _MOST_ROWS)
    _add_table(report, "Messages that were set aside, opened again, discarded, or lost", columns, newest.to_pylist())
    report.note(
        "The newest first. Tries are those that the log has; done: settled later by a worker, after a redrive. Opened "
        "again by: they were done, and an operator had them done again (kafka-marshal redo)."
    )
    _add_left(report, found.num_rows, "holes")


def _offsets(row: _Row) -> str:
    return f"{row['first']}" if row["first"] == row["last"] else f"{row['first']}-{row['last']}"


def _add_refused(report: ReportPage, codes: Sequence[_Row]) -> None:
    columns: _Columns = (
        ("partition", "partition", True),
        ("code", "code", False),
        ("records", _count_of("count"), True),
    )
    if codes:
        _add_table(report, "Requests that the log refused", columns, codes)
        report.note(
            "A refusal is the protocol at work: a request that comes too late changes nothing. docs/protocol explains "
            "the codes."
        )


def _add_table(report: ReportPage, heading: str, columns: _Columns, rows: Sequence[_Row]) -> None:
    report.heading(heading)
    report.table(
        [title for title, _, _ in columns],
        [[row[cell] if isinstance(cell, str) else cell(row) for _, cell, _ in columns] for row in rows],
        {place for place, (_, _, is_number) in enumerate(columns) if is_number},
    )


def _add_left(report: ReportPage, rows: int, table: str) -> None:
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


def _count_of(name: str) -> Callable[[_Row], str]:
    return lambda row: _number(row[name])


def _rows(statistics: pa.Table, names: Sequence[str], columns: list[str] | None) -> list[dict[str, Any]]:
    """Rows of `statistics`, largest counts first."""
    found = statistics.filter(pc.field("name").isin(names))
    found = found.sort_by([("count", "descending"), ("partition", "ascending")])
    rows: list[dict[str, Any]] = (found if columns is None else found.select(columns)).to_pylist()
    return rows


def _lease_name(row: _Row) -> str:
    if row["topic"] is None:
        return row["group"] or ""
    name = f"{row['group']}: {row['topic']}/{row['topic_partition']}"
    if row.get("lo", 0) == 0 and row.get("hi", MAX_KEY_HASH) == MAX_KEY_HASH:
        return name
    if row["lo"] == NO_KEY:
        return f"{name} by batches, {row['client']}"
    share = [f"{100 * key / MAX_KEY_HASH:.3g}" for key in (row["lo"], row["hi"])]
    return f"{name} keys {share[0]}-{share[1]} %"


#: Table → the columns that name a row of its chart, title and caption.
_TENURES: Final = {
    "ownership": (
        _LEASE,
        "Who held which partition when",
        "Every bar is one worker's time with one partition without a break (one epoch), by the broker's clock.",
    ),
    "assignments": (
        [*_LEASE, "lo", "hi"],
        "Which member of a coordinated group owned which partition when",
        "Every bar is one member's time with one partition, or the keys of one, under one fencing token.",
    ),
    "shares": (
        [*_LEASE, "lo", "hi", "client"],
        "Who shared which partition when",
        "Every bar is one worker's share of one partition, by batches or of some keys.",
    ),
}


def _tenures(findings: Findings, name: str, wanted: pc.Expression | None) -> _Picture | None:
    columns, title, caption = _TENURES[name]
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
    for how, name in (
        ("handed over", "Handed over: from the release to the next holder"),
        ("replaced", "Taken over from a silent holder: from its last heartbeat to the next holder"),
        ("restarted", "Taken over by a restarted worker: from the old one's last heartbeat"),
    ):
        values = table.filter(pc.field("how") == how)[TAKEOVERS[how][1]].drop_null().to_pylist()
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
