"""A streaming query as a user submits one: python streamer.py '{"bootstrap": …}'. Writes places to a fenced SQLite."""

from __future__ import annotations

import json
import sys

from pyspark.sql import DataFrame

from kafka_marshal.pipeline.session import spark_session
from kafka_marshal.pipeline.source import leases_of, register
from kafka_marshal.sinks import SqliteSink

arguments = json.loads(sys.argv[1])
spark = spark_session(arguments["client_id"], master=arguments["master"])
spark.sparkContext.setLogLevel("ERROR")
register(spark)
sink = SqliteSink(arguments["database"])


def copy(df: DataFrame, number: int) -> None:
    df.persist()  # read twice
    rows = [(row.topic, row.partition, row.offset) for row in df.select("topic", "partition", "offset").collect()]
    with sink.transaction(arguments["group"], leases_of(df)) as tx:
        tx.executemany(
            "INSERT INTO places VALUES (?, ?, ?)",
            [(p, o, arguments["client_id"]) for topic, p, o in rows if o > tx.last_offset(topic, p)],
        )
    df.unpersist()


stream = spark.readStream.format("kafka_marshal").options(
    bootstrap_servers=arguments["bootstrap"],
    group_id=arguments["group"],
    client_id=arguments["client_id"],
    topics=arguments["topic"],
    coordination_topic=arguments["coordination"],
    heartbeat_interval=str(arguments["hi"] / 1000),
    max_records_per_batch=str(arguments["max_records"]),
)
writer = stream.load().writeStream.option("checkpointLocation", arguments["checkpoint"])
query = writer.foreachBatch(copy).start()
query.awaitTermination()  # the test ends it
