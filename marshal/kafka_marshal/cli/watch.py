"""What `status` and `lag` share: one picture of a :class:`View`, or one after the other until Ctrl-C."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from kafka_marshal.adapters.interface import Cluster
from kafka_marshal.cli.options import Options
from kafka_marshal.cli.output import (
    Cell,
    Column,
    Row,
    console,
    is_terminal,
    plain_rows,
    print_json,
    print_json_line,
    progress,
    rich_table,
    say_warning,
    warnings_from_the_library,
)
from kafka_marshal.cli.text import clean, time_text
from kafka_marshal.cli.view import LeaseRow, View
from kafka_marshal.errors import KafkaUnavailableError

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["Picture", "Section", "show", "stuck_section"]

_STUCK = (
    Column("stuck group", fold=True),
    Column("topic", fold=True),
    Column("partition", right=True),
    Column("at", right=True),
    Column("why"),
)


#: How often a topic that is watched is looked at: was it made anew (L2)?
_CHECK_S = 10.0
#: While watching, a broker gets this long to answer before the picture says that it does not.
_PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class Section:
    """A table, and what to say instead of an empty one (None: nothing)."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    if_empty: str | None
    #: For people only.
    title: str | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """All that is shown of one moment."""

    headline: str
    sections: Sequence[Section]
    #: Warnings, for standard error where the picture goes to a pipe.
    notes: Sequence[str]
    json: dict[str, object]
    status: int


def show(
    cluster: Cluster,
    options: Options,
    picture: Callable[[View], Picture],
    *,
    interval: float | None = None,
    tick: bool = False,
    listen: bool = True,
    window_ms: int = 30_000,
) -> int:
    """Catch up, take the picture and print it; every `interval` seconds until Ctrl-C, where one is given.

    listen: learn the broker's time first. tick: append Ticks for that.
    """
    view = View(cluster, options.topic, options.timeout, window_ms)
    try:
        with progress("reading the log") as progressed:
            view.catch_up(progressed)
        if tick:
            view.tick()
        elif listen:
            view.learn_time()
        if interval is None:
            return _print(picture(view), options)
        view.patience_s = _PATIENCE_S
        if options.json or not is_terminal():
            return _repeat(view, cluster, options, picture, interval)
        return _watch(view, cluster, options, picture, interval)
    finally:
        view.replica.close()


def _print(taken: Picture, options: Options) -> int:
    if options.json:
        print_json(taken.json)
        return taken.status
    if is_terminal():
        console().print(_drawn(taken, []))
        return taken.status
    _print_plain(taken)
    return taken.status


def _print_plain(taken: Picture) -> None:
    """Tables as tab-separated lines, with an empty line between two; notes on standard error."""
    before: Sequence[Column] | None = None
    for section in taken.sections:
        if not section.rows and before is not None:
            continue
        lines = list(plain_rows(section.columns, section.rows))
        if section.columns is before:  # one table for programs, however it is divided for people
            del lines[0]
        elif before is not None:
            click.echo()
        for line in lines:
            click.echo(line)
        before = section.columns
    for note in taken.notes:
        say_warning(note)


def _drawn(taken: Picture, warnings: Sequence[str]) -> Group:
    """The picture for a terminal."""
    from rich.console import Group, RenderableType
    from rich.text import Text

    parts: list[RenderableType] = [Text(clean(taken.headline), style="bold")]
    for section in taken.sections:
        if section.rows:
            parts.append(rich_table(section.columns, section.rows, section.title))
        elif section.if_empty is not None:
            parts.append(Text(section.if_empty, style="dim"))
    parts += [Text.assemble(("note: ", "bold yellow"), clean(note)) for note in [*taken.notes, *warnings]]
    return Group(*parts)


def _repeat(view: View, cluster: Cluster, options: Options, picture: Callable[[View], Picture], interval: float) -> int:
    """Watching without a terminal: one picture after the other, JSON on one line each."""
    checked = time.monotonic()
    while True:
        taken = picture(view)
        if options.json:
            print_json_line(taken.json)
        else:
            click.echo(f"# {time_text(view.clock.now_ms())}  {clean(taken.headline)}")
            _print_plain(taken)
        view.follow(interval)
        checked = _check(view, cluster, options, checked)


def _watch(view: View, cluster: Cluster, options: Options, picture: Callable[[View], Picture], interval: float) -> int:
    """Watching on a terminal: the picture changes in its place; the last one stays when it ends."""
    from rich.live import Live

    warnings: deque[str] = deque(maxlen=3)
    checked = time.monotonic()
    taken = picture(view)
    try:
        with (
            warnings_from_the_library(options.debug, warnings.append),
            Live(_drawn(taken, ()), console=console(), auto_refresh=False, screen=True) as live,
        ):
            while True:
                view.follow(interval)
                try:
                    checked = _check(view, cluster, options, checked)
                    taken = picture(view)
                    warnings.clear()
                except KafkaUnavailableError as error:
                    warnings.append(f"Kafka does not answer; what is shown is of before. {error}")
                now = f"{time_text(view.clock.now_ms())}  {options.topic}  (Ctrl-C ends)"
                live.update(_with_clock(taken, now, warnings), refresh=True)
    finally:
        console().print(_drawn(taken, warnings))


def _with_clock(taken: Picture, now: str, warnings: Sequence[str]) -> Group:
    from rich.console import Group
    from rich.text import Text

    return Group(Text(clean(now), style="dim"), _drawn(taken, warnings))


def _check(view: View, cluster: Cluster, options: Options, checked: float) -> float:
    """Now and then: is it still the topic that we read? Raises TopicChangedError."""
    if time.monotonic() - checked < _CHECK_S:
        return checked
    view.replica.check(cluster.topic_info([options.topic], _PATIENCE_S).get(options.topic))
    return time.monotonic()


def stuck_section(rows: list[LeaseRow]) -> Section:
    """The partitions that stand still, each with why."""
    cells: list[list[str | Cell]] = [
        [row.group, row.topic, str(row.partition), str(row.position), Cell(row.stuck, "red")]
        for row in rows
        if row.stuck
    ]
    return Section(_STUCK, cells, None)
