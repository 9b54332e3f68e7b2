"""Owners of a partition's keys over time, in coordinated groups: rows of the table `assignments`.

A span is the time of one owner with key hashes lo … hi of a partition under one fencing token (G5), or the time
without an owner. Pieces are split and merged without a change of owner; spans follow the keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from kafka_marshal.pipeline.audit.schemas import Row
from rationalizer import Piece
from rationalizer.groups.lots import NOBODY
from rationalizer.history import BEFORE

#: (group, topic, partition)
Place = tuple[str, str, int]


class PieceSpan(NamedTuple):
    """Key hashes lo … hi, their owner, and since when. Times are log time (ms), offsets are of the CP."""

    lo: int
    hi: int
    #: Slot of the owner, or ``NOBODY``; the token is then the last owner's.
    slot: int
    client: str
    instance: str
    token: int
    #: BEFORE: it began before the replay. Without an owner: when the last owner was known to have them.
    since: int
    since_offset: int
    #: Time without an owner before (ms); None: no previous owner, or unknown.
    unowned: int | None
    #: Its predecessor may be in an earlier part of the log.
    looks_back: bool = False

    @property
    def owned(self) -> bool:
        """Whether they have an owner."""
        return self.slot != NOBODY


class EndedPiece(NamedTuple):
    """A span that is over."""

    place: Place
    span: PieceSpan
    until_offset: int
    until: int
    ended: str


#: How an ended span ended, and the last moment at which its owner was known to have the keys.
How = Callable[[PieceSpan], tuple[str, int]]


def assignment_row(place: Place, span: PieceSpan, end: EndedPiece | None) -> Row:
    """A row of `assignments`; the writer adds its CP. end: None while it lasts."""
    since = None if span.since == BEFORE else span.since
    begun = None if span.since == BEFORE else span.since_offset
    last = (None, None, "open") if end is None else (end.until_offset, end.until, end.ended)
    names = (*place, span.lo, span.hi, span.client, span.instance, span.token)
    return (*names, begun, since, *last, span.unowned)


def overlay(
    before: Sequence[PieceSpan], after: Sequence[Piece]
) -> Iterator[tuple[int, int, PieceSpan | None, Piece | None]]:
    """The common refinement of both, ascending: (lo, hi, old, new)."""
    keys = [*((span.lo, span.hi) for span in before), *((piece.lo, piece.hi) for piece in after)]
    edges = sorted({edge for lo, hi in keys for edge in (lo, hi + 1)})
    was, now = iter(before), iter(after)
    span, piece = next(was, None), next(now, None)
    for lo, end in itertools.pairwise(edges):
        while span is not None and span.hi < lo:
            span = next(was, None)
        while piece is not None and piece.hi < lo:
            piece = next(now, None)
        old = span if span is not None and span.lo <= lo else None
        new = piece if piece is not None and piece.lo <= lo else None
        if old is not None or new is not None:
            yield lo, end - 1, old, new


def joined(spans: Iterable[PieceSpan]) -> list[PieceSpan]:
    """Merge neighbours that are equal except for their keys."""
    found: list[PieceSpan] = []
    for span in spans:
        if found and found[-1].hi + 1 == span.lo and found[-1][2:] == span[2:]:
            span = span._replace(lo=found.pop().lo)
        found.append(span)
    return found


class PieceSpans:
    """The present span of each key of each partition."""

    def __init__(self) -> None:
        self.now: dict[Place, list[PieceSpan]] = {}
        #: Groups that may have spans in an earlier part of the log.
        self._older: set[str] = set()
        #: Groups that were forgotten, so that spans there have ended.
        self.forgotten: set[str] = set()

    def begin(self, group_id: str) -> None:
        """The group existed before this replay began."""
        self._older.add(group_id)

    def adopt(self, place: Place, pieces: Sequence[Piece], names: Callable[[int], tuple[str, str]]) -> None:
        """These pieces already have owners where the replay begins."""
        spans = [
            PieceSpan(piece.lo, piece.hi, piece.owner, *names(piece.owner), piece.since, BEFORE, BEFORE, None)
            for piece in pieces
        ]
        if spans:
            self.now[place] = joined(spans)

    def change(
        self,
        place: Place,
        pieces: Sequence[Piece],
        at: tuple[int, int],
        names: Callable[[int], tuple[str, str]],
        how: How,
    ) -> tuple[list[EndedPiece], list[tuple[PieceSpan | None, PieceSpan]]]:
        """Set the partition's pieces from (offset, log time) on.

        Returns the spans that ended, and those that began: each with its predecessor.
        """
        offset, log_time = at
        ended: list[EndedPiece] = []
        begun: list[tuple[PieceSpan | None, PieceSpan]] = []
        found: list[PieceSpan] = []
        for lo, hi, old, piece in overlay(self.now.get(place, ()), pieces):
            was = None if old is None else old._replace(lo=lo, hi=hi)
            if was is not None and _is_so_still(was, piece):
                found.append(was)
                continue
            known = None
            if was is not None and was.owned:
                word, known = how(was)
                ended.append(EndedPiece(place, was, offset, log_time, word))
            elif was is not None and was.since != BEFORE:
                known = was.since
            if piece is None:
                assert was is not None
                assert known is not None
                found.append(PieceSpan(lo, hi, NOBODY, "", "", was.token, known, offset, None))
                continue
            gap = None if known is None else log_time - known
            looks_back = was is None and place[0] in self._older
            owner = (piece.owner, *names(piece.owner), piece.since)
            found.append(PieceSpan(lo, hi, *owner, log_time, offset, gap, looks_back))
            begun.append((was, found[-1]))
        self.now[place] = joined(found)
        return _joined_ends(ended), begun

    def forget(self, group_id: str, at: tuple[int, int]) -> list[EndedPiece]:
        """The group was forgotten (C16); returns the spans that ended."""
        places = [place for place in self.now if place[0] == group_id]
        ended = [
            EndedPiece(place, span, *at, "forgotten") for place in places for span in self.now.pop(place) if span.owned
        ]
        self._older.discard(group_id)
        self.forgotten.add(group_id)
        return ended


def _is_so_still(span: PieceSpan, piece: Piece | None) -> bool:
    if piece is None:
        return not span.owned
    return (span.slot, span.token) == (piece.owner, piece.since)


def _joined_ends(ended: list[EndedPiece]) -> list[EndedPiece]:
    """Merge parts of one span that ended alike into one row."""
    if len(ended) < 2:
        return ended
    ends: dict[str, list[PieceSpan]] = {}
    for each in ended:
        ends.setdefault(each.ended, []).append(each.span)
    first = ended[0]
    return [first._replace(span=span, ended=word) for word, spans in ends.items() for span in joined(spans)]


def parts_of(span: PieceSpan, before: Sequence[PieceSpan]) -> Iterator[PieceSpan]:
    """The span, completed with how it began in an earlier part of the log.

    before: the spans of its partition at the end of that part.
    """
    if span.since != BEFORE and not span.looks_back:
        yield span
        return
    at = span.lo
    for old in before:
        lo, hi = max(at, old.lo), min(span.hi, old.hi)
        if lo > hi:
            continue
        if at < lo:
            yield span._replace(lo=at, hi=lo - 1)
        part = span._replace(lo=lo, hi=hi)
        if span.looks_back:
            gap = span.since - old.since if not old.owned and old.since != BEFORE else None
            part = part._replace(unowned=gap, looks_back=old.looks_back)
        elif (old.slot, old.token) == (span.slot, span.token):
            part = old._replace(lo=lo, hi=hi)
        yield part
        at = hi + 1
    if at <= span.hi:
        yield span._replace(lo=at)
