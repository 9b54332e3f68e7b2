"""Which records of a partition are stored, by their offsets; they may come in any order.

``kafka_marshal_done (group_id, topic, partition, first_offset, last_offset)`` holds inclusive intervals of offsets that
do not overlap. A transaction inserts the interval of one offset for each of its records; the primary key makes a second
writer of an offset wait for the first, and then find it. Neighbours are merged later, in a short transaction.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kafka_marshal.sinks.fences import Fence
from kafka_marshal.types import Key

__all__ = ["BATCHES", "MERGE_EVERY", "DoneRecords", "Written"]

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
#: The last offset of the partition, and intervals of several offsets between these two, from the one before them on.
_COVERING = (
    "SELECT p.last_offset, d.first_offset, d.last_offset FROM kafka_marshal_progress p "
    "LEFT JOIN kafka_marshal_done d ON d.group_id = p.group_id AND d.topic = p.topic AND d.partition = p.partition "
    "AND d.first_offset <= ? AND d.last_offset > d.first_offset AND d.first_offset >= coalesce("
    "(SELECT max(first_offset) FROM kafka_marshal_done WHERE OURS AND first_offset < ?), -1) "
    "WHERE p.group_id = ? AND p.topic = ? AND p.partition = ?"
)
#: From the interval on that begins before this offset.
_FROM = (
    "SELECT first_offset, last_offset FROM kafka_marshal_done WHERE OURS AND first_offset >= coalesce("
    "(SELECT max(first_offset) FROM kafka_marshal_done WHERE OURS AND first_offset < ?), -1) ORDER BY first_offset"
)
_SET_LAST_OFFSET = "UPDATE kafka_marshal_progress SET last_offset = ? WHERE OURS"
_DROP_BELOW = "DELETE FROM kafka_marshal_done WHERE OURS AND first_offset <= ? AND last_offset <= ?"
_DROP_WITHIN = "DELETE FROM kafka_marshal_done WHERE OURS AND first_offset > ? AND first_offset <= ?"
_STRETCH = "UPDATE kafka_marshal_done SET last_offset = ? WHERE OURS AND first_offset = ?"
_DROP_ONE = "DELETE FROM kafka_marshal_done WHERE OURS AND first_offset = ?"
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


class DoneRecords:
    """The records of one partition that are done, as one connection sees them inside its transaction."""

    def __init__(
        self, run: Callable[[str, Sequence[Any]], Any], run_all: Callable[..., list[Any]], group_id: str, key: Key
    ) -> None:
        self._run_sql = run
        self._run_all = run_all
        self._of = (group_id, *key)

    def _run(self, sql: str, parameters: Sequence[Any]) -> Any:
        return self._run_sql(sql.replace("OURS", _OURS), parameters)

    def add(self, table: str, parameter: Any, first: int, last: int) -> set[int]:
        """Store offsets as done; returns those that were not. Waits for other transactions that store the same.

        table: what this database calls a parameter with these offsets, as the rows of a table ``one (value)``.
        first, last: the smallest and the largest of them.
        """
        # Rows may be merged into others while the insertion waits, so the second statement comes after it.
        inserted, found = self._run_all(
            (_INSERT.replace("OFFSETS", table), (*self._of, parameter)),
            (_COVERING.replace("OURS", _OURS), (last, *self._of, first, *self._of)),
        )
        new = {offset for (offset,) in inserted}
        below = found[0][0]
        intervals = [(begin, end) for _, begin, end in found if begin is not None]
        done = {x for x in new if x <= below or any(begin < x <= end for begin, end in intervals)}
        for offset in done if done != new else ():  # (if nothing is new, all is rolled back)
            self._run(_DROP_ONE, (*self._of, offset))  # intervals never overlap
        return new - done

    def merge(self, last_offset: int, up_to: int, since: int = -1) -> tuple[int, list[Interval]]:
        """Merge intervals from offset ``since`` on, and with the last offset; what is left. Its row must be locked.

        last_offset: as stored. up_to: everything up to here is done, too. Only what is committed is visible, and no
        writer can add an offset inside of an interval, so deleting by range deletes only what was read.
        """
        found = self._run(_FROM, (*self._of, *self._of, since)).fetchall()
        last, kept = interval_merged(max(last_offset, up_to), found)
        if last > last_offset:
            self._run(_SET_LAST_OFFSET, (last, *self._of))
        self._run(_DROP_BELOW, (*self._of, last, last))
        for first, end in set(kept).difference(found):
            self._run(_DROP_WITHIN, (*self._of, first, end))
            self._run(_STRETCH, (end, *self._of, first))
        return last, kept

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
