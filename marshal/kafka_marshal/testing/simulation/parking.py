"""What a story's workers and operators set aside, by a plain account of what handlers and operators did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING

from kafka_marshal.client.parallel import MAX_DELIVERIES
from kafka_marshal.engine.work.open_messages import hash_of
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.observe.holes import holdings_of
from kafka_marshal.ports import Message
from kafka_marshal.testing.simulation.holdings import name_of
from kafka_marshal.testing.simulation.living import Living
from kafka_marshal.testing.simulation.waits import LaterTries
from kafka_marshal.types import Key, due_of
from rationalizer import Outcome, Record, SettleOffsets, SettlingMessages, World, codes
from rationalizer.holes import Hole

if TYPE_CHECKING:
    from kafka_marshal.testing.simulation.scenario import Scenario
    from kafka_marshal.testing.simulation.scheduler import Scheduler

#: Of this number of messages, one always fails; the reason under which it is set aside.
BAD_EVERY = 13
BAD, CRASHED = "BadError", "CRASHED"
#: In this share of the stories one message kills the process that begins it.
KILLING_SHARE = 0.5
#: For each message that waits, time until it is done or set aside, however many tries fail (HI).
PATIENCE_INTERVALS = 60
#: It is one of the first of its partition.
KILLING_WITHIN = 25

Place = tuple[Key, int]


class Parking:
    """Follows tries, parks, redrives and discards of one story."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler, fail: Callable[[str, str], None]) -> None:
        self._scenario = scenario
        self.waits: LaterTries = LaterTries(scenario, scheduler, fail)
        self._fail = fail
        are_built_in = scenario.parks and all(client.worker != "yours" for client in scenario.clients)
        self.is_on: bool = are_built_in and not scenario.sharing
        chance = Random(f"{scenario.seed}/parking")
        key = (scenario.data_topic, chance.randrange(scenario.data_partitions))
        #: The message that kills its process.
        self.killing: Place | None = (key, chance.randrange(KILLING_WITHIN))
        if not are_built_in or (chance.random() >= KILLING_SHARE and not scenario.sharing):
            self.killing = None
        #: Processes that it has killed.
        self.killed: set[str] = set()
        self._shift = chance.randrange(BAD_EVERY)
        #: Its last try failed, or it was set aside by others: its key may continue.
        self.aside: set[Place] = set()
        #: Settled as done by an operator.
        self.discarded: set[Place] = set()
        #: Set aside by an operator, once at least.
        self.by_operator: set[Place] = set()
        #: A position was set beyond it while it was not set aside: it counts as done, or comes again.
        self._passed_over: set[Place] = set()
        #: Tries that failed, of messages not done since: the process and the epoch of the last one, and its number.
        self._failed: dict[Place, tuple[Living, int, int]] = {}
        #: Of partitions that are shared by key: the key hash of each message that was begun.
        self._hashes: dict[Place, int] = {}

    def hash_of(self, key: Key, message: Message) -> int:
        """The key hash of a message that begins; 0: partitions are not shared by key."""
        if not self._scenario.shares:
            return 0
        hashed = self._hashes[key, offset_of(message)] = hash_of(message)
        return hashed

    def keys_of(self, key: Key, lo: int, hi: int) -> Callable[[int], bool]:
        """Whether the key of a message that was begun lies between these."""
        return lambda offset: lo <= self._hashes.get((key, offset), lo) <= hi

    def is_bad(self, key: Key, offset: int) -> bool:
        """Whether each of its tries fails."""
        return self.is_on and (offset + 5 * key[1]) % BAD_EVERY == self._shift

    # What handlers do.

    def tries(
        self, process: Living, key: Key, offset: int, epoch: int, number: int, worlds: Mapping[int, World]
    ) -> None:
        """A try begins: it follows the one before, here, or by the log at the owner before."""
        hole = next((x for x in self._waiting(worlds, key) if x.first == offset), None)
        logged = 0 if hole is None else hole.attempts
        if number < logged and self._scenario.clocks_are_trusted:
            what = f"{process.name}: try {number} of {name_of(key)} offset {offset}"
            self._fail("tries", f"{what} begins, and the log has {logged} (U1)")
        other, under, failed = self._failed.get((key, offset), (process, epoch, number - 1))
        # While most tries fail there are more than the log counts: what comes again here continues at that (U2).
        least = min(failed + 1, MAX_DELIVERIES)
        if hole is not None and hole.is_later and (other, under) != (process, epoch) and number != logged + 1:
            what = f"{process.name}: try {number} of {name_of(key)} offset {offset}"
            self._fail("tries", f"{what} begins, and the log has {logged}, of a message that waited for its time (U2)")
        if (other, under) == (process, epoch) and not least <= number <= failed + 1:
            what = f"{process.name}: try {number} of {name_of(key)} offset {offset}"
            self._fail("tries", f"{what} comes after try {failed}")

    def failed(self, process: Living, key: Key, offset: int, epoch: int, number: int, *, is_last: bool) -> None:
        """A try has failed."""
        self._failed[key, offset] = process, epoch, number
        if is_last:
            self.aside.add((key, offset))

    def lost(self, key: Key, offset: int) -> None:
        """A try does not count: its lease was not proven when it ended."""
        self._failed.pop((key, offset), None)
        self.waits.lost((key, offset))

    def handled(self, key: Key, offset: int) -> None:
        """A try has succeeded."""
        self._failed.pop((key, offset), None)
        self.waits.handled((key, offset))

    # What the log shows.

    def record(self, outcome: Outcome, record: Record, sender: Living) -> None:
        """A record of open messages was accepted."""
        if not self.is_on or not isinstance(record, SettlingMessages | SettleOffsets):
            return
        key = (record.topic, record.partition)
        answers = iter(outcome.entries or ())
        by_operator = sender.host.is_admin
        for (first, last), code in zip(record.done, answers, strict=False):
            if code == codes.OK and by_operator:
                self.discarded |= {(key, offset) for offset in range(first, last + 1)}
                self.aside |= {(key, offset) for offset in range(first, last + 1)}
                for offset in range(first, last + 1):
                    self.waits.ends((key, offset))
        for (first, last, _, attempts), code in zip(record.open, answers, strict=False):
            for offset in range(first, last + 1) if code == codes.OK and by_operator and attempts == 0 else ():
                self._failed.pop((key, offset), None)
                self.waits.ends((key, offset), is_hastened=True)
        for (offset, _, _, reason), code in zip(record.parked, answers, strict=False):
            if code == codes.OK and (due := due_of(reason)) is not None:
                self.waits.logged((key, offset), due, sender)
            elif code == codes.OK:
                self._parked(key, offset, reason, sender)

    def _parked(self, key: Key, offset: int, reason: str, sender: Living) -> None:
        place = key, offset
        was_right = reason == CRASHED and (place == self.killing or self.is_bad(key, offset))
        if sender.host.is_admin:
            self.by_operator.add(place)
            self.waits.ends(place)
        elif not was_right and not (self.is_bad(key, offset) and place in self.aside):
            self._fail("innocent", f"{sender.name} sets {name_of(key)} offset {offset} aside ({reason})")
        self.aside.add(place)

    def released(self, sender: Living, key: Key, concerns: Callable[[int], bool], worlds: Mapping[int, World]) -> None:
        """A member released these offsets' keys, and everything that it sent has arrived: its tries are in the log."""
        if not self.is_on or sender.host.is_admin:
            return
        if (forgotten := self.waits.not_logged(sender, key, concerns)) is not None:
            self._fail("later", f"{sender.name} releases {name_of(key)}, and the log has no wait of offset {forgotten}")
        holes = {x.hole.first: x.hole for x in holdings_of(worlds, self._scenario.group_id) if x.key == key}
        for (of, offset), (process, _, number) in self._failed.items():
            if of == key and process is sender and concerns(offset) and (of, offset) not in self.aside:
                hole = holes.get(offset)
                if hole is None or hole.attempts < number:
                    self._fail(
                        "tries",
                        f"{sender.name} releases {name_of(key)}, and the log has "
                        f"{0 if hole is None else hole.attempts} of {number} tries of offset {offset} (U1)",
                    )

    def repositioned(self, key: Key, now: int, worlds: Mapping[int, World]) -> list[int]:
        """An admin has set the position behind this offset. Returns what counts as done now."""
        if not self.is_on:
            return []
        parked = {x.hole.first for x in holdings_of(worlds, self._scenario.group_id) if x.key == key}
        self._failed = {place: what for place, what in self._failed.items() if place[0] != key}
        self.waits.repositioned(key)
        self._passed_over = {place for place in self._passed_over if place[0] != key or place[1] <= now}
        passed_over = [offset for offset in range(now + 1) if offset not in parked]
        self._passed_over |= {(key, offset) for offset in passed_over}
        self.discarded = {place for place in self.discarded if place[0] != key or place[1] <= now}
        return passed_over

    # At the end.

    def patience(self, worlds: Mapping[int, World]) -> float:
        """How much longer the end may take (HI): while most tries fail, next to nothing is set aside (U2)."""
        return PATIENCE_INTERVALS * len(self._waiting(worlds))

    def _waiting(self, worlds: Mapping[int, World], key: Key | None = None) -> list[Hole]:
        found = holdings_of(worlds, self._scenario.group_id) if self.is_on else ()
        return [each.hole for each in found if key in (None, each.key) and not each.hole.is_parked]

    def is_settled(self, worlds: Mapping[int, World]) -> bool:
        """Whether nothing waits for another try."""
        return not self._waiting(worlds)

    def check(self, ends: Mapping[Key, int], worlds: Mapping[int, World]) -> None:
        """At the end: exactly those messages are set aside that no handler can do."""
        if not self.is_on:
            return
        found = {(each.key, each.hole.first) for each in holdings_of(worlds, self._scenario.group_id)}
        for key, end in ends.items():
            for place in [(key, offset) for offset in range(end)]:
                must = self.is_bad(*place) and place not in self.discarded and place not in self._passed_over
                may = must or self.is_bad(*place) or place == self.killing or place in self.by_operator
                if place in found and not may:
                    self._fail("innocent", f"{name_of(key)} offset {place[1]} is set aside at the end")
                if must and place not in found:
                    self._fail("lost", f"{name_of(key)} offset {place[1]} fails always, and is not set aside")
