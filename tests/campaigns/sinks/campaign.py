"""Writers in processes and threads, what happens to them, and the account in the end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from random import Random
from typing import Any, cast

from kafka_marshal.errors import SinkError
from kafka_marshal.sinks import FencedSink
from rationalizer.limits import MAX_KEY_HASH
from tests.campaigns.sinks.account import TABLES, compare, compare_tables
from tests.campaigns.sinks.coordinator import Coordinator, Shared
from tests.campaigns.sinks.member import GROUP, TOPIC, Place, serve

__all__ = ["Figures", "Options", "run_campaign"]

#: An order that is under way for longer hangs (s).
HANGS_S = 90.0

#: Processes are forked from one that has all modules.
_SPAWN = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True)
class Options:
    """How much of it."""

    records: int
    seed: int
    members: int = 3
    #: Writing threads of each member.
    threads: int = 3
    partitions: int = 4
    #: Messages that are given out, ahead of the first that is not done; up to a fifth of them in a transaction.
    window: int = 600
    #: Chances for each order that ends.
    kill: float = 0.004
    stop: float = 0.004
    rewind: float = 0.004
    rebalance: float = 0.2
    #: Connections that the server ends.
    cut: float = 0.004
    #: The longest stop (s).
    longest_stop_s: float = 2.0

    @classmethod
    def short(cls, records: int, seed: int) -> Options:
        """A run of seconds, in which all that may happen does."""
        return cls(records, seed, 2, 3, 2, 250, kill=0.01, stop=0.005, rewind=0.02, rebalance=0.4, cut=0.01)


@dataclass(slots=True)
class Figures:
    """What a run did."""

    seed: int
    seconds: float = 0.0
    counted: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is broken."""
        return not self.violations

    def tell(self) -> str:
        """In a line."""
        about = self.counted.get
        stale = sum(count for name, count in self.counted.items() if name.endswith(": stale"))
        return (
            f"{about('records', 0):,} records by {about('orders', 0):,} orders; {about('rebalances', 0):,} rebalances, "
            f"{about('rewinds', 0)} rewinds, {about('kills', 0)} kills -9, {about('stops', 0)} stops, "
            f"{about('cut connections', 0)} cut connections; {stale:,} refused of {about('late orders', 0):,} late "
            f"orders, {about('retries', 0):,} retries; {len(self.violations)} violations; {self.seconds:.0f} s"
        )


class _Member:
    """A process, and a pipe to each of its threads."""

    def __init__(self, place: Place, number: int, threads: int, generation: int) -> None:
        self.number = number
        pipes = [_SPAWN.Pipe() for _ in range(threads)]
        #: Pipe → (order under way, since when).
        self.under_way: dict[Connection, tuple[int, float]] = {}
        self.pipes = [ours for ours, _ in pipes]
        self.stopped_until = 0.0
        theirs = [theirs for _, theirs in pipes]
        self.process = _SPAWN.Process(target=serve, args=(place, f"{number}.{generation}", theirs), daemon=True)
        self.process.start()
        for each in theirs:
            each.close()

    def signal(self, number: signal.Signals) -> None:
        """Send it one."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, number)

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.join()
        for each in self.pipes:
            each.close()


class _Run:
    def __init__(self, options: Options, place: Place) -> None:
        self.options, self.place = options, place
        self.random = Random(options.seed)
        self.coordinator = Coordinator(
            options.partitions,
            options.members,
            options.window,
            0.03 if place.kind == "postgres" else 0.003,  # SQLite has one writer at a time
            Random(options.seed + 1),
        )
        self.counted = self.coordinator.counted
        self.generation = 0
        self.members = [self._started(number) for number in range(options.members)]
        self.sink: FencedSink[Any] = place.sink()
        self.pool = ThreadPoolExecutor(1)
        self.rewinding: list[tuple[Shared, int, int, Future[None]]] = []

    def _started(self, number: int) -> _Member:
        self.generation += 1
        return _Member(self.place, number, self.options.threads, self.generation)

    def run(self) -> None:
        """Until all is done, or something hangs."""
        for member in self.members:
            for pipe in member.pipes:
                self._send(member, pipe)
        draining_since = 0.0
        while not self.coordinator.is_finished:
            by_pipe = {pipe: member for member in self.members for pipe in member.under_way}
            for pipe in cast("list[Connection[Any, Any]]", wait(list(by_pipe), 0.05)):
                self._hear(by_pipe[pipe], pipe)
            self._tick()
            if self.counted["records"] >= self.options.records and not self.rewinding and not draining_since:
                self.coordinator.drain()
                draining_since = time.monotonic()
            if draining_since and time.monotonic() > draining_since + HANGS_S:
                self.coordinator.violations += self.coordinator.unfinished()
                return
            if len(self.coordinator.violations) > 20:
                return

    def _send(self, member: _Member, pipe: Connection) -> None:
        order = self.coordinator.order(member.number)
        self.counted["orders"] += order.form not in ("nap", "progress")
        member.under_way[pipe] = order.number, time.monotonic()
        with suppress(OSError):  # it was killed: the next wait shows it
            pipe.send(order)

    def _hear(self, member: _Member, pipe: Connection) -> None:
        if pipe not in member.under_way:
            return  # the member was replaced meanwhile
        try:
            result = pipe.recv()
        except (EOFError, OSError):
            self._replace(member)
            return
        del member.under_way[pipe]
        self.coordinator.ended(result)
        self._send(member, pipe)
        self._trouble()

    def _replace(self, member: _Member) -> None:
        """It was killed: a new process, which keeps the tokens or not."""
        self.counted["kills"] += 1
        member.end()
        for number, _ in member.under_way.values():
            self.coordinator.lost(number)
        member.under_way.clear()
        new = self.members[member.number] = self._started(member.number)
        for pipe in new.pipes:
            self._send(new, pipe)

    def _trouble(self) -> None:
        options, random = self.options, self.random
        if random.random() < options.rebalance:
            self.coordinator.rebalance()
        if not self.coordinator.faults:
            return
        one = random.choice(self.members)
        if random.random() < options.kill:
            one.signal(signal.SIGKILL)
        if random.random() < options.stop and not one.stopped_until:
            one.signal(signal.SIGSTOP)
            one.stopped_until = time.monotonic() + options.longest_stop_s * random.random()
            self.counted["stops"] += 1
            for _ in range(3):  # others get what it has
                self.coordinator.rebalance((one.number + 1) % options.members)
        if random.random() < options.rewind and (begun := self.coordinator.begin_rewind()) is not None:
            shared, position, token = begun
            self.rewinding.append((shared, position, token, self.pool.submit(self._rewind, *begun)))
        if random.random() < options.cut and self.place.kind == "postgres":
            self.counted["cut connections"] += self._cut()

    def _rewind(self, shared: Shared, position: int, token: int) -> None:
        key = (TOPIC, shared.number)
        until = time.monotonic() + HANGS_S
        while True:
            try:
                self.sink.rewind(GROUP, {key: position}, epochs={key: token}, kind="coordinated")
            except SinkError as error:
                if not error.retry or time.monotonic() > until:
                    raise
                self.counted["retries"] += 1
            else:
                break
        # The mark: what has an older token comes before it.
        mark = self.place.sql("INSERT INTO written VALUES ({next}, ?, ?, -1, 0, 0, ?, ?, 0, 'rewind')")
        mark = mark.format(next="NULL" if self.place.kind == "sqlite" else "DEFAULT")
        with connected(self.place) as connection:
            connection.execute(mark, (shared.number, shared.round, MAX_KEY_HASH, token))

    def _cut(self) -> int:
        """Some connection of a writer is ended by the server."""
        with connected(self.place) as connection:
            found = connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'kafka-marshal' "
                "AND datname = current_database() AND state <> 'idle' ORDER BY random() LIMIT 1"
            ).fetchall()
        return len(found)

    def _tick(self) -> None:
        now = time.monotonic()
        for member in self.members:
            if member.stopped_until and (now > member.stopped_until or not self.coordinator.faults):
                member.signal(signal.SIGCONT)
                member.stopped_until = 0.0
            for number, since in list(member.under_way.values()):
                if now > since + HANGS_S and not member.stopped_until:
                    self.coordinator.violations.append(f"order {number} of member {member.number} hangs")
        for one in [each for each in self.rewinding if each[3].done()]:
            shared, position, token, future = one
            self.rewinding.remove(one)
            future.result()
            self.coordinator.rewound(shared, position, token)

    def close(self) -> None:
        """End all processes."""
        for member in self.members:
            member.end()
        self.pool.shutdown()
        self.sink.close()


@contextmanager
def connected(place: Place) -> Iterator[Any]:
    """An outsider's connection; each statement is committed."""
    if place.kind == "sqlite":
        connection: Any = sqlite3.connect(place.where, isolation_level=None, timeout=60.0)
    else:
        import psycopg

        connection = psycopg.connect(place.where, autocommit=True, prepare_threshold=None)
    try:
        yield connection
    finally:
        connection.close()


def run_campaign(options: Options, place: Place, say: Callable[[str], object] = lambda _: None) -> Figures:
    """One run on a new database, and its account."""
    began = time.monotonic()
    with connected(place) as connection:
        if place.kind == "sqlite":
            connection.execute("PRAGMA journal_mode = WAL")
        serial = "INTEGER" if place.kind == "sqlite" else "bigserial"
        for table in TABLES:
            connection.execute(table.format(serial=serial))
    run = _Run(options, place)
    try:
        run.run()
    finally:
        run.close()
    coordinator = run.coordinator
    found = list(coordinator.violations)
    with connected(place) as connection:

        def ask(sql: str) -> Sequence[Sequence[Any]]:
            rows: Sequence[Sequence[Any]] = connection.execute(sql).fetchall()
            return rows

        orders = ["seq"]
        if place.kind == "postgres" and ask("SHOW track_commit_timestamp") == [("on",)]:
            orders.append("pg_xact_commit_timestamp(xmin)")
        found += compare(coordinator, ask, orders)
        if not found:
            found += compare_tables(coordinator, ask)
    figures = Figures(options.seed, time.monotonic() - began, dict(sorted(coordinator.counted.items())), found)
    say(figures.tell())
    return figures
