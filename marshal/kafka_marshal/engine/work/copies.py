"""A partition's position as a consumer group of Kafka's own can hold it: one offset, and open messages beside it.

The offset is that of the lowest message that is not done, so consumers of Kafka's own miss none. The metadata name the
open messages, set aside or not, and where the group continues behind them: `import-group` restores both. Kafka takes
``offset.metadata.max.bytes`` of metadata (4,096). What has no room there comes again, with what is done behind it.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from kafka_marshal.engine.work.topic_mark import kafka_counts, split
from rationalizer import Progress
from rationalizer.holes import NO_KEY

_PREFIX = "kafka-marshal open messages "

#: The most metadata of an offset that Kafka takes, unless a broker's ``offset.metadata.max.bytes`` is smaller.
MOST_BYTES = 4_096


class Aside(NamedTuple):
    """Open messages first … last. key_hash: NO_KEY: the log does not say. reason: None: they are not parked."""

    first: int
    last: int
    key_hash: int
    attempts: int
    reason: str | None


class Copy(NamedTuple):
    """What Kafka's group holds of one partition."""

    #: Committed: the lowest message that is not done.
    offset: int
    #: Where the group continues, but for `open`.
    position: int
    #: Open messages, with one key hash each.
    open: tuple[Aside, ...] = ()
    #: How many offsets from `position` on are done, and come again.
    ahead: int = 0
    metadata: str = ""
    #: There was no room for some open messages.
    is_short: bool = False

    @classmethod
    def of(cls, progress: Progress, metadata: str | None) -> Copy:
        """The copy of this progress, as far as there is room for its open messages."""
        after = progress.stable + 1
        holes = [hole for hole in progress.open if hole.first < after or hole.reason is not None]
        offset = min([after, *(hole.first for hole in holes)])
        is_short = False
        room = MOST_BYTES - len(cls(offset, after, (), 2**62, metadata or "").text.encode())
        some: list[Aside] = []
        for hole in holes:
            one = Aside(hole.first, hole.last, hole.key_hash, hole.attempts, hole.reason)
            room -= len(json.dumps(one, separators=(",", ":"))) + 1
            if room < 0 or hole.key_hash == NO_KEY:
                after, is_short = min(after, hole.first), True
                break
            some.append(one)
        if kafka_counts(progress):  # the offset in Kafka is exact: this one is for the case that it is gone
            return cls(offset, offset)
        return cls(offset, after, tuple(some), done_from(progress, after), metadata or "", is_short)

    @property
    def text(self) -> str:
        """What is committed beside the offset."""
        if not (self.open or self.ahead):
            return self.metadata
        found = {"continues": self.position, "open": self.open, "ahead": self.ahead, "metadata": self.metadata}
        return _PREFIX + json.dumps(found, separators=(",", ":"))

    @classmethod
    def read(cls, offset: int, text: str) -> Copy:
        """What an offset and its metadata say. Metadata of others are theirs."""
        try:
            if text.startswith(_PREFIX):
                found: dict[str, Any] = json.loads(text.removeprefix(_PREFIX))
                holes = tuple(Aside(*each) for each in found["open"])
                numbers = [found["continues"], found["ahead"], *(number for each in holes for number in each[:4])]
                if all(type(number) is int and number >= 0 for number in numbers):
                    return cls(offset, found["continues"], holes, found["ahead"], str(found["metadata"]))
        except (ValueError, KeyError, TypeError):
            pass
        return cls(offset, offset, metadata=text)

    @property
    def as_one_number(self) -> Copy:
        """The same for a log that can't hold open messages: all from the offset on comes again."""
        again = self.position - self.offset - sum(each.first < self.position for each in self.open)
        return Copy(self.offset, self.offset, (), self.ahead + max(0, again), self.metadata)

    def replaces(self, there: Copy) -> bool:
        """Whether it may take the place of another: of a member that knew less, or that passed open messages."""
        if self.position == there.position:
            return self.offset != there.offset or self.text not in ("", there.text)
        passes = self.offset < there.offset and (self.offset < self.position or self.is_short)
        return self.position > there.position or passes


def done_from(progress: Progress, after: int) -> int:
    """How many offsets from this one on are done for every key."""
    ahead = sum(last - max(first, after) + 1 for first, last in split(progress.ranges).ranges if last >= after)
    return ahead + max(0, progress.stable + 1 - after)
