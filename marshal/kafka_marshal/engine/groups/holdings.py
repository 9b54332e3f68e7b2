"""The pieces that a member works on: they follow what the log shows (G16, G18).

A member claims nothing. It starts a partition when it owns all of its keys (or some, if keys are shared) and they are
assigned to it. It releases a partition when a part of it is assigned to another member: it finishes and commits first.
What it reports are CommitOffsets entries, batched since many partitions start or end together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import cast

from kafka_marshal.engine.effects import Note, Outbox
from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.engine.groups.pieces import (
    NOT_OURS,
    REVOKED,
    GroupView,
    HeldPiece,
    LettingGo,
    covers,
    meant_for,
    owned_by,
    owned_since,
    part_of,
    span_of,
    tokens_of,
)
from kafka_marshal.engine.groups.refusals import unasked
from kafka_marshal.engine.holding import HandIn, Holding, Owner
from kafka_marshal.engine.key_share import KeyShare
from kafka_marshal.engine.plane import Loss, Settles, Work
from kafka_marshal.types import Key, SharedEpoch
from rationalizer import CommitEntry, CommitOffsets, Piece, SettleOffsets, codes
from rationalizer.limits import MAX_COMMIT_RANGES, MAX_KEY_HASH
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

    def describe(self, texts: Mapping[Key, str]) -> list[Key]:
        """Say this beside the progress of these partitions. Returns those for which this member can't: then of none."""
        new = {key: text for key, text in texts.items() if self._view.metadata(key) != text}
        cannot = [key for key in new if not self._may_describe(key)]
        self._entries += [CommitEntry(*key, metadata=text) for key, text in new.items() if not cannot]
        return cannot

    def _may_describe(self, key: Key) -> bool:
        piece = self._pieces.get(
            key
        )  # before its start a partition would begin with the text, at its log's start (G14)
        is_whole = piece is not None and piece.span == (0, MAX_KEY_HASH)
        return self._member.joined and is_whole and not self._view.is_first(key)

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


class Holdings:
    """Starts and ends pieces, and updates their proof, which is the member's (T4)."""

    def __init__(
        self,
        member: Membership,
        view: GroupView,
        reports: GroupReports,
        pieces: dict[Key, HeldPiece],
        outbox: Outbox,
        work: Work,
        must_go: Callable[[float], bool],
        starts_late: bool,
    ) -> None:
        self._member = member
        self._view = view
        self._reports = reports
        #: Partition → the piece this member works on.
        self.pieces: dict[Key, HeldPiece] = pieces
        self._outbox = outbox
        self._work = work
        #: Whether all partitions are to be released now.
        self._must_go = must_go
        #: The consumer's ``start=`` is not "earliest": it reports where a partition starts before releasing it (P9).
        self._starts_late = starts_late
        #: With checkpoints: why a piece that the log shows as no longer ours is over.
        #: Our pieces are of a group that takes checkpoints.
        self._has_cuts = False
        self.why_lost: Callable[[HeldPiece], Loss] = lambda piece: Loss.FENCED
        #: Called if this process must not be a member.
        self.fail: Callable[[Exception], object] = lambda error: None
        #: The generation that was followed last; −1: follow again.
        self._seen = -1
        #: Partitions of which another member still had a piece then that is assigned to us.
        self._coming: list[Key] = []
        #: When (own clock, ms) to check all partitions again in any case.
        self.check_at: float = inf

    # Following the log.

    def changed(self) -> None:
        """Any partition may have changed."""
        self._seen = -1

    @property
    def is_current(self) -> bool:
        """Whether the current generation of the group was followed."""
        return self._seen == self._member.generation

    @property
    def awaits_pieces(self) -> bool:
        """Whether another member has yet to release a piece that is assigned to this one."""
        me = self._member.me
        parts = (part for key in self._coming for part in self._view.parts(key))
        return me is not None and any(part.target == me.slot != part.owner for part in parts)

    def follow_all(self, now: float) -> None:
        """Start or end every partition that this member owns or works on, as the log shows."""
        group, me = self._member.group, self._member.me
        if group is None or me is None:
            return
        self._seen, self.check_at = group.generation, inf
        self._coming = [(name, number) for name, topic in group.pieces.items() for number in topic.moving_to(me.slot)]
        keys = {(name, number) for name, topic in group.pieces.items() for number, _ in topic.owned_by(me.slot)}
        for key in sorted(keys | self.pieces.keys()):
            piece, parts = self.pieces.get(key), self._view.parts(key)
            # Of a fleet that starts, each join is a generation: what it left as it was has nothing to follow.
            if piece is None or len(parts) != 1 or piece.followed != parts[0]:
                self.follow(key, now)

    def follow(self, key: Key, now: float) -> None:
        """Start or end one partition, as the log shows."""
        me = self._member.me
        if me is None:
            return
        parts = self._view.parts(key)
        if self._member.takes_checkpoints:
            self._follow_to_a_cut(key, parts, me.slot, now)
        else:
            self._follow(key, parts, me.slot, now)
        if len(parts) == 1 and parts[0].whole and (piece := self.pieces.get(key)) is not None:
            piece.followed = parts[0]

    def _follow(self, key: Key, parts: Sequence[Piece], slot: int, now: float) -> None:
        meant = meant_for(slot, parts, share=self._member.options.allow_key_share)
        if not meant and self._is_unasked(slot, parts):
            self.fail(unasked(key, self._member.settings))
        piece = self.pieces.get(key)
        if piece is not None and owned_since(slot, parts, *piece.span) != piece.epoch:
            if piece.letting_go is None:
                self.lose(piece, Loss.FENCED, now)
            else:
                self.released(piece, now)
            piece = None
        ours = [part for part in parts if part.owner == slot]
        if piece is None and meant:
            piece = self._take_up(key, meant, now)
        elif piece is None and ours and covers(ours, 0, MAX_KEY_HASH) and self._owes_start(key):
            if self._take_up(key, ours, now) is not None:
                self._work.let_go(key, REVOKED, now)
            return
        elif piece is not None and piece.letting_go is None and piece.span != span_of(meant):
            self._work.let_go(key, REVOKED, now)  # a share with other bounds is released and started again as a whole
        lo, hi = (0, -1) if piece is None else piece.span
        revoked = [part for part in ours if part.revoked >= 0]
        self._let_go_unworked(key, [part for part in revoked if part.hi < lo or hi < part.lo], now)

    def _is_unasked(self, slot: int, parts: Sequence[Piece]) -> bool:
        """Whether the log assigns us some keys, though we allow no sharing. The rules never do (K2); this checks it."""
        ours = [part for part in parts if part.target == slot]
        return bool(ours) and not self._member.options.allow_key_share and not covers(ours, 0, MAX_KEY_HASH)

    def _follow_to_a_cut(self, key: Key, parts: Sequence[Piece], slot: int, now: float) -> None:
        """With checkpoints: work on what we own until a checkpoint hands it over, also if it is to move (X14)."""
        piece = self.pieces.get(key)
        if piece is not None and owned_since(slot, parts, *piece.span) != piece.epoch:
            self.lose(piece, self.why_lost(piece), now)
            piece = None
        owned = owned_by(slot, parts, share=self._member.options.allow_key_share)
        if piece is None and owned:
            self._take_up(key, owned, now)

    def still_lets_go(self, piece: HeldPiece, now: float) -> bool:
        """Whether a piece that is being released is still not assigned to this member."""
        me = self._member.me
        if me is None or self._member.leaving or self._must_go(now):
            return True
        meant = meant_for(me.slot, self._view.parts(piece.key), share=self._member.options.allow_key_share)
        return piece.span != span_of(meant)

    # Taking up.

    def _owes_start(self, key: Key) -> bool:
        """Whether this member must report where a partition starts before it releases it, as no member did yet (P9)."""
        if not self._starts_late or not self._view.is_first(key) or self._view.came_later(key):
            return False
        return not self._member.leaving and self._work.takes_on and self._may_take_up(key)

    def _may_take_up(self, key: Key) -> bool:
        if key in self._work.parts or key in self._work.blocked:
            return False
        if self._work.owes and not self._member.takes_checkpoints:
            return False
        return self._work.subscription.has(key)  # the cluster shows it to this member

    def _take_up(self, key: Key, parts: Sequence[Piece], now: float) -> HeldPiece | None:
        is_open = now >= self._member.open_at and not self._member.leaving and not self._must_go(now)
        if not is_open or not self._may_take_up(key):
            return None
        lo, hi, since = parts[0].lo, parts[-1].hi, max(part.since for part in parts)
        tokens = tokens_of(parts)

        def want(owner: Owner) -> Holding:
            keys = KeyShare([(lo, hi)], lambda: self._view.whole_progress(key))
            epoch = SharedEpoch(since, lo, hi, tokens) if keys.is_part or len(tokens) > 1 else since
            progress = self._view.whole_progress(key)
            told_apart = keys.is_part or (progress is not None and progress.pieces is not None)
            about = self._member.options.session_timeout_ms, owner, keys if told_apart else None, self._member.group
            piece = HeldPiece(key, self._member.home, epoch, *about)
            piece.is_restored = not self._member.takes_checkpoints
            piece.prove(self._member.proof.valid_until)
            self.pieces[key] = piece
            return piece

        self._work.take_on(key, self._view.is_first(key), want)
        self._has_cuts = self._member.takes_checkpoints
        self._outbox.add(Note("claimed", key, words="took up", keys=part_of(self.pieces[key])))
        self.pieces[key].owner.granted(now)
        return self.pieces.get(key)

    def _let_go_unworked(self, key: Key, parts: Sequence[Piece], now: float) -> None:
        """Release parts that were revoked before this member started them."""
        if parts and not self._member.leaving:
            self.check_at = min(self.check_at, now + self._member.interval_ms)  # the log may not answer
            for part in parts:
                self._reports.let_go_unworked(key, part.lo, part.hi)

    # Ending.

    def lose(self, piece: HeldPiece, reason: Loss, now: float) -> None:
        """A piece is over, and this member did not release it."""
        if self.pieces.get(piece.key) is piece:
            del self.pieces[piece.key]
        if piece.held:
            why = NOT_OURS if reason is Loss.FENCED else reason
            event = "released" if reason is Loss.HANDED_OVER else "lost"
            self._outbox.add(Note(event, piece.key, why, has_cuts=self._has_cuts, keys=part_of(piece)))
        piece.end()
        piece.owner.lost(reason, now)

    def lose_all(self, reason: Loss, now: float) -> None:
        """All pieces are over, and this member did not release them."""
        for piece in list(self.pieces.values()):
            self.lose(piece, reason, now)

    def expelled(self, reason: Loss, now: float) -> None:
        """This process is no longer a member: pieces that it was releasing are released, all others are lost."""
        for piece in list(self.pieces.values()):
            if piece.letting_go is None:
                self.lose(piece, reason, now)
            else:
                self.released(piece, now)

    def released(self, piece: HeldPiece, now: float) -> None:
        """The log shows that a piece is released."""
        if self.pieces.get(piece.key) is piece:
            del self.pieces[piece.key]
        piece.end()
        piece.owner.released(now)

    def prove(self) -> None:
        """Pass the member's proof to all pieces; it may have changed."""
        until, proven_by = self._member.proof.valid_until, self._member.proof.token
        for piece in self.pieces.values():
            piece.proven_by = proven_by
            if piece.valid_until != until:
                piece.prove(until)
