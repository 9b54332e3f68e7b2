"""Why pieces came to this member, as far as its replica has replayed the log (X17)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from kafka_marshal.engine.groups.pieces import HeldPiece
from kafka_marshal.types import Key
from rationalizer import CommitOffsets, Group, Outcome, Piece, Rollback, codes
from rationalizer.groups.checkpoints import Barrier
from rationalizer.groups.pieces import NEVER
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire.wellformed import REACHED_AND_LEAVES

WhyCame = Literal["joined", "handed_over", "lost", "rollback", "positions"]

#: No member.
NOBODY = -1


class _Before(NamedTuple):
    """A topic's pieces before the record: as `TopicPieces` has them."""

    owners: list[int]
    revoked: list[int]
    cut: dict[int, list[Piece]]

    def of(self, partition: int) -> list[tuple[int, int, int, int]]:
        """(lo, hi, owner, revoked) of each piece of a partition."""
        if partition in self.cut:
            return [(part.lo, part.hi, part.owner, part.revoked) for part in self.cut[partition]]
        if partition >= len(self.owners):
            return []
        return [(0, MAX_KEY_HASH, self.owners[partition], self.revoked[partition])]


class Story:
    """Follows one group, record by record."""

    def __init__(self) -> None:
        #: The generation that ``_before`` is of.
        self._generation = -1
        self._before: dict[str, _Before] = {}
        #: Why our pieces came: partition → (lo, hi, since, why).
        self._came: dict[Key, list[tuple[int, int, int, WhyCame]]] = {}
        #: What came over partitions while no member owned them.
        self._since: dict[Key, WhyCame] = {}

    def look(self, group: Group | None) -> None:
        """Take the group's pieces as they are; what came before is not known."""
        if group is None:
            self._before, self._generation = {}, -1
            return
        self._generation = group.generation
        self._before = {
            name: _Before(topic.owners.copy(), topic.revoked.copy(), {n: list(cut) for n, cut in topic.cut.items()})
            for name, topic in group.pieces.items()
        }

    def follow(self, group: Group | None) -> None:
        """Before we join: know who had what."""
        if self.is_behind(group):
            self.look(group)

    def is_behind(self, group: Group | None) -> bool:
        """Whether the group has another generation than was seen last."""
        return (-1 if group is None else group.generation) != self._generation

    def applied(
        self, group: Group | None, slot: int, outcome: Outcome, message: Any, closed: tuple[Barrier, bool] | None
    ) -> None:
        """A record of the group was applied. slot: ours; closed: the barrier that it closed, and whether complete."""
        if outcome.is_a(CommitOffsets) and not message.member_id and outcome.accepted:
            for entry, code in zip(message.entries, outcome.entries or (), strict=True):
                if code in codes.ACCEPTED and (entry[5] is not None or entry[7] is not None):
                    self._since[entry[0], entry[1]] = "positions"
        if group is None or not self.is_behind(group):
            return
        if outcome.is_a(Rollback) and outcome.accepted:
            self._since.update({(topic, partition): "rollback" for topic, partition, _ in group.all_progress()})
        for name, topic in group.pieces.items():
            for partition, piece in topic.owned_by(slot) if slot >= 0 else ():
                if piece.since == group.generation:
                    self._note((name, partition), piece, outcome, closed)
        self._since = {key: why for key, why in self._since.items() if not _is_owned(group, key)}
        self.look(group)

    def _note(self, key: Key, piece: Piece, outcome: Outcome, closed: tuple[Barrier, bool] | None) -> None:
        why = self._why(key, piece, outcome, closed)
        self._came[key] = [*self._without(key, piece.lo, piece.hi), (piece.lo, piece.hi, piece.since, why)]

    def _without(self, key: Key, lo: int, hi: int) -> Iterator[tuple[int, int, int, WhyCame]]:
        for first, last, since, why in self._came.get(key, []):
            if first < lo:
                yield first, min(last, lo - 1), since, why
            if hi < last:
                yield max(first, hi + 1), last, since, why

    def _why(self, key: Key, piece: Piece, outcome: Outcome, closed: tuple[Barrier, bool] | None) -> WhyCame:
        if outcome.is_a(Rollback):
            return "rollback"
        found = [_left_by(key, part, closed) for part in self._owned(key, piece)]
        if not found:
            return self._since.get(key, "joined")
        return "lost" if "lost" in found else "handed_over"

    def _owned(self, key: Key, piece: Piece) -> Iterator[tuple[int, int, int, int]]:
        """(lo, hi, slot, revoked) of each part of these keys that a member owned."""
        before = self._before.get(key[0])
        for lo, hi, owner, revoked in () if before is None else before.of(key[1]):
            if owner != NOBODY and lo <= piece.hi and piece.lo <= hi:
                yield lo, hi, owner, revoked

    def restored(self, piece: HeldPiece) -> None:
        """If one of our pieces is begun again under its token, with other keys, it comes from our cut."""
        lo, hi = piece.span
        self._came[piece.key] = [*self._without(piece.key, lo, hi), (lo, hi, piece.epoch, "handed_over")]

    def why(self, piece: HeldPiece) -> WhyCame:
        """Why one of our pieces came: its newest part."""
        lo, hi = piece.span
        found = [each for each in self._came.get(piece.key, []) if each[0] <= hi and lo <= each[1]]
        return max(found, key=lambda each: each[2])[3] if found else "joined"


def _left_by(key: Key, part: tuple[int, int, int, int], closed: tuple[Barrier, bool] | None) -> WhyCame:
    """How its owner gave up a part: at the barrier that was closed (X6), or by its loss (X7)."""
    lo, hi, owner, revoked = part
    barrier, is_complete = closed or (None, False)
    if barrier is None or not is_complete or owner not in barrier.answers:
        return "lost"
    answer, version = barrier.answers[owner], barrier.versions.get(key)
    if answer.answer == REACHED_AND_LEAVES:
        return "handed_over"
    is_named = version is not None and version.saved.has_all(lo, hi, barrier.id)
    return "handed_over" if is_named and NEVER < revoked <= answer.generation else "lost"


def _is_owned(group: Group, key: Key) -> bool:
    found = group.pieces.get(key[0])
    return found is not None and any(part.owner != NOBODY for part in found[key[1]])
