"""A worker whose message "late" asks to be tried later, twice: python later_worker.py '{"bootstrap": …}'."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from kafka_marshal import Attempt, Marshal, RetryAfter
from kafka_marshal.client import waiting

arguments = json.loads(sys.argv[1])
waiting.IN_MEMORY_S = arguments["in_memory_s"]  # what waits longer is in the log


def handle(message: Any) -> None:
    number = Attempt.current().number
    line = {"what": "tried", "key": message.key().decode(), "number": number, "at": time.time()}
    with Path(arguments["out"]).open("a") as out:
        out.write(json.dumps(line) + "\n")
    if message.key() == b"late" and number == 1:
        raise RetryAfter(arguments["wait_s"])


with Marshal(
    arguments["bootstrap"],
    group_id=arguments["group"],
    client_id=arguments["client_id"],
    topic=arguments["coordination"],
    heartbeat_interval=(arguments["hi"]) / 1000,
) as marshal:
    signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
    with marshal.consumer([arguments["topic"]]) as consumer:
        consumer.run(handle, concurrency=4)
