"""A member killed with -9 after it has written the first part of a snapshot: BOOTSTRAP TOPIC."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.ports import Ack
from kafka_marshal.snapshots import publisher


class DyingAppender:
    def __init__(self, appender: Any) -> None:
        self._appender = appender

    def append(self, partition: int, value: bytes, on_ack: Callable[[Ack], None] | None = None) -> None:
        self._appender.append(partition, value, on_ack)
        assert self._appender.flush(10) == 0
        os.kill(os.getpid(), signal.SIGKILL)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._appender, name)


class DyingCluster(KafkaCluster):
    def appender(self, topic: str, *, delivery_timeout_ms: int) -> Any:
        appender = super().appender(topic, delivery_timeout_ms=delivery_timeout_ms)
        return DyingAppender(appender) if topic.endswith("_snapshots") else appender


def main() -> None:
    bootstrap, topic = sys.argv[1:]
    publisher.JITTER_MS = 0.0
    Marshal.on_cluster(DyingCluster(bootstrap, {}), group_id="g", topic=topic)
    signal.pause()


if __name__ == "__main__":
    main()
