"""What commands print: tables for people on a terminal, tab-separated lines in a pipe, JSON for programs, progress.

Cells are escaped here (``visible``), so that no command can forget it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal

import click

from kafka_marshal.cli.app import paint
from kafka_marshal.secret import visible
from kafka_marshal.types import T

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


#: Shorter work gets no progress bar (s).
_PATIENCE_S = 0.5


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell with a style (rich's names) and a shorter text for terminals."""

    text: str
    style: str = ""
    short: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title, whether it is aligned to the right, whether it may be folded if space is short."""

    title: str
    right: bool = False
    fold: bool = False
    #: Shown in pipes only, for programs.
    pipes_only: bool = False
    #: Omitted on narrower terminals.
    from_width: int = 0
    #: The least width if it is folded; also that of its title.
    least: int = 0


Row = Sequence[str | Cell]


@dataclass(frozen=True, slots=True)
class Field(Generic[T]):
    """What is shown of each row: its name in JSON, its column, and where its value comes from.

    Without a name it is not in JSON, without a column not in tables.
    """

    name: str
    #: The value: an attribute of the row (default: the one of that name), or a function of the row.
    read: str | Callable[[T], object] = ""
    column: Column | None = None
    #: The text in the column, if it is not that of the value.
    cell: Callable[[T], str | Cell] | None = None

    def value(self, row: T) -> object:
        """Its value in JSON."""
        read = self.read or self.name
        return getattr(row, read) if isinstance(read, str) else read(row)

    def shown(self, row: T) -> str | Cell:
        """Its cell; "-": there is no value."""
        if self.cell is not None:
            return self.cell(row)
        value = self.value(row)
        return "-" if value is None else str(value)


class Rows(Generic[T]):
    """A kind of row, declared once, for tables and JSON."""

    def __init__(self, *fields: Field[T] | str) -> None:
        """fields: in the order of both; a text has attributes that are in JSON alone, as in `fields_of`."""
        self._fields: list[Field[T]] = []
        for each in fields:
            self._fields += [Field(*pair) for pair in _pairs(each)] if isinstance(each, str) else [each]
        self._shown: list[Field[T]] = [each for each in self._fields if each.column is not None]
        self.columns: list[Column] = [each.column for each in self._fields if each.column is not None]

    def cells(self, row: T) -> list[str | Cell]:
        """The row of a table."""
        return [each.shown(row) for each in self._shown]

    def json(self, row: T) -> dict[str, object]:
        """The row as JSON."""
        return {each.name: each.value(row) for each in self._fields if each.name}


def fields_of(each: object, names: str) -> dict[str, Any]:
    """These attributes, in this order, for --json; ``from=before``: the attribute ``before`` is called ``from``."""
    return {name: getattr(each, attribute) for name, attribute in _pairs(names)}


def _pairs(names: str) -> list[tuple[str, str]]:
    """Name and attribute of each."""
    return [(name, attribute or name) for name, _, attribute in (each.partition("=") for each in names.split())]


def is_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def say(text: str = "") -> None:
    """A line on standard output."""
    click.echo("\n".join(visible(line) for line in text.split("\n")))


def say_warning(text: str) -> None:
    """A line on standard error that does not change the exit status."""
    click.echo(f"{paint('warning:', fg='yellow', bold=True)} {visible(text)}", err=True)


def print_json(value: object) -> None:
    """One JSON document."""
    click.echo(json.dumps(value, indent=2))


def print_json_line(value: object) -> None:
    """One JSON document on one line."""
    click.echo(json.dumps(value))


def console(*, stderr: bool = False) -> Console:
    """A rich console without markup, emoji and highlights."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def rich_table(columns: Sequence[Column], rows: Iterable[Row], title: str | None = None) -> Table:
    """The table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None,
        title=None if title is None else Text(visible(title)),
        title_justify="left",
        title_style="bold",
        header_style="dim",
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    wide = width()
    shown = [not column.pipes_only and column.from_width <= wide for column in columns]
    for column, is_shown in zip(columns, shown, strict=True):
        if is_shown:
            justify: Literal["left", "right"] = "right" if column.right else "left"
            table.add_column(
                Text(column.title),
                justify=justify,
                overflow="fold",
                no_wrap=not column.fold,
                min_width=max(column.least, len(column.title)) if column.fold else None,
            )
    for row in rows:
        table.add_row(*(_rich_text(cell) for cell, is_shown in zip(row, shown, strict=True) if is_shown))
    return table


def _rich_text(cell: str | Cell) -> Any:
    from rich.text import Text

    return Text(visible(cell.short or cell.text), style=cell.style) if isinstance(cell, Cell) else Text(visible(cell))


def plain_rows(columns: Sequence[Column], rows: Iterable[Row]) -> Iterator[str]:
    """The table as tab-separated lines, its titles first: for cut, awk, sort and spreadsheets."""
    yield "\t".join(column.title for column in columns)
    for row in rows:
        yield "\t".join(visible(cell.text if isinstance(cell, Cell) else cell) for cell in row)


def print_table(columns: Sequence[Column], rows: Iterable[Row], title: str | None = None) -> None:
    """A table: drawn on a terminal, tab-separated elsewhere (without the title)."""
    if is_terminal():
        console().print(rich_table(columns, rows, title))
        return
    for line in plain_rows(columns, rows):
        click.echo(line)


def ask(question: str, yes: bool) -> bool:
    """Whether to continue: `yes` (the option --yes), or the answer at a terminal.

    Raises click.UsageError if standard input is not a terminal.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise click.UsageError(
            "standard input is not a terminal, so there is no one to ask. Nothing was done. Say --yes."
        )
    return click.confirm(visible(question), err=True)


@contextmanager
def progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error while `doing`; the caller gets a function of (done, total).

    It appears only on a terminal, and only for longer work.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    begun = time.monotonic()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console(stderr=True),
        transient=True,
    )
    task = bar.add_task(visible(doing), total=None)
    shown = False

    def show(done: int, total: int) -> None:
        nonlocal shown
        if not shown and time.monotonic() - begun > _PATIENCE_S:
            bar.start()
            shown = True
        if shown:
            bar.update(task, completed=min(done, total), total=total)

    try:
        yield show
    finally:
        if shown:
            bar.stop()


class _Warnings(logging.Handler):
    """The library's log lines, passed to a function."""

    def __init__(self, say_line: Callable[[str], None], level: int) -> None:
        super().__init__(level)
        self._say = say_line

    def emit(self, record: logging.LogRecord) -> None:
        """One line for each record."""
        text = record.getMessage()
        self._say(text if self.level > logging.DEBUG else f"{record.name}: {text}")


@contextmanager
def warnings_from_the_library(debug: bool, say_line: Callable[[str], None] = say_warning) -> Iterator[None]:
    """Print the library's warnings (with `debug`, all its log lines) while this is open."""
    logger = logging.getLogger("kafka_marshal")
    librdkafka = logging.getLogger("kafka_marshal.librdkafka")
    handler = _Warnings(say_line, logging.DEBUG if debug else logging.WARNING)
    before = logger.level, logger.propagate, librdkafka.level
    logger.setLevel(handler.level)
    logger.propagate = False
    # librdkafka's complaints during retries are part of the final error.
    librdkafka.setLevel(logging.DEBUG if debug else logging.CRITICAL)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
        librdkafka.setLevel(before[2])


def width() -> int:
    """Columns of the terminal."""
    return console().width
