"""What a member has to commit, gathered: many partitions begin, or end, at once (G14)."""

from __future__ import annotations

from kafka_marshal.engine.groups.member import Membership
from rationalizer import CommitEntry, CommitOffsets
from rationalizer.limits import MAX_COMMIT_RANGES

__all__ = ["Commits"]

#: Entries of one CommitOffsets. 1,000 entries of the longest names stay below the 900,000 bytes of L1.
MAX_ENTRIES = 1_000


class Commits:
    """Entries for the next flush, in order."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._entries: list[CommitEntry] = []

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, *entries: CommitEntry) -> None:
        """Goes out with the next flush."""
        self._entries.extend(entries)

    def add_first(self, entry: CommitEntry) -> None:
        """Before all others: what is committed of a partition before its start would be its start (G14)."""
        self._entries.insert(0, entry)

    def clear(self) -> None:
        """We are no member: nobody would take it."""
        self._entries.clear()

    def flush(self, now: float) -> None:
        """Append all, in as few records as can be."""
        member = self._member
        while self._entries and member.joined:
            taken = ranges = 0
            for entry in self._entries[:MAX_ENTRIES]:
                ranges += len(entry.ranges)
                if taken and ranges > MAX_COMMIT_RANGES:
                    break
                taken += 1
            entries, self._entries = self._entries[:taken], self._entries[taken:]
            ids = (*member.settings.ids, member.member_id)
            member.send(CommitOffsets(*ids, member.generation, False, tuple(entries)), now)  # in_order: nobody asks
        self._entries.clear()
