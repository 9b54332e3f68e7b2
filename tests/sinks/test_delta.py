"""Delta tables: epochs, repeats, and concurrent commits."""

from __future__ import annotations

import json
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from kafka_marshal import Restore
from kafka_marshal.checkpoints import RestorePiece
from kafka_marshal.errors import ConfigurationError, SinkError, StaleEpochError, WrongEpochKindError
from kafka_marshal.sinks import DeltaSink, Written
from kafka_marshal.types import SharedEpoch
from tests.sinks.delta_writer import SCHEMA, Writer, batch, write
from tests.sinks.test_done_records import attempt, message
from tests.sinks.test_restore import going_back

T0 = ("flights", 0)


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(tmp_path / "table", schema=SCHEMA)


def again(sink: DeltaSink) -> DeltaSink:
    """A further writer, as unpickled in another process."""
    made: DeltaSink = pickle.loads(pickle.dumps(sink))
    return made


def rows(sink: DeltaSink) -> list[tuple[int, int, int]]:
    """(partition, offset, epoch), sorted, read with deltalake."""
    table = DeltaTable(sink._table).to_pyarrow_table()
    return sorted(tuple(row[name] for name in SCHEMA.names) for row in table.to_pylist())


def offsets(sink: DeltaSink, partition: int = 0) -> list[int]:
    return [offset for at, offset, _ in rows(sink) if at == partition]


def progress(sink: DeltaSink) -> dict[tuple[str, int], Written]:
    return sink.progress("group", [("flights", partition) for partition in range(4)])


def commits(table: Path) -> list[tuple[dict[str, int], int]]:
    """(versions of ids, rows) of each commit, from the log on disk."""
    found = []
    for path in sorted((table / "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in path.read_text().splitlines()]
        versions = {action["txn"]["appId"]: action["txn"]["version"] for action in actions if "txn" in action}
        added = [json.loads(action["add"]["stats"])["numRecords"] for action in actions if "add" in action]
        found.append((versions, sum(added)))
    return found


# -- one writer after the other ----------------------------------------------------------------------------------------


def test_rows_offset_and_epoch_are_one_commit(sink: DeltaSink, tmp_path: Path) -> None:
    assert write(sink, 7, 0, 2) == 3
    assert rows(sink) == [(0, 0, 7), (0, 1, 7), (0, 2, 7)]
    assert progress(sink) == {T0: Written(2, 7)}
    assert again(sink).progress("other group", [T0]) == {}
    ids = {"group/flights/0": 2, "group/flights/0/epoch": 7}
    assert commits(tmp_path / "table")[1:] == [(ids | {"group/flights/0": -1}, 0), (ids, 3)]
    write(sink, 7, 3, 3)
    assert len(commits(tmp_path / "table")) == 4, "an epoch is entered once"


def test_a_batch_that_comes_again_is_written_once(sink: DeltaSink, tmp_path: Path) -> None:
    write(sink, 7, 0, 4)
    assert write(sink, 9, 2, 6) == 2, "the new holder reads from what the log knew, which was less"
    assert offsets(sink) == list(range(7))
    before = commits(tmp_path / "table")
    assert write(sink, 9, 0, 3) == 0
    assert progress(sink) == {T0: Written(6, 9)}, "a shorter one takes nothing back"
    assert commits(tmp_path / "table") == before, "nothing new, no commit"


def test_rows_that_can_only_be_double_are_refused(sink: DeltaSink) -> None:
    write(sink, 7, 0, 4)
    with (
        pytest.raises(ConfigurationError, match=r"all offsets .* already.*Nothing of this.*above tx.last_offset"),
        sink.transaction("group", [(*T0, 7, 4)]) as tx,
    ):
        tx.append(batch(0, 7, 3, 4))
    assert offsets(sink) == list(range(5))


def test_an_older_epoch_is_refused_and_writes_nothing(sink: DeltaSink) -> None:
    old, new = again(sink), again(sink)
    write(old, 7, 0, 2)
    with new.transaction("group", [(*T0, 9, 3)]), pytest.raises(StaleEpochError) as caught:
        write(old, 7, 3, 5)
    assert (caught.value.topic, caught.value.partition) == T0
    assert (caught.value.epoch, caught.value.stored_epoch) == (7, 9)
    assert not caught.value.retry
    assert offsets(sink) == [0, 1, 2]
    assert progress(sink) == {T0: Written(3, 9)}


def test_one_stale_partition_refuses_the_whole_transaction(sink: DeltaSink) -> None:
    write(sink, 9, 0, 0, partition=1)
    with pytest.raises(StaleEpochError), sink.transaction("group", [("flights", 0, 5, 3), ("flights", 1, 5, 3)]):
        pytest.fail("it may not get here")
    assert progress(sink) == {("flights", 1): Written(0, 9)}


def test_several_partitions_are_one_commit(sink: DeltaSink, tmp_path: Path) -> None:
    with sink.transaction("group", [("flights", 0, 5, 3), ("flights", 1, 6, 1)]) as tx:
        tx.append(batch(0, 5, 0, 3))
        tx.append(batch(1, 6, 0, 1))
        with pytest.raises(ConfigurationError, match="not one of this transaction's"):
            tx.last_offset("flights", 2)
    assert progress(sink) == {T0: Written(3, 5), ("flights", 1): Written(1, 6)}
    assert [count for _, count in commits(tmp_path / "table")] == [0, 0, 6]
    with sink.transaction("group", [("flights", 0, 5, 2), ("flights", 1, 6, 2)]) as tx:
        tx.append(batch(1, 6, 2, 2))
    assert progress(sink) == {T0: Written(3, 5), ("flights", 1): Written(2, 6)}, "a shorter range takes nothing back"


def test_an_exception_writes_no_rows(sink: DeltaSink) -> None:
    with pytest.raises(KeyError, match="mine"), sink.transaction("group", [(*T0, 8, 9)]) as tx:
        tx.append(batch(0, 8, 0, 9))
        raise KeyError("mine")
    assert rows(sink) == []
    assert progress(sink) == {T0: Written(-1, 8)}, "the epoch is entered first"


def test_epochs_of_the_other_kind_are_refused_until_the_sink_is_converted(sink: DeltaSink) -> None:
    write(sink, 50, 0, 0)
    for epoch in (0, 49, 50, 51, 2**40):
        with (
            pytest.raises(WrongEpochKindError),
            sink.transaction("group", [(*T0, epoch, 1)], kind="coordinated"),
        ):
            pytest.fail("it may not get here")
    sink.convert("group", "coordinated", [T0])
    assert progress(sink) == {T0: Written(0, -1, coordinated=True)}
    with pytest.raises(WrongEpochKindError):
        write(sink, 2**40, 1, 1)
    with sink.transaction("group", [(*T0, 3, 1)], kind="coordinated") as tx:
        tx.append(batch(0, 3, 1, 1))
    assert progress(sink) == {T0: Written(1, 3, coordinated=True)}
    with pytest.raises(StaleEpochError), sink.transaction("group", [(*T0, 2, 2)], kind="coordinated"):
        pytest.fail("it may not get here")


def test_rewind_and_forget(sink: DeltaSink) -> None:
    write(sink, 3, 0, 5)
    sink.rewind("group", {T0: 2})
    assert progress(sink) == {T0: Written(2, 3)}
    assert write(sink, 3, 0, 5) == 3
    with pytest.raises(StaleEpochError):
        write(sink, 1, 6, 6)
    sink.forget("group", [T0])
    assert progress(sink) == {}
    assert write(sink, 1, 0, 0) == 1


def test_checkpoint_and_cleaning_of_the_log_keep_the_fence(tmp_path: Path) -> None:
    table = tmp_path / "table"
    DeltaTable.create(str(table), SCHEMA, configuration={"delta.logRetentionDuration": "interval 0 seconds"})
    sink = DeltaSink(table)
    write(sink, 7, 0, 4)
    for offset in range(5, 8):
        write(sink, 9, offset, offset)
    opened = DeltaTable(str(table))
    for path in (table / "_delta_log").glob("*.json"):
        os.utime(path, (1, 1))
    opened.create_checkpoint()
    opened.cleanup_metadata()
    opened.optimize.compact()
    assert len(commits(table)) < 4, "the commits are gone"
    with pytest.raises(StaleEpochError):
        write(sink, 7, 5, 9)
    assert write(sink, 9, 5, 8) == 1
    assert offsets(sink) == list(range(9))


# -- rejections --------------------------------------------------------------------------------------------------------


def test_single_records_in_any_order_are_refused_with_the_reason(sink: DeltaSink) -> None:
    with pytest.raises(ConfigurationError, match=r"never forgets an id.*Nothing of this.*SqliteSink"):
        sink.record(message(1), group_id="group", epoch=7, kind="claimed")
    with (
        attempt(5, order="key"),
        pytest.raises(ConfigurationError, match="left out for good"),
        sink.transaction("group", [(*T0, 7, 5)]),
    ):
        pytest.fail("it may not get here")
    with (
        pytest.raises(ConfigurationError, match="shared by key"),
        sink.transaction("group", [(*T0, SharedEpoch(7, 0, 99), 5)]),
    ):
        pytest.fail("it may not get here")


@pytest.mark.parametrize("name", ["ALLOW_UNSAFE_RENAME", "aws_s3_allow_unsafe_rename", "MOUNT_ALLOW_UNSAFE_RENAME"])
def test_a_store_on_which_commits_can_be_replaced_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}=true lets one Delta commit replace another"):
        DeltaSink("s3://bucket/flights", storage_options={name: "true"})
    monkeypatch.setenv(name, "true")
    with pytest.raises(ConfigurationError, match="Unset it"):
        DeltaSink("s3://bucket/flights")
    monkeypatch.setenv(name, "false")
    DeltaSink("s3://bucket/flights")


def test_a_table_whose_ids_expire_is_refused(tmp_path: Path) -> None:
    expiry = {"delta.setTransactionRetentionDuration": "interval 1 days"}
    DeltaTable.create(str(tmp_path / "table"), SCHEMA, configuration=expiry)
    with pytest.raises(SinkError, match="old writers not refused") as caught:
        write(DeltaSink(tmp_path / "table"), 7, 0, 0)
    assert not caught.value.retry


def test_what_is_no_table_no_schema_or_no_rows(sink: DeltaSink, tmp_path: Path) -> None:
    with pytest.raises(SinkError, match="give the sink its schema"):
        write(DeltaSink(tmp_path / "none"), 7, 0, 0)
    with pytest.raises(SinkError, match="Partition column 'nope'"):
        write(DeltaSink(tmp_path / "none", schema=SCHEMA, partition_by=["nope"]), 7, 0, 0)
    with pytest.raises(ConfigurationError, match="schema must be an Arrow schema"):
        DeltaSink(tmp_path / "none", schema=3)
    misfits: list[tuple[type[Exception], Any]] = [
        (ConfigurationError, [1, 2]),
        (SinkError, pa.table({"x": [1]})),
        (SinkError, pa.table({"partition": ["a"], "offset": ["b"], "epoch": ["c"]})),
    ]
    for error, misfit in misfits:
        with pytest.raises(error, match="Nothing of this"), sink.transaction("group", [(*T0, 7, 5)]) as tx:
            tx.append(misfit)
    assert rows(sink) == []
    assert write(sink, 7, 0, 0) == 1


def test_after_a_fork_it_says_what_to_do(sink: DeltaSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """deltalake itself would panic, with an exception that no handler catches."""
    write(sink, 7, 0, 0)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(SinkError, match=r'used before this process was forked.*Nothing of.*get_context\("spawn"\)'):
        write(sink, 7, 1, 1)


# -- concurrent commits ------------------------------------------------------------------------------------------------


def test_a_commit_after_anothers_epoch_is_refused_although_its_check_went_well(sink: DeltaSink) -> None:
    """The lease moves while the old holder is in its block."""
    with pytest.raises(StaleEpochError), sink.transaction("group", [(*T0, 7, 3)]) as tx:
        tx.append(batch(0, 7, 0, 3))
        write(again(sink), 9, 0, 1)
    assert rows(sink) == [(0, 0, 9), (0, 1, 9)]


@pytest.mark.parametrize("theirs", [7, 9])
def test_a_commit_between_check_and_commit_is_found_by_the_conflict(
    sink: DeltaSink, theirs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later than any of our checks: only Delta itself can detect it."""
    write(sink, 7, 0, 0)
    commit, met = DeltaSink._commit, list[bool]()

    def late(self: DeltaSink, *arguments: Any) -> bool:
        if self is sink and not met:
            met.append(True)
            write(again(sink), theirs, 1, 2)
        return commit(self, *arguments)

    monkeypatch.setattr(DeltaSink, "_commit", late)
    with pytest.raises(SinkError) as caught:
        write(sink, 7, 1, 3)
    assert isinstance(caught.value, StaleEpochError) == (theirs == 9)
    assert caught.value.retry == (theirs == 7), "another transaction of our own epoch: run it again"
    assert rows(sink) == [(0, 0, 7), (0, 1, theirs), (0, 2, theirs)]


def test_commits_of_other_partitions_and_of_maintenance_do_not_disturb(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(sink, 7, 0, 0)
    write(sink, 7, 1, 1)
    commit, met = DeltaSink._commit, list[bool]()

    def late(self: DeltaSink, *arguments: Any) -> bool:
        if self is sink and not met:
            met.append(True)
            write(again(sink), 3, 0, 5, partition=1)
            DeltaTable(sink._table).optimize.compact()
        return commit(self, *arguments)

    monkeypatch.setattr(DeltaSink, "_commit", late)
    assert write(sink, 7, 2, 4) == 3
    assert offsets(sink) == list(range(5))
    assert offsets(sink, 1) == list(range(6))


def test_writers_that_start_together_create_the_table_once(sink: DeltaSink) -> None:
    barrier = threading.Barrier(4)

    def first_write(partition: int) -> None:
        barrier.wait(30)
        write(again(sink), 1, 0, 0, partition)

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(first_write, partition) for partition in range(4)]:
            each.result(60)
    assert rows(sink) == [(partition, 0, 1) for partition in range(4)]


@pytest.mark.parametrize("rows_each", [30, pytest.param(600, marks=pytest.mark.campaign)])
def test_two_processes_at_the_same_time_never_lose_or_double(
    sink: DeltaSink, rows_each: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Both write partition 0, the second with a newer epoch; each has another partition besides."""
    write(sink, 1, 0, 0)
    old, new = (Writer(tmp_path / "table", epoch, rows_each, 0, epoch) for epoch in (2, 3))
    for each in (old, new):
        request.addfinalizer(each.process.kill)
        assert each.hear() == "ready"
    old.go()
    old.hear(3)
    new.go()
    assert (old.rest(), new.rest()) in [("stale", "end"), ("end", "end")]
    assert offsets(sink) == list(range(rows_each))
    assert offsets(sink, 3) == list(range(rows_each))
    assert offsets(sink, 2) == list(range(len(offsets(sink, 2))))
    by_epoch = [epoch for _, _, epoch in rows(sink)]
    assert by_epoch[:rows_each] == sorted(by_epoch[:rows_each]), "after the new one's first commit, none of the old one"
    check_log(tmp_path / "table")


def check_log(table: Path) -> None:
    """Commit by commit, without deltalake: epochs and offsets never fall, and rows are as many as offsets rise by."""
    stored: dict[str, int] = {}
    for versions, added in commits(table):
        risen = 0
        for name, version in versions.items():
            before = stored.get(name, -1)
            assert version >= before, (name, before, version)
            stored[name] = version
            if not name.endswith("/epoch"):
                risen += version - before
        assert risen == added, versions


# -- A Delta table goes back with its group: one commit deletes the rows and carries the ids ----------------------


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
