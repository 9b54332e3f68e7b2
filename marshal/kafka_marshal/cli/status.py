"""`status`: who holds what."""

from __future__ import annotations

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.options import Options
from kafka_marshal.cli.output import Cell, Column
from kafka_marshal.cli.reading import connected
from kafka_marshal.cli.text import count, number, span, time_text
from kafka_marshal.cli.view import LeaseRow, View
from kafka_marshal.cli.watch import Picture, Section, show, stuck_section

__all__ = ["status"]

_LEASES = (
    Column("group", fold=True),
    Column("topic", fold=True),
    Column("partition", right=True),
    Column("holder", fold=True),
    Column("epoch", right=True),
    Column("freshness"),
    Column("silence", right=True),
    Column("stable", right=True),
    Column("lag", right=True),
)
_PAUSES = (
    Column("paused group", fold=True),
    Column("by", fold=True),
    Column("until"),
    Column("left", right=True),
    Column("in"),
)

_STYLES = {"fresh": "green", "unknown": "yellow", "stale": "red", "free": "dim"}


@command()
@click.option("--group", help="Only this group's leases and pause.")
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, metavar="SECONDS", help="With --watch (1).")
@click.option(
    "--tick",
    is_flag=True,
    help="Append a Tick to every partition of the log first: log time is then the broker's, and freshness is of now.",
)
@click.pass_obj
def status(options: Options, group: str | None, watch: bool, interval: float, tick: bool) -> int:
    r"""Leases: who holds which partition, how fresh, how far; and which groups are paused.

    Freshness is what the log says. Where nobody writes into a part of the log, its time stands still and a dead
    holder looks fresh: silence tells how long it is since the last beat, by the broker's clock. Silence beyond twice
    the heartbeat interval is red, "overdue". The broker's time is learned from what members write meanwhile (up to
    1.2 seconds are waited for that), else taken from this machine's clock, with a note; nothing is written, unless
    --tick asks the broker by a record.

    Below the leases stand partitions of which nothing is handed out though there is something to read, and why: the
    position is not in the log that is there, no leader, or, where nothing was done for 10 seconds, what reading the
    next message says. The way past what can't be read is the command skip, past a lost position release-group.

    \b
    Exit status: 0; 1 the group is not in the log, or a part of the log needs a newer release; 3 no Kafka.
    """
    with connected(options) as cluster:
        return show(
            cluster,
            options,
            lambda view: _picture(view, group),
            interval=interval if watch else None,
            tick=tick,
        )


def _picture(view: View, group: str | None) -> Picture:
    view.look_at_data(None if group is None else [group])
    rows = view.with_stuck(view.rows(group))
    pauses = _pauses(view, group)
    notes = _notes(view, rows)
    found = bool(rows or pauses) or group is None
    if not found:
        notes.append(f"the log knows no group {group!r}: none of its members ever got a partition.")
    return Picture(
        headline=_headline(rows),
        sections=[
            Section(_LEASES, [_cells(row) for row in rows], "no leases"),
            stuck_section(rows),
            Section(_PAUSES, _pause_rows(view, group), None),
        ],
        notes=notes,
        json={
            "topic": view.replica.topic,
            "clock": {"source": view.clock.source, "now": view.clock.now_ms()},
            "partitions": [
                {
                    "partition": cp,
                    "next_offset": world.next_offset,
                    "log_time": world.log_time,
                    "level": world.level,
                    "rejected": dict(world.rejected),
                }
                for cp, world in view.worlds.items()
            ],
            "leases": [_json(row) for row in rows],
            "pauses": pauses,
            "notes": notes,
        },
        status=DONE if found and not list(view.replica.stopped()) else NO,
    )


def _headline(rows: list[LeaseRow]) -> str:
    held = [row for row in rows if row.client is not None]
    holders = len({(row.group, row.client, row.instance) for row in held})
    text = f"{count(len(rows), 'lease')}, {len(held):,} held by {count(holders, 'client')}"
    for found, what in ((sum(row.overdue for row in held), "overdue"), (sum(bool(x.stuck) for x in rows), "stuck")):
        text += f", {found:,} {what}" if found else ""
    return text


def _cells(row: LeaseRow) -> list[str | Cell]:
    freshness = row.freshness or ""
    style = _STYLES.get(freshness, "")
    if row.overdue:
        freshness = freshness if freshness == "stale" else f"{freshness}, overdue"
        style = "bold red"
    return [
        row.group,
        row.topic,
        str(row.partition),
        "-" if row.client is None else row.client,
        number(row.epoch),
        Cell(freshness, style),
        Cell("-" if row.silence_ms is None else span(row.silence_ms), "red" if row.overdue else ""),
        number(row.stable),
        number(row.lag),
    ]


def _pauses(view: View, group: str | None) -> list[dict[str, object]]:
    """Pauses in force at log time, as a replay shows them (D3)."""
    return [
        {"partition": cp, "group": pause.group_id, "client": pause.client_id, "expires": pause.expires}
        for cp, world in view.worlds.items()
        for pause in world.pauses()
        if group is None or pause.group_id == group
    ]


def _pause_rows(view: View, group: str | None) -> list[list[str | Cell]]:
    """One row for each group that is paused, until the last of its CPs is free again."""
    where: dict[tuple[str, str], dict[int, int]] = {}
    for cp, world in view.worlds.items():
        for pause in world.pauses():
            if group is None or pause.group_id == group:
                where.setdefault((pause.group_id, pause.client_id), {})[cp] = pause.expires
    rows: list[list[str | Cell]] = []
    for (name, client), found in sorted(where.items()):
        expires = max(found.values())
        left_ms = expires - view.clock.now_ms()
        left = Cell(span(left_ms)) if left_ms > 0 else Cell("over", "dim")
        everywhere = "everywhere" if len(found) == len(view.worlds) else f"partition(s) {', '.join(map(str, found))}"
        rows.append([name, client, time_text(expires), left, everywhere])
    return rows


def _notes(view: View, rows: list[LeaseRow]) -> list[str]:
    """What people should know before they trust the table."""
    notes = []
    for cp, (behind_ms, held) in view.standing_still().items():
        notes.append(
            f"partition {cp} of the log stands still since {span(behind_ms)}: the freshness of {count(held, 'lease')} "
            "there is as of then. Go by their silence."
        )
    if view.clock.source == "local" and any(row.silence_ms is not None for row in rows):
        notes.append(
            "silence is by this machine's clock: nobody wrote to the log meanwhile to learn the broker's from. "
            "--tick asks the broker."
        )
    if view.clock.local_is_behind_ms > 1_000:
        notes.append(f"this machine's clock is at least {span(view.clock.local_is_behind_ms)} behind the broker's.")
    return notes + view.notes_on_upgrades()


def _json(row: LeaseRow) -> dict[str, object]:
    return {
        "partition": row.cp,
        "group": row.group,
        "topic": row.topic,
        "topic_partition": row.partition,
        "holder": None if row.client is None else {"client": row.client, "instance": row.instance},
        "epoch": row.epoch,
        "heartbeat_interval_ms": row.heartbeat_interval_ms,
        "last_beat": row.last_beat,
        "freshness": row.freshness,
        "silence_ms": row.silence_ms,
        "overdue": row.overdue,
        "stable": row.stable,
        "granted": row.granted,
        "log_end": row.log_end,
        "lag": row.lag,
        "stuck": row.stuck or None,
    }
