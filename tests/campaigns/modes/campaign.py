"""The campaign: a group changed from mode to mode while messages come, and what befalls it meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from confluent_kafka import KafkaException, Producer

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.admin import Admin, OpenMessage
from kafka_marshal.errors import AdminError, KafkaUnavailableError
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.testing import RunningKafka
from rationalizer.limits import MAX_KEY_HASH
from tests.campaigns.modes.account import Account
from tests.campaigns.modes.account import Place as At
from tests.campaigns.modes.fleet import Fleet, Place
from tests.campaigns.modes.worker import BAD
from tests.campaigns.on_a_broker import Result, Say, run_on_a_broker
from tests.campaigns.process import POISON

__all__ = ["MODES", "Options", "run_campaign"]

#: How long (s) a group may make no progress after its mode was changed, faults aside; and without any end.
MOVES_S, STILL_S = 40.0, 60.0

#: Mode → kinds of its workers.
MODES = {"whole": ("run", "loop"), "batches": ("batches", "shared"), "keys": ("keys",), "coordinated": ("group",)}

KEYS = 24

_WEAK = (AdminError, KafkaException, KafkaUnavailableError)


@dataclass(frozen=True, slots=True)
class Options:
    """What a campaign is like."""

    seed: int = 1
    #: Modes, one after the other; (): drawn.
    modes: tuple[str, ...] = ()
    workers: int = 3
    partitions: int = 2
    rate: float = 200.0
    hi_ms: int = 500
    work_ms: float = 2.0
    #: How long a mode stays (s).
    stay_s: float = 5.0
    #: No worker is killed or stopped, no broker away; None: drawn.
    gentle: bool | None = None
    poisons: int = 1
    #: The command is used all the time, as by an operator.
    tools: bool = True
    keep: bool = False


class _Campaign:
    def __init__(self, options: Options, folder: Path, kafka: RunningKafka, may_kill: bool, say: Say) -> None:
        self.options, self.folder, self.kafka, self.say = options, folder, kafka, say
        self.rng = Random(options.seed)
        self.is_gentle = self.rng.random() < 0.3 if options.gentle is None else options.gentle
        self.may_kill = may_kill and not self.is_gentle
        name = uuid.uuid4().hex[:6]
        self.log, self.group, self.topic = f"__marshal-{name}", f"group-{name}", f"jobs-{name}"
        self.bootstrap, self.hi_s = kafka.bootstrap_servers, options.hi_ms / 1000
        self.counts: Counter[str] = Counter()
        self.fleet = Fleet(folder, "tests.campaigns.modes.worker", self.job, self.rng, self.hi_s, self.counts)
        with closing(KafkaCluster(self.bootstrap)) as cluster:
            create_topic(cluster, self.log, 2, 20)
            cluster.create_topic(self.topic, options.partitions, 1, {}, 20)
        self.written = dict.fromkeys(range(options.partitions), 0)
        self.poison: set[At] = set()
        self.bad: set[At] = set()
        self.account = Account(self.key_of)
        self.violations: list[str] = []
        self.mode, self.made = "", 0
        self.ended = threading.Event()
        self.began = time.monotonic()
        self.due = dict.fromkeys(self._acts(), self.began + 4.0)
        self.tools_file = folder / "tools.txt"

    # Messages.

    def key_of(self, partition: int, offset: int) -> int:
        """The key's number: drawn, and the same in each process."""
        return Random(f"{self.options.seed} {partition} {offset}").randrange(KEYS)

    def write(self) -> None:
        """Messages at a rate, until it ends: what fails, and what kills."""
        rng, partitions = Random(self.options.seed), self.options.partitions
        settings = {"bootstrap.servers": self.bootstrap, "linger.ms": 20, "message.timeout.ms": 300_000, "log_level": 0}
        producer = Producer({**settings, "enable.idempotence": True})
        poisons = {(n % partitions, 300 + 797 * n) for n in range(self.options.poisons)}
        began, number = time.monotonic(), 0
        while not self.ended.is_set():
            while number < (time.monotonic() - began) * self.options.rate:
                offset, partition = divmod(number, partitions)
                value = b"x"
                if (partition, offset) in poisons:
                    value = POISON
                    self.poison.add((partition, offset))
                elif rng.random() < 0.004:
                    value = BAD
                    self.bad.add((partition, offset))
                key = b"k%d" % self.key_of(partition, offset)
                producer.produce(self.topic, value=value, key=key, partition=partition)
                self.written[partition] = offset + 1
                number += 1
            producer.poll(0)
            time.sleep(0.02)
        producer.flush()

    # Workers.

    def job(self, place: Place) -> dict[str, Any]:
        """What a worker is started with."""
        number = int(place.name[1:].split("-")[0])
        half = MAX_KEY_HASH // 2
        return {
            "bootstrap": self.bootstrap,
            "group": self.group,
            "log": self.log,
            "topic": self.topic,
            "partitions": self.options.partitions,
            "ranges": [(0, half)] if number % 2 == 0 else [(half + 1, MAX_KEY_HASH)],
            "hi_ms": self.options.hi_ms,
            "work_ms": self.options.work_ms,
            "calm": str(self.folder / "calm"),
            "watchdog": number == 0,
        }

    def deploy(self, mode: str) -> None:
        """Replace one worker after the other; some of both modes work at once meanwhile."""
        self.made += 1
        self.mode = mode
        old = {int(place.name[1:].split("-")[0]): place for place in self.fleet.places}
        numbers = list(range(self.options.workers))
        self.rng.shuffle(numbers)
        for number in numbers:
            kinds = MODES[mode]
            new = Place(f"w{number}-{self.made}", kinds[number // 2 % len(kinds)])
            if self.rng.random() < 0.5:
                self.fleet.places.append(new)
                self.spend(self.rng.uniform(0.0, 2.0))
            if number in old:
                self.end(old[number])
            if new not in self.fleet.places:
                self.spend(self.rng.choice((0.0, 0.0, self.rng.uniform(0.0, 2.0))))
                self.fleet.places.append(new)
            self.spend(self.rng.uniform(0.0, 1.0))

    def end(self, place: Place) -> None:
        """A deploy ends a worker in order; or it dies."""
        if not self.is_gentle and self.rng.random() < 0.3:
            self.fleet.kill(place)
        if found := self.fleet.end(place):
            self.violations.append(found)
        self.fleet.places.remove(place)

    def end_all(self) -> None:
        """All workers, at once."""
        for place in [*self.fleet.places]:
            self.end(place)

    # What befalls them.

    def _acts(self) -> list[Callable[[], None]]:
        acts: list[Callable[[], None]] = [self.redrive, self.discard]
        if not self.is_gentle:
            acts += [self.kill, self.stop]
        if self.may_kill:
            acts += [self.freeze, self.restart]
        return acts

    def spend(self, seconds: float, *, faults: bool = True) -> None:
        """Wait, and do what is due."""
        every = {self.kill: 4.0, self.stop: 6.0, self.redrive: 6.0, self.discard: 9.0, self.freeze: 25.0}
        until = time.monotonic() + seconds
        while True:
            self.fleet.tend()
            now = time.monotonic()
            for act in [act for act, at in self.due.items() if faults and now >= at]:
                self.due[act] = now + every.get(act, 45.0) * self.rng.uniform(0.3, 1.7)
                try:
                    act()
                except _WEAK as error:
                    self.counts[f"{act.__name__} refused"] += 1
                    self.say(f"{act.__name__}: {error}"[:300])
            if now >= until:
                return
            time.sleep(0.05)

    def kill(self) -> None:
        if self.fleet.places:
            self.fleet.kill()

    def stop(self) -> None:
        if self.fleet.places:
            self.fleet.stop()

    def freeze(self) -> None:
        self.kafka.pause()
        time.sleep(self.rng.choice((0.3, 3.0 * self.hi_s)))
        self.kafka.resume()
        self.counts["freezes"] += 1

    def restart(self) -> None:
        self.kafka.kill()
        time.sleep(self.rng.choice((0.1, 3.0 * self.hi_s)))
        self.kafka.restart()
        self.counts["restarts"] += 1

    # The operator.

    def admin(self) -> Admin:
        return Admin(self.bootstrap, topic=self.log)

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
        with self.tools_file.open("a") as file:
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
            self.finish({place.name for place in self.fleet.places})
        self.deploy(mode)
        if is_between:
            self.clear()
        self.moves()

    def clear(self) -> None:
        """If it is stuck: a worker that holds all whole until nothing of the old mode is left."""
        with suppress(AssertionError):
            self.moves(20.0, save=False)
            return
        self.counts["cleared"] += 1
        self.command("check")
        self.command("group", self.group)
        helper = Place(f"w9-{self.made}", "run")
        self.fleet.places.append(helper)
        self.finish({helper.name})
        self.violations += filter(None, [self.fleet.end(helper)])
        self.fleet.places.remove(helper)

    def finish(self, names: set[str]) -> None:
        """Wait until these, which hold partitions whole, have done what another mode has left in them."""
        held, goals = dict[int, int](), dict[int, int]()
        until = time.monotonic() + 2 * STILL_S
        while time.monotonic() < until:
            self.spend(0.5, faults=False)
            with suppress(*_WEAK), self.admin() as admin:
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

    def stable(self) -> dict[int, int]:
        with self.admin() as admin:
            found: dict[int, int] = {}
            for each in admin.progress(self.group):
                stable = -1 if each.stable is None else each.stable
                found[each.partition] = min(stable, found.get(each.partition, stable))
            return found

    def moves(self, within: float = MOVES_S, *, save: bool = True) -> None:
        """Each partition moves on, or has nothing to do. Raises AssertionError otherwise."""
        began, first = time.monotonic(), None
        while True:
            self.spend(0.3, faults=False)
            ends = {partition: end - 1 for partition, end in self.written.items()}
            with suppress(*_WEAK):
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
                    self.violations.append(f"stuck: {self.mode} of {first}, messages {self.written}")
                    self.save_looks()
                raise AssertionError("it is stuck")

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
            with suppress(*_WEAK):
                return [(x.partition, x.offset, x.state, x.reason, x.delivery_count) for x in self.open()]

    # All of it.

    def run(self) -> Result:
        options = self.options
        writer = threading.Thread(target=self.write)
        looker = threading.Thread(target=self.look)
        try:
            writer.start()
            for number, mode in enumerate(options.modes or self.drawn()):
                self.change(mode)
                if number == 0 and options.tools:
                    looker.start()
                self.spend(options.stay_s * self.rng.uniform(0.5, 1.5))
            self.ended.set()
            writer.join()
            self.settle()
            (self.folder / "calm").touch()
            self.peace()
        except AssertionError:
            if not self.violations:
                raise
        finally:
            self.ended.set()
            writer.join()
            if looker.ident is not None:
                looker.join()
            self.violations += filter(None, map(self.fleet.end, self.fleet.places))
        return self.judge()

    def drawn(self) -> list[str]:
        """Whole, all others in some order, and another one."""
        others = [mode for mode in MODES if mode != "whole"]
        self.rng.shuffle(others)
        return ["whole", *others, self.rng.choice(["whole", *others[:-1]])]

    def settle(self) -> None:
        """Without faults all is done, or set aside: exactly what fails always."""
        left, until = "", time.monotonic() + STILL_S
        before = None
        while time.monotonic() < until:
            self.fleet.calm()
            self.spend(0.3, faults=False)
            with suppress(*_WEAK):
                stable, waiting = self.stable(), self.open(parked=False)
                if not waiting and all(stable.get(x) == end - 1 for x, end in self.written.items()):
                    break
                if (now := (stable, len(waiting))) != before:
                    before, until = now, time.monotonic() + STILL_S
                left = f"{stable} of {self.written}, open {waiting[:3]}"
        else:
            self.violations.append(f"stuck at the end: {left}")
            self.save_looks()
            raise AssertionError(left)
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
        until = time.monotonic() + STILL_S
        while time.monotonic() < until:
            self.spend(0.3, faults=False)
            with suppress(*_WEAK):
                found = self.open()
                if not found:
                    return
                if parked := [x.place for x in found if x.state == "parked"]:
                    with self.admin() as admin:
                        admin.redrive(self.group, parked)
        self.violations.append(f"not done in the end: {found[:5]}")
        self.save_looks()

    def judge(self) -> Result:
        """The account."""
        for life in self.fleet.lives:
            self.account.read(life)
        found = self.account.violations(self.written, self.poison, is_gentle=self.is_gentle and not self.poison)
        self.violations += [f"{each}{'' if not self.is_gentle else ' (gentle)'}" for each in found]
        self.counts["messages"] = sum(self.written.values())
        self.counts["handled"] = sum(self.account.handled.values())
        self.counts["killed by poison"] = self.account.poisoned
        self.counts["dropped unproven"] = self.account.dropped
        seconds = time.monotonic() - self.began
        return Result("modes", self.options.seed, self.violations, seconds, counts=self.counts)


def run_campaign(options: Options, kafka: RunningKafka | None = None, *, say: Say = lambda _: None) -> Result:
    """Run it, on a separate broker, which is killed, too; or on one that is not."""

    def run(folder: Path, broker: RunningKafka, may_kill: bool) -> Result:
        return _Campaign(options, folder, broker, may_kill, say).run()

    return run_on_a_broker("modes", run, kafka, options.keep, say)
