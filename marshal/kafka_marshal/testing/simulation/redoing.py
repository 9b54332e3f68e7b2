"""What a story's operators opened of what was done (R2), by a plain account.

=====================  =========================================================================================
redo                   a record opens what is done if its operator saw the last one that opened something, or set the
                       position (R1, R2); a copy opens nothing; a group with checkpoints or transactions has none
lost                   what it opens is handled by a try that begins later, or an operator gives it up
repeated               no member begins a message that its own replica calls done; at most once: the log grants no
                       message more often than once, and once more for each time that it was opened
=====================  =========================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from kafka_marshal.engine.work.assignment import Assignment
from kafka_marshal.engine.work.open_messages import hash_of
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.observe.holes import holdings_of
from kafka_marshal.ports import Message
from kafka_marshal.testing.simulation.holdings import name_of
from kafka_marshal.testing.simulation.living import Living
from kafka_marshal.types import Key
from rationalizer import Lease, Outcome, Record, SettleOffsets, SettlingMessages, World, codes, route_group, route_lease
from rationalizer.groups.group import PartitionProgress

if TYPE_CHECKING:
    from kafka_marshal.testing.simulation.scenario import Scenario
    from kafka_marshal.testing.simulation.scheduler import Scheduler

Place = tuple[Key, int]

#: What was opened this shortly before the end may still be open (HI).
FRESH_INTERVALS = 20.0


class Redoing:
    """Follows what one story's operators open."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler, fail: Callable[[str, str], None]) -> None:
        self.is_on: bool = scenario.redoes
        self._scenario = scenario
        self._scheduler = scheduler
        self._fail = fail
        #: How many messages were opened, each as often as it was.
        self.opened: int = 0
        self._has_none = scenario.transactions or scenario.checkpoints is not None
        #: R1's number, as the records have it.
        self._again: dict[Key, int] = {}
        #: Opened, and not handled since: when.
        self._due: dict[Place, float] = {}
        #: At most once: opened, granted, and not begun since: to which process, and when.
        self._awaited: dict[Place, tuple[str, float]] = {}
        #: How often since the position was set: opened; granted, at most once.
        self._opened: Counter[Place] = Counter()
        self._granted: Counter[Place] = Counter()
        #: An operator gave it up.
        self._given_up: set[Place] = set()
        #: When a process began a message last.
        self._begun: dict[tuple[Living, Key, int], float] = {}

    # What the log shows.

    def record(
        self,
        outcome: Outcome,
        record: SettlingMessages | SettleOffsets,
        sender: Living,
        at: int,
        is_open: frozenset[int],
        is_done: Callable[[int, int], bool],
    ) -> tuple[list[Place], list[Place]]:
        """The record at this offset was judged. Returns what it opened of what was done, and what it gave up.

        is_open, is_done: what was in a hole before, and done for every key if it was in none.
        """
        key, answers, opened = (record.topic, record.partition), outcome.entries or (), list[Place]()
        given_up: list[Place] = []
        for (first, last), code in zip(record.done, answers, strict=False):
            places = [(key, offset) for offset in range(first, last + 1) if code == codes.OK and offset in is_open]
            if sender.host.is_admin:
                given_up += places
            elif not self._scenario.at_most_once and (early := [x for x in places if x in self._due]):
                when = f"{self._due[early[0]]:.1f} ms, and no try that began later has succeeded"
                self._fail("lost", f"{name_of(key)} offset {early[0][1]} is done again; it was opened at {when} (R2)")
            self._forget(places)
        for (offset, *_), code in zip(record.parked, answers[len(record.done) + len(record.open) :], strict=True):
            self._forget([(key, offset)] if code == codes.OK else [])
        if record.redo and sender.host.is_admin:
            codes_of_open = answers[len(record.done) : len(record.done) + len(record.open)]
            for (first, last, hashed, _), code in zip(record.open, codes_of_open, strict=True):
                new = [offset for offset in range(first, last + 1) if offset not in is_open]
                self._check_opens(key, record, (first, last, hashed), code, len(new), is_done)
                opened += [(key, offset) for offset in new if code == codes.OK]
            if codes.OK in codes_of_open:
                self._again[key] = at
        self._due |= dict.fromkeys(opened, self._scheduler.now)
        self._opened.update(opened)
        self.opened += len(opened)
        self._given_up = self._given_up.union(given_up).difference(opened)
        return opened, given_up

    def _check_opens(
        self,
        key: Key,
        record: SettlingMessages | SettleOffsets,
        entry: tuple[int, int, int | None],
        code: str,
        new: int,
        is_done: Callable[[int, int], bool],
    ) -> None:
        """Whether an entry opens what it may (R2). new: how many of its offsets lay in no hole."""
        (first, last, hashed), again = entry, self._again.get(key, -1)
        what = f"a record that saw {record.seen} opens {name_of(key)} {first} to {last}"
        if code == codes.OK and self._has_none:
            self._fail("redo", f"{what}, in a group that has none (R4, U6)")
        if code == codes.OK and new and record.seen <= again:
            self._fail("redo", f"{what}, and {again} opened something, or set the position (R2)")
        may = is_done(first, last) and (hashed is not None or isinstance(record, SettlingMessages))
        if code == codes.FENCED and may and record.seen > again and new == last - first + 1:
            self._fail("redo", f"{what}, after {again}, and is refused (R2)")

    def _forget(self, places: list[Place]) -> None:
        for place in places:
            self._due.pop(place, None)

    def granted_of(self, outcome: Outcome, record: Record, sender: Living) -> Iterator[tuple[Key, int, int]]:
        """At most once: the open messages that an accepted record grants to its sender (U3)."""
        if self.is_on and self._scenario.at_most_once and isinstance(record, SettlingMessages | SettleOffsets):
            for (first, last), code in zip(record.done, outcome.entries or (), strict=False):
                if code == codes.OK and not sender.host.is_admin:
                    yield (record.topic, record.partition), first, last

    def granted(self, sender: Living, key: Key, first: int, last: int) -> None:
        """At most once: the log granted these to a process."""
        for place in [(key, offset) for offset in range(first, last + 1)] if self.is_on else ():
            self._granted[place] += 1
            if self._granted[place] > 1 + self._opened[place]:
                times = f"{self._granted[place]} times, and was opened {self._opened[place]} times"
                self._fail("repeated", f"{name_of(key)} offset {place[1]} was granted {times} (R2, C12)")
            if self._opened[place]:
                self._awaited[place] = sender.name, self._scheduler.now

    def repositioned(self, key: Key, position: int, worlds: Mapping[int, World]) -> None:
        """An admin has set the position: nothing of before is due, and no record of before opens anything."""
        self._again[key] = worlds[self._cp(key)].next_offset - 1
        for places in (self._due, self._opened, self._granted, self._awaited):
            for place in [each for each in places if each[0] == key and (each[1] >= position or places is self._due)]:
                del places[place]

    def _cp(self, key: Key) -> int:
        scenario, cps = self._scenario, self._scenario.coordination_partitions
        return route_lease(*key, cps) if scenario.strategy is None else route_group(scenario.group_id, cps)

    def _kept(self, world: World, key: Key) -> Lease | PartitionProgress | None:
        """The lease of a partition, or what the coordinated group keeps of it."""
        group = world.group(self._scenario.group_id)
        return world.lease(self._scenario.group_id, *key) if group is None else group.kept(*key)

    def forgotten(self, key: Key) -> None:
        """The group starts over (R4)."""
        self._again.pop(key, None)

    # Work.

    def begins(self, process: Living, key: Key, message: Message, assignment: Assignment | None) -> None:
        """A worker begins to handle a message."""
        if not self.is_on:
            return
        offset = offset_of(message)
        self._begun[process, key, offset] = self._scheduler.now
        if self._awaited.get((key, offset), ())[:1] == (process.name,):
            del self._awaited[key, offset]
        if self._scenario.at_most_once or self._scenario.sharing or self._has_none or assignment is None:
            return
        for driver in process.drivers if (key, offset) not in self._given_up else ():
            kept = self._kept(driver.replica.worlds[self._cp(key)], key)
            if kept is not None and kept.progress.is_done(offset, hash_of(message)):
                what = f"{process.name} begins {name_of(key)} offset {offset}"
                self._fail("repeated", f"{what}, which its own replica calls done, and not open (R2)")

    def handled(self, process: Living, key: Key, offset: int) -> None:
        """A worker has handled a message."""
        if self._due.get((key, offset), 0.0) <= self._begun.get((process, key, offset), -1.0):
            self._due.pop((key, offset), None)

    def was_opened(self, key: Key, offset: int) -> bool:
        """Whether it was opened since the position was set."""
        return self._opened[key, offset] > 0

    # At the end.

    def awaits(self, name: str, key: Key, offset: int, granted_at: float) -> bool:
        """At most once: whether it was opened, and granted then to this process, which has not begun it since."""
        return self._awaited.get((key, offset)) == (name, granted_at)

    def is_settled(self, worlds: Mapping[int, World]) -> bool:
        """Whether nothing is open that is not set aside."""
        is_off = not self.is_on or self._has_none
        return is_off or all(each.hole.is_parked for each in holdings_of(worlds, self._scenario.group_id))

    def check(self) -> None:
        """At the end: what was opened was handled."""
        before = self._scheduler.now - FRESH_INTERVALS * self._scenario.longest_interval_ms
        for (key, offset), since in self._due.items():
            if since < before:
                self._fail(
                    "lost", f"{name_of(key)} offset {offset} was opened at {since:.1f} ms, and not handled since"
                )
                return
