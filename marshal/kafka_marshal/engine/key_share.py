"""Which messages of a partition are ours, where it is shared by key (K4, K5, B2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kafka_marshal.engine.inputs import reading
from kafka_marshal.ports import Message
from rationalizer import Progress, key_hash
from rationalizer.holes import Hole
from rationalizer.limits import MAX_KEY_HASH, NOTHING_DONE

#: Key hashes (lo, hi), both included.
Span = tuple[int, int]


class KeyShare:
    """Keys of a shared partition: which messages are ours, and not done by an earlier owner."""

    def __init__(self, spans: Sequence[Span], progress: Callable[[], Progress | None]) -> None:
        """spans: disjoint, ascending, at least one."""
        self.spans: tuple[Span, ...] = tuple(spans)
        #: The lowest and the highest key hash.
        self.lo: int = self.spans[0][0]
        self.hi: int = self.spans[-1][1]
        self._progress = progress

    @property
    def is_part(self) -> bool:
        """Whether other members have other keys of the partition."""
        return self.spans != ((0, MAX_KEY_HASH),)

    def has(self, key: int) -> bool:
        """Whether a key hash is one of these."""
        if not self.lo <= key <= self.hi:
            return False
        return len(self.spans) == 1 or any(lo <= key <= hi for lo, hi in self.spans)

    def wants(self, message: Message) -> bool:
        """Whether a message has one of these keys, and is not done."""
        offset = message.offset()
        assert offset is not None
        key = self._hash_of(message, offset)
        if not self.has(key):
            return False
        progress = self._progress()
        return progress is None or not progress.is_done(offset, key)

    @reading
    def _hash_of(self, message: Message, offset: int) -> int:
        """The key hash of a message; a recording keeps this instead of the key."""
        return hash_of(message.key(), offset)

    @property
    def stable_of_all(self) -> int:
        """The offset up to which everything is done for every key, those of other members too (any thread)."""
        progress = self._progress()
        return NOTHING_DONE if progress is None else progress.stable

    @property
    def stable_of_others(self) -> int:
        """The offset up to which everything is done for all keys but these."""
        progress = self._progress()
        pieces = [] if progress is None else progress.done_through
        others = [done for lo, hi, done in pieces if not any(first <= lo and hi <= last for first, last in self.spans)]
        return min(others, default=NOTHING_DONE)

    def stable(self) -> int:
        """The offset up to which everything is done, for all of these keys."""
        progress = self._progress()
        return NOTHING_DONE if progress is None else progress.floor(self.spans)

    def progress(self) -> Progress | None:
        """The progress as if these were the only keys; None: there is none of any key."""
        progress = self._progress()
        if progress is None:
            return None
        ours = Progress()
        ours.through(self.stable())
        if ranges := [(first, last) for first, last in progress.ranges if last > ours.stable]:
            ours.commit(ranges)
        return ours

    def open(self) -> list[Hole]:
        """The open messages of these keys (H1)."""
        progress = self._progress()
        return [] if progress is None else [hole for hole in progress.open if self.has(hole.key_hash)]


def hash_of(key: bytes | str | None, offset: int) -> int:
    """Where a message lies among the key hashes of its partition."""
    return key_hash(key.encode() if isinstance(key, str) else key, offset)
