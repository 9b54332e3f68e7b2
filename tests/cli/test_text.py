"""Text for people: escaping, times, spans."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_marshal.observe.text import clock_text, count, is_absolute, parse_span, parse_time, span, time_text
from kafka_marshal.secret import visible


@given(st.text(st.characters(codec=None)))
def test_whatever_it_was_it_is_harmless_afterwards(text: str) -> None:
    assert visible(text).isprintable()


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_plain_text_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b]0;pwned\x07", "\\x1b]0;pwned\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("a\u202egpj.exe", "a\\u202egpj.exe"),
        ("a\u2066b\u2069", "a\\u2066b\\u2069"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("tag\U000e0041", "tag\\U000e0041"),
        ("line\nline\ttab\r", "line\\nline\\ttab\\r"),
        ("\u2028\u2029\xa0", "\\u2028\\u2029\\xa0"),
        ("\ud800", "\\ud800"),
        ("Zürich 東京 😀", "Zürich 東京 😀"),
    ],
)
def test_what_is_not_plainly_visible_is_escaped(raw: str, shown: str) -> None:
    assert visible(raw) == shown


@pytest.fixture
def in_kolkata(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_kolkata")
def test_times_are_local_and_say_so() -> None:
    assert time_text(1_700_000_000_123) == "2023-11-15T03:43:20.123+05:30"
    assert parse_time("2023-11-15T03:43:20.123", 0) == 1_700_000_000_123
    assert parse_time("2023-11-14T22:13:20.123Z", 0) == 1_700_000_000_123


@given(st.integers(0, 253_402_300_000_000))
def test_a_time_that_was_written_is_read_again(time_ms: int) -> None:
    assert parse_time(time_text(time_ms), 0) == time_ms


@pytest.mark.parametrize("time_ms", [2**63 - 1, 253_402_400_000_000, -(2**62)])
def test_a_time_that_no_calendar_reaches_is_shown_as_its_number(time_ms: int) -> None:
    assert time_text(time_ms) == f"{time_ms} ms"


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1700000000000", 1_700_000_000_000),
        ("now", 1_000_000),
        ("10s", 990_000),
        ("-10s", 990_000),
        ("10s ago", 990_000),
        ("5 m ago", 700_000),
    ],
)
def test_other_ways_to_write_a_time(text: str, ms: int) -> None:
    assert parse_time(text, 1_000_000) == ms


@pytest.mark.usefixtures("in_kolkata")
@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("14:00", "2026-11-25T14:00"),
        ("03:14", "2026-11-25T03:14"),
        ("3:14:05.5", "2026-11-25T03:14:05.500"),
        ("00:01", "2026-11-25T00:01"),  # of today, however long ago
        ("yesterday 03:14", "2026-11-24T03:14"),
        ("Yesterday  14:00", "2026-11-24T14:00"),
        ("yesterday", "2026-11-24T00:00"),
        ("today", "2026-11-25T00:00"),
        ("today 23:50", "2026-11-25T23:50"),
    ],
)
def test_times_of_day_are_local(text: str, time: str) -> None:
    now = parse_time("2026-11-25T14:00:30+05:30", 0)
    assert parse_time(text, now) == parse_time(f"{time}+05:30", 0)


@pytest.mark.usefixtures("in_kolkata")
def test_a_position_moves_to_no_time_of_day_that_is_still_to_come_and_was_long_ago() -> None:
    soon_after_midnight = parse_time("2026-11-25T00:10+05:30", 0)
    for text in ("23:50", "12:10"):
        expected = parse_time(f"2026-11-24T{text}+05:30", 0)
        assert parse_time(text, soon_after_midnight) == parse_time(text, soon_after_midnight, moves=True) == expected
    with pytest.raises(ValueError, match=r"12 h 1 min ago \(2026-11-24T12:09:00.000\+05:30\).*write yesterday 12:09"):
        parse_time("12:09", soon_after_midnight, moves=True)
    long_ago = parse_time("2026-11-24T12:09+05:30", 0)
    assert parse_time("yesterday 12:09", soon_after_midnight, moves=True) == long_ago
    assert parse_time("12:09", soon_after_midnight) == long_ago  # a question about the past moves nothing


@pytest.mark.parametrize("text", ["03:14", "yesterday", "10m", "now", "2026-11-21 04:50", "2026-11-21"])
def test_what_depends_on_where_or_when_it_is_read_is_not_absolute(text: str) -> None:
    assert not is_absolute(text)


@pytest.mark.parametrize("text", ["1700000000123", "2026-11-21T04:50:12Z", "2026-11-21 04:50+05:30"])
def test_what_is_one_moment_everywhere_is_absolute(text: str) -> None:
    assert is_absolute(text)


@pytest.mark.usefixtures("in_kolkata")
def test_times_for_people_are_as_short_as_they_can_be() -> None:
    now = parse_time("2026-11-25T14:00:30+05:30", 0)
    shown = [
        clock_text(parse_time(text, now), now) for text in ("03:14", "yesterday 23:50", "2026-01-02", "2023-01-02")
    ]
    assert shown == ["03:14:00", "11-24 23:50:00", "2026-01-02", "2023-01-02"]
    assert clock_text(2**62, now) == f"{2**62} ms"


@pytest.mark.parametrize(
    "text", ["", "tomorrow 12:00", "2026-13-01", "24:00", "12:60", "1200", "yesterday 3", "10", "-5", "²"]
)
def test_what_is_no_time_is_refused(text: str) -> None:
    if text in ("10", "1200"):
        assert parse_time(text, 0) == int(text)
        return
    with pytest.raises(ValueError, match="is no time"):
        parse_time(text, 0)


@pytest.mark.parametrize(
    ("text", "ms"),
    [("90s", 90_000), ("5m", 300_000), ("1h30m", 5_400_000), ("250ms", 250), ("1.5 s", 1_500), ("2D", 172_800_000)],
)
def test_spans_are_read(text: str, ms: int) -> None:
    assert parse_span(text) == ms


@pytest.mark.parametrize("text", ["", "5", "m", "5 apples", "5m3", "-5m", "5m -3s", "1e3s", "\x1b5m"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no span") as refused:
        parse_span(text)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0.0 s"),
        (320, "0.3 s"),
        (9_999, "10.0 s"),
        (10_000, "10 s"),
        (59_700, "1 min"),
        (252_000, "4 min 12 s"),
        (3_600_000, "1 h"),
        (10_920_000, "3 h 2 min"),
        (180_000_000, "2 d 2 h"),
        (-5_000, "-5.0 s"),
    ],
)
def test_spans_are_written_in_the_units_that_matter(ms: int, text: str) -> None:
    assert span(ms) == text


def test_counts() -> None:
    assert count(1, "lease") == "1 lease"
    assert count(12_345, "record") == "12,345 records"
