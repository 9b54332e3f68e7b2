"""``python -m kafka_marshal.testing``: have the local broker's jars in the cache; print their folder."""

from __future__ import annotations

import sys

from kafka_marshal.testing.errors import LocalBrokerError
from kafka_marshal.testing.jars import broker_jars

__all__ = ["main"]


def main() -> int:
    """Returns 0, or 1 when the jars are not to be had."""
    try:
        jars = broker_jars()
    except LocalBrokerError as error:
        sys.stderr.write(f"kafka-marshal: {error}\n")
        return 1
    sys.stdout.write(f"{jars[0].parent}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
