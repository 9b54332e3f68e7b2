"""Takes batches for one consumer, from whichever of its partitions has most for each idle sharer (U8)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from random import Random
from typing import Protocol

from kafka_marshal.engine.settings import SharingOptions
from kafka_marshal.engine.shares.desk import Desk, Given
from kafka_marshal.engine.shares.pace import Pace
from kafka_marshal.engine.shares.timing import Free, count, drawn_wait, worth_it_at
from kafka_marshal.types import Key
from rationalizer.limits import MAX_SETTLED_OFFSETS
from rationalizer.wire.records import Take

#: While nothing succeeds here: after this time (ms) more is taken of a partition of which this member has messages, up
#: to this number.
PROBE_MS, MOST_FAILING = 200.0, 1_000

#: A take that is due within this time (ms) is waited for in the log, not in the reader of messages.
SOON_MS = 60.0


class Taker(Protocol):
    """A share, as this module sees it."""

    key: Key
    desk: Desk

    @property
    def failing(self) -> int:
        """How many messages of its batches wait for another try."""

    def look(self, now: float) -> None:
        """Take over what our replica shows, if that may have changed."""

    def may_take(self, now: float) -> bool:
        """Whether a batch may be taken."""

    def report(self, now: float, taking: Take | None = None) -> bool:
        """Send what the log does not show yet; taking: the next batch."""


class Work(Protocol):
    """A consumer, as this module sees it."""

    def takers(self) -> Iterator[Taker]:
        """All shares that are held."""

    @property
    def are_all_failing(self) -> bool:
        """Whether nothing succeeds here."""

    @property
    def done_ever(self) -> int: ...

    @property
    def in_hand_now(self) -> int: ...

    @property
    def handlers(self) -> int:
        """How many messages are handled at a time, each reported by itself; 0: batches are."""


class Taking:
    """Called under the shell's lock."""

    def __init__(self, work: Work, options: SharingOptions, heartbeat_interval_ms: int, rng: Random) -> None:
        self._work = work
        self._options = options
        self._again_ms = heartbeat_interval_ms / 2
        self._rng = rng
        self.pace: Pace = Pace(options)
        #: The share whose take is in flight, and when it was sent (own clock, ms).
        self.asked: tuple[Taker, float] | None = None
        self._taken_at = -inf
        #: When the last probe began (own clock, ms), and by partition up to how many messages it takes.
        self._probed_at, self._probe_to = -inf, dict[Key, int]()
        #: What takes gave: a batch that no member had, one that some had, nothing.
        self.given: dict[str, int] = {"new": 0, "again": 0, "nothing": 0}
        #: What was free when a wait was drawn, and until when (own clock, ms) it lasts.
        self._drawn: tuple[object, float] | None = None
        #: When (own clock, ms) something is due again, and the next take.
        self.due: float = inf
        self._take_at = inf
        self._is_stepping = False
        #: This number of reports of done messages is worth a step (any thread).
        self.news_at: int = 1

    def answered(self, share: Taker, now: float) -> None:
        """A record of this share was applied."""
        if self.asked is not None and self.asked[0] is share:
            self.pace.answered(now - self.asked[1])
            self.asked = None

    def ended(self, share: Taker) -> None:
        """A share is over."""
        if self.asked is not None and self.asked[0] is share:
            self.asked = None

    def is_soon(self, now: float) -> bool:
        """Whether a batch is asked for, or is about to be."""
        return self.asked is not None or self._take_at < now + SOON_MS

    def step(self, now: float) -> None:
        """Take a batch if one is wanted, and if it is time."""
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            shares = list(self._work.takers())
            for share in shares:
                share.look(now)
            is_working = not self._work.are_all_failing
            in_hand = self._work.in_hand_now - sum(share.failing for share in shares) if is_working else 0
            self.pace.look(self._work.done_ever, in_hand, now)
            self._take_at = self._step(shares, now)
            rests = (share.desk.rests_until for share in shares if now < share.desk.rests_until)
            self.due = min([self._take_at, *(share.desk.crowd.look_at for share in shares), *rests])
        finally:
            self._is_stepping = False

    def _step(self, shares: Sequence[Taker], now: float) -> float:
        """Returns when to call it again."""
        if self.asked is not None:
            if now < self.asked[1] + self._again_ms:
                return self.asked[1] + self._again_ms
            self.asked = None  # it was lost; if it was not, the next one takes nothing (B5)
        if (wanted_at := self._wanted_at(shares, now)) > now:
            return wanted_at
        if self._work.are_all_failing:
            return self._probe(shares, now)
        found = self._most_free(shares, now)
        if found is None:
            return inf
        share, free = found
        speed = self.pace.speed
        worth_at = worth_it_at(free, speed, self._taken_at)
        if now < worth_at:
            return worth_at
        what = share.key, free.since, free.messages <= free.idle
        if self._drawn is None or self._drawn[0] != what:
            self._drawn = what, now + drawn_wait(free, speed, self._rng.random())
        if now < self._drawn[1]:
            return self._drawn[1]
        self._take(share, count(free, speed), now)
        return now + self._again_ms

    def _probe(self, shares: Sequence[Taker], now: float) -> float:
        """Nothing succeeds here: look whether something does in other partitions, or further on. Returns when again.

        Each probe takes as much as all before it: a burst of bad messages is passed soon, and an outage takes few. What
        was redriven comes one by one: a probe of that is many takes.
        """
        in_hand = {share.key: sum(each.size for each in share.desk.given.values()) for share in shares}
        if now >= self._probed_at + PROBE_MS:
            self._probed_at, self._probe_to = now, {key: 1 + 2 * messages for key, messages in in_hand.items()}
        most = {key: self._probe_to.get(key, 1) for key in in_hand}
        fit = [x for x in shares if in_hand[x.key] < min(most[x.key], MOST_FAILING)]
        if (found := self._most_free(fit, now)) is None:
            return self._probed_at + PROBE_MS
        share = found[0]
        self._take(share, min(self.pace.max_messages, most[share.key] - in_hand[share.key]), now)
        return now + self._again_ms

    def _take(self, share: Taker, messages: int, now: float) -> None:
        desk = share.desk
        offsets = min(desk.offsets_for(messages), MAX_SETTLED_OFFSETS)
        up_to = max(0, desk.shelf.new(desk.free_from).up_to)
        self._drawn, self._taken_at = None, now
        self.asked = share, now
        share.report(now, (offsets, up_to, self._options.at_most_once))

    def _wanted_at(self, shares: Sequence[Taker], now: float) -> float:
        """When another batch is wanted: none waits, and less than half of one is left, or than there are handlers."""
        given: list[Given] = [each for share in shares for each in share.desk.given.values()]
        failing = sum(share.failing for share in shares)
        left = sum(share.desk.left for share in shares) - failing
        self.news_at = max(1, left // 4)
        if not left:
            return now
        is_alone = sum(each.is_alone for each in given) > failing
        if self._work.are_all_failing and not is_alone:
            return now
        began = [each.begun_at for each in given if each.begun_at is not None]
        if len(began) < len(given) or is_alone:
            return inf
        half = max(each.size for each in given) / 2 if given else 0.0
        handlers = self._work.handlers
        if left < max(half, handlers):  # no handler is free while others wait, or hang
            return now
        if handlers or not began:
            return inf
        # A whole batch is reported at once: judge by the pace how much of it is left.
        return max(began) + (left - half) / max(self.pace.speed.rate, 1e-6)

    def _most_free(self, shares: Sequence[Taker], now: float) -> tuple[Taker, Free] | None:
        best: tuple[tuple[bool, float], Taker, Free] | None = None
        for share in shares:
            crowd, new = share.desk.crowd, share.desk.shelf.new(share.desk.free_from)
            messages = crowd.again + new.messages
            rank = not share.failing, messages / crowd.idle  # what fails waits for what may succeed
            if messages and share.may_take(now) and (best is None or rank > best[0]):
                best = rank, share, Free(messages, min(crowd.since, new.since), crowd.sharers, crowd.idle)
        return None if best is None else (best[1], best[2])
