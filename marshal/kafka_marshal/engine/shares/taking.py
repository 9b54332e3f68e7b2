"""Takes batches for one consumer, from whichever of its partitions has most for each idle sharer (U8).

All sharers see the same free messages at nearly the same time. If all took at once, all but one would write for
nothing. So with fewer messages than idle sharers each waits a time that it draws, long enough that the first one's
record is seen by the others; and all wait until the messages are worth a record. A lone sharer hardly waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import ceil, inf
from random import Random
from typing import Final, NamedTuple, Protocol

from kafka_marshal.engine.settings import SharingOptions
from kafka_marshal.engine.shares.desk import Desk, Given
from kafka_marshal.types import Key
from rationalizer.limits import MAX_SETTLED_OFFSETS
from rationalizer.wire.records import Take

#: A lone sharer waits for this part of the two times below: it has no other one to wait for, and its records wake none.
LONE: Final = 1 / 16

#: The oldest free message waits this long (ms) for others, so that they share a record.
LINGER_MS: Final = 20.0

#: What is handled in this time (ms) is worth a record; between two takes of one sharer there is as much.
WORTH_MS: Final = 50.0


class Free(NamedTuple):
    """What of one partition the next take may have, as our replica and our reader show it."""

    #: How many messages.
    messages: int
    #: Since when (own clock, ms) the oldest of them has been free.
    since: float
    #: The sharers, and those of them that have no batch; both with this one.
    sharers: int
    idle: int
    #: Whether some were given to sharers before.
    is_again: bool = False


class Speed(NamedTuple):
    """How fast this member handles messages, and how fast the log answers."""

    #: Messages for each millisecond, by all its handlers.
    rate: float
    #: The most messages of a batch, and how long (ms) it may take to handle them.
    max_messages: int
    batch_ms: float
    #: The median time (ms) from appending a record to seeing it applied.
    answer_ms: float
    #: How many messages begin at once: those of free handlers, or if there are none, of all.
    handlers: int = 0

    @property
    def full(self) -> int:
        """The messages of a full batch."""
        return max(1, min(self.max_messages, int(self.rate * self.batch_ms)))

    @property
    def worth(self) -> int:
        """How many messages are worth a record."""
        return max(1, min(self.max_messages, int(self.rate * WORTH_MS)))


def worth_it_at(free: Free, speed: Speed, taken_at: float) -> float:
    """From when on (own clock, ms) a take is worth a record; inf: nothing is free. taken_at: of our last take."""
    if free.messages <= 0:
        return inf
    if free.messages >= speed.full:
        return 0.0
    part = LONE if free.sharers == 1 and not free.is_again else 1.0
    ripe = 0.0 if free.messages >= speed.worth else free.since + part * LINGER_MS
    return max(ripe, taken_at + part * WORTH_MS)


def drawn_wait(free: Free, speed: Speed, draw: float) -> float:
    """How long (ms) to wait, and look again, so that not all take at once; draw: 0 … 1.

    What counts is how many batches are free: if one take leaves nothing, all others would write for nothing.
    """
    batches = free.messages / count(free, speed)
    return draw * 2.0 * speed.answer_ms * max(0.0, free.idle / max(1.0, batches) - 1.0)


def count(free: Free, speed: Speed) -> int:
    """How many of the free messages to take: with others at work, not more than half of this member's part."""
    fair = ceil(free.messages / (2 * max(1, free.sharers)))
    return max(1, speed.worth, min(speed.handlers, speed.max_messages), min(speed.full, fair))


#: Before anything was measured: messages for each millisecond, and the time (ms) from append to applied.
FIRST_RATE: Final = 0.2
FIRST_ANSWER_MS: Final = 10.0

#: A measurement takes at least this long (ms), while something is in flight.
MEASURED_MS: Final = 20.0

#: The median of this many answers counts.
ANSWERS: Final = 15


class Pace:
    """Measures one consumer. Called under the shell's lock."""

    def __init__(self, options: SharingOptions) -> None:
        self._batch_ms = options.batch_ms
        #: The most messages of a batch.
        self.max_messages: int = options.max_messages
        self._rate = FIRST_RATE
        self._answers: deque[float] = deque([FIRST_ANSWER_MS], ANSWERS)
        self._looked_at = 0.0
        self._was_busy = False
        self._busy_ms = 0.0
        self._done_at_start = 0

    def look(self, done: int, in_hand: int, now: float) -> None:
        """done: messages ever done; in_hand: in flight now."""
        if self._was_busy:
            self._busy_ms += now - self._looked_at
        self._looked_at, self._was_busy = now, in_hand > 0
        found = done - self._done_at_start
        if self._busy_ms < MEASURED_MS or not found:
            if self._busy_ms * self._rate > 2 * (found + in_hand):  # a batch may be reported as a whole, at its end
                self._rate = max(1, found) / self._busy_ms
            return
        self._rate += (found / self._busy_ms - self._rate) / 2
        self._busy_ms, self._done_at_start = 0.0, done

    def begun(self, now: float) -> None:
        """Messages are in flight from now on."""
        if not self._was_busy:
            self._looked_at, self._was_busy = now, True

    def answered(self, took_ms: float) -> None:
        """The log answered a record after this time (ms)."""
        self._answers.append(took_ms)

    @property
    def speed(self) -> Speed:
        """The figures."""
        ordered, half = sorted(self._answers), len(self._answers) // 2
        median = (ordered[half] + ordered[~half]) / 2  # `statistics` takes long to import
        return Speed(self._rate, self.max_messages, self._batch_ms, median)


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


class SharingConsumer(Protocol):
    """A consumer, as this module sees it."""

    def takers(self) -> Iterator[Taker]:
        """All shares that are held."""

    @property
    def are_all_failing(self) -> bool:
        """Whether nothing succeeds here."""

    def share_out(self, key: Key, now: float) -> None:
        """Give back what has not begun of a partition: another sharer may begin it."""

    @property
    def done_ever(self) -> int: ...

    @property
    def in_hand_now(self) -> int: ...

    @property
    def handlers(self) -> int:
        """How many messages are handled at a time, each reported by itself; 0: batches are."""


class Taking:
    """Called under the shell's lock."""

    def __init__(self, work: SharingConsumer, options: SharingOptions, heartbeat_interval_ms: int, rng: Random) -> None:
        self._work = work
        self._options = options
        self._again_ms = heartbeat_interval_ms / 2
        self._rng = rng
        self.pace: Pace = Pace(options)
        #: The share whose take is in flight, and when it was sent (own clock, ms).
        self.asked: tuple[Taker, float] | None = None
        self._taken_at = -inf
        #: When the last probe began (own clock, ms), and by partition up to how many messages it takes.
        self._probed: tuple[float, dict[Key, int]] = (-inf, {})
        #: What takes gave: a batch that no member had, one that some had, nothing.
        self.given: dict[str, int] = {"new": 0, "again": 0, "nothing": 0}
        #: What was free when a wait was drawn, and until when (own clock, ms) it lasts.
        self._drawn: tuple[object, float] | None = None
        #: When (own clock, ms) something is due again, and the next take.
        self.due: float = inf
        self._take_at = inf
        #: How many handlers the next take is for, and whether all of them are busy.
        self._begins: tuple[int, bool] = (0, False)
        self._is_stepping = False
        #: This number of reports of done messages is worth a step (any thread).
        self.news_at: int = 1

    def awaits(self, share: object) -> bool:
        """Whether a take of this share is in flight."""
        return self.asked is not None and self.asked[0] is share

    def answered(self, share: Taker, now: float) -> None:
        """A record of this share was applied."""
        if self.asked is not None and self.asked[0] is share:
            self.pace.answered(now - self.asked[1])
            self.asked = None

    def ended(self, share: object) -> None:
        """A share is over."""
        if self.awaits(share):
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
                if share.desk.is_ahead and share.desk.crowd.sharers > 1 and not (self.awaits(share) or share.failing):
                    self._work.share_out(share.key, now)
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
        speed = self.pace.speed._replace(handlers=self._begins[0])
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
        if now >= self._probed[0] + PROBE_MS:
            self._probed = now, {key: 1 + 2 * messages for key, messages in in_hand.items()}
        probed_at, probe_to = self._probed
        most = {key: probe_to.get(key, 1) for key in in_hand}
        fit = [x for x in shares if in_hand[x.key] < min(most[x.key], MOST_FAILING)]
        if (found := self._most_free(fit, now)) is None:
            return probed_at + PROBE_MS
        share = found[0]
        self._take(share, min(self.pace.max_messages, most[share.key] - in_hand[share.key]), now)
        return now + self._again_ms

    def _take(self, share: Taker, messages: int, now: float) -> None:
        desk = share.desk
        offsets = min(desk.offsets_for(messages), MAX_SETTLED_OFFSETS)
        up_to = max(0, desk.shelf.new(desk.free_from).up_to)
        self._drawn, self._taken_at = None, now
        self.asked = share, now
        desk.is_ahead |= self._begins[1]
        share.report(now, (offsets, up_to, self._options.at_most_once))

    def _wanted_at(self, shares: Sequence[Taker], now: float) -> float:
        """When another batch is wanted: none waits, and less than half of one is left, or than there are handlers."""
        given: list[Given] = [each for share in shares for each in share.desk.given.values()]
        failing = sum(share.failing for share in shares)
        left = sum(share.desk.left for share in shares) - failing
        handlers = self._work.handlers
        self.news_at = max(1, min(left // 4, left - handlers))
        self._begins = handlers - left if left < handlers else handlers, False
        if not left:
            return now
        is_alone = sum(each.is_alone for each in given) > failing
        if self._work.are_all_failing and not is_alone:
            return now
        began = [each.begun_at for each in given if each.begun_at is not None]
        if len(began) < len(given) or is_alone:
            return inf
        half = max(each.size for each in given) / 2 if given else 0.0
        if left < max(half, handlers):  # no handler is free while others wait, or hang
            return now
        if left == handlers:  # at least once: at most once there are none
            self._begins = handlers, True
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
            if self._begins[1] and crowd.sharers > 1:
                continue  # others may begin it now, and what we see of them is late
            if messages and share.may_take(now) and (best is None or rank > best[0]):
                since, is_again = min(crowd.since, new.since), crowd.again > 0
                best = rank, share, Free(messages, since, crowd.sharers, crowd.idle, is_again)
        return None if best is None else (best[1], best[2])
