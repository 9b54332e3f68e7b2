"""`fork` and `compare`: a release tried on a copy of a group's positions and states."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.change import carry_out, dry_run_option, group_argument, within_option, yes_option
from kafka_marshal.cli.checkpoints import function_option, target
from kafka_marshal.cli.connection import admin_of, id_argument, note
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.options import Options, complete_group, parsed
from kafka_marshal.cli.output import Column, Field, Rows, fields_of, print_json, print_table, say, say_warning
from kafka_marshal.observe.text import count

if TYPE_CHECKING:
    from kafka_marshal.admin import Compared, Forked, ForkedPartition

_BEGINS: Rows[ForkedPartition] = Rows(
    Field("topic", column=Column("topic", fold=True)),
    Field("partition", column=Column("partition", right=True)),
    Field("position", column=Column("begins at", right=True)),
    Field("waiting", column=Column("waiting", right=True), cell=lambda each: f"{each.waiting:,}"),
    Field("gone", column=Column("gone (retention)", right=True), cell=lambda each: str(each.gone or "-")),
)

_COMPARED: Rows[Compared] = Rows(
    Field("topic", column=Column("topic", fold=True)),
    Field("partition", column=Column("partition", right=True)),
    Field("position", column=Column("position", right=True)),
    Field("other", column=Column("the other's", right=True)),
    Field("verdict", column=Column("the other is")),
    Field("messages", column=Column("messages", right=True), cell=lambda each: f"{each.messages:,}"),
    Field(
        "states",
        column=Column("states", fold=True),
        cell=lambda each: "-" if each.states is None else each.states or "equal",
    ),
)


def _partitions(options: Options, option: str, text: str) -> list[tuple[str, int]]:
    """TOPIC:N or TOPIC:FIRST-LAST, several with commas."""
    found: list[tuple[str, int]] = []
    for each in text.split(","):
        topic, _, numbers = each.strip().rpartition(":")
        first, dash, last = numbers.partition("-")
        if not (topic and first.isdecimal() and (last.isdecimal() if dash else True)):
            raise ValueError(f"{each!r} is not of the form TOPIC:N or TOPIC:FIRST-LAST")
        found += [(topic, number) for number in range(int(first), int(last or first) + 1)]
    return found


@command()
@group_argument
@click.argument("checkpoint", callback=parsed(target, " (or initial, or the id of a checkpoint)"), metavar="CHECKPOINT")
@click.option(
    "--as",
    "name",
    required=True,
    callback=id_argument,
    metavar="NAME",
    help="The fork's group: one that the log does not know, or that has no positions.",
)
@click.option(
    "--partitions",
    "chosen",
    callback=parsed(_partitions),
    metavar="TOPIC:FIRST-LAST,…",
    help="Only these: orders:3 or orders:0-2,returns:0-2. Without it all of the group.",
)
@dry_run_option("Show where it would begin; change nothing.")
@yes_option()
@click.option("--force", is_flag=True, help="Even if retention has deleted messages that it would read.")
@within_option("How long to wait for dead members of that name")
@click.pass_obj
def fork(
    options: Options,
    group: str,
    checkpoint: int | str | datetime,
    name: str,
    chosen: list[tuple[str, int]] | None,
    force: bool,
    within: int,
) -> int:
    r"""Let group NAME begin with the positions and states that GROUP has at a CHECKPOINT (ID, initial or a TIME).

    GROUP continues, and its checkpoint is pinned: members of NAME load its states (on_restore: why="forked") until
    their first checkpoint has saved their own. They need a CheckpointPolicy, and must not write where GROUP writes.

    \b
    Try a release on a copy of production's state (docs/forking.md):
      kafka-marshal fork orders ID --as canary
      … start the new release with group_id="canary", and its own outputs …
      kafka-marshal compare orders canary
      … stop it …
      kafka-marshal forget-group canary
      kafka-marshal checkpoints orders --retire ID

    \b
    Exit status: 0 done; 1 not done: no such checkpoint, NAME is in use, messages are gone (--force), not confirmed, or
    not finished (run it again); 2 wrong use; 3 no Kafka.
    """
    with admin_of(options) as admin:
        planned = admin.fork(group, checkpoint, name, chosen, dry_run=True)

        def make() -> Forked:
            note(options, f"pausing {name}, which begins at checkpoint {planned.checkpoint} of {group} …")
            return admin.fork(group, planned.checkpoint, name, chosen, force=force, timeout=within / 1000)

        return carry_out(
            options,
            lambda: planned,
            show=_show,
            question=f"Fork group {group} at checkpoint {planned.checkpoint} as {name}?",
            do=make,
            if_interrupted=f"It may be forked in part: begin no members of {name}, and run it again.",
            say=partial(_say, options),
            json=_json,
        )


def _show(planned: Forked) -> None:
    print_table(_BEGINS.columns, map(_BEGINS.cells, planned.partitions))
    if gone := sum(each.gone for each in planned.partitions):
        say_warning(
            f"retention has deleted {count(gone, 'message')} that {planned.name} would read. Choose a later "
            "checkpoint, or accept it with --force"
        )


def _say(options: Options, found: Forked, done: bool) -> None:
    if not done:
        return
    many = f"{count(len(found.partitions), 'partition')}, as its own checkpoint {found.begins}"
    say(f"{found.name} begins at checkpoint {found.checkpoint} of {found.group}: {many}")
    retire = f"kafka-marshal checkpoints {quote(found.group)}{options.reach()} --retire {quote(str(found.checkpoint))}"
    note(options, f"checkpoint {found.checkpoint} is pinned. When {found.name} has saved its own states: {retire}")


def _json(found: Forked, done: bool) -> dict[str, object]:
    return {
        **fields_of(found, "group checkpoint name begins"),
        "partitions": [_BEGINS.json(each) for each in found.partitions],
    }


@command()
@group_argument
@click.argument("other", callback=id_argument, shell_complete=complete_group)
@click.option(
    "--states",
    callback=function_option,
    metavar="MODULE:FUNCTION",
    help="Call this with both RestorePieces where positions are equal: True: so are the states; or how they differ.",
)
@click.pass_obj
def compare(options: Options, group: str, other: str, states: Callable[..., object] | None) -> int:
    r"""Where GROUP and OTHER are on the partitions that both have, and whether their states differ.

    Positions are those of their newest checkpoints. States of one partition can be compared only where the positions
    are equal: stop both, or take a checkpoint of each when the topics are quiet.

    \b
    Exit status: 0 all are equal; 1 a position or a state differs, no partition is in both, or a group is unknown;
    2 wrong use; 3 no Kafka.
    """
    with admin_of(options) as admin:
        found = admin.compare(group, other, states)
    differ = sum(each.verdict != "equal" or bool(each.states) for each in found)
    if options.json:
        print_json({"group": group, "other": other, "partitions": [_COMPARED.json(each) for each in found]})
    else:
        print_table(_COMPARED.columns, map(_COMPARED.cells, found))
        many = count(len(found), "partition")
        say(f"{many} in both, {differ} differ" if differ else f"{many} in both, equal")
    return DONE if found and not differ else NO
