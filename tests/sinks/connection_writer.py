"""A worker that writes on its own connection, and dies at a random step: python -m … '{"bootstrap": …}'.

It ends when every message of the topic is done.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from typing import Any

from kafka_marshal import Marshal, aio
from kafka_marshal.errors import LeaseLostError, SinkError, StaleEpochError
from kafka_marshal.sinks import fence
from tests.sinks.programs import Program

arguments = json.loads(sys.argv[1])
program = Program(arguments["program"], arguments["where"])
draw = random.Random(arguments["seed"])


def step(_: object = None) -> None:
    """Here it may die."""
    if draw.random() < arguments["dies"]:
        os.kill(os.getpid(), signal.SIGKILL)


def write(messages: Any, **about: Any) -> None:
    """One transaction, until it is committed; a message that was refused comes again, or is another member's."""
    while True:
        try:
            program.write(messages, arguments["client_id"], step, step, **about)
        except SinkError as error:
            if not error.retry:
                raise
            step()
        else:
            return


def batches(marshal: Marshal) -> None:
    with marshal.consumer([arguments["topic"]]) as consumer:
        for batch in consumer.batches(max_messages=20, timeout=0.05):
            try:
                write(batch)
            except (StaleEpochError, LeaseLostError):
                continue  # it is another member's by now
            step()
            batch.done()


def handlers(marshal: Marshal) -> None:
    with marshal.consumer([arguments["topic"]]) as consumer:
        consumer.run(lambda message: write(None), concurrency=4, order="none")


async def coroutines() -> None:
    options = {"heartbeat_interval": 0.6, "topic": arguments["coordination"]}
    names = {"group_id": arguments["group"], "client_id": arguments["client_id"]}
    async with (
        aio.Marshal(arguments["bootstrap"], **names, **options) as marshal,
        marshal.consumer([arguments["topic"]]) as consumer,
    ):
        await consumer.run(handle, concurrency=4, order="none")


async def handle(message: Any) -> None:
    async with program._transaction_async(autocommit=False) as connection:
        async with fence(connection) as tx:
            for each in tx.new:
                row = each.partition(), each.offset(), arguments["client_id"]
                await connection.run_sync(program._insert, row)
            step()
        step()
    step()


if arguments["form"] == "coroutines":
    asyncio.run(coroutines())
else:
    with Marshal(
        arguments["bootstrap"],
        group_id=arguments["group"],
        client_id=arguments["client_id"],
        topic=arguments["coordination"],
        heartbeat_interval=0.6,
    ) as marshal:
        {"batches": batches, "handlers": handlers}[arguments["form"]](marshal)
