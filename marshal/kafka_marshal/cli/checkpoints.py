"""`checkpoint`, `checkpoints` and `rollback`: take one, list and keep them, put the group back to one."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.connection import admin_of, catch_up, connected, id_argument, note, view_of
from kafka_marshal.cli.failures import DONE, NO, CommandError
from kafka_marshal.cli.options import complete_group, span_option
from kafka_marshal.cli.output import Cell, Column, print_json, print_table, say, say_warning
from kafka_marshal.cli.watch import Picture, Section, print_picture
from kafka_marshal.observe.checkpoints import (
    KIND_WORDS,
    barrier_json,
    barrier_text,
    checkpoints_row,
    happened_text,
    is_initial,
    oldest_cut,
)
from kafka_marshal.observe.rows import place_text
from kafka_marshal.observe.text import clock_text, count, no_group, span, time_text
from rationalizer import route_group

if TYPE_CHECKING:
    from kafka_marshal.admin.checkpoints import TakenCheckpoint
    from kafka_marshal.cli.options import Options
    from kafka_marshal.observe.checkpoints import CheckpointHistory, CheckpointsRow, Cut, Ended, Taken, WentBack
    from kafka_marshal.observe.view import View
    from rationalizer import Group, Outcome

_KEPT = (
    Column("checkpoint", right=True),
    Column("complete"),
    Column("kind"),
    Column("took", right=True),
    Column("members", right=True),
    Column("oldest cut", right=True),
    Column("of", fold=True, least=10),
)
_EVENTS = (Column("at"), Column("what happened", fold=True))
_OLDER = (
    Column("topic", fold=True),
    Column("partition", right=True),
    Column("member", fold=True, least=8),
    Column("cut", right=True),
    Column("why it is older", fold=True, least=16),
)

#: The most losses, rollbacks and ended barriers in a table; JSON has all.
_EVENTS_LISTED = 10


def cut_json(cut: Cut) -> dict[str, object]:
    """A piece with its cut as JSON."""
    return {
        "topic": cut.topic,
        "topic_partition": cut.partition,
        "keys": [cut.lo, cut.hi],
        "client": cut.client,
        "cut": cut.cut,
        "why": cut.why or None,
    }


# -- taking one --------------------------------------------------------------------------------------------------


def _limit(context: click.Context, parameter: click.Parameter, value: str) -> int | None:
    """A span; a bare number is seconds, as the --timeout of other commands."""
    return span_option(context, parameter, f"{value}s" if value.replace(".", "", 1).isdecimal() else value)


@command()
@click.argument("group", callback=id_argument, shell_complete=complete_group)
@click.option("--pin", is_flag=True, help="Keep it until it is retired (checkpoints --retire).")
@click.option(
    "--timeout",
    "limit",
    callback=_limit,
    default="60s",
    metavar="SPAN",
    help="How long members may take to answer: 2m, 30s (60s). (Before the command's name: how long a broker may.)",
)
@click.pass_obj
def checkpoint(options: Options, group: str, pin: bool, limit: int) -> int:
    r"""Take a checkpoint of GROUP now, and name the pieces that are older in it, and why.

    Each member hands in its progress and its state, piece by piece, as soon as no message of the piece is in flight.
    Pieces that are not handed in within --timeout keep the cut of an earlier checkpoint; nothing is lost by that.

    \b
    kafka-marshal checkpoint delays --pin    before a deploy: rollback delays --to ID undoes it

    \b
    Exit status: 0; 1 a piece is older in it, it ended without being complete, or the group takes none; 3 no Kafka.
    """
    options.if_interrupted = (
        f"It may be complete, and is not pinned: kafka-marshal checkpoints {quote(group)}{options.reach()} lists it."
    )
    with admin_of(options) as admin:
        taken = admin.checkpoint(group, pin, limit / 1000)
    if options.json:
        print_json(_taken_json(group, taken))
    else:
        _print_taken(group, taken)
    return NO if taken.older else DONE


def _taken_json(group: str, taken: TakenCheckpoint) -> dict[str, object]:
    return {
        "group": group,
        "checkpoint": taken.id,
        "log_time": taken.log_time,
        "took_ms": taken.took_ms,
        "members": taken.members,
        "pinned": taken.pinned,
        "older": [cut_json(cut) for cut in taken.older],
    }


def _print_taken(group: str, taken: TakenCheckpoint) -> None:
    pinned = ", pinned" if taken.pinned else ""
    say(
        f"checkpoint {taken.id} of {group} is complete{pinned}: {span(taken.took_ms)}, {taken.members} of "
        f"{count(taken.owners, 'member')}"
    )
    if taken.older:
        print_table(_OLDER, [_older_cells(cut) for cut in taken.older])
        say_warning(
            f"{count(len(taken.older), 'piece')} kept an older cut. Nothing is lost: a rollback to this checkpoint "
            "takes these pieces to that cut. A handler that hangs: kafka-marshal check"
        )


def _older_cells(cut: Cut) -> list[str | Cell]:
    why = {"refused": "its member could not take it", "not answered": "its member has not answered"}.get(
        cut.why, cut.why
    )
    place = place_text(cut.partition, cut.lo, cut.hi)
    return [cut.topic, place, cut.client or "-", "never" if cut.cut is None else str(cut.cut), why]


# -- listing and keeping them --------------------------------------------------------------------------------------


@command()
@click.argument("group", callback=id_argument, shell_complete=complete_group)
@click.option("--pin", type=click.IntRange(min=0), metavar="ID", help="Keep this one until it is retired.")
@click.option("--retire", type=click.IntRange(min=0), metavar="ID", help="Drop this one (not the newest).")
@click.option("--start", is_flag=True, help="Let the group take checkpoints from now on; it is paused shortly.")
@click.option("--hold", is_flag=True, help="With --start: a checkpoint is one moment for all members.")
@click.option("--keep", type=click.IntRange(1, 64), metavar="N", help="With --start: periodic ones that are kept (16).")
@click.option("--end", is_flag=True, help="Let the group take none any more; it is paused shortly.")
@click.option(
    "--within", callback=span_option, default="30s", metavar="SPAN", help="How long to wait for members to leave (30s)."
)
@click.pass_obj
def checkpoints(
    options: Options,
    group: str,
    pin: int | None,
    retire: int | None,
    start: bool,
    hold: bool,
    keep: int | None,
    end: bool,
    within: int,
) -> int:
    r"""The checkpoints that GROUP keeps, and the last losses and rollbacks; or change what is kept.

    \b
    kind         passing (made for a hand-over, goes with the next), periodic (the newest N are kept), pinned, or
                 initial (before any state was saved; pinned, too)
    took         from its begin until it was complete; - before the log that was read (to the last snapshots)
    members      that handed in, of those that owned pieces
    oldest cut   the checkpoint for which its oldest piece was handed in, and that piece, with its owner in the newest

    --start: all members need a CheckpointPolicy with adopt=True first. --end: adopt=True, or no policy. The group is
    paused until they have left, and they join again.

    \b
    Exit status: 0; 1 the group is unknown or takes none, or it was not changed; 2 wrong use; 3 no Kafka.
    """
    from kafka_marshal.observe.checkpoints import CheckpointHistory

    ways = [pin is not None, retire is not None, start, end]
    if sum(ways) > 1:
        raise click.UsageError("--pin, --retire, --start and --end are four things to do: use one.")
    if (hold or keep is not None) and not start:
        raise click.UsageError("--hold and --keep go with --start; later on --keep is what the members' policy says.")
    if any(ways):
        return _change(options, group, pin, retire, start, hold, keep or 16, within)
    with connected(options) as cluster, view_of(cluster, options) as view:
        home = route_group(group, len(view.worlds))
        history = CheckpointHistory(group)
        history.begin(view.worlds[home])

        def observe(cp: int, offset: int, outcome: Outcome) -> None:
            if cp == home and outcome.of_group and outcome.message.group_id == group:
                history.see(view.worlds[cp], outcome)

        view.observers.append(observe)
        catch_up(view)
        view.learn_time()
        return print_picture(_picture(options, view, group, history), options)


def _change(
    options: Options,
    group: str,
    pin: int | None,
    retire: int | None,
    start: bool,
    hold: bool,
    keep: int,
    within: int,
) -> int:
    options.if_interrupted = (
        f"It may be done: kafka-marshal checkpoints {quote(group)}{options.reach()} shows it. If the group is still "
        f"paused: kafka-marshal release-group {quote(group)}{options.reach()} --resume"
    )
    with admin_of(options) as admin:
        found: int | None
        if pin is not None:
            admin.pin(group, pin)
            found, said, does = pin, f"checkpoint {pin} of {group} is pinned", "pin"
        elif retire is not None:
            admin.retire(group, retire)
            found, said, does = retire, f"checkpoint {retire} of {group} is retired", "retire"
        elif start:
            note(options, f"pausing {group} until its members have left …")
            found = admin.start_checkpoints(group, hold, keep, timeout=within / 1000)
            said, does = f"{group} takes checkpoints: the first is {found}, pinned. The group is resumed", "start"
        else:
            note(options, f"pausing {group} until its members have left …")
            admin.end_checkpoints(group, timeout=within / 1000)
            found, said, does = None, f"{group} takes no checkpoints any more. The group is resumed", "end"
    if options.json:
        print_json({"group": group, "done": does, "checkpoint": found})
    else:
        say(said)
    return DONE


def _picture(options: Options, view: View, name: str, history: CheckpointHistory) -> Picture:
    notes = view.notes_on_upgrades()
    group = next((each for each in view.coordinated() if each.group_id == name), None)
    if group is None and name not in view.names():
        raise CommandError(no_group(name, view.names()), NO)
    now_ms = view.clock.now_ms()
    row = None if group is None else checkpoints_row(group, now_ms)
    if group is None:
        raise CommandError(
            f"group {name!r} is a claimed group, and only coordinated ones take checkpoints (docs/checkpoints.md). To "
            f"make it one: kafka-marshal convert-group {quote(name)}{options.reach()} --to coordinated",
            NO,
        )
    if row is None:
        raise CommandError(
            f"group {name!r} takes no checkpoints. Its members begin that with a CheckpointPolicy "
            f"(docs/checkpoints.md); in a group that has progress: kafka-marshal checkpoints "
            f"{quote(name)}{options.reach()} --start",
            NO,
        )
    events: list[Ended | WentBack] = sorted([*history.ended, *history.went_back], key=lambda each: each.log_time)
    cells: list[list[str | Cell]] = [
        [Cell(time_text(each.log_time), short=clock_text(each.log_time, now_ms)), happened_text(each)]
        for each in events[-_EVENTS_LISTED:]
    ]
    return Picture(
        headline=_headline(name, row),
        sections=[
            Section(_KEPT, _kept_cells(group, history, now_ms), None),
            Section(_EVENTS, cells, None),
        ],
        notes=notes,
        json=_json(group, row, history, notes),
        status=NO if list(view.replica.stopped()) else DONE,
    )


def _headline(name: str, row: CheckpointsRow) -> str:
    kind = ", of all members at one moment (hold)" if row.hold else ""
    text = f"{name}: newest checkpoint {row.newest}, {span(row.age_ms)} old; keeps {row.keep} periodic{kind}"
    return text if row.barrier is None else f"{text}; {barrier_text(row.barrier)}"


def _kept_cells(group: Group, history: CheckpointHistory, now_ms: int) -> list[list[str | Cell]]:
    assert group.checkpoints is not None
    rows: list[list[str | Cell]] = []
    for kept in group.checkpoints.kept:
        taken, oldest = history.taken.get(kept.id), oldest_cut(group, kept.id)
        where = "" if oldest is None else f"{oldest.topic} {place_text(oldest.partition, oldest.lo, oldest.hi)}"
        whose = "" if oldest is None or oldest.client is None else f", {oldest.client}"
        rows.append(
            [
                str(kept.id),
                Cell(time_text(kept.log_time), short=clock_text(kept.log_time, now_ms)),
                "initial"
                if KIND_WORDS[kept.kind] == "pinned" and is_initial(group, kept.id)
                else KIND_WORDS[kept.kind],
                "-" if taken is None else span(taken.took_ms),
                "-" if taken is None else f"{taken.members}/{taken.owners}",
                "-" if oldest is None else "never" if oldest.cut is None else str(oldest.cut),
                f"{where}{whose}" or "-",
            ]
        )
    return rows


def _json(group: Group, row: CheckpointsRow, history: CheckpointHistory, notes: list[str]) -> dict[str, object]:
    assert group.checkpoints is not None
    return {
        "group": group.group_id,
        "keep": row.keep,
        "hold": row.hold,
        "newest": row.newest,
        "age_ms": row.age_ms,
        "barrier": barrier_json(row.barrier),
        "checkpoints": [
            {
                "checkpoint": kept.id,
                "log_time": kept.log_time,
                "kind": KIND_WORDS[kept.kind],
                **_taken_fields(history.taken.get(kept.id)),
                "oldest": None if oldest is None else cut_json(oldest),
            }
            for kept in group.checkpoints.kept
            for oldest in (oldest_cut(group, kept.id),)
        ],
        "ended": [
            {"barrier": each.barrier, "log_time": each.log_time, "why": each.why, "client": each.client or None}
            for each in history.ended
        ],
        "went_back": [
            {
                "offset": each.offset,
                "log_time": each.log_time,
                "why": each.why,
                "client": each.client,
                "checkpoint": each.checkpoint,
                "pieces": each.pieces,
                "undone_ms": each.undone_ms,
            }
            for each in history.went_back
        ],
        "notes": notes,
    }


def _taken_fields(taken: Taken | None) -> dict[str, object]:
    """What only the log says; null of one before the log that was read."""
    if taken is None:
        return dict.fromkeys(("took_ms", "members", "partitions", "slowest", "missing"))
    return {
        "took_ms": taken.took_ms,
        "members": taken.members,
        "partitions": taken.partitions,
        "slowest": taken.slowest or None,
        "missing": [cut_json(cut) for cut in taken.missing],
    }
