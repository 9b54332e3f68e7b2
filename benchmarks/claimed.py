"""Claimed batches divided by plain Spark batch reads of the same ranges, with the same parse.

Rounds of 100,000 records and more from one topic. Right before or after its work, each round also reads the same ranges
plainly, alternating, so that both run under the same conditions. A claimed round lasts from the end of the previous one
(commit, claim, plan, frame) to the end of its work. The cost of claiming is that time without the work, less the time
that Spark needs to make a plain frame:

    python -m benchmarks.claimed [--records N] [--round N] [--runs N] [--delivery D] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from benchmarks.common import Row, bench_kafka, report
from kafka_marshal import Delivery, Marshal, OffsetRange
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.pipeline.claimed import ClaimedBatch, ClaimedBatches
from kafka_marshal.pipeline.session import kafka_options, spark_session

PARTITIONS = 4

#: Targets of claimed ÷ plain records a second. (At most once, every task asks the driver, through Python.)
TARGETS: dict[Delivery, float | None] = {"at-least-once": 0.90, "at-most-once": None}


@dataclass(frozen=True, slots=True)
class Round:
    """One round, in seconds."""

    records: int
    #: From the end of the previous round to the call of fn.
    before: float
    #: fn's own work.
    work: float
    #: Making a plain frame of the same ranges.
    plain_frame: float
    #: The same work on that frame.
    plain_work: float

    @property
    def ratio(self) -> float:
        """Claimed records a second ÷ plain ones."""
        return (self.plain_frame + self.plain_work) / (self.before + self.work)


def parse(df: DataFrame) -> DataFrame:
    """The work: a line of comma-separated fields becomes columns, half of them numbers."""
    fields = F.split(F.col("value").cast("string"), ",")
    numbers = [fields[place].cast("int").alias(f"n{place}") for place in range(5)]
    words = [fields[place].alias(f"w{place}") for place in range(5, 10)]
    return df.select("topic", "partition", "offset", *numbers, *words)


def work(df: DataFrame) -> None:
    """Read, parse and drop everything."""
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


def claimed(spark: SparkSession, bootstrap: str, scene: dict[str, str], size: int, delivery: Delivery) -> list[Round]:
    """Read the whole topic as a separate group; returns all rounds except the first, which has no predecessor."""
    rounds: list[Round] = []
    options = kafka_options(bootstrap, {})
    ended = time.perf_counter()

    def fn(df: DataFrame, batch: ClaimedBatch) -> None:
        nonlocal ended
        before = time.perf_counter() - ended
        plain_first = len(rounds) % 2 == 1
        seconds = {}
        for plain in (True, False) if plain_first else (False, True):
            start = time.perf_counter()
            frame = read_plainly(spark, options, batch.ranges) if plain else df
            made = time.perf_counter()
            work(frame)
            seconds[plain] = (made - start, time.perf_counter() - made)
        rounds.append(Round(batch.count, before, seconds[False][1], *seconds[True]))
        ended = time.perf_counter()

    group = f"bench-{uuid.uuid4().hex[:8]}"
    with (
        Marshal(bootstrap, group_id=group, topic=scene["coordination"]) as marshal,
        ClaimedBatches(spark, marshal, [scene["data"]], max_records_per_batch=size, delivery=delivery) as batches,
    ):
        while len(batches.assignment()) < PARTITIONS:
            time.sleep(0.01)
        batches.foreach_batch(fn, available_now=True)
    return rounds[1:]


def read_plainly(spark: SparkSession, options: dict[str, str], ranges: Sequence[OffsetRange]) -> DataFrame:
    """Read as in the connector's guide."""
    topic = ranges[0].topic
    places = {
        "assign": {topic: [each.partition for each in ranges]},
        "startingOffsets": {topic: {str(each.partition): each.first for each in ranges}},
        "endingOffsets": {topic: {str(each.partition): each.last + 1 for each in ranges}},
    }
    settings = {**options, **{name: json.dumps(value) for name, value in places.items()}}
    return spark.read.format("kafka").options(**settings).load()


def rows_of(name: str, rounds: Sequence[Round], target: float | None) -> list[Row]:
    """The rows of one delivery."""
    ours = median(each.records / (each.before + each.work) for each in rounds)
    plain = median(each.records / (each.plain_frame + each.plain_work) for each in rounds)
    frame = 1000 * median(each.plain_frame for each in rounds)
    claiming = 1000 * median(each.before - each.plain_frame for each in rounds)
    return [
        Row(f"{name}, records/s", ours, plain, median(each.ratio for each in rounds), target, "1/s"),
        # The bound is one in ms: claiming ÷ 50 ms must not exceed 1.
        Row(f"{name}, claiming a round", claiming, 50.0, claiming / 50, target and 1.0, "ms", at_most=True),
        Row(f"{name}, a plain frame", frame, frame, 1.0, None, "ms"),
    ]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--round", type=int, default=200_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--delivery", action="append", choices=TARGETS)
    parser.add_argument("--json")
    args = parser.parse_args()
    spark = spark_session("benchmarks.claimed", master="local[2]", config={"spark.ui.showConsoleProgress": "false"})
    spark.sparkContext.setLogLevel("ERROR")
    rows: list[Row] = []
    with bench_kafka() as bootstrap:
        cluster = KafkaCluster(bootstrap, {})
        scene = {name: f"{name}-{uuid.uuid4().hex[:8]}" for name in ("coordination", "data")}
        create_topic(cluster, scene["coordination"], 8, 10)
        cluster.create_topic(scene["data"], PARTITIONS, 1, {}, 10)
        publish(bootstrap, scene["data"], args.records)
        for delivery in args.delivery or TARGETS:
            claimed(spark, bootstrap, scene, args.round, delivery)  # to be warm
            rounds = [each for _ in range(args.runs) for each in claimed(spark, bootstrap, scene, args.round, delivery)]
            rows += rows_of(delivery, rounds, TARGETS[delivery])
        cluster.close()
    spark.stop()
    report("claimed", rows, args.json, records=args.records, round=args.round, runs=args.runs, master="local[2]")


if __name__ == "__main__":
    main()
