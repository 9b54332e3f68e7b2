"""Members of one process that share partitions by keys read each of them once (U13).

A partition that one of them has is read by its own reader, as ever. One that several have is read by a reader of all:
a *feed* keeps what it brought until the slowest of them has passed it. A member that falls behind what is kept, or asks
for another position, reads alone until it is within the feed again. Each member is given every message from its
position on, and every end, as by a single reader: members that join or leave change nothing of that.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from weakref import WeakSet, WeakValueDictionary

from kafka_marshal.engine.work.run import runs
from kafka_marshal.errors import ClosedError, MarshalError
from kafka_marshal.logs import log
from kafka_marshal.ports import DataFault, DataReader, FaultKind, Message
from kafka_marshal.runtime import Condition, Runtime
from kafka_marshal.types import Key

#: What members of a process keep for each other by default (bytes).
DEFAULT_SHARED_BYTES = 200 * 2**20

#: Messages read at a time; a feed whose fastest member has this many left is read no further.
READ_SIZE, AHEAD = 2_000, 4_000

#: What a feed has is kept for a member, too, that reads alone at most this many offsets before it: it is there soon.
NEAR = 100_000

#: The longest wait (s); with partitions that are read alone, too, both readers are asked in turn.
SLICE_S, MIXED_S = 0.2, 0.01

#: A member that has not read for this long (s) keeps nothing for others in memory: it reads alone.
SILENT_S = 10.0

#: A feed that has brought nothing for this long (s) may be deaf: a member that reads again from its position does that
#: alone, and the partition is read alone by all for this long (s) once none has it from the feed.
DEAF_S, BLOCKED_S = 0.5, 600.0

#: What a message takes beside its key and value (bytes).
OVERHEAD = 200


@dataclass(slots=True)
class Chunk:
    """Consecutive messages of a feed."""

    messages: list[Message]
    #: The offset after the last one.
    next: int
    size: int
    #: Who read it.
    by: SharedReader


@dataclass(slots=True, eq=False)
class Feed:
    """One partition, read for several members: all that there is of it from ``start`` up to ``next``."""

    key: Key
    start: int
    next: int
    #: When the reader was to begin (a number that grows); what an earlier read brought does not count.
    number: int
    #: When it brought something last (s, monotonic), and how often it did.
    moved_at: float
    moves: int = 0
    chunks: deque[Chunk] = field(default_factory=deque)
    parts: set[SharedPart] = field(default_factory=set)
    #: The last end that was reached.
    end: int = -1
    is_resting: bool = False
    #: It can't be read on; each member is given this after what came before.
    fault: DataFault | None = None

    def left(self, position: int) -> int:
        """How many messages there are from a position on, of whole chunks."""
        return sum(len(chunk.messages) for chunk in self.chunks if chunk.next > position)


@dataclass(slots=True, eq=False)
class SharedPart:
    """A partition of one member: the next offset that it is to be given."""

    key: Key
    position: int
    #: When it was assigned, or began to read alone.
    number: int
    taker: SharedReader
    #: None: it is read alone.
    feed: Feed | None = None
    #: The feed that it has left, and how often that had moved: it comes back when the feed has moved since.
    left: tuple[Feed, int] | None = None
    #: Where it was taken from a feed: it gets on by itself first, or it might never.
    since: int = -1
    is_paused: bool = False
    told_end: int = -1
    is_told: bool = False

    def may_join(self, feed: Feed) -> bool:
        """Whether the feed has all from its position on, and lives."""
        if feed.fault is not None or not feed.start <= self.position <= feed.next:
            return False
        return self.left is None or self.left[0] is not feed or feed.moves > self.left[1]


class Pool:
    """The members of a process that may read together, and their reader. All of it is guarded by ``changed``."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime: Runtime = runtime
        self.changed: Condition = runtime.condition()
        #: Weak: one whose consumer could not be made is never closed.
        self.takers: WeakSet[SharedReader] = WeakSet()
        self.feeds: dict[Key, Feed] = {}
        #: The reader of all feeds, once there is one, and whether a member reads from it now.
        self.source: DataReader | None = None
        self.is_read: bool = False
        #: The most that one of its members allows to be kept, in this process.
        self.max_bytes: int = 0
        self.numbers: int = 0
        self.size: int = 0
        #: Partition → until when (s, monotonic) it has no feed.
        self.blocked: dict[Key, float] = {}

    def number(self) -> int:
        """The next number of an assignment."""
        self.numbers += 1
        return self.numbers

    def others_of(self, part: SharedPart) -> list[SharedPart]:
        """This partition at other members that read it."""
        found = [taker.parts.get(part.key) for taker in self.takers if taker is not part.taker]
        return [other for other in found if other is not None and not other.is_paused]

    def place(self, part: SharedPart) -> bool:
        """Have a part that is read alone read by a feed, if that can be. Returns whether it is."""
        feed = self.feeds.get(part.key)
        if part.is_paused or part.position <= part.since:
            return False
        if feed is not None:
            if not part.may_join(feed):
                return False
        elif self.blocked.get(part.key, 0.0) > self.runtime.monotonic() or not (others := self.others_of(part)):
            return False
        elif any(other.position > part.position for other in others):
            return False  # the first of them begins: those behind get there, and it waits for none
        else:
            source = self.source = self.source or part.taker.open_another()
            if source is None:
                self.blocked[part.key] = self.runtime.monotonic() + BLOCKED_S
                return False
            feed = Feed(part.key, part.position, part.position, self.number(), self.runtime.monotonic())
            self.feeds[part.key] = feed
            source.assign({part.key: part.position})
        feed.parts.add(part)
        part.feed, part.left, part.told_end, part.is_told = feed, None, -1, False
        return True

    def leave(self, part: SharedPart) -> None:
        """A part is not read by its feed any more."""
        feed, part.feed = part.feed, None
        if feed is None:
            return
        part.left = (feed, feed.moves)
        feed.parts.discard(part)
        self.trim(feed)
        if not feed.parts:
            self.drop(feed)

    def drop(self, feed: Feed) -> None:
        """No member has it any more, or it can't be read on."""
        if self.feeds.get(feed.key) is feed:
            del self.feeds[feed.key]
            assert self.source is not None
            self.source.unassign([feed.key])

    def trim(self, feed: Feed) -> None:
        """Keep what a member has not passed, and have the feed read while its fastest member needs more."""
        near = self._coming_to(feed) if feed.parts and feed.fault is None else []
        slowest = min((part.position for part in (*feed.parts, *near)), default=feed.next)
        while feed.chunks and feed.chunks[0].next <= slowest:
            self._forget_first(feed)
        if self.feeds.get(feed.key) is not feed or not feed.parts:
            return
        fastest = max((part.position for part in feed.parts), default=feed.next)
        is_resting = feed.left(fastest) >= AHEAD
        if is_resting != feed.is_resting and self.source is not None:
            feed.is_resting = is_resting
            (self.source.pause if is_resting else self.source.resume)([feed.key])

    def _coming_to(self, feed: Feed) -> list[SharedPart]:
        """Where members read alone that will soon be within this feed."""
        since, low = self.runtime.monotonic() - SILENT_S, feed.start - NEAR
        found = [taker.parts.get(feed.key) for taker in self.takers if taker.read_at > since]
        alone = [x for x in found if x is not None and x.feed is None and not x.is_paused and not x.is_told]
        return [part for part in alone if low <= part.position < feed.next]

    def _forget_first(self, feed: Feed) -> None:
        chunk = feed.chunks.popleft()
        feed.start = chunk.next
        self.size -= chunk.size

    def push(
        self, by: SharedReader, begun: int, messages: list[Message], faults: list[DataFault], ends: Mapping[Key, int]
    ) -> None:
        """Keep what a read brought that began with this number."""
        now, stale = self.runtime.monotonic(), set[Key]()
        for key, group in runs(messages, None, set()):
            feed = self.feeds.get(key)
            if feed is not None and feed.number > begun:
                stale.add(key)  # assigned during the read: they may be of before
            elif feed is not None and (new := [x for x in group if (x.offset() or 0) >= feed.next]):
                size = sum(len(x.value() or b"") + len(x.key() or b"") for x in new) + OVERHEAD * len(new)
                feed.next = (new[-1].offset() or 0) + 1
                feed.chunks.append(Chunk(new, feed.next, size, by))
                feed.moves, feed.moved_at, self.size = feed.moves + 1, now, self.size + size
        for key, end in ends.items():
            feed = self.feeds.get(key)
            if feed is not None and feed.number > begun:
                stale.add(key)
            elif feed is not None and end >= feed.next:
                feed.moves, feed.moved_at = feed.moves + (end > feed.next), now
                feed.end = feed.next = end
        for fault in faults:
            self._judge(fault)
        for key in stale & self.feeds.keys():
            feed = self.feeds[key]
            feed.number, feed.is_resting = self.number(), False
            assert self.source is not None
            self.source.assign({key: feed.next})
        for feed in list(self.feeds.values()):
            for part in [x for x in feed.parts if x.position < feed.next and now > x.taker.read_at + SILENT_S]:
                part.taker.read_alone(part)
            if feed.parts:
                self.trim(feed)
        self._keep_limit()

    def _judge(self, fault: DataFault) -> None:
        if fault.kind is FaultKind.OUT_OF_RANGE and fault.topic is not None and fault.partition is not None:
            if (feed := self.feeds.get((fault.topic, fault.partition))) is not None:
                feed.fault = fault
                self.drop(feed)
            return
        key = None if fault.topic is None or fault.partition is None else (fault.topic, fault.partition)
        for taker in self.takers:
            mine = [part for part in taker.parts.values() if part.feed is not None]
            if fault.kind is FaultKind.RECREATED:
                mine = [part for part in mine if part.key[0] == fault.topic]
            elif key is not None:
                mine = [part for part in mine if part.key == key]
            if mine:
                taker.faults.append(fault)
            if fault.kind is FaultKind.RECREATED:  # what was kept is of the old topic
                for part in mine:
                    self.leave(part)
                    part.is_told = True

    def _keep_limit(self) -> None:
        """A member that is behind reads alone if too much is kept for it."""
        limit = max((pool.max_bytes for pool in list(_POOLS.values())), default=0)
        while self.size and kept_bytes() > limit:
            feed = max(self._with_chunks(), key=lambda each: sum(chunk.size for chunk in each.chunks))
            through = feed.chunks[0].next
            for part in [part for part in feed.parts if part.position < through]:
                part.taker.read_alone(part)
            if feed.chunks and feed.chunks[0].next == through:
                self._forget_first(feed)

    def _with_chunks(self) -> list[Feed]:
        feeds = {part.feed for taker in self.takers for part in taker.parts.values() if part.feed is not None}
        return [feed for feed in feeds if feed.chunks]


class SharedReader:
    """A :class:`~kafka_marshal.ports.DataReader` of one member."""

    def __init__(self, pool: Pool, mine: DataReader, another: Callable[[], DataReader], max_bytes: int) -> None:
        """mine: reads what no other member has. another: opens one that reads in the same way."""
        self._pool = pool
        self._mine = mine
        self._another = another
        self.parts: dict[Key, SharedPart] = {}
        self.faults: list[DataFault] = []
        self._ends: dict[Key, int] = {}
        #: How many ends it has noted.
        self._ended = 0
        self._turn = 0
        self._is_closed = False
        #: When it last read (s, monotonic).
        self.read_at: float = pool.runtime.monotonic()
        #: Messages that another member had fetched, and others of partitions that several members have.
        self.hits: int = 0
        self.misses: int = 0
        with pool.changed:
            pool.takers.add(self)
            pool.max_bytes = max(pool.max_bytes, max_bytes)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("The data reader was closed; nothing more is read from it. Open a new one.")

    def open_another(self) -> DataReader | None:
        """A reader that reads in the same way; None: there can be none now."""
        try:
            return self._another()
        except MarshalError as error:
            text = "members of this process read by themselves, as a reader of all can't be opened: %s"
            log(logging.WARNING, "no_shared_reads", text, error)
            return None

    # The assignment.

    def assign(self, positions: Mapping[Key, int]) -> None:
        pool, alone = self._pool, {}
        with pool.changed:
            self._check_open()
            for key, position in positions.items():
                part = SharedPart(key, position, pool.number(), self)
                self._replace(key, part)
                if len(pool.takers) == 1 or not pool.place(part):
                    alone[key] = position
            gone = [key for key in positions if key not in alone]
            if gone:
                self._mine.unassign(gone)
            if alone:
                self._mine.assign(alone)
            pool.changed.notify_all()

    def expect(self, positions: Mapping[Key, int]) -> None:
        """Nothing: another member may have fetched it already."""

    def _replace(self, key: Key, part: SharedPart) -> None:
        """It is assigned; perhaps again, since its feed seems deaf."""
        old, pool = self.parts.pop(key, None), self._pool
        self._ends.pop(key, None)
        if old is not None:
            feed = old.feed
            if feed is not None and part.position >= feed.next and pool.runtime.monotonic() > feed.moved_at + DEAF_S:
                pool.blocked[key] = pool.runtime.monotonic() + BLOCKED_S
            pool.leave(old)
            part.left = old.left
        self.parts[key] = part

    def unassign(self, partitions: Iterable[Key]) -> None:
        with self._pool.changed:
            self._check_open()
            self._pool.number()
            for key in (keys := list(dict.fromkeys(partitions))):
                if (part := self.parts.pop(key, None)) is not None:
                    self._pool.leave(part)
                self._ends.pop(key, None)
            self._mine.unassign(keys)

    def read_alone(self, part: SharedPart) -> None:
        """Have a part read by this member's own reader from now on; the pool's lock is held."""
        self._pool.leave(part)
        part.number, part.since = self._pool.number(), part.position
        self._mine.assign({part.key: part.position})
        if part.is_paused:
            self._mine.pause([part.key])

    def pause(self, partitions: Iterable[Key]) -> None:
        with self._pool.changed:
            self._check_open()
            found = [self.parts[key] for key in dict.fromkeys(partitions) if key in self.parts]
            for part in found:
                part.is_paused = True
                if part.feed is not None:
                    self.read_alone(part)
            self._mine.pause([part.key for part in found])

    def resume(self, partitions: Iterable[Key]) -> None:
        with self._pool.changed:
            self._check_open()
            found = [self.parts[key] for key in dict.fromkeys(partitions) if key in self.parts]
            for part in found:
                part.is_paused = False
            self._mine.resume([part.key for part in found if part.feed is None])

    # Reading.

    def read(self, max_messages: int, timeout_s: float) -> tuple[list[Message], list[DataFault]]:
        pool, clock = self._pool, self._pool.runtime.monotonic
        deadline, ended = clock() + timeout_s, self._ended
        while True:
            with pool.changed:
                self._check_open()
                self.read_at = clock()
                if len(pool.takers) > 1:
                    self._join_feeds()
                fed = [part for part in self.parts.values() if part.feed is not None]
                if not (fed or self.faults):
                    begun = pool.numbers
                    break
                messages, faults = self._collect(fed, max_messages)
                begun, has_alone = pool.numbers, len(fed) < len(self.parts)
            if has_alone and len(messages) < max_messages:
                more, others = self._mine.read(max_messages - len(messages), 0.0)
                messages += self._note(begun, more)
                faults += others
            if messages or faults or self._ended > ended or (left := deadline - clock()) <= 0:
                return messages, faults
            self._advance(min(left, MIXED_S if has_alone else SLICE_S))
        messages, faults = self._mine.read(max_messages, max(0.0, deadline - clock()))
        return self._note(begun, messages), faults

    def _join_feeds(self) -> None:
        """What is read alone, and a feed has, too, is read by that; the pool's lock is held."""
        alone = [part for part in self.parts.values() if part.feed is None and not part.is_told]
        if joined := [part.key for part in alone if self._pool.place(part)]:
            self._mine.unassign(joined)

    def _note(self, begun: int, messages: list[Message]) -> list[Message]:
        """How far own reading has come. What was assigned during the read is read again."""
        ends = self._mine.take_ends()
        if not (messages or ends):
            return messages
        pool, stale = self._pool, set[Key]()
        with pool.changed:
            one = next(iter(self.parts)) if len(self.parts) == 1 and pool.numbers == begun else None
            for key, group in runs(messages, one, set()):
                part = self.parts.get(key)
                if part is None or part.feed is not None or part.number > begun:
                    stale.add(key)
                    continue
                part.position = (group[-1].offset() or 0) + 1
                if len(pool.takers) > 1 and pool.others_of(part):
                    self.misses += len(group)
            for key, end in ends.items():
                part = self.parts.get(key)
                if part is None or part.feed is not None or part.number > begun:
                    stale.add(key)
                elif key not in stale:
                    part.position = max(part.position, end)
                    self._ends[key] = end
                    self._ended += 1
            if stale:
                again = {key: part for key in stale if (part := self.parts.get(key)) is not None and part.feed is None}
                for part in again.values():
                    part.number = pool.number()
                self._mine.assign({key: part.position for key, part in again.items()})
                self._mine.pause([key for key, part in again.items() if part.is_paused])
        return [x for x in messages if (x.topic(), x.partition()) not in stale] if stale else messages

    def _collect(self, fed: list[SharedPart], room: int) -> tuple[list[Message], list[DataFault]]:
        """What feeds have for this member; the pool's lock is held."""
        messages: list[Message] = []
        faults, self.faults = self.faults, []
        self._turn = (self._turn + 1) % max(1, len(fed))
        for part in fed[self._turn :] + fed[: self._turn]:
            feed = part.feed
            if feed is None:
                continue
            for chunk in feed.chunks:
                if len(messages) >= room:
                    break
                if chunk.next <= part.position:
                    continue
                place = bisect_left(chunk.messages, part.position, key=_offset)
                taken = chunk.messages[place : place + room - len(messages)]
                is_whole = place + len(taken) == len(chunk.messages)
                part.position = chunk.next if is_whole else _offset(taken[-1]) + 1
                messages += taken
                self.hits += len(taken) if chunk.by is not self else 0
                self.misses += len(taken) if chunk.by is self else 0
            if not feed.chunks or feed.chunks[-1].next <= part.position:
                part.position = feed.next
                if feed.end == feed.next != part.told_end:
                    part.told_end = self._ends[part.key] = feed.end
                    self._ended += 1
                if feed.fault is not None and not part.is_told:
                    part.is_told = True
                    faults.append(feed.fault)
            self._pool.trim(feed)
        return messages, faults

    def _advance(self, wait_s: float) -> None:
        """Read for all, or wait for the member that does."""
        pool = self._pool
        with pool.changed:
            if self._is_closed or any(x.feed is not None and x.position < x.feed.next for x in self.parts.values()):
                return
            if pool.is_read or pool.source is None:
                pool.changed.wait(wait_s)
                return
            pool.is_read, source, begun = True, pool.source, pool.numbers
        messages: list[Message] = []
        faults: list[DataFault] = []
        ends: dict[Key, int] = {}
        try:
            messages, faults = source.read(READ_SIZE, wait_s)
            ends = source.take_ends()
        finally:
            with pool.changed:
                pool.is_read = False
                pool.push(self, begun, messages, faults, ends)
                pool.changed.notify_all()

    def take_ends(self) -> dict[Key, int]:
        with self._pool.changed:
            ends, self._ends = self._ends, {}
            return ends

    # The rest.

    def partition_counts(self, topics: Iterable[str], timeout_s: float) -> dict[str, int]:
        return self._mine.partition_counts(topics, timeout_s)

    def high_watermark(self, topic: str, partition: int) -> int | None:
        with self._pool.changed:
            self._check_open()
            part = self.parts.get((topic, partition))
            source = self._mine if part is None or part.feed is None else self._pool.source
        return None if source is None else source.high_watermark(topic, partition)

    def look_at_ends(self) -> None:
        with self._pool.changed:
            self._check_open()
            source = self._pool.source if any(part.feed for part in self.parts.values()) else None
        self._mine.look_at_ends()
        if source is not None:
            source.look_at_ends()

    def close(self) -> None:
        pool, source = self._pool, None
        with _LOCK, pool.changed:
            if self._is_closed:
                return
            self._is_closed = True
            for part in self.parts.values():
                pool.leave(part)
            self.parts.clear()
            pool.takers.discard(self)
            if not pool.takers:
                source, pool.source = pool.source, None
                for key in [key for key, each in _POOLS.items() if each is pool]:
                    del _POOLS[key]
            pool.changed.notify_all()
        self._mine.close()
        if source is not None:
            source.close()


def _offset(message: Message) -> int:
    return message.offset() or 0


#: Readers of this process that read in the same way.
_POOLS: WeakValueDictionary[Hashable, Pool] = WeakValueDictionary()
_LOCK = threading.Lock()


def _begin_in_child() -> None:
    """After a fork, the readers, and perhaps their locks, are the parent's."""
    global _LOCK
    _LOCK = threading.Lock()
    _POOLS.clear()


os.register_at_fork(after_in_child=_begin_in_child)


def shared_reader(way: Hashable, runtime: Runtime, make: Callable[[], DataReader], max_bytes: int) -> SharedReader:
    """A reader that shares what it reads with others of this process that read in the same way."""
    mine = make()
    with _LOCK:
        pool = _POOLS.get(way)
        if pool is None:
            pool = _POOLS[way] = Pool(runtime)
        return SharedReader(pool, mine, make, max_bytes)


def kept_bytes() -> int:
    """How much this process keeps for members that have not passed it (any thread)."""
    return sum(pool.size for pool in list(_POOLS.values()))
