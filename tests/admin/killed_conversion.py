"""An admin that converts a group, killed with -9 at its n-th step: python killed_conversion.py '{"at": 3, …}'.

A step is a record about to be appended, a delivered one, or a call of `conversion.passed`. Without "at" it completes
and prints the steps.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from kafka_marshal import Admin
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.admin import conversion
from rationalizer import Tick, decode

arguments = json.loads(sys.argv[1])
steps: list[str] = []


def step(name: str) -> None:
    """Count a step; kill the process at the chosen one."""
    steps.append(name)
    if len(steps) == arguments.get("at"):
        os.kill(os.getpid(), signal.SIGKILL)


class Appender:
    """Counts records as steps."""

    def __init__(self, appender: Any) -> None:
        self._appender = appender

    def append(self, partition: int, value: bytes, on_ack: Any = None) -> None:
        record = decode(value, 2)
        if isinstance(record, Tick):
            self._appender.append(partition, value, on_ack)
            return
        step(f"before {type(record).__name__} in {partition}")
        self._appender.append(partition, value, on_ack)
        self._appender.flush(10)
        step(f"after {type(record).__name__} in {partition}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._appender, name)


class Cluster(KafkaCluster):
    """A cluster whose appenders count steps."""

    def appender(self, topic: str, *, delivery_timeout_ms: int) -> Any:
        return Appender(super().appender(topic, delivery_timeout_ms=delivery_timeout_ms))


conversion.passed = step
admin = Admin.on_cluster(
    lambda: Cluster(arguments["bootstrap"], {}),
    topic=arguments["coordination"],
    heartbeat_interval=(arguments["hi"]) / 1000,
)
admin.convert_group(arguments["group"], arguments["to"], file=arguments["file"])
print(json.dumps(steps))
