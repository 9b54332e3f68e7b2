"""A worker with many parallel handlers, which sets messages aside: python run_worker.py '{"bootstrap": …}'."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from typing import Any

from kafka_marshal import Marshal, Retry

arguments = json.loads(sys.argv[1])
never = threading.Event()


def handle(message: Any) -> None:
    if message.key() == b"killer":
        never.wait(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    never.wait(random.uniform(0.0005, arguments["longest_s"]))


with Marshal(
    arguments["bootstrap"],
    group_id=arguments["group"],
    client_id=arguments["client_id"],
    topic=arguments["coordination"],
    heartbeat_interval=(arguments["hi"]) / 1000,
) as marshal:
    signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
    with marshal.consumer([arguments["topic"]]) as consumer:
        consumer.run(handle, concurrency=8, order="key", retry=Retry(5, (0.002, 0.02)), park=True)
