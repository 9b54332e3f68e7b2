"""``run(rate=…, priority=…)``: which of the lanes that are ready begins next, and when.

A lane whose first message needs a token, of a bucket that has none, waits here: it is not begun, no handler has it, and
lanes of other buckets pass. A token is taken as a try begins, so in any t seconds at most burst + per_second · t begin.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from math import inf
from typing import Any

from kafka_marshal import arguments
from kafka_marshal.client.fetching import FetchingConsumer
from kafka_marshal.client.rates import BURST_S, LEVELS, Rate
from kafka_marshal.client.tries import LOOK_S, Tries
from kafka_marshal.client.workers import Ready
from kafka_marshal.engine.claims.peers import holders_of
from kafka_marshal.engine.work.lane import Lane, RateLimited
from kafka_marshal.types import Key

#: While several priorities wait, one begin in this number is of a lower one: of the one that has waited longest for
#: its turn. So with n lower priorities, each of them has one begin in AGING · n, whatever else comes.
AGING = 10

#: How many values of ``Rate(key=…)`` have a bucket each: some 10 MB. One that is full again is forgotten. If all are in
#: use, further values share one, which is slower for them, but never faster than their rate.
MOST_BUCKETS = 10_000

#: A bucket without a token has its next turn with the tokens of this time (s): at least one, at most half its burst.
REFILL_S = 0.01

#: A token, but for rounding.
ONE = 1.0 - 1e-9

#: A rate limits if a lane waited for a token of it within this time (ms).
LATELY_MS = 1_000.0


class _InTurn(deque[Lane]):
    """As ``Ready``, in turn, and small: there may be thousands of buckets."""

    put = deque[Lane].append

    def take(self, longest: bool) -> Lane | None:
        return self.popleft() if self else None


class TokenBucket:
    """The tokens of one rate, or of one value of its key; and the lanes that need one."""

    __slots__ = ("at", "count", "is_closed", "lines", "members", "rate", "tokens", "topic", "value", "waited_at")

    def __init__(self, rate: Rate | None, topic: str, value: object, members: int, now: float) -> None:
        """rate: None for what has no rate. members: that share it."""
        self.rate: Rate | None = rate
        self.topic: str = topic
        self.value: object = value
        self.members: int = members
        self.tokens: float = self.most
        #: When the tokens were counted (ms, own clock).
        self.at: float = now
        #: Priority → its lanes.
        self.lines: dict[int, Ready | _InTurn] = {}
        self.count: int = 0
        #: It has no token, and is in no turn.
        self.is_closed: bool = False
        #: When a lane last waited for a token (ms).
        self.waited_at: float = -inf

    @property
    def per_ms(self) -> float:
        """Tokens a millisecond."""
        return inf if self.rate is None else self.rate.per_second / 1000 / self.members

    @property
    def most(self) -> float:
        """The burst: of a group's rate, the part of this member, at least one."""
        rate = self.rate
        if rate is None:
            return inf
        burst = rate.per_second * BURST_S if rate.burst is None else rate.burst
        return max(1.0, burst / self.members)

    def has_token(self, now: float) -> bool:
        """Count the tokens; whether there is one."""
        if self.rate is not None:
            self.tokens = min(self.most, self.tokens + max(0.0, now - self.at) * self.per_ms)
            self.at = now
        return self.tokens >= ONE

    def refilled_at(self) -> float:
        """When it has enough tokens for its next turn (ms), after ``has_token``."""
        wanted = max(1.0, min(self.most / 2, self.per_ms * REFILL_S * 1000))
        return self.at + (wanted - self.tokens) / self.per_ms

    def put(self, level: int, lane: Lane) -> None:
        """Add a lane of this priority."""
        if (line := self.lines.get(level)) is None:
            is_of_many = self.rate is not None and self.rate.key is not None
            self.lines[level] = line = _InTurn() if is_of_many else Ready()
        line.put(lane)
        self.count += 1


class _Others:
    def __repr__(self) -> str:
        return "others, which share one rate"


_OTHERS = _Others()


def _limited(topic: str, buckets: list[TokenBucket]) -> RateLimited:
    most = max(buckets, key=lambda each: each.count)
    value = None if most.rate is None or most.rate.key is None else repr(most.value)[:40]
    waiting = sum(each.count for each in buckets)
    return RateLimited(topic, most.per_ms * 1000, most.members, waiting, len(buckets), value)


class Buckets:
    """The buckets of one run. Called under the lock of :class:`Paced`."""

    def __init__(self, rates: Mapping[str, Rate]) -> None:
        self.rates = rates
        #: Of what has no rate.
        self.free: TokenBucket = TokenBucket(None, "", None, 1, 0.0)
        #: By topic ("": all), and value of the key.
        self.all: dict[tuple[str, object], TokenBucket] = {}
        #: Topic of a rate → how many members share it.
        self._members: dict[str, int] = {}
        self._swept_at = -inf

    def of(self, topic: str, value: object, now: float) -> TokenBucket:
        """That of a value of the rate of this topic."""
        if (found := self.all.get((topic, value))) is not None:
            return found
        if len(self.all) >= MOST_BUCKETS:
            self._sweep(now)
            if len(self.all) >= MOST_BUCKETS:
                value = _OTHERS
        if (found := self.all.get((topic, value))) is None:
            found = TokenBucket(self.rates[topic], topic, value, self._members.get(topic, 1), now)
            self.all[topic, value] = found
        return found

    def _sweep(self, now: float) -> None:
        """Forget those that have their whole burst again, and no lanes."""
        if now >= self._swept_at + LATELY_MS:
            self._swept_at = now
            for place, each in list(self.all.items()):
                if not (each.count or each.is_closed) and each.has_token(now) and each.tokens >= each.most:
                    del self.all[place]

    def share(self, topic: str, members: int, now: float) -> bool:
        """This number of members share the rate of a topic now; whether that is new."""
        if self._members.get(topic, 1) == members:
            return False
        self._members[topic] = members
        for bucket in [each for (at, _), each in self.all.items() if at == topic]:
            bucket.has_token(now)  # at the rate of before
            bucket.members = members
            bucket.tokens = min(bucket.tokens, bucket.most)
        return True

    def limits(self, now: float) -> tuple[RateLimited, ...]:
        """The rates that limit now (any thread; no lock)."""
        found: dict[str, list[TokenBucket]] = {}
        for bucket in list(self.all.values()):
            if bucket.count and (bucket.is_closed or now < bucket.waited_at + LATELY_MS):
                found.setdefault(bucket.topic, []).append(bucket)
        return tuple(_limited(topic, buckets) for topic, buckets in sorted(found.items()))


class Paced:
    """The lanes that wait for a worker, in place of ``Ready``. Any thread calls it.

    The user's functions are called by workers, and without the lock.
    """

    def __init__(self, tries: Tries) -> None:
        options = tries.options
        self._tries = tries
        self._buckets = Buckets(options.rates)
        self._priority = options.priority
        self._now_ms = tries.runtime.now_ms
        #: Lanes that were put, and not sorted in.
        self._came: deque[Lane] = deque()
        #: It wakes the timer.
        self._lock = tries.runtime.condition()
        #: Lane → the bucket in which it waits. (One that was recalled, or put again elsewhere, is in an old one, too.)
        self._of: dict[Lane, TokenBucket] = {}
        #: By priority: buckets that have a token and lanes, in turn.
        self._turns: list[OrderedDict[TokenBucket, None]] = [OrderedDict() for _ in range(LEVELS)]
        #: How many lanes are in such buckets.
        self._open = 0
        #: How many begins there were while several priorities waited, and the last one of each that came out of turn.
        self._begins = 0
        self._served = [0] * LEVELS
        #: When closed buckets have tokens again (ms): (when, a number that breaks ties, bucket).
        self._refills: list[tuple[float, int, TokenBucket]] = []
        self._number = 0
        #: Until when the timer sleeps (ms).
        self._sleeps_until = inf
        #: How many workers asked in vain, since the lanes that they were called for wait for tokens.
        self._owed = 0

    def __len__(self) -> int:
        """How many lanes may begin, or more."""
        return len(self._came) + self._open

    def put(self, lane: Lane) -> None:
        """This lane may begin, as far as its key and its partition are concerned."""
        self._came.append(lane)

    def take(self, longest: bool) -> Lane | None:
        """The lane that begins next, with a token; None: there is none, or no token. longest: as of ``Ready``."""
        self._sort_in()
        with self._lock:
            now = self._now_ms()
            self._reopen(now)
            lane = self._next(longest, now)
            if lane is None:
                self._owed = min(self._owed + 1, len(self._of) + len(self._came))
            calls = lane is not None and self._open > 0 and self._owed > 0
            self._owed -= calls
        if calls:
            self._tries.workers.wake(1)
        return lane

    # Buckets and priorities.

    def _sort_in(self) -> None:
        """Ask the user's functions of what was put, and put it into its bucket."""
        while self._came:
            try:
                lane = self._came.popleft()
            except IndexError:
                return  # another worker was faster
            message = lane.message
            if message is None:
                continue
            topic = lane.partition.assignment.key[0]
            try:
                level, at, value = self._asked(topic, message)
            except Exception as error:  # noqa: BLE001 - of this message: it fails when it begins, and others continue
                self._tries.faults[lane] = error
                level, at, value = 0, None, None
            with self._lock:
                now = self._now_ms()
                bucket = self._buckets.free if at is None else self._buckets.of(at, value, now)
                self._of[lane] = bucket
                bucket.put(level, lane)
                if bucket.is_closed:
                    bucket.waited_at = now
                else:
                    self._open += 1
                    self._turns[level].setdefault(bucket)

    def _asked(self, topic: str, message: Any) -> tuple[int, str | None, object]:
        """A message's priority, the topic of its rate ("": all, None: it has none), and the value of its key."""
        rates = self._buckets.rates
        at = next((x for x in (topic, "") if x in rates), None)
        key = None if at is None else rates[at].key
        value = None if key is None else arguments.a_result("key(…) of a Rate", key(message))
        hash(value)
        if self._priority is None:
            return 0, at, value
        level = arguments.a_whole("what priority(…) of run(…) returns", self._priority(message), 0, LEVELS - 1)
        return level, at, value

    def _levels(self) -> Iterable[int]:
        """The priorities that wait, in the order in which they are asked for a lane."""
        levels = [level for level in reversed(range(LEVELS)) if self._turns[level]]
        if len(levels) > 1:
            self._begins += 1
            if self._begins % AGING == 0:
                lower = min(levels[1:], key=self._served.__getitem__)
                self._served[lower] = self._begins
                return lower, *levels
        return levels

    def _next(self, longest: bool, now: float) -> Lane | None:
        for level in self._levels():
            turns = self._turns[level]
            while turns:
                bucket = next(iter(turns))
                if not bucket.has_token(now):
                    self._close(bucket, now)
                elif (lane := self._first(bucket, level, longest)) is None:
                    del turns[bucket]
                else:
                    turns.move_to_end(bucket)
                    bucket.tokens -= 1.0
                    if bucket.count and bucket.tokens < ONE:
                        self._close(bucket, now)
                    return lane
        return None

    def _first(self, bucket: TokenBucket, level: int, longest: bool) -> Lane | None:
        line = bucket.lines.get(level)
        while line is not None and (lane := line.take(longest)) is not None:
            bucket.count -= 1
            self._open -= 1
            if self._of.get(lane) is bucket:
                del self._of[lane]
                if lane.message is not None:  # otherwise it was recalled
                    return lane
        bucket.lines.pop(level, None)
        return None

    def _close(self, bucket: TokenBucket, now: float) -> None:
        """It has no token: it is in no turn until it has."""
        bucket.is_closed, bucket.waited_at = True, now
        self._open -= bucket.count
        for turns in self._turns:
            turns.pop(bucket, None)
        self._refill_later(bucket)

    def _refill_later(self, bucket: TokenBucket) -> None:
        self._number += 1
        due = bucket.refilled_at()
        heappush(self._refills, (due, self._number, bucket))
        if due < self._sleeps_until:
            self._lock.notify_all()

    def _reopen(self, now: float) -> int:
        """Buckets that have tokens again get their turns. Returns how many lanes may begin."""
        found = 0
        while self._refills and self._refills[0][0] <= now:
            bucket = heappop(self._refills)[2]
            if not bucket.has_token(now):  # its rate was divided by more members meanwhile
                self._refill_later(bucket)
                continue
            bucket.is_closed = False
            bucket.waited_at = now if bucket.count else bucket.waited_at
            self._open += bucket.count
            found += int(min(bucket.count, bucket.tokens))
            for level in bucket.lines:
                self._turns[level].setdefault(bucket)
        return found

    # The timer.

    def start(self) -> None:
        """Begin to call workers when there are tokens again."""
        if self._buckets.rates:
            self._tries.runtime.start(self._refill, "kafka-marshal-rates")

    def _refill(self) -> None:
        tries = self._tries
        try:
            while not (tries.call.is_over or tries.call.is_ending):
                with self._lock:
                    now = self._now_ms()
                    calls = min(self._owed, self._reopen(now))
                    self._owed -= calls
                    due = self._refills[0][0] if self._refills else inf
                    if not calls:
                        self._sleeps_until = due
                        self._lock.wait(max(0.0, min(LOOK_S, (due - now) / 1000)))
                        self._sleeps_until = -inf
                if calls:
                    tries.workers.wake(calls)
        except BaseException as error:  # noqa: BLE001 - without this thread what waits would not begin
            tries.end(error)

    # What others ask.

    @property
    def is_waiting(self) -> bool:
        """Whether lanes wait."""
        return bool(self._of or self._came)

    def divide(self, consumer: FetchingConsumer[Any]) -> None:
        """Divide the rates of the group by its present members (the driver's lock is held)."""
        for topic, rate in self._buckets.rates.items():
            if rate.of_group:
                self.share(topic, members_of(consumer, {topic} if topic else consumer._engine.subscription.topics))

    def share(self, topic: str, members: int) -> None:
        """This number of members share the rate of a topic now."""
        with self._lock:
            if self._buckets.share(topic, members, self._now_ms()):
                self._refills = []
                for bucket in [each for each in self._buckets.all.values() if each.is_closed]:
                    self._refill_later(bucket)

    @property
    def limits(self) -> tuple[RateLimited, ...]:
        """The rates that limit now (any thread; no lock)."""
        return self._buckets.limits(self._now_ms())


def members_of(consumer: FetchingConsumer[Any], topics: Iterable[str]) -> int:
    """How many members have partitions of these topics, as the log shows it, with this one; at least 1."""
    engine, wanted = consumer._engine, set(topics)
    if consumer._options.settings.sharing is not None:
        shares: dict[Key, Any] = dict(engine.assignments)
        sharers: list[int] = [share.desk.crowd.sharers for key, share in shares.items() if key[0] in wanted]
        return max([1, *sharers])
    member = consumer._driver.engine.groups.get(engine.number)
    if member is None:
        return max(1, holders_of(consumer._driver.engine.peers, wanted))
    pieces = {} if member.member.group is None else member.member.group.pieces
    return max(1, len({slot for topic in wanted & pieces.keys() for slot in pieces[topic].owned()}))
