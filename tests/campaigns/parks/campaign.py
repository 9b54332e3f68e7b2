"""The campaign: two groups, what befalls them and the broker, an operator, and what must hold when all is quiet."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from confluent_kafka import Producer

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.admin import Admin
from kafka_marshal.admin.open_messages import OpenMessage
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.testing import RunningKafka
from tests.campaigns.crew import AWAY, BrokerFaults, Crew, Operator
from tests.campaigns.crew import Place as Post
from tests.campaigns.on_a_broker import Result, Say, run_on_a_broker
from tests.campaigns.parks.account import Account, Place, Written
from tests.campaigns.parks.log import OpenLog
from tests.campaigns.parks.worker import BAD, FLAKY, KILLER, SLOW

__all__ = ["KINDS", "Campaign", "Group", "Options", "Result", "run_campaign"]

KINDS = ("claimed", "coordinated")

#: Without faults something changes within this time (s), or the group is stuck.
STILL_S = 90.0

#: What was asked for comes later than that by at most this time (s).
MOST_LATE_S = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """What a campaign is like."""

    seconds: float = 180.0
    #: Faults continue until this number of workers was killed: on a busy machine they begin late.
    kills: int = 2
    #: Messages in a second, in all partitions.
    rate: float = 200.0
    kinds: tuple[str, ...] = KINDS
    #: Of each group.
    workers: int = 3
    partitions: int = 2
    keys: int = 40
    seed: int = 1
    hi_ms: int = 500
    work_ms: float = 1.0
    attempts: int = 4
    backoff: tuple[float, float] = (0.01, 0.1)
    killers: int = 2
    kill_every_s: float = 3.0
    stop_every_s: float = 7.0
    leave_every_s: float = 11.0
    operator_every_s: float = 3.0
    keep: bool = False


@dataclass(slots=True)
class Group:
    """A group of workers, and what they have written down."""

    kind: str
    name: str
    crew: Crew
    account: Account = field(default_factory=Account)


class Campaign:
    """Two groups, one of each kind, that handle all messages of one topic."""

    def __init__(self, options: Options, folder: Path, kafka: RunningKafka, may_kill: bool, say: Say) -> None:
        self.options, self.folder, self.say = options, folder, say
        self.rng = Random(options.seed)
        self.hi_s = options.hi_ms / 1000
        name = uuid.uuid4().hex[:6]
        self.log, self.topic = f"__marshal-{name}", f"jobs-{name}"
        self.bootstrap = kafka.bootstrap_servers
        self.release = "good"
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.groups = [Group(kind, f"{kind}-{name}", self._crew(kind, f"{kind}-{name}")) for kind in options.kinds]
        #: What the log of the topic has.
        self.written: dict[Place, Written] = {}
        self.writing_ends = threading.Event()
        with closing(KafkaCluster(self.bootstrap)) as cluster:
            create_topic(cluster, self.log, 2, 20)
            cluster.create_topic(self.topic, options.partitions, 1, {}, 20)
        for group in self.groups:
            if group.kind == "coordinated" and options.seed % 2:  # its members share partitions by key
                with self.admin() as admin:
                    admin.configure_group(group.name, accept_range_fetch=[self.topic])
        acts = [self.redrive, self.park, self.redrive, self.discard]
        if may_kill:
            faults = BrokerFaults(kafka, self.rng, self.hi_s)
            acts += [faults.freeze, faults.restart]
        self.operator = Operator(acts, options.operator_every_s, self.rng, self.counts, say)

    def _crew(self, kind: str, name: str) -> Crew:
        def job(place: Post) -> dict[str, object]:
            return {
                "bootstrap": self.bootstrap,
                "group": name,
                "log": self.log,
                "topic": self.topic,
                "hi_ms": self.options.hi_ms,
                "work_ms": self.options.work_ms,
                "attempts": self.options.attempts,
                "backoff": self.options.backoff,
                "release": self.release,
                "folder": str(self.folder),
                "watchdog": place.name.endswith("0"),
            }

        posts = {f"{kind[:2]}{number}": kind for number in range(self.options.workers)}
        module = "tests.campaigns.parks.worker"
        return Crew(module, self.folder, posts, job, rng=self.rng, hi_s=self.hi_s, counts=self.counts)

    def admin(self) -> Admin:
        return Admin(self.bootstrap, topic=self.log)

    # Messages.

    def write(self, number: int, *, paced: bool, plain: bool = False) -> None:
        """Write this number of messages, or until ``writing_ends``; plain: none of them is odd."""
        config = {"enable.idempotence": True, "linger.ms": 5, "message.timeout.ms": 300_000, "log_level": 2}
        producer = Producer({"bootstrap.servers": self.bootstrap, **config})
        rng, options, began = Random(self.options.seed), self.options, time.monotonic()
        killers = {20 + n * 97 for n in range(options.killers)}
        odd = {BAD: 0.006, FLAKY: 0.02, SLOW: 0.002}
        for count in range(number):
            value = rng.choices([b"x", *odd], [1.0 - sum(odd.values()), *odd.values()])[0]
            message = Written(b"%d" % rng.randrange(options.keys), KILLER if count in killers else value)
            if plain:
                message = message._replace(value=b"x")

            def written(error: object, record: object, message: Written = message) -> None:
                assert error is None, error
                self.written[record.partition(), record.offset()] = message  # type: ignore[attr-defined]

            while True:
                try:
                    where = rng.randrange(options.partitions)
                    producer.produce(self.topic, message.value, message.key, partition=where, on_delivery=written)
                    break
                except BufferError:
                    producer.poll(0.1)
            producer.poll(0)
            if paced and self.writing_ends.wait(max(0.0, began + count / options.rate - time.monotonic())):
                break
        assert producer.flush(120) == 0

    # The operator.

    def _some(self, group: Group, state: str, most: int) -> list[tuple[str, int, int]]:
        with self.admin() as admin:
            found = [each.place for each in admin.open_messages(group.name) if each.state == state]
        return self.rng.sample(found, min(most, len(found)))

    def redrive(self) -> None:
        for group in self.groups:
            if found := self._some(group, "parked", 5):
                with self.admin() as admin:
                    self.counts["redriven"] += len(admin.redrive(group.name, found).messages)

    def discard(self) -> None:
        for group in self.groups:
            if found := self._some(group, "parked", 1):
                group.account.discarded.update(place[1:] for place in found)
                with self.admin() as admin:
                    done = admin.discard(group.name, found).messages
                    group.account.given_up.update(place[1:] for place in done)
                    self.counts["discarded"] += len(done)

    def park(self) -> None:
        for group in self.groups:
            if found := self._some(group, "waiting", 2):
                group.account.by_hand.update(place[1:] for place in found)
                with self.admin() as admin:
                    self.counts["parked by hand"] += len(admin.park(group.name, found).messages)

    # All of it.

    def run(self) -> Result:
        """Faults, then quiet; then all that was set aside is handled."""
        began = time.monotonic()
        writer = threading.Thread(target=self.write, args=(10**9,), kwargs={"paced": True})
        try:
            writer.start()
            self.operator.start()
            self._faults(began)
            self.operator.ended.set()
            self.writing_ends.set()
            self.operator.join()
            writer.join()
            self.settle(set())
            self.redrive_all()
        finally:
            self.operator.ended.set()
            self.writing_ends.set()
            for group in self.groups:
                group.crew.end()
        if self.operator.failure is not None:
            raise self.operator.failure
        return self.judged("parks", began)

    def judged(self, name: str, began: float) -> Result:
        """The account of all, when all workers have ended."""
        log = OpenLog(self.bootstrap, self.log)
        for group in self.groups:
            account, kind = group.account, group.kind
            account.read(group.crew.lives)
            found = [*group.crew.errors, *account.violations(self.written), *log.violations(group.name)]
            self.violations += [f"{kind}: {each}" for each in found]
            self.counts[f"{kind}: handled"] = account.handled
            self.counts["killed by a message"] += account.killed
            self.counts["no effect, unproven"] += account.unproven
            self.counts[f"{kind}: set aside"] = sum(log.parks[group.name].values())
        self.counts["messages"] = len(self.written)
        return Result(name, self.options.seed, self.violations, time.monotonic() - began, counts=self.counts)

    def _faults(self, began: float) -> None:
        options, rng = self.options, self.rng
        every = {"kill": options.kill_every_s, "stop": options.stop_every_s, "leave": options.leave_every_s}
        due = {name: began + 4.0 + rng.uniform(0, seconds) for name, seconds in every.items()}
        told = began
        while self.operator.failure is None:
            now = time.monotonic()
            enough = options.seconds if self.counts["kills"] >= options.kills else options.seconds + MOST_LATE_S
            if now >= began + enough:
                break
            for group in self.groups:
                group.crew.tend()
            for name in [name for name, at in due.items() if now >= at]:
                crew = rng.choice(self.groups).crew
                if name == "leave":
                    crew.leave(rng.choice((0.0, 3.0)))
                else:
                    getattr(crew, name)()
                due[name] = now + every[name] * rng.uniform(0.3, 1.7)
            if now > told + 10:
                told = now
                self.say(f"{now - began:.0f} s: {len(self.written):,} written; {dict(self.counts)}")
            time.sleep(0.05)

    # Quiet.

    def await_quiet(self, *, parked: bool) -> None:
        """Wait until nothing is left, but (parked) what is set aside."""
        ends: Counter[int] = Counter(partition for partition, _ in self.written)
        moved, before = time.monotonic(), None
        left: list[str] = ["nothing was seen"]
        while left and time.monotonic() < moved + STILL_S:
            for group in self.groups:
                group.crew.tend(is_calm=True)
            with suppress(*AWAY), self.admin() as admin:
                left, now = [], []
                for group in self.groups:
                    found = [x for x in admin.open_messages(group.name) if not (parked and x.state == "parked")]
                    stable = {x.partition: x.stable for x in admin.progress(group.name)}
                    now.append((stable, [(x.place, x.since) for x in found]))
                    if found or any(stable.get(partition) != end - 1 for partition, end in ends.items()):
                        left.append(f"{group.kind}: is stuck at {stable} of {dict(ends)}, open: {found[:3]}")
                if now != before:
                    before, moved = now, time.monotonic()
            time.sleep(0.5)
        for each in left:
            self.violations.append(each)
            self.violations += [f"  health: {text}" for text in self.health()]

    def settle(self, fails: set[Place]) -> None:
        """Wait until all is done that can be; then the log says exactly which messages are set aside."""
        self.await_quiet(parked=True)
        if self.violations:
            return
        with self.admin() as admin:
            for group in self.groups:
                found = {x.place[1:]: x for x in admin.open_messages(group.name, parked=True)}
                self.counts[f"{group.kind}: aside when quiet"] = len(found)
                group.account.read(group.crew.lives)
                parked = {place: x.reason or "" for place, x in found.items()}
                self.violations += [f"{group.kind}: {x}" for x in group.account.parks(self.written, parked, fails)]
                self.violations += [f"{group.kind}: {x}" for x in self._tools(group, found.values())]
        self.violations += [f"unwell though all is done: {text}" for text in self.health(unwell=True)]

    def _tools(self, group: Group, parked: Iterable[OpenMessage]) -> list[str]:
        """What the command says that is not so."""
        status: Any = self.command("status", "--group", group.name)["groups"][0]
        lag = self.command("lag", "--group", group.name)
        wanted = {"parked": len(list(parked)), "open_messages": 0, "lag": 0, "stuck": 0}
        said = {name: status[name] for name in wanted}
        found = [] if said == wanted else [f"status says {said}, and it is {wanted}"]
        # What was set aside as CRASHED is a problem until an operator has decided.
        if problems := [each for each in status["problems"] if each["kind"] != "parked"]:
            found.append(f"status names problems: {problems}")
        of_lag = [(each["lag"], each["parked"]) for each in lag["totals"]]
        if of_lag != [(0, wanted["parked"])]:
            found.append(f"lag says {of_lag}, and it is {wanted}")
        return found

    def command(self, *words: str, status: int = 0) -> dict[str, list[dict[str, object]]]:
        """What a command answers, as JSON."""
        place = ["--bootstrap", self.bootstrap, "--topic", self.log, "--json"]
        command = [sys.executable, "-m", "kafka_marshal", *words, *place]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == status, (command, done.stdout[-500:], done.stderr[-2000:])
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def health(self, *, unwell: bool = False) -> list[str]:
        """What the health of each running process says; unwell: of those alone that are not well, after a while."""
        tell, until = self.folder / "tell", time.monotonic() + (15.0 if unwell else 3.0)
        tell.touch()
        said: dict[str, tuple[bool, str]] = {}
        while time.monotonic() < until:
            time.sleep(1.0)
            said = {}
            for group in self.groups:
                group.account.read(group.crew.lives)
                live = {x.life.out.stem for x in group.crew.places if x.life is not None and x.runs}
                said |= {name: each for name, each in group.account.health.items() if name in live}
            if unwell and said and all(is_well for is_well, _ in said.values()):
                break
        tell.unlink()
        return [f"{name}: {text}" for name, (is_well, text) in said.items() if not (unwell and is_well)]

    def known(self, group: Group) -> bool:
        """Whether the log shows that a worker of the group has begun."""
        with suppress(*AWAY), self.admin() as admin:
            return any(each.stable is not None for each in admin.progress(group.name))
        return False

    def redrive_all(self) -> None:
        """All works now: what was set aside is handled."""
        (self.folder / "calm").touch()
        with self.admin() as admin:
            for group in self.groups:
                admin.redrive(group.name, "all")
        self.await_quiet(parked=False)


def run_campaign(
    options: Options, kafka: RunningKafka | None = None, *, story: str = "faults", say: Say = lambda _: None
) -> Result:
    """Run it, on a separate broker, which is killed, too; or on one that is not."""
    from tests.campaigns.parks.stories import STORIES

    def run(folder: Path, broker: RunningKafka, may_kill: bool) -> Result:
        if story == "faults":
            return Campaign(options, folder, broker, may_kill, say).run()
        play, settings = STORIES[story]
        campaign = Campaign(replace(options, **settings), folder, broker, may_kill, say)
        began = time.monotonic()
        try:
            play(campaign)
        finally:
            campaign.writing_ends.set()
            for group in campaign.groups:
                group.crew.end()
        return campaign.judged(f"parks, {story}", began)

    return run_on_a_broker("parks", run, kafka, options.keep, say)
