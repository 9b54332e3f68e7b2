"""A Delta table goes back with its group: one commit deletes the rows and carries the ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafka_marshal import ConfigurationError, Restore
from kafka_marshal.checkpoints import RestorePiece
from kafka_marshal.errors import SinkError, StaleEpochError
from kafka_marshal.sinks import DeltaSink, Written
from tests.sinks.delta_writer import SCHEMA
from tests.sinks.test_delta import again, commits, offsets
from tests.sinks.test_done_records import T0
from tests.sinks.test_restore import going_back


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(tmp_path / "table", schema=SCHEMA)


def appended(sink: DeltaSink, epoch: int, last: int, partition: int = 0) -> None:
    with sink.transaction("group", [("flights", partition, epoch, last)], kind="coordinated") as tx:
        first = tx.last_offset("flights", partition) + 1
        rows = [(partition, offset, epoch) for offset in range(first, last + 1)]
        tx.append(pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in rows], SCHEMA))


def undo(tx: Any, piece: RestorePiece, position: int, ranges: tuple[tuple[int, int], ...]) -> None:
    part, offset, _ = SCHEMA.names
    kept = "".join(f' AND NOT "{offset}" BETWEEN {first} AND {last}' for first, last in ranges)
    tx.delete(f'"{part}" = {piece.partition} AND "{offset}" >= {position}{kept}')


def stored(sink: DeltaSink) -> Written:
    return sink.progress("group", [T0])[T0]


def test_rows_beyond_the_position_go_in_one_commit(sink: DeltaSink, tmp_path: Path) -> None:
    appended(sink, 70, 9)
    appended(sink, 70, 9, partition=1)
    before = len(commits(tmp_path / "table"))
    again(sink).restore(going_back(90, 5, ((7, 7),)), undo)
    assert len(commits(tmp_path / "table")) == before + 1
    assert offsets(sink) == [0, 1, 2, 3, 4, 7]
    assert offsets(sink, 1) == list(range(10))
    assert stored(sink) == Written(4, 90, True)
    with pytest.raises(StaleEpochError):
        appended(again(sink), 70, 12)
    with pytest.raises(StaleEpochError):
        sink.restore(going_back(80, 0), undo)


def test_a_second_time_it_does_nothing(sink: DeltaSink) -> None:
    appended(sink, 70, 5)
    sink.restore(going_back(90, 2), undo)
    appended(sink, 90, 3)
    sink.restore(going_back(90, 2), undo)
    assert offsets(sink) == [0, 1, 2, 3]


def test_whole_files_of_a_partitioned_table_go(tmp_path: Path) -> None:
    sink = DeltaSink(tmp_path / "table", schema=SCHEMA, partition_by=SCHEMA.names[:1])
    appended(sink, 70, 5)
    appended(sink, 70, 5, partition=1)
    before = len(commits(tmp_path / "table"))
    sink.restore(going_back(90, 0), lambda tx, piece, position, ranges: tx.delete(f'"{SCHEMA.names[0]}" = 0'))
    assert len(commits(tmp_path / "table")) == before + 1
    assert (offsets(sink), offsets(sink, 1), stored(sink)) == ([], list(range(6)), Written(-1, 90, True))


def test_nothing_to_delete_is_a_commit_of_the_ids(sink: DeltaSink) -> None:
    sink.restore(going_back(80, 0), undo)
    assert stored(sink) == Written(-1, 80, True)
    appended(sink, 80, 3)
    sink.restore(going_back(90, 4), undo)
    sink.restore(going_back(95, 10), lambda tx, piece, position, ranges: None)
    assert (offsets(sink), stored(sink)) == ([0, 1, 2, 3], Written(3, 95, True))


@pytest.mark.parametrize("position", [2, 6], ids=["some go", "none would go"])
def test_a_writer_that_commits_meanwhile_has_its_rows_taken_too(sink: DeltaSink, position: int) -> None:
    appended(sink, 70, 5)
    calls = 0

    def overtaken(*given: Any) -> None:
        nonlocal calls
        calls += 1
        undo(*given)
        if calls == 1:
            appended(again(sink), 70, 9)

    sink.restore(going_back(90, position), overtaken)
    assert calls == 2
    assert offsets(sink) == list(range(position))
    assert stored(sink) == Written(position - 1, 90, True)


def test_what_is_refused(sink: DeltaSink) -> None:
    appended(sink, 70, 5)
    with pytest.raises(ConfigurationError, match=r"some keys of flights \[0\]"):
        sink.restore(going_back(90, 2, hi=5), undo)
    with pytest.raises(SinkError, match="deltalake refused it"):
        sink.restore(going_back(90, 2), lambda tx, piece, position, ranges: tx.delete("absent >= 5"))
    with pytest.raises(ConfigurationError, match="predicate must be a string"):
        sink.restore(Restore(1, "rollback", going_back(90, 2).pieces, {}), lambda tx, *_: tx.delete(""))
    assert (offsets(sink), stored(sink)) == ([0, 1, 2, 3, 4, 5], Written(5, 70, True))
