"""SettleOffsets: messages that were done, opened or parked, of a coordinated group (H4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rationalizer import codes
from rationalizer.groups.checkpoint_records import CheckpointRecords
from rationalizer.groups.group import Group, Member
from rationalizer.groups.judging import of_entries
from rationalizer.groups.pieces import Piece
from rationalizer.holes import NO_KEY
from rationalizer.plane import ApplyContext, Verdict
from rationalizer.progress import Progress
from rationalizer.settling import Reach, Settling
from rationalizer.wire.unpacking import Message

_OPERATOR: Final = Reach(None)
_OWNER_OF_ALL: Final = Reach(None, makes=True)


class SettleRecords(CheckpointRecords):
    """Judges type 29."""

    __slots__ = ()

    def _settle_offsets(self, message: Message, context: ApplyContext) -> Verdict:
        """H4: of a member, or of an operator."""
        *_, member_id, generation, seen, topic, partition, done, opened, parked = message
        group = self.groups.get(message[4])
        if group is None:
            return Verdict(codes.UNKNOWN_CONSUMER, False)
        if group.checkpoints is not None:
            return Verdict(codes.WRONG_MODE, False)
        if member_id:
            found = self._sender(message, member_id, context)
            if found is None:
                return Verdict(codes.UNKNOWN_CONSUMER, False)
            _, sender, witness = found
            if generation > group.generation:
                return Verdict(codes.ILLEGAL_GENERATION, False)
            self._lives(group, sender, witness, context)
        kept = group.kept(topic, partition)
        progress = Progress() if kept is None else kept.progress
        if member_id:
            settling: Settling = _OfMember(
                group, progress, sender, generation, (topic, partition), context.offset, seen
            )
        else:
            reach = _OWNER_OF_ALL if context.pausing and not group.members else _OPERATOR
            settling = Settling(progress, reach, context.offset, seen)
        answers = settling.settle(done, opened, parked)
        if kept is None and progress.holes is not None:
            group.keep(topic, partition).progress = progress
        if not member_id and codes.ACCEPTED.isdisjoint(answers):
            return Verdict(codes.FENCED, False, answers)
        return of_entries(answers)


class _OfMember(Settling):
    """Entries of a member: its pieces come first."""

    __slots__ = ("_makes", "_old")

    def __init__(
        self,
        group: Group,
        progress: Progress,
        sender: Member,
        generation: int,
        partition: tuple[str, int],
        offset: int,
        seen: int,
    ) -> None:
        topic, number = partition
        of_topic = group.pieces.get(topic)
        mine = [] if of_topic is None else [piece for piece in of_topic[number] if piece.owner == sender.slot]
        super().__init__(progress, Reach(_spans(mine), makes=True), offset, seen)
        self._makes = group.settings.accept_individual_commit
        self._old = Reach(_spans([piece for piece in mine if piece.since <= generation]))

    def done(self, first: int, last: int) -> str:
        """These offsets are done: the code."""
        return self._refusal(first, last, NO_KEY, False) or super().done(first, last)

    def _make(self, first: int, last: int, key_hash: int, attempts: int, reason: str | None) -> str:
        return self._refusal(first, last, key_hash, True) or super()._make(first, last, key_hash, attempts, reason)

    def _refusal(self, first: int, last: int, key_hash: int, makes: bool) -> str | None:
        """Why the sender may not settle these offsets, whatever their holes say."""
        hashes = [] if key_hash == NO_KEY else [key_hash]
        if self._progress.holes is not None:
            parts = self._progress.holes.parts(first, last)
            hashes += [hole.key_hash for _, _, hole in parts if hole is not None]
        if not all(map(self._reach.has_key, hashes)):
            return codes.NOT_ASSIGNED
        if not all(map(self._old.has_key, hashes)):
            return codes.ILLEGAL_GENERATION
        return codes.INDIVIDUAL_COMMIT_NOT_ALLOWED if makes and not self._makes else None


def _spans(pieces: Sequence[Piece]) -> Sequence[tuple[int, int]]:
    """The key hashes of these pieces, which ascend."""
    spans: list[tuple[int, int]] = []
    for piece in pieces:
        if spans and spans[-1][1] + 1 == piece.lo:
            spans[-1] = (spans[-1][0], piece.hi)
        else:
            spans.append((piece.lo, piece.hi))
    return spans
