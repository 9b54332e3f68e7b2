"""The same audit in Spark's executors: equal tables, digests and violations; and its views."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kafka_marshal.errors import AuditError, ConfigurationError
from kafka_marshal.pipeline.audit import sources
from kafka_marshal.pipeline.audit.audit import Audit
from kafka_marshal.pipeline.audit.invariants import Breach
from kafka_marshal.pipeline.audit.owners import handled_by, owned_by
from kafka_marshal.pipeline.audit.sources import DumpSource, ParquetSource
from kafka_marshal.pipeline.audit.task import InProcess, OnSpark
from rationalizer.dump import DumpError
from tests.audit import broken
from tests.audit.logs import WholeLog, forged, random_log
from tests.audit.test_holes import HOLES, STORY, in_order, shortened
from tests.audit.test_tables import audited, rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The first one starts Spark.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TABLES = ("records", "ownership", "progress", "takeovers", "statistics", "violations")


def test_on_spark_and_in_one_process_the_tables_are_equal(spark: SparkSession, tmp_path: Path) -> None:
    log = random_log(30, 900, partitions=4)
    log.store_snapshots(200)
    log.snapshots[2][1:2] = forged(log.world(2, 400))
    found = []
    for settings in ({}, {"spark": spark, "out": tmp_path / "out"}):
        with audited(log, tmp_path, records_per_task=700, **settings) as findings:
            assert findings.digests == log.digests()
            assert [(each.kind, each.partition) for each in findings.examples] == [(Breach.SNAPSHOT_DIFFERS, 2)]
            assert max(each.segments for each in findings.partitions) > 1
            found.append({name: sorted(map(repr, rows(findings, name))) for name in TABLES})
    assert found[0] == found[1]
    for name in TABLES:
        assert spark.table(name).count() == len(found[0][name])
        assert {path.suffix for path in (tmp_path / "out" / name).iterdir()} == {".parquet"}


def test_shares_and_open_messages_are_written(spark: SparkSession, tmp_path: Path) -> None:
    log = WholeLog(1, {0: STORY})
    log.store_snapshots(4)
    with audited(log, tmp_path, records_per_task=1, spark=spark) as findings:
        assert findings.is_clean, findings.examples
        assert findings.partitions[0].segments > 2
        assert sorted(map(shortened, rows(findings, "holes")), key=in_order) == HOLES
        assert spark.table("holes").count() == len(HOLES)
        assert spark.sql("SELECT epoch FROM shares WHERE ended = 'expired'").head()[0] == 1  # type: ignore[index]


def test_a_broken_rationalizer_is_found_in_executors(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(broken)  # type: ignore[no-untyped-call]  # executors don't know the tests
    try:
        with audited(random_log(4, 300), tmp_path, spark=spark, world_type=broken.Generous) as findings:
            assert findings.violations.keys() >= {str(Breach.TWO_OWNERS)}
            assert spark.sql("SELECT count(*) FROM violations").head()[0] == findings.violation_count  # type: ignore[index]
    finally:
        cloudpickle.unregister_pickle_by_value(broken)  # type: ignore[no-untyped-call]


def test_what_fails_in_an_executor_is_reported(spark: SparkSession, tmp_path: Path) -> None:
    """A MarshalError as it is, any other error in a sentence; the folder of the tables stays empty."""
    with pytest.raises(AuditError, match="can't be replayed"):
        OnSpark(spark).map("testing", _fail_as_we_do, [1, 2], tmp_path)
    with pytest.raises(AuditError, match=r"testing failed in Spark: ZeroDivisionError: division by zero\."):
        OnSpark(spark).map("testing", _divide, [1, 0], tmp_path)


def _fail_as_we_do(number: int) -> int:
    if number == 2:
        raise AuditError("can't be replayed")
    return number


_fail_as_we_do.__module__ = "__main__"  # so that it goes to the executors by value


def _divide(number: int) -> float:
    return 1 / number


_divide.__module__ = "__main__"


def test_a_dump_is_read_in_parts(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_LEAST_BYTES", 5_000)
    log = random_log(12, 700)
    path = log.write_dump(tmp_path / "log.jsonl")
    assert path.stat().st_size > 20_000
    with Audit(DumpSource(path), spark=spark) as audit:
        found = audit.open().log
        assert {cp: sum(piece.rows for piece in pieces) for cp, pieces in found.pieces.items()} == {0: 700, 1: 700}
        assert len({piece.path for piece in found.pieces[0]}) == 4
        assert audit.run().digests == log.digests()


@pytest.mark.parametrize("line", [3, 700, 1400], ids=["first part", "in the middle", "last part"])
def test_a_bad_line_is_named_by_its_number(line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a replay (D1), whichever part it is in."""
    monkeypatch.setattr(sources, "_LEAST_BYTES", 5_000)
    monkeypatch.setattr(InProcess, "parallelism", 2)
    path = random_log(12, 700).write_dump(tmp_path / "log.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line - 1] = lines[line - 1].replace(b'"offset"', b'"ofset"')
    path.write_bytes(b"".join(lines))
    with Audit(DumpSource(path)) as audit, pytest.raises(DumpError) as error:
        audit.run()
    assert error.value.line_number == line


def test_a_dump_whose_parts_are_not_in_order_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_LEAST_BYTES", 5_000)
    monkeypatch.setattr(InProcess, "parallelism", 2)
    path = random_log(12, 700).write_dump(tmp_path / "log.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1:700], lines[700:] = lines[700:1399], [*lines[1:700], *lines[1399:]]
    path.write_bytes(b"".join(lines))
    with Audit(DumpSource(path)) as audit, pytest.raises(DumpError, match="is not above"):
        audit.run()


def write_parquet(path: Path, rows_: list[tuple[Any, ...]], **settings: Any) -> Path:
    names = ("partition", "offset", "timestamp", "value")
    types = (pa.int32(), pa.int64(), pa.int64(), pa.binary())
    columns = [pa.array(column, kind) for column, kind in zip(zip(*rows_, strict=True), types, strict=True)]
    pq.write_table(pa.table(columns, names=list(names)), path, **settings)
    return path


def test_parquet_of_others_is_sorted_first(spark: SparkSession, tmp_path: Path) -> None:
    log = random_log(13, 500)
    mixed = [(cp, *entry) for cp, entries in log.entries.items() for entry in entries]
    mixed.sort(key=lambda row: (row[1] * 7919 % 101, row[0], row[1]))
    folder = tmp_path / "parquet"
    folder.mkdir()
    write_parquet(folder / "a.parquet", mixed[::2])
    write_parquet(folder / "b.parquet", mixed[1::2])
    with Audit(ParquetSource([folder], partitions=2), spark=spark) as audit:
        assert audit.run().digests == log.digests()


def test_parquet_in_order_needs_no_sorting(tmp_path: Path) -> None:
    log = random_log(13, 500)
    files = [
        write_parquet(tmp_path / f"{cp}.parquet", [(cp, *entry) for entry in entries], row_group_size=64)
        for cp, entries in log.entries.items()
    ]
    with Audit(ParquetSource(files, partitions=2)) as audit:
        assert audit.run().digests == log.digests()


@pytest.mark.parametrize(
    ("partitions", "words"),
    [(None, "don't say how many partitions"), (1, "holds records of partition 1")],
    ids=["not known", "too few"],
)
def test_parquet_of_an_unknown_number_of_partitions_is_refused(
    partitions: int | None, words: str, tmp_path: Path
) -> None:
    path = write_parquet(tmp_path / "x.parquet", [(1, 5, 0, b"x")])
    with Audit(ParquetSource([path], partitions)) as audit, pytest.raises(ConfigurationError, match=words):
        audit.run()


def test_parquet_with_a_record_twice_is_refused(tmp_path: Path) -> None:
    files = [write_parquet(tmp_path / f"{name}.parquet", [(0, 5, 0, b"x")]) for name in "ab"]
    with Audit(ParquetSource(files, partitions=1)) as audit, pytest.raises(AuditError, match="is also in"):
        audit.run()


def test_a_folder_with_other_things_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    source = DumpSource(random_log(1, 10).write_dump(tmp_path / "log.jsonl"))
    with pytest.raises(ConfigurationError, match="holds something that is no audit"):
        Audit(source, out=tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["log.jsonl", "thesis.tex"]


def test_an_earlier_audit_is_replaced(tmp_path: Path) -> None:
    for seed, length in ((1, 300), (2, 50)):
        with audited(random_log(seed, length), tmp_path, out=tmp_path / "out") as findings:
            assert len(rows(findings, "records")) == findings.records == 2 * length


def test_who_handled_which_message(spark: SparkSession, tmp_path: Path) -> None:
    """Joined with a data topic by offset, and by time."""
    log = random_log(15, 600)
    with audited(log, tmp_path, spark=spark, out=tmp_path / "out") as findings:
        tables = findings.register(spark, "who_")
        for name, folder in findings.tables.items():
            assert tables[name].schema == spark.read.parquet(str(folder)).schema
        done = [row for row in rows(findings, "progress") if row["group"] == "g" and row["first"] is not None]
        wanted = max(done, key=lambda row: row["last"] - row["first"] < 1000)
        offset = wanted["first"]
        messages = spark.createDataFrame(
            [(wanted["topic"], wanted["topic_partition"], offset, "UA1545"), ("nowhere", 0, 1, "AA1")],
            "topic string, partition int, offset long, flight string",
        )
        found = [row.asDict() for row in handled_by(messages, tables["progress"], group="g").collect()]
        answers = {
            (row["client"], row["instance"], row["epoch"], row["offset"])
            for row in done
            if (row["topic"], row["topic_partition"]) == (wanted["topic"], wanted["topic_partition"])
            and row["first"] <= offset <= row["last"]
        }
        messages.createOrReplaceTempView("flights")
        by_sql = spark.sql(
            """
            SELECT m.offset, p.client, p.instance, p.epoch, timestamp_millis(p.time) AS handled_at
            FROM flights m JOIN who_progress p
              ON p.topic = m.topic AND p.topic_partition = m.partition AND m.offset BETWEEN p.first AND p.last
            WHERE p.group = 'g'
            """
        ).collect()
        assert {(row["client"], row["instance"], row["epoch"]) for row in by_sql} == {each[:3] for each in answers}
        assert next(row for row in found if row["flight"] == "AA1")["handled_client"] is None
        assert {(row["handled_client"], row["handled_instance"], row["handled_epoch"]) for row in found} - {
            (None, None, None)
        } == {answer[:3] for answer in answers}
        events = spark.createDataFrame(
            [(wanted["topic"], wanted["topic_partition"], wanted["time"])], "topic string, partition int, time long"
        )
        owners = {row["owner_epoch"] for row in owned_by(events, tables["ownership"], group="g").collect()}
        held = {
            row["epoch"]
            for row in rows(findings, "ownership")
            if all(row[name] == wanted[name] for name in ("group", "topic", "topic_partition"))
            and row["from_time"] <= wanted["time"] < (row["to_time"] or 2**63)
        }
        assert owners == (held or {None})
