"""`rollback`: put a group back to a checkpoint, with the states of its members and the rows of its sinks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.connection import admin_of, id_argument, note
from kafka_marshal.cli.failures import DONE, NO, WRONG_USE, CommandError
from kafka_marshal.cli.options import Options, complete_client, complete_group, read_time, span_option
from kafka_marshal.cli.output import Column, ask, print_json, print_table, say, say_warning
from kafka_marshal.observe.text import count, span

if TYPE_CHECKING:
    from kafka_marshal.admin import Admin
    from kafka_marshal.admin.checkpoints import RolledBack

_COLUMNS = (
    Column("topic", fold=True),
    Column("partition", right=True),
    Column("from", right=True),
    Column("to", right=True),
    Column("come again", right=True),
    Column("gone (retention)", right=True),
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _target(context: click.Context, parameter: click.Parameter, value: str) -> int | str | datetime:
    """ID, initial or TIME."""
    if value == "initial" or (value.isascii() and value.isdigit()):
        return value if value == "initial" else int(value)
    try:
        moment = read_time(context.ensure_object(Options), parameter.opts[0], value, moves=True)
    except ValueError as error:
        raise click.BadParameter(f"{error} (or initial, or the id of a checkpoint)", context, parameter) from None
    return _EPOCH + timedelta(milliseconds=moment)


def _function(context: click.Context, parameter: click.Parameter, value: str | None) -> Callable[..., object] | None:
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
        text = f"{type(error).__name__}: {error}"
        raise CommandError(f"--undo {value}: can't be imported ({text}). Nothing was changed.", WRONG_USE) from error
    finally:
        sys.path.remove("")
    if not callable(found):
        raise click.BadParameter(f"{value} is no function. Nothing was changed", context, parameter)
    return found  # type: ignore[no-any-return]


@command()
@click.argument("group", callback=id_argument, shell_complete=complete_group)
@click.option(
    "--to",
    required=True,
    callback=_target,
    metavar="ID|initial|TIME",
    help="A checkpoint; initial: before any state was saved; a TIME: the newest complete by then (03:14, 10m, …).",
)
@click.option("--dry-run", is_flag=True, help="Show what would go back; change nothing.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@click.option("--force", is_flag=True, help="Even if retention has deleted messages that would come again.")
@click.option(
    "--stay-paused",
    callback=span_option,
    metavar="SPAN",
    help="Pause the group first, and leave it paused this long after it has gone back (10m).",
)
@click.option(
    "--undo",
    callback=_function,
    metavar="MODULE:FUNCTION",
    help="With --stay-paused: call this with the Restore, to rewind sinks (sink.restore).",
)
@click.option(
    "--within", callback=span_option, default="60s", metavar="SPAN", help="How long to wait for members to leave (60s)."
)
@click.option(
    "--client-id",
    callback=lambda c, p, v: v if v is None else id_argument(c, p, v),
    help="Carry on as this admin, whose pause is in force.",
    shell_complete=complete_client,
)
@click.pass_obj
def rollback(
    options: Options,
    group: str,
    to: int | str | datetime,
    dry_run: bool,
    yes: bool,
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
    with admin_of(options, client_id) as admin:
        planned = admin.rollback(group, to, dry_run=True)
        if not options.json and (dry_run or not yes):
            _print(planned, options)
        if dry_run:
            if options.json:
                print_json(_json(planned))
            return DONE
        how = "" if stay_paused is None else f", and leave it paused for {span(stay_paused)}"
        if not ask(f"Put group {group} back to checkpoint {planned.to}{how}?", yes):
            note(options, "Nothing was changed.")
            return NO
        done = _go_back(options, admin, planned, stay_paused, undo, force, within)
    if options.json:
        print_json(_json(done))
    else:
        _print_done(options, done)
    return DONE


def _go_back(
    options: Options,
    admin: Admin,
    planned: RolledBack,
    stay_paused: int | None,
    undo: Callable[..., object] | None,
    force: bool,
    within: int,
) -> RolledBack:
    shows = f"kafka-marshal checkpoints {quote(planned.group)}{options.reach()}"
    options.if_interrupted = f"It may have gone back: {shows} shows it."
    if stay_paused is not None:
        resumes = f"kafka-marshal release-group {quote(planned.group)}{options.reach()} --resume"
        options.if_interrupted += f" If it is paused: {resumes}"
    if stay_paused is not None:
        note(options, f"pausing {planned.group} as {admin.client_id} until its members have left …")
    return admin.rollback(
        planned.group,
        planned.to,
        stay_paused=None if stay_paused is None else stay_paused / 1000,
        undo=undo,
        force=force,
        timeout=within / 1000,
    )


def _print(planned: RolledBack, options: Options) -> None:
    rows = [
        [
            each.topic,
            str(each.partition),
            str(each.before),
            str(each.after),
            f"{each.messages:,}",
            str(each.gone or "-"),
        ]
        for each in planned.partitions
    ]
    print_table(_COLUMNS, rows)
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


def _print_done(options: Options, done: RolledBack) -> None:
    say(
        f"{done.group} is back at checkpoint {done.to} (generation {done.generation}); "
        f"{_come_again(sum(each.messages for each in done.partitions))}"
    )
    _name_dropped(done, options, "checkpoint went", "checkpoints went")
    if done.paused_by is not None:
        resume = f"kafka-marshal release-group {quote(done.group)}{options.reach()} --resume"
        note(options, f"it stays paused by {done.paused_by}. To resume it: {resume}")


def _come_again(messages: int) -> str:
    return count(messages, "message comes again", "messages come again")


def _json(done: RolledBack) -> dict[str, object]:
    return {
        "group": done.group,
        "to": done.to,
        "generation": done.generation,
        "partitions": [
            {
                "topic": each.topic,
                "partition": each.partition,
                "from": each.before,
                "to": each.after,
                "messages": each.messages,
                "gone": each.gone,
            }
            for each in done.partitions
        ],
        "dropped": list(done.dropped),
        "pinned": list(done.pinned),
        "paused": done.paused_by is not None,
        "client_id": done.paused_by,
        "paused_until": done.paused_until,
    }
