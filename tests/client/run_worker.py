"""A worker with many parallel handlers, which sets messages aside: python run_worker.py '{"bootstrap": …}'."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

from kafka_marshal import Retry
from tests.client.program import Program

program = Program()
never = threading.Event()


def handle(message: Any) -> None:
    if message.key() == b"killer":
        never.wait(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    never.wait(random.uniform(0.0005, program.arguments["longest_s"]))


with program.marshal() as marshal, marshal.consumer([program.arguments["topic"]]) as consumer:
    consumer.run(handle, concurrency=8, order="key", retry=Retry(5, (0.002, 0.02)), park=True)
