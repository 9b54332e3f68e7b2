"""Logs of leases that are shared, and what an audit finds in them: without files, however they are cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from kafka_marshal.pipeline.audit.audit import stitch
from kafka_marshal.pipeline.audit.files import TABLES
from kafka_marshal.pipeline.audit.invariants import Breach
from kafka_marshal.pipeline.audit.observer import Observer
from kafka_marshal.pipeline.audit.task import TaskResult
from rationalizer import Record, Upgrade, World, encode
from rationalizer.plane import Entry

#: Table → its rows, by column.
Tables = dict[str, list[dict[str, Any]]]


def log_of(*records: tuple[Record, int]) -> list[Entry]:
    """One CP with these records, each with its timestamp, after the Upgrade to level 4, whose offset is 0."""
    all_of_them = ((Upgrade("9", "admin", "g", 4), 0), *records)
    return [(offset, stamp, encode(record)) for offset, (record, stamp) in enumerate(all_of_them)]


def tables_of(log: Sequence[Entry], cuts: Sequence[int] = (), world_type: type[World] = World) -> Tables:
    """The tables of an audit that replays the segments between these places each by itself."""
    found: Tables = defaultdict(list)

    def write(table: str, rows: Sequence[Sequence[object]]) -> None:
        names = [name for name in TABLES[table].names if name != "partition"]
        found[table].extend(dict(zip(names, row, strict=True)) for row in rows)

    results: list[TaskResult] = []
    world = world_type(0, 1)
    for begin, end in zip((0, *cuts), (*cuts, len(log)), strict=True):
        if begin:
            world = world_type.restore(world.snapshot(), 1)
        observer = Observer(world, write)
        observer.replay(log[begin:end])
        observer.finish()
        results.append(TaskResult(len(results), 0, world.next_offset, world.log_time, 4, "", loose=observer.loose))
    for table, rows in stitch(results).rows.items():
        write(table, rows)
    return found


def is_found(world_type: type[World], log: Sequence[Entry], kind: Breach, offset: int, words: str) -> None:
    """What a broken rationalizer does in this log is one violation; the log itself has none."""
    (found,) = tables_of(log, world_type=world_type)["violations"]
    assert (found["kind"], found["offset"]) == (str(kind), offset)
    assert words in found["detail"]
    assert (found["group"], found["topic"], found["topic_partition"]) == ("g", "t", 0)
    assert tables_of(log)["violations"] == []
