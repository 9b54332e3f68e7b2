"""Runs a function over arguments: in parallel on Spark, a share for each core, or one by one in this process."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pyarrow as pa

from kafka_marshal.errors import AuditError, MarshalError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

A = TypeVar("A")
R = TypeVar("R")


class Runner(Protocol):
    """Carries functions out."""

    #: Number of calls at the same time.
    parallelism: int

    def map(self, doing: str, function: Callable[[A], R], arguments: Sequence[A], work: Path) -> list[R]:
        """function of each argument, in order. `doing`: a description; `work`: a folder shared with the executors.

        Raises AuditError if Spark failed; MarshalErrors as they are.
        """


def is_spark_running() -> bool:
    """Whether this process already has a session, which we must not stop."""
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() is not None


class InProcess:
    """Runs in this process: for small logs, and as a baseline for measurements."""

    parallelism = 1

    def map(self, doing: str, function: Callable[[A], R], arguments: Sequence[A], work: Path) -> list[R]:
        return [function(argument) for argument in arguments]


class OnSpark:
    """Runs in Spark's executors, through mapInArrow.

    Only task numbers and results pass through Spark. Arguments are files in `work`.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self.parallelism: int = max(1, spark.sparkContext.defaultParallelism)

    def map(self, doing: str, function: Callable[[A], R], arguments: Sequence[A], work: Path) -> list[R]:
        from pyspark import cloudpickle
        from pyspark.errors import PySparkException

        if not arguments:
            return []
        for number, argument in enumerate(arguments):
            (work / f"task-{number:05}.pickle").write_bytes(cloudpickle.dumps((function, argument)))  # type: ignore[no-untyped-call]
        shares = _shares(arguments, self.parallelism)
        one_each = self._spark.range(0, len(shares), 1, len(shares))
        self._spark.sparkContext.setJobDescription(f"kafka-marshal audit: {doing}")
        try:
            rows = one_each.mapInArrow(_Calls(str(work), shares), "number long, result binary").collect()
        except Exception as error:
            if isinstance(error, PySparkException) or type(error).__module__.startswith("py4j."):
                raise AuditError(
                    f"{doing} failed in Spark: {_cause(error)} Nothing was concluded about the log. Where an "
                    "executor was lost (memory, a machine gone), run it again; on a cluster, see that all of its "
                    f"machines reach {work} and the files of the log."
                ) from error
            raise
        finally:
            self._spark.sparkContext.setJobDescription(None)  # type: ignore[arg-type]
        found: dict[int, Any] = {row["number"]: pickle.loads(row["result"]) for row in rows}  # noqa: S301 (our own)
        for result in found.values():
            if isinstance(result, MarshalError):
                raise result
        return [found[number] for number in range(len(arguments))]


def _shares(arguments: Sequence[object], cores: int) -> list[list[int]]:
    """Argument numbers in a share for each core, balanced by records: the largest goes to the smallest share.

    Each task costs Spark's Python worker a tenth of a second, as much as 100,000 records.
    """
    weights = [getattr(argument, "records", 1) for argument in arguments]
    shares: list[list[int]] = [[] for _ in range(min(cores, len(arguments)))]
    loads = [0] * len(shares)
    for number in sorted(range(len(arguments)), key=lambda each: -weights[each]):
        least = loads.index(min(loads))
        shares[least].append(number)
        loads[least] += weights[number]
    return shares


class _Calls:
    """Runs in an executor: maps numbers of shares to the results of their arguments."""

    def __init__(self, work: str, shares: list[list[int]]) -> None:
        self._work = work
        self._shares = shares

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in (each for share in batch.column(0).to_pylist() for each in self._shares[share]):
                file = Path(self._work, f"task-{number:05}.pickle")
                function, argument = pickle.loads(file.read_bytes())  # noqa: S301 (our own)
                result: object
                try:
                    result = function(argument)
                except MarshalError as error:  # a retry by Spark would not help: the message says what is wrong
                    result = error
                yield pa.RecordBatch.from_pydict(
                    {"number": pa.array([number], pa.int64()), "result": pa.array([pickle.dumps(result)], pa.binary())}
                )


def _cause(error: Exception) -> str:
    """The line with the cause, out of a Python and Java traceback."""
    if lacking := re.search(r"No module named '([\w.]+)'", str(error)):
        return (
            f"an executor lacks the package {lacking[1]!r}: install kafka-marshal[spark] on all machines of the "
            "cluster, or send an environment (docs/spark.md)."
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if ": " in line and line.partition(":")[0].endswith(("Error", "Exception"))]
    told = (named or lines or [type(error).__name__])[-1]
    return told if told.endswith(".") else f"{told}."
