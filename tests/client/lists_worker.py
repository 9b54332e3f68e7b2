"""A worker whose handlers get lists; what is bad fails its first try: python lists_worker.py '{"bootstrap": …}'."""

from __future__ import annotations

import random
import threading
from typing import Any

from kafka_marshal import Attempt, MessagesFailedError, Retry
from tests.client.program import Program

program = Program()
arguments = program.arguments
never = threading.Event()


def handle(messages: list[Any]) -> None:
    places = [[each.partition(), each.key().decode(), each.offset()] for each in messages]
    call = f"{arguments['client_id']}/{random.random()}"
    program.say("begin", call=call, process=arguments["process"], places=places)
    never.wait(random.uniform(0.01, 0.03))
    failed: dict[int, Exception] = {}
    keys = set()
    for at, message in enumerate(messages):
        key = (message.partition(), message.key())
        is_bad = message.value() == b"bad" and Attempt.of(message).number == 1
        if is_bad or key in keys:  # what follows a failed one of its key has not been done either
            keys.add(key)
            failed[at] = ValueError("bad" if is_bad else "behind a bad one")
    done = [place for at, place in enumerate(places) if at not in failed]
    program.say("end", call=call, done=done, failed=len(failed), is_held=Attempt.of(messages[0]).is_held)
    if failed:
        raise MessagesFailedError(failed)


with program.marshal() as marshal, marshal.consumer([arguments["topic"]]) as consumer:
    consumer.run(handle, batch=50, linger=0.02, concurrency=4, order="key", retry=Retry(5, (0.01, 0.05)))
