"""The marker of L2: written and read in one place."""

from __future__ import annotations

import pytest

from rationalizer import Heartbeat, Tick, encode
from rationalizer.marker import count_of, marker, said_by, said_in


def test_what_is_written_is_read() -> None:
    assert said_by(marker("i", 8)) == said_in(encode(marker("i", 8))) == "8"
    assert count_of(encode(marker("i", 8))) == 8


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"no record",
        encode(Tick("i", "c", "partitions")),
        encode(Tick("i", "c", "a partitions=8")),
        encode(Heartbeat("i", "c", "partitions=8", "t", 0, 0, None)),
    ],
)
def test_what_is_no_marker_says_nothing(value: bytes | None) -> None:
    assert said_in(value) is None
    assert count_of(value) is None


@pytest.mark.parametrize("text", ["", "x", "-1", "٨", "8 "])
def test_a_marker_that_says_no_number_is_one_all_the_same(text: str) -> None:
    """A replica refuses it: it says another count than there is."""
    value = encode(Tick("i", "c", f"partitions={text}"))
    assert said_in(value) == text
    assert count_of(value) is None
