"""The plain account of each message, from the workers' lines, the operator's acts and the log."""

from __future__ import annotations

import sqlite3
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from tests.campaigns.account import Lines
from tests.campaigns.frame import Life

__all__ = ["Account", "Span"]


class Span(NamedTuple):
    """A batch in one hand."""

    worker: str
    first: int
    last: int
    token: int
    deliveries: int
    began: float
    #: When it was handled; None: it was not, as far as its worker knows.
    ended: float | None


class Account(Lines):
    """Judges what workers have written down that handle batches."""

    def __init__(self, written: dict[int, int]) -> None:
        """written: partition → number of messages."""
        super().__init__()
        self._written = written
        #: Partition → the spans of all workers.
        self.spans: dict[int, list[Span]] = defaultdict(list)
        self.parked: set[tuple[int, int]] = set()
        #: Process, partition and token → what was set aside of that batch; and when processes were stopped.
        self._aside: dict[tuple[str, int, int], set[int]] = defaultdict(set)
        self._stops: dict[str, list[tuple[float, float]]] = {}
        self.refused = 0
        #: What the operator redrove; and where it set the group back to: partition → (position, stable before).
        self.redriven: Counter[tuple[int, int]] = Counter()
        self.repositions: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def of_life(self, life: Life, lines: Iterable[tuple[str, list[str]]]) -> None:
        begun: dict[tuple[int, int, int], tuple[int, int, float]] = {}
        self._stops[life.out.stem] = life.stops
        for what, rest in lines:
            if what == "p":
                self.parked.add((int(rest[0]), int(rest[1])))
                if int(rest[2]) >= 0:  # of run: a try that fails, and its line says so
                    self._aside[life.out.stem, int(rest[0]), int(rest[2])].add(int(rest[1]))
            else:
                self.refused += what == "r"
                partition, first, last, token, count = map(int, rest[:5])
                place, at = (partition, first, token), float(rest[5])
                if what == "b":
                    begun[place] = last, count, at
                    continue
                last, count, began = begun.pop(place)
                self.spans[partition].append(
                    Span(life.out.stem, first, last, token, count, began, at if what == "h" else None)
                )
        for (partition, first, token), (last, count, began) in begun.items():
            self.spans[partition].append(Span(life.out.stem, first, last, token, count, began, None))

    def violations(self) -> Iterator[str]:
        """What must not be."""
        yield from self.errors
        for partition, written in sorted(self._written.items()):
            yield from self._of(partition, written)

    def _of(self, partition: int, written: int) -> Iterator[str]:
        times, firsts = array("I", bytes(4 * written)), array("I", bytes(4 * written))
        spans = sorted(self.spans[partition], key=lambda span: span.began)
        for span in spans:
            aside = self._aside[span.worker, partition, span.token]
            for offset in range(span.first, span.last + 1):
                times[offset] += span.ended is not None and offset not in aside
                firsts[offset] += span.deliveries == 1 and span.ended is not None
        lost = [x for x in range(written) if not times[x] and (partition, x) not in self.discarded]
        if lost:
            yield f"[{partition}]: {len(lost)} lost, such as {lost[:5]}: done by the log, and handled by nobody"
        again = self.repositions[partition]
        for offset in range(written):
            may = 1 + sum(position <= offset for position, _ in again) + self.redriven[partition, offset]
            if firsts[offset] > may:
                yield f"[{partition}] {offset}: {firsts[offset]} times the first delivery; {may} were right"
        yield from self._two_hands(partition, spans)

    def _two_hands(self, partition: int, spans: list[Span]) -> Iterator[str]:
        """A batch that begins while another worker has it, who then could still prove that."""
        live: list[Span] = []
        for span in spans:
            live = [x for x in live if x.ended is not None and x.ended > span.began]
            for other in live:
                is_same = other.first <= span.last and span.first <= other.last and other.worker != span.worker
                if is_same:
                    yield f"[{partition}] in two hands: {other} and {span}"
            if span.ended is not None and not self._was_stopped(span, span.ended):
                live.append(span)
        tokens: dict[int, tuple[int, float]] = {}
        for span in spans:
            if span.token < 0:
                continue
            token, at = tokens.get(span.first, (-1, 0.0))
            if span.token < token and span.ended is not None:
                yield f"[{partition}] {span.first}: token {span.token} was begun after {token} ({at:.3f}): {span}"
            tokens[span.first] = max((token, at), (span.token, span.began))

    def _was_stopped(self, span: Span, ended: float) -> bool:
        """Whether its process was stopped meanwhile: what it wrote down after that says nothing."""
        return any(since < ended and until > span.began for since, until in self._stops[span.worker])

    def of_rows(self, database: Path) -> Iterator[str]:
        """What must not be in the table of the sink: a row that is missing, or there twice."""
        with closing(sqlite3.connect(database)) as connection:
            for partition, written in self._written.items():
                found = array("I", bytes(4 * written))
                for (offset,) in connection.execute("SELECT at FROM rows WHERE place = ?", (partition,)):
                    found[offset] += 1
                given_up = {offset for place, offset in self.discarded if place == partition}
                missing = [x for x, times in enumerate(found) if not times and x not in given_up]
                twice = [x for x, times in enumerate(found) if times > 1]
                if missing or twice:
                    text = f"{len(missing)} rows are missing {missing[:5]}, {len(twice)} are there twice {twice[:5]}"
                    yield f"[{partition}]: {text}"

    @property
    def handled(self) -> int:
        """How many messages were handled, repeats included."""
        return sum(x.last - x.first + 1 for found in self.spans.values() for x in found if x.ended is not None)
