"""Storage of a history: arrays, so that ten million records fit and bisection finds a moment.

Nothing here knows the protocol. `fold` fills it from records, `moments` answers from it.
"""

from __future__ import annotations

import heapq
import json
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from rationalizer.history import End, LeaseKey, Span
from rationalizer.limits import MAX_HEARTBEAT_INTERVAL_MS, MAX_KEY_HASH

#: The most buckets of a series over the whole history: more than a screen has columns.
MOST_BUCKETS: Final = 2048

#: The most positions of each partition; beyond that every second one is dropped.
MOST_SAMPLES: Final = 128

#: The largest sum: offsets of a hostile record may be up to 2^63.
MOST: Final = 2**62

#: Texts of events per compressed block; a page of events reads one block.
BLOCK: Final = 256

_ENDS: Final = tuple(End)


def _numbers() -> array[int]:
    return array("q")


def _before(times: Sequence[int], offsets: Sequence[int], at: int, offset: int) -> int:
    """How many of these ascending places are up to this log time, or (unless −1) up to this offset of their CP."""
    return bisect_right(times, at) if offset < 0 else bisect_right(offsets, offset)


class Names:
    """Texts, or pairs of texts, as small numbers: there are few, each in many records."""

    def __init__(self) -> None:
        self._texts: list[tuple[str, ...]] = []
        self._numbers: dict[tuple[str, ...], int] = {}

    def __call__(self, *texts: str) -> int:
        """The number of a text, or of several together; always the same."""
        number = self._numbers.get(texts)
        if number is None:
            number = self._numbers[texts] = len(self._texts)
            self._texts.append(texts)
        return number

    def absorb(self, other: Names) -> list[int]:
        """Take over all of another one; the number here of each of its numbers."""
        return [self(*texts) for texts in other._texts]

    def __getitem__(self, number: int) -> str:
        return self._texts[number][0]

    def pair(self, number: int) -> tuple[str, str]:
        """The two texts of a pair's number."""
        first, second = self._texts[number]
        return first, second


@dataclass(slots=True)
class Silences:
    """Heartbeats of one lease or member; only silences longer than the heartbeat interval are stored.

    A lease is fresh unless its last heartbeat is older than its heartbeat interval. So these silences are enough for
    the exact freshness at any moment.
    """

    #: The log time (ms) of the last beat, the interval, the beat's offset in the CP.
    last: int
    interval_ms: int
    last_offset: int
    #: A silence is from the last heartbeat before it to the next one.
    _begins: array[int] = field(default_factory=_numbers)
    _ends: array[int] = field(default_factory=_numbers)
    _begin_offsets: array[int] = field(default_factory=_numbers)
    _end_offsets: array[int] = field(default_factory=_numbers)
    #: Earlier intervals: (until log time, until offset, interval).
    _earlier: list[tuple[int, int, int]] = field(default_factory=list)

    def change(self, interval_ms: int, at: int, offset: int) -> None:
        """Set another heartbeat interval from this log time and offset on."""
        if interval_ms != self.interval_ms:
            self._earlier.append((at, offset, self.interval_ms))
            self.interval_ms = interval_ms

    def interval(self, at: int, offset: int = -1) -> int:
        """Its heartbeat interval (ms) at that log time, or after that offset."""
        for until, until_offset, interval_ms in self._earlier:
            if (offset < until_offset) if offset >= 0 else (at < until):
                return interval_ms
        return self.interval_ms

    def beat(self, at: int, offset: int) -> None:
        """Add a heartbeat at this log time (ms) and offset."""
        if at - self.last >= self.interval_ms:
            self._begins.append(self.last)
            self._ends.append(at)
            self._begin_offsets.append(self.last_offset)
            self._end_offsets.append(offset)
        self.last = at
        self.last_offset = offset

    def silence(self, at: int, offset: int = -1) -> int:
        """How long (ms) it had been silent at this log time; 0: less than its interval.

        offset: after this offset of its CP, at that log time; else after all records of that time.
        """
        if (offset >= self.last_offset) if offset >= 0 else (at >= self.last):
            return at - self.last
        index = _before(self._ends, self._end_offsets, at, offset)
        begun = _before(self._begins, self._begin_offsets, at, offset)
        return at - self._begins[index] if begun > index else 0


class Sample(NamedTuple):
    """A number at a moment: between low and high, which are equal if it is known exactly."""

    low: int
    high: int
    #: The log times (ms) of these bounds; until None: to the end.
    since: int
    until: int | None


@dataclass(slots=True)
class Samples:
    """A number over time as stretches with its lowest and highest value, merged as they become many.

    It is exact while there are few changes, and from the last change on.
    """

    #: The log time and offset of the change that begins each stretch.
    times: array[int] = field(default_factory=_numbers)
    offsets: array[int] = field(default_factory=_numbers)
    lows: array[int] = field(default_factory=_numbers)
    highs: array[int] = field(default_factory=_numbers)
    _every_ms: int = 0
    #: The last stretch takes changes up to this log time.
    _until: int = -1
    #: The last change: log time, offset, value.
    _last: tuple[int, int, int] = (0, 0, 0)

    def add(self, at: int, offset: int, value: int) -> None:
        """Set the number from this log time (ms) and offset of its CP on."""
        self._last = at, offset, value
        if at < self._until:
            if value > self.highs[-1]:
                self.highs[-1] = value
            elif value < self.lows[-1]:
                self.lows[-1] = value
            return
        self._until = at + self._every_ms
        for column, new in ((self.times, at), (self.offsets, offset), (self.lows, value), (self.highs, value)):
            column.append(new)
        if len(self.times) > MOST_SAMPLES:
            self._thin()
            self._until = self.times[-1] + self._every_ms

    def _thin(self) -> None:
        """Merge every two stretches."""
        for first in range(0, len(self.times) - 1, 2):
            self.lows[first] = min(self.lows[first], self.lows[first + 1])
            self.highs[first] = max(self.highs[first], self.highs[first + 1])
        for column in (self.times, self.offsets, self.lows, self.highs):
            del column[1::2]
        self._every_ms = max(1_000, 2 * self._every_ms)

    def at(self, moment: int, offset: int = -1) -> Sample | None:
        """The number after all records up to this log time, or after this offset of its CP; None: not known yet."""
        index = _before(self.times, self.offsets, moment, offset) - 1
        if index < 0:
            return None
        if (moment >= self._last[0]) if offset < 0 else (offset >= self._last[1]):
            return Sample(self._last[2], self._last[2], self._last[0], None)
        until = self.times[index + 1] if index + 1 < len(self.times) else self._last[0]
        return Sample(self.lows[index], self.highs[index], self.times[index], until)


class Moments:
    """Values by the record that set them: ascending in log time and offset. The oldest go when there are too many."""

    __slots__ = ("_most", "offsets", "times", "values")

    def __init__(self, most: int) -> None:
        self._most = most
        self.times: list[int] = []
        self.offsets: list[int] = []
        self.values: list[Any] = []

    def add(self, at: int, offset: int, value: object) -> None:
        """From this log time (ms) and offset on it is this value."""
        for column, new in ((self.times, at), (self.offsets, offset), (self.values, value)):
            column.append(new)  # type: ignore[arg-type]
            if len(column) > 2 * self._most:
                del column[: -self._most]

    def before(self, at: int, offset: int = -1) -> int:
        """How many were set up to this log time, or (unless −1) up to this offset."""
        return _before(self.times, self.offsets, at, offset)


class Series:
    """Sums over the whole history, in buckets of equal width, which doubles before there are too many.

    Buckets begin at multiples of their width, so the same sums come out in whatever order CPs are read.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.width_ms: int = 1_000
        #: Name → bucket → its sum.
        self._sums: dict[str, dict[int, int]] = {name: {} for name in names}
        #: The first and the last bucket; there is none yet if the first is beyond the last.
        self._first, self._last = 0, -1

    @property
    def begin(self) -> int:
        """The log time (ms) at which the first bucket begins; 0: there is none."""
        return self._first * self.width_ms

    def lists(self) -> dict[str, list[int]]:
        """Name → its sums from the first bucket to its last one."""
        return {
            name: [sums.get(bucket, 0) for bucket in range(self._first, max(sums, default=-1) + 1)]
            for name, sums in self._sums.items()
        }

    def add(self, name: str, at: int, amount: int) -> None:
        """Add this amount at that log time (ms), in any order: CPs are read one after the other."""
        bucket, sums = self._reach(at), self._sums[name]
        sums[bucket] = min(sums.get(bucket, 0) + amount, MOST)

    def spread(self, name: str, since: int, at: int, amount: int) -> None:
        """Spread this amount evenly between two log times (ms): the work of one report since the last one."""
        since = max(0, since, at - MAX_HEARTBEAT_INTERVAL_MS)
        edge = since + self.width_ms - since % self.width_ms
        if edge < at:
            self._reach(since)
            self._reach(at - 1)
            edge = since + self.width_ms - since % self.width_ms
        given = 0
        while edge < at:
            part = amount * (edge - since) // (at - since) - given
            self.add(name, edge - 1, part)
            given += part
            edge += self.width_ms
        self.add(name, max(since, at - 1), amount - given)

    def absorb(self, other: Series) -> None:
        """Add all sums of another one."""
        while self.width_ms < other.width_ms:
            self._widen()
        for name, sums in other._sums.items():
            for bucket, amount in sums.items():
                self.add(name, bucket * other.width_ms, amount)

    def _reach(self, at: int) -> int:
        """The bucket of this log time; the buckets reach it from now on."""
        while not self._first <= (bucket := max(0, at // self.width_ms)) <= self._last:
            is_first = self._first > self._last
            first, last = (bucket, bucket) if is_first else (min(self._first, bucket), max(self._last, bucket))
            if last - first < MOST_BUCKETS:
                self._first, self._last = first, last
            else:
                self._widen()
        return bucket

    def _widen(self) -> None:
        self.width_ms *= 2
        self._first, self._last = self._first // 2, self._last // 2
        for name, sums in self._sums.items():
            wide = self._sums[name] = {}
            for bucket, amount in sums.items():
                wide[bucket // 2] = min(wide.get(bucket // 2, 0) + amount, MOST)


@dataclass(slots=True)
class KeySpans:
    """All spans of one partition of a group: closed ones by number, in the order of their ends."""

    key: LeaseKey
    cp: int
    closed: array[int] = field(default_factory=_numbers)
    #: The log times and offsets of their ends, to look up a moment.
    until: array[int] = field(default_factory=_numbers)
    until_offset: array[int] = field(default_factory=_numbers)
    #: Open spans: one, or several if a coordinated group shares the partition by key.
    open: list[Span] = field(default_factory=list)
    #: The number of the open span's owner; −1: it is free, or there is not exactly one span.
    owner: int = -1
    #: It ever had several owners at once.
    is_shared: bool = False
    #: Of a lease; in coordinated groups each member has its own.
    pulse: Silences | None = None
    stable: int = -1
    #: The log time of the last progress report in a coordinated group.
    reported: int = 0
    samples: Samples = field(default_factory=Samples)
    #: Who shares it, at each change.
    shares: Moments | None = None

    def begin(self, spans: list[Span], owners: Names) -> None:
        """These spans are open from now on."""
        self.open = spans
        self.is_shared = self.is_shared or len(spans) > 1
        self.owner = owners(*_names_of(spans[0])) if len(spans) == 1 and spans[0].held else -1

    def renumber(self, base: int, owners: Sequence[int]) -> None:
        """Its closed spans have moved behind as many others, and owners have other numbers."""
        self.closed = array("q", (base + each for each in self.closed))
        self.owner = owners[self.owner] if self.owner >= 0 else -1

    def absorb(self, other: KeySpans) -> None:
        """Take over what another CP has of it: its group was of the other kind for some time. The later prevails."""
        closed = sorted(
            [
                *zip(self.until, self.until_offset, self.closed, strict=True),
                *zip(other.until, other.until_offset, other.closed, strict=True),
            ]
        )
        if self._since() < other._since():
            for name in ("cp", "open", "owner", "pulse", "reported", "samples", "shares", "stable"):
                setattr(self, name, getattr(other, name))
        self.is_shared = self.is_shared or other.is_shared
        self.until, self.until_offset = (array("q", [each[place] for each in closed]) for place in (0, 1))
        self.closed = array("q", [each[2] for each in closed])

    def _since(self) -> tuple[bool, int]:
        """Whether it has an owner, or is free, now; and since when its last span is."""
        last = self.until[-1] if self.until else -1
        return bool(self.open), max([last, *(span.since for span in self.open)])

    def ended(self, at: int, offset: int = -1) -> int:
        """The number of spans that had ended at this log time, or (unless −1) after this offset."""
        return _before(self.until, self.until_offset, at, offset)


def _names_of(span: Span) -> tuple[str, str]:
    return span.client_id, span.instance_id


class NumberTable:
    """Rows of numbers, each column an array."""

    def __init__(self, *columns: str) -> None:
        self.columns: dict[str, array[int]] = {name: array("q") for name in columns}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def append(self, row: Iterable[int]) -> int:
        """Add a row, in the order of the columns; its number."""
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(value)
        return len(self) - 1

    def row(self, number: int) -> dict[str, int]:
        """The row of this number."""
        return {name: column[number] for name, column in self.columns.items()}

    def extend(self, other: NumberTable, numbers: Mapping[str, Sequence[int]]) -> None:
        """Add the rows of another one. numbers: column → the number here for each number there; −1 stays."""
        for name, column in self.columns.items():
            found = other.columns[name]
            if (here := numbers.get(name)) is not None:
                found = array("q", [here[each] if each >= 0 else -1 for each in found])
            column.extend(found)


class SpanStore(NumberTable):
    """Closed spans."""

    def __init__(self, names: Names, owners: Names) -> None:
        """owners: (client_id, instance_id) by number."""
        super().__init__(
            *("owner", "epoch", "since", "since_offset", "until", "until_offset", "last_beat", "interval", "ended"),
            *("by", "evictor", "stable", "lo", "hi"),
        )
        self.names = names
        self.owners = owners

    def close(self, found: KeySpans, span: Span, interval_ms: int) -> None:
        """Store a closed span of this partition."""
        names = self.names
        row = (
            self.owners(*_names_of(span)) if span.held else -1,
            span.epoch,
            span.since,
            span.since_offset,
            span.until or 0,
            span.until_offset or 0,
            span.last_beat,
            interval_ms,
            _ENDS.index(span.ended),
            names(span.ended_by),
            names(span.evictor),
            span.stable,
            span.lo,
            span.hi,
        )
        found.closed.append(self.append(row))
        found.until.append(span.until or 0)
        found.until_offset.append(span.until_offset or 0)
        found.is_shared = found.is_shared or span.hi - span.lo != MAX_KEY_HASH

    def span(self, number: int, key: LeaseKey, is_lease: bool) -> Span:
        """A closed span."""
        row = self.row(number)
        held = row["owner"] >= 0
        span = Span(
            key,
            held,
            *(self.owners.pair(row["owner"]) if held else ("", "")),
            row["epoch"],
            row["since"],
            row["since_offset"],
            row["last_beat"],
            row["until"],
            row["until_offset"],
            _ENDS[row["ended"]],
            self.names[row["by"]],
            row["stable"],
        )
        span.lo, span.hi, span.is_lease = row["lo"], row["hi"], is_lease
        span.evictor = self.names[row["evictor"]]
        return span


class EventTable(NumberTable):
    """Records that are more than signs of life: numbers in arrays, words in compressed blocks."""

    def __init__(self) -> None:
        super().__init__("time", "cp", "offset", "group", "client", "type", "code", "accepted", "changed", "key")
        self.time: array[int] = self.columns["time"]
        #: (topic, partition) by number.
        self.places: list[tuple[str, int]] = []
        self._place_numbers: dict[tuple[str, int], int] = {}
        self._blocks: list[bytes] = []
        #: The number of each block's first event.
        self._firsts: array[int] = array("q")
        self._words: list[tuple[str, str]] = []
        self._read: tuple[int, list[list[str]]] = (-1, [])
        #: Selection → group → CP → numbers of events, ascending in time; group "": events without a group.
        self.lists: dict[str, dict[str, dict[int, array[int]]]] = {"all": {}, "changed": {}, "rejected": {}}

    def place(self, topic: str, partition: int) -> int:
        """The number of a partition."""
        found = self._place_numbers.get((topic, partition))
        if found is None:
            found = self._place_numbers[topic, partition] = len(self.places)
            self.places.append((topic, partition))
        return found

    def add(self, group: str, row: tuple[int, ...], what: str, why: str) -> None:
        """row: the columns in their order, `group`, `client`, `type` and `code` as numbers of names."""
        number = self.append(row)
        changed, accepted = self.columns["changed"][-1], self.columns["accepted"][-1]
        for which, is_one in (("all", True), ("changed", changed), ("rejected", not accepted)):
            if is_one:
                self.lists[which].setdefault(group, {}).setdefault(row[1], array("L")).append(number)
        self._words.append((what, why))
        if len(self._words) == BLOCK:
            self._close_block()

    def _close_block(self) -> None:
        if self._words:
            self._firsts.append(len(self) - len(self._words))
            self._blocks.append(zlib.compress(json.dumps(self._words).encode(), 6))
            self._words.clear()

    def absorb(self, other: EventTable, names: Sequence[int]) -> None:
        """Take over the events of other CPs. names: the numbers of the other's names here."""
        self._close_block()
        other._close_block()
        base, places = len(self), [self.place(*each) for each in other.places]
        self.extend(other, {**dict.fromkeys(("group", "client", "type", "code"), names), "key": places})
        self._blocks += other._blocks
        self._firsts.extend(base + each for each in other._firsts)
        for which, groups in other.lists.items():
            for group, by_cp in groups.items():
                found = self.lists[which].setdefault(group, {})
                found.update({cp: array("L", (base + each for each in numbers)) for cp, numbers in by_cp.items()})

    def place_of(self, number: int) -> tuple[str, int | None]:
        """The topic and the partition that an event is about; ("", None): it is about none."""
        key = self.columns["key"][number]
        return self.places[key] if key >= 0 else ("", None)

    def words_of(self, number: int) -> tuple[str, str]:
        """What an event was, and why."""
        block = bisect_right(self._firsts, number) - 1
        if number >= len(self) - len(self._words):
            return self._words[number - len(self)]
        if self._read[0] != block:
            self._read = (block, json.loads(zlib.decompress(self._blocks[block])))
        what, why = self._read[1][number - self._firsts[block]]
        return what, why

    def down_from(self, which: str, group: str, at: int, cp: int = -1, offset: int = 0) -> Iterator[int]:
        """The numbers of a group's events up to this log time (in this CP up to this offset), the last first."""
        return heapq.merge(
            *(reversed(chosen[:end]) for chosen, end in self._cut(which, group, at, cp, offset)),
            key=self.time.__getitem__,
            reverse=True,
        )

    def first_beyond(self, which: str, group: str, here: tuple[int, int, int]) -> int | None:
        """The number of a group's first event beyond this (log time, CP, offset); None: there is none."""
        time, cp, offset = (self.columns[name] for name in ("time", "cp", "offset"))
        found: tuple[tuple[int, int, int], int] | None = None
        for chosen in self.lists[which].get(group, {}).values():
            for at in range(bisect_left(chosen, here[0], key=time.__getitem__), len(chosen)):
                number = chosen[at]
                place = time[number], cp[number], offset[number]
                if place > here:
                    found = (place, number) if found is None else min(found, (place, number))
                    break
        return None if found is None else found[1]

    def _cut(self, which: str, group: str, at: int, cp: int, offset: int) -> Iterator[tuple[array[int], int]]:
        for of, chosen in sorted(self.lists[which].get(group, {}).items()):
            if of == cp:
                yield chosen, bisect_right(chosen, offset, key=self.columns["offset"].__getitem__)
            else:
                yield chosen, bisect_right(chosen, at, key=self.time.__getitem__)
