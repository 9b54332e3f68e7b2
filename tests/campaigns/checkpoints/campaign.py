"""Groups with checkpoints, by piece, by key, with ``hold``, and with sinks: killed, stopped, deployed, rolled back.

Each state is that of a plain count, and nothing comes again that must not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any, Literal, TypeVar

from kafka_marshal import Group, Marshal, Restore
from kafka_marshal.admin import Admin
from kafka_marshal.checkpoints import Folder
from kafka_marshal.errors import AdminError, GroupPausedError, KafkaUnavailableError
from tests.campaigns.chaos.fleet import Fleet, Place
from tests.campaigns.chaos.lines import Pen
from tests.campaigns.chaos.worker import Job as PlainJob
from tests.campaigns.checkpoints.check import Account, Counts, Lines, check
from tests.campaigns.checkpoints.ground import Ground, Story, Writer, ends, inputs, story_of
from tests.campaigns.checkpoints.rows import Rows, retrying
from tests.campaigns.checkpoints.worker import DELIVERIES, DRAIN_S, POINTS, WORKER, Job, policy_of, restored_line
from tests.campaigns.frame import Campaign, Result, Say, Settings, Violation, run_campaign
from tests.sinks.conftest import running_postgres

# -- A bad release is deployed, and its deploy undone, by the recipe of docs/checkpoints.md -----------------------


#: A step that fails as brokers die is done again for this time (s).
TRIES_S = 180.0

#: The bad release works until it has written this many rows.
SPOILS = 100

#: The group stays paused this long (s) at most.
PAUSE_S = 120.0

T = TypeVar("T")


class Undoing:
    """What an operator does, while workers still die."""

    def __init__(self, ground: Ground, fleet: Fleet, rows: Rows, pen: Pen, rng: Random) -> None:
        self.violations: list[Violation] = []
        #: From where to where in the log a bad release was at work.
        self.spoilt: list[tuple[int, int]] = []
        #: Of steps that were done again.
        self.errors: list[str] = []
        self._ground = ground
        self._fleet = fleet
        self._rows = rows
        self._pen = pen
        self._rng = rng
        self._pool = ThreadPoolExecutor(1)
        self._spoilt_before = 0

    def run(self, turn: Callable[[], None], deploy: Callable[[], None]) -> None:
        """All of it. turn: keeps workers coming. deploy: all members, one by one."""
        group = self._ground.group
        pinned = self._step(turn, lambda admin: admin.checkpoint(group, pin=True, timeout=10.0)).id
        self._spoilt_before = self._rows.spoilt()  # of deploys that were undone without their own undo
        self._release(spoils=True)
        deploy()
        until = time.monotonic() + TRIES_S
        while (found := self._rows.spoilt() - self._spoilt_before) < SPOILS and time.monotonic() < until:
            for _ in range(20):
                turn()
        if not found:
            self.violations.append(Violation("liveness", f"no row of the new release within {TRIES_S:g} s"))
        # Rows of tables that only the bad release knows go with its own undo.
        undo = self._undo if self._rng.random() < 0.5 else None
        done = self._step(turn, lambda admin: admin.rollback(group, pinned, stay_paused=PAUSE_S, undo=undo))
        assert done.generation is not None
        self.spoilt.append((pinned, done.generation))
        self._release(spoils=False)
        deploy()
        self._step(turn, lambda admin: admin.resume(group))

    def close(self) -> None:
        """Nothing is under way."""
        self._pool.shutdown()

    def _release(self, *, spoils: bool) -> None:
        for place in self._fleet.places:
            place.template = replace(place.template, spoils=spoils)  # type: ignore[call-arg]

    def _undo(self, restore: Restore) -> None:
        rows = self._rows
        retrying(lambda: rows.sink.restore(restore, rows.undo_all))
        for piece in restore.pieces:
            spans = [list(each) for each in piece.ranges]
            self._pen.write("undone", piece.partition, piece.position, spans, rows.left[piece.partition])
        if (number := rows.spoilt() - self._spoilt_before) > 0:
            self.violations.append(Violation("undo", f"{number} rows of the bad release's own table are left"))

    def _step(self, turn: Callable[[], None], act: Callable[[Admin], T]) -> T:
        """One command, again if brokers die; workers come and go meanwhile."""
        until = time.monotonic() + TRIES_S

        def once() -> T:
            # The same client: a pause that the try before has left is its own.
            with Admin(self._ground.bootstrap, topic=self._ground.coordination, client_id="undoes") as admin:
                return act(admin)

        while True:
            asked = self._pool.submit(once)
            while not asked.done():
                turn()
            error = asked.exception()
            if error is None:
                return asked.result()
            if not isinstance(error, AdminError | KafkaUnavailableError | GroupPausedError) or time.monotonic() > until:
                raise error
            self.errors.append(f"{time.time():.1f} undoing: {type(error).__name__}: {error}")


# -- What operators do to a group that takes checkpoints: take, pin, retire, roll back ----------------------------


#: Pinned checkpoints beyond this number are retired: a group keeps 16 at most.
MOST_PINNED = 4


class Acts:
    """What is done to the group."""

    def __init__(self, ground: Ground, rng: Random) -> None:
        self._ground = ground
        self._rng = rng
        #: Held while something is done that others must not come into; and whether only brokers are restarted.
        self._acting = threading.Lock()
        self._only_restarts = False

    def all(self, every_s: float) -> dict[Callable[[], None], float]:
        """Each, and its mean distance, if something is done every ``every_s`` seconds."""
        return dict.fromkeys((self.checkpoint, self.rollback, self.retire), 3.5 * every_s)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Another operator is at work: inside the block this one does nothing but restart brokers."""
        self._only_restarts = True
        with self._acting:
            yield
        self._only_restarts = False

    @contextmanager
    def _admin(self) -> Iterator[Admin]:
        if self._only_restarts:
            raise KafkaUnavailableError("another operator is at work")
        with self._acting, Admin(self._ground.bootstrap, topic=self._ground.coordination) as admin:
            yield admin

    def checkpoint(self) -> None:
        """As ``kafka-marshal checkpoint --pin`` does."""
        with self._admin() as admin:
            admin.checkpoint(self._ground.group, pin=self._rng.random() < 0.5, timeout=5.0)

    def rollback(self) -> None:
        """To the newest, or to any that is kept."""
        with self._admin() as admin:
            kept = admin.checkpoints(self._ground.group)
            to = kept[-1] if self._rng.random() < 0.3 else self._rng.choice(kept)
            admin.rollback(self._ground.group, to.id, timeout=20.0)

    def retire(self) -> None:
        """The oldest pinned ones."""
        with self._admin() as admin:
            pinned = [x.id for x in admin.checkpoints(self._ground.group) if x.kind == "pinned" and not x.is_newest]
            for number in pinned[:-MOST_PINNED]:
                admin.retire(self._ground.group, number)


READY_S = 120.0

#: After the last fault, progress must move within this time, until all is done.
STILL_S = 60.0

#: Weights of a new worker's end: killed at a step, killed anywhere, asked to leave, none.
AT_A_STEP, ANYWHERE, ASKED, STAYS = 35, 25, 20, 20


#: A member leaves within this time after SIGTERM: close() waits 30 s, and a broker that was killed takes its time.
LEAVES_S = 60.0


@dataclass(frozen=True, slots=True)
class Options(Settings):
    """What a campaign is like."""

    partitions: int = 6
    kills: int = 300
    hold: bool = False
    #: Workers write each message into this sink, too, and it goes back with the group; "": there is none.
    sink: Literal["", "SQLite", "PostgreSQL"] = ""
    #: Members share partitions by key.
    shares: bool = False
    #: The kind of each worker.
    workers: tuple[str, ...] = ("loop", "run", "batches", "run")
    keys: int = 12
    #: Handlers of ``run``.
    concurrency: int = 4
    #: Handlers take this many times as long.
    slower: float = 1.0
    session_timeout_ms: int = 1_500
    every_s: float = 1.0
    messages_a_second: float = 200.0
    stop_every_s: float = 8.0
    operator_every_s: float = 5.0
    deploy_every_s: float = 25.0
    #: With a sink each second deploy is of a release that writes wrong rows, and is undone.
    undoes: bool = False
    #: Longest time until a worker's planned end.
    life_s: float = 10.0
    #: It ends without the rest of its kills after this time.
    most_s: float = 3_600.0


#: So many that most drains meet several of them.
MANY_HANDLERS: dict[str, Any] = {"workers": ("run",) * 4, "keys": 64, "concurrency": 16, "slower": 25.0}

#: Kind of group → how it is unlike one whose members own whole partitions and have no sink.
KINDS: dict[str, dict[str, Any]] = {
    "pieces": {},
    "hold": {"hold": True},
    "lanes": MANY_HANDLERS,
    "shares": {**MANY_HANDLERS, "shares": True, "partitions": 2},
    "sink": {"sink": "SQLite", "workers": ("batches", "run", "batches")},
    "postgres": {"sink": "PostgreSQL", "workers": ("batches", "run", "run"), "undoes": True},
}


@dataclass(slots=True)
class CheckpointsResult(Result):
    """What came of it."""

    account: Account = field(default_factory=Account)
    story: Story = field(default_factory=lambda: Story({}))
    points: dict[str, int] = field(default_factory=dict)

    def details(self) -> Iterator[str]:
        account = self.account
        yield from (f"{times:6} {name}" for name, times in self.points.items())
        yield from Result.details(self)
        yield from (f"lost, neither killed nor stopped: {each}" for each in account.unexplained[:10])
        yield (
            f"  {account.handled} handled, {account.cuts} cuts, {account.store_errors} store errors, "
            f"{account.completed} completions heard"
        )
        yield f"  {self._of_checkpoints()}"
        if self.counts["undone"]:
            yield (
                f"  deploys undone: {account.wrong} of {account.spoilt} pieces wrong before, "
                f"{account.undone} partitions' rows compared right after it"
            )
        why = "; ".join(
            f"{name} {times} pieces, {account.repeated[name]} messages again"
            for name, times in sorted(account.restored.items())
        )
        yield f"  restored: {why}"
        again = [number for number, _ in account.losses] or [0]
        since = [seconds for _, seconds in account.losses] or [0.0]
        yield (
            f"  a lost piece: {statistics.median(again):g} messages again (median; most {max(again)}), its last cut "
            f"{statistics.median(since):.2f} s before it was restored (median; most {max(since):.1f}); "
            f"{len(account.unexplained)} lost by processes that were neither killed nor stopped"
        )

    def _of_checkpoints(self) -> str:
        story, drains = self.story, sorted(self.account.drains) or [0.0]
        took_ms, number, in_vain = story.took_ms or [0], len(story.took_ms), sum(x >= DRAIN_S for x in drains)
        between_s = statistics.median([after - before for before, after in pairwise(story.taken_at)] or [0]) / 1000
        ended = ", ".join(f"{times} {why}" for why, times in sorted(story.ended.items())) or "none"
        return (
            f"checkpoints: {number} complete, each {statistics.median(took_ms):.0f} ms, {between_s:.2f} s after the "
            f"one before (medians), {story.without_some} without some members; ended: {ended}; "
            f"drains: median {statistics.median(drains) * 1000:.0f} ms, 99 % within "
            f"{drains[len(drains) * 99 // 100] * 1000:.0f}, in vain {in_vain} of {len(drains)}"
        )

    def to_json(self) -> dict[str, object]:
        """For a file."""
        return {
            **Result.to_json(self),
            "points": self.points,
            "restored": self.account.restored,
            "repeated": self.account.repeated,
            "took_ms": self.story.took_ms,
            "taken_at": self.story.taken_at,
            "ended": self.story.ended,
            "drains": self.account.drains,
            "losses": self.account.losses,
            "unexplained": self.account.unexplained,
        }


class Checkpoints(Campaign[Options]):
    """One run."""

    NAME = "checkpoints"
    turn_s = 0.02
    is_counted = True

    def story(self) -> None:
        options = self.options
        with ExitStack() as stack:
            database = str(self.folder / "sink.db")
            if options.sink == "PostgreSQL":
                postgres = stack.enter_context(running_postgres("fsync=off"))
                database = postgres.dsn(postgres.new_database("repeatable read"))
            self.rows = Rows(database) if options.sink else None
            if self.rows is not None:
                self.rows.make_tables()
                stack.callback(self.rows.sink.close)
            self._work()
            self.quiet()
            self.fleet.end_all()
            self._audit()

    def _work(self) -> None:
        """Faults, and what operators do."""
        options = self.options
        self.ground = Ground(self.bootstrap, self.log, self.group, self.topic, options.partitions, options.keys)
        if options.shares:
            with self.admin() as admin:
                admin.configure_group(self.group, accept_range_fetch=[self.topic])
        self.states = self.folder / "states"
        self.writer = Writer(self.ground, options.messages_a_second, Random(options.seed + 1))
        self.deploys = self.undone = 0
        self.fleet = Fleet(self._places(), self.folder, self.rng, kinds=DELIVERIES, module=WORKER)
        self.fleet.arrange = self._arrange
        self.crews.append(self.fleet)
        self.generations = dict.fromkeys((place.name for place in self.fleet.places), 0)
        self.acts = Acts(self.ground, Random(options.seed + 2))
        self.undoing: Undoing | None = None
        if options.undoes:
            assert self.rows is not None
            pen = Pen(self.folder / "undone.jsonl")
            self.undoing = Undoing(self.ground, self.fleet, self.rows, pen, Random(options.seed + 3))
        self.fleet.wait_until_ready(READY_S)
        self.began = time.monotonic()
        self.operator.start()
        try:
            self.befall()
        finally:
            if self.undoing is not None:
                self.undoing.close()
        self.end_threads()
        self.writer.close()

    def _places(self) -> list[Place]:
        options = self.options
        plain = (self.bootstrap, self.log, self.group, self.topic, options.partitions)
        more: dict[str, Any] = {
            "states": str(self.states),
            "hold": options.hold,
            "every_s": options.every_s,
            "session_timeout_ms": options.session_timeout_ms,
            "database": self.rows.database if self.rows is not None else "",
            "shares": options.shares,
            "concurrency": options.concurrency,
        }
        return [
            Place(f"w{number}", Job(*plain, kind, f"w{number}", options.hi_ms, "", 0, **more))
            for number, kind in enumerate(options.workers, 1)
        ]

    def faults(self) -> Mapping[Callable[[], None], float]:
        return {self.stop: self.options.stop_every_s, self.deploy: self.options.deploy_every_s}

    def operates(self) -> Mapping[Callable[[], None], float]:
        every_s = self.options.operator_every_s
        return self.acts.all(every_s) | ({self.restart: 7 * every_s} if self.may_kill else {})

    def goes_on(self) -> bool:
        is_late = time.monotonic() >= self.began + self.options.most_s
        return self.fleet.counts.kills < self.options.kills and not is_late

    def progress(self) -> str:
        return f"{self.fleet.counts.kills} kills, {self.deploys} deploys, {dict(self.counts)}"

    def stop(self) -> None:
        """SIGSTOP a worker."""
        self.fleet.stop_one(self.options.session_timeout_ms / 1000 * self.rng.choice((0.4, 1.5, 3.0)))

    def deploy(self) -> None:
        """Of a good release; or of a bad one, which is undone."""
        if self.undoing is not None and self.deploys % 3 == 0:
            with self.acts.alone():
                self.undoing.run(self._turn, self._deploy)
            self.undone += 1
        else:
            self._deploy()

    def judge(self) -> None:
        undoing, stopped = self.undoing, {stop.pid for stop in self.fleet.stops}
        (self.folder / "operator.txt").write_text("\n".join(undoing.errors if undoing is not None else ()))
        files = [Lines(x, x in self.fleet.killed or pid in stopped) for x, pid in self.fleet.files.items()]
        files += [Lines(self.folder / name, False) for name in ("audit.jsonl", "undone.jsonl")]
        self.of_log = story_of(self.ground, self.folder / "log.jsonl")
        back, rollbacks = self.of_log.went_back, self.of_log.rollbacks
        spoilt = [] if undoing is None else undoing.spoilt
        self.account = check(inputs(self.ground), files, back, rollbacks, hold=self.options.hold, spoilt=spoilt)
        self.violations += [*self.account.violations, *([] if undoing is None else undoing.violations)]
        ends = self.fleet.counts
        self.counts += Counter(kills=ends.kills, stops=ends.stops, leaves=ends.closed, deploys=self.deploys)
        self.counts += Counter(undone=self.undone, written=self.writer.written)

    def result(self) -> CheckpointsResult:
        return CheckpointsResult(
            self._kind(),
            self.options.seed,
            self.violations,
            self.seconds,
            counts=self.counts,
            account=self.account,
            story=self.of_log,
            points=dict(sorted(self.fleet.counts.points.items())),
        )

    def _kind(self) -> str:
        options = self.options
        kind = "hold" if options.hold else "by piece"
        kind += (", shared by key" if options.shares else "") + (f", with {options.sink}" if options.sink else "")
        return f"checkpoints, {kind}" + ("" if options.concurrency == 4 else f", {options.concurrency} handlers each")

    def _arrange(self, job: PlainJob) -> PlainJob:
        """Workers die at steps of this campaign."""
        self.fate = self.rng.choices(range(4), (AT_A_STEP, ANYWHERE, ASKED, STAYS))[0]
        dies = self.fate == 0 and not self.fleet.calm
        doom, times = (self.rng.choice(POINTS), self.rng.randint(1, 6)) if dies else ("", 1)
        if doom == "handling":
            times *= 40
        handling_s, linger_s = job.handling_s * self.options.slower, self.rng.choice((0.0, 0.1))
        return replace(job, doom=doom, times=times, stop_after_s=0.0, linger_s=linger_s, handling_s=handling_s)

    def _fates(self) -> None:
        """When the new workers die."""
        now, life_s = time.monotonic(), self.options.life_s
        for place in self.fleet.places:
            if place.generation == self.generations[place.name] or place.job is None:
                continue
            self.generations[place.name] = place.generation
            place.kill_at = place.ask_at = float("inf")
            if self.fleet.calm:
                continue
            draw = self.rng.randrange(ANYWHERE + ASKED + STAYS)
            if place.job.doom:
                place.kill_at = now + life_s
            elif draw < ANYWHERE:
                place.kill_at = now + self.rng.uniform(0.3, life_s)
            elif draw < ANYWHERE + ASKED:
                place.ask_at = now + self.rng.uniform(0.5, life_s)
            else:
                place.kill_at = now + life_s * self.rng.uniform(1, 4)

    def tend(self, *, is_calm: bool = False) -> None:
        super().tend(is_calm=is_calm)
        self._fates()

    def _turn(self) -> None:
        self.tend()
        time.sleep(self.turn_s)

    def _deploy(self) -> None:
        """All members one by one, each with a successor; no worker is killed meanwhile."""
        self.fleet.calm = True
        for place in self.fleet.places:
            place.kill_at = place.ask_at = float("inf")
        for place in self.fleet.places:
            before, until, is_asked = place.generation, time.monotonic() + LEAVES_S, False
            while (place.generation == before or not place.pid) and time.monotonic() < until:
                if place.pid and not is_asked:
                    place.ask_at, is_asked = 0.0, True
                self._turn()
            if place.generation == before:
                self.violations.append(f"liveness: {place.name} did not leave within {LEAVES_S:g} s of SIGTERM")
                place.kill_at = 0.0
        self.deploys += 1
        self.fleet.calm = False
        for place in self.fleet.places:
            place.kill_at = time.monotonic() + self.options.life_s * self.rng.uniform(0.3, 2)

    def quiet(self) -> None:
        """All becomes part of a checkpoint."""
        until = ends(self.ground)

        def look() -> tuple[object, list[str]]:
            found = self.stable()
            behind = {x: at for x, end in until.items() if end and (at := found.get(x, -1)) < end - 1}
            return found, [f"liveness: no progress for {STILL_S:g} s: at {behind} of {until}"] if behind else []

        self.violations += self.until_quiet(look, STILL_S)

    def _audit(self) -> None:
        """A member that restores all, and handles nothing."""
        ground, options, rows = self.ground, self.options, self.rows
        pen, states, got = Pen(self.folder / "audit.jsonl"), Folder(self.states), set()

        def restore(restore: Restore) -> None:
            if rows is not None:
                rows.sink.restore(restore, rows.undo)
            for piece in restore.pieces:
                state: Counts = {}
                for part in states.load_parts(piece):
                    state |= {key: count for key, count in json.loads(part.state).items() if part.holds(key)}
                there = rows.left[piece.partition] if rows is not None else None
                pen.write("restored", *restored_line(piece, restore, state, there))
                got.add(piece.partition)

        policy = replace(policy_of(options.every_s, options.hold), on_checkpoint=lambda _: None, on_restore=restore)
        mode = Group(session_timeout=options.session_timeout_ms / 1000, allow_key_share=options.shares)
        ids: dict[str, Any] = {"group_id": ground.group, "client_id": "audit", "topic": ground.coordination}
        with (
            Marshal(ground.bootstrap, heartbeat_interval=options.hi_ms / 1000, **ids) as marshal,
            marshal.consumer([ground.topic], mode=mode, checkpoints=policy) as consumer,
        ):
            until = time.monotonic() + 60
            while len(got) < ground.partitions and time.monotonic() < until:
                if (message := consumer.poll(0.2)) is not None:
                    where = f"[{message.partition()}] {message.offset()}"
                    self.violations.append(f"lost: after all was done, {where} came again")
                    break


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of its command."""
    parser.add_argument("--kills", type=int, default=300, help="of workers (300)")
    parser.add_argument("--minutes", type=float, default=60.0, help="most for each kind of group (60)")
    parser.add_argument("--only", choices=tuple(KINDS), help="one kind of group")
    parser.add_argument("--workers", help="the kind of each, such as loop,run,batches")
    parser.add_argument("--heartbeat-interval-ms", type=int, default=500, help="HI (500)")


def runs(chosen: argparse.Namespace, say: Say) -> Iterator[Result]:
    """What the command runs."""
    kinds = [chosen.only] if chosen.only else list(KINDS)
    for kind in kinds:
        options = Options(
            kills=chosen.kills // len(kinds),
            seed=chosen.seed,
            hi_ms=chosen.heartbeat_interval_ms,
            most_s=chosen.minutes * 60,
            keep=chosen.keep,
        )
        options = replace(options, **KINDS[kind])
        if chosen.workers:
            options = replace(options, workers=tuple(chosen.workers.split(",")))
        yield run_campaign(Checkpoints, options, say=say)
