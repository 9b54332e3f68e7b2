"""How much one micro-batch reads, by the interface of Spark 4.2; stand-ins for older releases.

Spark 4.0 and 4.1 ask a Python source for its latest offset without a limit, and don't pass ``availableNow`` to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kafka_marshal.arguments import MOST_OFFSET

__all__ = ["IS_TOLD_OF_AVAILABLE_NOW", "ReadAllAvailable", "ReadMaxRows", "SupportsTriggerAvailableNow", "rows_of"]

#: Whether this Spark passes ``availableNow`` to a Python source.
IS_TOLD_OF_AVAILABLE_NOW = find_spec("pyspark.sql.streaming.datasource") is not None

if TYPE_CHECKING or not IS_TOLD_OF_AVAILABLE_NOW:

    @dataclass
    class ReadAllAvailable:
        """Everything there is."""

    @dataclass
    class ReadMaxRows:
        """At most this many rows."""

        max_rows: int

    class SupportsTriggerAvailableNow:
        """A source that can end with the records that existed when it started."""

else:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow


def rows_of(limit: object, default: int) -> int:
    """How many offsets a micro-batch may have under this limit of Spark; None: the default."""
    if isinstance(limit, ReadAllAvailable):
        return MOST_OFFSET
    return min(limit.max_rows, MOST_OFFSET) if isinstance(limit, ReadMaxRows) else default
