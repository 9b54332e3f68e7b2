"""A worker as a user writes one: python worker.py '{"bootstrap": …}'. It writes JSON lines of its actions."""

from __future__ import annotations

import time
from typing import Any

from kafka_marshal import Batches, Claims, Consumer, Group, Keys, ShareConsumer
from tests.client.program import Program

program = Program()
arguments = program.arguments
pause_s = arguments.get("pause_s", 0.0)


def say(what: str, partition: int, offset: int, **more: object) -> None:
    program.say(what, partition=partition, offset=offset, **more)


with program.marshal() as marshal:

    def on_lost(consumer: Consumer, partitions: list[Any]) -> None:
        for lost in partitions:
            say("lost", lost.partition, lost.epoch)

    told: list[Any] = []

    def report(consumer: Consumer) -> None:
        """Write what was granted at most once and goes to no member."""
        for each in consumer.unprocessed[len(told) :]:
            told.append(each)
            for offset in range(each.first, each.last + 1):
                say("unprocessed", each.partition, offset)

    def made() -> Consumer:
        """A consumer of a coordinated group if a session is given."""
        options: dict[str, Any] = {
            "delivery": arguments.get("delivery", "at-least-once"),
            "batch_size": arguments.get("batch_size", 100),
            "on_lost": on_lost,
        }
        if session := arguments.get("session"):
            return marshal.consumer([arguments["topic"]], mode=Group(session_timeout=session / 1000), **options)
        if arguments.get("how") == "shared":
            options["mode"] = Batches()
        if "spans" in arguments:
            return marshal.consumer(mode=Keys({(arguments["topic"], 0): arguments["spans"]}), on_lost=on_lost)
        if arguments.get("claim_ahead"):
            options["mode"] = Claims(claim_ahead=True)
        made: Consumer = marshal.consumer([arguments["topic"]], **options)
        return made

    say("started", -1, -1)
    with made() as consumer:
        if arguments.get("how") == "batches":
            for batch in consumer.batches(max_messages=arguments.get("max_messages", 50), timeout=0.05):
                report(consumer)
                for message in batch:
                    say("handled", batch.partition, message.offset() or 0, epoch=batch.epoch)
                    time.sleep(pause_s)
                batch.done()
        elif isinstance(consumer, ShareConsumer):
            for shared in consumer.batches(max_messages=arguments.get("max_messages", 50)):
                for message in shared:
                    of = {"token": shared.token, "count": shared.delivery_count}
                    say("handled", shared.partition, message.offset() or 0, **of)
                    time.sleep(pause_s)
                shared.done()
        else:
            for message in consumer:
                report(consumer)
                say("handled", message.partition() or 0, message.offset() or 0, key=str(message.key()))
                time.sleep(pause_s)
    if not isinstance(consumer, ShareConsumer):
        report(consumer)
say("closed", -1, -1)
