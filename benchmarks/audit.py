"""The audit in Spark's executors, divided by the same work in one process:

    python -m benchmarks.audit [--records N] [--rounds N] [--scale | --cores] [--json FILE]

Spark runs as local[2], warm: its start is reported separately, and each thing is done once before. Two logs of
the same mix of records (benchmarks.audit_log): one in 8 CPs, which need no cutting, and one in a single CP, cut at the
snapshots that are stored every 10,000 records.

- replay and digest: Audit(tables=False) ÷ one process that reads the same files, World.apply_many and digest. A second
  row omits reading only on the other side, where the records are lists in memory.
- full tables: Audit(out=…) ÷ the same audit in one process: the same rationalizer, the same rows, written by pyarrow.

Both sides take turns; ratios are medians over the rounds, digests are compared in each. --scale audits 0.5 to 4 M
records: the rate, and the memory of a task's process, must not depend on their number. --cores, alone: local[2] beside
local[1], in turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from benchmarks.audit_log import PARTITIONS, Entry, entries, write_log
from benchmarks.common import Row, report
from kafka_marshal.pipeline.audit.audit import Audit
from kafka_marshal.pipeline.audit.files import pieces_of, read_pieces
from kafka_marshal.pipeline.audit.findings import Findings
from kafka_marshal.pipeline.audit.sources import ParquetSource
from kafka_marshal.pipeline.session import spark_session
from rationalizer import World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCALES = (500_000, 1_000_000, 2_000_000, 4_000_000)

Digests = Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Log:
    """A log on disk."""

    cps: int
    paths: Sequence[Path]
    snapshots: Path | None

    def source(self) -> ParquetSource:
        """For an audit."""
        return ParquetSource(self.paths, None, self.snapshots)


def on_spark(spark: SparkSession, log: Log, tables: bool) -> Findings:
    """The audit in executors."""
    with (
        tempfile.TemporaryDirectory() as out,
        Audit(log.source(), spark=spark, out=Path(out) if tables else None, tables=tables) as audit,
    ):
        return _checked(audit.run())


def in_one_process(log: Log) -> Findings:
    """The same tables without Spark, in one segment."""
    with tempfile.TemporaryDirectory() as out, Audit(log.source(), out=Path(out)) as audit:
        return _checked(audit.run())


def _checked(findings: Findings) -> Findings:
    if not findings.is_clean:
        raise AssertionError(findings.verdict)
    return findings


def replay(log: Log) -> dict[int, str]:
    """apply_many and digest, from the same files."""
    found = {}
    for path in log.paths:
        pieces = list(pieces_of([path]))
        world = World(pieces[0].partition, PARTITIONS)
        for offsets, stamps, values in read_pieces(pieces, 0, None):
            world.apply_many(zip(offsets, stamps, values, strict=True))
        found[world.partition] = world.digest()
    return found


def replay_lists(lists: Mapping[int, Sequence[Entry]]) -> dict[int, str]:
    """apply_many and digest, from memory."""
    found = {}
    for cp, log in lists.items():
        world = World(cp, PARTITIONS)
        world.apply_many(log)
        found[cp] = world.digest()
    return found


def interleaved(runs: Sequence[Callable[[], Digests]], rounds: int) -> list[list[float]]:
    """The seconds of each run in each round, all taking turns, after one round that warms up."""
    seconds: list[list[float]] = [[] for _ in runs]
    for round_number in range(rounds + 1):
        digests = []
        for run, found in zip(runs, seconds, strict=True):
            begun = time.perf_counter()
            digests.append(run())
            if round_number:
                found.append(time.perf_counter() - begun)
        wanted = digests[0]
        if any({cp: each[cp] for cp in wanted} != wanted for each in digests):
            raise AssertionError(f"the digests differ: {digests}")
    return seconds


def measure(spark: SparkSession, name: str, log: Log, records: int, rounds: int) -> list[Row]:
    """The rows of one log."""
    lists = {cp: list(entries(cp, records // log.cps)) for cp in range(log.cps)}
    runs: list[Callable[[], Digests]] = [
        partial(replay, log),
        partial(replay_lists, lists),
        lambda: on_spark(spark, log, tables=False).digests,
    ]
    files, memory, ours = interleaved(runs, rounds)
    rows = [
        _row(f"{name}: replay and digest", records, ours, files, 1.6),
        _row(f"{name}: the same ÷ from memory", records, ours, memory, None),
    ]
    del lists, runs
    one, ours = interleaved(
        [lambda: in_one_process(log).digests, lambda: on_spark(spark, log, tables=True).digests], rounds
    )
    return [*rows, _row(f"{name}: full tables", records, ours, one, 1.3)]


def _row(name: str, records: int, ours: list[float], baseline: list[float], target: float | None) -> Row:
    # Each round's two runs are adjacent, so that disturbances of the machine affect both.
    ratio = median(theirs / mine for mine, theirs in zip(ours, baseline, strict=True))
    return Row(name, records / median(ours), records / median(baseline), ratio, target, "records/s")


def scale(spark: SparkSession, folder: Path, rounds: int) -> list[Row]:
    """Full tables of logs of growing length, the longest divided by the shortest."""
    whole, _ = write_log(folder, PARTITIONS, max(SCALES))
    rates: dict[int, float] = {}
    memory: dict[int, float] = {}
    for records in SCALES:
        part = folder / str(records)
        part.mkdir()
        log = Log(PARTITIONS, [_beginning(path, part, records // PARTITIONS) for path in whole], None)
        seconds = []
        for _ in range(rounds):
            begun = time.perf_counter()
            findings = on_spark(spark, log, tables=True)
            seconds.append(time.perf_counter() - begun)
        rates[records], memory[records] = records / median(seconds), findings.peak_memory / 2**20
        print(f"{records:,} records: {rates[records]:,.0f} records/s, {memory[records]:.0f} MiB in a task's process")
    short, long = min(SCALES), max(SCALES)
    return [
        Row("4 M records beside 0.5 M: rate", rates[long], rates[short], rates[long] / rates[short], 0.85, "records/s"),
        Row("… memory", memory[long], memory[short], memory[long] / memory[short], 1.15, "MiB", at_most=True),
    ]


def by_cores(folder: Path, records: int, rounds: int) -> list[Row]:
    """Full tables, and replay alone, of one log in 8 CPs: two processors divided by one."""
    paths, _ = write_log(folder, PARTITIONS, records)
    log = Log(PARTITIONS, paths, None)
    seconds: dict[tuple[int, bool], list[float]] = {(cores, tables): [] for cores in (1, 2) for tables in (False, True)}
    for _ in range(rounds):
        for cores in (1, 2):
            spark = _session(cores)
            try:
                on_spark(spark, log, tables=False)  # warms up
                for tables in (False, True):
                    begun = time.perf_counter()
                    on_spark(spark, log, tables=tables)
                    seconds[cores, tables].append(time.perf_counter() - begun)
            finally:
                spark.stop()
    names = {False: "local[2] ÷ local[1]: replay and digest", True: "local[2] ÷ local[1]: full tables"}
    return [_row(name, records, seconds[2, tables], seconds[1, tables], 1.8) for tables, name in names.items()]


def _session(cores: int) -> SparkSession:
    spark = spark_session("audit benchmark", master=f"local[{cores}]", config={"spark.ui.showConsoleProgress": "false"})
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _beginning(path: Path, folder: Path, rows: int) -> Path:
    table = pq.read_table(path).slice(0, rows)
    pq.write_table(table, folder / path.name, row_group_size=65_536)
    return folder / path.name


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", action="store_true", help="0.5 to 4 M records, too (some minutes)")
    parser.add_argument("--cores", action="store_true", help="only local[2] beside local[1]")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(arguments)
    conditions = {"records": f"{options.records:,}", "rounds": options.rounds}
    if options.cores:
        with tempfile.TemporaryDirectory() as folder:
            rows = by_cores(Path(folder), options.records, options.rounds)
        report("audit", rows, options.json, **conditions)
        return
    begun = time.perf_counter()
    spark = _session(2)
    start = time.perf_counter() - begun
    rows = []
    try:
        for name, cps in ((f"{PARTITIONS} CPs", PARTITIONS), ("1 CP cut at snapshots", 1)):
            with tempfile.TemporaryDirectory() as folder:
                paths, snapshots = write_log(Path(folder), cps, options.records)
                log = Log(cps, paths, snapshots if cps == 1 else None)
                rows += measure(spark, name, log, options.records, options.rounds)
        if options.scale:
            with tempfile.TemporaryDirectory() as folder:
                rows += scale(spark, Path(folder), options.rounds)
    finally:
        spark.stop()
    report("audit", rows, options.json, **conditions, spark="local[2]", **{"Spark's start": f"{start:.1f} s"})


if __name__ == "__main__":
    main()
