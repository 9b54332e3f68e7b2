"""Combines segments: spans that began in one and ended in another, and those still open at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from kafka_marshal.pipeline.audit.hole_observer import OpenRun, hole_row, with_history
from kafka_marshal.pipeline.audit.invariants import WatchedShare
from kafka_marshal.pipeline.audit.observer import ownership_row
from kafka_marshal.pipeline.audit.piece_spans import PieceSpan, Place, assignment_row, joined, parts_of
from kafka_marshal.pipeline.audit.schemas import TABLES, Row
from kafka_marshal.pipeline.audit.share_observer import share_row
from kafka_marshal.pipeline.audit.task import TaskResult
from rationalizer.history import BEFORE, LeaseKey, Span

_TAKEOVERS = [name for name in TABLES["takeovers"].names if name != "partition"]
_TIME, _FROM, _UNOWNED = (_TAKEOVERS.index(name) for name in ("time", "from_client", "unowned_ms"))


@dataclass(slots=True)
class Stitched:
    """Rows of one CP that no segment could produce alone; without `partition`."""

    ownership: list[Row] = field(default_factory=list)
    takeovers: list[Row] = field(default_factory=list)
    assignments: list[Row] = field(default_factory=list)
    shares: list[Row] = field(default_factory=list)
    holes: list[Row] = field(default_factory=list)
    #: Leases free at the log's end → for how long (ms of log time), if known.
    unowned: dict[LeaseKey, int] = field(default_factory=dict)


def stitch(results: Iterable[TaskResult]) -> Stitched:
    """Combine the segments of one CP, which come in order."""
    found = Stitched()
    now: dict[LeaseKey, Span] = {}
    pieces: dict[Place, list[PieceSpan]] = {}
    shares: dict[tuple[LeaseKey, int], int] = {}
    open_shares: list[WatchedShare] = []
    holes: dict[LeaseKey, list[OpenRun]] = {}
    log_time = 0
    for result in results:
        log_time = result.log_time
        found.ownership += [ownership_row(_whole(span, now)) for span in result.loose.ended]
        for row in result.loose.takeovers:
            found.takeovers.append(_from(row, now.get((row[0], row[1], row[2]))))  # type: ignore[arg-type]
        now = {span.key: _whole(span, now) for span in result.loose.now}
        for end in result.loose.pieces_ended:
            parts = parts_of(end.span, pieces.get(end.place, ()))
            found.assignments += [assignment_row(end.place, part, end) for part in parts]
        pieces = _pieces_after(result, pieces)
        found.shares += [share_row(_whole_share(share, shares)) for share in result.loose.shares_ended]
        open_shares = [_whole_share(share, shares) for share in result.loose.shares_now]
        for run_end in result.loose.holes_ended:
            parts_of_run = with_history(run_end.run, holes.get(run_end.key, ()))
            found.holes += [hole_row(run_end.key, part, run_end) for part in parts_of_run]
        holes = {
            key: [part for run in runs for part in with_history(run, holes.get(key, ()))]
            for key, runs in result.loose.holes_now.items()
        }
        shares = {(share.key, share.epoch): share.since for share in open_shares}
    found.shares += [share_row(share) for share in open_shares]
    found.holes += [hole_row(key, run, None) for key, runs in holes.items() for run in runs]
    found.ownership += [ownership_row(span) for span in now.values() if span.held]
    owned = [(place, span) for place, spans in pieces.items() for span in spans if span.owned]
    found.assignments += [assignment_row(place, span, None) for place, span in owned]
    found.unowned = {key: log_time - span.since for key, span in now.items() if not span.held and span.since != BEFORE}
    return found


def _whole(span: Span, before: Mapping[LeaseKey, Span]) -> Span:
    """A span, completed with how it began in an earlier segment."""
    known = before.get(span.key)
    if span.since != BEFORE or known is None or (known.held, known.epoch) != (span.held, span.epoch):
        return span
    names = (span.client_id, span.instance_id) if span.client_id else (known.client_id, known.instance_id)
    return replace(span, since=known.since, client_id=names[0], instance_id=names[1])


def _whole_share(share: WatchedShare, before: Mapping[tuple[LeaseKey, int], int]) -> WatchedShare:
    """A share, completed with when it began in an earlier segment. before: the log time, by lease and epoch."""
    since = before.get((share.key, share.epoch), BEFORE) if share.since == BEFORE else share.since
    return replace(share, since=since)


def _pieces_after(result: TaskResult, before: Mapping[Place, list[PieceSpan]]) -> dict[Place, list[PieceSpan]]:
    """The spans of pieces after a segment: its own, and unowned ones that it did not cover."""
    loose = result.loose
    found = {place: spans for place, spans in before.items() if place[0] not in loose.forgotten}
    for place, spans in loose.pieces_now.items():
        old = found.get(place, [])
        whole = [part for span in spans for part in parts_of(span, old)]
        found[place] = joined(sorted([*whole, *_uncovered(old, spans)]))
    return found


def _uncovered(old: Iterable[PieceSpan], new: list[PieceSpan]) -> Iterator[PieceSpan]:
    """The parts of unowned spans that no newer span covers."""
    for span in old:
        if span.owned:
            continue
        at = span.lo
        for each in new:
            if at < each.lo <= span.hi:
                yield span._replace(lo=at, hi=each.lo - 1)
            if each.lo <= span.hi and each.hi >= at:
                at = each.hi + 1
        if at <= span.hi:
            yield span._replace(lo=at)


def _from(row: Row, freed: Span | None) -> Row:
    """The row, completed with the lease's last holder in an earlier segment."""
    if freed is None or freed.held or freed.since == BEFORE:
        return row
    told = list(row)
    time = row[_TIME]
    assert isinstance(time, int)
    told[_FROM : _FROM + 2] = freed.client_id or None, freed.instance_id or None
    told[_UNOWNED] = time - freed.since
    return tuple(told)
