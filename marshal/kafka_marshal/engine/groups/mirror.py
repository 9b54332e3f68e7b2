"""Which of a group's positions to commit to the Kafka group of the same name, and when.

Kafka's tools show lag from these offsets; no member reads them. Only offsets that the log shows as done are committed:
below every message that is open, and not set aside.
If the group takes checkpoints, the log shows them at checkpoints only. So its members commit what they have done since,
too; a loss takes that back.
One member commits each partition: the owner of its lowest keys or, if it has no owner, the member that did so last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.engine.work.copies import Copy
from kafka_marshal.types import Key
from rationalizer import Group, Member, Progress
from rationalizer.holes import first_open

#: Changed positions are committed at this interval (ms), in one request.
MIRROR_MS = 5_000.0

#: An unchanged position is committed again after this time (ms): Kafka drops offsets that were not committed for
#: ``offsets.retention.minutes`` (7 days).
REFRESH_MS = 24 * 3_600_000.0

#: After this time (ms), requests of an earlier owner, or that timed out, are over. They may have overwritten a newer
#: position, so it is committed once more.
SETTLE_MS = 60_000.0

#: The longest wait (ms) between failed tries.
LONGEST_RETRY_MS = 60_000.0

#: The offset to read next, and its metadata.
Position = tuple[int, str]


@dataclass(slots=True)
class _Committed:
    position: Position
    again_at: float
    #: Until then an older request may still overwrite it.
    settles_at: float


class Mirror:
    """What one member has committed, and must commit. Times: own clock, ms."""

    def __init__(self, member: Membership, live: Callable[[Key], int | None] = lambda key: None) -> None:
        """live: up to where all of a partition is done, in a checkpoint or not; None: as the log shows."""
        self._member = member
        self._live = live
        self._committed: dict[Key, _Committed] = {}
        #: What we owned when we began to leave: it may not be committed yet.
        self._had: set[Key] = set()
        self._failures = 0
        #: When to check again.
        self.next_at: float = 0.0

    def due(
        self,
        now: float,
        keys: Iterable[Key] | None = None,
        counts: Callable[[Key, Progress], bool] = lambda *_: True,
    ) -> dict[Key, Position]:
        """The positions to commit now, of these partitions (None: of all).

        counts: whether a position is valid in the topic as it is now.
        """
        group, me = self._member.group, self._member.me
        found: dict[Key, Position] = {}
        if group is None or (me is not None and now >= self._member.proof.valid_until):
            return found  # in doubt: another member may have committed more
        for key in self._candidates(group, me) if keys is None else keys:
            kept, last = group.kept(*key), self._committed.get(key)
            if kept is None:
                continue
            stable = self._live(key)
            offset = (kept.progress.stable if stable is None else stable) + 1
            # Kafka's tools are to show the lag without what is set aside: an import reads that in the metadata.
            text = Copy.of(kept.progress, kept.metadata).text if kept.progress.holes else kept.metadata or ""
            position = (first_open(offset, kept.progress.open), text)
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
        """Remember what we own now: we release it next."""
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
        return me is None or topic is not None  # Kafka may drop the offsets of a topic without subscribers

    def committed(self, positions: Mapping[Key, Position], now: float) -> None:
        """Kafka accepted these positions."""
        self._failures, self.next_at = 0, now + MIRROR_MS
        for key, position in positions.items():
            last = self._committed.get(key)
            settles_at = now + SETTLE_MS if last is None else last.settles_at
            again_at = settles_at if now < settles_at else now + REFRESH_MS
            self._committed[key] = _Committed(position, again_at, settles_at)

    def failed(self, positions: Mapping[Key, Position], now: float) -> None:
        """Kafka rejected these positions, or did not answer: they are tried again."""
        self._failures += 1
        self.next_at = now + min(LONGEST_RETRY_MS, MIRROR_MS * 2 ** min(self._failures, 10))
        for key in positions.keys() & self._committed.keys():
            self._committed[key].settles_at = now + SETTLE_MS

    @property
    def is_failing(self) -> bool:
        """Whether the last try failed."""
        return self._failures > 0
