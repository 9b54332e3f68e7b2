"""The tables, row by row, against the oracle's reading of the same log, however it is cut."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from kafka_marshal.pipeline.audit import observer as observer_module
from kafka_marshal.pipeline.audit.audit import Audit
from kafka_marshal.pipeline.audit.files import TABLES
from kafka_marshal.pipeline.audit.findings import Findings
from kafka_marshal.pipeline.audit.observer import Observer
from kafka_marshal.pipeline.audit.sources import DumpSource
from kafka_marshal.sinks import DeltaSink
from rationalizer import ClaimingPartition, Heartbeat, Record, ReleasingPartition, World, encode
from rationalizer.dump import Replay
from tests.audit.logs import WholeLog, random_log
from tests.rationalizer.oracle.world import LeaseKey, OracleWorld
from tests.rationalizer.strategies import Entry

SEEDS = range(4)


@contextmanager
def audited(log: WholeLog, folder: Path, **settings: Any) -> Iterator[Findings]:
    """The findings of an audit of the log in this process."""
    snapshots = log.write_snapshots(folder / "snapshots.jsonl") if log.snapshots else None
    with Audit(DumpSource(log.write_dump(folder / "log.jsonl"), snapshots), **settings) as audit:
        yield audit.run()


def rows(findings: Findings, table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = findings.table(table).to_table().to_pylist()
    return found


def oracle_tenures(log: WholeLog) -> set[tuple[Any, ...]]:
    """(group, topic, partition, client, instance, epoch, CP, from, from_time, to, to_time), by the oracle's states."""
    found: set[tuple[Any, ...]] = set()
    for cp, entries in log.entries.items():
        world = OracleWorld(cp, log.partitions)
        held: dict[LeaseKey, tuple[Any, ...]] = {}
        for offset, stamp, value in entries:
            world.apply(offset, stamp, value)
            now = {lease.key: (*lease.holder, lease.epoch) for lease in world.leases() if lease.holder}
            for key in [key for key in held if now.get(key) != held[key][:3]]:
                client, instance, epoch, begun, since = held.pop(key)
                found.add((*key, client, instance, epoch, cp, begun, since, offset, world.log_time))
            for key, holder in now.items():
                held.setdefault(key, (*holder, offset, world.log_time))
        for key, (client, instance, epoch, begun, since) in held.items():
            found.add((*key, client, instance, epoch, cp, begun, since, None, None))
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("every", [None, 60], ids=["whole", "cut at snapshots"])
def test_ownership_is_what_the_oracle_sees(seed: int, every: int | None, tmp_path: Path) -> None:
    log = random_log(seed, 500)
    if every is not None:
        log.store_snapshots(every)
    with audited(log, tmp_path, records_per_task=1) as findings:
        assert findings.is_clean, findings.examples
        found = [tuple(row.values()) for row in rows(findings, "ownership")]
        assert sum(each.segments for each in findings.partitions) > (2 if every else 1)
    # The oracle has the holder (C7) as (client, instance), the table as client, instance.
    assert {row[:11] for row in found} == oracle_tenures(log)
    assert len(found) == len({row[:11] for row in found})
    assert {row[11] for row in found} <= {"released", "replaced", "restarted", "forgotten", "open"}
    assert all((row[11] == "open") == (row[9] is None) for row in found)


@pytest.mark.parametrize("seed", SEEDS)
def test_records_are_the_outcomes_of_replay(seed: int, tmp_path: Path) -> None:
    """The same columns as `kafka-marshal replay` prints (D2)."""
    log = random_log(seed, 400)
    log.store_snapshots(50)
    with audited(log, tmp_path, records_per_task=1) as findings:
        found = sorted(rows(findings, "records"), key=lambda row: (row["partition"], row["offset"]))
        digests = findings.digests
    with (tmp_path / "log.jsonl").open("rb") as lines:
        replay = Replay(lines)
        wanted = sorted(replay.outcomes(), key=lambda line: (line["partition"], line["offset"]))
        state = replay.state()
    names = ("partition", "offset", "log_time", "type", "accepted", "code", "epoch", "entries")
    assert [[row[name] for name in names] for row in found] == [[line.get(name) for name in names] for line in wanted]
    partitions: Any = state["partitions"]
    assert digests == {each["partition"]: each["digest"] for each in partitions} == log.digests()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("every", [None, 60], ids=["whole", "cut at snapshots"])
def test_progress_adds_up_to_what_is_done(seed: int, every: int | None, tmp_path: Path) -> None:
    """Since a lease's last reposition no offset is in two rows, and all rows together equal the world's progress."""
    log = random_log(seed, 500)
    if every is not None:
        log.store_snapshots(every)
    with audited(log, tmp_path, records_per_task=1) as findings:
        progress = sorted(rows(findings, "progress"), key=lambda row: (row["partition"], row["offset"]))
        forgotten = {
            (row["group"], row["partition"]): row["offset"]
            for row in sorted(rows(findings, "records"), key=lambda row: row["offset"])
            if row["type"] == "ForgetGroup" and row["accepted"]
        }
    runs = done_runs(progress, forgotten)
    for cp in range(log.partitions):
        for lease in log.world(cp).leases():
            base, found = runs.get((lease.group_id, lease.topic, lease.partition), (-1, []))
            found.sort()
            assert all(before[1] < after[0] for before, after in pairwise(found))
            done = [(base + 1, lease.progress.stable)] if lease.progress.stable > base else []
            assert merged(found) == merged([*done, *lease.progress.ranges])


def done_runs(
    progress: list[dict[str, Any]], forgotten: Mapping[tuple[str, int], int]
) -> dict[tuple[str, str, int], tuple[int, list[tuple[int, int]]]]:
    """Lease → its last reposition, and the runs done since."""
    runs: dict[tuple[str, str, int], tuple[int, list[tuple[int, int]]]] = defaultdict(lambda: (-1, []))
    for row in progress:
        if row["offset"] < forgotten.get((row["group"], row["partition"]), -1):
            continue
        key = (row["group"], row["topic"], row["topic_partition"])
        if row["what"] == "repositioned":
            runs[key] = (row["stable"], [])
        else:
            runs[key][1].append((row["first"], row["last"]))
    return runs


def merged(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if found and first == found[-1][1] + 1:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return found


def test_columns_are_those_promised(tmp_path: Path) -> None:
    log = random_log(1, 50)
    with audited(log, tmp_path) as findings:
        for name, schema in TABLES.items():
            assert findings.table(name).to_table().schema.names == schema.names
    assert TABLES["ownership"].names == [
        *("group", "topic", "topic_partition", "client", "instance", "epoch", "partition"),
        *("from_offset", "from_time", "to_offset", "to_time", "ended"),
    ]


def test_a_cut_log_gives_the_rows_of_a_whole_one(tmp_path: Path) -> None:
    log = random_log(20, 600)
    tables = ("records", "ownership", "progress", "takeovers", "statistics")
    found = []
    for name in ("whole", "cut"):
        folder = tmp_path / name
        folder.mkdir()
        with audited(log, folder, records_per_task=1) as findings:
            found.append({table: sorted(map(repr, rows(findings, table))) for table in tables})
        log.store_snapshots(40)
    assert found[0] == found[1]


def test_statistics_add_up(tmp_path: Path) -> None:
    log = random_log(8, 800)
    with audited(log, tmp_path) as findings:
        statistics = rows(findings, "statistics")
        takeovers = rows(findings, "takeovers")
        records = rows(findings, "records")
        ownership = rows(findings, "ownership")
    for accepted, name in ((True, "accepted"), (False, "rejected")):
        counted: dict[tuple[int, str], int] = defaultdict(int)
        for row in records:
            if row["accepted"] is accepted:
                counted[row["partition"], row["code"]] += 1
        assert {(row["partition"], row["code"]): row["count"] for row in statistics if row["name"] == name} == counted
    silent = [row["silent_ms"] for row in takeovers if row["how"] == "replaced"]
    assert sum(row["total"] for row in statistics if row["name"] == "takeover_ms") == sum(silent)
    assert max(row["max"] for row in statistics if row["name"] == "takeover_ms") == max(silent)
    assert sum(row["count"] for row in statistics if row["name"] == "tenures") == len(ownership)
    assert sum(row["total"] for row in statistics if row["name"] == "unowned_ms") == unowned(log)


def unowned(log: WholeLog) -> int:
    """ms of log time that leases were free after their first tenure, by the oracle's states."""
    total = 0
    for cp, entries in log.entries.items():
        world = OracleWorld(cp, log.partitions)
        free: dict[LeaseKey, int] = {}
        for entry in entries:
            world.apply(*entry)
            states = {lease.key: lease.holder for lease in world.leases()}
            for key in [key for key in free if key not in states]:
                del free[key]  # forgotten: no longer a lease
            for key, holder in states.items():
                if holder is None:
                    free.setdefault(key, world.log_time)
                elif key in free:
                    total += world.log_time - free.pop(key)
        total += sum(world.log_time - since for since in free.values())
    return total


def test_a_task_keeps_a_bounded_number_of_rows() -> None:
    """However long the log, rows are written whenever the buffer is full."""
    log = random_log(16, 1000, partitions=1)
    written: list[int] = []
    observer = Observer(World(0, 1), lambda name, found: written.append(len(found)))
    kept = 100
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observer_module, "KEPT_ROWS", kept)
        observer.replay(log.entries[0])
        observer.finish()
    assert max(written) <= kept + 5 * 2  # the entries of a batch, of which each is a row or two
    assert len(written) > 10


# -- The questions of docs/audit.md, asked by DuckDB of an audit's tables -----------------------------------------


PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
QUESTIONS = dict(re.findall(r"^```sql\n-- duckdb: (\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
[VIEWS] = re.findall(r"^```python\n(import duckdb\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
[SHOWN] = re.findall(r"^```\n(┌.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

OLD, NEW = ("9c01", "worker-1", "delays"), ("5a2e", "worker-2", "delays")
LEASE = ("flights", 7)

#: The example of the page.
STORY: list[tuple[str, Record]] = [
    ("02:59:00", ClaimingPartition(*OLD, *LEASE, 3000)),
    ("03:00:00", Heartbeat(*OLD, *LEASE, 0, 99)),
    ("03:12:27", Heartbeat(*OLD, *LEASE, 0, 149)),
    ("03:12:30", Heartbeat(*OLD, *LEASE, 0, 149)),
    ("03:12:33", Heartbeat(*NEW, "flights", 6, None, None)),
    ("03:12:41", ClaimingPartition(*NEW, *LEASE, 3000)),
    ("03:59:59", Heartbeat(*NEW, *LEASE, 5, 199)),
    ("04:00:00", ReleasingPartition(*NEW, *LEASE, 5, 209)),
    ("04:00:02", ClaimingPartition(*OLD, *LEASE, 3000)),
]


def at(clock: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-20T{clock}")


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[duckdb.DuckDBPyConnection]:
    folder = tmp_path_factory.mktemp("duckdb")
    entries: list[Entry] = [
        (offset, int(at(clock).replace(tzinfo=UTC).timestamp() * 1000), encode(record))
        for offset, (clock, record) in enumerate(STORY)
    ]
    with audited(WholeLog(1, {0: entries}), folder, out=folder / "audit") as findings:
        assert findings.is_clean
    scope: dict[str, duckdb.DuckDBPyConnection] = {}
    exec(VIEWS.replace("'audit/", f"'{folder}/audit/"), scope)
    # Joined by the question about messages: a table as the fenced sink writes it.
    messages = pa.table(
        {"partition": pa.array([7, 7, 7], pa.int32()), "offset": [99, 100, 205], "value": ["UA1545"] * 3}
    )
    with DeltaSink(folder / "flights.delta", schema=messages.schema).transaction("delays", [(*LEASE, 5, 205)]) as tx:
        tx.append(messages)
    scope["audit"].register("flights", DeltaTable(folder / "flights.delta").to_pyarrow_dataset())
    yield scope["audit"]
    scope["audit"].close()


def test_who_owned_it_at_that_time(audit: duckdb.DuckDBPyConnection) -> None:
    found = audit.sql(QUESTIONS["who"])
    assert found.fetchall() == [("worker-2", "5a2e", 5, at("03:12:41"), at("04:00:00"), "released")]
    assert str(audit.sql(QUESTIONS["who"])).strip() == SHOWN.strip(), "as the page shows it"


def test_the_longest_gap(audit: duckdb.DuckDBPyConnection) -> None:
    assert audit.sql(QUESTIONS["gaps"]).fetchall() == [
        (*LEASE, "worker-1", "worker-2", "replaced", at("03:12:41"), 11.0),
        (*LEASE, "worker-2", "worker-1", "handed over", at("04:00:02"), 2.0),
    ]


def test_which_worker_handled_these_messages(audit: duckdb.DuckDBPyConnection) -> None:
    assert audit.sql(QUESTIONS["handled"]).fetchall() == [
        (7, 99, "worker-1", "9c01", 0, at("03:00:00")),
        (7, 100, "worker-1", "9c01", 0, at("03:12:27")),
        (7, 205, "worker-2", "5a2e", 5, at("04:00:00")),
    ]


def test_how_much_each_did_in_each_hour(audit: duckdb.DuckDBPyConnection) -> None:
    assert audit.sql(QUESTIONS["work"]).fetchall() == [
        ("worker-1", at("03:00:00"), 150, 1),
        ("worker-2", at("03:00:00"), 50, 1),
        ("worker-2", at("04:00:00"), 10, 1),
    ]
