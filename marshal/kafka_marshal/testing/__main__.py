"""``python -m kafka_marshal.testing``: download the local broker's jars to the cache and print their folder.

It also starts a broker once and keeps the classes that it has loaded: later starts take half the processor time. With
PySpark installed, it downloads Spark's Kafka connector too (its folder is printed second).
"""

from __future__ import annotations

import importlib.util
import sys

from kafka_marshal.testing.errors import LocalBrokerError
from kafka_marshal.testing.jars import broker_jars, connector_jars
from kafka_marshal.testing.ready_classes import make_classes_ready

__all__ = ["main"]


def main() -> int:
    """Returns 0, or 1 if the jars are unavailable."""
    try:
        sys.stdout.write(f"{broker_jars()[0].parent}\n")
        make_classes_ready()
        if importlib.util.find_spec("pyspark") is not None:
            sys.stdout.write(f"{connector_jars()[0].parent}\n")
    except LocalBrokerError as error:
        sys.stderr.write(f"kafka-marshal: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
