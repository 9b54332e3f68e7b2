"""A worker for Kubernetes and systemd: a member of a coordinated group, with probes and metrics."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

from kafka_marshal import Group, Marshal, Message

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


def handle(message: Message) -> None:
    """Your work."""
    print(f"handled {message.topic()} {message.partition()}:{message.offset()}", flush=True)


def settings() -> dict[str, object]:
    """Of librdkafka, one `name=value` a line, from a file that a secret is mounted at; none: no file is named."""
    file = os.environ.get("KAFKA_CONFIG")
    lines = Path(file).read_text(encoding="utf-8").split() if file else []
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # while it starts it holds nothing
with Marshal(
    os.environ["KAFKA_MARSHAL_BOOTSTRAP"],
    group_id=os.environ["GROUP"],
    client_id=os.environ["CLIENT_ID"],  # stays over restarts: the name of the pod, or of the unit
    config=settings(),
) as marshal:
    signal.signal(signal.SIGTERM, lambda *_: marshal.stop())  # the loop ends after the message in flight
    marshal.serve(int(os.environ["METRICS_PORT"]), host=os.environ.get("METRICS_HOST", "127.0.0.1"))
    with marshal.consumer(os.environ["TOPICS"].split(","), mode=Group(mirror_offsets=True)) as consumer:
        for message in consumer:
            handle(message)
# Here everything done is committed, the member has left, and others have its partitions.
