"""`open-messages`, `redrive`, `discard`, `park`: messages that were set aside, or wait for their next try."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.change import (
    NOT_DONE,
    carry_out,
    dry_run_option,
    group_argument,
    place_json,
    yes_option,
)
from kafka_marshal.cli.connection import admin_of
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.options import Options, complete_any_topic, complete_place, places_option, topic_partitions
from kafka_marshal.cli.output import (
    Cell,
    Column,
    fields_of,
    is_terminal,
    print_json_line,
    print_table,
    progress,
    say,
    say_warning,
)
from kafka_marshal.observe.payload import bytes_json, utf8
from kafka_marshal.observe.text import clock_text, count, local_ms, time_text
from kafka_marshal.types import F

if TYPE_CHECKING:
    from kafka_marshal.admin import Admin, Move, OpenMessage, RedrivenLetters, Settled

    Place = tuple[str, int, int]


_SOME_REDRIVEN = "Some may be redriven; the same command continues with the rest."

#: The most characters of a key or of a message, on a terminal.
_SHOWN = 40

#: The most messages named one by one, where they were left as they are.
_LISTED = 20

_COLUMNS = (
    Column("topic", fold=True, least=6),
    Column("partition", right=True),
    Column("offset", right=True),
    Column("key", fold=True, least=6),
    Column("deliveries", right=True),
    Column("state"),
    Column("reason", fold=True, least=10),
    Column("since"),
    Column("by", fold=True, least=6),
    Column("message", fold=True, from_width=130, least=10),
)

_DOES = {"redrive": "is redriven", "discard": "counts as done", "park": "is set aside"}
_DO = {"redrive": "are redriven", "discard": "count as done", "park": "are set aside"}


@command("open-messages")
@group_argument
@click.argument(
    "partitions", metavar="[TOPIC:PARTITION]...", nargs=-1, callback=topic_partitions, shell_complete=complete_place
)
@click.option("--parked", is_flag=True, help="Only those that were set aside.")
@click.pass_obj
def open_messages(options: Options, group: str, partitions: tuple[tuple[str, int], ...], parked: bool) -> int:
    r"""Messages of GROUP that are not done though its positions may be beyond them.

    Those set aside after their last try (parked), those that wait for their next try, and those in a worker's batch:
    with their keys, how often each was delivered, why it was set aside, since when, and by which client. A message
    that retention took is marked; one that waits until a time for its try is in the state later. `show` prints one
    whole, `redrive` has it tried again, `discard` counts it as done.
    Nothing is changed.

    \b
    Exit status: 0, also if there are none; 1 the log knows no such group; 2 wrong use; 3 no Kafka.
    """
    with admin_of(options) as admin:
        found = admin.open_messages(group, partitions or None, parked=parked)
    if options.json:
        for each in found:
            print_json_line(_json(each))
        return DONE
    if is_terminal():
        say(f"{group}: {_counted(found)}")
    if found or not is_terminal():
        print_table(_COLUMNS, _rows(found))
    if unread := sorted({(each.topic, each.partition, each.unread) for each in found if each.unread}):
        listed = "; ".join(f"{topic} [{partition}]: {why}" for topic, partition, why in unread[:_LISTED])
        say_warning(f"messages could not be read. {listed}")
    if is_terminal() and found:
        say(_next(options, group, found))
    return DONE


#: State → what may be done with a message, and the command.
_REMEDY = {
    "parked": ("Try it again", "redrive"),
    "later": ("Try it now", "redrive"),
    "waiting": ("Set it aside, so that its key continues", "park"),
}


def _next(options: Options, group: str, found: Sequence[OpenMessage]) -> str:
    """What to do next, with one message of each state."""
    from kafka_marshal.engine.work.topic_mark import POSITION_LOST

    lost = [each for each in found if each.unread.startswith(POSITION_LOST)]
    first = {each.state: each for each in reversed(found) if each not in lost}
    there = [each for each in found if not each.unread]
    lines = [f"Look into one: kafka-marshal show {quote(_at(each))}{options.reach()}" for each in there[:1]]
    for state, (what, verb) in _REMEDY.items():
        if state in first:
            lines.append(f"{what}: kafka-marshal {verb} {quote(group)} {quote(_at(first[state]))}{options.reach()}")
    if lost:
        lines.append(f"Count it as done: kafka-marshal discard {quote(group)} {quote(_at(lost[0]))}{options.reach()}")
    return "\n".join(lines)


def _counted(found: Sequence[OpenMessage]) -> str:
    """How many in which state, by reason."""
    states = Counter(each.state for each in found)
    reasons = Counter(each.reason or "" for each in found if each.state == "parked")
    parts = []
    if states["parked"]:
        why = ", ".join(f"{amount:,} {reason}" for reason, amount in reasons.most_common())
        parts.append(f"{states['parked']:,} set aside ({why})")
    parts += [f"{states['waiting']:,} waiting for the next try"] if states["waiting"] else []
    parts += [f"{states['later']:,} waiting for their time"] if states["later"] else []
    parts += [f"{states['acquired']:,} in workers' batches"] if states["acquired"] else []
    return ", ".join(parts) or "no open messages"


def _rows(found: Sequence[OpenMessage]) -> Iterator[list[str | Cell]]:
    """A row for each message; those of a batch that follow each other have one."""
    now_ms = int(local_ms())

    def batch(item: tuple[int, OpenMessage]) -> object:
        number, each = item
        alone = each.key_hash is not None or each.state != "acquired"
        return (each.topic, each.partition, each.since, number if alone else each.offset - number, alone)

    for _, several in groupby(enumerate(found), key=batch):
        run = [each for _, each in several]
        first, last = run[0], run[-1]
        message = "not in the topic any more" if first.gone else _text(first.value)
        yield [
            first.topic,
            str(first.partition),
            str(first.offset) if first is last else f"{first.offset}-{last.offset}",
            Cell("-", "dim") if first.gone or first.key is None else _cell(_text(first.key)),
            str(first.delivery_count),
            "gone" if first.gone else first.state,
            (first.reason or "-") if first.until is None else f"until {time_text(first.until)}",
            "-" if first.time is None else Cell(time_text(first.time), short=clock_text(first.time, now_ms)),
            first.client or "-",
            _cell(message),
        ]


def _text(value: bytes | None) -> str:
    if value is None:
        return "-"
    text = utf8(value)
    return f"0x{value.hex()}" if text is None else text or '""'


def _cell(text: str) -> Cell:
    return Cell(text, short=text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…")


def _at(message: OpenMessage) -> str:
    return ":".join(map(str, message.place))


def _json(message: OpenMessage) -> dict[str, object]:
    names = "group topic partition offset key_hash delivery_count state reason since time client"
    key = bytes_json("key", message.key)
    until = {} if message.until is None else {"until": message.until}
    return {**fields_of(message, names), **until, **key, "gone": message.gone, "unread": message.unread or None}


# -- what changes something ----------------------------------------------------------------------------------


def _which(doing: str) -> Callable[[F], F]:
    """The arguments and options that say which messages."""

    def add(function: F) -> F:
        for option in (
            dry_run_option(),
            click.option("--reason", metavar="R", help=f"{doing} all that were set aside for this reason."),
            click.option("--all", "everything", is_flag=True, help=f"{doing} all that were set aside."),
            click.argument(
                "places",
                metavar="[TOPIC:PARTITION:OFFSET]...",
                nargs=-1,
                callback=places_option,
                shell_complete=complete_place,
            ),
            group_argument,
        ):
            function = option(function)
        return function

    return add


def _wish(places: tuple[Place, ...], everything: bool, reason: str | None) -> dict[str, Any]:
    """What redrive and discard take."""
    if bool(places) + everything + (reason is not None) != 1:
        raise click.UsageError(
            "say which messages: --all, --reason R, or TOPIC:PARTITION:OFFSET of each. (kafka-marshal open-messages "
            "lists them.)"
        )
    return {"messages": list(places) or ("all" if everything else None), "reason": reason}


@command()
@_which("Redrive")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), metavar="N", help="At most N messages a second.")
@click.option(
    "--from", "source", metavar="DEAD_TOPIC", help="Instead: GROUP's dead letters.", shell_complete=complete_any_topic
)
@click.option(
    "--to", metavar="TOPIC", help="With --from: produce them into this topic.", shell_complete=complete_any_topic
)
@click.pass_obj
def redrive(
    options: Options,
    group: str,
    places: tuple[Place, ...],
    everything: bool,
    reason: str | None,
    rate: float | None,
    source: str | None,
    to: str | None,
) -> int:
    r"""Free messages of GROUP that were set aside: their owners handle them again, with all their tries.

    Each is freed once: the same command continues after an interruption, and two at a time share the work. A message
    that fails again is set aside again. One that retention took can't be delivered: it counts as done, and is named.

    With --from and --to: produce the dead letters of GROUP into another of its topics, with key, value and headers, in
    transactions of a group GROUP.redrive. Each is there once, for readers of committed messages; the same command
    continues after an interruption, and takes what is new. With --reason others stay, and later runs begin
    behind them.

    \b
    Exit status: 0 done, also if there was none; 1 a message named was not set aside, or the group is unknown; 2 wrong
    use; 3 no Kafka.
    """
    if (source is None) != (to is None):
        raise click.UsageError("dead letters need both: --from DEAD_TOPIC --to TOPIC.")
    if source is not None and to is not None:
        if places or everything:
            raise click.UsageError(
                "--from takes all dead letters, or with --reason some: name no messages, and not --all."
            )
        return _redrive_letters(options, group, source, to, reason, rate)
    wish = _wish(places, everything, reason)

    def settle(admin: Admin, dry_run: bool) -> Settled:
        with progress("redriving") as show:
            return admin.redrive(group, **wish, rate=rate, dry_run=dry_run, progress=show)

    return _settle(options, settle, _SOME_REDRIVEN)


@command()
@_which("Discard")
@yes_option()
@click.pass_obj
def discard(
    options: Options,
    group: str,
    places: tuple[Place, ...],
    everything: bool,
    reason: str | None,
) -> int:
    r"""Count messages of GROUP as done that were set aside, or wait for their next try: no worker gets them any more.

    It asks first. The messages stay in their topic until retention removes them. The log keeps who discarded them.

    \b
    Exit status: 0 done, also if there was none; 1 not confirmed, a message named is not open, or the group is unknown;
    2 wrong use, or no --yes; 3 no Kafka.
    """
    wish = _wish(places, everything, reason)

    def settle(admin: Admin, dry_run: bool) -> Settled:
        if dry_run:
            return admin.discard(group, **wish, dry_run=True)
        with progress("discarding") as show:
            return admin.discard(group, **wish, progress=show)

    def question(planned: Settled) -> str:
        amount, them = count(len(planned.messages), "message"), "it" if len(planned.messages) == 1 else "them"
        return f"Discard {amount} of group {group}? No worker gets {them} again." if planned.messages else ""

    if_interrupted = "Some may be discarded; the same command continues with the rest."
    return _settle(options, settle, if_interrupted, question)


@command()
@group_argument
@click.argument(
    "places",
    metavar="TOPIC:PARTITION:OFFSET...",
    nargs=-1,
    required=True,
    callback=places_option,
    shell_complete=complete_place,
)
@click.option("--reason", default=None, metavar="R", help="Why, for open-messages (OPERATOR).")
@dry_run_option()
@click.pass_obj
def park(options: Options, group: str, places: tuple[Place, ...], reason: str | None) -> int:
    r"""Set messages of GROUP aside that keep failing, so that their keys continue without them.

    Only a message whose tries are in the log can be set aside: open-messages shows it as waiting. `redrive` has it
    tried again later.

    \b
    Exit status: 0 done; 1 a message does not wait for its next try, or the group is unknown; 2 wrong use; 3 no Kafka.
    """
    chosen = {} if reason is None else {"reason": reason}
    return _settle(options, lambda admin, dry_run: admin.park(group, list(places), dry_run=dry_run, **chosen))


def _settle(
    options: Options,
    settle: Callable[[Admin, bool], Settled],
    if_interrupted: str = NOT_DONE,
    question: Callable[[Settled], str] | None = None,
) -> int:
    """question: of what is planned; "": there is nothing to do. None: it is done at once."""
    with admin_of(options) as admin:
        planned = None if question is None else settle(admin, True)
        asked = "" if question is None or planned is None else question(planned)
        return carry_out(
            options,
            lambda: planned or settle(admin, True),
            question=asked,
            do=lambda: settle(admin, False) if planned is None or asked else planned,
            if_interrupted=if_interrupted,
            say=say_settled,
            json=settled_json,
            status=lambda done: NO if done.left else DONE,
        )


def _redrive_letters(options: Options, group: str, source: str, to: str, reason: str | None, rate: float | None) -> int:
    def redrive(*, dry_run: bool = False) -> RedrivenLetters:
        with progress("redriving") as show:
            return admin.redrive_letters(group, source, to, reason=reason, rate=rate, dry_run=dry_run, progress=show)

    def say_redriven(found: RedrivenLetters, done: bool) -> None:
        would = "" if done else "would be done: "
        letters = count(found.redriven, "dead letter is", "dead letters are")
        say(f"{would}{letters} produced into {to}, as group {found.group}.")
        if found.repeats:
            say(f"{count(found.repeats, 'copy of an earlier letter is', 'copies of earlier letters are')} left out.")
        if found.passed_over:
            whose = "of another group" if reason is None else "of another group, or with another reason"
            say_warning(
                f"{count(found.passed_over, 'letter')} {whose}: left in {source}. Later runs for {group} begin behind "
                "them."
            )
        if found.others:
            say_warning(
                f"{count(found.others, 'record')} of {source} without a message that can be produced: left out."
            )

    options.if_interrupted = _SOME_REDRIVEN
    with admin_of(options) as admin:
        return carry_out(
            options,
            lambda: redrive(dry_run=True),
            do=redrive,
            say=say_redriven,
            json=lambda found, done: {
                "group": group,
                "done": done,
                "from": source,
                "to": to,
                **fields_of(found, "as=group redriven repeats passed_over others"),
            },
        )


def open_text(move: Move) -> str:
    """What happens to open messages, as the end of a sentence."""
    closed, text = sum(last - first + 1 for first, last in move.closed), ""
    if closed:
        text += f"; {count(closed, 'open message counts', 'open messages count')} as done"
        text += ", also what was set aside: the topic has them no more" if move.lost else ""
    return text + (f"; {len(move.parked):,} set aside stay so" if move.parked else "")


def settled_json(found: Settled, done: bool) -> dict[str, object]:
    """What was settled, or (False) would be, for --json."""
    return {
        "group": found.group,
        "done": done,
        "messages": [place_json(place) for place in found.messages],
        "gone": [place_json(place) for place in found.gone],
        "left": [{**place_json(place), "why": why} for place, why in found.left.items()],
    }


def say_settled(found: Settled, done: bool) -> None:
    """The same, for people."""
    would = "" if done else "would be done: "
    for place, why in list(found.left.items())[:_LISTED]:
        say(f"{':'.join(map(str, place))} is left as it is: {why}.")
    if len(found.left) > _LISTED:
        say(f"… and {len(found.left) - _LISTED:,} more are left as they are (--json lists all).")
    if found.gone:
        amount = count(len(found.gone), "message is", "messages are")
        some = ", ".join(":".join(map(str, place)) for place in found.gone[:_LISTED])
        say(f"{would}{amount} not in the topic any more (retention), and can't be delivered: done now. {some}")
    what = _DOES if len(found.messages) == 1 else _DO
    if found.messages or not (found.left or found.gone):
        say(f"{would}{count(len(found.messages), 'message')} of group {found.group} {what[found.action]}.")
    if not (found.messages or found.left or found.gone):
        listed = ", ".join(f"{reason} ({amount:,})" for reason, amount in Counter(found.reasons).most_common(_LISTED))
        say_warning(
            f"set aside in group {found.group}: {listed}." if listed else f"group {found.group} has set none aside."
        )
