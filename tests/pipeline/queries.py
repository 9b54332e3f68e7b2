"""Spark's streaming queries of the tests: begun also on a machine that is slow just then."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from tests.client.conftest import wait_until

#: What Spark says of a Python process that has not answered within ten seconds, a constant of Spark.
TOO_LATE = "failed to connect back"
#: Tries to begin a query, at most.
ATTEMPTS = 8


def begun(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Begin a query and wait until it has its source; a Python process that Spark found too slow is started again."""
    for left in reversed(range(ATTEMPTS)):
        try:
            query = start()
        except PySparkException as error:
            if not left or TOO_LATE not in str(error):
                raise
            continue
        wait_until(lambda query=query: not starts(query), 180, "the query has its source")  # type: ignore[misc]
        if query.isActive or TOO_LATE not in str(query.exception()):
            return query
    return query


def starts(query: StreamingQuery) -> bool:
    """Whether it is still being set up: nothing was asked of the source yet."""
    return query.isActive and str(query.status["message"]).startswith("Initializing")
