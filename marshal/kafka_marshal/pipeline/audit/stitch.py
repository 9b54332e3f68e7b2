"""Segments put together again: what began in one and ended in another, and what is still open at the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kafka_marshal.pipeline.audit.invariants import LeaseKey
from kafka_marshal.pipeline.audit.observer import Freed, Holding
from kafka_marshal.pipeline.audit.schemas import TABLES, Row
from kafka_marshal.pipeline.audit.task import TaskResult

__all__ = ["Stitched", "stitch"]

_TAKEOVERS = [name for name in TABLES["takeovers"].names if name != "partition"]
_TIME, _FROM, _UNOWNED = (_TAKEOVERS.index(name) for name in ("time", "from_client", "unowned_ms"))


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
    freed: dict[LeaseKey, Freed | None] = {}
    log_time = 0
    for result in results:
        log_time = result.log_time
        for holding in result.loose.ended:
            before = open_since.pop((holding.key, holding.epoch), None)
            found.ownership.append(_since(holding, before).row())
        for row in result.loose.takeovers:
            found.takeovers.append(_from(row, freed.get((row[0], row[1], row[2]))))  # type: ignore[arg-type]
        held = {}
        for holding in result.loose.open:
            name = (holding.key, holding.epoch)
            held[name] = _since(holding, open_since.get(name))
        open_since = held
        freed = {key: freed.get(key) if each is None else each for key, each in result.loose.free.items()}
    found.ownership += [holding.row() for holding in open_since.values()]
    found.unowned = {key: log_time - each.time for key, each in freed.items() if each is not None}
    return found


def _since(holding: Holding, before: Holding | None) -> Holding:
    """With the time it began at, where an earlier segment saw that."""
    if holding.from_time is not None or before is None:
        return holding
    return replace(holding, from_time=before.from_time)


def _from(row: Row, freed: Freed | None) -> Row:
    """With what an earlier segment knows of the lease's last holder."""
    if freed is None:
        return row
    told = list(row)
    time = row[_TIME]
    assert isinstance(time, int)
    told[_FROM : _FROM + 2] = freed.client, freed.instance
    told[_UNOWNED] = time - freed.time
    return tuple(told)
