"""Messages as rows of the stream source: values outside a column's type are null, as in Spark's Kafka source."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from kafka_marshal.pipeline.source import to_arrow
from kafka_marshal.runtime import LEAST_STAMP_MS, MOST_STAMP_MS, is_moment

#: librdkafka's timestamp types.
NONE, CREATED, APPENDED = 0, 1, 2


class Stored:
    """A message of the log."""

    def __init__(self, stamp: tuple[int, int], headers: object = None, key: bytes | None = b"k") -> None:
        self.stamp, self.given, self.bytes = stamp, headers, key

    def key(self) -> bytes | None:
        return self.bytes

    def value(self) -> bytes | None:
        return self.bytes

    def offset(self) -> int:
        return 7

    def timestamp(self) -> tuple[int, int]:
        return self.stamp

    def headers(self) -> Any:
        return self.given


def rows(*messages: Stored, headers: bool = True) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = to_arrow(messages, "t", 3, 5, headers=headers).to_pylist()  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("stamp", [1764181740 * 10**9, 1764181740 * 10**6, 2**63 - 1, -(2**63), MOST_STAMP_MS + 1])
def test_a_timestamp_that_spark_cannot_represent_is_null_and_its_type_stays(stamp: int) -> None:
    good, wrong = rows(Stored((APPENDED, 1_000)), Stored((CREATED, stamp)))
    assert (good["timestamp"], good["timestampType"]) == (datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), 1)
    assert (wrong["timestamp"], wrong["timestampType"]) == (None, 0)


def test_the_outermost_timestamps_are_moments_in_every_time_zone() -> None:
    assert is_moment(LEAST_STAMP_MS)
    assert is_moment(MOST_STAMP_MS)
    assert not is_moment(LEAST_STAMP_MS - 1)
    assert not is_moment(MOST_STAMP_MS + 1)
    first, last = rows(Stored((CREATED, LEAST_STAMP_MS)), Stored((CREATED, MOST_STAMP_MS)))
    assert first["timestamp"] == datetime(1, 1, 2, tzinfo=UTC)
    assert last["timestamp"] == datetime(9999, 12, 30, 23, 59, 59, 999_000, tzinfo=UTC)


def test_what_is_not_there_is_null() -> None:
    [row] = rows(Stored((NONE, -1), None, None))
    assert (row["key"], row["value"], row["timestamp"], row["timestampType"]) == (None, None, None, -1)
    assert row["headers"] is None, "not an empty list: Spark's own source has null, too"
    assert [row["timestamp"] for row in rows(Stored((CREATED, -1_000)))] == [
        datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)
    ]


def test_headers_may_have_no_value() -> None:
    [row] = rows(Stored((CREATED, 0), [("h", b"1"), ("h", None)]))
    assert row["headers"] == [{"key": "h", "value": b"1"}, {"key": "h", "value": None}]
