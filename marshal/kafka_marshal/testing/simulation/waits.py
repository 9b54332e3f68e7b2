"""What a story's handlers ask to have tried later: no try begins before its time, unless an operator has it so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from math import inf
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from kafka_marshal.adapters.message import Message
from kafka_marshal.client import waiting
from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.breaker import SLOWEST_PACE_MS
from kafka_marshal.client.handling import RetryAfter
from kafka_marshal.engine.work.lane import Lane
from kafka_marshal.testing.simulation.holdings import name_of, place_of
from kafka_marshal.testing.simulation.living import Living
from kafka_marshal.testing.simulation.network import BROKER_EPOCH_MS
from kafka_marshal.types import Key

if TYPE_CHECKING:
    from kafka_marshal.testing.simulation.scenario import Scenario
    from kafka_marshal.testing.simulation.scheduler import Scheduler

#: Waits of more than this (HI) are in the log, in place of a minute; the longest one.
IN_MEMORY_INTERVALS, LONGEST_INTERVALS = 4.0, 20.0
#: Of this number of messages, one has a time for its first try; the latest one after it was published (HI).
TIMED_EVERY, TIMED_INTERVALS = 17, 12
#: Rounding of clocks (ms); and how long no record moves log time, which runs by the member's clock meanwhile (HI).
ROUNDING_MS, SILENT_INTERVALS = 1e-3, 5.0
#: The log has times rounded up to this (ms).
ROUNDED_MS = 1000

Place = tuple[Key, int]


@contextmanager
def logging_waits(scenario: Scenario) -> Iterator[None]:
    """In stories of waits, the log has those of some HI: a minute is as long as a story."""
    before = waiting.IN_MEMORY_S
    if scenario.later:
        waiting.IN_MEMORY_S = IN_MEMORY_INTERVALS * scenario.heartbeat_interval_ms / 1000
    try:
        yield
    finally:
        waiting.IN_MEMORY_S = before


class _Asked(NamedTuple):
    """Who has asked, and when (ms, virtual time) the next try may begin there."""

    process: Living
    epoch: int
    due: float
    #: The process may take a message out of its lane, as at a pause: a short wait ends with that.
    lane: Lane | None
    is_long: bool


class _Logged(NamedTuple):
    """When (ms, virtual time) the log had a wait, and until when it lasts."""

    at: float
    until: float
    #: Whose record it was: it knows the time that was rounded up to a second, on its way to the log.
    by: Living


class LaterTries:
    """Follows the waits of one story."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler, fail: Callable[[str, str], None]) -> None:
        self.is_on: bool = scenario.later
        self._hi = float(scenario.heartbeat_interval_ms)
        self._scheduler = scheduler
        self._fail = fail
        #: Log time is virtual time: no broker's clock is set.
        self._is_timed = all(fault.kind != "clock" for fault in scenario.faults)
        #: A list has no ``not_before``.
        self._has_times = scenario.later and not scenario.lists
        self._shift = Random(f"{scenario.seed}/waits").randrange(TIMED_EVERY)
        self._asked: dict[Place, _Asked] = {}
        self._logged: dict[Place, _Logged] = {}
        #: An operator has had these tried at once.
        self._hastened: set[Place] = set()
        #: Of tries that were asked for, and of those that the log had.
        self.counts: dict[str, int] = {"waits": 0, "waits in the log": 0} if self.is_on else {}

    def not_before(self, message: Message) -> datetime | None:
        """For ``run``: when the first try may begin."""
        key, offset = place_of(message)
        if not self._has_times or (offset + 3 * key[1]) % TIMED_EVERY != self._shift:
            return None
        wait_ms = (1 + offset % TIMED_INTERVALS) * self._hi
        return datetime.fromtimestamp((message.timestamp()[1] + wait_ms) / 1000, UTC)

    # What handlers do.

    def failed(self, process: Living, attempt: Attempt, error: BaseException) -> None:
        """A try has failed, and may ask for a later one; an outage shortens what ``Retry(after=…)`` says (U2)."""
        seconds: float | None = getattr(error, "seconds", None)
        if seconds is None:
            return
        own_ms = seconds * 1000 if isinstance(error, RetryAfter) else min(seconds * 1000, SLOWEST_PACE_MS)
        due = self._scheduler.now + own_ms / process.host.rate
        is_long = isinstance(error, RetryAfter) and seconds > waiting.IN_MEMORY_S
        self.counts["waits"] += 1
        self._asked[place_of(attempt.message)] = _Asked(process, attempt.epoch, due, attempt._lane, is_long)

    def begins(self, process: Living, attempt: Attempt) -> None:
        """A try begins."""
        if not self.is_on:
            return
        place, now, rate = place_of(attempt.message), self._scheduler.now, max(1.0, process.host.rate)
        asked, logged, due, by = self._asked.pop(place, None), self._logged.pop(place, None), -inf, ""
        silence = SILENT_INTERVALS * self._hi * (1 - 1 / rate)
        if asked is not None and (asked.process, asked.epoch) == (process, attempt.epoch):
            is_kept = asked.is_long or asked.lane is attempt._lane
            due, by = (asked.due, "its handler asked for") if is_kept else (due, by)
        elif logged is not None and self._is_timed:
            until = logged.until - (ROUNDED_MS + self._hi) * (logged.by is process)
            due, by = logged.at + (until - logged.at) / rate - silence, "the log has"
        first = self.not_before(attempt.message)
        if first is not None and self._is_timed and place not in self._hastened:
            published, at = attempt.message.timestamp()[1], first.timestamp() * 1000
            at = published + (at - published) / rate - silence - BROKER_EPOCH_MS
            due, by = (at, "not_before said") if at > due else (due, by)
        if now < due - ROUNDING_MS:
            what = f"{process.name} begins try {attempt.number} of {name_of(place[0])} offset {place[1]}"
            self._fail("later", f"{what} {due - now:.1f} ms before the time that {by}")

    def lost(self, place: Place) -> None:
        """The try that asked does not count."""
        self._asked.pop(place, None)

    def handled(self, place: Place) -> None:
        """It is done."""
        self._asked.pop(place, None)
        self._logged.pop(place, None)

    # What the log shows.

    def logged(self, place: Place, due_ms: int, sender: Living) -> None:
        """The log shows that this message waits until then (log time, ms)."""
        self.counts["waits in the log"] += 1
        self._logged[place] = _Logged(self._scheduler.now, due_ms - BROKER_EPOCH_MS, sender)

    def ends(self, place: Place, *, is_hastened: bool = False) -> None:
        """An operator has settled a message, or has it tried now."""
        self.handled(place)
        if is_hastened:
            self._hastened.add(place)

    def repositioned(self, key: Key) -> None:
        """An admin has set a position: what was open may begin again."""
        self._asked = {place: asked for place, asked in self._asked.items() if place[0] != key}
        self._logged = {place: logged for place, logged in self._logged.items() if place[0] != key}

    def not_logged(self, sender: Living, key: Key, concerns: Callable[[int], bool]) -> int | None:
        """An offset that waits for long at this member, and that the log does not show as waiting; None: there is none.

        The member has released it, and everything that it sent has arrived.
        """
        for place, asked in self._asked.items():
            is_its = place[0] == key and concerns(place[1]) and asked.process is sender and asked.is_long
            if is_its and place not in self._logged:
                return place[1]
        return None
