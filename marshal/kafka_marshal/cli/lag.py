"""`lag`: how far each group is behind, and how fast it goes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.connection import connected
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.names import complete_group
from kafka_marshal.cli.options import Options, span_option
from kafka_marshal.cli.output import Cell, Column, Field, Rows
from kafka_marshal.cli.watch import Picture, Section, deleted_notes, lag_cell, show, stuck_section
from kafka_marshal.observe.checkpoints import as_of_text
from kafka_marshal.observe.names import no_group
from kafka_marshal.observe.rows import GroupRow, LeaseRow, partitions_of
from kafka_marshal.observe.text import count, span

if TYPE_CHECKING:
    from kafka_marshal.observe.view import View

_ROWS = Rows[LeaseRow](
    Field("group", column=Column("group", pipes_only=True)),
    Field("topic", column=Column("topic", fold=True)),
    Field("partition", column=Column("partition", right=True), cell=lambda row: row.place),
    Field("keys", lambda row: [row.lo, row.hi]),
    Field("claimed", lambda row: row.cp is not None),
    Field("holder", "client", Column("holder", fold=True, least=8), lambda row: _holder(row)),
    "log_start",
    Field("log_end", column=Column("log end", right=True, from_width=65)),
    Field("next", column=Column("next", right=True)),
    Field("done_beyond", "beyond", Column("beyond", right=True, from_width=80)),
    Field("in_flight", column=Column("in flight", right=True, from_width=80)),
    Field("lag", column=Column("lag", right=True), cell=lambda row: lag_cell([row])),
    "open_messages",
    "parked",
    "deleted",
    Field("position_lost", "lost"),
    Field("stuck", lambda row: row.stuck or None),
    Field("held_back", lambda row: row.held_back or None),
    Field("messages_per_second", "speed", Column("msg/s", right=True), lambda row: _speed(row.speed)),
)


@command()
@click.option("--group", help="Only this group.", shell_complete=complete_group)
@click.option(
    "--window", callback=span_option, default="30s", metavar="SPAN", help="Speed is measured over this (30s)."
)
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, metavar="SECONDS", help="With --watch (1).")
@click.pass_obj
def lag(options: Options, group: str | None, window: int, watch: bool, interval: float) -> int:
    r"""How far each group is behind, and how fast it goes, for every partition and in all.

    \b
    log end      the end of the partition's log: the next message's offset
    next         the offset to read next: everything below it is done, or set aside (Kafka's CURRENT-OFFSET)
    beyond       messages done beyond that, out of order
    in flight    messages not done with later ones done (at least; the latest ones in flight don't show)
    lag          messages in the log that are neither done nor set aside; "position lost" if the position lies beyond
                 its end, or the topic was recreated. A total with a + omits what is not known. Of a partition that is
                 shared by key (3 (0-33%): the first third) each owner's average share
    msg/s        messages handled by the holder over the last --window of log time; -: not known

    Of a group that takes checkpoints all this is as of the newest, whose age is shown: what was done since counts with
    the next. Its members' metrics have the present lag.

    Partitions that the group never claimed are listed, too; those without progress, with the reason, below
    (see status). At-most-once messages count as done when they are delivered.

    \b
    Exit status: 0; 1 a position is lost, the group is unknown, or the log needs a newer release; 3 no Kafka.
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
    groups = view.groups(group)
    rows = [row for each in groups for row in each.leases]
    upgrades = view.notes_on_upgrades()
    notes = [*deleted_notes(groups), *upgrades]
    if group is not None and not groups:
        notes.append(no_group(group, view.names()))
    totals = {each.group: _total(each) for each in groups}
    sections = []
    for each in groups:
        of_group = sorted(each.leases, key=lambda row: row.badness) if view.watched else each.leases
        cells = [_ROWS.cells(row) for row in of_group]
        cells.insert(0 if view.watched else len(cells), _total_cells(each, totals[each.group]))
        sections.append(Section(_ROWS.columns, cells, None, _headline(each, totals[each.group])))
    sections.append(stuck_section(rows))
    return Picture(
        headline=f"{count(len(groups), 'group')}, {count(partitions_of(rows), 'partition')}",
        sections=sections if groups else [Section(_ROWS.columns, [], "no leases")],
        notes=notes,
        json={
            "topic": view.replica.topic,
            "partitions": [_ROWS.json(row) for row in rows],
            "totals": [{"group": name, **figures} for name, figures in totals.items()],
            "notes": notes,
        },
        status=NO if upgrades or any(row.lost for row in rows) or (group is not None and not groups) else DONE,
    )


def _sum(values: Iterable[int | float | None]) -> float | None:
    """The sum of the known values; None: none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _total(group: GroupRow) -> dict[str, float | None]:
    rows = group.leases
    speed = _sum(row.speed for row in rows)
    behind = group.lag
    return {
        "partitions": partitions_of(rows),
        "done_beyond": sum(row.beyond for row in rows),
        "in_flight": sum(row.in_flight for row in rows),
        "lag": behind,
        "open_messages": sum(row.open_messages for row in rows),
        "parked": sum(row.parked for row in rows),
        "messages_per_second": speed,
        "positions_lost": len(group.lost),
        "stuck": len(group.stuck),
        "seconds_left": behind / speed if speed and behind is not None else None,
        "newest": None if group.checkpoints is None else group.checkpoints.newest,
        "age_ms": None if group.checkpoints is None else group.checkpoints.age_ms,
    }


def _headline(group: GroupRow, total: dict[str, float | None]) -> str:
    behind, speed, left = total["lag"], total["messages_per_second"], total["seconds_left"]
    known = [row for row in group.leases if row.lag is not None]
    text = f"{group.group}: " + (f"{count(group.known_lag, 'message')} behind" if known else "lag is not known")
    if 0 < len(known) < len(group.leases):
        text += f" in {count(len(known), 'partition')}, not known of {len(group.leases) - len(known):,}"
    if speed is not None:
        text += f", {speed:,.0f}/s"
    if total["positions_lost"]:
        text += f", {count(int(total['positions_lost']), 'position')} lost"
    if total["parked"]:
        text += f", {total['parked']:,.0f} set aside"
    if total["stuck"]:
        text += f", {count(int(total['stuck']), 'partition')} stuck"
    if group.checkpoints is not None:
        text += f", {as_of_text(group.checkpoints.newest, group.checkpoints.age_ms)}"
    if left is not None and behind:
        text += f", through in {span(left * 1000)} if nothing comes in"
    return text


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _holder(row: LeaseRow) -> Cell:
    return Cell(row.state, "yellow") if row.cp is None else Cell(row.holder, "dim" if row.client is None else "")


def _total_cells(group: GroupRow, total: dict[str, float | None]) -> list[str | Cell]:
    values = [total["done_beyond"], total["in_flight"]]
    cells: list[str | Cell] = [
        Cell(text, "bold") for text in (group.group, "total", "", "", "", "", *(f"{value:.0f}" for value in values))
    ]
    return [*cells, lag_cell(group.leases, "bold"), Cell(_speed(total["messages_per_second"]), "bold")]
