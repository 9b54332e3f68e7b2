"""The open messages of one assignment: offsets that progress has passed, or will, and that are not done (H1).

An owner fetches those that it finds before anything else, by going back to each (U3). It logs tries that wait, and what
is set aside; its progress passes such an offset only when the log shows it (U4).

What it wants the log to show is a request: sent with the heartbeats until the replica shows it, or shows that it has no
object any more (U4). The holder of the messages, a whole partition or a part of it, decides what follows then.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from math import inf
from operator import attrgetter
from typing import NamedTuple, Protocol

from kafka_marshal.engine.plane import Settles
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.engine.work.tracker import Buffer
from kafka_marshal.ports import Message
from kafka_marshal.types import due_of, reason_until
from rationalizer import Progress, codes, key_hash
from rationalizer.holes import NO_KEY, NO_OWNER, Hole
from rationalizer.limits import MAX_HOLES, MAX_OFFSET
from rationalizer.wire.records import Done, Opened, Parked

#: Entries of one record. With the longest reasons they stay below the 900,000 bytes of L1.
MAX_ENTRIES = 5_000


class Goal(StrEnum):
    """What the log is to show of some offsets."""

    DONE = "done"
    OPEN = "open"
    PARKED = "parked"


class Request(NamedTuple):
    """What the log is to show of the offsets first … last."""

    first: int
    last: int
    kind: Goal
    #: None: of a batch, whose holes have none.
    key_hash: int | None
    attempts: int = 0
    #: Why it is parked.
    reason: str = ""


class SettledRequest(NamedTuple):
    """A request that is fulfilled, or that has no object any more."""

    request: Request
    #: Whether the log shows what was wanted. Else another client has settled, parked or taken these offsets meanwhile.
    is_shown: bool


class Entries(NamedTuple):
    """Entries of one record."""

    done: Done = ()
    open: Opened = ()
    parked: Parked = ()


class SettleRequests:
    """The requests for one partition. Called under the shell's lock."""

    __slots__ = ("_sent", "_requests", "owner")

    def __init__(self, owner: int = NO_OWNER) -> None:
        """owner: the epoch of a share by batches, whose holes these are."""
        self.owner: int = owner
        #: First offset → request.
        self._requests: dict[int, Request] = {}
        #: First offset → what was sent of it and is not applied yet, and when (own clock, ms).
        self._sent: dict[int, tuple[Request, float]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def want(self, request: Request) -> None:
        """Want this of the log, and nothing that was wanted of its first offset before.

        It waits for our record about this offset that is under way: that changes the hole after ``seen`` (H2).
        """
        if self._requests.get(request.first) != request:
            self._requests[request.first] = request
            if self.owner != NO_OWNER:
                self._sent.pop(request.first, None)

    def of(self, first: int) -> Request | None:
        """What is wanted of this offset; None: nothing."""
        return self._requests.get(first)

    def forget(self, first: int) -> None:
        """Want nothing of this offset."""
        self._requests.pop(first, None)
        self._sent.pop(first, None)

    def not_done(self, first: int, last: int) -> list[tuple[int, int]]:
        """These offsets, without those that are wanted as done."""
        found: list[tuple[int, int]] = []
        for request in sorted(self._requests.values(), key=attrgetter("first")):
            if request.kind is Goal.DONE and request.first <= last and request.last >= first:
                found.append((first, request.first - 1))
                first = request.last + 1
        found.append((first, last))
        return [(low, high) for low, high in found if low <= high]

    def new_parks(self, progress: Progress | None) -> list[int]:
        """The offsets that are to be set aside, and do not wait as a free hole: each makes one hole more."""
        holes = None if progress is None else progress.holes
        wanted = [request.first for request in self._requests.values() if request.kind is Goal.PARKED]
        found = [None if holes is None else holes.at(offset) for offset in wanted]
        is_alone = [
            hole is not None and hole.owner == NO_OWNER and not hole.is_parked and hole.first == hole.last
            for hole in found
        ]
        return [offset for offset, alone in zip(wanted, is_alone, strict=True) if not alone]

    def beyond_limit(self, progress: Progress | None) -> list[int]:
        """The offsets whose entries would be rejected: a partition has as many holes as it may have (H5)."""
        holes = None if progress is None else progress.holes
        if holes is None or len(holes) + 2 * len(self._requests) <= MAX_HOLES:
            return []
        room, found = max(0, MAX_HOLES - len(holes)), []
        for first in sorted(self._requests):
            request = self._requests[first]
            if request.kind is not Goal.DONE:
                key_hash = NO_KEY if request.key_hash is None else request.key_hash
                reason = request.reason if request.kind is Goal.PARKED else None
                hole = Hole(first, request.last, NO_OWNER, MAX_OFFSET, request.attempts, key_hash, reason)
                _, growth = holes.plan(first, request.last, [hole])
                if growth > room:
                    found.append(first)
                else:
                    room -= max(0, growth)
        return found

    def give_back(self, first: int) -> None:
        """Others may have this offset of a batch, which was to be set aside."""
        self.want(self._requests[first]._replace(kind=Goal.OPEN, key_hash=None))

    def entries(
        self, progress: Progress | None, now: float, again_ms: float, held: Collection[int] = ()
    ) -> Entries | None:
        """What to send now; None: nothing. What was sent this long ago, and is not shown, is sent again.

        ``held``: offsets of which nothing is sent at present.
        """
        if not self._requests:
            return None
        done: list[tuple[int, int]] = []
        opened: list[tuple[int, int, int | None, int]] = []
        parked: list[tuple[int, int, int, str]] = []
        for first in sorted(self._requests):
            request = self._requests[first]
            if now < self._sent_at(first) + again_ms or first in held:
                continue
            if request.kind is Goal.DONE:
                # Where there is no hole yet, an entry would be rejected: ours that makes it may be under way.
                found = self._holes(progress, request)
                if not found:
                    continue
                for part in found:
                    if done and done[-1][1] + 1 == part[0]:
                        part = (done.pop()[0], part[1])
                    done.append(part)
            elif request.kind is Goal.OPEN:
                spans = [(first, request.last)]
                if self.owner != NO_OWNER:  # an entry that names what is done is rejected whole (H3)
                    spans = self._holes(progress, request)
                opened += [(low, high, request.key_hash, request.attempts) for low, high in spans]
            else:
                parked.append((first, request.key_hash or 0, request.attempts, request.reason))
            self._sent[first] = request, now
            if len(done) + len(opened) + len(parked) >= MAX_ENTRIES:
                break
        if not (done or opened or parked):
            return None
        return Entries(tuple(done), tuple(opened), tuple(parked))

    def _sent_at(self, first: int) -> float:
        return self._sent[first][1] if first in self._sent else -inf

    def _is_behind(self, request: Request) -> bool:
        """Whether a record of ours that wants something else of the same offset is under way."""
        sent = self._sent.get(request.first)
        return sent is not None and sent[0] != request

    @property
    def behind_since(self) -> float:
        """When the last of the records was sent that others of these requests wait for (ms); −inf: there is none."""
        return max((self._sent_at(x.first) for x in self._requests.values() if self._is_behind(x)), default=-inf)

    def _holes(self, progress: Progress | None, request: Request) -> list[tuple[int, int]]:
        """The parts of these offsets that lie in our holes."""
        if progress is None or progress.holes is None:
            return []
        parts = progress.holes.parts(request.first, request.last)
        return [(low, high) for low, high, hole in parts if hole is not None and hole.owner == self.owner]

    def look(self, progress: Progress | None) -> list[SettledRequest]:
        """Remove and return the requests that the log fulfils, or that have no object any more."""
        found: list[SettledRequest] = []
        for request in list(self._requests.values()):
            if (is_shown := self._is_shown(progress, request)) is not None:
                self.forget(request.first)
                found.append(SettledRequest(request, is_shown))
        return found

    def _is_shown(self, progress: Progress | None, request: Request) -> bool | None:
        """Whether the log shows this; None: not yet, and it still may."""
        if progress is None or self._is_behind(request):
            return None
        holes = progress.holes
        parts = [(request.first, request.last, None)] if holes is None else holes.parts(request.first, request.last)
        shown: bool | None = True
        for low, high, hole in parts:
            if hole is None:
                is_passed = all(progress.has_passed(each, request.key_hash) for each in {low, high})
                answer = (request.kind is Goal.DONE) if is_passed else None
            elif hole.owner != self.owner:
                answer = False
            elif request.kind is Goal.DONE or self.owner != NO_OWNER:  # a batch is ours until the log says otherwise
                answer = None
            elif request.kind is Goal.PARKED:
                is_same = hole.reason == request.reason and hole.attempts == request.attempts
                answer = hole.is_parked or is_same or None
            else:
                is_same = hole.is_free and hole.attempts == request.attempts
                answer = False if hole.is_parked else is_same or None
            if answer is None:
                return None
            shown = shown and answer
        return shown

    def refused(self, entries: Settles, answers: Sequence[str]) -> list[tuple[int, str]]:
        """Our record was applied, after ``look``: offsets whose entries were rejected, with the codes.

        What is still wanted of them is sent again with the next heartbeat.
        """
        firsts = [entry[0] for part in (entries.done, entries.open, entries.parked) for entry in part]
        found = [(first, code) for first, code in zip(firsts, answers, strict=False) if code != codes.OK]
        refused = {first for first, _ in found}
        for first in firsts:
            request = self._requests.get(first)
            if first in refused or request is None or self._is_behind(request):
                self._sent.pop(first, None)
        return found


#: After a death: most messages whose tries are in the log at a time, and how many are logged after one death in all.
MOST_AHEAD = 256
MOST_WARY = 10_000
#: And how often (ms) twice as many are logged, if none ends.
GROWS_MS = 1_000.0

#: The reader continues to the next open message by reading if it is at most this many offsets away, else by a seek.
READ_ON = 1_000


class Mine(NamedTuple):
    """Offsets that are open in the log, or are to be, and that this member has fetched or will fetch."""

    first: int
    last: int
    #: None: of a batch.
    key_hash: int | None
    attempts: int
    #: When (log time, ms) the next try may begin; None: at once.
    until: int | None = None


class Try(NamedTuple):
    """A message whose tries are to be logged."""

    offset: int
    #: How many tries have begun.
    attempts: int
    key_hash: int


def hash_of(message: Message) -> int:
    """Where a message lies among the key hashes of its partition (K1)."""
    key = message.key()
    return key_hash(key.encode() if isinstance(key, str) else key, offset_of(message))


class Wary(NamedTuple):
    """Messages of a run that were in flight, perhaps, when an earlier owner died."""

    #: Offset → how many tries had begun before.
    tried: Mapping[int, int]
    #: Begun one after another, with nothing else in flight: their tries were logged before, and did not end.
    alone: Sequence[int]
    #: Set aside: too many tries of them have begun.
    crashed: Collection[int]


class Holder(Protocol):
    """An assignment, as its open messages see it."""

    buffer: Buffer

    @property
    def is_read(self) -> bool:
        """Whether the reader fetches it."""

    def open_in_log(self, first: int, last: int) -> None:
        """The log shows these offsets as open: progress passes them."""

    def skip(self, offset: int) -> None:
        """This message was set aside by an operator: no handler gets it again."""

    def admit(self, offset: int, redriven: int | None = None) -> None:
        """The log has the try of this message that is about to begin, or shows that it has ended.

        redriven: an operator ends its wait; how many of its tries count.
        """

    def refetch(self) -> None:
        """Have the reader continue at ``fetch_from``."""


class OpenOffsets:
    """What is open of one partition for one owner. Called under the shell's lock."""

    __slots__ = (
        *("_holder", "_lasts", "_mine", "ahead", "aside", "gone", "is_full", "is_urgent", "reading", "settling"),
        *("grows_at", "tried", "waiting", "window"),
    )

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self.settling: SettleRequests = SettleRequests()
        #: Last offset → what is open here; the last offsets, ascending.
        self._mine: dict[int, Mine] = {}
        self._lasts: list[int] = []
        #: What is to be fetched, ascending.
        self.reading: list[Mine] = []
        #: Set aside, and not shown by the log yet: offset → the first offset that it covers.
        self.aside: dict[int, int] = {}
        #: What was open and is gone from the log, as (first, last); the caller reports and clears it.
        self.gone: list[tuple[int, int]] = []
        #: The log takes no more of this partition: nothing more of it is handed out until some are done (H5).
        self.is_full: bool = False
        #: Offset → tries that the log shows, of what is fetched.
        self.tried: dict[int, int] = {}
        #: Messages whose first try here waits for the log, or has not ended → whether that was logged.
        self.ahead: dict[int, bool] = {}
        #: First tries that wait for others to end; how many may be logged at a time: one more for each that ends.
        self.waiting: deque[Try] = deque()
        self.window: float = 0
        #: When (own clock, ms) more may be logged though none has ended: a handler that hangs stops no other key.
        self.grows_at: float = inf
        #: Such a message has ended: the log is to show that at once, for the next death would count against it.
        self.is_urgent: bool = False

    # The log.

    def begin(self, holes: Iterable[Hole]) -> None:
        """Begin with what the log shows as open, of our keys."""
        self._mine.clear()
        self._lasts.clear()
        self.reading.clear()
        self.tried.clear()
        self.ahead.clear()
        self.waiting.clear()
        self.window = 0
        for request in [each for each in self.settling if each.kind is Goal.OPEN or due_of(each.reason) is not None]:
            self.settling.forget(request.first)
        for hole in holes:
            self._meet(hole, hole.first, hole.last)

    def applied(self, progress: Progress | None, entries: Settles, is_ours: Callable[[int], bool]) -> None:
        """A record with these entries was applied. is_ours: whether a key hash is one of our keys."""
        before = self._wanted
        self.look(progress)
        if progress is None:
            return
        touched = [*entries.done, *((entry[0], entry[1]) for entry in entries.open)]
        touched += [(entry[0], entry[0]) for entry in entries.parked]
        for first, last in touched:
            holes = progress.holes
            for low, high, hole in [(first, last, None)] if holes is None else holes.parts(first, last):
                if hole is None:
                    self._closed(low, high)
                elif hole.key_hash == NO_KEY or is_ours(hole.key_hash):
                    self._meet(hole, low, high)
        if self._wanted < before or (not self.reading and before < inf):
            self.seek()  # without it, what lies below the reader would count as gone

    @property
    def _wanted(self) -> float:
        """The lowest offset to be fetched; inf: there is none."""
        return self.reading[0].first if self.reading else inf

    def look(self, progress: Progress | None) -> None:
        """Progress passes what the log shows as open."""
        for settled in self.settling.look(progress):
            self._settled(settled)

    def refused(self, entries: Settles, answers: Sequence[str]) -> list[tuple[int, str]]:
        """Our own record was applied: the rejected offsets, with the codes."""
        refused = self.settling.refused(entries, answers)
        self.is_full = self.is_full or any(code == codes.MAX_INDIVIDUAL_COMMIT_REACHED for _, code in refused)
        return refused

    def _settled(self, settled: SettledRequest) -> None:
        request, is_shown = settled
        if request.kind is not Goal.OPEN:
            self._holder.admit(request.last)
        if request.kind is Goal.PARKED:
            self._holder.open_in_log(self.aside.pop(request.first, request.first), request.last)
        elif request.kind is Goal.OPEN:
            self._holder.open_in_log(request.first, request.last)
            self._holder.admit(request.first)
            if not is_shown:
                _skip(self, request.first)

    def _meet(self, hole: Hole, first: int, last: int) -> None:
        """The log shows these offsets in a hole of our keys."""
        self._holder.open_in_log(first, last)
        if hole.is_parked:
            if first in self._mine:
                self._holder.buffer.drop_open(first, last)
                _skip(self, first)
            self._stop_reading(first, last)
        elif hole.owner == NO_OWNER:
            hashed = None if hole.key_hash == NO_KEY else hole.key_hash
            at = first
            for mine in self._within(first, last):
                if at < mine.first:
                    self._read(Mine(at, mine.first - 1, hashed, hole.attempts))
                at = mine.last + 1
                if mine.until is not None and hole.is_free and self.settling.of(mine.first) is None:
                    self._hasten(mine, hole.attempts)
            if at <= last and self.settling.of(at) is None:
                self._read(Mine(at, last, hashed, hole.attempts, due_of(hole.reason)))

    def _hasten(self, mine: Mine, attempts: int) -> None:
        """An operator has this message tried now, with all its tries."""
        self._add(mine._replace(attempts=attempts, until=None))
        self.tried[mine.last] = attempts
        self._holder.admit(mine.last, attempts)

    def _closed(self, first: int, last: int) -> None:
        """These offsets are no longer open: done, by this member or by an operator."""
        self._stop_reading(first, last)
        self._holder.buffer.drop_open(first, last)
        for mine in [x for x in self._within(first, last) if x.last <= last]:
            _skip(self, mine.last)
        self.is_full = False

    def _within(self, first: int, last: int) -> list[Mine]:
        place, found = bisect_left(self._lasts, first), []
        while place < len(self._lasts) and (mine := self._mine[self._lasts[place]]).first <= last:
            found.append(mine)
            place += 1
        return found

    def _add(self, mine: Mine) -> None:
        if mine.last not in self._mine:
            insort(self._lasts, mine.last)
        self._mine[mine.last] = mine

    def _remove(self, last: int) -> Mine | None:
        mine = self._mine.pop(last, None)
        if mine is not None:
            del self._lasts[bisect_left(self._lasts, last)]
            self.tried.pop(last, None)
            self.window += self.ahead.pop(last, False)
        return mine

    # Reading.

    def _read(self, wanted: Mine) -> None:
        self._stop_reading(wanted.first, wanted.last)
        insort(self.reading, wanted)

    def _stop_reading(self, first: int, last: int) -> None:
        reading = self.reading
        begin = bisect_right(reading, first, key=attrgetter("first"))
        begin -= begin > 0 and reading[begin - 1].last >= first
        end = bisect_right(reading, last, begin, key=attrgetter("first"))
        if begin < end:
            left, right = reading[begin], reading[end - 1]
            kept = [left._replace(last=first - 1)] if left.first < first else []
            kept += [right._replace(first=last + 1)] if last < right.last else []
            reading[begin:end] = kept

    def seek(self) -> None:
        """Have the reader continue where something is wanted."""
        if self._holder.is_read:
            self._holder.refetch()

    def put(self, messages: Iterable[Message]) -> None:
        """Take in what was fetched on the way back to open messages."""
        at = 0
        for message in messages:
            offset = offset_of(message)
            at = offset + 1
            self._pass(offset)
            if not self.reading:
                break
            wanted = self.reading[0]
            if offset < wanted.first:
                continue
            self._add(wanted._replace(last=offset))
            self.tried[offset] = wanted.attempts
            self._holder.buffer.put_open(message, wanted.first, is_early=wanted.until is not None)
            self.reading[0] = wanted._replace(first=offset + 1)
            if offset == wanted.last:
                del self.reading[0]
        if not self.reading or self.reading[0].first > at + READ_ON:
            self.seek()

    def reached(self, end: int) -> None:
        """The reader has passed all offsets below end, on the way back to open messages."""
        self._pass(end)
        if not self.reading:
            self.seek()

    def below(self, log_start: int) -> None:
        """What lies below the log's start is gone."""
        self._pass(log_start)

    def _pass(self, end: int) -> None:
        """What is wanted below end never comes: it is settled as done."""
        while self.reading and self.reading[0].first < end:
            wanted = self.reading[0]
            last = min(wanted.last, end - 1)
            self.settling.want(Request(wanted.first, last, Goal.DONE, wanted.key_hash))
            self.gone.append((wanted.first, last))
            self.reading[0] = wanted._replace(first=last + 1)
            if last == wanted.last:
                del self.reading[0]

    # What happens to messages here.

    def done(self, messages: Sequence[Message]) -> None:
        """These messages are done."""
        if self._mine:
            for message in messages:
                offset = offset_of(message)
                self.is_urgent = self.is_urgent or offset in self.ahead
                if (mine := self._remove(offset)) is not None:
                    self.settling.want(Request(mine.first, mine.last, Goal.DONE, mine.key_hash))

    def log_tries(self, tries: Iterable[Try], *, are_ahead: bool = False) -> None:
        """Have these tries in the log, if it does not show them. are_ahead: they begin when it does."""
        for offset, attempts, hashed in tries:
            mine = self._mine.get(offset)
            self.window += self.ahead.pop(offset, False)
            if are_ahead:
                self.ahead[offset] = True
            if mine is not None and mine.until is not None and attempts <= mine.attempts:
                continue  # it waits for its time, or has begun at it
            if offset not in self.aside and (mine is None or mine.attempts != attempts):
                self._add(Mine(offset, offset, hashed, attempts))
                self.tried[offset] = attempts
                self.settling.want(Request(offset, offset, Goal.OPEN, hashed, attempts))

    def log_next(self, offset: int, hashed: int) -> bool:
        """Have another try of an open message in the log, before it begins. False: that is under way, or not open."""
        mine = self._mine.get(offset)
        if mine is None or self.settling.of(offset) is not None:
            return False
        self.log_tries([Try(offset, mine.attempts + 1, hashed)], are_ahead=True)
        return True

    def later(self, offset: int, hashed: int, attempts: int, due: float) -> None:
        """Have the log show that the next try of this message waits until then (log time, ms)."""
        self.is_urgent = self.is_urgent or offset in self.ahead
        reason, mine = reason_until(due), self._remove(offset)
        self._add(Mine(offset if mine is None else mine.first, offset, hashed, attempts, due_of(reason)))
        self.tried[offset] = attempts
        self.settling.want(Request(offset, offset, Goal.PARKED, hashed, attempts, reason))

    def park(self, offset: int, covers_from: int, hashed: int, attempts: int, reason: str) -> None:
        """Set a message aside."""
        self.is_urgent = self.is_urgent or offset in self.ahead
        mine = self._remove(offset)
        self.aside[offset] = covers_from if mine is None else min(covers_from, mine.first)
        self.settling.want(Request(offset, offset, Goal.PARKED, hashed, attempts, reason))


def _skip(opened: OpenOffsets, offset: int) -> None:
    """An operator has settled this message: no handler gets it again, and nothing more is logged of it."""
    opened._remove(offset)
    opened.waiting = deque(x for x in opened.waiting if x.offset != offset)
    opened._holder.skip(offset)


def is_mine(opened: OpenOffsets, offset: int) -> bool:
    """Whether this message is open in the log, or is to be, and was fetched here."""
    return offset in opened._mine


def waits_until(opened: OpenOffsets | None, offset: int) -> int | None:
    """When (log time, ms) this message may be tried; None: at once."""
    mine = None if opened is None else opened._mine.get(offset)
    return None if mine is None else mine.until


def last_fetched(opened: OpenOffsets) -> int:
    """The last offset that was fetched here and is open in the log, or is to be; −1: there is none."""
    return opened._lasts[-1] if opened._lasts else -1


def take_back(opened: OpenOffsets, messages: Iterable[Message]) -> bool:
    """No handler has these: tries of them that were logged ahead do not count. Returns whether there are such tries."""
    found = [offset for offset in map(offset_of, messages) if offset in opened.ahead]
    has_waiting = bool(opened.waiting)
    opened.waiting.clear()
    for offset in found:
        mine = opened._mine.get(offset)
        if opened.ahead.pop(offset) and mine is not None and mine.key_hash is not None:
            opened.log_tries([Try(offset, mine.attempts - 1, mine.key_hash)])
    return bool(found) or has_waiting


def log_waiting(opened: OpenOffsets, concurrency: int, is_here: Callable[[int], object]) -> bool:
    """Log as many first tries as may be under way after a death (U1). Returns whether there are such.

    is_here: whether this message is still in flight.
    """
    window = opened.window = max(opened.window, concurrency)
    free = (window if window == inf else min(window, MOST_AHEAD)) - sum(opened.ahead.values())
    chosen: list[Try] = []
    while opened.waiting and len(chosen) < free:
        if is_here(opened.waiting[0].offset):
            chosen.append(opened.waiting[0])
        opened.waiting.popleft()
    opened.log_tries(chosen, are_ahead=True)
    return bool(chosen)
