"""Progress: what of one data partition is done for one group (P1-P10), and what of it is open all the same (H1).

Three facts make a record with offset o and key hash h done (P2):

    o <= granted              at most once: delivered for good, whether handled or not (C12)
    o <= done_through(h)      at least once: everything up to there, for the keys of one piece
    o in ranges               out of order: single intervals, for every key

`stable` follows from them: the largest offset with everything up to it done, for every key.

One progress has one form (P10), so that replicas agree byte for byte:
  1. ranges are disjoint, never touch each other, and lie wholly above stable + 1;
  2. every piece of done_through is at least stable, and no range touches it from above;
  3. neighbouring pieces differ.
It follows that the lowest piece *is* stable. A partition that is not shared by key has one piece, so its
done_through and stable are one number: `pieces` is then None, and most of this module has nothing to do.

−1 is the position below every offset: nothing is done (P2). A record that lies in a hole is not done, whatever these
three say (H1); they know no holes, and only the records of section 7b, and a new position, change holes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

from rationalizer import codes
from rationalizer.done_through import DoneThrough, KeyPiece
from rationalizer.holes import NO_KEY, Hole, Holes
from rationalizer.intervals import Intervals, union
from rationalizer.limits import MAX_INTERVALS, MAX_KEY_HASH, MAX_KEY_PIECES, NO_RECORD, NOTHING_DONE

#: What has no ranges shares this one, which is never changed: three objects less for each lease. A group's thousands
#: of leases are what the collector of cycles goes through, while everything else waits.
_NO_RANGES: Final = Intervals()

#: A range of key hashes cuts two pieces at most.
_MOST_GROWTH: Final = 2


class Progress:
    """What is done. Mutators answer with an outcome's code and change nothing where they reject.

    `stable` and `granted` are offsets, −1 for none; `holes` is None where there are none. `again`: the offset of the
    record that last opened something by R2, or replaced the progress; −1: none (R1).
    """

    __slots__ = ("again", "granted", "holes", "intervals", "pieces", "stable")

    def __init__(self) -> None:
        self.stable: int = NOTHING_DONE
        self.granted: int = NOTHING_DONE
        self.intervals = _NO_RANGES
        self.pieces: DoneThrough | None = None
        self.holes: Holes | None = None
        self.again: int = NO_RECORD

    # -- reading ---------------------------------------------------------------------------------------

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The intervals (first, last) above stable that are done for every key, ascending."""
        return self.intervals.pairs()

    @property
    def done_through(self) -> list[KeyPiece]:
        """Pieces (lo, hi, offset) that cover all key hashes, ascending; offset −1: nothing is done."""
        if self.pieces is None:
            return [(0, MAX_KEY_HASH, self.stable)]
        return self.pieces.pieces()

    @property
    def piece_count(self) -> int:
        """How many pieces `done_through` has."""
        return 1 if self.pieces is None else len(self.pieces)

    def has_all(self, lo: int, hi: int, offset: int) -> bool:
        """Whether `done_through` is this offset for each key hash of lo … hi."""
        if self.pieces is None:
            return self.stable == offset
        return self.pieces.is_all(lo, hi, offset)

    def has_room(self, lo: int, hi: int, offset: int) -> bool:
        """Whether the pieces stay within their limit if lo … hi is raised to `offset` (G15)."""
        if self.pieces is None or len(self.pieces) + _MOST_GROWTH <= MAX_KEY_PIECES:
            return True
        edit = self.pieces.plan(lo, hi, offset)
        return edit is None or self.pieces.has_room(edit, MAX_KEY_PIECES)

    @property
    def open(self) -> list[Hole]:
        """The holes, ascending."""
        return [] if self.holes is None else list(self.holes)

    def is_done(self, offset: int, key_hash: int | None = None) -> bool:
        """Whether the record at `offset` is done (H1); without a key hash: whether it is for every key."""
        if self.holes is not None and self.holes.at(offset) is not None:
            return False
        return self.has_passed(offset, key_hash)

    def has_passed(self, offset: int, key_hash: int | None = None) -> bool:
        """Whether P2 says that the record at `offset` is done, which knows no holes."""
        if offset <= self.stable or offset in self.intervals:
            return True
        if self.pieces is None or key_hash is None:
            return False
        return offset <= self.pieces.at(key_hash)

    def has_passed_some(self, first: int, last: int, key_hash: int) -> bool:
        """Whether `has_passed` some of these offsets, for this key hash; NO_KEY: for some key."""
        if first <= self.stable or self.intervals.meets(first, last):
            return True
        if self.pieces is None:
            return False
        return first <= (self.pieces.highest if key_hash == NO_KEY else self.pieces.at(key_hash))

    def floor(self, keys: Iterable[tuple[int, int]]) -> int:
        """`done_through` of the key hash of these ranges for which least is done; of none: stable."""
        if self.pieces is None:
            return self.stable
        return min([self.pieces.lowest_of(lo, hi) for lo, hi in keys], default=self.stable)

    def is_in_order(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Whether stable would be at the largest offset of `ranges`, or above, if they were done (K8)."""
        reached = self.stable
        firsts, lasts = union(ranges)
        for first, last in zip(firsts, lasts, strict=True):
            if first > self._end_of_run(reached) + 1:
                return False
            reached = max(last, self._end_of_run(reached))
        return True

    def copy(self) -> Progress:
        """The same, to be changed by itself."""
        copy = Progress()
        copy.stable = self.stable
        copy.granted = self.granted
        copy.again = self.again
        if self.intervals.firsts:
            copy.intervals = self.intervals.copy()
        if self.pieces is not None:
            copy.pieces = self.pieces.copy()
        if self.holes is not None:
            copy.holes = Holes(self.holes)
        return copy

    # -- changing --------------------------------------------------------------------------------------

    def through(self, offset: int) -> str:
        """All up to `offset` is done, for every key (P10): OK, or OFFSET_REGRESSION below stable (C5)."""
        if offset < self.stable:
            return codes.OFFSET_REGRESSION
        if self.pieces is None and not self.intervals.firsts:
            self.stable = offset
        else:
            self._raise_stable(offset)
        return codes.OK

    def grant(self, proposal: int) -> str:
        """Give out everything up to `proposal`, for good (C12): OK, or PROPOSAL_TOO_LOW."""
        if proposal <= self.stable:  # granted is never above stable
            return codes.PROPOSAL_TOO_LOW
        self.granted = proposal
        self._raise_stable(proposal)
        return codes.OK

    def reposition(self, offset: int, again: int = NO_RECORD) -> str:
        """Put the position at `offset`, back or forward (C11): REPOSITIONED, or OK where nothing changed.

        What is parked at or below it stays; all other holes go. again: the record's offset, where R1 wants it.
        """
        kept = None if self.holes is None else self.holes.parked_through(offset)
        same = kept is None or len(kept) == len(self.open)
        self.holes = Holes(kept) if kept else None
        if (
            same
            and offset == self.stable
            and self.granted == NOTHING_DONE
            and self.pieces is None
            and not self.intervals.firsts
        ):
            return codes.OK
        self.stable = offset
        self.granted = NOTHING_DONE
        self.again = max(self.again, again)
        self.pieces = None
        self.intervals = _NO_RANGES
        return codes.REPOSITIONED

    def commit(self, ranges: Sequence[tuple[int, int]], max_intervals: int = MAX_INTERVALS) -> str:
        """The offsets of `ranges` (at least one, first <= last) are done, for every key (P3-P5).

        OK or DUPLICATE_COMMIT; or, changing nothing, INDIVIDUAL_COMMIT_TOO_OLD, or MAX_INDIVIDUAL_COMMIT_REACHED where
        it would leave more intervals than may be, and more than there are (P5, G15).
        """
        firsts, lasts = union(ranges)
        below = bisect_right(lasts, self.stable)
        if below == len(lasts):
            return codes.INDIVIDUAL_COMMIT_TOO_OLD
        del firsts[:below]
        del lasts[:below]
        firsts[0] = max(firsts[0], self.stable + 1)
        edits, growth = self.intervals.plan(firsts, lasts)
        if not edits:
            return codes.DUPLICATE_COMMIT
        # What is stored never touches stable, so only the first new interval can.
        moves_stable = firsts[0] == self.stable + 1
        if growth > moves_stable and len(self.intervals) + growth - moves_stable > max_intervals:
            return codes.MAX_INDIVIDUAL_COMMIT_REACHED
        if self.intervals is _NO_RANGES:
            self.intervals = Intervals()
        self.intervals.carry_out(edits)
        if self.pieces is not None:
            self.pieces.move_on(firsts, lasts, self.intervals.end_of_run)
            self._settle_stable()
        elif moves_stable:
            self._raise_stable(self.stable)
        return codes.OK

    def commit_key_range(self, lo: int, hi: int, offset: int, max_pieces: int = MAX_KEY_PIECES) -> str:
        """All up to `offset` is done for the key hashes lo … hi (P8).

        OK; or, changing nothing, OFFSET_REGRESSION below stable (accepted), MAX_INDIVIDUAL_COMMIT_REACHED where it
        would leave more pieces than may be, and more than there are (G15).
        """
        if lo == 0 and hi == MAX_KEY_HASH:
            return self.through(offset)
        if offset < self.stable:
            return codes.OFFSET_REGRESSION
        offset = self.intervals.end_of_run(offset)
        pieces = self.pieces or DoneThrough([(0, MAX_KEY_HASH, self.stable)])
        edit = pieces.plan(lo, hi, offset)
        if edit is None:
            return codes.OK
        if not pieces.has_room(edit, max_pieces):
            return codes.MAX_INDIVIDUAL_COMMIT_REACHED
        pieces.carry_out(edit)
        self.pieces = pieces
        self._settle_stable()
        return codes.OK

    def restore_pieces(self, pieces: list[KeyPiece]) -> None:
        """Take pieces that cover all key hashes, as `done_through` gave them."""
        self.stable = min(done for _, _, done in pieces)
        self.pieces = DoneThrough(pieces) if len(pieces) > 1 else None

    def settle(self) -> None:
        """Bring the parts, set from outside, into their one form (P10). A replay never needs this."""
        if self.pieces is not None:
            self.pieces.move_on(self.intervals.firsts, self.intervals.lasts, self.intervals.end_of_run)
        self._raise_stable(self.stable)

    # -- the one form ----------------------------------------------------------------------------------

    def _raise_stable(self, offset: int) -> None:
        """Move stable to `offset`, not below where it is, and bring everything back into its one form."""
        offset = self._end_of_run(offset)
        if self.pieces is not None:
            edit = self.pieces.plan(0, MAX_KEY_HASH, offset)
            if edit is not None:
                self.pieces.carry_out(edit)
            self._settle_stable()
            return
        self.stable = offset
        self._drop_done()

    def _settle_stable(self) -> None:
        """Stable is the lowest piece; a single piece is not listed."""
        assert self.pieces is not None
        self.stable = self.pieces.lowest
        if len(self.pieces) == 1:
            self.pieces = None
        self._drop_done()

    def _end_of_run(self, offset: int) -> int:
        return self.intervals.end_of_run(offset) if self.intervals.firsts else offset

    def _drop_done(self) -> None:
        if self.intervals.firsts:
            self.intervals.drop_through(self.stable)
            if not self.intervals.firsts:
                self.intervals = _NO_RANGES

    def __repr__(self) -> str:
        return f"Progress({self.done_through}, ranges={self.ranges}, granted={self.granted})"
