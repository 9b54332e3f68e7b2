"""A Spark driver as a user writes one: python claimer.py '{"bootstrap": …}'. It copies places into a fenced SQLite."""

from __future__ import annotations

import json
import signal
import sys
import threading

from pyspark.sql import DataFrame

from kafka_marshal import Marshal
from kafka_marshal.pipeline.claimed import ClaimedBatch, ClaimedBatches
from kafka_marshal.pipeline.session import spark_session
from kafka_marshal.sinks import SqliteSink

arguments = json.loads(sys.argv[1])
spark = spark_session(
    arguments["client_id"],
    master=arguments.get("master", "local[1]"),
    config={"spark.ui.showConsoleProgress": "false", "spark.driver.memory": "600m", **arguments.get("config", {})},
)
spark.sparkContext.setLogLevel("ERROR")
sink = SqliteSink(arguments["database"])
killed = threading.Event()  # never: whoever kills does not ask


def copy(df: DataFrame, batch: ClaimedBatch) -> None:
    rows = [(row.topic, row.partition, row.offset) for row in df.select("topic", "partition", "offset").collect()]
    killed.wait(arguments.get("pause_s", 0.0))  # a round shall last long enough to be hit
    with sink.transaction(batch.group_id, batch.leases) as tx:
        tx.executemany(
            "INSERT INTO places VALUES (?, ?, ?)",
            [(p, o, arguments["client_id"]) for topic, p, o in rows if o > tx.last_offset(topic, p)],
        )


with Marshal(
    arguments["bootstrap"],
    group_id=arguments["group"],
    client_id=arguments["client_id"],
    topic=arguments["coordination"],
    heartbeat_interval_ms=arguments["hi"],
) as marshal:
    signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
    with ClaimedBatches(
        spark, marshal, [arguments["topic"]], max_records_per_batch=arguments["max_records"]
    ) as batches:
        batches.foreach_batch(copy, available_now=arguments.get("available_now", False))
