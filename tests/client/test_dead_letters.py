"""Dead letters of failed messages, written and read back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_marshal import DeadLetter, mark_repeats
from kafka_marshal.adapters.memory import MemoryMessage
from kafka_marshal.client.dead_letters import MOST_REASON, headers_of
from kafka_marshal.types import SharedEpoch

Headers = list[tuple[str, bytes | None]]


def message(headers: Headers | None = None, **more: Any) -> Any:
    said = {"topic": "orders", "partition": 3, "offset": 17, "key": b"k", "value": b"v", "timestamp": (1, 1_000)}
    return MemoryMessage(**{**said, **more}, headers=headers)


def letter_of(source: Any, headers: Headers) -> Any:
    """The record of a dead-letter topic."""
    return MemoryMessage("orders.dead", 1, 5, source.key(), source.value(), (1, 9_000), headers)


class OwnError(Exception):
    pass


#: As written by Kafka's share groups: without our headers and the message's.
BY_KAFKA: Headers = [
    ("__dlq.errors.topic", b"orders"),
    ("__dlq.errors.partition", b"3"),
    ("__dlq.errors.offset", b"17"),
    ("__dlq.errors.group", b"share"),
    ("__dlq.errors.delivery.count", b"5"),
    ("__dlq.errors.message", b"Offset delivery count exceeded the threshold."),
]


def test_the_headers_are_text_in_utf_8_behind_the_messages_own() -> None:
    own: Headers = [("trace", b"\xff"), ("trace", None), ("\u00fc", b"")]
    assert headers_of(message(own), "gr\u00fcppe", 42, 3, OwnError("no \u20ac")) == [
        *own,
        ("__dlq.errors.topic", b"orders"),
        ("__dlq.errors.partition", b"3"),
        ("__dlq.errors.offset", b"17"),
        ("__dlq.errors.group", "gr\u00fcppe".encode()),
        ("__dlq.errors.delivery.count", b"3"),
        ("__dlq.errors.message", "no \u20ac".encode()),
        ("__dlq.errors.epoch", b"42"),
        ("__dlq.errors.exception.class.name", b"tests.client.test_dead_letters.OwnError"),
        ("__dlq.errors.exception.stacktrace", "tests.client.test_dead_letters.OwnError: no \u20ac".encode()),
    ]


def test_written_and_read_back() -> None:
    own: Headers = [("trace", b"\xff"), ("null", None)]
    source = message(own, key=b"\xfe", value=None)
    found = DeadLetter.of(letter_of(source, headers_of(source, "g", 42, 3, ValueError("bad"))))
    assert found == DeadLetter(
        topic="orders",
        partition=3,
        offset=17,
        group="g",
        delivery_count=3,
        reason="bad",
        error="ValueError",
        epoch=42,
        key=b"\xfe",
        value=None,
        headers=tuple(own),
        time_ms=9_000,
        place=("orders.dead", 1, 5),
        repeated=False,
        traceback="ValueError: bad",
    )
    assert found.source == ("g", "orders", 3, 17)


def test_a_letter_that_fails_again_names_the_letter_as_its_source() -> None:
    """The source is the record that failed now. Its other headers are still the first message's."""
    first = message([("trace", b"1")])
    second = letter_of(first, headers_of(first, "g", 1, 2, ValueError("first")))
    headers = headers_of(second, "fixer", 7, 4, OwnError("second"))
    assert [name for name, _ in headers].count("__dlq.errors.topic") == 1
    found = DeadLetter.of(message(headers, topic="orders.dead2"))
    assert found is not None
    assert (found.topic, found.partition, found.offset, found.group) == ("orders.dead", 1, 5, "fixer")
    assert (found.reason, found.epoch, found.delivery_count) == ("second", 7, 4)
    assert found.headers == (("trace", b"1"),)


def test_the_epoch_of_a_part_is_its_number() -> None:
    assert ("__dlq.errors.epoch", b"7") in headers_of(message(), "g", SharedEpoch(7, 0, 99), 1, ValueError())


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError(), "ValueError"),
        (ValueError("  \n"), "ValueError"),
        (ValueError("x" * MOST_REASON), "x" * MOST_REASON),
        (ValueError("x" * (MOST_REASON + 1)), "x" * (MOST_REASON - 1) + "\u2026"),
        (ValueError("\u20ac" * 5_000_000), "\u20ac" * (MOST_REASON - 1) + "\u2026"),
        (ValueError("lone \ud800"), "lone \\ud800"),
        (KeyError("k"), "'k'"),
    ],
)
def test_what_the_exception_says(error: Exception, says: str) -> None:
    found = DeadLetter.of(letter_of(message(), headers_of(message(), "g", 1, 1, error)))
    assert found is not None
    assert found.reason == says


def test_an_exception_that_cannot_say_what_it_is() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert ("__dlq.errors.message", b"Mute") in headers_of(message(), "g", 1, 1, Mute())


def test_a_letter_of_a_share_group() -> None:
    found = DeadLetter.of(message(BY_KAFKA, topic="dlq.orders", partition=0, offset=2, key=None, value=None))
    assert found is not None
    assert found.source == ("share", "orders", 3, 17)
    assert (found.delivery_count, found.reason) == (5, "Offset delivery count exceeded the threshold.")
    assert (found.error, found.epoch, found.key, found.value, found.headers) == (None, None, None, None, ())
    assert found.place == ("dlq.orders", 0, 2)
    least = DeadLetter.of(message(BY_KAFKA[:4]))
    assert least is not None, "count and message are optional"
    assert (least.delivery_count, least.reason) == (None, "")


@pytest.mark.parametrize(
    "headers",
    [
        None,
        [],
        [("trace", b"1")],
        *(BY_KAFKA[:left_out] + BY_KAFKA[left_out + 1 :] for left_out in range(4)),
        [*BY_KAFKA, ("__dlq.errors.offset", b"seventeen")],
        [*BY_KAFKA, ("__dlq.errors.offset", b"-1")],
        [*BY_KAFKA, ("__dlq.errors.offset", "\u0661".encode())],
        [*BY_KAFKA, ("__dlq.errors.offset", b"9" * 5_000)],
        [*BY_KAFKA, ("__dlq.errors.offset", b"")],
        [*BY_KAFKA, ("__dlq.errors.group", None)],
    ],
)
def test_what_does_not_name_its_source_is_no_dead_letter(headers: Headers | None) -> None:
    assert DeadLetter.of(message(headers)) is None


def test_what_is_wrong_beside_the_source_costs_only_itself() -> None:
    spoilt: Headers = [
        *BY_KAFKA,
        ("__dlq.errors.delivery.count", b"many"),
        ("__dlq.errors.epoch", b"1.5"),
        ("__dlq.errors.message", b"\xff!"),
        ("__dlq.else", b"?"),
    ]
    found = DeadLetter.of(message(spoilt, timestamp=(0, -1)))
    assert found is not None
    assert (found.delivery_count, found.epoch, found.reason, found.time_ms) == (None, None, "\ufffd!", -1)
    assert found.headers == ()


@given(st.lists(st.tuples(st.text(max_size=8), st.none() | st.binary(max_size=4)), max_size=4), st.binary(max_size=9))
def test_of_any_headers(headers: Headers, value: bytes) -> None:
    """Any record is read or skipped, and headers that are not ours are returned unchanged."""
    names: Headers = [(name, value) for name, _ in BY_KAFKA]
    DeadLetter.of(message([*headers, *names]))
    found = DeadLetter.of(message([*BY_KAFKA, *headers]))
    others = tuple(each for each in headers if not each[0].startswith("__dlq."))
    assert found is None or found.headers == others


# -- repeats -------------------------------------------------------------------------------------------------------


def letters(*offsets: int) -> list[DeadLetter]:
    known = DeadLetter.of(message(BY_KAFKA))
    assert known is not None
    return [replace(known, offset=offset, time_ms=at) for at, offset in enumerate(offsets)]


def repeated(found: list[DeadLetter], **more: int) -> list[bool]:
    return [each.repeated for each in mark_repeats(found, **more)]


def test_later_copies_are_marked() -> None:
    assert repeated(letters(1, 2, 1, 3, 1, 2)) == [False, False, True, False, True, True]
    found = list(mark_repeats(letters(1, 1)))
    assert [replace(each, repeated=False) for each in found] == letters(1, 1), "nothing else changes"


def test_only_the_same_message_of_the_same_group_is_a_copy() -> None:
    (first,) = letters(1)
    assert repeated([first, replace(first, topic="t"), replace(first, partition=4), replace(first, group="h")]) == (
        [False] * 4
    )


def test_memory_is_bounded() -> None:
    assert repeated(letters(1, 2, 3, 1), remembered=3) == [False, False, False, True]
    assert repeated(letters(1, 2, 3, 4, 1), remembered=3) == [False] * 5
    assert repeated(letters(1, 2, 1, 3, 4, 1), remembered=3)[5], "a copy keeps its source in memory"
