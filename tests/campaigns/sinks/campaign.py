"""Writers in processes and threads, what happens to them, and the account in the end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from random import Random
from typing import Any, NamedTuple, cast

from kafka_marshal.errors import SinkError
from kafka_marshal.sinks import FencedSink
from rationalizer.limits import MAX_KEY_HASH
from tests.campaigns.sinks.coordinator import Coordinator, Shared
from tests.campaigns.sinks.member import GROUP, TOPIC, Place, hash_of, is_hole, serve

# The independent account: the users' rows, in the order in which they came, beside what the coordinator knows.


#: Of the users; {serial} is what counts the rows.
TABLES = (
    """
    CREATE TABLE written (seq {serial} PRIMARY KEY, part int, round int, off bigint, hash bigint, lo bigint, hi bigint,
    token bigint, summed int, writer text)
    """,
    "CREATE TABLE sums (part int, round int, slot int, n bigint, PRIMARY KEY (part, round, slot))",
)

#: The epoch of a partition whose keys have different ones.
SPLIT = 2**63 - 1
#: Added to tokens of coordinated groups.
COORDINATED = 2**62

Ask = Callable[[str], Sequence[Sequence[Any]]]


class Row(NamedTuple):
    """A row of ``written``. The writer had keys lo … hi; an offset below 0 is the mark of a rewind."""

    seq: int
    part: int
    round: int
    off: int
    hash: int
    lo: int
    hi: int
    token: int
    summed: int


def compare(coordinator: Coordinator, ask: Ask, orders: Sequence[str]) -> Iterator[str]:
    """What is broken. orders: expressions by which rows are ordered as they came; tokens must grow in each order."""
    rows = [Row(*row) for row in ask(f"SELECT {', '.join(Row._fields)} FROM written ORDER BY seq")]
    for shared in coordinator.partitions:
        yield from _once(shared, [row for row in rows if row.part == shared.number and row.off >= 0])
    for order in orders:
        came = [Row(*row) for row in ask(f"SELECT {', '.join(Row._fields)} FROM written ORDER BY {order}, seq")]
        for shared in coordinator.partitions:
            wrong = _older_after_newer([row for row in came if row.part == shared.number])
            yield from (f"ordered by {order}: {each}" for each in wrong)
    sums = {tuple(at): n for *at, n in ask("SELECT part, round, slot, n FROM sums")}
    wanted = Counter((row.part, row.round, row.hash % 7) for row in rows if row.summed)
    yield from (f"sum of {at}: {sums.get(at, 0)}, not {n}" for at, n in wanted.items() if sums.get(at, 0) != n)
    yield from (f"sum of {at}: {n}, without a row" for at, n in sums.items() if at not in wanted)


def _once(shared: Shared, rows: Sequence[Row]) -> Iterator[str]:
    """Each record once in each round, and each that is done is there."""
    found = Counter((row.round, row.off) for row in rows)
    yield from (f"partition {shared.number}: {n} rows of (round, offset) {at}" for at, n in found.items() if n > 1)
    for row in rows:
        if is_hole(shared.number, row.off) or row.hash != hash_of(shared.number, row.off):
            yield f"{row} is of no message"
        if not row.lo <= row.hash <= row.hi:
            yield f"{row} has a key that was not its writer's"
        if row.round > shared.round or row.off <= shared.rounds[row.round].since:
            yield f"{row} was done before its round"
    for number, each in enumerate(shared.rounds):
        lost = sorted(offset for offset in each.done if not found[number, offset])
        if lost:
            yield f"partition {shared.number}, round {number}: {len(lost)} done and not there: {lost[:10]}"
    there, upper = set[int](), shared.stable
    for number in reversed(range(len(shared.rounds))):
        since = shared.rounds[number].since
        there |= {off for round_, off in found if round_ == number and since < off <= upper}
        upper = min(upper, since)
    lost = [off for off in range(shared.stable + 1) if off not in there and not is_hole(shared.number, off)]
    if lost:
        yield f"partition {shared.number}: lost: {len(lost)}, {lost[:10]}"


def _older_after_newer(rows: Sequence[Row]) -> Iterator[str]:
    """No row comes after one whose token is newer and whose writer had its key."""
    bounds = sorted({0, *(row.lo for row in rows), *(row.hi + 1 for row in rows)})
    newest = [(-1, -1)] * (len(bounds) + 1)
    shares = set[tuple[int, int, int]]()
    for row in rows:
        if row.off >= 0:
            at = bisect_left(bounds, row.hash + 1) - 1
            if newest[at][0] > row.token:
                yield f"{row} is older than a token before it, (token, seq) {newest[at]}"
        if (share := (row.token, row.lo, row.hi)) not in shares:
            shares.add(share)
            for at in range(bisect_left(bounds, row.lo), bisect_left(bounds, row.hi + 1)):
                newest[at] = max(newest[at], (row.token, row.seq))


def compare_tables(coordinator: Coordinator, ask: Ask) -> Iterator[str]:
    """The sink's tables as the rules say."""
    done = defaultdict[int, list[tuple[int, int]]](list)
    for part, first, last in ask("SELECT partition, first_offset, last_offset FROM kafka_marshal_done ORDER BY 1, 2"):
        done[part].append((first, last))
    fences = defaultdict[int, list[tuple[int, int, int]]](list)
    for part, lo, hi, epoch in ask("SELECT partition, lo, hi, epoch FROM kafka_marshal_fences ORDER BY 1, 2"):
        fences[part].append((lo, hi, epoch))
    for part, last, epoch in ask("SELECT partition, last_offset, epoch FROM kafka_marshal_progress ORDER BY 1"):
        shared = coordinator.partitions[part]
        yield from (f"partition {part}: {each}" for each in _intervals(shared, last, done[part]))
        if (epoch == SPLIT) != bool(fences[part]):
            yield f"partition {part}: epoch {epoch} with fences {fences[part]}"
        elif fences[part]:
            yield from (f"partition {part}: {each}" for each in _fences(shared, fences[part]))


def _intervals(shared: Shared, last: int, found: Sequence[tuple[int, int]]) -> Iterator[str]:
    before = None
    for first, end in found:
        if first > end or (before is not None and first <= before):
            yield f"intervals overlap: {found}"
        before = end
    covered = {at for first, end in found for at in range(max(first, last), end + 1)}
    over = [at for at in (last, *covered) if at > shared.stable]
    missing = [at for at in range(last + 1, shared.stable + 1) if at not in covered and not is_hole(shared.number, at)]
    if over or missing:
        yield f"{over[:5]} stored as done and are not, {missing[:5]} are and not stored: {last}, {found[:20]}"


def _fences(shared: Shared, found: Sequence[tuple[int, int, int]]) -> Iterator[str]:
    los, his = [lo for lo, _, _ in found], [hi for _, hi, _ in found]
    if los[0] != 0 or his[-1] != MAX_KEY_HASH or los[1:] != [hi + 1 for hi in his[:-1]] or len(found) < 2:
        yield f"fences are not disjoint, or do not cover all keys: {found}"
    if any(left[2] == right[2] for left, right in pairwise(found)):
        yield f"neighbouring fences with one epoch: {found}"
    for lo, hi, epoch in found:
        rightful = [x.token for x in shared.pieces if x.lo <= hi and lo <= x.hi]
        if epoch - COORDINATED > min(rightful):
            yield f"a fence above the rightful token: {lo} … {hi}, {epoch - COORDINATED}, {rightful}"


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
