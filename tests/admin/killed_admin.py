"""An admin signalled before a record: ``python killed_admin.py '{"bootstrap": …, "before": "move 2", …}'``."""

from __future__ import annotations

import json
import signal
import sys
import threading
from typing import Any

from kafka_marshal import Admin
from kafka_marshal.adapters.kafka import KafkaCluster
from rationalizer import ClaimingPartition, Record, ReleaseGroup, ReleasingPartition, decode

arguments = json.loads(sys.argv[1])
seen: dict[str, int] = {}


def step_of(record: Record) -> str:
    """The admin's next step, numbered among those of its kind."""
    match record:
        case ReleaseGroup():
            name = "pause" if record.msg_expire_time else "end"
        case ClaimingPartition():
            name = "claim"
        case ReleasingPartition():
            name = "move"
        case _:
            name = "other"
    seen[name] = seen.get(name, 0) + 1
    return f"{name} {seen[name]}"


class Appender:
    """Sends this process the signal at the chosen step, after earlier records are delivered."""

    def __init__(self, appender: Any) -> None:
        self._appender = appender

    def append(self, partition: int, value: bytes, on_ack: Any = None) -> None:
        if step_of(decode(value)) == arguments["before"]:
            self._appender.flush(10)
            # To this thread: another thread could receive a signal to the process, and this one would continue briefly.
            signal.pthread_kill(threading.get_ident(), signal.Signals[arguments["signal"]])
        self._appender.append(partition, value, on_ack)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._appender, name)


class Cluster(KafkaCluster):
    """A cluster whose appenders send the signal."""

    def appender(self, topic: str, *, delivery_timeout_ms: int) -> Any:
        return Appender(super().appender(topic, delivery_timeout_ms=delivery_timeout_ms))


admin = Admin.on_cluster(
    lambda: Cluster(arguments["bootstrap"], {}),
    topic=arguments["coordination"],
    client_id=arguments["client_id"],
    heartbeat_interval=(arguments["hi"]) / 1000,
)
with admin.pause(arguments["group"], expires_in=arguments["expires_in"]) as pause:
    pause.wait_released(10)
    pause.reposition({(arguments["topic"], partition): offset for partition, offset in arguments["positions"]})
