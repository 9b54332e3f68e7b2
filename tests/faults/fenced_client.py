"""A consumer of confluent-kafka alone: reads partitions of a topic for some seconds, then says how that went.

python fenced_client.py BOOTSTRAP TOPIC PARTITIONS SECONDS ['{"a.property": "of librdkafka"}']
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import confluent_kafka


def main(bootstrap: str, topic: str, partitions: str, seconds: str, properties: str = "{}") -> None:
    """Read, and write as JSON: the version, and how many messages came."""
    config: dict[str, Any] = {
        "bootstrap.servers": bootstrap,
        "group.id": "fenced",
        "enable.auto.commit": False,
        "fetch.error.backoff.ms": 1,
        **json.loads(properties),
    }
    consumer = confluent_kafka.Consumer(config)
    consumer.assign([confluent_kafka.TopicPartition(topic, number, 0) for number in range(int(partitions))])
    until, read = time.monotonic() + float(seconds), 0
    while time.monotonic() < until:
        message = consumer.poll(0.1)
        read += message is not None and message.error() is None
    print(json.dumps({"version": confluent_kafka.libversion()[0], "read": read}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
