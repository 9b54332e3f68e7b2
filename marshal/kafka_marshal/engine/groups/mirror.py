"""Which of a group's positions are to be committed to the Kafka group of the same name, and when.

Kafka's tools show lag from there; nobody here reads it. Positions are what the log shows as done, never more. Of each
partition one member commits them: the owner of its lowest keys or, while nobody owns it, the member that did so last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.types import Key
from rationalizer import Group, Member, Progress

__all__ = ["LONGEST_RETRY_MS", "MIRROR_MS", "REFRESH_MS", "SETTLE_MS", "Mirror", "Position"]

#: Positions that have changed are committed this often, in one request.
MIRROR_MS = 5_000.0

#: A position that stands still is committed again after this time: Kafka drops offsets that nobody has committed for
#: ``offsets.retention.minutes`` (7 days).
REFRESH_MS = 24 * 3_600_000.0

#: A request of an earlier owner, or one that timed out, is over by now. It may have put back what was committed since,
#: so that is committed once more.
SETTLE_MS = 60_000.0

#: The longest wait between tries that fail.
LONGEST_RETRY_MS = 60_000.0

#: The offset to be read next, and the metadata beside it.
Position = tuple[int, str]


@dataclass(slots=True)
class _Committed:
    position: Position
    again_at: float
    #: Until then an older request may arrive after it.
    settles_at: float


class Mirror:
    """What one member has committed, and has to. Times: own clock, ms."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._committed: dict[Key, _Committed] = {}
        #: What was ours when we began to leave: perhaps for too short a time to be committed.
        self._had: set[Key] = set()
        self._failures = 0
        #: When to look again.
        self.next_at: float = 0.0

    def due(
        self,
        now: float,
        keys: Iterable[Key] | None = None,
        counts: Callable[[Key, Progress], bool] = lambda *_: True,
    ) -> dict[Key, Position]:
        """What is to be committed now, of these partitions (None: of all).

        counts: whether a position counts in the topic as it is.
        """
        group, me = self._member.group, self._member.me
        found: dict[Key, Position] = {}
        if group is None or (me is not None and now >= self._member.proof.valid_until):
            return found  # in doubt: others may be further
        for key in self._candidates(group, me) if keys is None else keys:
            kept, last = group.kept(*key), self._committed.get(key)
            if kept is None:
                continue
            position = (kept.progress.stable + 1, kept.metadata or "")
            is_due = last is None or last.position != position or now >= last.again_at
            if is_due and self._is_ours(group, me, key) and counts(key, kept.progress):
                found[key] = position
        return found

    def _candidates(self, group: Group, me: Member | None) -> set[Key]:
        owned = self._owned()
        for key in self._committed.keys() - owned:
            if not self._is_ours(group, me, key):
                del self._committed[key]  # its owner commits it
        return owned | self._had | self._committed.keys()

    def note_owned(self) -> None:
        """What we own now is released next."""
        self._had = self._owned()

    def _owned(self) -> set[Key]:
        group, me = self._member.group, self._member.me
        if group is None or me is None:
            return set()
        return {(name, number) for name, topic in group.pieces.items() for number, _ in topic.owned_by(me.slot)}

    def _is_ours(self, group: Group, me: Member | None, key: Key) -> bool:
        topic = group.pieces.get(key[0])
        owners = [piece.owner for piece in topic[key[1]] if piece.owner >= 0] if topic is not None else []
        if owners:
            return me is not None and me.slot == owners[0]
        return me is None or topic is not None  # of a topic that nobody subscribes to any more, Kafka may drop it

    def committed(self, positions: Mapping[Key, Position], now: float) -> None:
        """Kafka has taken these."""
        self._failures, self.next_at = 0, now + MIRROR_MS
        for key, position in positions.items():
            last = self._committed.get(key)
            settles_at = now + SETTLE_MS if last is None else last.settles_at
            again_at = settles_at if now < settles_at else now + REFRESH_MS
            self._committed[key] = _Committed(position, again_at, settles_at)

    def failed(self, positions: Mapping[Key, Position], now: float) -> None:
        """Kafka has not taken these, or has not said so: they are tried again."""
        self._failures += 1
        self.next_at = now + min(LONGEST_RETRY_MS, MIRROR_MS * 2 ** min(self._failures, 10))
        for key in positions.keys() & self._committed.keys():
            self._committed[key].settles_at = now + SETTLE_MS

    @property
    def is_failing(self) -> bool:
        """Whether the last try failed."""
        return self._failures > 0
