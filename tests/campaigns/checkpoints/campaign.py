"""Groups with checkpoints, by piece, by key, with ``hold``, and with sinks: killed, stopped, deployed, rolled back.

Each state is that of a plain count, and nothing comes again that must not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Literal

from kafka_marshal import Marshal, Restore
from kafka_marshal.admin import Admin
from kafka_marshal.checkpoints import Folder
from kafka_marshal.errors import KafkaUnavailableError
from kafka_marshal.testing import RunningKafka
from tests.campaigns.chaos.fleet import Fleet, Place
from tests.campaigns.chaos.lines import Pen
from tests.campaigns.chaos.worker import Job as PlainJob
from tests.campaigns.checkpoints.check import Account, Counts, Lines, check
from tests.campaigns.checkpoints.ground import Story, Writer, ends, inputs, make_ground, story_of
from tests.campaigns.checkpoints.operator import Acts
from tests.campaigns.checkpoints.rows import Rows
from tests.campaigns.checkpoints.undoing import Undoing
from tests.campaigns.checkpoints.worker import DELIVERIES, DRAIN_S, POINTS, WORKER, Job, policy_of, restored_line
from tests.campaigns.frame import Operator, Result, Say, Schedule, Violation, run_on_a_broker
from tests.sinks.conftest import running_postgres

__all__ = ["KINDS", "CheckpointsResult", "Options", "add_arguments", "run_campaign", "runs"]

READY_S = 120.0

#: After the last fault, progress must move within this time, until all is done.
STILL_S = 60.0

#: Weights of a new worker's end: killed at a step, killed anywhere, asked to leave, none.
AT_A_STEP, ANYWHERE, ASKED, STAYS = 35, 25, 20, 20


#: A member leaves within this time after SIGTERM: close() waits 30 s, and a broker that was killed takes its time.
LEAVES_S = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """What a campaign is like."""

    kills: int = 300
    seed: int = 1
    hold: bool = False
    #: Workers write each message into this sink, too, and it goes back with the group; "": there is none.
    sink: Literal["", "SQLite", "PostgreSQL"] = ""
    #: Members share partitions by key.
    shares: bool = False
    #: The kind of each worker.
    workers: tuple[str, ...] = ("loop", "run", "batches", "run")
    partitions: int = 6
    keys: int = 12
    #: Handlers of ``run``.
    concurrency: int = 4
    #: Handlers take this many times as long.
    slower: float = 1.0
    heartbeat_interval_ms: int = 500
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
    #: Keep the folder, even if every promise was kept.
    keep: bool = False


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


class _Campaign:
    def __init__(
        self, options: Options, folder: Path, kafka: RunningKafka, restarts: bool, database: str, say: Say
    ) -> None:
        self.options = options
        self.folder = folder
        self.say = say
        self.rng = Random(options.seed)
        self.ground = make_ground(kafka.bootstrap_servers, options.partitions, options.keys, shares=options.shares)
        self.states = folder / "states"
        self.rows = Rows(database or str(folder / "sink.db")) if options.sink else None
        if self.rows is not None:
            self.rows.make_tables()
        self.writer = Writer(self.ground, options.messages_a_second, Random(options.seed + 1))
        self.violations: list[Violation] = []
        self.errors: list[str] = []
        self.deploys = 0
        self.undone = 0
        self.fleet = Fleet(self._places(), folder, self.rng, kinds=DELIVERIES, module=WORKER)
        self.fleet.arrange = self._arrange
        self.generations = dict.fromkeys((place.name for place in self.fleet.places), 0)
        rng = Random(options.seed + 2)
        self.acts = Acts(self.ground, rng, kafka if restarts else None)
        every, note = self.acts.all(options.operator_every_s), self.errors.append
        self.operator = Operator(Schedule(every, rng, self.acts.counts, note, is_counted=True))
        self.operator.start()
        self.undoing: Undoing | None = None
        if options.undoes:
            assert self.rows is not None
            pen = Pen(folder / "undone.jsonl")
            self.undoing = Undoing(self.ground, self.fleet, self.rows, pen, Random(options.seed + 3))

    def _places(self) -> list[Place]:
        ground, options = self.ground, self.options
        plain = (ground.bootstrap, ground.coordination, ground.group, ground.topic, ground.partitions)
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
            Place(f"w{number}", Job(*plain, kind, f"w{number}", options.heartbeat_interval_ms, "", 0, **more))
            for number, kind in enumerate(options.workers, 1)
        ]

    def run(self) -> CheckpointsResult:
        """All of it."""
        try:
            self.fleet.wait_until_ready(READY_S)
            began = time.monotonic()
            self._faults(began)
            self.operator.close()
            self.writer.close()
            self._peace()
            seconds = time.monotonic() - began
            for name in self.fleet.ask_all(30.0, self.fleet.turn):
                self.violations.append(Violation("liveness", f"{name} did not end within 30 s of SIGTERM"))
        finally:
            self.fleet.close()
            if self.undoing is not None:
                self.undoing.close()
        self._audit()
        if self.rows is not None:
            self.rows.sink.close()
        return self._result(seconds)

    def _result(self, seconds: float) -> CheckpointsResult:
        errors = self.errors + ([] if self.undoing is None else self.undoing.errors)
        (self.folder / "operator.txt").write_text("\n".join(errors))
        stopped = {stop.pid for stop in self.fleet.stops}
        files = [Lines(x, x in self.fleet.killed or pid in stopped) for x, pid in self.fleet.files.items()]
        files += [Lines(self.folder / name, False) for name in ("audit.jsonl", "undone.jsonl")]
        story = story_of(self.ground, self.folder / "log.jsonl")
        spoilt = [] if self.undoing is None else self.undoing.spoilt
        account = check(
            inputs(self.ground), files, story.went_back, story.rollbacks, hold=self.options.hold, spoilt=spoilt
        )
        account.violations += [Violation("worker", text) for text in self.fleet.unexplained]
        account.violations += self.violations + ([] if self.undoing is None else self.undoing.violations)
        ends = self.fleet.counts
        counts = {"kills": ends.kills, "stops": ends.stops, "leaves": ends.closed, "deploys": self.deploys}
        counts |= {"undone": self.undone, "written": self.writer.written, **self.acts.counts}
        return CheckpointsResult(
            self._kind(),
            self.options.seed,
            account.violations,
            seconds,
            counts=Counter(counts),
            account=account,
            story=story,
            points=dict(sorted(ends.points.items())),
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

    def _turn(self) -> None:
        self.fleet.turn()
        self._fates()
        time.sleep(0.02)

    def _faults(self, began: float) -> None:
        options, fleet, told = self.options, self.fleet, began
        stop_at, deploy_at = began + options.stop_every_s, began + options.deploy_every_s
        while fleet.counts.kills < options.kills and (now := time.monotonic()) < began + options.most_s:
            self._turn()
            if now >= stop_at:
                fleet.stop_one(options.session_timeout_ms / 1000 * self.rng.choice((0.4, 1.5, 3.0)))
                stop_at = now + options.stop_every_s * self.rng.uniform(0.5, 1.5)
            if now >= deploy_at:
                if self.undoing is not None and self.deploys % 3 == 0:
                    with self.acts.alone():
                        self.undoing.run(self._turn, self._deploy)
                    self.undone += 1
                else:
                    self._deploy()
                deploy_at = time.monotonic() + options.deploy_every_s
            if now > told + 10:
                told = now
                acts = dict(self.acts.counts)
                self.say(f"{now - began:.0f} s: {fleet.counts.kills} kills, {self.deploys} deploys, {acts}")

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
                self.violations.append(
                    Violation("liveness", f"{place.name} did not leave within {LEAVES_S:g} s of SIGTERM")
                )
                place.kill_at = 0.0
        self.deploys += 1
        self.fleet.calm = False
        for place in self.fleet.places:
            place.kill_at = time.monotonic() + self.options.life_s * self.rng.uniform(0.3, 2)

    def _peace(self) -> None:
        """Without faults all becomes part of a checkpoint."""
        self.fleet.settle()
        moved = time.monotonic()
        seen: dict[int, int] = {}
        ground = self.ground
        until = ends(ground)
        behind: dict[int, int] = {0: 0}
        while behind and time.monotonic() < moved + STILL_S:
            for _ in range(25):
                self._turn()
            try:
                with Admin(ground.bootstrap, topic=ground.coordination) as admin:
                    pieces = [(x.partition, -1 if x.stable is None else x.stable) for x in admin.progress(ground.group)]
            except KafkaUnavailableError:
                continue
            found = {partition: min(at for number, at in pieces if number == partition) for partition, _ in pieces}
            behind = {
                partition: at for partition, end in until.items() if end and (at := found.get(partition, -1)) < end - 1
            }
            if found != seen:
                moved, seen = time.monotonic(), found
        if behind:
            text = f"no progress for {STILL_S:g} s: at {behind} of {until}"
            self.violations.append(Violation("liveness", text))

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

        with (
            Marshal(
                ground.bootstrap, group_id=ground.group, client_id="audit", topic=ground.coordination,
                heartbeat_interval_ms=options.heartbeat_interval_ms,
            ) as marshal,
            marshal.group_consumer(
                [ground.topic],
                session_timeout_ms=options.session_timeout_ms,
                allow_key_share=options.shares,
                checkpoints=policy_of(options.every_s, options.hold),
                on_checkpoint=lambda checkpoint: None,
                on_restore=restore,
            ) as consumer,
        ):  # fmt: skip
            until = time.monotonic() + 60
            while len(got) < ground.partitions and time.monotonic() < until:
                if (message := consumer.poll(0.2)) is not None:
                    where = f"[{message.partition()}] {message.offset()}"
                    self.violations.append(Violation("lost", f"after all was done, {where} came again"))
                    break


def run_campaign(
    options: Options, kafka: RunningKafka | None = None, *, say: Say = lambda _: None
) -> CheckpointsResult:
    """Run it, on a separate broker, which is killed, too; or on one that is not."""

    def run(folder: Path, broker: RunningKafka, restarts: bool) -> CheckpointsResult:
        with ExitStack() as stack:
            database = ""
            if options.sink == "PostgreSQL":
                postgres = stack.enter_context(running_postgres("fsync=off"))
                database = postgres.dsn(postgres.new_database("repeatable read"))
            return _Campaign(options, folder, broker, restarts, database, say).run()

    return run_on_a_broker("checkpoints", run, kafka, options.keep, say)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of its command."""
    parser.add_argument("--kills", type=int, default=300, help="of workers (300)")
    parser.add_argument("--minutes", type=float, default=60.0, help="most for each kind of group (60)")
    parser.add_argument("--only", choices=tuple(KINDS), help="one kind of group")
    parser.add_argument("--workers", help="the kind of each, such as loop,run,batches")
    parser.add_argument("--heartbeat-interval-ms", type=int, default=500, help="HI (500)")


def runs(chosen: argparse.Namespace, say: Say) -> Iterator[CheckpointsResult]:
    """What the command runs."""
    kinds = [chosen.only] if chosen.only else list(KINDS)
    for kind in kinds:
        options = Options(
            kills=chosen.kills // len(kinds),
            seed=chosen.seed,
            heartbeat_interval_ms=chosen.heartbeat_interval_ms,
            most_s=chosen.minutes * 60,
            keep=chosen.keep,
        )
        options = replace(options, **KINDS[kind])
        if chosen.workers:
            options = replace(options, workers=tuple(chosen.workers.split(",")))
        yield run_campaign(options, say=say)
