"""The pieces that a member works on: they follow what the log shows (G16, G18).

A member claims nothing. It starts a partition when it owns all of its keys (or some, if keys are shared) and they are
assigned to it. It releases a partition when a part of it is assigned to another member: it finishes and commits first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from kafka_marshal.engine.effects import Note, Outbox
from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.engine.groups.pieces import NOT_OURS, REVOKED, HeldPiece, part_of
from kafka_marshal.engine.groups.refusals import unasked
from kafka_marshal.engine.groups.reports import GroupReports
from kafka_marshal.engine.groups.view import GroupView, covers, meant_for, owned_by, owned_since, span_of, tokens_of
from kafka_marshal.engine.holding import Holding, Owner
from kafka_marshal.engine.key_share import KeyShare
from kafka_marshal.engine.plane import Loss, Work
from kafka_marshal.types import Key, SharedEpoch
from rationalizer import Piece
from rationalizer.limits import MAX_KEY_HASH


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
