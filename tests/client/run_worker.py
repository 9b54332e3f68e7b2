"""A worker with many parallel handlers: python run_worker.py '{"bootstrap": …}'. It records each begin and end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

from kafka_marshal import Consumer, Marshal, Retry, aio

arguments = json.loads(sys.argv[1])
out = os.open(arguments["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
pid = os.getpid()
rng = random.Random(pid)
never = threading.Event()


def say(what: str, message: Any = None) -> None:
    """Write a line at once, so that it survives a kill."""
    place = f"{message.partition()} {message.offset()} {message.key().decode()}" if message is not None else "-1 -1 -"
    os.write(out, f"{what} {pid} {place} {time.monotonic_ns()}\n".encode())


def handle(message: Any) -> None:
    say("begin", message)
    if message.key() == b"killer":
        never.wait(0.05)
        os.kill(pid, signal.SIGKILL)
    never.wait(rng.uniform(0.0005, arguments["longest_s"]))
    if rng.random() < arguments["failing"]:
        say("failed", message)
        raise ValueError("now and then")
    say("end", message)


made: dict[str, Any] = {
    "group_id": arguments["group"],
    "client_id": arguments["client_id"],
    "topic": arguments["coordination"],
    "heartbeat_interval_ms": arguments["hi"],
}
topics = [arguments["topic"]]
options: dict[str, Any] = {
    "concurrency": 8,
    "order": "key",
    "retry": Retry(arguments.get("attempts", 100), (0.002, 0.02)),
    "park": arguments.get("park", False),
}


def on_lost(_consumer: Consumer, _partitions: list[Any]) -> None:
    say("lost")


def in_threads() -> None:
    with Marshal(arguments["bootstrap"], **made) as marshal:
        signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
        share: dict[str, Any] = {"allow_key_share": True} if arguments.get("key_share") else {}
        consumer: Consumer = (
            marshal.group_consumer(topics, session_timeout_ms=arguments["session"], on_lost=on_lost, **share)
            if arguments.get("session")
            else marshal.consumer(topics, on_lost=on_lost)
        )
        say("started")
        with consumer:
            consumer.run(handle, **options)


async def in_asyncio() -> None:
    async def handled(message: Any) -> None:
        handle(message)

    async with aio.Marshal(arguments["bootstrap"], **made) as marshal, marshal.consumer(topics) as consumer:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, marshal.stop)
        say("started")
        await consumer.run(handled, **options)


if arguments.get("asyncio"):
    asyncio.run(in_asyncio())
else:
    in_threads()
say("closed")
