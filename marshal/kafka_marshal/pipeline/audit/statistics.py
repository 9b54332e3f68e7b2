"""The table `statistics`: takeover times, unowned time, churn and rejected records, from the other tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.dataset as ds

from kafka_marshal.pipeline.audit.schemas import TABLES, Row
from kafka_marshal.pipeline.audit.task import TaskResult
from rationalizer.history import LeaseKey

_LEASE = ["partition", "group", "topic", "topic_partition"]

#: how → (name of the statistic, its column).
_TAKEOVERS = {
    "replaced": ("takeover_ms", "silent_ms"),
    "handed over": ("handover_ms", "unowned_ms"),
    "restarted": ("restart_ms", "silent_ms"),
}


def statistics_rows(
    out: Path, results: Iterable[TaskResult], unowned: Mapping[int, Mapping[LeaseKey, int]]
) -> list[Row]:
    """All rows, with `partition`. `out`: the folder of the written tables."""
    rows: list[Row] = []
    open_gaps = {(cp, *key): ms for cp, gaps in unowned.items() for key, ms in gaps.items()}
    takeovers = _dataset(out, "takeovers")
    for how, (name, column) in _TAKEOVERS.items():
        found = takeovers.to_table(columns=[*_LEASE, column], filter=pc.field("how") == how).group_by(_LEASE)
        measured = found.aggregate([(column, each) for each in ("count", "sum", "min", "approximate_median", "max")])
        for row in measured.to_pylist():
            lease = tuple(row[each] for each in _LEASE)
            values = [row[f"{column}_{each}"] for each in ("count", "sum", "min", "approximate_median", "max")]
            rows.append((name, *lease, None, *values))
            if how == "handed over":
                gap = open_gaps.pop(lease, None)
                ms = values[1] or 0
                rows.append(_counted("unowned_ms", lease, values[0] + (gap is not None), ms + (gap or 0)))
    rows += [_counted("unowned_ms", lease, 1, gap) for lease, gap in open_gaps.items()]
    rows += _churn(out)
    rows += _codes(results)
    return sorted(rows, key=lambda row: tuple((value is not None, value) for value in row[:6]))


def _dataset(out: Path, table: str) -> Any:
    return ds.dataset(out / table, format="parquet", schema=TABLES[table])


def _counted(name: str, lease: tuple[Any, ...], count: int, total: int | None = None) -> Row:
    return (name, *lease, None, count, total, None, None, None)


def _churn(out: Path) -> list[Row]:
    """Number of grants of each lease, and of its clients."""
    held = _dataset(out, "ownership").to_table(columns=[*_LEASE, "client"]).group_by(_LEASE)
    rows: list[Row] = []
    for row in held.aggregate([("client", "count"), ("client", "count_distinct")]).to_pylist():
        lease = tuple(row[each] for each in _LEASE)
        rows.append(_counted("tenures", lease, row["client_count"]))
        rows.append(_counted("owners", lease, row["client_count_distinct"]))
    return rows


def _codes(results: Iterable[TaskResult]) -> list[Row]:
    counts: dict[tuple[str, int, str], int] = {}
    for result in results:
        for name, found in (("accepted", result.accepted), ("rejected", result.rejected)):
            for code, count in found.items():
                counts[name, result.partition, code] = counts.get((name, result.partition, code), 0) + count
    return [
        (name, partition, None, None, None, code, count, None, None, None, None)
        for (name, partition, code), count in counts.items()
    ]
