"""Members that share partitions by batches, killed and stopped at any moment, and a plain account of each message.

Each message is handled or given up by the operator, and in one hand at a time.
"""

from __future__ import annotations

import argparse
import sqlite3
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kafka_marshal.admin import Move
from kafka_marshal.sinks import SqliteSink
from tests.campaigns.account import Lines
from tests.campaigns.frame import AWAY, Campaign, Life, Place, Result, Say, Settings, run_campaign
from tests.campaigns.process import POISON

# -- The plain account of each message, from the workers' lines, the operator's acts and the log ------------------


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


@dataclass(frozen=True, slots=True)
class Options(Settings):
    """What a campaign is like."""

    partitions: int = 4
    messages: int = 1_000_000
    kills: int = 150
    workers: int = 8
    work_ms: float = 2.0
    kill_every_s: float = 3.0
    stop_every_s: float = 7.0
    operator_every_s: float = 6.0
    poisons: int = 2
    #: Rows go to SQLite, each once.
    sink: bool = False
    most_s: float = 3_600.0


class Sharing(Campaign[Options]):
    """One run."""

    NAME = "sharing"

    def story(self) -> None:
        options, share = self.options, self.options.messages // self.options.partitions
        self.most, self.is_enough = share * options.partitions, False
        places = range(options.poisons)
        self.poisons = {(n % options.partitions, share // 50 + n * 997 % (share // 4)) for n in places}
        self.written = dict.fromkeys(range(options.partitions), share)
        self.account = Account(self.written)
        self.database = self.folder / "rows.db"
        if options.sink:
            with closing(sqlite3.connect(self.database)) as database:
                database.executescript("PRAGMA journal_mode=WAL; CREATE TABLE rows (place, at, token);")
        self.workers = self.crew(
            {f"w{n}": "run" if n % 4 == 3 else "batches" for n in range(options.workers)}, self._job
        )
        self.tend()
        self.start(self.write)
        self.operator.start()
        self.befall()
        self.operator.close()
        self.quiet()

    def _job(self, place: Place) -> dict[str, object]:
        return self.job(
            work_ms=self.options.work_ms,
            timeout_s=30.0,
            database=str(self.database) if self.options.sink else "",
            watchdog=place.name in ("w0", "w3"),
        )

    def message(self, partition: int, offset: int) -> tuple[bytes, bytes]:
        return b"%d" % (offset % 100), POISON if (partition, offset) in self.poisons else b"x"

    def faults(self) -> Mapping[Callable[[], None], float]:
        return {self.kill: self.options.kill_every_s, self.stop: self.options.stop_every_s}

    def operates(self) -> Mapping[Callable[[], None], float]:
        acts = [self.redrive, self.discard, self.reposition]
        if self.may_kill:
            acts += [self.freeze, self.restart]
        return dict.fromkeys(acts, len(acts) * self.options.operator_every_s)

    def goes_on(self) -> bool:
        return not self.is_enough and time.monotonic() < self.began + self.options.most_s

    def progress(self) -> str:
        done = self._done()
        self.is_enough = self.counts["kills"] >= self.options.kills and done > 0.95 * sum(self.written.values())
        return f"{done:,} done; {dict(self.counts)}"

    def _done(self) -> int:
        with suppress(*AWAY):
            return sum(at + 1 for at in self.stable().values())
        return 0

    # The operator.

    def redrive(self) -> None:
        """Some that were set aside."""
        with self.admin() as admin:
            found = admin.open_messages(self.group, parked=True)[:20]
            for each in found:  # before: it may be carried out, and its answer lost
                self.account.redriven[each.partition, each.offset] += 1
            if found:
                admin.redrive(self.group, [x.place for x in found])
                self.counts["redriven"] += len(found)

    def discard(self) -> None:
        """Some of them, but those that kill."""
        with self.admin() as admin:
            found = [x for x in admin.open_messages(self.group, parked=True) if x.reason != "CRASHED"][:2]
            self.account.discarded |= {(x.partition, x.offset) for x in found}
            if found:
                admin.discard(self.group, [x.place for x in found])
                self.counts["discarded"] += len(found)

    def reposition(self) -> None:
        """Backwards, and below what waits for its next member: it would count as done (C11)."""
        with self.admin() as admin, admin.pause(self.group, expires_in=60) as pause:
            pause.wait_released(30)
            found = [x for x in admin.progress(self.group) if (x.stable or 0) > 500]
            if not found:
                return
            info = self.rng.choice(found)
            waiting = [x for x in admin.open_messages(self.group) if x.state != "parked"]
            lowest = min((x.offset for x in waiting if x.partition == info.partition), default=info.stable or 0)
            position = min(lowest, (info.stable or 0) - self.rng.randint(1, 400))
            self.account.repositions[info.partition].append((position, info.stable or 0))
            moves = pause.reposition({(self.topic, info.partition): position})
            self.counts["repositions"] += 1
            if self.options.sink:
                self._rewind(moves)

    def _rewind(self, moves: list[Move]) -> None:
        """The sink stands where the group does; then rows of what comes again go: a stopped worker writes none more."""
        SqliteSink(self.database).rewind(
            self.group,
            {move.key: move.last_offset for move in moves},
            epochs={move.key: move.epoch for move in moves},
            parked={move.key: move.parked for move in moves},
            kind="claimed",
        )
        with closing(sqlite3.connect(self.database, 60.0)) as database, database:
            for move in moves:
                database.execute("DELETE FROM rows WHERE place = ? AND at > ?", (move.key[1], move.last_offset))

    # The end.

    def quiet(self) -> None:
        """All is done, also what was set aside."""
        self.calm.touch()

        def look() -> tuple[object, list[str]]:
            with self.admin() as admin:
                found = admin.open_messages(self.group)
                parked = [x.place for x in found if x.state == "parked"]
                for _, partition, offset in parked:
                    self.account.redriven[partition, offset] += 1
                if parked:
                    admin.redrive(self.group, parked)
            stable = self.stable()
            is_done = not found and all(stable.get(x) == end - 1 for x, end in self.written.items())
            now = stable, len(found)
            return now, [] if is_done else [f"liveness: {now} of {self.written}, open: {found[:3]}"]

        self.violations += self.until_quiet(look)

    def judge(self) -> None:
        account = self.account
        for life in self.workers.lives:
            account.read(life)
        self.violations += account.violations()
        if self.options.sink:
            self.violations += account.of_rows(self.database)
            self.counts["refused by the sink"] = account.refused
        self.counts["messages"] = sum(self.written.values())
        self.counts["handled"] = account.handled
        self.counts["killed by poison"] = account.poisoned
        self.counts["dropped unproven"] = account.dropped
        self.counts["set aside"] = len(account.parked)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of its command."""
    parser.add_argument("--messages", type=int, default=1_000_000, help="in all partitions (1,000,000)")
    parser.add_argument("--kills", type=int, default=150, help="of workers (150)")
    parser.add_argument("--work-ms", type=float, default=2.0, help="of each message (2)")
    parser.add_argument("--minutes", type=float, default=60.0, help="most time with faults (60)")
    parser.add_argument("--sink", action="store_true", help="rows go to SQLite, each once")


def runs(chosen: argparse.Namespace, say: Say) -> Iterator[Result]:
    """What the command runs."""
    options = Options(
        messages=chosen.messages,
        kills=chosen.kills,
        work_ms=chosen.work_ms,
        seed=chosen.seed,
        most_s=chosen.minutes * 60,
        sink=chosen.sink,
        keep=chosen.keep,
    )
    yield run_campaign(Sharing, options, say=say)
