"""What one client wants the log to show of open messages, and what of that it has to send (again).

A request is sent with the heartbeats until the replica shows it, or shows that it has no object any more (U4). The
holder of the messages, a whole partition or a part of it, decides what follows then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from math import inf
from typing import NamedTuple

from kafka_marshal.engine.plane import Settles
from rationalizer import Progress, codes
from rationalizer.holes import NO_KEY, NO_OWNER, Hole
from rationalizer.limits import MAX_HOLES, MAX_OFFSET
from rationalizer.wire.records import Done, Opened, Parked

#: Entries of one record. With the longest reasons they stay below the 900,000 bytes of L1.
MAX_ENTRIES = 5_000


class Kind(StrEnum):
    """What the log is to show of some offsets."""

    DONE = "done"
    OPEN = "open"
    PARKED = "parked"


class Request(NamedTuple):
    """What the log is to show of the offsets first … last."""

    first: int
    last: int
    kind: Kind
    #: None: of a batch, whose holes have none.
    key_hash: int | None
    attempts: int = 0
    #: Why it is parked.
    reason: str = ""


class Settled(NamedTuple):
    """A request that is fulfilled, or that has no object any more."""

    request: Request
    #: Whether the log shows what was wanted. Else another client has settled, parked or taken these offsets meanwhile.
    is_shown: bool


class Entries(NamedTuple):
    """Entries of one record."""

    done: Done = ()
    open: Opened = ()
    parked: Parked = ()


class Settling:
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
        for request in sorted(self._requests.values(), key=_first_of):
            if request.kind is Kind.DONE and request.first <= last and request.last >= first:
                found.append((first, request.first - 1))
                first = request.last + 1
        found.append((first, last))
        return [(low, high) for low, high in found if low <= high]

    def new_parks(self, progress: Progress | None) -> list[int]:
        """The offsets that are to be set aside, and do not wait as a free hole: each makes one hole more."""
        holes = None if progress is None else progress.holes
        wanted = [request.first for request in self._requests.values() if request.kind is Kind.PARKED]
        found = [None if holes is None else holes.at(offset) for offset in wanted]
        is_alone = [hole is not None and hole.is_free and hole.first == hole.last for hole in found]
        return [offset for offset, alone in zip(wanted, is_alone, strict=True) if not alone]

    def beyond_limit(self, progress: Progress | None) -> list[int]:
        """The offsets whose entries would be rejected: a partition has as many holes as it may have (H5)."""
        holes = None if progress is None else progress.holes
        if holes is None or len(holes) + 2 * len(self._requests) <= MAX_HOLES:
            return []
        room, found = max(0, MAX_HOLES - len(holes)), []
        for first in sorted(self._requests):
            request = self._requests[first]
            if request.kind is not Kind.DONE:
                key_hash = NO_KEY if request.key_hash is None else request.key_hash
                reason = request.reason if request.kind is Kind.PARKED else None
                hole = Hole(first, request.last, NO_OWNER, MAX_OFFSET, request.attempts, key_hash, reason)
                _, growth = holes.plan(first, request.last, [hole])
                if growth > room:
                    found.append(first)
                else:
                    room -= max(0, growth)
        return found

    def give_back(self, first: int) -> None:
        """Others may have this offset of a batch, which was to be set aside."""
        self.want(self._requests[first]._replace(kind=Kind.OPEN, key_hash=None))

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
            if request.kind is Kind.DONE:
                # Where there is no hole yet, an entry would be rejected: ours that makes it may be under way.
                found = self._holes(progress, request)
                if not found:
                    continue
                for part in found:
                    if done and done[-1][1] + 1 == part[0]:
                        part = (done.pop()[0], part[1])
                    done.append(part)
            elif request.kind is Kind.OPEN:
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

    def look(self, progress: Progress | None) -> list[Settled]:
        """Remove and return the requests that the log fulfils, or that have no object any more."""
        found: list[Settled] = []
        for request in list(self._requests.values()):
            if (is_shown := self._is_shown(progress, request)) is not None:
                self.forget(request.first)
                found.append(Settled(request, is_shown))
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
                answer = (request.kind is Kind.DONE) if is_passed else None
            elif hole.owner != self.owner:
                answer = False
            elif request.kind is Kind.DONE or self.owner != NO_OWNER:  # a batch is ours until the log says otherwise
                answer = None
            elif request.kind is Kind.PARKED:
                answer = True if hole.is_parked else None
            else:
                answer = False if hole.is_parked else hole.attempts == request.attempts or None
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


def _first_of(request: Request) -> int:
    return request.first
