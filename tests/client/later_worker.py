"""A worker whose message "late" asks to be tried later, twice: python later_worker.py '{"bootstrap": …}'."""

from __future__ import annotations

from typing import Any

from kafka_marshal import Attempt, RetryAfter
from kafka_marshal.client import waiting
from tests.client.program import Program

program = Program()
waiting.IN_MEMORY_S = program.arguments["in_memory_s"]  # what waits longer is in the log


def handle(message: Any) -> None:
    number = Attempt.current().number
    program.say("tried", key=message.key().decode(), number=number)
    if message.key() == b"late" and number == 1:
        raise RetryAfter(program.arguments["wait_s"])


with program.marshal() as marshal, marshal.consumer([program.arguments["topic"]]) as consumer:
    consumer.run(handle, concurrency=4)
