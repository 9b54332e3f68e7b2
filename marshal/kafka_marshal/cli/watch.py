"""What `status` and `lag` share: one picture of a :class:`LiveView`, or one after the other until Ctrl-C."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.connection import catch_up, view_of
from kafka_marshal.cli.output import (
    Cell,
    Column,
    Row,
    console,
    is_terminal,
    plain_rows,
    print_json,
    print_json_line,
    rich_table,
    say_warning,
    warnings_from_the_library,
)
from kafka_marshal.errors import KafkaUnavailableError
from kafka_marshal.observe.problems import deleted_text, places
from kafka_marshal.observe.rows import NO_PROGRESS, GroupRow, LeaseRow
from kafka_marshal.observe.text import span, time_text
from kafka_marshal.secret import visible

if TYPE_CHECKING:
    from rich.console import Group

    from kafka_marshal.cli.options import Options
    from kafka_marshal.observe.view import LiveView
    from kafka_marshal.ports import Cluster

_STUCK = (
    Column("stuck group", fold=True),
    Column("partitions", fold=True),
    Column("why", fold=True),
)

#: How often it is checked whether the watched topic was recreated (L2).
_CHECK_S = 10.0
#: While watching, a broker has this long to answer before the picture says that it does not (s).
_PATIENCE_S = 2.0
#: While watching: the most lines of notes, and the share of the screen of each table after the first.
_NOTES, _SHARE = 3, 4


@dataclass(frozen=True, slots=True)
class Section:
    """A table, and the text for an empty one (None: nothing)."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    if_empty: str | None
    #: On terminals only.
    title: str | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """All that is shown of one moment."""

    headline: str
    sections: Sequence[Section]
    #: Warnings; on standard error if the picture goes to a pipe.
    notes: Sequence[str]
    json: dict[str, object]
    status: int


def show(
    cluster: Cluster,
    options: Options,
    picture: Callable[[LiveView], Picture],
    *,
    interval: float | None = None,
    tick: bool = False,
    listen: bool = True,
    window_ms: int = 30_000,
) -> int:
    """Catch up, take the picture and print it; with `interval` again at that interval (s), until Ctrl-C.

    listen: learn the broker's time first. tick: append Ticks for that.
    """
    with view_of(cluster, options, window_ms) as view:
        catch_up(view)
        if tick:
            view.tick()
        elif listen:
            view.learn_time()
        if interval is None:
            return print_picture(picture(view), options)
        view.patience_s = _PATIENCE_S
        if options.json or not is_terminal():
            return _repeat(view, cluster, options, picture, interval)
        return _watch(view, cluster, options, picture, interval)


def print_picture(taken: Picture, options: Options) -> int:
    """Print one picture; returns the exit status."""
    if options.json:
        print_json(taken.json)
        return taken.status
    if is_terminal():
        console().print(_drawn(taken))
        return taken.status
    _print_plain(taken)
    return taken.status


def _print_plain(taken: Picture) -> None:
    """Tables as tab-separated lines, with an empty line between two; headline and notes on standard error."""
    click.echo(visible(taken.headline), err=True)
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


def _drawn(taken: Picture) -> Group:
    """The whole picture for a terminal, the notes last: next to the prompt."""
    from rich.console import Group, RenderableType
    from rich.text import Text

    parts: list[RenderableType] = [Text(visible(taken.headline), style="bold")]
    for section in taken.sections:
        if section.rows:
            parts += [Text()] if len(parts) > 1 else []
            parts.append(rich_table(section.columns, section.rows, section.title))
        elif section.if_empty is not None:
            parts.append(Text(section.if_empty, style="dim"))
    parts += [Text.assemble(("note: ", "bold yellow"), visible(note)) for note in taken.notes]
    return Group(*parts)


def _fitted(taken: Picture, above: str, alarms: Sequence[str]) -> Group:
    """The picture on one screen, its head and notes first: tables are cut where the screen ends, and say so."""
    from rich.console import Group, RenderableType
    from rich.text import Text

    screen = console()
    parts: list[RenderableType] = [Text(visible(above), "dim", no_wrap=True, overflow="ellipsis")]
    parts += [Text(visible(alarm), "bold red") for alarm in alarms]
    parts.append(Text(visible(taken.headline), "bold", no_wrap=True, overflow="ellipsis"))
    notes = list(taken.notes)
    if len(notes) > _NOTES:
        notes[_NOTES - 1 :] = [f"… {len(notes) - _NOTES + 1} more notes: the same command without --watch shows them"]
    for note in notes:
        line = Text.assemble(("note: ", "bold yellow"), visible(note), no_wrap=True, overflow="ellipsis")
        parts.append(line)
    left = screen.height - 1 - sum(len(screen.render_lines(part)) for part in parts)
    tables = [section for section in taken.sections if section.rows]
    cut = [_cut(section, screen.height // _SHARE) for section in tables[1:]]
    for table in cut:
        left -= len(screen.render_lines(table))
    if tables:
        parts += [_cut(tables[0], left), *cut]
    else:
        parts += [Text(section.if_empty, style="dim") for section in taken.sections if section.if_empty is not None]
    return Group(*parts)


def _cut(section: Section, height: int) -> Group:
    """The table cut to that number of lines, with at least one row, and the number of omitted rows."""
    from rich.console import Group, RenderableType
    from rich.text import Text

    screen = console()

    def drawn(amount: int) -> Group:
        parts: list[RenderableType] = [rich_table(section.columns, section.rows[:amount], section.title)]
        if amount < len(section.rows):
            parts.append(Text(f"… {len(section.rows) - amount:,} more", style="dim"))
        return Group(*parts)

    fits, too_many = 1, min(len(section.rows), max(1, height)) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if len(screen.render_lines(drawn(middle))) <= height:
            fits = middle
        else:
            too_many = middle
    return drawn(fits)


def _repeat(
    view: LiveView, cluster: Cluster, options: Options, picture: Callable[[LiveView], Picture], interval: float
) -> int:
    """Watching without a terminal: one picture after the other, JSON on one line each."""
    checked = time.monotonic()
    while True:
        taken = picture(view)
        if options.json:
            print_json_line(taken.json)
        else:
            click.echo(f"# {time_text(view.clock.now_ms())}  {visible(taken.headline)}")
            _print_plain(taken)
        view.watch(interval)
        checked = _check(view, cluster, options, checked)


def _watch(
    view: LiveView, cluster: Cluster, options: Options, picture: Callable[[LiveView], Picture], interval: float
) -> int:
    """Watching on a terminal: the picture changes in its place; the last one stays when it ends."""
    from rich.live import Live

    said: deque[str] = deque(maxlen=2)
    checked = answered = time.monotonic()
    view.watched = True
    taken = picture(view)
    try:
        with (
            warnings_from_the_library(options.debug, said.append),
            Live(_fitted(taken, "", ()), console=console(), auto_refresh=False, screen=True) as live,
        ):
            while True:
                view.watch(interval)
                view.outage, alarms = False, []
                try:
                    checked = _check(view, cluster, options, checked)
                    taken = picture(view)
                    answered = time.monotonic()
                except KafkaUnavailableError:
                    view.outage = True
                    taken = picture(view)
                    silence = span((time.monotonic() - answered) * 1000)
                    alarms = [f"Kafka has not answered for {silence}: what is shown is from before."]
                now = f"{time_text(view.clock.now_ms())}  {options.topic}  (Ctrl-C ends)"
                live.update(_fitted(taken, now, [*alarms, *said]), refresh=True)
                said.clear()
    finally:
        console().print(_drawn(taken))


def _check(view: LiveView, cluster: Cluster, options: Options, checked: float) -> float:
    """From time to time, check that the topic was not recreated. Raises TopicChangedError."""
    if time.monotonic() - checked < _CHECK_S:
        return checked
    view.replica.check(cluster.topic_info([options.topic], _PATIENCE_S).get(options.topic))
    return time.monotonic()


def lag_cell(rows: Sequence[LeaseRow], style: str = "") -> Cell:
    """The lag of these rows; "position lost", or the known part with a + if one is not known."""
    if any(row.lost for row in rows):
        return Cell("position lost", "bold red", "lost")
    known = [row.lag for row in rows if row.lag is not None]
    if not known:
        return Cell("-", style)
    return Cell(f"{sum(known)}+" if len(known) < len(rows) else str(sum(known)), style)


def deleted_notes(groups: Iterable[GroupRow]) -> list[str]:
    """Offsets that retention deleted before they were done: the lag does not count them."""
    notes = []
    for each in groups:
        rows = [row for row in each.leases if row.deleted]
        if rows:
            notes.append(f"{each.group}: {deleted_text(rows)}")
    return notes


def stuck_section(rows: Iterable[LeaseRow]) -> Section:
    """Partitions without progress, grouped by reason."""
    found: dict[tuple[str, str], list[LeaseRow]] = {}
    for row in rows:
        if row.held_back and not row.stuck:
            found[row.group, f"{row.place}{row.topic}{row.held_back}"] = [row]
        elif row.stuck:
            hangs = row.stuck.startswith(NO_PROGRESS)
            found.setdefault((row.group, f"{NO_PROGRESS} {row.client}" if hangs else row.stuck), []).append(row)
    cells: list[list[str | Cell]] = []
    for (group, _), same in found.items():
        first = min(same, key=lambda row: row.waiting_ms or 0)
        cells.append(
            [group, places(same), Cell(first.stuck, "red") if first.stuck else Cell(first.held_back, "yellow")]
        )
    return Section(_STUCK, cells, None)
