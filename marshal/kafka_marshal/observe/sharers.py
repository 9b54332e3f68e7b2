"""Workers in words and rows: where they run, and those that share a partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rationalizer.limits import MAX_KEY_HASH

if TYPE_CHECKING:
    from kafka_marshal.instance import Instance
    from kafka_marshal.types import OpenMessages, Sharer

#: The most names in a cell of a table.
_LISTED = 3


def names_of(sharers: Sequence[Sharer]) -> str:
    """Their names, for a cell of a table."""
    names = list(dict.fromkeys(each.client_id for each in sharers))
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def parts_of(sharers: Sequence[Sharer], silence_ms: int, held: Sequence[OpenMessages]) -> list[dict[str, Any]]:
    """The fields that differ in the row of each, if there are several.

    Each has its batches, and its average part of the messages that none has.
    silence_ms: of the one that was heard last. held: what is open.
    """
    if len(sharers) < 2:
        return []
    last = max(each.last_beat for each in sharers)
    ends = [number * (MAX_KEY_HASH + 1) // len(sharers) for number in range(len(sharers) + 1)]
    return [
        {
            "client": each.client_id,
            "instance": each.instance_id,
            "epoch": each.epoch,
            "heartbeat_interval_ms": each.heartbeat_interval_ms,
            "last_beat": each.last_beat,
            "silence_ms": silence_ms + last - each.last_beat,
            "lo": lo,
            "hi": hi - 1,
            "open": tuple(one for one in held if one.holder == each.client_id),
            "sharers": (each,),
        }
        for each, lo, hi in zip(sharers, ends, ends[1:], strict=False)
    ]


def process_cells(runs_at: Instance | None) -> list[str]:
    """Host, process and release of a worker, as cells of a table."""
    return ["-"] * 3 if runs_at is None else [runs_at.host, str(runs_at.pid), runs_at.release]


def process_json(runs_at: Instance | None) -> dict[str, object]:
    """Host, process and release of a worker, as JSON."""
    return {name: getattr(runs_at, name, None) for name in ("host", "pid", "release")}
