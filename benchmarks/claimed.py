"""Claimed batches divided by plain Spark batch reads of the same ranges, with the same parse.

Rounds of 100,000 records and more from one topic; beside each claimed run a plain one over the very ranges that it was
given, taking turns in who is first. And what claiming costs a round: the time between two calls of fn, less what Spark
takes to make a frame:

    python -m benchmarks.claimed [--records N] [--round N] [--runs N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
import uuid
from collections.abc import Callable, Sequence
from statistics import median

from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from benchmarks.common import Row, bench_kafka, report
from kafka_marshal import Marshal, OffsetRange
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.coordination import create_topic
from kafka_marshal.pipeline.claimed import ClaimedBatch, ClaimedBatches
from kafka_marshal.pipeline.session import kafka_options, spark_session

PARTITIONS = 4

Rounds = list[list[OffsetRange]]


def parse(df: DataFrame) -> DataFrame:
    """The work: a line of comma-separated fields becomes columns, half of them numbers."""
    fields = F.split(F.col("value").cast("string"), ",")
    numbers = [fields[place].cast("int").alias(f"n{place}") for place in range(5)]
    words = [fields[place].alias(f"w{place}") for place in range(5, 10)]
    return df.select("topic", "partition", "offset", *numbers, *words)


def work(df: DataFrame) -> None:
    """Everything is read, parsed and thrown away."""
    parse(df).write.format("noop").mode("overwrite").save()


def publish(bootstrap: str, topic: str, records: int) -> None:
    """Lines of about 100 bytes, evenly over the partitions."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 1_000_000})
    for number in range(records):
        line = (
            f"{number},{number % 60},{number % 24},{number % 365},2013,carrier,origin-{number % 3},destination,tail,x"
        )
        while True:
            try:
                producer.produce(topic, line.encode(), partition=number % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush(120)


def claimed(
    spark: SparkSession, bootstrap: str, scene: dict[str, str], size: int, delivery: str
) -> tuple[float, Rounds, list[float]]:
    """(seconds from the first round to the last commit, the ranges of each round, seconds between two calls of fn)."""
    rounds: Rounds = []
    began: list[float] = []
    ended: list[float] = []

    def fn(df: DataFrame, batch: ClaimedBatch) -> None:
        began.append(time.perf_counter())
        rounds.append(list(batch.ranges))
        work(df)
        ended.append(time.perf_counter())

    group = f"bench-{uuid.uuid4().hex[:8]}"
    with (
        Marshal(bootstrap, group_id=group, topic=scene["coordination"]) as marshal,
        ClaimedBatches(spark, marshal, [scene["data"]], max_records_per_batch=size, delivery=delivery) as batches,
    ):
        while len(batches.assignment()) < PARTITIONS:
            time.sleep(0.01)
        start = time.perf_counter()
        batches.foreach_batch(fn, available_now=True)
        seconds = time.perf_counter() - start
    return seconds, rounds, [after - before for before, after in zip(ended, began[1:], strict=False)]


def plain(spark: SparkSession, bootstrap: str, rounds: Rounds) -> tuple[float, list[float]]:
    """(seconds for the same ranges read by hand, seconds that Spark took to make each frame)."""
    options = kafka_options(bootstrap, {})
    making: list[float] = []
    start = time.perf_counter()
    for ranges in rounds:
        before = time.perf_counter()
        df = read_plainly(spark, options, ranges)
        making.append(time.perf_counter() - before)
        work(df)
    return time.perf_counter() - start, making


def read_plainly(spark: SparkSession, options: dict[str, str], ranges: Sequence[OffsetRange]) -> DataFrame:
    """As the connector's guide has it."""
    topic = ranges[0].topic
    places = {
        "assign": {topic: [each.partition for each in ranges]},
        "startingOffsets": {topic: {str(each.partition): each.first for each in ranges}},
        "endingOffsets": {topic: {str(each.partition): each.last + 1 for each in ranges}},
    }
    settings = {**options, **{name: json.dumps(value) for name, value in places.items()}}
    return spark.read.format("kafka").options(**settings).load()


def compare(
    measure: Callable[[], tuple[float, Rounds, list[float]]],
    spark: SparkSession,
    bootstrap: str,
    rounds: Rounds | None,
) -> tuple[dict[str, float], Rounds]:
    """A claimed run and a plain one side by side; with rounds (of a claimed run before) the plain one is first."""
    first = None if rounds is None else plain(spark, bootstrap, rounds)
    ours, found, between = measure()
    theirs, making = first or plain(spark, bootstrap, found)
    return {
        "ours": _count(found) / ours,
        "plain": _count(rounds or found) / theirs,
        "claiming_ms": 1000 * (median(between) - median(making)),
        "making_ms": 1000 * median(making),
    }, found


def _count(rounds: Rounds) -> int:
    return sum(each.count for ranges in rounds for each in ranges)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--round", type=int, default=200_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    spark = spark_session("benchmarks.claimed", master="local[2]", config={"spark.ui.showConsoleProgress": "false"})
    spark.sparkContext.setLogLevel("ERROR")
    rows = []
    with bench_kafka() as bootstrap:
        cluster = KafkaCluster(bootstrap, {})
        scene = {name: f"{name}-{uuid.uuid4().hex[:8]}" for name in ("coordination", "data")}
        create_topic(cluster, scene["coordination"], 8, 10)
        cluster.create_topic(scene["data"], PARTITIONS, 1, {}, 10)
        publish(bootstrap, scene["data"], args.records)
        for delivery, target in (("at-least-once", 0.90), ("at-most-once", None)):

            def measure(delivery: str = delivery) -> tuple[float, Rounds, list[float]]:
                return claimed(spark, bootstrap, scene, args.round, delivery)

            _, rounds = compare(measure, spark, bootstrap, None)  # both are warm
            found = [
                compare(measure, spark, bootstrap, rounds if number % 2 else None)[0] for number in range(args.runs)
            ]
            ours, baseline = (median(each[name] for each in found) for name in ("ours", "plain"))
            ratio = median(each["ours"] / each["plain"] for each in found)
            rows.append(Row(f"{delivery}, records/s", ours, baseline, ratio, target, "1/s"))
            # The bound is one in ms: claiming ÷ 50 ms must not exceed 1.
            claiming = median(each["claiming_ms"] for each in found)
            limit = 1.0 if delivery == "at-least-once" else None
            rows.append(Row(f"{delivery}, claiming a round", claiming, 50.0, claiming / 50, limit, "ms", at_most=True))
            making = median(each["making_ms"] for each in found)
            rows.append(Row(f"{delivery}, Spark makes a frame", making, making, 1.0, None, "ms"))
        cluster.close()
    spark.stop()
    report("claimed", rows, args.json, records=args.records, round=args.round, runs=args.runs, master="local[2]")


if __name__ == "__main__":
    main()
