"""Helpers of the benchmarks: a broker, a row, a table, and JSON."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.testing import open_kafka
from kafka_marshal.testing.simulate import where_it_ran

__all__ = ["Row", "bench_kafka", "in_turns", "new_log", "paired", "report"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement beside its baseline of the same run."""

    name: str
    ours: float
    baseline: float
    #: Ours / baseline for rates; for times see the benchmark.
    ratio: float
    #: The ratio's target (with at_most: its upper limit); None: only reported.
    target: float | None
    unit: str
    at_most: bool = False
    #: The least and the greatest ratio of the rounds.
    spread: tuple[float, float] | None = None

    @property
    def reached(self) -> bool:
        """Whether the target is met."""
        if self.target is None:
            return True
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target


@contextmanager
def bench_kafka(properties: Mapping[str, str] | None = None) -> Iterator[str]:
    """A broker to measure on: KAFKA_MARSHAL_TEST_BOOTSTRAP, or a local one with these properties."""
    kafka = open_kafka(properties=properties)
    try:
        yield kafka.bootstrap_servers
    finally:
        kafka.stop()


def new_log(bootstrap: str, partitions: int) -> str:
    """A new coordination topic: its name."""
    name = f"__marshal-{uuid.uuid4().hex[:8]}"
    cluster = KafkaCluster(bootstrap, {})
    create_topic(cluster, name, partitions, 10)
    cluster.close()
    return name


def in_turns(rounds: int, ours: Callable[[], T], baseline: Callable[[], T]) -> list[tuple[T, T]]:
    """(ours, baseline) of each round, in alternating order."""
    found = []
    for number in range(rounds):
        order = (ours, baseline) if number % 2 else (baseline, ours)
        came = {run: run() for run in order}
        found.append((came[ours], came[baseline]))
    return found


def paired(
    name: str, pairs: Sequence[tuple[float, float]], target: float | None, unit: str, *, at_most: bool = False
) -> Row:
    """Of (ours, baseline) of each round: medians, that of the rounds' ratios, and what lies around it."""
    ratios = [ours / baseline for ours, baseline in pairs]
    ours, baseline = (median(each) for each in zip(*pairs, strict=True))
    return Row(name, ours, baseline, median(ratios), target, unit, at_most, (min(ratios), max(ratios)))


def report(name: str, rows: Sequence[Row], json_path: str | None, **conditions: object) -> None:
    """Print a table; write JSON on request."""
    width = max(len(row.name) for row in rows)
    print(f"{name}: {', '.join(f'{key} {value}' for key, value in conditions.items())}")
    print(f"{'':{width}}  {'ours':>12} {'baseline':>12} {'ratio':>7} {'target':>8}")
    for row in rows:
        target = "-" if row.target is None else f"{'≤' if row.at_most else '≥'} {row.target:g}"
        mark = "" if row.spread is None else f"  ({row.spread[0]:.3f}–{row.spread[1]:.3f})"
        mark += "" if row.reached else "  missed"
        print(
            f"{row.name:{width}}  {row.ours:12,.2f} {row.baseline:12,.2f} {row.ratio:7.3f} {target:>8} {row.unit}{mark}"
        )
    if json_path:
        found = [{**asdict(row), "reached": row.reached} for row in rows]
        Path(json_path).write_text(
            json.dumps(
                {"benchmark": name, "conditions": conditions, "machine": where_it_ran(), "rows": found}, indent=1
            )
            + "\n"
        )
