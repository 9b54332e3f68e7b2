"""CommitOffsets, entry by entry (G14, G15, K8), and the positions that a pausing client sets (G21)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final

from rationalizer import codes
from rationalizer.groups.group import Group, let_go
from rationalizer.groups.pieces import Piece, TopicPieces, key_spans
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.progress import Progress
from rationalizer.wire.wellformed import COMMIT, LET_GO, START

#: As on the wire: topic, partition, lo, hi, action, through, ranges, metadata.
Entry = tuple[str, int, int, int, int, int | None, tuple[tuple[int, int], ...], str | None]

#: An entry checks this number of pieces one by one; for one with more, the sender's are sorted out once a record.
_FEW: Final = 8


class Commits:
    """One CommitOffsets of a member, entry by entry (G14). `slot`: the sender's; `generation`: the record's."""

    __slots__ = ("_generation", "_group", "_holdings", "_in_order", "_slot")

    def __init__(self, group: Group, slot: int, generation: int, in_order: bool) -> None:
        self._group = group
        self._slot = slot
        self._generation = generation
        self._in_order = in_order
        self._holdings: dict[tuple[str, int], _Holding] = {}

    def commit(self, entry: Entry) -> str:
        """The entry's code. A rejected one changes nothing."""
        topic, partition, lo, hi, action, through, ranges, metadata = entry
        refusal = self._start_refusal(topic, partition) if action == START else self._refusal(entry)
        if refusal is not None:
            return refusal
        group, code = self._group, codes.OK
        if through is not None or ranges:
            kept = group.kept(topic, partition)
            progress = Progress() if kept is None else kept.progress
            if through is not None:
                code = progress.commit_key_range(lo, hi, through)
            else:
                code = self._commit_ranges(progress, ranges)
            if code not in codes.ACCEPTED:
                return code
            if kept is None:
                kept = group.keep(topic, partition)
                kept.progress = progress
            if action == START and through is not None:
                kept.initial = through
        if metadata is not None:
            group.keep(topic, partition).metadata = metadata
        if action == LET_GO:
            self._let_go(topic, partition, lo, hi)
        return code

    def _refusal(self, entry: Entry) -> str | None:
        """Why the sender may not commit, or release, for these keys."""
        topic, partition, lo, hi, action, *_ = entry
        pieces = self._group.pieces.get(topic)
        if pieces is None or partition >= len(pieces.owners):
            return codes.NOT_ASSIGNED
        if partition in pieces.cut:
            left, right = pieces.touched(partition, lo, hi)
            touched = pieces.cut[partition][left : min(right, left + _FEW)]
            if right - left != 1:
                many = right - left > _FEW
                holding = self._holding(pieces, topic, partition) if many else self._holding_of(touched)
                return holding.refusal(lo, hi, action)
            first, last, owner, since, _, revoked = touched[0]
            if lo < first or last < hi:
                return codes.NOT_ASSIGNED
        else:
            owner, since, revoked = pieces.owners[partition], pieces.since[partition], pieces.revoked[partition]
        if owner != self._slot:
            return codes.NOT_ASSIGNED
        if since > self._generation or (action == LET_GO and revoked > self._generation):
            return codes.ILLEGAL_GENERATION
        return None

    def _start_refusal(self, topic: str, partition: int) -> str | None:
        """Why the sender may not set the start of this partition."""
        pieces = self._group.pieces.get(topic)
        if pieces is None:
            return codes.NOT_ASSIGNED
        if partition in pieces.cut:
            holding = self._holding(pieces, topic, partition)
        else:
            holding = self._holding_of(pieces[partition])
        if not holding.owned.los:
            return codes.NOT_ASSIGNED
        if not holding.old.los:
            return codes.ILLEGAL_GENERATION
        return None if self._group.kept(topic, partition) is None else codes.ALREADY_STARTED

    def _commit_ranges(self, progress: Progress, ranges: tuple[tuple[int, int], ...]) -> str:
        settings = self._group.settings
        if not settings.accept_individual_commit:
            return codes.INDIVIDUAL_COMMIT_NOT_ALLOWED
        if self._in_order and not progress.is_in_order(ranges):
            return codes.OUT_OF_ORDER
        return progress.commit(ranges, settings.max_individual_commits)

    def _let_go(self, topic: str, partition: int, lo: int, hi: int) -> None:
        holding = self._holdings.get((topic, partition))
        if holding is None:
            let_go(self._group.pieces[topic], partition, lo, hi, self._group.generation)
        elif holding.has_revoked(lo, hi):
            for piece in let_go(self._group.pieces[topic], partition, lo, hi, self._group.generation):
                holding.remove(piece.lo, piece.hi)

    def _holding(self, pieces: TopicPieces, topic: str, partition: int) -> _Holding:
        holding = self._holdings.get((topic, partition))
        if holding is None:
            holding = self._holdings[topic, partition] = self._holding_of(pieces[partition])
        return holding

    def _holding_of(self, pieces: Iterable[Piece]) -> _Holding:
        return _Holding(pieces, self._slot, self._generation)


class Starts(Commits):
    """One CommitOffsets in a group that takes checkpoints: progress moves only with an answer (X10)."""

    __slots__ = ()

    def commit(self, entry: Entry) -> str:
        """The entry's code. A start sets `initial`, and nothing else."""
        topic, partition, _, _, action, through, _, _ = entry
        if action != START or through is None:
            return codes.NO_SUCH_BARRIER
        refusal = self._start_refusal(topic, partition)
        if refusal is not None:
            return refusal
        kept = self._group.keep(topic, partition)
        kept.initial = kept.progress.stable = through
        return codes.OK


class _Holding:
    """What of some pieces a sender has, and may commit to, or release, at a generation."""

    __slots__ = ("old", "owned", "ready", "revoked")

    def __init__(self, pieces: Iterable[Piece], slot: int, generation: int) -> None:
        mine = [piece for piece in pieces if piece.owner == slot]
        old = [piece for piece in mine if piece.since <= generation]
        self.owned = _Spans(mine)
        self.old = _Spans(old)
        #: Nothing of it was revoked since.
        self.ready = _Spans(piece for piece in old if piece.revoked <= generation)
        #: (lo, hi), ascending.
        self.revoked = [(piece.lo, piece.hi) for piece in mine if piece.owner != piece.target]

    def refusal(self, lo: int, hi: int, action: int) -> str | None:
        """Why the sender may not commit, or release, for these keys."""
        if not self.owned.cover(lo, hi):
            return codes.NOT_ASSIGNED
        fit = self.ready if action == LET_GO else self.old
        return None if fit.cover(lo, hi) else codes.ILLEGAL_GENERATION

    def has_revoked(self, lo: int, hi: int) -> bool:
        """Whether a revoked piece lies within these keys."""
        place = bisect_left(self.revoked, (lo,))
        return place < len(self.revoked) and self.revoked[place][1] <= hi

    def remove(self, lo: int, hi: int) -> None:
        """A revoked piece that was released, so that it was ready."""
        for spans in (self.owned, self.old, self.ready):
            spans.remove(lo, hi)
        del self.revoked[bisect_left(self.revoked, (lo,))]


class _Spans:
    """Keys, as disjoint spans that never touch; both lists ascend."""

    __slots__ = ("his", "los")

    def __init__(self, pieces: Iterable[Piece]) -> None:
        spans = key_spans(pieces)
        self.los = [lo for lo, _ in spans]
        self.his = [hi for _, hi in spans]

    def cover(self, lo: int, hi: int) -> bool:
        """Whether all of lo … hi is among them."""
        place = bisect_right(self.los, lo) - 1
        return place >= 0 and hi <= self.his[place]

    def remove(self, lo: int, hi: int) -> None:
        """Take out lo … hi, which lie in one span."""
        place = bisect_right(self.los, lo) - 1
        first, last = self.los[place], self.his[place]
        rest = [(first, lo - 1), (hi + 1, last)]
        rest = [span for span in rest if span[0] <= span[1]]
        self.los[place : place + 1] = [span[0] for span in rest]
        self.his[place : place + 1] = [span[1] for span in rest]


def reposition_entry(group: Group, entry: Entry, again: int) -> str:
    """One entry of the pausing client's CommitOffsets (G21): its code. again: as R1 wants it."""
    topic, partition, lo, hi, action, through, ranges, metadata = entry
    if action != COMMIT or lo != 0 or hi != MAX_KEY_HASH or ranges:
        return codes.NOT_ASSIGNED
    code = codes.OK
    if through is not None:
        code = group.keep(topic, partition).progress.reposition(through, again)
    if metadata is not None:
        group.keep(topic, partition).metadata = metadata
    return code
