"""`lag`: how far each group is behind, and how fast it goes."""

from __future__ import annotations

from collections.abc import Iterable

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.options import Options, span_option
from kafka_marshal.cli.output import Cell, Column
from kafka_marshal.cli.reading import connected
from kafka_marshal.cli.text import count, number, span
from kafka_marshal.cli.view import LeaseRow, View
from kafka_marshal.cli.watch import Picture, Section, show, stuck_section

__all__ = ["lag"]

_COLUMNS = (
    Column("group", pipes_only=True),
    Column("topic", fold=True),
    Column("partition", right=True),
    Column("holder", fold=True),
    Column("log end", right=True),
    Column("done", right=True),
    Column("beyond", right=True),
    Column("in flight", right=True),
    Column("lag", right=True),
    Column("msg/s", right=True),
)


@command()
@click.option("--group", help="Only this group.")
@click.option(
    "--window", callback=span_option, default="30s", metavar="SPAN", help="Speed is measured over this (30s)."
)
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, metavar="SECONDS", help="With --watch (1).")
@click.pass_obj
def lag(options: Options, group: str | None, window: int, watch: bool, interval: float) -> int:
    r"""How far each group is behind, and how fast it goes, for every partition and in all.

    \b
    log end      where the partition's log ends now: the next message's offset
    done         everything below this offset is done (Kafka's CURRENT-OFFSET)
    beyond       messages done beyond that, out of order
    in flight    messages not done with something done beyond them (at least; those handed out last don't show)
    lag          messages in the log that are not done
    msg/s        by what members handed in, over the last --window of log time; - where the log says too little

    Partitions that the group never claimed are listed too; those that stand still, with why, below
    (see status). At-most-once work counts as done when it is handed out.

    \b
    Exit status: 0; 1 the group is not in the log; 3 no Kafka.
    """
    with connected(options) as cluster:
        return show(
            cluster,
            options,
            lambda view: _picture(view, group),
            interval=interval if watch else None,
            window_ms=window,
            listen=False,
        )


def _picture(view: View, group: str | None) -> Picture:
    view.look_at_data(None if group is None else [group])
    claimed = view.with_stuck(view.rows(group))
    rows = sorted([*claimed, *view.unclaimed(claimed)], key=lambda row: (row.group, row.topic, row.partition))
    groups = sorted({row.group for row in rows})
    notes = view.notes_on_upgrades()
    if group is not None and not rows:
        notes.append(f"the log knows no group {group!r}: none of its members ever got a partition.")
    totals = {name: _total([row for row in rows if row.group == name]) for name in groups}
    sections = []
    for name in groups:
        cells = [_cells(row) for row in rows if row.group == name]
        cells.append(_total_cells(name, totals[name]))
        sections.append(Section(_COLUMNS, cells, None, _headline(name, totals[name])))
    sections.append(stuck_section(rows))
    return Picture(
        headline=f"{count(len(groups), 'group')}, {count(len(rows), 'partition')}",
        sections=sections or [Section(_COLUMNS, [], "no leases")],
        notes=notes,
        json={
            "topic": view.replica.topic,
            "partitions": [_json(row) for row in rows],
            "totals": [{"group": name, **totals[name]} for name in groups],
            "notes": notes,
        },
        status=NO if notes else DONE,
    )


def _sum(values: Iterable[int | float | None]) -> float | None:
    """The sum of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _total(rows: list[LeaseRow]) -> dict[str, float | None]:
    speed = _sum(row.speed for row in rows)
    behind = _sum(row.lag for row in rows)
    return {
        "partitions": len(rows),
        "done_beyond": sum(row.beyond for row in rows),
        "in_flight": sum(row.in_flight for row in rows),
        "lag": behind,
        "messages_per_second": speed,
        "stuck": sum(bool(row.stuck) for row in rows),
        "seconds_left": behind / speed if speed and behind is not None else None,
    }


def _headline(name: str, total: dict[str, float | None]) -> str:
    behind, speed, left = total["lag"], total["messages_per_second"], total["seconds_left"]
    text = f"{name}: {count(int(behind or 0), 'message')} behind"
    if speed is not None:
        text += f", {speed:,.0f}/s"
    if total["stuck"]:
        text += f", {count(int(total['stuck']), 'partition')} stuck"
    if left is not None and behind:
        text += f", through in {span(left * 1000)} if nothing comes in"
    return text


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _cells(row: LeaseRow) -> list[str | Cell]:
    if row.cp is None:
        holder = Cell("never claimed", "yellow")
    else:
        holder = Cell("-", "dim") if row.client is None else Cell(row.client)
    return [
        row.group,
        row.topic,
        str(row.partition),
        holder,
        number(row.log_end),
        "-" if row.cp is None else str(row.position),
        str(row.beyond),
        str(row.in_flight),
        number(row.lag),
        _speed(row.speed),
    ]


def _total_cells(name: str, total: dict[str, float | None]) -> list[str | Cell]:
    values = ["total", "", "", "", "", total["done_beyond"], total["in_flight"], total["lag"]]
    texts = ["-" if value is None else value if isinstance(value, str) else f"{value:.0f}" for value in values]
    return [Cell(text, "bold") for text in (name, *texts, _speed(total["messages_per_second"]))]


def _json(row: LeaseRow) -> dict[str, object]:
    return {
        "group": row.group,
        "topic": row.topic,
        "partition": row.partition,
        "claimed": row.cp is not None,
        "holder": row.client,
        "log_start": row.log_start,
        "log_end": row.log_end,
        "stable": row.stable,
        "done_beyond": row.beyond,
        "in_flight": row.in_flight,
        "lag": row.lag,
        "stuck": row.stuck or None,
        "messages_per_second": row.speed,
    }
