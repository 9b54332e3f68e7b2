"""Which messages an operator has opened again (R2), as far as this member has read it: for log lines only (R9)."""

from __future__ import annotations

from bisect import bisect_right

from kafka_marshal.types import Key
from rationalizer import Outcome, codes
from rationalizer.limits import MAX_OFFSET

#: Ranges of offsets, ascending.
Ranges = tuple[tuple[int, int], ...]


class RedoneMessages:
    """What was opened again and not settled or tried since. No state of the log says it: a start knows nothing."""

    def __init__(self, group_id: str) -> None:
        self._group_id = group_id
        #: Each value is replaced as a whole: user threads read it without the lock.
        self._of: dict[Key, Ranges] = {}

    def applied(self, outcome: Outcome) -> tuple[Key, Ranges] | None:
        """A record has settled messages. Returns what is done again now, if nothing of that partition was before."""
        message = outcome.message
        if message is None or message.group_id != self._group_id:
            return None
        key = message.topic, message.partition
        before = found = self._of.get(key, ())
        if not (before or outcome.redoes):
            return None
        entries = [*message.done, *message.open, *((entry[0], entry[0]) for entry in message.parked)]
        for entry, code in zip(entries, outcome.entries or (), strict=False):
            if code == codes.OK:
                found = _without(found, entry[0], entry[1])
        found = tuple(sorted([*found, *outcome.redone]))
        self._of[key] = found
        if not found:
            del self._of[key]
        return (key, found) if found and not before else None

    def forget(self, key: Key) -> None:
        """Its position was replaced: what comes is no repair of what was done."""
        self._of.pop(key, None)

    def has(self, key: Key, offset: int) -> bool:
        """Whether this message was opened again. Any thread, without the lock."""
        ranges = self._of.get(key, ())
        place = bisect_right(ranges, (offset, MAX_OFFSET)) - 1
        return place >= 0 and offset <= ranges[place][1]


def _without(ranges: Ranges, first: int, last: int) -> Ranges:
    if not any(low <= last and first <= high for low, high in ranges):
        return ranges
    parts = [((low, min(high, first - 1)), (max(low, last + 1), high)) for low, high in ranges]
    return tuple(part for both in parts for part in both if part[0] <= part[1])
