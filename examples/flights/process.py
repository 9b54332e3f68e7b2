"""The second step: workers or Spark drivers claim the partitions and process them, one is killed on the way.

They leave a database behind (``sink``, ``ledger``), and their claims in the coordination log. What they are, and what
is done to them, is their crew's :class:`Manner`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Final

from flights.check import Range, missing_offsets
from flights.errors import StalledError
from flights.ledger import explained, opened
from flights.options import PARTITIONS
from flights.publish import Published
from flights.supervisor import GRACE_S, Crew, Event, WorkerProcess

__all__ = [
    "DRIVERS",
    "WORKERS",
    "Crash",
    "Kill",
    "KillPlan",
    "Manner",
    "Process",
    "Snapshot",
    "Stage",
    "Story",
    "WorkerLine",
]

#: How long the one that is added may take to get its share.
_JOIN_S: Final = 15.0

#: After the last takeover, before the new worker is added: to have something to see.
_BREATH_S: Final = 1.0

_LOOK_EVERY_S: Final = 0.2


#: This number may fail one after the other, without a row done in between, before no more are started.
_FRUITLESS: Final = 3


class Stage(StrEnum):
    """Where in a batch the kill hits: after it was reported that …"""

    #: Its rows are in flight, nothing of it is written.
    UNWRITTEN = "begun"
    #: Spark has added it up, nothing of it is written.
    COMPUTED = "computed"
    #: Its dead letters are in their topic, nothing is in the database.
    LETTERED = "lettered"
    #: Its transaction is committed; the log has not heard of it yet.
    UNREPORTED = "written"


@dataclass(frozen=True, slots=True)
class Manner:
    """What a crew is made of, and what is done to it."""

    #: What one of them is called; also the beginning of their names.
    noun: str
    #: Where the kill may hit.
    stages: tuple[Stage, ...]
    #: Between these shares of the rows.
    shares: tuple[float, float] = (0.25, 0.45)
    #: One is added some time after the kill.
    one_added: bool = False
    #: One that ends without having been asked to gets a successor, as it would from any supervisor.
    replaced: bool = False
    #: What it is at while it is not ready to work yet.
    beginning: str = "at work"
    #: Without any row done for this long something is wrong: a lease without heartbeats falls free much sooner, and
    #: a broker is back sooner.
    stall_s: float = 60.0
    #: How long they may take to end, once asked to.
    grace_s: float = GRACE_S


WORKERS: Final = Manner("worker", (Stage.UNWRITTEN, Stage.UNREPORTED), one_added=True)
DRIVERS: Final = Manner("driver", tuple(Stage), replaced=True, beginning="starts Spark", stall_s=180.0, grace_s=30.0)


@dataclass(frozen=True, slots=True)
class KillPlan:
    """When the kill comes: drawn from the seed."""

    #: Share of the rows that are done.
    share: float
    stage: Stage
    #: Share of the batch's time that has passed, if nothing of it is to be written yet.
    into_batch: float

    @classmethod
    def drawn(cls, seed: int, manner: Manner = WORKERS) -> KillPlan:
        """The plan that belongs to a seed."""
        random = Random(seed)
        return cls(random.uniform(*manner.shares), random.choice(manner.stages), random.uniform(0.1, 0.7))


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker was killed with -9."""

    client_id: str
    #: By this machine's clock.
    at_ms: int
    #: Rows that the database had then, of all workers.
    rows_done: int
    #: The batch in flight: (partition, first and last offset) of each range in it.
    ranges: tuple[Range, ...]
    #: Whether that batch was committed.
    written: bool
    #: How far it was.
    stage: Stage = Stage.UNWRITTEN
    #: After how many ms the processes below it (a driver's JVM) were gone, too; None: they had to be killed.
    rest_ms: int | None = 0

    @property
    def rows(self) -> int:
        """Offsets in the batch."""
        return sum(last - first + 1 for _, first, last in self.ranges)


@dataclass(frozen=True, slots=True)
class Crash:
    """A worker ended by itself."""

    client_id: str
    status: int
    last_words: str


@dataclass(slots=True)
class Story:
    """What happened while the rows were processed."""

    started_ms: int
    #: When all rows were done, and the workers were asked to end.
    closing_ms: int = 0
    ended_ms: int = 0
    kill: Kill | None = None
    #: client_id of the one that was added, and when it was started.
    added: tuple[str, int] | None = None
    crashes: list[Crash] = field(default_factory=list)
    #: Successors of those that ended without having been asked to: (client_id, when it was started, whose).
    successors: list[tuple[str, int, str]] = field(default_factory=list)
    #: Rows that were delivered again and that the database had already.
    repeated: int = 0
    #: Batches that the database refused because of their epoch.
    fenced: int = 0


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """One worker at one moment."""

    client_id: str
    state: str
    #: The partitions it holds, by the log.
    partitions: Sequence[int]
    #: Rows it has written, by the database.
    rows: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of it at one moment."""

    rows_done: int
    rows: int
    seconds: float
    workers: Sequence[WorkerLine]


class _Progress:
    """How many rows the database has, of whom, and since when nothing was added."""

    def __init__(self, database: Path, published: Published, noun: str, stall_s: float) -> None:
        self.database = database
        self._published = published
        self._noun = noun
        self._stall_s = stall_s
        self._next_look = 0.0
        self._moved_at = time.monotonic()
        #: By client_id, as last read.
        self.by_client: dict[str, int] = {}
        self.total = published.rows

    @property
    def done(self) -> int:
        """Rows in the database, as last read."""
        return sum(self.by_client.values())

    def is_due(self) -> bool:
        """Whether the last read is some time ago."""
        return time.monotonic() >= self._next_look

    def look(self, db: sqlite3.Connection) -> bool:
        """Ask the database; whether there are rows that were not there before."""
        self._next_look = time.monotonic() + _LOOK_EVERY_S
        try:
            found = db.execute("SELECT client_id, sum(rows) FROM batches GROUP BY client_id").fetchall()
        except sqlite3.Error as error:
            raise explained(self.database, error, "What was written so far stands") from error
        rows = {str(client_id): int(count) for client_id, count in found}
        moved = rows != self.by_client
        if moved:
            self.by_client, self._moved_at = rows, time.monotonic()
        return moved

    def check_moving(self) -> None:
        """Raise StalledError if nothing was added for long, and something is missing."""
        if time.monotonic() > self._moved_at + self._stall_s and self.done < self.total:
            waited = f"No row was done for {self._stall_s:.0f} s, although {self._noun}s run."
            raise StalledError(f"{waited} {self.missing()}")

    def missing(self) -> str:
        """What is missing, what that means, and what to do."""
        missing = missing_offsets(self.database, self._published.ends)
        ranges = [f"[{partition}] {first}…{last}" for partition, first, last in missing[:5]]
        more = f" and {len(missing) - 5} more ranges" if len(missing) > 5 else ""
        return (
            f"{self.done:,} of {self.total:,} rows are done and stay done; open are "
            f"{', '.join(ranges)}{more}. Nothing is lost: they are in the topic. "
            f"The {self._noun}s' logs, beside the database, say more; start again."
        )


class Process:
    """The step, as an object: ``run()`` does it."""

    def __init__(
        self,
        crew: Crew,
        holders: Callable[[], dict[int, str]],
        database: Path,
        published: Published,
        plan: KillPlan,
        pace: int,
        show: Callable[[Snapshot], None],
        say: Callable[[str], None],
        manner: Manner = WORKERS,
    ) -> None:
        self._crew = crew
        self._holders = holders
        self._progress = _Progress(database, published, manner.noun, manner.stall_s)
        self._plan = plan
        self._pace = pace
        self._show = show
        self._say = say
        self._manner = manner
        self._begun: dict[str, float] = {}
        self._batch_s = 0.0
        self._fruitless = 0
        self._add_at: float | None = None
        self._added_at = 0.0
        self.story: Story = Story(_now_ms())

    def run(self, workers: int) -> Story:
        """Start this many workers, and return when all rows are done and all workers have ended.

        Raises:
            StalledError: no worker is left, or nothing moves.
            SinkError: the database can't be read.
            KafkaUnavailableError: (and its like) the log can't be followed.
        """
        for number in range(1, workers + 1):
            self._crew.start(f"{self._manner.noun}-{number}")
        with closing(opened(self._progress.database, "ro")) as db:
            self._look(db)
            while not self._is_over():
                event = self._crew.next_event(0.05)
                if event is not None:
                    self._take_in(event)
                    self._kill_if_due(event)
                self._look(db)
                self._notice_ends()
                self._replace_killed()
                self._add_if_due()
            self.story.closing_ms = _now_ms()
            for late in self._crew.end(self._manner.grace_s):
                self._say(f"{late} did not end when it was asked to, and was killed")
            self._drain()
            self._look(db, now=True)
        self.story.ended_ms = _now_ms()
        return self.story

    def _is_over(self) -> bool:
        if self._progress.done < self._progress.total:
            return False
        if self._progress.total == 0 and len(self._holders()) < PARTITIONS:
            return False  # nothing to do is shared out, too
        if self.story.kill is None or not self._manner.one_added:
            return True
        added = self.story.added
        if added is None:
            return False
        return added[0] in self._holders().values() or time.monotonic() > self._added_at + _JOIN_S

    # Looking.

    def _look(self, db: sqlite3.Connection, now: bool = False) -> None:
        if not now and not self._progress.is_due():
            return
        if self._progress.look(db):
            self._fruitless = 0
        self._show(self._snapshot())
        self._progress.check_moving()

    def _snapshot(self) -> Snapshot:
        holders = self._holders()
        lines = []
        for name in self._crew.workers:
            held = [partition for partition, holder in holders.items() if holder == name]
            lines.append(WorkerLine(name, self._state_of(name), held, self._progress.by_client.get(name, 0)))
        seconds = (_now_ms() - self.story.started_ms) / 1000
        return Snapshot(self._progress.done, self._progress.total, seconds, lines)

    def _state_of(self, name: str) -> str:
        if self.story.kill is not None and self.story.kill.client_id == name:
            return "killed (-9)"
        worker = self._crew.workers[name]
        if not worker.running:
            return "done" if worker.expected_to_end else "ended by itself"
        if not worker.ready and not self._progress.by_client.get(name):
            return self._manner.beginning
        return "added" if self.story.added is not None and self.story.added[0] == name else "at work"

    # Taking in.

    def _take_in(self, event: Event) -> None:
        if event.what == Stage.UNWRITTEN:
            self._begun[event.client_id] = time.monotonic()
        elif event.what == Stage.UNREPORTED:
            self.story.repeated += event.skipped
            self._batch_s = time.monotonic() - self._begun.get(event.client_id, time.monotonic())
        elif event.what == "fenced":
            self.story.fenced += 1

    def _drain(self) -> list[Event]:
        found = []
        while (event := self._crew.next_event(0.0)) is not None:
            self._take_in(event)
            found.append(event)
        return found

    def _notice_ends(self) -> None:
        known = {crash.client_id for crash in self.story.crashes}
        for worker in self._crew.ended_by_themselves():
            if worker.client_id not in known:
                worker.wait(1.0)
                crash = Crash(worker.client_id, worker.process.returncode, worker.last_words())
                self.story.crashes.append(crash)
                self._say(f"{crash.client_id} ended by itself (status {crash.status}): {crash.last_words or 'no word'}")
                worker.end_rest()
                self._replace_crashed(worker)
        killed = self.story.kill
        replacing = killed is not None and self._manner.one_added and self.story.added is None
        if not self._crew.running() and killed is not None and self._manner.replaced:
            replacing = killed.client_id not in self._replaced()
        if not self._crew.running() and not replacing:
            reasons = [crash.last_words for crash in self.story.crashes if crash.last_words]
            raise StalledError(
                f"No {self._manner.noun} is left: all {len(self.story.crashes)} ended by themselves. "
                + self._progress.missing()
                + (f"\nThe last one said: {reasons[-1]}" if reasons else "")
            )

    def _replaced(self) -> set[str]:
        return {old for _, _, old in self.story.successors}

    def _replace_crashed(self, worker: WorkerProcess) -> None:
        if not self._manner.replaced or worker.failure_lasts:
            return
        # A kill says nothing about the next one; an error may come again.
        self._fruitless += worker.process.returncode >= 0
        if self._fruitless < _FRUITLESS:
            self._start_successor(worker.client_id)

    def _replace_killed(self) -> None:
        """The one that we killed gets a successor only if no other is there to take over."""
        kill = self.story.kill
        if kill is None or not self._manner.replaced or self._crew.running():
            return
        if kill.client_id not in self._replaced():
            self._start_successor(kill.client_id)

    def _start_successor(self, old: str) -> None:
        name = f"{self._manner.noun}-{len(self._crew.workers) + 1}"
        self._crew.start(name)
        self.story.successors.append((name, _now_ms(), old))
        self._say(f"{name} was started in the place of {old}")

    # Kill, and add.

    def _kill_if_due(self, event: Event) -> None:
        if self.story.kill is not None or event.what != self._plan.stage:
            return
        if self._progress.done < self._plan.share * self._progress.total:
            return
        if self._plan.stage is Stage.UNWRITTEN:
            usual_s = event.rows / self._pace if self._pace else self._batch_s
            until = time.monotonic() + self._plan.into_batch * usual_s
            while (left := until - time.monotonic()) > 0:
                other = self._crew.next_event(left)
                if other is not None:
                    self._take_in(other)
                    if other.batch == event.batch and other.what == Stage.UNREPORTED:
                        return  # too late: it is written. The next batch will do.
        worker = self._crew.workers[event.client_id]
        if not worker.running:
            return
        at_ms = _now_ms()
        worker.kill()
        rest_ms = worker.end_rest()
        after = [each for each in self._drain() if each.batch == event.batch and each.what == Stage.UNREPORTED]
        written = bool(after) or self._plan.stage is Stage.UNREPORTED
        stage = Stage.UNREPORTED if written else self._plan.stage
        self.story.kill = Kill(event.client_id, at_ms, self._progress.done, event.ranges, written, stage, rest_ms)
        self._say(f"{event.client_id} was killed with -9, in the middle of {_batch_text(self.story.kill)}")

    def _add_if_due(self) -> None:
        kill = self.story.kill
        if kill is None or self.story.added is not None or not self._manner.one_added:
            return
        now = time.monotonic()
        if self._add_at is None:
            holders = self._holders()
            if not self._crew.running():
                self._add_at = now  # no other is there to take over
            elif kill.client_id not in holders.values() and len(holders) == PARTITIONS:
                self._add_at = now + _BREATH_S
            elif _now_ms() > kill.at_ms + _JOIN_S * 1000:
                self._add_at = now
        if self._add_at is not None and now >= self._add_at:
            name = f"{self._manner.noun}-{len(self._crew.workers) + 1}"
            self._crew.start(name)
            self.story.added = name, _now_ms()
            self._added_at = now
            self._say(f"{name} was added")


#: How far a batch was, for people.
_SO_FAR: Final = {
    Stage.UNWRITTEN: "nothing of it written",
    Stage.COMPUTED: "added up by Spark, nothing of it written",
    Stage.LETTERED: "its dead letters sent, nothing in the database",
    Stage.UNREPORTED: "committed, not reported yet",
}


def _batch_text(kill: Kill) -> str:
    partitions = sorted({partition for partition, _, _ in kill.ranges})
    of = f"partition{'s' if len(partitions) > 1 else ''} {', '.join(map(str, partitions))}"
    return f"a batch of {kill.rows:,} row{'s' if kill.rows != 1 else ''} of {of} ({_SO_FAR[kill.stage]})"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
