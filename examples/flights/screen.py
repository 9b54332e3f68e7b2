"""What the demo shows while it runs: an updated line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from flights.process import Snapshot, WorkerLine
from flights.timeline import color_of

__all__ = ["Screen", "table"]

#: Without a terminal, progress is printed at these shares.
_SHARES: Final = (0.25, 0.5, 0.75, 1.0)

_INDENT: Final = "    "

#: Without a terminal, what a step is doing is printed after a silence of this long.
_SILENCE_S: Final = 15.0


class Screen:
    """Steps, progress and what happened. A context manager: live display ends with it."""

    def __init__(self, console: Console, silence_s: float = _SILENCE_S) -> None:
        self.console = console
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._told = 0
        #: When the step began, what it is doing, and when a line was last printed.
        self._begun: float | None = None
        self._doing = ""
        self._spoke = time.monotonic()
        self._silence_s = silence_s
        self._over = threading.Event()

    def step(self, number: int, text: str, total: int | None = None, *, steps: int = 5) -> None:
        """Begin a step; with a total it has a bar."""
        self._end_step()
        self._print(Text.assemble((f"{number}/{steps} ", "bold"), text))
        self._told = 0
        self._begun, self._doing = time.monotonic(), ""
        if not self.console.is_terminal:
            return
        bar = () if total is None else (BarColumn(), MofNCompleteColumn())
        self._progress = Progress(TextColumn("    {task.description}"), *bar, TimeElapsedColumn(), console=self.console)
        self._task = self._progress.add_task("" if total is None else "rows", total=total or None, completed=0)
        self._live = Live(self._progress, console=self.console, refresh_per_second=8, transient=True)
        self._live.start()

    def doing(self, text: str) -> None:
        """What the step is at, shown with the step's time."""
        self._doing = text
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=text)

    def _remind(self) -> None:
        """Without a terminal: a line after each silence, so that a step that takes long is seen to live."""
        while not self._over.wait(self._silence_s / 10):
            begun, now = self._begun, time.monotonic()
            if begun is not None and now - self._spoke >= self._silence_s:
                self.say(f"{now - begun:.0f} s so far{f': {self._doing}' if self._doing else ''}")

    def rows(self, done: int, total: int) -> None:
        """`done` rows of this step are done."""
        self._doing = f"{done:,} of {total:,} rows"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total or None)
        elif not self.console.is_terminal:
            self._tell(done, total, "")

    def working(self, snapshot: Snapshot) -> None:
        """The workers as they are."""
        self.rows_of(snapshot)
        if self._live is not None and self._progress is not None:
            self._live.update(Group(self._progress, _workers(snapshot.workers)))

    def rows_of(self, snapshot: Snapshot) -> None:
        """The bar of all workers together."""
        states = ", ".join(f"{line.client_id} {line.state}" for line in snapshot.workers)
        self._doing = f"{snapshot.rows_done:,} of {snapshot.rows:,} rows; {states}"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=snapshot.rows_done, total=snapshot.rows or None)
            return
        parts = [f"{line.client_id} {len(line.partitions)} partitions" for line in snapshot.workers if line.partitions]
        self._tell(snapshot.rows_done, snapshot.rows, f"   {', '.join(parts)}")

    def _tell(self, done: int, total: int, more: str) -> None:
        while total and self._told < len(_SHARES) and done >= _SHARES[self._told] * total:
            self._told += 1
            if self._told == len(_SHARES) or done < _SHARES[self._told] * total:
                self.say(f"{done:,} of {total:,} rows{more}")

    def say(self, text: str) -> None:
        """A line that stays."""
        self._lines(Text(text), _INDENT)

    def headline(self, text: str, style: str) -> None:
        """What it all comes to."""
        self._end_step()
        self._lines(Text(text, style=style), "")

    def _lines(self, text: Text, indent: str) -> None:
        # (rich's Padding would fill lines up with spaces, which a file need not have.)
        for line in text.wrap(self.console, max(20, self.console.width - len(indent))):
            line.rstrip()
            self._print(Text(indent) + line)

    def _print(self, text: Text) -> None:
        self._spoke = time.monotonic()
        self.console.print(text, soft_wrap=True)

    def show(self, what: RenderableType) -> None:
        """Something of the end result."""
        self._end_step()
        self.console.print(what)

    def show_line(self, text: str) -> None:
        """A line that is not broken, so that paths in it can be copied."""
        self._end_step()
        self._print(Text(text))

    def _end_step(self) -> None:
        """The step's time, as a line that stays."""
        self._end_live()
        begun, self._begun = self._begun, None
        if begun is not None:
            self.say(f"({time.monotonic() - begun:.0f} s)")

    def _end_live(self) -> None:
        live, self._live, self._progress, self._task = self._live, None, None, None
        if live is not None:
            live.stop()

    def __enter__(self) -> Self:
        if not self.console.is_terminal:
            threading.Thread(target=self._remind, name="screen", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._end_live()


def table(*columns: tuple[str, bool], title: str | None = None) -> Table:
    """A table of the demo's style; columns are (title, numbers to the right)."""
    made = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        title=None if title is None else Text(title, style="bold"),
        title_justify="left",
    )
    for name, right in columns:
        made.add_column(Text(name), justify="right" if right else "left")
    return made


def _workers(lines: Sequence[WorkerLine]) -> Table:
    made = table(("    worker", False), ("partitions it holds", False), ("rows done", True), ("", False))
    clients = [line.client_id for line in lines]
    for line in lines:
        color = color_of(line.client_id, clients)[0]
        partitions = " ".join(map(str, line.partitions)) or "-"
        state = Text(line.state, style="bold red" if line.state.startswith(("killed", "ended")) else "")
        made.add_row(
            Text(f"    {line.client_id}", style=color), Text(f"{partitions:<26}"), Text(f"{line.rows:,}"), state
        )
    return made
