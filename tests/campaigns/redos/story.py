"""Workers of three kinds of groups write to fenced sinks, with every fault; an operator has done messages done again.

Each row is written once, and once more for each redo that names it: plan, ``sink.rewind(redone=…)``, redo. Operators
are killed between two records and carry on from the plan's file; some redos are undone.
"""

from __future__ import annotations

import argparse
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from kafka_marshal.errors import SinkError
from kafka_marshal.sinks import FencedSink
from kafka_marshal.sinks.claims import redone_of
from tests.campaigns.frame import AWAY, Campaign, Crew, Place, Result, Say, Settings, run_campaign
from tests.campaigns.parks.log import OpenLog
from tests.campaigns.redos.account import Asked, Redo, RedosAccount, places_of
from tests.campaigns.redos.operator import INTERRUPTED
from tests.campaigns.redos.worker import FLAKY
from tests.sinks.conftest import running_postgres, sink_of

#: Kind of group → of its workers.
KINDS = {"claimed": "run", "coordinated": "pieces", "shared": "batches"}

TABLE = "CREATE TABLE IF NOT EXISTS written (name text, place int, at bigint, times int, PRIMARY KEY (name, place, at))"

#: What an operator asks for, one after the other.
FORMS = ("offsets", "keys", "times", "messages")


@dataclass(frozen=True, slots=True)
class Options(Settings):
    """What a campaign is like."""

    #: Until all of this has happened, but no longer than that (s).
    kills: int = 150
    redos: int = 40
    hi_ms: int = 1_000
    most_s: float = 900.0
    #: Messages in a second, in all partitions.
    rate: float = 60.0
    kinds: tuple[str, ...] = tuple(KINDS)
    #: Of each group.
    workers: int = 2
    keys: int = 40
    work_ms: float = 5.0
    kill_every_s: float = 3.0
    stop_every_s: float = 9.0
    leave_every_s: float = 20.0
    broker_every_s: float = 60.0
    redo_every_s: float = 2.0
    #: "sqlite": the folder of a file for each group (or that of the campaign); "postgres": the dsn of one for all.
    database: str = "sqlite"
    where: str = ""


@dataclass(slots=True)
class Group:
    """A group of workers, its sink, and what was redone."""

    kind: str
    name: str
    crew: Crew
    where: str
    sink: FencedSink[Any]
    account: RedosAccount

    @property
    def pending(self) -> Redo | None:
        """The redo that is under way."""
        return next((each for each in self.account.redos if not each.is_over), None)


class Redos(Campaign[Options]):
    """One group of each kind, which handle all messages of one topic."""

    NAME = "redos"

    @cached_property
    def groups(self) -> list[Group]:
        """One of each kind."""
        return [self._made(kind, f"{kind}-{self.group}") for kind in self.options.kinds]

    def _made(self, kind: str, name: str) -> Group:
        options = self.options
        where = options.where
        if options.database == "sqlite":
            where = str(Path(where or self.folder) / f"{kind}.db")

        def job(_: Place) -> dict[str, object]:
            return self.job(group=name, work_ms=options.work_ms, database=options.database, where=where)

        posts = {f"{kind[:2]}{number}": KINDS[kind] for number in range(options.workers)}
        account = RedosAccount(lambda partition, offset: self.message(partition, offset)[0])
        return Group(kind, name, self.crew(posts, job), where, sink_of(options.database, where), account)

    def story(self) -> None:
        self.rate, self.began_ms = self.options.rate, time.time() * 1000
        for group in self.groups:
            self._ask(group, TABLE)
            if group.kind == "coordinated" and self.options.seed % 2:  # its members share partitions by key
                with self.admin() as admin:
                    admin.configure_group(group.name, accept_range_fetch=[self.topic])
            self.start(partial(self.operate, group))
        super().story()

    def _ask(self, group: Group, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """What an outsider sees."""
        if self.options.database == "sqlite":
            with closing(sqlite3.connect(group.where, isolation_level=None, timeout=60)) as connection:
                if sql == TABLE:
                    connection.execute("PRAGMA journal_mode = WAL")
                return connection.execute(sql, parameters).fetchall()
        import psycopg

        with psycopg.connect(group.where) as other:
            cursor = other.execute(sql.replace("?", "%s").encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    def rows(self, group: Group) -> dict[tuple[int, int], int]:
        """(partition, offset) → how often its row was written."""
        found = self._ask(group, "SELECT place, at, times FROM written WHERE name = ?", group.name)
        return {(place, at): times for place, at, times in found}

    # Messages, and what happens.

    def message(self, partition: int, offset: int) -> tuple[bytes, bytes]:
        number = hash((self.options.seed, partition, offset))
        return b"%d" % (number % self.options.keys), FLAKY if number // 64 % 50 == 0 else b"x"

    def faults(self) -> Mapping[Callable[[], None], float]:
        options = self.options
        found = {self.kill: options.kill_every_s, self.stop: options.stop_every_s, self.leave: options.leave_every_s}
        if self.may_kill:  # here, so that they befall operators, too
            found |= dict.fromkeys((self.freeze, self.restart), 2 * options.broker_every_s)
        return found

    def goes_on(self) -> bool:
        options, counts = self.options, self.counts
        is_enough = counts["kills"] >= options.kills and counts["redos"] >= options.redos
        return not is_enough and time.monotonic() < self.began + options.most_s

    # The operator.

    def operate(self, group: Group) -> None:
        """Plan a redo, or do the next step of the one that is under way, again and again."""
        while not self.ended.wait(self.rng.uniform(0.0, 2.0 * self.options.redo_every_s)):
            try:
                if (redo := group.pending or self._planned(group)) is not None:
                    self._next_step(group, redo)
            except AWAY as error:
                self.counts["refused"] += 1
                self.say(f"{group.kind}: {error}"[:300])

    def _planned(self, group: Group) -> Redo | None:
        """A new one, of what its group has done; each fourth is undone; of others the operators die."""
        number = sum(len(each.account.redos) for each in self.groups)
        form, is_to_be_undone = FORMS[(number + number // 4) % len(FORMS)], number % 4 == 3
        asked, since = self._asked(group, form, 300 if is_to_be_undone else 20), time.monotonic()
        if asked is None:
            return None
        topic, (first, end) = self.topic, asked.numbers
        span: Any = int(first), int(end) - 1
        if asked.by_time:
            span = datetime.fromtimestamp(first / 1000, UTC), datetime.fromtimestamp(end / 1000, UTC)
        spans = {} if form == "messages" else {(topic, partition): span for partition in asked.partitions}
        places = [(topic, each, at) for each in asked.partitions for at in range(int(first), int(end)) if not spans]
        file = self.folder / f"redo-{number}-{group.kind}.json"
        with self.admin() as admin:
            plan = admin.plan_redo(group.name, spans, keys=asked.keys, messages=places)
        if not plan.messages:
            self.counts["redos of nothing"] += 1
            return None
        plan.write(file)
        found = sum(each.messages + each.open + each.parked + each.ahead + each.gone for each in plan.partitions)
        deaths = [self.rng.randint(1, 4) for _ in range(self.rng.randint(1, 2))] if number % 8 in (1, 5, 7) else []
        redo = Redo(file, asked, places_of(plan), found, since, deaths, is_to_be_undone)
        group.account.redos.append(redo)
        return redo

    def _asked(self, group: Group, form: str, most: int) -> Asked | None:
        """Drawn; at most that many offsets, of which nearly all are done."""
        done = {partition: at + 1 for partition, at in self.stable(group.name).items() if at >= most // 4}
        if not done:
            return None
        partition = self.rng.choice(sorted(done))
        keys = frozenset(b"%d" % each for each in self.rng.sample(range(self.options.keys), 4))
        if form == "times":
            first = int(self.rng.uniform(self.began_ms, max(self.began_ms, time.time() * 1000 - 1000)))
            return Asked(frozenset(done), (first, first + 20 * most), by_time=True)
        most = min(10 * most if form == "keys" else most, done[partition])
        first = self.rng.randint(0, done[partition] - most)
        return Asked(frozenset({partition}), (first, first + most), keys=keys if form == "keys" else None)

    def _next_step(self, group: Group, redo: Redo) -> None:
        if not redo.is_rewound:
            self._rewind(group, redone=redo.plan.offsets)
            redo.is_rewound = True
        if not redo.is_opened:
            is_whole = self._carry_out(group, redo)
            redo.is_opened = is_whole or (redo.is_to_be_undone and bool(redo.plan.records))
            if not redo.is_opened:
                return
        if redo.is_to_be_undone:
            self._undo(group, redo)
        else:
            group.account.finished(redo)
        self.counts["redos"] += 1
        self.counts["redone"] += 0 if redo.is_to_be_undone else len(redo.places)

    def _rewind(self, group: Group, **offsets: Any) -> None:
        """A stopped worker may have the database for long."""
        while True:
            try:
                group.sink.rewind(group.name, **offsets)
            except SinkError as error:
                if not error.retry:
                    raise
                self.counts["rewinds again"] += 1
            else:
                return

    def _carry_out(self, group: Group, redo: Redo) -> bool:
        """Whether all of it is opened, by an operator's process."""
        job = {
            "bootstrap": self.bootstrap,
            "log": self.log,
            "plan": str(redo.file),
            "rate": self.rng.choice((100 if redo.is_to_be_undone else 7, 1_000)),
            "dies": redo.deaths.pop() if redo.deaths else 0,
        }
        command = [sys.executable, "-m", "tests.campaigns.redos.operator", json.dumps(job)]
        self.counts["carried on"] += bool(redo.plan.records)
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode == -signal.SIGKILL:
            self.counts["operators killed"] += 1
        elif done.returncode == INTERRUPTED:
            self.counts["operators interrupted"] += 1
            redo.taken_back = None
            self.say(f"redo: {done.stderr[-300:]}")
        else:
            assert done.returncode == 0, done.stderr[-2000:]
            if done.stdout != "[]":
                self.violations.append(f"{group.kind}: {redo.file.name} left {done.stdout[:300]}")
            return True
        return False

    def _undo(self, group: Group, redo: Redo) -> None:
        """In the log, then in the sink; after that it writes nothing more."""
        plan = redo.plan
        messages = [(self.topic, *place) for place in sorted(redo.places)]
        with self.admin() as admin:
            try:
                found = {place[1:] for place in admin.undo_redo(plan).messages}
                aside = {each.place[1:] for each in admin.open_messages(group.name, parked=True)}
                after = admin.plan_redo(group.name, {}, messages=messages)
            except AWAY:
                redo.taken_back = None
                raise
        left = sum(each.open for each in after.partitions)
        if redo.taken_back is not None:
            redo.taken_back |= found | (aside & redo.places)
            if left:
                self.violations.append(f"{group.kind}: {redo.file.name} is undone, and {left} are open: {after}")
        self._rewind(group, undone=plan.offsets)
        stale_too = group.kind == "shared"
        broken = group.account.undone(redo, self.rows(group), stale_too=stale_too)
        self.violations += [f"{group.kind}: {each}" for each in broken]
        self.counts["undone"] += 1
        self.counts["taken back"] += len(found)

    # The end.

    def quiet(self) -> None:
        """What is under way is finished, and what was set aside is handled."""
        self.calm.touch()

        def look() -> tuple[object, list[str]]:
            now, left = [], []
            for group in self.groups:
                if (redo := group.pending) is not None:
                    redo.deaths.clear()
                    self._next_step(group, redo)
                with self.admin() as admin:
                    found = admin.open_messages(group.name)
                    parked = [each.place for each in found if each.state == "parked"]
                    group.account.aside.update(place[1:] for place in parked)
                    if parked:
                        admin.redrive(group.name, parked)
                stable = self.stable(group.name)
                now.append((stable, len(found)))
                if found or any(stable.get(partition) != end - 1 for partition, end in self.written.items() if end):
                    left.append(f"{group.kind}: is stuck at {stable} of {self.written}, open: {found[:3]}")
            return now, left

        self.violations += self.until_quiet(look)

    def judge(self) -> None:
        log, times = OpenLog(self.bootstrap, self.log), self._times()
        for group in self.groups:
            account = group.account
            for life in group.crew.lives:
                account.read(life)
            broken = [*account.in_the_end(self.written, self.rows(group), log.redone[group.name], times)]
            sql = "SELECT * FROM kafka_marshal_done WHERE group_id = ?"
            if left := self._ask(group, sql, redone_of(group.name)):
                broken.append(f"the sink has yet to write {len(left)} again, such as {left[:3]}")
            self.violations += [f"{group.kind}: {each}" for each in broken]
            self.counts[f"{group.kind}: handled"] = account.handled.total()
            self.counts[f"{group.kind}: redos"] = len(account.redos)
            self.counts["no effect, unproven"] += account.dropped
            group.sink.close()
        self.counts["messages"] = sum(self.written.values())

    def _times(self) -> dict[tuple[int, int], int]:
        """Of all messages (ms)."""
        found: dict[tuple[int, int], int] = {}
        config = {"bootstrap.servers": self.bootstrap, "group.id": "times", "enable.auto.commit": False}
        with closing(Consumer(config)) as consumer:
            consumer.assign([TopicPartition(self.topic, each, 0) for each in self.written])
            until = time.monotonic() + 120.0
            while len(found) < sum(self.written.values()) and time.monotonic() < until:
                for each in consumer.consume(1_000, 1.0):
                    if each.error() is None:
                        found[each.partition() or 0, each.offset() or 0] = each.timestamp()[1]
        return found


@contextmanager
def in_memory() -> Iterator[str]:
    """A folder of databases: no power fails here, and a disk is slow."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of its command."""
    parser.add_argument("--minutes", type=float, default=15.0, help="most time with faults (15)")
    parser.add_argument("--kills", type=int, default=150, help="of workers, at least (150)")
    parser.add_argument("--redos", type=int, default=40, help="at least (40)")
    parser.add_argument("--rate", type=float, default=60.0, help="messages in a second (60)")
    parser.add_argument("--only", choices=KINDS, help="one kind of group")
    parser.add_argument("--on", choices=("sqlite", "postgres"), default="sqlite", help="the sinks' database (sqlite)")


def runs(chosen: argparse.Namespace, say: Say) -> Iterator[Result]:
    """What the command runs."""
    options = Options(
        kills=chosen.kills,
        redos=chosen.redos,
        most_s=chosen.minutes * 60,
        rate=chosen.rate,
        kinds=(chosen.only,) if chosen.only else tuple(KINDS),
        seed=chosen.seed,
        keep=chosen.keep,
    )
    if chosen.on == "sqlite":
        with in_memory() as folder:
            yield run_campaign(Redos, replace(options, where=folder), say=say)
        return
    with running_postgres("fsync=off") as postgres:
        where = postgres.dsn(postgres.new_database())
        yield run_campaign(Redos, replace(options, database="postgres", where=where), say=say)
