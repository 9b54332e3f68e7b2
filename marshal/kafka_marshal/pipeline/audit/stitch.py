"""Segments put together again: what began in one and ended in another, and what is still open at the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kafka_marshal.pipeline.audit.invariants import LeaseKey
from kafka_marshal.pipeline.audit.observer import Holding
from kafka_marshal.pipeline.audit.schemas import TABLES, Row
from kafka_marshal.pipeline.audit.task import TaskResult

__all__ = ["Stitched", "stitch"]

_TAKEOVERS = [name for name in TABLES["takeovers"].names if name != "partition"]
_TIME, _UNOWNED = _TAKEOVERS.index("time"), _TAKEOVERS.index("unowned_ms")


@dataclass(slots=True)
class Stitched:
    """What no segment could tell alone, of one CP; rows are without `partition`."""

    ownership: list[Row] = field(default_factory=list)
    takeovers: list[Row] = field(default_factory=list)
    #: Leases free at the log's end: how long, in ms of log time, where that is known.
    unowned: dict[LeaseKey, int] = field(default_factory=dict)


def stitch(results: Iterable[TaskResult]) -> Stitched:
    """Put the segments of one CP together, which come in order."""
    found = Stitched()
    open_since: dict[tuple[LeaseKey, int], Holding] = {}
    free_since: dict[LeaseKey, int | None] = {}
    log_time = 0
    for result in results:
        log_time = result.log_time
        for holding in result.loose.ended:
            before = open_since.pop((holding.key, holding.epoch), None)
            found.ownership.append(_since(holding, before).row())
        for row in result.loose.takeovers:
            freed_at = free_since.get((row[0], row[1], row[2]))  # type: ignore[arg-type]
            found.takeovers.append(_unowned(row, freed_at))
        held = {}
        for holding in result.loose.open:
            name = (holding.key, holding.epoch)
            held[name] = _since(holding, open_since.get(name))
        open_since = held
        free_since = {
            key: free_since.get(key) if freed_at is None else freed_at for key, freed_at in result.loose.free.items()
        }
    found.ownership += [holding.row() for holding in open_since.values()]
    found.unowned = {key: log_time - since for key, since in free_since.items() if since is not None}
    return found


def _since(holding: Holding, before: Holding | None) -> Holding:
    """With the time it began at, where an earlier segment saw that."""
    if holding.from_time is not None or before is None:
        return holding
    return replace(holding, from_time=before.from_time)


def _unowned(row: Row, freed_at: int | None) -> Row:
    if freed_at is None:
        return row
    time = row[_TIME]
    assert isinstance(time, int)
    return (*row[:_UNOWNED], time - freed_at, *row[_UNOWNED + 1 :])
