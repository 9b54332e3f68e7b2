"""A live group changed from mode to mode, and from kind to kind, with a plain account of each message.

Each message is handled or given up by the operator, in one hand at a time, in order where there is one, and the group
is never stuck.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from random import Random

from kafka_marshal.admin import OpenMessage
from kafka_marshal.testing import open_kafka
from rationalizer.limits import MAX_KEY_HASH
from tests.campaigns.account import Account
from tests.campaigns.account import Place as At
from tests.campaigns.frame import (
    AWAY,
    STILL_S,
    Campaign,
    Place,
    Result,
    Say,
    Schedule,
    Settings,
    StuckError,
    run_campaign,
)
from tests.campaigns.modes.worker import BAD
from tests.campaigns.process import POISON

#: How long (s) a group may make no progress after its mode was changed, faults aside.
MOVES_S = 40.0

#: Mode → kinds of its workers.
MODES = {"whole": ("run", "loop"), "batches": ("batches", "shared"), "keys": ("keys",), "coordinated": ("group",)}

KEYS = 24


@dataclass(frozen=True, slots=True)
class Options(Settings):
    """What a campaign is like."""

    #: Modes, one after the other; (): drawn.
    modes: tuple[str, ...] = ()
    workers: int = 3
    rate: float = 200.0
    work_ms: float = 2.0
    #: How long a mode stays (s).
    stay_s: float = 5.0
    #: No worker is killed or stopped, no broker away; None: drawn.
    gentle: bool | None = None
    poisons: int = 1
    #: The command is used all the time, as by an operator.
    tools: bool = True


class Modes(Campaign[Options]):
    """One run."""

    NAME = "modes"

    def story(self) -> None:
        """One mode after the other; then all is done, and what was set aside is redriven."""
        options = self.options
        self.rate = options.rate
        self.is_gentle = self.rng.random() < 0.3 if options.gentle is None else options.gentle
        acts = {self.redrive: 6.0, self.discard: 9.0}
        if not self.is_gentle:
            acts |= {self.kill: 4.0, self.stop: 6.0}
        if self.may_kill and not self.is_gentle:
            acts |= {self.freeze: 25.0, self.restart: 45.0}
        self.schedule = Schedule(acts, self.rng, self.counts, self.say)
        self.poisons = {(n % options.partitions, 300 + 797 * n) for n in range(options.poisons)}
        self.poison, self.bad = set[At](), set[At]()
        self.account = Account(self.key_of)
        self.mode, self.made = "", 0
        self.workers = self.crew({}, self._job)
        self.start(self.write)
        for number, mode in enumerate(options.modes or self.drawn()):
            self.change(mode)
            if number == 0 and options.tools:
                self.start(self.look)
            self.spend(options.stay_s * self.rng.uniform(0.5, 1.5))
        self.end_threads()
        self.settle()
        self.calm.touch()
        self.peace()

    # Messages.

    def key_of(self, partition: int, offset: int) -> int:
        """The key's number: drawn, and the same in each process."""
        return Random(f"{self.options.seed} {partition} {offset}").randrange(KEYS)

    def message(self, partition: int, offset: int) -> tuple[bytes, bytes]:
        """Some fail, and some kill."""
        place, value = (partition, offset), b"x"
        if place in self.poisons:
            value = POISON
            self.poison.add(place)
        elif Random(f"bad {self.options.seed} {place}").random() < 0.004:
            value = BAD
            self.bad.add(place)
        return b"k%d" % self.key_of(partition, offset), value

    # Workers.

    def _job(self, place: Place) -> dict[str, object]:
        number, half = int(place.name[1:].split("-")[0]), MAX_KEY_HASH // 2
        ranges = [(0, half)] if number % 2 == 0 else [(half + 1, MAX_KEY_HASH)]
        return self.job(ranges=ranges, work_ms=self.options.work_ms, watchdog=number == 0)

    def deploy(self, mode: str) -> None:
        """Replace one worker after the other; some of both modes work at once meanwhile."""
        self.made += 1
        self.mode = mode
        old = {int(place.name[1:].split("-")[0]): place for place in self.workers.places}
        numbers = list(range(self.options.workers))
        self.rng.shuffle(numbers)
        for number in numbers:
            kinds = MODES[mode]
            new = Place(f"w{number}-{self.made}", kinds[number // 2 % len(kinds)])
            if self.rng.random() < 0.5:
                self.workers.places.append(new)
                self.spend(self.rng.uniform(0.0, 2.0))
            if number in old:
                self.end(old[number])
            if new not in self.workers.places:
                self.spend(self.rng.choice((0.0, 0.0, self.rng.uniform(0.0, 2.0))))
                self.workers.places.append(new)
            self.spend(self.rng.uniform(0.0, 1.0))

    def end(self, place: Place) -> None:
        """A deploy ends a worker in order; or it dies."""
        if not self.is_gentle and self.rng.random() < 0.3:
            self.workers.kill(place)
        self.workers.end([place])
        self.workers.places.remove(place)

    def end_all(self) -> None:
        """All workers, at once."""
        for place in [*self.workers.places]:
            self.end(place)

    def spend(self, seconds: float, *, faults: bool = True) -> None:
        """Wait, and do what is due."""
        until = time.monotonic() + seconds
        while True:
            self.tend()
            if faults:
                self.schedule.turn()
            if time.monotonic() >= until:
                return
            time.sleep(0.05)

    # The operator.

    def open(self, *, parked: bool | None = None) -> list[OpenMessage]:
        """Open messages; parked: those set aside, or all others."""
        with self.admin() as admin:
            found = admin.open_messages(self.group)
        return [x for x in found if parked is None or (x.state == "parked") is parked]

    def redrive(self) -> None:
        if found := self.open(parked=True):
            found = self.rng.sample(found, min(3, len(found)))
            with self.admin() as admin:
                admin.redrive(self.group, [each.place for each in found])
            self.counts["redriven"] += len(found)

    def discard(self) -> None:
        if found := [x for x in self.open(parked=True) if (x.partition, x.offset) not in self.poison]:
            found = [self.rng.choice(found)]
            self.account.discarded |= {(x.partition, x.offset) for x in found}  # it may be done, and its answer lost
            with self.admin() as admin:
                admin.discard(self.group, [each.place for each in found])
            self.counts["discarded"] += len(found)

    def command(self, *arguments: str, dies_after: float | None = None) -> tuple[int | None, str]:
        """kafka-marshal …: its exit status (None: it was killed) and what it said."""
        place = "--bootstrap", self.bootstrap, "--topic", self.log
        command = [sys.executable, "-m", "kafka_marshal", arguments[0], *place, *arguments[1:]]
        began = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.folder, stdin=subprocess.DEVNULL
        )
        try:
            said, _ = process.communicate(timeout=60 if dies_after is None else dies_after)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            status = None
        text = said.decode()
        with (self.folder / "tools.txt").open("a") as file:
            took = f"{began - self.began:.1f} s, mode {self.mode}, took {time.monotonic() - began:.1f} s"
            file.write(f"\n$ kafka-marshal {' '.join(arguments)}   # {took}\n{text}-> {status}\n")
        if status in (2, 70) or "Traceback" in text or (status is None and dies_after is None):
            self.violations.append(f"kafka-marshal {' '.join(arguments)} ended with {status}: {text[-600:]}")
        return status, text

    def look(self) -> None:
        """As an operator who has nothing else to do."""
        looks = (
            ["status", "--members"],
            ["check"],
            ["lag", "--group", self.group],
            ["group", self.group],
            ["open-messages", self.group],
            ["who", self.group, self.topic, "0"],
            ["who", f"{self.topic}:0", "--key", "k1"],
            ["log", "-n", "40"],
        )
        number = 0
        while not self.ended.wait(2.5):
            look = looks[number % len(looks)]
            number += 1
            self.command(*look)
            self.counts["looks"] += 1

    # Changes.

    def change(self, mode: str) -> None:
        """To another mode; what a mode leaves that another can't take over, a worker clears that holds all whole."""
        self.say(f"{time.monotonic() - self.began:.0f} s: {self.mode or 'nothing'} → {mode}")
        is_other_kind = self.mode and (mode == "coordinated") != (self.mode == "coordinated")
        if is_other_kind:
            self.end_all()
            self.convert("coordinated" if mode == "coordinated" else "claimed")
        self.counts[f"to {mode}"] += 1
        is_between = {self.mode, mode} == {"batches", "keys"}
        if is_between and self.rng.random() < 0.5:
            self.deploy("whole")
            is_between = False
            self.finish({place.name for place in self.workers.places})
        self.deploy(mode)
        if is_between:
            self.clear()
        self.moves()

    def clear(self) -> None:
        """If it is stuck: a worker that holds all whole until nothing of the old mode is left."""
        with suppress(StuckError):
            self.moves(20.0, save=False)
            return
        self.counts["cleared"] += 1
        self.command("check")
        self.command("group", self.group)
        helper = Place(f"w9-{self.made}", "run")
        self.workers.places.append(helper)
        self.finish({helper.name})
        self.workers.end([helper])
        self.workers.places.remove(helper)

    def finish(self, names: set[str]) -> None:
        """Wait until these, which hold partitions whole, have done what another mode has left in them."""
        held, goals = dict[int, int](), dict[int, int]()
        until = time.monotonic() + 2 * STILL_S
        while time.monotonic() < until:
            self.spend(0.5, faults=False)
            with suppress(*AWAY), self.admin() as admin:
                held = {x.partition: x.stable or 0 for x in admin.progress(self.group) if x.holder in names}
                goals = {partition: goals.get(partition, self.written[partition] - 1) for partition in held}
                is_left = any(x.key_hash is None for x in admin.open_messages(self.group))
                is_all = len(held) >= (self.options.partitions if len(names) > 1 else 1)  # the helper: what waits
                if is_all and not is_left and all(held[partition] >= goal for partition, goal in goals.items()):
                    break
        else:
            self.violations.append(
                f"a worker that holds all whole does not get it, or does not finish: {held}, {goals}"
            )
            self.save_looks()

    def moves(self, within: float = MOVES_S, *, save: bool = True) -> None:
        """Each partition moves on, or has nothing to do. Raises StuckError otherwise."""
        began, first = time.monotonic(), None
        while True:
            self.spend(0.3, faults=False)
            ends = {partition: end - 1 for partition, end in self.written.items()}
            with suppress(*AWAY):
                now = self.stable()
                first = first or now
                still = [x for x in ends if now.get(x, -1) <= first.get(x, -1) and now.get(x, -1) < ends[x]]
                if not still:
                    self.counts["longest wait ms"] = max(
                        self.counts["longest wait ms"], int(1000 * (time.monotonic() - began))
                    )
                    return
            if time.monotonic() > began + within:
                if save:
                    self.save_looks()
                raise StuckError(f"stuck: {self.mode} of {first}, messages {self.written}")

    def save_looks(self) -> None:
        """What the command says now."""
        for look in (["check"], ["status", "--members"], ["group", self.group], ["open-messages", self.group]):
            self.command(*look)
        self.command("log", "-n", "100")

    def convert(self, to: str) -> None:
        """Convert the group, killed in between; what was set aside stays so."""
        before = self.still_open()
        arguments = ["convert-group", self.group, "--to", to, "--yes"]
        if any(state != "parked" for _, _, state, _, _ in before):
            if not (self.is_gentle or self.rng.random() < 0.5):
                status, text = self.command(*arguments)
                if status != 1:
                    self.violations.append(f"convert-group went on with open messages: {status} {text[-400:]}")
            arguments += ["--open", "repeat"]
        for turn in range(20):
            dies = not self.is_gentle and self.rng.random() < 0.8 - 0.1 * turn
            status, text = self.command(*arguments, dies_after=self.rng.uniform(0.5, 9.0) if dies else None)
            is_killed_at_its_end = status == 1 and turn > 0 and f"is a {to} group already" in text
            if is_killed_at_its_end:
                status = 0
            self.counts["conversions killed" if status is None else "conversions" if not status else "refused"] += 1
            if status == 0:
                break
            if status is not None and turn == 19:
                self.violations.append(f"convert-group was not finished: {text[-600:]}")
        after = self.still_open()
        wanted = [each for each in before if each[2] == "parked"]
        if after != wanted:
            self.violations.append(f"set aside before the conversion: {wanted}, and after it: {after}")

    def still_open(self) -> list[tuple[int, int, str, str | None, int]]:
        while True:
            with suppress(*AWAY):
                return [(x.partition, x.offset, x.state, x.reason, x.delivery_count) for x in self.open()]

    def drawn(self) -> list[str]:
        """Whole, all others in some order, and another one."""
        others = [mode for mode in MODES if mode != "whole"]
        self.rng.shuffle(others)
        return ["whole", *others, self.rng.choice(["whole", *others[:-1]])]

    # The end.

    def settle(self) -> None:
        """Without faults all is done, or set aside: exactly what fails always."""

        def look() -> tuple[object, list[str]]:
            stable, waiting = self.stable(), self.open(parked=False)
            is_done = not waiting and all(stable.get(x) == end - 1 for x, end in self.written.items())
            left = f"stuck at the end: {stable} of {self.written}, open {waiting[:3]}"
            return (stable, len(waiting)), [] if is_done else [left]

        self.stuck_if(self.until_quiet(look))
        parked = [(x.partition, x.offset) for x in self.open(parked=True)]
        wanted = sorted((self.bad | self.poison) - self.account.discarded)
        given_up = [x for x in parked if x in self.account.discarded]  # asked for, and refused or lost
        self.account.discarded -= set(given_up)
        if sorted(set(parked) - set(given_up)) != wanted or len(set(parked)) != len(parked):
            missing, more = sorted({*wanted} - {*parked}), sorted({*parked} - {*wanted} - {*given_up})
            self.violations.append(f"set aside: {missing} are missing, {more} should not be")
        self.counts["set aside"] = len(parked)

    def peace(self) -> None:
        """What was set aside is redriven, and done."""

        def look() -> tuple[object, list[str]]:
            found = self.open()
            if parked := [x.place for x in found if x.state == "parked"]:
                with self.admin() as admin:
                    admin.redrive(self.group, parked)
            return len(found), [f"not done in the end: {found[:5]}"] if found else []

        self.stuck_if(self.until_quiet(look))

    def stuck_if(self, left: list[str]) -> None:
        """Say what the command says, and end, if something is left."""
        if left:
            self.save_looks()
            raise StuckError(left[0])

    def judge(self) -> None:
        for life in self.workers.lives:
            self.account.read(life)
        found = self.account.violations(self.written, self.poison, is_once=self.is_gentle and not self.poison)
        self.violations += [f"{each}{'' if not self.is_gentle else ' (gentle)'}" for each in found]
        self.counts["messages"] = sum(self.written.values())
        self.counts["handled"] = sum(self.account.handled.values())
        self.counts["killed by poison"] = self.account.poisoned
        self.counts["dropped unproven"] = self.account.dropped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of its command."""
    parser.add_argument("--seeds", type=int, default=1, help="how many, each on a broker alone (1)")
    parser.add_argument("--modes", default="", help=f"one after the other, such as {','.join(MODES)} (drawn)")
    parser.add_argument("--stay", type=float, default=5.0, help="seconds in each mode, about (5)")
    parser.add_argument("--gentle", action="store_true", help="no kills, stops, outages: nothing comes twice")
    parser.add_argument("--shared-broker", action="store_true", help="one broker for all seeds, which no seed kills")


def runs(chosen: argparse.Namespace, say: Say) -> Iterator[Result]:
    """What the command runs."""
    with ExitStack() as stack:
        kafka = open_kafka(1) if chosen.shared_broker else None
        if kafka is not None:
            stack.callback(kafka.stop)
        for seed in range(chosen.seed, chosen.seed + chosen.seeds):
            options = Options(
                seed=seed,
                modes=tuple(filter(None, chosen.modes.split(","))),
                stay_s=chosen.stay,
                gentle=chosen.gentle or None,
                poisons=0 if chosen.gentle else 1,
                keep=chosen.keep,
            )
            yield run_campaign(Modes, options, kafka, say=say)
