"""A worker with a fenced sink, whose handler is wrong for two customers, or mended: python -m … '{"bootstrap": …}'."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from kafka_marshal import Batches, Claims, Group, Marshal
from kafka_marshal.errors import LeaseLostError, StaleEpochError
from tests.sinks.conftest import sink_of

arguments = json.loads(sys.argv[1])
sink = sink_of(arguments["kind"], arguments["where"])
mark = "?" if arguments["kind"] == "sqlite" else "%s"
UPSERT = (
    f"INSERT INTO results (place, at, value, times) VALUES ({mark}, {mark}, {mark}, 1) ON CONFLICT (place, at) DO "
    "UPDATE SET value = excluded.value, times = results.times + 1"
)
#: It dies within the transaction, or after it and before the messages are done, once it has written this many.
left = arguments.get("dies", 0)


def row(message: Any) -> tuple[int, int, str]:
    key = message.key().decode()
    is_wrong = not arguments["mended"] and key in ("A", "B")
    return message.partition(), message.offset(), "wrong" if is_wrong else key


def step(written: int) -> None:
    global left
    if left:
        left = max(left - written, 0)
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)


def batches(consumer: Any) -> None:
    for batch in consumer.batches(max_messages=20, timeout=0.05):
        try:
            with sink.records(batch) as tx:
                tx.executemany(UPSERT, [row(each) for each in tx.new])
        except (StaleEpochError, LeaseLostError):
            continue
        step(len(batch.messages))  # it is written, and not done in the log
        batch.done()


def handle(message: Any) -> None:
    with sink.record() as tx:
        if not tx.is_done:
            tx.execute(UPSERT, row(message))
        step(1)  # it is not committed


with Marshal(
    arguments["bootstrap"],
    group_id=arguments["group"],
    client_id=arguments["client_id"],
    topic=arguments["coordination"],
    heartbeat_interval=0.6,
) as marshal:
    signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
    mode: Any = {"batches": Batches(), "group": Group(), "handlers": Claims(), "claims": Claims()}[arguments["form"]]
    with marshal.consumer([arguments["topic"]], mode=mode) as consumer:
        consumer.run(handle, concurrency=4, order="key") if arguments["form"] == "handlers" else batches(consumer)
