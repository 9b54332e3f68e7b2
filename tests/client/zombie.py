"""A worker stopped in its handlers: python zombie.py '{"bootstrap": …}'. They continue once a file exists."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kafka_marshal import Consumer, Group, Hooks, Retry
from kafka_marshal.sinks import SqliteSink
from tests.client.program import Program

program = Program()
arguments = program.arguments
go = Path(arguments["out"]).with_suffix(".go")
sink = SqliteSink(arguments["database"])


def say(what: str, offset: int) -> None:
    program.say(what, partition=0, offset=offset)


def wait(message: Any) -> None:
    say("begin", message.offset())
    while not go.exists():
        time.sleep(0.001)


def fail(message: Any) -> None:
    wait(message)
    raise ValueError("the last try")


def write(message: Any) -> None:
    with sink.record() as tx:
        tx.execute("INSERT INTO lines VALUES (?)", (message.offset(),))
        wait(message)


def told(what: str) -> Any:
    return lambda attempt, *_: say(f"{what} {attempt.is_held}", attempt.message.offset())


with program.marshal() as marshal:
    topics = [arguments["topic"]]
    session = arguments["session"]
    consumer: Consumer = (
        marshal.consumer(topics, mode=Group(session_timeout=session / 1000)) if session else marshal.consumer(topics)
    )
    hooks = Hooks(after=told("after"), failed=told("failed"), lost=told("lost"))
    handle = {"fail": fail, "write": write}[arguments["act"]]
    consumer.run(
        handle,
        concurrency=arguments["concurrency"],
        retry=Retry(attempts=arguments["attempts"]),
        dead_letters=arguments["dead"],
        hooks=[hooks],
    )
