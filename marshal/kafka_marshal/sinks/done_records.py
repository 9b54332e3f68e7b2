"""Which records of a partition are stored, by their offsets; they may come in any order.

``kafka_marshal_done (group_id, topic, partition, first_offset, last_offset)`` holds inclusive intervals of offsets that
do not overlap. A transaction inserts the interval of one offset for each of its records; the primary key makes a second
writer of an offset wait for the first, and then find it. Neighbours are merged later, in a short transaction.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kafka_marshal.sinks.fences import Fence
from kafka_marshal.types import Key

#: After this many records of a partition the next transaction merges their rows first. So a table that nothing holds up
#: has little more rows than that for each partition and writing process.
MERGE_EVERY: Final = 100

#: At least this many batches between two merges: a merge costs as much as a small batch.
BATCHES: Final = 4

#: Merges in a row that may leave gaps between rows because other transactions of the partition run; the next one waits
#: for them.
PATIENCE: Final = 9

Interval = tuple[int, int]

_OURS = "group_id = ? AND topic = ? AND partition = ?"
#: In ascending order: so writers of the same offsets wait for each other, and never in a circle.
_INSERT = (
    "INSERT INTO kafka_marshal_done SELECT ?, ?, ?, one.value, one.value FROM OFFSETS WHERE true "
    "ORDER BY one.value ON CONFLICT DO NOTHING RETURNING first_offset"
)
#: The interval that begins before this offset. Not max(): without statistics of the table PostgreSQL reads all earlier
#: rows for that.
_BEFORE = (
    "SELECT first_offset FROM kafka_marshal_done WHERE OURS AND first_offset < ? ORDER BY first_offset DESC LIMIT 1"
)
#: The last offset of the partition, and intervals of several offsets between these two, from the one before them on.
_COVERING = (
    "SELECT p.last_offset, d.first_offset, d.last_offset FROM kafka_marshal_progress p "
    "LEFT JOIN kafka_marshal_done d ON d.group_id = p.group_id AND d.topic = p.topic AND d.partition = p.partition "
    "AND d.first_offset <= ? AND d.last_offset > d.first_offset AND d.first_offset >= coalesce("
    "(BEFORE), -1) "
    "WHERE p.group_id = ? AND p.topic = ? AND p.partition = ?"
)
#: From the interval on that begins before this offset.
_FROM = (
    "SELECT first_offset, last_offset FROM kafka_marshal_done WHERE OURS AND first_offset >= coalesce("
    "(BEFORE), -1) ORDER BY first_offset"
)
_SET_LAST_OFFSET = "UPDATE kafka_marshal_progress SET last_offset = ? WHERE OURS"
_DROP_BELOW = "DELETE FROM kafka_marshal_done WHERE OURS AND first_offset <= ? AND last_offset <= ?"
_DROP_SOME = "DELETE FROM kafka_marshal_done WHERE OURS AND first_offset IN (SELECT one.value FROM OFFSETS)"
_ADD = "INSERT INTO kafka_marshal_done SELECT ?, ?, ?, one.value, one.last FROM INTERVALS"
_DROP = "DELETE FROM kafka_marshal_done WHERE OURS"


def interval_merged(last_offset: int, intervals: Sequence[Interval]) -> tuple[int, list[Interval]]:
    """Ascending intervals without what touches the last offset, which moves on, and with neighbours as one."""
    kept: list[Interval] = []
    for first, end in intervals:
        if first <= last_offset + 1:
            last_offset = max(last_offset, end)
        elif kept and first <= kept[-1][1] + 1:
            kept[-1] = (kept[-1][0], max(kept[-1][1], end))
        else:
            kept.append((first, end))
    return last_offset, kept


@dataclass(frozen=True, slots=True)
class Lists:
    """How a database takes a list, a parameter in JSON, as rows of a table ``one``."""

    #: Of (value): ``[3, 5]``.
    offsets: str
    #: Of (value, last): ``[[3, 5], [8, 8]]``.
    intervals: str


class DoneRecords:
    """The records of one partition that are done, as one connection sees them inside its transaction."""

    def __init__(
        self,
        run: Callable[[str, Sequence[Any]], Any],
        run_all: Callable[..., list[Any]],
        lists: Lists,
        group_id: str,
        key: Key,
    ) -> None:
        self._run_sql = run
        self._run_all = run_all
        self._lists = lists
        self._of = (group_id, *key)

    def _run(self, sql: str, parameters: Sequence[Any]) -> Any:
        return self._run_sql(self._sql(sql), parameters)

    def _sql(self, sql: str) -> str:
        sql = sql.replace("BEFORE", _BEFORE).replace("OURS", _OURS).replace("OFFSETS", self._lists.offsets)
        return sql.replace("INTERVALS", self._lists.intervals)

    def add(self, offsets: list[int]) -> set[int]:
        """Store ascending offsets as done; returns those that were not. Waits for others that store the same."""
        # Rows may be merged into others while the insertion waits, so the second statement comes after it.
        inserted, found = self._run_all(
            (self._sql(_INSERT), (*self._of, json.dumps(offsets))),
            (self._sql(_COVERING), (offsets[-1], *self._of, offsets[0], *self._of)),
        )
        new = {offset for (offset,) in inserted}
        below = found[0][0]
        intervals = [(begin, end) for _, begin, end in found if begin is not None]
        done = {x for x in new if x <= below or any(begin < x <= end for begin, end in intervals)}
        if done:  # intervals never overlap, even if the block commits by itself
            self._run(_DROP_SOME, (*self._of, json.dumps(sorted(done))))
        return new - done

    def take_out(self, offsets: Iterable[int]) -> None:
        """Offsets that this transaction has added are not done after all."""
        self._run(_DROP_SOME, (*self._of, json.dumps(sorted(offsets))))

    def merge(self, last_offset: int, besides: Sequence[Interval] = (), since: int = -1) -> tuple[int, list[Interval]]:
        """Merge intervals from offset ``since`` on, and with the last offset; what is left. Its row must be locked.

        last_offset: as stored. besides: ascending, they are done, too. Few statements, whatever there is to merge.
        """
        beyond = [each for each in besides if each[1] > last_offset]
        if beyond and (len(beyond) > 1 or beyond[0][0] > last_offset + 1):
            since = -1  # between open messages: it may meet any row
        found = self._run(_FROM, (*self._of, *self._of, since)).fetchall()
        last, kept = interval_merged(last_offset, sorted([*beyond, *found]))
        if last > last_offset:
            self._run(_SET_LAST_OFFSET, (last, *self._of))
        self._run(_DROP_BELOW, (*self._of, last, last))
        if gone := [first for first, end in set(found).difference(kept) if end > last]:
            self._run(_DROP_SOME, (*self._of, json.dumps(gone)))
        if merged := list(set(kept).difference(found)):
            self._run(_ADD, (*self._of, json.dumps(merged)))
        return last, kept

    def go_back(self, last_offset: int, to: int, ranges: Sequence[Interval]) -> None:
        """Forget what is above offset ``to``, except in these ranges, and store the last offset. Its row is locked.

        last_offset: as stored. What is there and in ranges was stored once, and does not come again.
        """
        stored = self._run(_FROM, (*self._of, *self._of, -1)).fetchall()
        kept = [(first, min(end, to)) for first, end in stored if first <= to]
        for first, end in ((to + 1, last_offset), *stored):
            within = ((max(first, begin, to + 1), min(end, last)) for begin, last in ranges)
            kept += [each for each in within if each[0] <= each[1]]
        last, merged = interval_merged(min(last_offset, to), sorted(kept))
        self.drop()
        if merged:
            self._run(_ADD, (*self._of, json.dumps(merged)))
        self._run(_SET_LAST_OFFSET, (last, *self._of))

    def rewind(self, last_offset: int, to: int, parked: Sequence[int]) -> None:
        """Everything up to offset ``to`` is done, but those that are parked and not stored now. Its row is locked.

        last_offset: as stored. What is above is forgotten.
        """
        stored = self._run(_FROM, (*self._of, *self._of, -1)).fetchall() if parked else []
        firsts, kept, at = [first for first, _ in stored], list[Interval](), 0
        for offset in sorted(set(parked)):
            place = bisect_right(firsts, offset) - 1
            if last_offset < offset <= to and not (place >= 0 and offset <= stored[place][1]):
                kept.append((at, offset - 1))
                at = offset + 1
        last, kept = interval_merged(-1, [each for each in (*kept, (at, to)) if each[0] <= each[1]])
        self.drop()
        if kept:
            self._run(_ADD, (*self._of, json.dumps(kept)))
        self._run(_SET_LAST_OFFSET, (last, *self._of))

    def drop(self) -> None:
        """All of them."""
        self._run(_DROP, self._of)


@dataclass(slots=True)
class Written:
    """What this process has written of a partition since it last merged."""

    #: Held while an epoch is entered or rows are merged: once is enough for all threads.
    lock: threading.Lock = field(default_factory=threading.Lock)
    #: The tokens of the last writer, those that were entered last, and how often any were.
    tokens: tuple[Fence, ...] = ()
    entered: tuple[Fence, ...] = ()
    entries: int = 0
    offsets: list[int] = field(default_factory=list)
    #: Everything up to here is done in the group: the highest offset that a writer with these tokens has named.
    stable: int = -1
    #: Merges in a row that had to leave out what is stable.
    postponed: int = 0
