"""A Spark driver as a user writes one: python claimer.py '{"bootstrap": …}'. It copies places into SQLite.

At least once into a fenced sink; at most once plainly, so that a repetition would show.
"""

from __future__ import annotations

import json
import signal
import sqlite3
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

from kafka_marshal import Marshal
from kafka_marshal.errors import StaleEpochError
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
gate = Path(arguments["gate"]) if "gate" in arguments else None
if gate is not None:
    gate.with_suffix(".ready").touch()
sink = SqliteSink(arguments["database"])
killed = threading.Event()  # never set: the process is killed


def slowly(batches: Iterable[Any]) -> Iterable[Any]:
    """In an executor, which is to be lost meanwhile."""
    threading.Event().wait(arguments.get("task_s", 0.0))
    yield from batches


def places_of(df: DataFrame) -> list[tuple[str, int, int]]:
    schema = "topic string, partition int, offset long"
    found = df.select("topic", "partition", "offset").mapInArrow(slowly, schema).collect()
    return [(row.topic, row.partition, row.offset) for row in found]


def wait_at(gate: Path) -> None:
    """Wait until the file exists, then for the seconds in it."""
    waiting = gate.with_suffix(".waiting")
    while not gate.exists():
        waiting.touch()
        killed.wait(0.05)
    waiting.unlink(missing_ok=True)
    killed.wait(float(gate.read_text() or "0"))


def put_down(df: DataFrame, batch: ClaimedBatch) -> None:
    rows = [(p, o, arguments["client_id"]) for _, p, o in places_of(df)]
    with sqlite3.connect(arguments["database"], timeout=30) as connection:
        connection.executemany("INSERT INTO places VALUES (?, ?, ?)", rows)


def copy(df: DataFrame, batch: ClaimedBatch) -> None:
    rows = places_of(df)
    killed.wait(arguments.get("pause_s", 0.0))  # a round must last long enough to be hit
    if gate is not None:
        wait_at(gate)
    try:
        with sink.transaction(batch.group_id, batch.leases) as tx:
            tx.executemany(
                "INSERT INTO places VALUES (?, ?, ?)",
                [(p, o, arguments["client_id"]) for topic, p, o in rows if o > tx.last_offset(topic, p)],
            )
    except StaleEpochError:
        if gate is not None:
            gate.with_suffix(".refused").touch()
        raise


with Marshal(
    arguments["bootstrap"],
    group_id=arguments["group"],
    client_id=arguments["client_id"],
    topic=arguments["coordination"],
    heartbeat_interval=(arguments["hi"]) / 1000,
) as marshal:
    signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
    delivery = arguments.get("delivery", "at-least-once")
    with ClaimedBatches(
        spark, marshal, [arguments["topic"]], max_records_per_batch=arguments["max_records"], delivery=delivery
    ) as batches:
        fn = copy if delivery == "at-least-once" else put_down
        batches.foreach_batch(fn, available_now=arguments.get("available_now", False))
