"""Progress: what of one data partition is done for one group (P1-P10).

Three facts make a record with offset o and key hash h done (P2):

    o <= granted              at most once: handed out for good, whatever became of it (C12)
    o <= done_through(h)      at least once: everything up to there, for the keys of one piece
    o in ranges               out of order: single intervals, for every key

`stable` follows from them: the largest offset with everything up to it done, for every key.

One progress has one form (P10), so that replicas agree byte for byte:
  1. ranges are disjoint, never touch each other, and lie wholly above stable + 1;
  2. every piece of done_through is at least stable, and no range touches it from above;
  3. neighbouring pieces differ.
It follows that the lowest piece *is* stable. A partition that is not shared by key has one piece, so its
done_through and stable are one number: `pieces` is then None, and most of this module has nothing to do.

−1 is the position below every offset: nothing is done (P2).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from rationalizer import codes
from rationalizer.intervals import Intervals, union
from rationalizer.limits import MAX_INTERVALS, MAX_KEY_HASH, NOTHING_DONE

#: What has no ranges shares this one, which is never changed: three objects less for each lease. A group's thousands
#: of leases are what the collector of cycles goes through, with everything else standing still meanwhile.
_NO_RANGES: Final = Intervals()


class Progress:
    """What is done. Mutators answer with an outcome's code and change nothing where they reject.

    `stable` and `granted` are offsets, −1 for none.
    """

    __slots__ = ("granted", "intervals", "pieces", "stable")

    def __init__(self) -> None:
        self.stable: int = NOTHING_DONE
        self.granted: int = NOTHING_DONE
        self.intervals = _NO_RANGES
        self.pieces: list[tuple[int, int, int]] | None = None

    # -- reading ---------------------------------------------------------------------------------------

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The intervals (first, last) above stable that are done for every key, ascending."""
        return self.intervals.pairs()

    @property
    def done_through(self) -> list[tuple[int, int, int]]:
        """Pieces (lo, hi, offset) that cover all key hashes, ascending; offset −1: nothing is done."""
        if self.pieces is None:
            return [(0, MAX_KEY_HASH, self.stable)]
        return list(self.pieces)

    def is_done(self, offset: int, key_hash: int | None = None) -> bool:
        """Whether the record at `offset` is done (P2); without a key hash: whether it is for every key."""
        if offset <= self.stable or offset in self.intervals:
            return True
        if self.pieces is None or key_hash is None:
            return False
        return offset <= self.pieces[self._piece_of(key_hash)][2]

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

    def reposition(self, offset: int) -> str:
        """Put the position at `offset`, back or forward (C11): REPOSITIONED, or OK where nothing changed."""
        if offset == self.stable and self.granted == NOTHING_DONE and self.pieces is None and not self.intervals.firsts:
            return codes.OK
        self.stable = offset
        self.granted = NOTHING_DONE
        self.pieces = None
        self.intervals = _NO_RANGES
        return codes.REPOSITIONED

    def commit(self, ranges: Sequence[tuple[int, int]], max_intervals: int = MAX_INTERVALS) -> str:
        """The offsets of `ranges` (at least one, first <= last) are done, for every key (P3-P5).

        OK or DUPLICATE_COMMIT; or, changing nothing, INDIVIDUAL_COMMIT_TOO_OLD or
        MAX_INDIVIDUAL_COMMIT_REACHED.
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
        if len(self.intervals) + growth - moves_stable > max_intervals:
            return codes.MAX_INDIVIDUAL_COMMIT_REACHED
        if self.intervals is _NO_RANGES:
            self.intervals = Intervals()
        self.intervals.carry_out(edits)
        if moves_stable or self.pieces is not None:
            self._raise_stable(self.stable)
        return codes.OK

    def commit_key_range(self, lo: int, hi: int, offset: int) -> bool:
        """All up to `offset` is done for the key hashes lo … hi (P8). Whether that changed anything."""
        before = self.done_through
        pieces: list[tuple[int, int, int]] = []
        for piece_lo, piece_hi, done in before:
            if piece_hi < lo or hi < piece_lo or offset <= done:
                pieces.append((piece_lo, piece_hi, done))
                continue
            if piece_lo < lo:
                pieces.append((piece_lo, lo - 1, done))
            pieces.append((max(piece_lo, lo), min(piece_hi, hi), offset))
            if hi < piece_hi:
                pieces.append((hi + 1, piece_hi, done))
        if pieces == before:
            return False
        self.pieces = pieces
        self._raise_stable(min(done for _, _, done in pieces))
        return True

    def restore_pieces(self, pieces: list[tuple[int, int, int]]) -> None:
        """Take pieces that cover all key hashes, as `done_through` gave them."""
        self.stable = min(done for _, _, done in pieces)
        self.pieces = pieces if len(pieces) > 1 else None

    def settle(self) -> None:
        """Bring the parts, set from outside, into their one form (P10). A replay never needs this."""
        self._raise_stable(self.stable)

    # -- the one form ----------------------------------------------------------------------------------

    def _raise_stable(self, offset: int) -> None:
        """Move stable to `offset`, not below where it is, and bring everything back into its one form."""
        intervals = self.intervals
        if intervals.firsts:
            offset = intervals.end_of_run(offset)
            intervals.drop_through(offset)
            if not intervals.firsts:
                self.intervals = _NO_RANGES
        self.stable = offset
        if self.pieces is not None:
            self._settle_pieces(self.pieces)

    def _settle_pieces(self, pieces: list[tuple[int, int, int]]) -> None:
        settled: list[tuple[int, int, int]] = []
        for lo, hi, done in pieces:
            done = self.intervals.end_of_run(max(done, self.stable))
            if settled and settled[-1][2] == done:
                settled[-1] = (settled[-1][0], hi, done)
            else:
                settled.append((lo, hi, done))
        self.pieces = settled if len(settled) > 1 else None

    def _piece_of(self, key_hash: int) -> int:
        assert self.pieces is not None
        return bisect_right(self.pieces, key_hash, key=lambda piece: piece[0]) - 1

    def __repr__(self) -> str:
        return f"Progress({self.done_through}, ranges={self.ranges}, granted={self.granted})"
