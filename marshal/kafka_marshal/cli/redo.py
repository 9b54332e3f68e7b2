"""`redo`: done messages of a group are opened again, while it works on."""

from __future__ import annotations

import csv
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.change import NOT_DONE, carry_out, dry_run_option, group_argument, yes_option
from kafka_marshal.cli.connection import admin_of, connected, note
from kafka_marshal.cli.failures import DONE, NO, WRONG_USE, CommandError
from kafka_marshal.cli.open_messages import say_settled, settled_json
from kafka_marshal.cli.options import Options, complete_place, parsed, read_text, read_time, times_json
from kafka_marshal.cli.output import Cell, Column, fields_of, print_json, print_table, progress, say, say_warning
from kafka_marshal.observe.payload import bytes_json, utf8
from kafka_marshal.observe.text import clock_text, count, local_ms, time_text

if TYPE_CHECKING:
    from kafka_marshal.admin import Admin, Redone, RedoPartition, RedoPlan
    from kafka_marshal.admin.open_messages import Settled
    from kafka_marshal.types import Target

    #: Partition → the first and the last offset, or times from … until; None: all.
    Wish = dict[tuple[str, int], tuple[Target, Target] | None]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

#: Open at once beyond what is worked off, at most.
_RATE = 1_000

_COLUMNS = (
    Column("topic", fold=True, least=6),
    Column("partition", right=True),
    Column("again", right=True),
    Column("from"),
    Column("to"),
    Column("means", fold=True, least=20),
)

#: The most spans named one by one, where they were left as they are.
_LISTED = 20

#: What a plan found and does not touch: the field, and what it means.
_UNTOUCHED = (
    ("open", "wait for a try, or are in a batch"),
    ("parked", "set aside (redrive)"),
    ("ahead", "not done yet"),
    ("gone", "gone (retention, compaction)"),
)


def _between(options: Options, option: str, text: str) -> tuple[datetime, datetime]:
    begin, dots, end = text.partition("..")
    if not dots:
        raise ValueError(f"{text!r} is not of the form FROM..UNTIL, such as 03:10..03:20")
    first, until = (
        _EPOCH + timedelta(milliseconds=read_time(options, option, each, moves=True)) for each in (begin, end)
    )
    if until <= first:
        raise ValueError(f"{text!r} ends before it begins")
    return first, until


def _offsets(_: Options, __: str, text: str) -> tuple[int, int]:
    first, dots, last = text.partition("..")
    found = int(first), int(last if dots else first)
    if not 0 <= found[0] <= found[1]:
        raise ValueError(f"{text!r} are no offsets, first..last")
    return found


@command()
@group_argument
@click.argument("places", metavar="[TOPIC[:PARTITION]]...", nargs=-1, shell_complete=complete_place)
@click.option(
    "--time",
    "times",
    callback=parsed(_between),
    metavar="FROM..UNTIL",
    help="Messages of this time: 03:10..03:20, 2026-11-21T04:50Z..2026-11-21T05:10Z, 30m..10m (ago).",
)
@click.option("--offsets", callback=parsed(_offsets), metavar="FIRST..LAST", help="These offsets, both included.")
@click.option("--key", "keys", multiple=True, metavar="KEY", help="Only messages with this key (repeatable).")
@click.option(
    "--from-file",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Messages from a file: CSV (topic,partition,offset); or a plan of redo, which is carried on.",
)
@click.option(
    "--undo", type=click.Path(dir_okay=False), metavar="FILE", help="What is still open of this plan is done."
)
@click.option(
    "--plan",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The file of the plan (a new file in the working directory); with --dry-run it is saved, too.",
)
@click.option(
    "--rate",
    type=click.IntRange(min=1),
    default=_RATE,
    metavar="N",
    help=f"At most N are open at once beyond what is worked off ({_RATE:,}).",
)
@dry_run_option("Say what would be done again; change nothing.")
@yes_option()
@click.pass_obj
def redo(
    options: Options,
    group: str,
    places: tuple[str, ...],
    times: tuple[datetime, datetime] | None,
    offsets: tuple[int, int] | None,
    keys: tuple[str, ...],
    from_file: str | None,
    undo: str | None,
    plan: Path | None,
    rate: int,
) -> int:
    r"""Have done messages of GROUP handled again, just these, while it works on.

    What is named and done is opened, and its owners handle it as they handle what was set aside. Newer messages, of the
    same key too, are not held up and not repeated. What is not done yet, waits for a try or was set aside (redrive) is
    not touched.

    The plan is saved to a file, which is named: after an interruption --from-file FILE carries it on, and nothing is
    opened twice. --undo FILE counts what is still open of it as done.

    A fenced sink leaves these messages out as done, unless a program rewinds it first: --dry-run --plan FILE saves the
    plan, sink.rewind(plan.group, redone=plan.offsets) opens them there, and --from-file FILE here (docs/redo.md).

    Groups that take checkpoints go back by rollback, those with transactions by release-group.

    \b
    Exit status: 0 done; 1 not done, not confirmed, nothing of it is done, or some of it was left as it is; 2 wrong use;
    3 no Kafka.
    """
    ways = bool(places) + (from_file is not None) + (undo is not None)
    if ways != 1:
        raise click.UsageError("say which messages: TOPIC or TOPIC:PARTITION, or --from-file FILE; or --undo FILE.")
    if not places and (times or offsets or keys):
        raise click.UsageError("--time, --offsets and --key go with TOPIC or TOPIC:PARTITION.")
    if times and offsets:
        raise click.UsageError("--time and --offsets are two ways to say which: use one.")
    if plan is not None and plan.exists():
        raise click.UsageError(f"--plan {plan} is there already: an earlier redo could not be carried on by it.")
    with admin_of(options) as admin:
        if undo is not None:
            return _undo(options, admin, group, undo)
        path, made = _made(options, admin, group, from_file, _wish(options, places, times or offsets), keys)
        return _redo(options, admin, made, path, plan, rate)


def _undo(options: Options, admin: Admin, group: str, file: str) -> int:
    from kafka_marshal.admin import RedoPlan

    made = RedoPlan.read(file)
    made.check(group, options.topic)

    def say_undone(found: Settled, done: bool) -> None:
        say_settled(found, done)
        note(options, f"a fenced sink that was rewound, too: {_rewind(Path(file), 'undone')}")

    return carry_out(
        options,
        lambda: admin.undo_redo(made, dry_run=True),
        question=f"Count what is still open of {file} as done?",
        do=lambda: admin.undo_redo(made),
        if_interrupted="Some may count as done; the same command continues.",
        say=say_undone,
        json=settled_json,
        status=lambda found: NO if found.left else DONE,
    )


def _wish(options: Options, places: tuple[str, ...], bounds: tuple[Target, Target] | None) -> Wish:
    topics: dict[str, list[int]] = {}
    for place in places:
        topic, colon, number = place.rpartition(":") if place.rpartition(":")[2].isdecimal() else (place, "", "")
        topics.setdefault(topic, []).extend([int(number)] if colon else [])
    if not places:
        return {}
    with connected(options) as cluster:
        infos = cluster.topic_info(list(topics), options.timeout)
    missing = [topic for topic in topics if topic not in infos]
    if missing:
        raise CommandError(f"{', '.join(map(repr, missing))}: not on this cluster (any more). {NOT_DONE}", NO)
    return {
        (topic, number): bounds
        for topic, numbers in topics.items()
        for number in (numbers or range(infos[topic].partitions))
    }


def _made(
    options: Options, admin: Admin, group: str, file: str | None, wish: Wish, keys: tuple[str, ...]
) -> tuple[Path | None, RedoPlan]:
    """The plan, and its file if it has one already."""
    if file is None:
        return None, admin.plan_redo(group, wish, keys=keys or None)
    text = read_text(file, "--from-file")
    if text.lstrip().startswith("{"):
        from kafka_marshal.admin import RedoPlan

        made = RedoPlan.read(file)
        made.check(group, options.topic)
        return Path(file), made
    return None, admin.plan_redo(group, {}, messages=_messages(file, text))


def _messages(file: str, text: str) -> list[tuple[str, int, int]]:
    found = []
    for number, row in enumerate(csv.reader(text.splitlines()), start=1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or cells[0].startswith("#") or (number == 1 and cells[-1].lower() == "offset"):
            continue
        try:
            topic, partition, offset = cells
            found.append((topic, int(partition), int(offset)))
        except ValueError:
            raise CommandError(
                f"--from-file {file}, line {number}: topic,partition,offset are wanted. {NOT_DONE}", WRONG_USE
            ) from None
    return found


def _redo(options: Options, admin: Admin, made: RedoPlan, path: Path | None, plan: Path | None, rate: int) -> int:
    """path: the file that the plan has already; plan: the one that it is to have."""
    from kafka_marshal.admin import Redone
    from kafka_marshal.admin.positions import plan_path

    if not made.messages:
        if options.json:
            print_json(_json(options, None)(Redone(made), False))
        else:
            _say_plan(Redone(made))
            note(options, f"nothing of it is done, so there is nothing to do again. {NOT_DONE}")
        return DONE if options.dry_run else NO
    path = path or plan or plan_path(made.group, "redo")
    carries_on = f"kafka-marshal redo {quote(made.group)} --from-file {quote(str(path))}{options.reach()}"

    is_saved = path.exists()
    if options.dry_run and plan is not None:
        made.write(plan)
        is_saved = True

    def show(found: Redone) -> None:
        _say_plan(found)
        how = f"{_rewind(path, 'redone')}; then: {carries_on}" if is_saved else "first --dry-run --plan FILE"
        note(options, f"a fenced sink leaves these out as done, unless it is rewound, once, before: {how}")

    def do() -> Redone:
        with progress("opening") as show:
            return admin.redo(made, path=path, rate=rate, progress=show)

    def say_done(found: Redone, done: bool) -> None:
        if done:
            _say_left(found)
            say(f"group {made.group}: {count(found.opened, 'message is', 'messages are')} opened again.")
            undoes = f"kafka-marshal redo {quote(made.group)} --undo {quote(str(path))}{options.reach()}"
            note(options, f"the plan: {path}. To count what is still open as done: {undoes}")

    return carry_out(
        options,
        lambda: Redone(made),
        show=show,
        question=f"Have {count(made.messages, 'message')} of group {made.group} handled again?",
        do=do,
        if_interrupted=f"Some may be opened. To carry on: {carries_on}",
        say=say_done,
        json=_json(options, path, is_saved),
        status=lambda found: NO if found.left else DONE,
    )


def _say_plan(found: Redone) -> None:
    print_table(_COLUMNS, map(_cells, found.plan.partitions))
    if any(each.may_be_in_hand for each in found.plan.partitions):
        say_warning(
            "delivered at most once: those granted last may still be in flight, and would be handled beside that"
        )
    skipped = sum(each.skipped for each in found.plan.partitions)
    if skipped:
        say_warning(f"{count(skipped, 'message')} before the group's start: never handled so far")


def _cells(each: RedoPartition) -> list[str | Cell]:
    now_ms = int(local_ms())
    shown = []
    for end in (each.first, each.last):
        if end is None:
            shown.append(Cell("-", "dim"))
            continue
        key = "" if end.key is None else f" {utf8(end.key) or '0x' + end.key.hex()}"
        shown.append(
            Cell(
                f"{end.offset} {time_text(end.time)}{key}",
                short=f"{end.offset} {clock_text(end.time, now_ms)}{key}",
            )
        )
    means = [f"{amount:,} {text}" for name, text in _UNTOUCHED if (amount := getattr(each, name))]
    return [each.topic, str(each.partition), f"{each.messages:,}", *shown, "; ".join(means) or "all of it is done"]


def _say_left(found: Redone) -> None:
    for (topic, partition, first, last), why in list(found.left.items())[:_LISTED]:
        where = f"{first}" if first == last else f"{first}..{last}"
        say(f"{topic}:{partition}:{where} is left as it is: {why}.")
    if len(found.left) > _LISTED:
        say(f"… and {len(found.left) - _LISTED:,} more are left as they are (--json lists all).")


def _rewind(path: Path, which: str) -> str:
    """What a program does to its sink."""
    return f"plan = RedoPlan.read({str(path)!r}); sink.rewind(plan.group, {which}=plan.offsets)"


def _json(options: Options, path: Path | None, is_saved: bool = False) -> Callable[[Redone, bool], dict[str, object]]:
    def row(found: Redone, done: bool) -> dict[str, object]:
        return {
            "group": found.plan.group,
            "done": done,
            "opened": found.opened,
            "plan": str(path) if done or is_saved else None,
            "times": times_json(options),
            "partitions": [
                {
                    **fields_of(each, "topic partition messages open parked ahead gone skipped may_be_in_hand"),
                    **{
                        name: None if end is None else {**fields_of(end, "offset time"), **bytes_json("key", end.key)}
                        for name, end in (("first", each.first), ("last", each.last))
                    },
                }
                for each in found.plan.partitions
            ],
            "left": [
                {"topic": topic, "partition": partition, "first": first, "last": last, "why": why}
                for (topic, partition, first, last), why in found.left.items()
            ],
        }

    return row
