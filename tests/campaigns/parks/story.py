"""A claimed and a coordinated group that set messages aside, with every fault; and stories of outages.

Each message is handled, in the order of its key, or set aside as it must be.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from random import Random
from typing import Any, Final

from kafka_marshal.admin import RedoPlan
from kafka_marshal.admin.open_messages import OpenMessage
from tests.campaigns.frame import AWAY, Campaign, Crew, Place, Result, Say, Settings, run_campaign
from tests.campaigns.parks.account import ParksAccount, Written
from tests.campaigns.parks.log import OpenLog
from tests.campaigns.parks.worker import BAD, FLAKY, SLOW
from tests.campaigns.process import POISON

#: Kind of group → of its workers.
KINDS = {"claimed": "run", "coordinated": "pieces"}

#: Values of odd messages, and their shares.
ODD = {BAD: 0.006, FLAKY: 0.02, SLOW: 0.002}


@dataclass(frozen=True, slots=True)
class Options(Settings):
    """What a campaign is like."""

    #: What happens: faults, or a story of an outage.
    story: str = "faults"
    seconds: float = 180.0
    #: Messages in a second, in all partitions.
    rate: float = 200.0
    kinds: tuple[str, ...] = tuple(KINDS)
    #: Of each group.
    workers: int = 3
    keys: int = 40
    work_ms: float = 1.0
    attempts: int = 4
    backoff: tuple[float, float] = (0.01, 0.1)
    killers: int = 2
    kill_every_s: float = 3.0
    stop_every_s: float = 7.0
    leave_every_s: float = 11.0
    operator_every_s: float = 3.0


@dataclass(slots=True)
class Group:
    """A group of workers, and what they have written down."""

    kind: str
    name: str
    crew: Crew
    account: ParksAccount


class Parks(Campaign[Options]):
    """Two groups, one of each kind, that handle all messages of one topic."""

    NAME = "parks"

    @cached_property
    def groups(self) -> list[Group]:
        """One of each kind."""
        return [self._made(kind, f"{kind}-{self.group}") for kind in self.options.kinds]

    def _made(self, kind: str, name: str) -> Group:
        def job(place: Place) -> dict[str, object]:
            return self.job(
                group=name,
                work_ms=self.options.work_ms,
                attempts=self.options.attempts,
                backoff=self.options.backoff,
                release=self.release,
                folder=str(self.folder),
                watchdog=place.name.endswith("0"),
            )

        posts = {f"{kind[:2]}{number}": KINDS[kind] for number in range(self.options.workers)}
        return Group(kind, name, self.crew(posts, job), ParksAccount(self.message))

    def story(self) -> None:
        #: File of a redo → when it was planned.
        self.planned: dict[Path, float] = {}
        self.release, self.rate = "good", self.options.rate
        self.is_plain = self.options.story != "faults"
        for group in self.groups:
            if group.kind == "coordinated" and self.options.seed % 2:  # its members share partitions by key
                with self.admin() as admin:
                    admin.configure_group(group.name, accept_range_fetch=[self.topic])
        if self.is_plain:
            STORIES[self.options.story][0](self)
        else:
            super().story()

    # Messages, and what happens.

    def message(self, partition: int, offset: int) -> Written:
        """Drawn, and the same for the account; plain: none of them is odd."""
        options, rng = self.options, Random(f"{self.options.seed} {partition} {offset}")
        value = rng.choices([b"x", *ODD], [1.0 - sum(ODD.values()), *ODD.values()])[0]
        number = offset * options.partitions + partition
        if number in {20 + n * 97 for n in range(options.killers)}:
            value = POISON
        return Written(b"%d" % rng.randrange(options.keys), b"x" if self.is_plain else value)

    def faults(self) -> Mapping[Callable[[], None], float]:
        options = self.options
        return {self.kill: options.kill_every_s, self.stop: options.stop_every_s, self.leave: options.leave_every_s}

    def operates(self) -> Mapping[Callable[[], None], float]:
        acts = [self.redrive, self.park, self.discard, self.redo]
        if self.may_kill:
            acts += [self.freeze, self.restart]
        every = dict.fromkeys(acts, len(acts) * self.options.operator_every_s)
        return every | {self.redrive: every[self.redrive] / 2}

    def goes_on(self) -> bool:
        return time.monotonic() < self.began + self.options.seconds

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

    def redo(self) -> None:
        """Ten plain messages, by their offsets or by their places; what was interrupted is carried on."""
        for group in self.groups:
            file = self.folder / f"redo-{group.kind}.json"
            partition = self.rng.randrange(self.options.partitions)
            first = self.rng.randrange(max(1, self.stable(group.name).get(partition, 0)))
            offsets = range(first, first + 10)
            with self.admin() as admin:
                if file.exists():
                    plan = RedoPlan.read(file)
                elif any(self.message(partition, offset).value != b"x" for offset in offsets):
                    continue
                elif self.rng.random() < 0.5:
                    plan = admin.plan_redo(group.name, {(self.topic, partition): (first, first + 9)})
                else:
                    plan = admin.plan_redo(group.name, {}, messages=[(self.topic, partition, each) for each in offsets])
                since = self.planned.setdefault(file, time.monotonic())
                # Rarely too small for all: the plan waits for the workers, and is interrupted with the broker.
                admin.redo(plan, path=file, rate=self.rng.choice((4, 1_000)))
            plan = RedoPlan.read(file)
            file.unlink()
            del self.planned[file]
            spans = [(each.partition, span) for each in plan.records for span in each.spans]
            group.account.redone += [
                ((number, offset), since) for number, span in spans for offset in range(span.first, span.last + 1)
            ]
            self.counts["redone"] += plan.messages

    # The end.

    def quiet(self) -> None:
        """Then all that was set aside is handled."""
        self.settle()
        self.redrive_all()

    def judge(self) -> None:
        log = OpenLog(self.bootstrap, self.log)
        for group in self.groups:
            account, kind = group.account, group.kind
            account.read_again(group.crew.lives)
            found = [*account.in_the_end(self.written), *log.violations(group.name)]
            self.violations += [f"{kind}: {each}" for each in found]
            self.counts[f"{kind}: handled"] = account.handled.total()
            self.counts["killed by a message"] += account.poisoned
            self.counts["no effect, unproven"] += account.dropped
            self.counts[f"{kind}: set aside"] = sum(log.parks[group.name].values())
        self.counts["messages"] = sum(self.written.values())

    def await_quiet(self, *, parked: bool) -> None:
        """Wait until nothing is left, but (parked) what is set aside."""

        def look() -> tuple[object, list[str]]:
            left, now = [], []
            for group in self.groups:
                with self.admin() as admin:
                    found = [x for x in admin.open_messages(group.name) if not (parked and x.state == "parked")]
                stable = self.stable(group.name)
                now.append((stable, [(x.place, x.since) for x in found]))
                if found or any(stable.get(partition) != end - 1 for partition, end in self.written.items() if end):
                    left.append(f"{group.kind}: is stuck at {stable} of {self.written}, open: {found[:3]}")
            return now, left

        if left := self.until_quiet(look):
            self.violations += [*left, *(f"  health: {text}" for text in self.health())]

    def settle(self) -> None:
        """Wait until all is done that can be; then the log says exactly which messages are set aside."""
        self.await_quiet(parked=True)
        if self.violations:
            return
        written = {(partition, offset) for partition, end in self.written.items() for offset in range(end)}
        with self.admin() as admin:
            for group in self.groups:
                found = {x.place[1:]: x for x in admin.open_messages(group.name, parked=True)}
                self.counts[f"{group.kind}: aside when quiet"] = len(found)
                group.account.read_again(group.crew.lives)
                parked = {place: x.reason or "" for place, x in found.items()}
                self.violations += [f"{group.kind}: {x}" for x in group.account.parks(written, parked)]
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
                group.account.read_again(group.crew.lives)
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
        self.calm.touch()
        with self.admin() as admin:
            for group in self.groups:
                admin.redrive(group.name, "all")
        self.await_quiet(parked=False)


# -- outages ----------------------------------------------------------------------------------------------------

#: Open messages of a partition, at most (H5).
LIMIT = 10_000

#: How long a deploy fails everything, and what is behind the handlers is away (s).
OUTAGE_S = 10.0

#: More messages of a process than this are not "next to nothing": the first failures that open the breaker set none
#: aside with five tries, and then one comes after 20, 40, 80 … 1,000 failures.
FEW = 5


def third(campaign: Parks) -> None:
    """A deploy fails a third of all messages: they are set aside up to the limit, and the good release handles them."""
    campaign.release = "third"
    campaign.rate, campaign.most = inf, 66_000
    campaign.write()
    left, until, kill_at = list(campaign.groups), time.monotonic() + 180.0, time.monotonic() + 8.0
    while left and time.monotonic() < until:
        campaign.tend()
        if time.monotonic() > kill_at:
            campaign.rng.choice(left).crew.kill()
            kill_at = time.monotonic() + campaign.options.kill_every_s
        with suppress(*AWAY):
            left = [x for x in left if _aside(campaign, x) != dict.fromkeys(range(campaign.options.partitions), LIMIT)]
        time.sleep(0.5)
    campaign.violations += [f"{x.kind}: not at the limit: {_aside(campaign, x)}, {campaign.health()}" for x in left]
    _say_so(campaign)
    _mend(campaign)


def _say_so(campaign: Parks) -> None:
    """At the limit the tools say why nothing moves."""
    for group in campaign.groups:
        problems = campaign.command("check", "--group", group.name, status=1)["problems"]
        if not any(each["kind"] == "holes" for each in problems):
            campaign.violations.append(f"{group.kind}: at the limit check says {problems}")
    health = campaign.health()
    campaign.say("\n".join(health))
    if not any("10,000" in text for text in health):
        campaign.violations.append(f"at the limit no worker says so: {health}")


def everything(campaign: Parks) -> None:
    """A deploy fails all messages."""
    campaign.release = "all"
    _outage(campaign, 0.0)
    campaign.release = "good"
    _mend(campaign)


def away(campaign: Parks) -> None:
    """What is behind the handlers is away."""
    _outage(campaign, 6.0)
    (campaign.folder / "away").unlink()
    campaign.await_quiet(parked=True)
    _mend(campaign)


def _outage(campaign: Parks, after_s: float) -> None:
    """Nothing works for a while, after this time (s); count what is set aside."""
    campaign.start(campaign.write)
    campaign.tend()
    while not all(campaign.known(group) for group in campaign.groups):
        time.sleep(0.2)
    time.sleep(after_s)
    (campaign.folder / "away").touch()
    time.sleep(OUTAGE_S)
    for group in campaign.groups:
        count = sum(_aside(campaign, group).values())
        campaign.counts[f"{group.kind}: set aside in {OUTAGE_S:g} s"] = count
        if count > FEW * campaign.options.workers:
            campaign.violations.append(f"{group.kind}: {count} messages were set aside in an outage")
    campaign.end_threads()


def _mend(campaign: Parks) -> None:
    campaign.release = "good"
    for group in campaign.groups:
        group.crew.deploy()
    with suppress(FileNotFoundError):
        (campaign.folder / "away").unlink()
    campaign.redrive_all()


def _aside(campaign: Parks, group: Group) -> dict[int, int]:
    with campaign.admin() as admin:
        return dict(Counter(each.partition for each in admin.open_messages(group.name, parked=True)))


#: Name → what happens, and settings of the campaign.
STORIES: Final[dict[str, tuple[Callable[[Parks], None], dict[str, Any]]]] = {
    "third": (third, {"attempts": 1, "work_ms": 0.0, "killers": 0, "keys": 500}),
    "all": (everything, {"attempts": 5, "backoff": (0.1, 1.0), "killers": 0}),
    "away": (away, {"attempts": 5, "backoff": (0.1, 1.0), "killers": 0}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of its command."""
    parser.add_argument("--story", choices=("faults", *STORIES), default="faults", help="what happens (faults)")
    parser.add_argument("--minutes", type=float, default=3.0, help="with faults (3)")
    parser.add_argument("--rate", type=float, default=200.0, help="messages in a second (200)")
    parser.add_argument("--only", choices=KINDS, help="one kind of group")


def runs(chosen: argparse.Namespace, say: Say) -> Iterator[Result]:
    """What the command runs."""
    options = Options(
        story=chosen.story,
        seconds=chosen.minutes * 60,
        rate=chosen.rate,
        kinds=(chosen.only,) if chosen.only else tuple(KINDS),
        seed=chosen.seed,
        keep=chosen.keep,
    )
    if options.story != "faults":
        options = replace(options, **STORIES[options.story][1])
    yield run_campaign(Parks, options, say=say)
