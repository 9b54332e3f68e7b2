"""Checkpoints of a group over its whole history: when each was complete, and what it has of each piece."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

from kafka_marshal.logs import visible
from kafka_marshal.observe.checkpoints import CheckpointHistory, Ended, Taken, happened_text, seen_by
from kafka_marshal.observe.rows import place_text
from rationalizer import Group, Outcome, World

#: The most cuts of a partition, and the most marks of a group, that are kept: the last ones.
MOST_CUTS: Final = 256
MOST_MARKS: Final = 20_000


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
        """How many were set up to this log time, or (offset) up to this offset."""
        return bisect_right(self.times, at) if offset < 0 else bisect_right(self.offsets, offset)


class Piece(NamedTuple):
    """A range of keys in a checkpoint. cut 0: nothing was handed in so far. next: the offset to read next."""

    lo: int
    hi: int
    cut: int
    next: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A checkpoint that was complete, or that the group went back to."""

    checkpoint: int
    #: The log time (ms) and the offset of the record.
    time: int
    offset: int
    went_back: bool
    text: str


@dataclass(slots=True)
class Marks:
    """Those of one group."""

    history: CheckpointHistory
    marks: Moments = field(default_factory=lambda: Moments(MOST_MARKS))
    #: (topic, partition) → its pieces.
    cuts: dict[tuple[str, int], Moments] = field(default_factory=dict)
    _last_told: tuple[int, tuple[str, ...]] = (-1, ())

    @classmethod
    def of(cls, group: Group, world: World) -> Marks:
        """The history begins with this state."""
        found = cls(CheckpointHistory(group.group_id))
        found.history.begin(world)
        if group.checkpoints is not None:
            for kept in group.checkpoints.kept:
                found._mark(Mark(kept.id, kept.log_time, kept.id, False, f"checkpoint {kept.id} was complete"))
            for key in group.partitions():
                found._cut(group, key, world.log_time, world.next_offset - 1)
        return found

    def see(self, group: Group, world: World, outcome: Outcome) -> list[tuple[str, int]]:
        """Take in a record that was just applied; the partitions whose progress it changed."""
        found = self.history.see(world, outcome)
        changed: list[tuple[str, int]] = []
        offset = world.next_offset - 1
        for each in found:
            if isinstance(each, Ended) or group.checkpoints is None:
                continue
            newest = group.checkpoints.newest
            if isinstance(each, Taken):
                changed += group.checkpoints.kept[-1].versions
                self._mark(Mark(each.checkpoint, world.log_time, offset, False, happened_text(each)))
            elif each.why == "rollback":
                changed += [key for key in group.partitions() if self._pieces(group, key) != self._last(key)]
                self._mark(Mark(newest, world.log_time, offset, True, happened_text(each)))
        for key in changed:
            self._cut(group, key, world.log_time, offset)
        self._last_told = offset, tuple(map(happened_text, found))
        return changed

    def told_at(self, offset: int) -> tuple[str, ...]:
        """What the record at this offset did, if it was the last one, in words."""
        return self._last_told[1] if self._last_told[0] == offset else ()

    def _mark(self, mark: Mark) -> None:
        self.marks.add(mark.time, mark.offset, mark)

    def _cut(self, group: Group, key: tuple[str, int], at: int, offset: int) -> None:
        self.cuts.setdefault(key, Moments(MOST_CUTS)).add(at, offset, self._pieces(group, key))

    def _last(self, key: tuple[str, int]) -> tuple[Piece, ...]:
        values = self.cuts[key].values if key in self.cuts else ()
        return values[-1] if values else ()

    @staticmethod
    def _pieces(group: Group, key: tuple[str, int]) -> tuple[Piece, ...]:
        assert group.checkpoints is not None
        seen = seen_by(group, key, group.checkpoints.newest)
        return tuple(
            Piece(lo, hi, cut, min((d for a, b, d in seen.done_through if a <= hi and lo <= b), default=-1) + 1)
            for lo, hi, cut in seen.states
        )

    # -- answers -----------------------------------------------------------------------------------------------

    def listed(self, home: int, at: int, offset: int, limit: int) -> list[dict[str, Any]]:
        """The last ones up to a moment, the newest first."""
        end = self.marks.before(at, offset)
        return [self._json(home, each) for each in islice(reversed(self.marks.values[:end]), limit)]

    def pieces(self, at: int, offset: int) -> Iterator[dict[str, Any]]:
        """What the newest checkpoint at that moment had of each piece."""
        for topic, partition in sorted(self.cuts):
            found = self.cuts[topic, partition]
            index = found.before(at, offset) - 1
            for piece in found.values[index] if index >= 0 else ():
                yield {
                    "topic": topic,
                    "partition": partition,
                    "place": place_text(partition, piece.lo, piece.hi),
                    "cut": piece.cut or None,
                    "next": piece.next,
                }

    def ticks(self, most: int) -> list[list[object]]:
        """(log time, offset of the record, id) of the last ones, for the slider."""
        return [[each.time, each.offset, each.checkpoint] for each in self.marks.values[-most:]]

    @staticmethod
    def _json(home: int, each: Mark) -> dict[str, Any]:
        return {
            "checkpoint": each.checkpoint,
            "time": each.time,
            "at": f"{home}:{each.offset}",
            "went_back": each.went_back,
            "text": visible(each.text),
        }
