"""Two ways of reading claimed partitions in Spark: the stream source, divided by claimed batches.

The same records, the same work, rounds of the same size; from the first call of fn to the end of the last:

    python -m benchmarks.stream_source [--records N] [--round N] [--runs N] [--json FILE]

The source's executors read with librdkafka and return Arrow batches; claimed batches use Spark's connector.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import uuid
from statistics import median

from pyspark.sql import DataFrame, SparkSession

from benchmarks.claimed import PARTITIONS, publish, work
from benchmarks.common import Row, bench_kafka, report
from kafka_marshal import Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.pipeline.claimed import ClaimedBatch, ClaimedBatches
from kafka_marshal.pipeline.session import spark_session
from kafka_marshal.pipeline.source import register

#: Time-out of a run.
LIMIT_S = 600.0


class Clock:
    """Begin and end of rounds."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.ended: list[float] = []

    def round(self, df: DataFrame) -> None:
        """One round's work."""
        self.began.append(time.perf_counter())
        work(df)
        self.ended.append(time.perf_counter())

    def rate(self, records: int) -> float:
        """Records a second."""
        return records / (self.ended[-1] - self.began[0])


def by_claimed_batches(spark: SparkSession, bootstrap: str, scene: dict[str, str], records: int, size: int) -> Clock:
    clock, seen = Clock(), 0

    def fn(df: DataFrame, batch: ClaimedBatch) -> None:
        nonlocal seen
        clock.round(df)
        seen += batch.count

    with (
        Marshal(bootstrap, group_id=f"g-{uuid.uuid4().hex[:8]}", topic=scene["coordination"]) as marshal,
        ClaimedBatches(spark, marshal, [scene["data"]], max_records_per_batch=size) as batches,
    ):
        while len(batches.assignment()) < PARTITIONS:
            time.sleep(0.01)
        batches.foreach_batch(fn, available_now=True)
    assert seen == records
    return clock


def by_stream(spark: SparkSession, bootstrap: str, scene: dict[str, str], records: int, size: int) -> Clock:
    clock = Clock()
    group = f"g-{uuid.uuid4().hex[:8]}"
    options = {
        "bootstrap_servers": bootstrap,
        "group_id": group,
        "client_id": "source",
        "topics": scene["data"],
        "coordination_topic": scene["coordination"],
        "max_records_per_batch": str(size),
    }
    with (
        tempfile.TemporaryDirectory() as checkpoint,
        Marshal(bootstrap, group_id=group, client_id="watcher", topic=scene["coordination"]) as watcher,
    ):
        stream = spark.readStream.format("kafka_marshal").options(**options).load()
        writer = stream.writeStream.foreachBatch(lambda df, _number: clock.round(df))
        query = writer.option("checkpointLocation", checkpoint).start()
        deadline = time.monotonic() + LIMIT_S
        while sum(1 + (lease.stable if lease.stable is not None else -1) for lease in watcher.world.leases()) < records:
            if query.exception() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the query did not do all: {query.exception()}")
            time.sleep(0.05)
        query.stop()
    return clock


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--round", type=int, default=200_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    ways = {"stream": by_stream, "claimed": by_claimed_batches}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with bench_kafka() as bootstrap:
        scene = {"coordination": f"__marshal-{uuid.uuid4().hex[:8]}", "data": f"bench-{uuid.uuid4().hex[:8]}"}
        cluster = KafkaCluster(bootstrap, {})
        create_topic(cluster, scene["coordination"], 8, 10)
        cluster.create_topic(scene["data"], PARTITIONS, 1, {}, 10)
        publish(bootstrap, scene["data"], args.records)
        spark = spark_session(
            "stream source benchmark", master="local[2]", config={"spark.ui.showConsoleProgress": "false"}
        )
        spark.sparkContext.setLogLevel("ERROR")
        register(spark)
        for run in range(args.runs + 1):
            for name in sorted(ways, reverse=bool(run % 2)):
                rate = ways[name](spark, bootstrap, scene, args.records, args.round).rate(args.records)
                if run:  # the first one warms up
                    rates[name].append(rate)
        spark.stop()
    rows = [
        Row(
            "stream source ÷ claimed batches",
            ours=median(rates["stream"]),
            baseline=median(rates["claimed"]),
            ratio=median(a / b for a, b in zip(rates["stream"], rates["claimed"], strict=True)),
            target=None,
            unit="records/s",
        )
    ]
    report("stream_source", rows, args.json, records=args.records, round=args.round, runs=args.runs)


if __name__ == "__main__":
    main()
