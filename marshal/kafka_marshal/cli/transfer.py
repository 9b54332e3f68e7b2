"""`import-group`, `export-group`, `convert-group`: groups from Kafka, to Kafka, and from one kind to the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.change import (
    NOT_DONE,
    carry_out,
    dry_run_option,
    group_argument,
    place_json,
    within_option,
    yes_option,
)
from kafka_marshal.cli.connection import admin_of
from kafka_marshal.cli.open_messages import open_text
from kafka_marshal.cli.options import Options, refuse_unknown
from kafka_marshal.cli.output import Column, Field, Rows, fields_of, print_table, say, say_warning
from kafka_marshal.observe.text import count
from kafka_marshal.types import F

if TYPE_CHECKING:
    from kafka_marshal.admin import Admin, Conversion, Move, Repeat
    from kafka_marshal.admin.session import GroupKind
    from kafka_marshal.admin.transfer import Open


#: Of export-group and convert-group.
_open_option = click.option(
    "--open",
    "open_messages",
    type=click.Choice(["repeat", "drop"]),
    help="Open messages come again with all above them, or count as done. Without it there must be none.",
)

_MOVES: Rows[Move] = Rows(
    Field("topic", column=Column("topic", fold=True)),
    Field("partition", column=Column("partition", right=True)),
    Field("before", column=Column("now", right=True)),
    Field("after", column=Column("to", right=True)),
    "done_ahead",
    Field("left_out", lambda move: move.lost or None),
    *("closed", "parked", "restored"),
    Field("", column=Column("remark"), cell=lambda move: _remark(move)),
)
_REPEATS: Rows[Repeat] = Rows(
    Field("topic", column=Column("topic", fold=True)),
    Field("partition", column=Column("partition", right=True)),
    Field("first", column=Column("first", right=True)),
    Field("last", column=Column("last", right=True)),
    *("lo", "hi"),
    Field("", column=Column("of"), cell=lambda x: "all keys" if x.is_of_all_keys else f"keys {x.lo:x}-{x.hi:x}"),
)

#: The most rows of a table; JSON and the file have all.
_SHOWN = 40


def _options(force: str) -> Callable[[F], F]:
    """The options of all three."""

    def add(function: F) -> F:
        for option in (
            click.option("--force", is_flag=True, help=force),
            yes_option(),
            dry_run_option(),
            within_option("How long members that died may take to be silent enough"),
            group_argument,
        ):
            function = option(function)
        return function

    return add


@command()
@_options("Replace positions that GROUP has already.")
@click.pass_obj
def import_group(options: Options, group: str, within: int, force: bool) -> int:
    r"""Take the committed offsets of Kafka's own consumer group GROUP over into a coordinated group of that name.

    Both sides must be without members: stop the old consumers first, start the new ones afterwards. The group here is
    created if it is missing, and paused meanwhile. Kafka's offsets do not change.

    \b
    Exit status: 0 done; 1 not done, nothing changed: one side has members, or positions (--force); 2 wrong use;
    3 Kafka was not reachable.
    """

    def do(admin: Admin, dry_run: bool) -> list[Move]:
        return admin.import_group(group, force=force, dry_run=dry_run, timeout=within / 1000)

    question = f"Let the coordinated group {group} begin at these offsets?"
    return _move(options, group, do, question, "imported")


@command()
@_options("Commit also where Kafka's own group goes back by that.")
@_open_option
@click.pass_obj
def export_group(options: Options, group: str, within: int, force: bool, open_messages: Open) -> int:
    r"""Commit the positions of GROUP to Kafka's own consumer group of that name, for ordinary consumers to continue.

    Both sides must be without members. The first undone offset is committed: messages done above it, out of order or
    for some keys, are repeated there (remark). The group here keeps its positions. Open messages have no place there:
    --open says whether they come again or count as done.

    \b
    Exit status: 0 done; 1 not done, nothing changed: one side has members, or Kafka's offsets are larger (--force);
    2 wrong use; 3 Kafka was not reachable.
    """

    def do(admin: Admin, dry_run: bool) -> list[Move]:
        return admin.export_group(
            group, force=force, dry_run=dry_run, timeout=within / 1000, open_messages=open_messages
        )

    question = f"Commit these offsets to Kafka's own consumer group {group}?"
    return _move(options, group, do, question, "exported")


def _move(options: Options, group: str, move: Callable[[Admin, bool], list[Move]], question: str, word: str) -> int:
    with admin_of(options) as admin:
        if word == "exported":
            refuse_unknown(options, group, effect=NOT_DONE)
        planned = move(admin, True)
        if not options.json:
            _print_moves(planned)

        def say_moved(moves: list[Move], done: bool) -> None:
            if done:
                say(f"{word}: {count(sum(not move.lost for move in moves), 'partition')} of group {group}.")

        return carry_out(
            options,
            lambda: planned,
            question=question,
            do=lambda: move(admin, False),
            if_interrupted="It may be done or not; do it again. The group is resumed.",
            say=say_moved,
            json=lambda moves, done: {"group": group, "done": done, "moves": [_MOVES.json(move) for move in moves]},
        )


def _print_moves(moves: list[Move]) -> None:
    print_table(_MOVES.columns, map(_MOVES.cells, moves[:_SHOWN]))
    if len(moves) > _SHOWN:
        say(f"and {len(moves) - _SHOWN:,} more")


def _remark(move: Move) -> str:
    if move.lost:
        return f"left out: {move.lost}"
    ahead = count(move.done_ahead, "offset above it comes again", "offsets above it come again")
    remark = f"{ahead if move.done_ahead else ''}{open_text(move)}".removeprefix("; ")
    if move.restored:
        brought = count(len(move.restored), "open message comes along", "open messages come along")
        remark += "; " * bool(remark) + brought
    return remark


@command()
@_options("Set the saved positions though the group was at work after an earlier run was interrupted.")
@click.option("--to", type=click.Choice(["coordinated", "claimed"]), required=True, help="The kind it is to be.")
@click.option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where its progress is saved first (kafka-marshal-convert-GROUP.json in the working directory).",
)
@_open_option
@click.pass_obj
def convert_group(
    options: Options,
    group: str,
    to: GroupKind,
    file: Path | None,
    within: int,
    force: bool,
    open_messages: Open,
) -> int:
    r"""Make a claimed group a coordinated one, or the other way round; its positions stay.

    Stop its workers first. All progress is saved to a file before anything is changed, and the group is paused until
    its positions are set again. After an interruption or a kill, run the same command again: it continues. Only
    positions are carried over; messages done above them, out of order or for some keys, are repeated and listed.
    Messages that were set aside stay so; --open says what happens to other open ones.
    Convert fenced sinks afterwards: sink.convert(group, kind).

    \b
    Exit status: 0 converted; 1 not, or not completely: run it again; 2 wrong use, or the file can't be used;
    3 Kafka was not reachable.
    """
    from kafka_marshal.admin.conversion import is_unfinished

    settings: dict[str, Any] = {
        "file": file,
        "force": force,
        "timeout": within / 1000,
        "open_messages": open_messages,
    }

    def say_converted(found: Conversion, done: bool) -> None:
        if not done:
            return
        if options.yes:
            _print_conversion(found)
        positions = count(len(found.positions), "position")
        say(f"done: {group} is a {to} group with {positions}. As it was before: {found.file}")
        say(f"If a fenced sink has rows of it: sink.convert({group!r}, {to!r}), before new workers write.")

    with admin_of(options) as admin:
        resumed = is_unfinished(group, file)
        if resumed:
            say_warning(f"an earlier run was interrupted; this one continues with {resumed}.")
        else:
            refuse_unknown(options, group, effect=NOT_DONE)
        return carry_out(
            options,
            lambda: admin.convert_group(group, to, **{**settings, "dry_run": True}),
            show=_print_conversion,
            question=f"Make {group} a {to} group? Its workers have to be of that kind from then on.",
            do=lambda: admin.convert_group(group, to, **settings),
            if_interrupted="It may be done in part; its progress is saved. Run the same command again.",
            say=say_converted,
            json=_conversion_json,
        )


def _print_conversion(found: Conversion) -> None:
    if found.parked:
        say(f"{count(len(found.parked), 'message that was set aside stays', 'messages that were set aside stay')} so.")
    if not found.repeats:
        say(f"{count(len(found.positions), 'position')} to carry over; nothing comes again.")
        return
    say(f"{count(len(found.positions), 'position')} to carry over. What is done above them can't be, and comes again:")
    print_table(_REPEATS.columns, map(_REPEATS.cells, found.repeats[:_SHOWN]))
    if len(found.repeats) > _SHOWN:
        say(f"and {len(found.repeats) - _SHOWN:,} more")


def _conversion_json(found: Conversion, done: bool) -> dict[str, object]:
    return {
        **fields_of(found, "group to"),
        "done": done,
        "resumed": found.resumed,
        "file": str(found.file),
        "parked": [place_json(place) for place in found.parked],
        "positions": [place_json((*key, offset)) for key, offset in sorted(found.positions.items())],
        "repeats": [_REPEATS.json(each) for each in found.repeats],
    }
