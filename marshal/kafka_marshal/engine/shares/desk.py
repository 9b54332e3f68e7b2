"""One share: the batches that the log shows as ours, and what is to be settled of them (U9 to U11).

The reader continues from batch to batch by reading if the gap is small, else by a seek. Without a batch to read it
stays at the first offset that no member has taken: that shows how much is free, and is there when we take it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from math import inf
from typing import NamedTuple, Protocol

from kafka_marshal.engine.work.assignment import Tracker
from kafka_marshal.engine.work.open_messages import Goal, Request, SettleRequests
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.engine.work.settlements import CRASHED
from kafka_marshal.engine.work.tracker import Buffer
from kafka_marshal.ports import Message
from rationalizer import Lease, Progress, key_hash
from rationalizer.holes import Hole
from rationalizer.leases.shares import Share
from rationalizer.limits import NOTHING_DONE


class BatchBuffer(Buffer):
    """Messages of our batches, in offset order. ``fetch_next``: the next one from the reader."""

    __slots__ = ("is_ours", "on_drop")

    size: int

    def __init__(self, is_ours: Callable[[int], bool], on_drop: Callable[[int], object]) -> None:
        super().__init__()
        self.is_ours: Callable[[int], bool] = is_ours
        self.on_drop: Callable[[int], object] = on_drop

    def put_back(self, messages: list[Message], covers_from: int) -> None:
        ours = [message for message in messages if self.is_ours(offset_of(message))]
        super().put_back(ours, covers_from)

    def count_to(self, last: int) -> int:
        """How many of the first messages lie at or below an offset."""
        found = 0
        for messages, _ in self._parts:
            if offset_of(messages[-1]) > last:
                return found + sum(offset_of(message) <= last for message in messages)
            found += len(messages)
        return found

    def forget(self, first: int, last: int) -> None:
        """Drop the messages of a batch that is no longer ours; a newer one may have some of them."""
        parts = [
            ([m for m in messages if not first <= (at := offset_of(m)) <= last or self.is_ours(at)], covers)
            for messages, covers in self._parts
        ]
        self._parts.clear()
        self._parts.extend((messages, at) for messages, at in parts if messages)
        self.size = sum(len(messages) for messages, _ in self._parts)

    def take_all(self) -> list[tuple[list[Message], int]]:
        """Take all messages out, as (consecutive messages of one batch, first offset that they cover)."""
        parts = list(self._parts)
        self.clear()
        return parts

    def give_up(self, in_hand_to: int) -> None:
        """Drop the messages of batches that have not begun; the reader fetches them again."""
        self.is_given_up = True
        while self._parts and self._parts[-1][1] > in_hand_to:
            messages, covers_from = self._parts.pop()
            self.size -= len(messages)
            self.on_drop(covers_from)


class BatchTracker(Tracker):
    """Collects what is done, until the desk takes it over."""

    done: Progress

    @property
    def has_news(self) -> bool:
        return True  # the desk knows

    def take_done(self) -> list[tuple[int, int]]:
        """What was done since the last call, as intervals."""
        self.follow()
        done, self.done = self.done, Progress()
        return [(0, done.stable)] * (done.stable >= 0) + list(done.ranges)


#: The reader continues to the next batch by reading if it is at most this many offsets away, else by a seek.
READ_ON = 1_000

#: The most messages that are read ahead of what is taken.
MOST_AHEAD = 4_000


class NewMessages(NamedTuple):
    """What no member has taken yet."""

    offsets: int
    #: How many messages they have, as far as it is known.
    messages: int
    #: The last offset that our reader may read.
    up_to: int
    #: Since when (own clock, ms) the first of them is there; inf: there are none.
    since: float


class Shelf:
    """Called under the shell's lock."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._buffer = seat.buffer
        #: Read, and of no batch here. From ``first`` to ``buffer.fetch_next`` everything was read.
        self.messages: deque[Message] = deque()
        self.first: int = 0
        self._is_resting = False
        #: Where the partition's log starts, if it may be above what is wanted; and where it ends.
        self.low: int = 0
        self._end = 0
        #: (end, when it was first seen): how long new messages have waited.
        self._seen: deque[tuple[int, float]] = deque()
        #: How many messages an offset has, on average of the last reads.
        self._density = 1.0

    def begin(self, offset: int) -> None:
        """Nothing is read; the reader continues there."""
        self.messages.clear()
        self._seen.clear()
        self._buffer.go_on_at(offset)
        self.first = offset
        self._is_resting = False

    def put(self, messages: list[Message], now: float) -> bool:
        """The reader has passed these messages. Returns whether they are new."""
        known = self._buffer.fetch_next
        if offset_of(messages[0]) < known:
            messages = [message for message in messages if offset_of(message) >= known]
            if not messages:
                return False
        last = offset_of(messages[-1])
        if len(messages) > 1:
            self._density += (len(messages) / (last + 1 - offset_of(messages[0])) - self._density) / 4
        self.messages.extend(messages)
        return self.reached(last + 1, now)

    def reached(self, end: int, now: float) -> bool:
        """The reader has passed all offsets below end. Returns whether that is new."""
        if end <= self._buffer.fetch_next:
            return False
        self._buffer.fetch_next = end
        self.ends_at(end, now)
        return True

    def ends_at(self, end: int, now: float) -> None:
        """The log ends there, or later."""
        if end > self._end:
            self._end = end
            self._seen.append((end, now))

    def has(self, offset: int) -> bool:
        """Whether this offset was read."""
        return self.first <= offset < self._buffer.fetch_next

    def take(self, first: int, end: int) -> list[Message]:
        """Take the messages of these offsets; end: exclusive."""
        kept: list[Message] = []
        found: list[Message] = []
        while self.messages and offset_of(self.messages[0]) < end:
            message = self.messages.popleft()
            (found if offset_of(message) >= first else kept).append(message)
        self.messages.extendleft(reversed(kept))
        return found

    def trim(self, below: int) -> None:
        """Drop what other members have taken."""
        while self.messages and offset_of(self.messages[0]) < below:
            self.messages.popleft()
        self.first = max(self.first, min(below, self._buffer.fetch_next))

    def taken_to(self, offset: int) -> None:
        """All offsets up to this one were taken by some member."""
        while self._seen and self._seen[0][0] <= offset + 1:
            self._seen.popleft()

    def move_reader(self, unread: int | None, free: int) -> None:
        """Have the reader continue where something is wanted: at a batch, or at the first offset that is free."""
        if self._buffer.is_given_up:
            return
        target, at = max(free, self.low) if unread is None else unread, self._buffer.fetch_next
        is_read = self.first <= target <= at
        most = min(MOST_AHEAD, self._seat.room_ahead)
        if not is_read and not at < target <= at + READ_ON:
            self.messages.clear()
            self._buffer.fetch_next = self.first = target
            self._is_resting = False
            self._seat.fetch(target)
        elif not is_read or unread is not None or len(self.messages) < most / 2:
            self._rest(False)
        elif len(self.messages) >= most:
            self._rest(True)

    def _rest(self, is_resting: bool) -> None:
        if is_resting != self._is_resting:
            self._is_resting = is_resting
            self._seat.fetch(None if is_resting else self._buffer.fetch_next)

    def new(self, begin: int) -> NewMessages:
        """What is free from this offset on."""
        is_read = self.first <= begin <= self._buffer.fetch_next
        end = max(self._end, self._buffer.fetch_next if is_read else 0, self.low)
        read = len(self.messages) if is_read else 0
        beyond = max(0, end - (self._buffer.fetch_next if is_read else begin))
        messages = read + int(beyond * self._density)
        if self.low > begin:  # retention removed them: they cost a record, and no work
            messages = max(1, messages)
        offsets = max(0, end - begin)
        since = self._seen[0][1] if self._seen and offsets else inf
        return NewMessages(offsets, messages or int(offsets > 0), end - 1, since)

    def offsets_for(self, messages: int, begin: int) -> int:
        """How many offsets from this one on have that number of messages."""
        if self.low > begin:
            return self.low - begin
        if len(self.messages) >= messages and self.first <= begin:
            return max(1, offset_of(self.messages[messages - 1]) + 1 - begin)
        return max(1, round(messages / max(self._density, 0.001)))


#: How many members had a message and did not finish it: from then on it is delivered alone (U10).
ALONE_AFTER = 2

#: At most this number of free holes is counted: more change nothing of when to take and how much (10,000 may be open).
MOST_FREE = 1_000

#: A member that gave a batch back takes nothing of its partition for this long (ms), twice as long each time in a row.
GAVE_BACK_MS = 100.0

#: From this number of times in a row on, with nothing of the partition done between, that is said.
GAVE_BACK_OFTEN = 10


class Given:
    """A batch that the log shows as ours."""

    __slots__ = ("attempts", "begun_at", "covered_to", "first", "given_at", "last", "next", "token")

    def __init__(self, token: int, first: int, last: int, attempts: int, now: float) -> None:
        #: When we saw that (own clock, ms).
        self.given_at: float = now
        #: The offset of the record that gave it: the fencing token.
        self.token: int = token
        self.first: int = first
        self.last: int = last
        self.attempts: int = attempts
        #: The next offset to be read.
        self.next: int = first
        #: The first offset that no message covers yet.
        self.covered_to: int = first
        #: When (own clock, ms) its first message was delivered; None: none was.
        self.begun_at: float | None = None

    @property
    def size(self) -> int:
        """How many offsets it has."""
        return self.last - self.first + 1

    @property
    def unread(self) -> int:
        """How many of them are still to be read."""
        return self.last + 1 - self.next

    @property
    def is_alone(self) -> bool:
        """Whether nothing else is in flight while it is (U10)."""
        return self.attempts > ALONE_AFTER


class Crowd(NamedTuple):
    """The sharers of a partition, and what they have left; both numbers with us."""

    sharers: int = 1
    #: Those without a batch.
    idle: int = 1
    #: Offsets that were given to sharers before, and are free again; and since when (own clock, ms) some are.
    again: int = 0
    since: float = inf
    #: The first of those offsets; None: there are none.
    first: int | None = None
    #: When (own clock, ms) another sharer may be silent.
    look_at: float = inf


class Seat(Protocol):
    """The assignment of a desk."""

    buffer: BatchBuffer
    tracker: BatchTracker

    @property
    def room_ahead(self) -> int:
        """How many messages there is memory for, ahead of what is taken."""

    def fetch(self, offset: int | None) -> None:
        """Have the reader continue there; None: have it rest."""

    def has_more(self) -> None:
        """There is something to deliver."""

    def lost_in_log(self, first: int, last: int) -> None:
        """These offsets are gone from the log."""

    def aside(self, offset: int, attempts: int, reason: str) -> None:
        """A message of a batch is set aside."""

    def disown(self) -> None:
        """Others may have what is in flight, and that was no failed delivery (U11)."""

    def never_delivered(self, first: int, last: int) -> None:
        """Report what is done for the log, and will be delivered to no member."""

    def silent_in(self, share: Share) -> float:
        """In how many ms a share will be silent, unless it beats; below 0: the next take ends it."""


class Desk:
    """Called under the shell's lock."""

    def __init__(self, seat: Seat, max_deliveries: int) -> None:
        self._seat = seat
        self._max_deliveries = max_deliveries
        self.settling: SettleRequests = SettleRequests()
        self.shelf: Shelf = Shelf(seat)
        #: Token → batch.
        self.given: dict[int, Given] = {}
        self.crowd: Crowd = Crowd()
        #: Until when (own clock, ms) nothing is taken, as batches were given back: how often in a row, and how many
        #: messages had been done before.
        self.rests_until: float = 0.0
        self._gave_back = self._done_before = 0
        #: What the last take gave, or will give, may wait for a handler.
        self.is_ahead: bool = False
        self._epoch = -1
        self._stable = NOTHING_DONE

    # What the log shows.

    def begin(self, epoch: int, stable: int) -> None:
        """Begin, with nothing read."""
        self.settling.owner = self._epoch = epoch
        self._stable = stable
        self.given.clear()
        self.shelf.begin(stable + 1)

    def look(self, lease: Lease | None, now: float) -> None:
        """Take over what our replica shows of the partition."""
        if lease is None:
            return
        holes = lease.progress.holes
        self.settling.look(lease.progress)
        self._stable = lease.progress.stable
        self._take_over([] if holes is None else holes.of(self._epoch), now)
        self.crowd = self._seen(lease, now)
        self.shelf.taken_to(self._stable)
        self.serve()

    def _take_over(self, ours: list[Hole], now: float) -> None:
        spans: dict[int, tuple[int, int, int]] = {}
        for hole in ours:
            first, last, _ = spans.get(hole.since, (hole.first, hole.last, 0))
            spans[hole.since] = min(first, hole.first), max(last, hole.last), hole.attempts
        for token in [token for token in self.given if token not in spans]:
            gone = self.given.pop(token)
            self._seat.buffer.forget(gone.first, gone.last)
        for token, (first, last, attempts) in spans.items():
            if token not in self.given:
                self.given[token] = Given(token, first, last, attempts, now)

    def took(self, token: int, first: int, last: int, now: float) -> None:
        """A take of this member was applied: the log shows these offsets as ours."""

    def _seen(self, lease: Lease, now: float) -> Crowd:
        others = [] if lease.shares is None else [share for share in lease.shares if share.epoch != self._epoch]
        left = {share.epoch: self._seat.silent_in(share) for share in others}
        live = {epoch for epoch, ms in left.items() if ms >= 0}
        holes = lease.progress.holes
        if holes is None:
            return Crowd(len(live) + 1, len(live) + 1)
        owners = set(holes.owners())
        found = [*islice(holes.free(), MOST_FREE), *(x for owner in left.keys() - live for x in holes.of(owner))]
        again = sum(hole.last - hole.first + 1 for hole in found)
        first = min((hole.first for hole in found), default=None)
        since = (self.crowd.since if self.crowd.again else now) if again else inf
        look_at = now + max(1.0, min((left[epoch] for epoch in live & owners), default=inf))
        return Crowd(len(live) + 1, len(live - owners) + 1, again, since, first, look_at)

    # What is read.

    def fetched(self, messages: list[Message], now: float) -> None:
        """The reader has passed these messages."""
        if self.shelf.put(messages, now):
            self.serve()

    def reached(self, end: int, now: float) -> None:
        """The reader has passed all offsets below end."""
        if self.shelf.reached(end, now):
            self.serve()

    def serve(self) -> None:
        """Move what is read into batches, drop what other members have, and move the reader on."""
        for given in sorted(self.given.values(), key=_first):
            if given.unread and self.shelf.low > given.next:
                self._pass_below_start(given)
            if given.unread and self.shelf.has(given.next):
                self._fill(given)
        unread = min((given.next for given in self.given.values() if given.unread), default=None)
        free = self._stable + 1 if self.crowd.first is None else self.crowd.first
        self.shelf.trim(free if unread is None or unread < self.shelf.first else min(free, unread))
        self.shelf.move_reader(unread, free)

    def _pass_below_start(self, given: Given) -> None:
        last = min(self.shelf.low - 1, given.last)
        self._seat.lost_in_log(given.next, last)
        self._done(given.covered_to, last)
        given.next = given.covered_to = last + 1

    def _fill(self, given: Given) -> None:
        end = min(given.last + 1, self._seat.buffer.fetch_next)
        found = self.shelf.take(given.next, end)
        given.next = end
        if found:
            if given.attempts > self._max_deliveries:
                for message in found:
                    self._set_aside(message, given.attempts)
            else:
                self._seat.buffer.put_back(found, given.covered_to)
                self._seat.has_more()
            given.covered_to = offset_of(found[-1]) + 1
        if not given.unread and given.covered_to <= given.last:
            self._done(given.covered_to, given.last)  # Kafka never delivers these (P6)
            given.covered_to = given.last + 1

    def _done(self, first: int, last: int) -> None:
        self.settling.want(Request(first, last, Goal.DONE, None))

    def _set_aside(self, message: Message, attempts: int) -> None:
        offset, key = offset_of(message), message.key()
        of = key_hash(key.encode() if isinstance(key, str) else key, offset)
        self.settling.want(Request(offset, offset, Goal.PARKED, of, attempts, CRASHED))
        self._seat.aside(offset, attempts, CRASHED)

    def unread(self, first: int) -> None:
        """Messages from this offset on were dropped: their batch is read again from there."""
        if (given := self.at(first)) is not None:
            given.next = given.covered_to = min(given.next, first)

    # What is delivered.

    def at(self, offset: int) -> Given | None:
        """The batch that has this offset; None: it is not ours. The newest: an older one may have given it back."""
        return next((each for each in reversed(self.given.values()) if each.first <= offset <= each.last), None)

    @property
    def left(self) -> int:
        """How many messages of our batches are not done, as far as it is known."""
        unread = sum(given.unread for given in self.given.values())
        return self._seat.tracker.in_hand + self._seat.buffer.size + unread

    @property
    def free_from(self) -> int:
        """The first offset that no member has taken."""
        return self._stable + 1

    def offsets_for(self, messages: int) -> int:
        """How many of the free offsets have that number of messages."""
        return messages if self.crowd.again else self.shelf.offsets_for(messages, self.free_from)

    # The result of it.

    def settle(self) -> None:
        """Want the log to show what is done."""
        for first, last in self._seat.tracker.take_done():
            self._done(first, last)

    def gave_back(self, longest_ms: float, now: float) -> bool:
        """The program gave a batch back, which is not taken again at once. Returns whether it often did."""
        done = self._seat.tracker.moved.done
        self._gave_back = self._gave_back + 1 if done == self._done_before else 1
        self._done_before = done
        self.rests_until = now + min(GAVE_BACK_MS * 2 ** min(self._gave_back - 1, 20), longest_ms)
        return self._gave_back >= GAVE_BACK_OFTEN

    def give_back(self, first: int, last: int, *, counts: bool) -> None:
        """Have others take these offsets. counts: as one delivery, since a handler did not end in time (U11)."""
        given = self.at(first)
        if given is None:
            return
        attempts = given.attempts if counts else given.attempts - 1
        self.settle()
        for low, high in self.settling.not_done(first, min(last, given.last)):  # handlers finish in any order
            self.settling.want(Request(low, high, Goal.OPEN, None, attempts))

    def give_back_rest(self) -> None:
        """Give back what has not begun: what waits to be delivered, and what was not read."""
        for messages, covers_from in self._seat.buffer.take_all():
            self.give_back(covers_from, offset_of(messages[-1]), counts=False)
        for given in self.given.values():
            if given.covered_to <= given.last:
                self.give_back(given.covered_to, given.last, counts=False)
                given.next = given.covered_to = given.last + 1

    def end(self) -> None:
        """The share ends: others may have what is not done."""
        self.settle()
        self._seat.disown()
        self.give_back_rest()


class OnceDesk(Desk):
    """At most once: what a take gives is done for the log, and nothing of it comes back."""

    def _take_over(self, ours: list[Hole], now: float) -> None:
        pass

    def took(self, token: int, first: int, last: int, now: float) -> None:
        self.given[token] = Given(token, first, last, 1, now)

    def _done(self, first: int, last: int) -> None:
        pass

    def gave_back(self, longest_ms: float, now: float) -> bool:
        return False

    def give_back(self, first: int, last: int, *, counts: bool) -> None:
        pass

    def end(self) -> None:
        for messages, covers_from in self._seat.buffer.take_all():
            self._seat.never_delivered(covers_from, offset_of(messages[-1]))
        for given in self.given.values():
            if given.covered_to <= given.last:
                self._seat.never_delivered(given.covered_to, given.last)
        self.given.clear()


def _first(given: Given) -> int:
    return given.first
