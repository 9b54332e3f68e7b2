"""The questions of docs/audit.md, asked by DuckDB of an audit's tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from kafka_marshal.sinks import DeltaSink
from rationalizer import ClaimingPartition, Heartbeat, Record, ReleasingPartition, encode
from tests.audit.logs import WholeLog
from tests.audit.test_tables import audited
from tests.rationalizer.strategies import Entry

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
