"""What a member reports to the log: CommitOffsets entries, batched since many partitions start or end together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import cast

from kafka_marshal.engine.effects import Note, Outbox
from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.engine.groups.pieces import HeldPiece, LettingGo, part_of
from kafka_marshal.engine.groups.view import GroupView
from kafka_marshal.engine.holding import HandIn, Holding
from kafka_marshal.engine.plane import Settles
from kafka_marshal.types import Key
from rationalizer import CommitEntry, CommitOffsets, SettleOffsets, codes
from rationalizer.limits import MAX_COMMIT_RANGES
from rationalizer.wire.wellformed import COMMIT, LET_GO, START

#: Entries of one CommitOffsets. 1,000 entries of the longest names stay below the 900,000 bytes of L1.
MAX_ENTRIES = 1_000


class GroupReports:
    """A :class:`~kafka_marshal.engine.plane.PartitionReports`: ``flush`` appends what the other methods collect."""

    needs_start = True

    def __init__(
        self, member: Membership, view: GroupView, pieces: Mapping[Key, HeldPiece], outbox: Outbox, again_ms: float
    ) -> None:
        self._member = member
        self._view = view
        #: What this member works on.
        self._pieces = pieces
        self._outbox = outbox
        #: A release that the log does not answer is sent again after this time (ms).
        self._again_ms = again_ms
        self._entries: list[CommitEntry] = []

    # One partition.

    def beat(self, own: Holding, last_offset: int, now: float) -> None:
        if self._view.is_first(own.key):
            self._entries.append(CommitEntry(*own.key, action=START, through=last_offset))
        elif self._member.takes_checkpoints:  # its next cut reports it (X10)
            _piece(own).owner.beaten(last_offset, True, now)
        elif (progress := self._view.progress(own.key)) is None or last_offset > progress.stable:
            self._through(own, last_offset)
        else:  # the log shows this already, and would not answer
            _piece(own).owner.beaten(last_offset, True, now)

    def prove(self, own: Holding, now: float) -> int:
        return self._member.beat(now)

    def commit(self, own: Holding, ranges: Sequence[tuple[int, int]]) -> None:
        if self._member.takes_checkpoints:
            return  # progress moves at a checkpoint only
        self._entries.append(CommitEntry(*own.key, ranges=tuple(ranges)))

    def settle(self, own: Holding, entries: Settles, now: float) -> None:
        member = self._member
        if member.joined and not member.takes_checkpoints:
            about = (*member.settings.ids, member.member_id, member.generation, member.seen, *own.key)
            member.send(SettleOffsets(*about, entries.done, entries.open, entries.parked), now)

    def grant(self, own: Holding, last_offset: int, now: float) -> None:
        self._through(own, last_offset)

    def let_go(self, own: Holding, last_offset: int | None, why: str, now: float) -> None:
        piece = _piece(own)
        piece.letting_go = LettingGo(last_offset, why, now)
        piece.refresh()
        self._outbox.add(Note("released", piece.key, keys=part_of(piece)))
        if last_offset is not None and self._view.is_first(piece.key):
            # Before all others: a commit without an earlier start would set the start of the partition (G14).
            self._entries.insert(0, CommitEntry(*piece.key, action=START, through=last_offset))
        self._entries.append(CommitEntry(*piece.key, *piece.span, LET_GO, last_offset))

    def give_back(self, own: Holding, last_offset: int | None) -> None:
        if last_offset is not None and not self._member.takes_checkpoints:
            self._through(own, last_offset)

    def let_go_unworked(self, key: Key, lo: int, hi: int) -> None:
        """Release keys that were revoked before this member started them."""
        self._entries.append(CommitEntry(*key, lo, hi, LET_GO))

    def _through(self, own: Holding, last_offset: int) -> None:
        self._entries.append(CommitEntry(*own.key, *_piece(own).span, through=last_offset))

    # All partitions.

    def uncommitted(self) -> Iterator[tuple[HeldPiece, int]]:
        """Pieces with more done without a gap than the log shows, each with the last offset done.

        With checkpoints there are none: such progress waits for the next one.
        """
        if self._member.takes_checkpoints:
            return
        for piece in self._pieces.values():
            if piece.letting_go is None and (last_offset := piece.owner.progress_to_report()) is not None:
                yield piece, last_offset

    @property
    def is_committed(self) -> bool:
        """Whether the log shows all that is done without a gap."""
        return next(self.uncommitted(), None) is None

    def commit_all(self) -> bool:
        """Collect what is done. Returns False if there is nothing to send, or this process is not a member."""
        if not self._member.joined:
            return False
        for piece, last_offset in self.uncommitted():
            self._through(piece, last_offset)
        return bool(self._entries)

    def let_go_again(self, now: float) -> None:
        """Send each release again that the log has not answered in time."""
        for piece in self._pieces.values():
            going = piece.letting_go
            if going is not None and now >= going.sent_at + self._again_ms:
                going.sent_at = now
                self._entries.append(CommitEntry(*piece.key, *piece.span, LET_GO, going.last_offset))

    @property
    def deadline(self) -> float:
        """When (own clock, ms) ``let_go_again`` is due."""
        going = [piece.letting_go for piece in self._pieces.values() if piece.letting_go is not None]
        return min([letting_go.sent_at + self._again_ms for letting_go in going], default=inf)

    def clear(self) -> None:
        """Drop the entries: this process is no longer a member, so the log would reject them."""
        self._entries.clear()

    def flush(self, now: float) -> None:
        """Append all entries, in as few records as possible."""
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

    # The log's answers.

    def answered(self, piece: HeldPiece, action: int, through: int | None, code: str, now: float) -> bool:
        """An entry of this member was applied. Returns whether it released the piece."""
        accepted = code in codes.ACCEPTED
        if action == START:  # another member may have been first: continue from the log's start (P9)
            piece.owner.beaten(through, accepted or code == codes.ALREADY_STARTED, now)
        elif action == COMMIT and through is not None:
            piece.owner.beaten(through, accepted, now)
            piece.owner.answered(through, accepted, code, now)
        elif action == LET_GO and accepted and piece.letting_go is not None:
            piece.owner.handed_in(HandIn(through, code, pausing=False))
            return True
        elif action == LET_GO and piece.letting_go is not None:
            piece.letting_go.sent_at = -inf  # sent in an older generation: send again, unless we may keep it now (G14)
        return False


def _piece(own: Holding) -> HeldPiece:
    return cast("HeldPiece", own)  # made by ``Holdings``
