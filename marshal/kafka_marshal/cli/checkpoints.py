"""`checkpoint`, `checkpoints` and `rollback`: take one, list and keep them, put the group back to one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.change import (
    carry_out,
    client_option,
    dry_run_option,
    group_argument,
    within_option,
    yes_option,
)
from kafka_marshal.cli.connection import admin_of, catch_up, note, viewing
from kafka_marshal.cli.failures import DONE, NO, WRONG_USE, CommandError
from kafka_marshal.cli.options import Options, parsed, read_time, span_option
from kafka_marshal.cli.output import Cell, Column, Field, Rows, fields_of, print_json, print_table, say, say_warning
from kafka_marshal.cli.watch import Picture, Section, print_picture
from kafka_marshal.observe.checkpoints import (
    KIND_WORDS,
    barrier_json,
    barrier_text,
    checkpoints_row,
    is_initial,
    oldest_cut,
)
from kafka_marshal.observe.rows import place_text
from kafka_marshal.observe.text import clock_text, count, no_group, span, time_text

if TYPE_CHECKING:
    from kafka_marshal.admin import Rewound, RolledBack, TakenCheckpoint
    from kafka_marshal.observe.checkpoint_history import CheckpointHistory, CompleteCheckpoint, Ended, WentBack
    from kafka_marshal.observe.checkpoints import CheckpointsRow, KeyCut
    from kafka_marshal.observe.view import LiveView
    from rationalizer import Group

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
#: Why a piece kept an older cut.
_WHY_OLDER = {"refused": "its member could not take it", "not answered": "its member has not answered"}

_CUTS: Rows[KeyCut] = Rows(
    Field("topic", column=Column("topic", fold=True)),
    Field(
        "topic_partition",
        "partition",
        Column("partition", right=True),
        lambda cut: place_text(cut.partition, cut.lo, cut.hi),
    ),
    Field("keys", lambda cut: [cut.lo, cut.hi]),
    Field("client", column=Column("member", fold=True, least=8), cell=lambda cut: cut.client or "-"),
    Field("cut", column=Column("cut", right=True), cell=lambda cut: "never" if cut.cut is None else str(cut.cut)),
    Field(
        "why",
        lambda cut: cut.why or None,
        Column("why it is older", fold=True, least=16),
        lambda cut: _WHY_OLDER.get(cut.why, cut.why),
    ),
)

_WAY: Rows[Rewound] = Rows(
    Field("topic", column=Column("topic", fold=True)),
    Field("partition", column=Column("partition", right=True)),
    Field("from", "before", Column("from", right=True)),
    Field("to", "after", Column("to", right=True)),
    Field("messages", column=Column("come again", right=True), cell=lambda each: f"{each.messages:,}"),
    Field("gone", column=Column("gone (retention)", right=True), cell=lambda each: str(each.gone or "-")),
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

#: The most losses, rollbacks and ended barriers in a table; JSON has all.
_EVENTS_LISTED = 10


# -- taking one --------------------------------------------------------------------------------------------------


def _limit(context: click.Context, parameter: click.Parameter, value: str) -> int | None:
    """A span; a bare number is seconds, as the --timeout of other commands."""
    return span_option(context, parameter, f"{value}s" if value.replace(".", "", 1).isdecimal() else value)


@command()
@group_argument
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
        found = fields_of(taken, "checkpoint=id log_time took_ms members pinned")
        print_json({"group": group, **found, "older": [_CUTS.json(cut) for cut in taken.older]})
    else:
        _print_taken(group, taken)
    return NO if taken.older else DONE


def _print_taken(group: str, taken: TakenCheckpoint) -> None:
    pinned = ", pinned" if taken.pinned else ""
    say(
        f"checkpoint {taken.id} of {group} is complete{pinned}: {span(taken.took_ms)}, {taken.members} of "
        f"{count(taken.owners, 'member')}"
    )
    if taken.older:
        print_table(_CUTS.columns, [_CUTS.cells(cut) for cut in taken.older])
        say_warning(
            f"{count(len(taken.older), 'piece')} kept an older cut. Nothing is lost: a rollback to this checkpoint "
            "takes these pieces to that cut. A handler that hangs: kafka-marshal check"
        )


# -- listing and keeping them --------------------------------------------------------------------------------------


@command()
@group_argument
@click.option("--pin", type=click.IntRange(min=0), metavar="ID", help="Keep this one until it is retired.")
@click.option("--retire", type=click.IntRange(min=0), metavar="ID", help="Drop this one (not the newest).")
@click.option("--start", is_flag=True, help="Let the group take checkpoints from now on; it is paused shortly.")
@click.option("--hold", is_flag=True, help="With --start: a checkpoint is one moment for all members.")
@click.option("--keep", type=click.IntRange(1, 64), metavar="N", help="With --start: periodic ones that are kept (16).")
@click.option("--end", is_flag=True, help="Let the group take none any more; it is paused shortly.")
@within_option("How long to wait for members to leave")
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
    ways = [pin is not None, retire is not None, start, end]
    if sum(ways) > 1:
        raise click.UsageError("--pin, --retire, --start and --end are four things to do: use one.")
    if (hold or keep is not None) and not start:
        raise click.UsageError("--hold and --keep go with --start; later on --keep is what the members' policy says.")
    if any(ways):
        return _change(options, group, pin, retire, start, hold, keep or 16, within)
    with viewing(options) as view:
        view.follow_all()
        catch_up(view)
        view.learn_time()
        return print_picture(_picture(options, view, group), options)


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


def _picture(options: Options, view: LiveView, name: str) -> Picture:
    from kafka_marshal.observe.checkpoint_history import happened_text

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
    history = view.fold.checkpoints[name]
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
        **fields_of(row, "keep hold newest age_ms"),
        "barrier": barrier_json(row.barrier),
        "checkpoints": [
            {
                "checkpoint": kept.id,
                "log_time": kept.log_time,
                "kind": KIND_WORDS[kept.kind],
                **_taken_fields(history.taken.get(kept.id)),
                "oldest": None if oldest is None else _CUTS.json(oldest),
            }
            for kept in group.checkpoints.kept
            for oldest in (oldest_cut(group, kept.id),)
        ],
        "ended": [
            {"barrier": each.barrier, "log_time": each.log_time, "why": each.why, "client": each.client or None}
            for each in history.ended
        ],
        "went_back": [
            fields_of(each, "offset log_time why client checkpoint pieces undone_ms") for each in history.went_back
        ],
        "notes": notes,
    }


def _taken_fields(taken: CompleteCheckpoint | None) -> dict[str, object]:
    """What only the log says; null of one before the log that was read."""
    if taken is None:
        return dict.fromkeys(("took_ms", "members", "partitions", "slowest", "missing"))
    return {
        **fields_of(taken, "took_ms members partitions"),
        "slowest": taken.slowest or None,
        "missing": [_CUTS.json(cut) for cut in taken.missing],
    }


# -- the way back --------------------------------------------------------------------------------------------------


def target(options: Options, option: str, text: str) -> int | str | datetime:
    """ID, initial or TIME."""
    if text == "initial" or (text.isascii() and text.isdigit()):
        return text if text == "initial" else int(text)
    return _EPOCH + timedelta(milliseconds=read_time(options, option, text, moves=True))


def function_option(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> Callable[..., object] | None:
    """MODULE:FUNCTION; modules of the working directory are found, too."""
    if value is None:
        return None
    module, colon, name = value.partition(":")
    if not (module and colon and name):
        raise click.BadParameter(f"{value!r} is not of the form MODULE:FUNCTION", context, parameter)
    sys.path.insert(0, "")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except Exception as error:
        text, option = f"{type(error).__name__}: {error}", parameter.opts[0]
        raise CommandError(f"{option} {value}: can't be imported ({text}). Nothing was changed.", WRONG_USE) from error
    finally:
        sys.path.remove("")
    if not callable(found):
        raise click.BadParameter(f"{value} is no function. Nothing was changed", context, parameter)
    return found  # type: ignore[no-any-return]


@command()
@group_argument
@click.option(
    "--to",
    required=True,
    callback=parsed(target, " (or initial, or the id of a checkpoint)"),
    metavar="ID|initial|TIME",
    help="A checkpoint; initial: before any state was saved; a TIME: the newest complete by then (03:14, 10m, …).",
)
@dry_run_option("Show what would go back; change nothing.")
@yes_option()
@click.option("--force", is_flag=True, help="Even if retention has deleted messages that would come again.")
@click.option(
    "--stay-paused",
    callback=span_option,
    metavar="SPAN",
    help="Pause the group first, and leave it paused this long after it has gone back (10m).",
)
@click.option(
    "--undo",
    callback=function_option,
    metavar="MODULE:FUNCTION",
    help="With --stay-paused: call this with the Restore, to rewind sinks (sink.restore).",
)
@within_option("How long to wait for members to leave", "60s")
@client_option("Carry on as this admin, whose pause is in force.")
@click.pass_obj
def rollback(
    options: Options,
    group: str,
    to: int | str | datetime,
    force: bool,
    stay_paused: int | None,
    undo: Callable[..., object] | None,
    within: int,
    client_id: str | None,
) -> int:
    r"""Put GROUP back to a checkpoint: its positions and the states that belong to them.

    All members go back together, restore their states, and continue. Later checkpoints are dropped, pinned ones too.
    The checkpoint is pinned first (checkpoints --retire ID drops it later). Work since the newest checkpoint, which the
    log does not count yet, comes again, too. What was produced to other topics stays there.

    \b
    Undo a deploy:
      kafka-marshal checkpoint delays --pin                            before it; names the ID
      kafka-marshal rollback delays --to ID --stay-paused 15m --undo new_release.sinks:undo
      … deploy the old release …
      kafka-marshal release-group delays --resume

    \b
    Exit status: 0 done; 1 not done: no such checkpoint, messages are gone (--force), not confirmed, or another client
    put it back meanwhile; 2 wrong use; 3 no Kafka, or it is unknown whether it was done: run checkpoints.
    """
    if undo is not None and stay_paused is None:
        raise click.UsageError("--undo rewinds sinks while no member writes to them: it goes with --stay-paused.")
    if client_id is not None and stay_paused is None:
        raise click.UsageError("--client-id carries on a pause: it goes with --stay-paused.")
    how = "" if stay_paused is None else f", and leave it paused for {span(stay_paused)}"
    shows = f"kafka-marshal checkpoints {quote(group)}{options.reach()}"
    if_interrupted = f"It may have gone back: {shows} shows it."
    if stay_paused is not None:
        resumes = f"kafka-marshal release-group {quote(group)}{options.reach()} --resume"
        if_interrupted += f" If it is paused: {resumes}"
    with admin_of(options, client_id) as admin:
        planned = admin.rollback(group, to, dry_run=True)

        def go_back() -> RolledBack:
            if stay_paused is not None:
                note(options, f"pausing {group} as {admin.client_id} until its members have left …")
            seconds = None if stay_paused is None else stay_paused / 1000
            return admin.rollback(group, planned.to, stay_paused=seconds, undo=undo, force=force, timeout=within / 1000)

        return carry_out(
            options,
            lambda: planned,
            show=partial(_show_way, options),
            question=f"Put group {group} back to checkpoint {planned.to}{how}?",
            do=go_back,
            if_interrupted=if_interrupted,
            say=partial(_say_way, options),
            json=_way_json,
        )


def _show_way(options: Options, planned: RolledBack) -> None:
    print_table(_WAY.columns, map(_WAY.cells, planned.partitions))
    again = sum(each.messages for each in planned.partitions)
    note(options, f"to checkpoint {planned.to}: {_come_again(again)}, and what was done since the newest")
    _name_dropped(planned, options, "checkpoint goes", "checkpoints go")
    if gone := sum(each.gone for each in planned.partitions):
        say_warning(
            f"retention has deleted {count(gone, 'message')} that would have to come again: missing then. "
            "Choose a later checkpoint, or accept it with --force"
        )


def _name_dropped(found: RolledBack, options: Options, one: str, many: str) -> None:
    if found.dropped:
        named = ", ".join(f"{each} (pinned)" if each in found.pinned else str(each) for each in found.dropped)
        note(options, f"{count(len(found.dropped), one, many)} with it, for good: {named}")


def _say_way(options: Options, found: RolledBack, done: bool) -> None:
    if not done:
        return
    say(
        f"{found.group} is back at checkpoint {found.to} (generation {found.generation}); "
        f"{_come_again(sum(each.messages for each in found.partitions))}"
    )
    _name_dropped(found, options, "checkpoint went", "checkpoints went")
    if found.paused_by is not None:
        resume = f"kafka-marshal release-group {quote(found.group)}{options.reach()} --resume"
        note(options, f"it stays paused by {found.paused_by}. To resume it: {resume}")


def _come_again(messages: int) -> str:
    return count(messages, "message comes again", "messages come again")


def _way_json(found: RolledBack, done: bool) -> dict[str, object]:
    return {
        **fields_of(found, "group to generation"),
        "partitions": [_WAY.json(each) for each in found.partitions],
        "dropped": list(found.dropped),
        "pinned": list(found.pinned),
        "paused": found.paused_by is not None,
        **fields_of(found, "client_id=paused_by paused_until"),
    }
