"""A worker as a user writes one: python worker.py '{"bootstrap": …}'. It writes what it does as JSON lines."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from kafka_marshal import Consumer, Marshal, TopicPartition

arguments = json.loads(sys.argv[1])
out = os.open(arguments["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
pause_s = arguments.get("pause_s", 0.0)


def say(what: str, partition: int, offset: int, **more: object) -> None:
    """One line, written at once: a killed process keeps what it wrote."""
    line = json.dumps({"what": what, "partition": partition, "offset": offset, "at": time.time(), **more})
    os.write(out, line.encode() + b"\n")


with Marshal(
    arguments["bootstrap"],
    group_id=arguments["group"],
    client_id=arguments["client_id"],
    topic=arguments["coordination"],
    heartbeat_interval_ms=arguments["hi"],
) as marshal:
    signal.signal(signal.SIGTERM, lambda *_: marshal.stop())

    def on_lost(consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for lost in partitions:
            say("lost", lost.partition, lost.offset)

    say("started", -1, -1)
    with marshal.consumer(
        [arguments["topic"]],
        delivery=arguments.get("delivery", "at-least-once"),
        batch_size=arguments.get("batch_size", 100),
        claim_ahead=arguments.get("claim_ahead", False),
        on_lost=on_lost,
    ) as consumer:
        if arguments.get("how") == "batches":
            for batch in consumer.batches(max_messages=arguments.get("max_messages", 50), timeout=0.05):
                for message in batch:
                    say("handled", batch.partition, message.offset() or 0, epoch=batch.epoch)
                    time.sleep(pause_s)
                batch.done()
        else:
            for message in consumer:
                say("handled", message.partition() or 0, message.offset() or 0)
                time.sleep(pause_s)
say("closed", -1, -1)
