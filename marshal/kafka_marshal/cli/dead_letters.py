"""`dead-letters`: a dead-letter topic by reason, by key, or letter by letter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Literal

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.failures import DONE
from kafka_marshal.cli.options import Options, complete_any_topic, complete_group, time_option
from kafka_marshal.cli.output import (
    Cell,
    Column,
    is_terminal,
    print_json,
    print_json_line,
    print_table,
    progress,
    say,
    say_warning,
)
from kafka_marshal.observe.payload import bytes_json, utf8
from kafka_marshal.observe.text import clock_text, count, local_ms, near, number, time_text
from kafka_marshal.secret import visible

if TYPE_CHECKING:
    from kafka_marshal.admin.dead_letters import DeadLetters
    from kafka_marshal.client.dead_letters import DeadLetter, OddLetter

    Letter = DeadLetter | OddLetter

#: The most reasons or keys with their own row; other letters are counted in one row, to bound memory.
MOST_ROWS = 10_000

#: The most characters of a reason, and of a key, on a terminal.
REASON_SHOWN = 120
KEY_SHOWN = 40

#: Letters under one line of titles on a terminal: a table is drawn with all of its rows.
BLOCK = 200

#: With --traceback: the most reasons whose tracebacks are shown.
MOST_TRACEBACKS = 20

By = Literal["reason", "key", "time"]

_WHEN = (Column("first"), Column("last"))
_BY_REASON = (
    Column("letters", right=True),
    *_WHEN,
    Column("reason", fold=True, least=14),
    Column("example", fold=True, least=12),
)
_BY_KEY = (
    Column("letters", right=True),
    *_WHEN,
    Column("key", fold=True, least=10),
    Column("last reason", fold=True, least=14),
)
_BY_TIME = (
    Column("time"),
    Column("message", fold=True, least=10),
    Column("group", fold=True, least=8),
    Column("tries", right=True),
    Column("key", fold=True, least=6),
    Column("reason", fold=True, least=14),
    Column("repeat", pipes_only=True),
    Column("epoch", pipes_only=True),
    Column("letter", pipes_only=True),
)


@dataclass(slots=True)
class Row:
    """The letters with one reason, or one key."""

    error: str | None
    reason: str
    key: bytes | None
    letters: int = 0
    first_ms: int = 0
    last_ms: int = 0
    example: str = ""
    #: Of the example, if requested.
    traceback: str | None = None

    def add(self, letter: Letter, with_traceback: bool) -> None:
        """Count one letter."""
        place = _place(letter)
        if not self.letters or (letter.time_ms, place) < (self.first_ms, self.example):
            self.first_ms, self.example = letter.time_ms, place
            self.traceback = letter.traceback if with_traceback else None
        self.last_ms = max(self.last_ms, letter.time_ms)
        self.letters += 1


@dataclass(slots=True)
class Summary:
    """Counts over all letters. Copies are counted separately."""

    by: By
    with_tracebacks: bool = False
    rows: dict[object, Row] = field(default_factory=dict)
    #: Letters beyond the largest number of rows.
    rest: Row = field(default_factory=lambda: Row(None, "", None))
    letters: int = 0
    repeats: int = 0
    unreadable: int = 0

    def take(self, letters: Iterable[Letter]) -> Iterator[Letter]:
        """Count these letters while they pass."""
        for letter in letters:
            if letter.repeated:
                self.repeats += 1
            else:
                self.letters += letter.topic is not None
                self.unreadable += letter.topic is None
                self._count(letter)
            yield letter

    def _count(self, letter: Letter) -> None:
        if self.by == "time":
            return
        which: object = (letter.error, letter.reason) if self.by == "reason" else letter.key
        row = self.rows.get(which)
        if row is None and len(self.rows) < MOST_ROWS:
            row = self.rows[which] = Row(letter.error, letter.reason, letter.key)
        if row is None:
            row = self.rest
        if self.by == "key" and letter.time_ms >= row.last_ms:
            row.error, row.reason = letter.error, letter.reason
        row.add(letter, self.with_tracebacks)

    @property
    def sorted(self) -> list[Row]:
        """The most frequent first, then the latest."""
        return sorted(self.rows.values(), key=lambda row: (-row.letters, -row.last_ms))


@command("dead-letters")
@click.argument("dead_letter_topic", metavar="TOPIC", shell_complete=complete_any_topic)
@click.option(
    "--by",
    type=click.Choice(["reason", "key", "time"]),
    default="reason",
    help="Count by reason (as a rule) or by key, or list each letter by time.",
)
@click.option("--group", help="Only letters of this group.", shell_complete=complete_group)
@click.option(
    "--since",
    callback=time_option,
    metavar="TIME",
    help="Written from then on: 03:14, yesterday 03:14, 2026-11-21T04:50Z, or 10m (ago).",
)
@click.option("--traceback", "with_tracebacks", is_flag=True, help="With --by reason: where each was raised first.")
@click.option("-n", "last", type=click.IntRange(min=1), metavar="N", help="With --by time: the last N letters.")
@click.pass_obj
def dead_letters(
    options: Options,
    dead_letter_topic: str,
    by: By,
    group: str | None,
    since: int | None,
    with_tracebacks: bool,
    last: int | None,
) -> int:
    r"""Messages that failed for good, from the dead-letter topic TOPIC, up to its present end.

    A message may be there twice if a worker died before it committed: copies are marked, and not counted. Letters of
    Kafka's share groups are read, too. A letter that does not name a message has a row that says so. Nothing is
    changed or committed.

    \b
    Exit status: 0; 1 there is no such topic, or it can't be read; 3 no Kafka.
    """
    if last is not None and by != "time":
        raise click.UsageError("-n is for --by time.")
    if with_tracebacks and by != "reason":
        raise click.UsageError("--traceback is for --by reason. (--by time --json has the traceback of each letter.)")
    from kafka_marshal.admin.dead_letters import DeadLetters
    from kafka_marshal.cli.connection import connected
    from kafka_marshal.topic_names import is_topic_name

    if not is_topic_name(dead_letter_topic):
        raise click.BadParameter(f"no topic can be called {dead_letter_topic!r}. Nothing was read", param_hint="TOPIC")
    summary, groups = Summary(by, with_tracebacks), set[str]()
    with (
        connected(options) as cluster,
        DeadLetters(cluster, dead_letter_topic, since, options.timeout, close=False) as found,
    ):
        if by == "time":
            _print_letters(options, summary.take(_of_group(_all(found), group, groups)), last)
        else:
            with progress("reading dead letters") as show:
                deque(summary.take(_of_group(_shown(found, show), group, groups)), maxlen=0)
            _print_rows(options, found, summary)
    if by == "time" or not is_terminal() or options.json:
        _say_others(found)
    if group is not None and not summary.letters and groups:
        say_warning(f"no dead letter of group {group!r} in {dead_letter_topic}{near(group, groups) or '.'}")
    return DONE


def _shown(found: DeadLetters, show: Callable[[int, int], None]) -> Iterator[Letter]:
    for letter in _all(found):
        show(found.done, found.total)
        yield letter


def _all(found: DeadLetters) -> Iterator[Letter]:
    """All letters, including unreadable ones."""
    with suppress(StopIteration):
        while True:
            yield found.next_of_all()


def _of_group(letters: Iterable[Letter], group: str | None, groups: set[str]) -> Iterator[Letter]:
    for letter in letters:
        if group is None or letter.group == group:
            yield letter
        elif letter.group is not None and len(groups) < MOST_ROWS:
            groups.add(letter.group)


def _say_others(found: DeadLetters) -> None:
    if found.others:
        which = "is no dead letter: its" if found.others == 1 else "are no dead letters: their"
        say_warning(
            f"{count(found.others, 'record')} of {found.topic} {which} headers do not name a message. Left out."
        )


# -- summaries -----------------------------------------------------------------------------------------------


def _print_rows(options: Options, found: DeadLetters, summary: Summary) -> None:
    rows = summary.sorted
    if options.json:
        print_json(
            {
                "topic": found.topic,
                "by": summary.by,
                "letters": summary.letters,
                "repeats": summary.repeats,
                "others": found.others,
                "unreadable": summary.unreadable,
                "rows": [_row_json(row, summary) for row in rows],
                "not_in_rows": summary.rest.letters,
            }
        )
        return
    if is_terminal():
        say(_headline(found, summary))
        if not rows:
            return
    now_ms = int(local_ms())
    if summary.by == "reason":
        cells = [[*_counted(row, now_ms), _reason(row.error, row.reason), row.example] for row in rows]
    else:
        cells = [[*_counted(row, now_ms), _key(row.key), _reason(row.error, row.reason)] for row in rows]
    if summary.rest.letters:
        what = "(other reasons)" if summary.by == "reason" else "(other keys)"
        cells.append([*_counted(summary.rest, now_ms), what, ""])
    print_table(_BY_REASON if summary.by == "reason" else _BY_KEY, cells)
    if summary.with_tracebacks:
        _print_tracebacks(rows)


def _print_tracebacks(rows: list[Row]) -> None:
    for row in rows[:MOST_TRACEBACKS]:
        lines = (row.traceback or "no traceback is in this letter").splitlines()
        say("\n".join(["", visible(row.example), *(f"  {visible(line)}" for line in lines)]))
    if len(rows) > MOST_TRACEBACKS:
        say_warning(f"not shown: the tracebacks of {count(len(rows) - MOST_TRACEBACKS, 'more reason')}.")


def _headline(found: DeadLetters, summary: Summary) -> str:
    lines = [f"{found.topic}: {count(summary.letters, 'dead letter')}"]
    if summary.repeats:
        lines.append(f"{count(summary.repeats, 'repeat')} of these, not counted")
    if summary.unreadable:
        lines.append(f"{summary.unreadable:,} that can't be read")
    if found.others:
        lines.append(f"{count(found.others, 'other record')}, no dead letters")
    return "\n".join(lines)


def _counted(row: Row, now_ms: int) -> list[str | Cell]:
    return [str(row.letters), _when(row.first_ms, now_ms), _when(row.last_ms, now_ms)]


def _when(time_ms: int, now_ms: int) -> str | Cell:
    return "-" if time_ms < 0 else Cell(time_text(time_ms), short=clock_text(time_ms, now_ms))


def _reason(error: str | None, reason: str) -> Cell:
    """The error's class without its module, and its message."""
    name = (error or "").rpartition(".")[2]
    text = ": ".join(part for part in (name, reason) if part) or "-"
    short = text if len(text) <= REASON_SHOWN else f"{text[: REASON_SHOWN - 1]}…"
    return Cell(text, short=short)


def _key(key: bytes | None) -> Cell:
    """The key as text if it is text, else its bytes; "-": no key."""
    if key is None:
        return Cell("-", "dim")
    text = utf8(key)
    shown = f"0x{key.hex()}" if text is None else text or '""'
    return Cell(shown, short=shown if len(shown) <= KEY_SHOWN else f"{shown[: KEY_SHOWN - 1]}…")


def _place(letter: Letter) -> str:
    """The place of the message; of an unreadable letter, its own."""
    if letter.topic is None:
        return ":".join(map(str, letter.place))
    return f"{letter.topic}:{letter.partition}:{letter.offset}"


def _row_json(row: Row, summary: Summary) -> dict[str, object]:
    keyed = {} if summary.by == "reason" else bytes_json("key", row.key)
    return {
        **keyed,
        **({"traceback": row.traceback} if summary.with_tracebacks else {}),
        "error": row.error,
        "reason": row.reason,
        "letters": row.letters,
        "first": row.first_ms,
        "last": row.last_ms,
        "example": row.example,
    }


# -- letters -------------------------------------------------------------------------------------------------


def _print_letters(options: Options, letters: Iterable[Letter], last: int | None) -> None:
    if last is not None:
        letters = deque(letters, maxlen=last)
    if options.json:
        for letter in letters:
            print_json_line(_letter_json(letter))
        return
    rest = iter(letters)
    if not is_terminal():
        print_table(_BY_TIME, map(_cells, rest))
        return
    while block := list(islice(rest, BLOCK)):
        print_table(_BY_TIME, map(_cells, block))


def _cells(letter: Letter) -> list[str | Cell]:
    reason = _reason(letter.error, letter.reason)
    if letter.repeated:
        reason = Cell(reason.text, "dim", f"repeat: {reason.short}")
    return [
        _when(letter.time_ms, int(local_ms())),
        "-" if letter.topic is None else _place(letter),
        letter.group or "-",
        number(letter.delivery_count),
        _key(letter.key),
        reason,
        "yes" if letter.repeated else "no",
        number(letter.epoch),
        ":".join(map(str, letter.place)),
    ]


def _letter_json(letter: Letter) -> dict[str, object]:
    return {
        "time": letter.time_ms,
        "topic": letter.topic,
        "topic_partition": letter.partition,
        "offset": letter.offset,
        "group": letter.group,
        "delivery_count": letter.delivery_count,
        "error": letter.error,
        "reason": letter.reason,
        "traceback": letter.traceback,
        "unreadable": letter.topic is None,
        "epoch": letter.epoch,
        "repeated": letter.repeated,
        **bytes_json("key", letter.key),
        **bytes_json("value", letter.value),
        "headers": [{"name": name, **bytes_json("value", value)} for name, value in letter.headers],
        "letter_topic": letter.place[0],
        "letter_partition": letter.place[1],
        "letter_offset": letter.place[2],
    }
