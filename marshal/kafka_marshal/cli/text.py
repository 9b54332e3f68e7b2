"""Text for people: nothing from the log reaches a terminal unescaped; times and spans, written and read.

Ids in the log were written by anybody who may append to the topic. An id may hold an escape sequence that renames
the terminal's window, or a bidi override that shows another name than it is. So whatever comes from the log goes
through :func:`clean` on its way out (JSON escapes by itself).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

__all__ = ["clean", "count", "number", "parse_span", "parse_time", "span", "time_text"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

#: Milliseconds in each unit, as people write them.
_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}

_SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|min|s|m|h|d|w)")


def clean(text: str) -> str:
    """The text with everything that is not plainly visible escaped: controls, bidi and zero-width marks, odd spaces.

    ``str.isprintable`` is false for just those: categories C* and Z*, except the space.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def time_text(time_ms: int) -> str:
    """ISO 8601 in local time with its offset, to the millisecond; the bare number where no calendar reaches."""
    try:
        moment = (_EPOCH + timedelta(milliseconds=time_ms)).astimezone()
    except (OverflowError, ValueError, OSError):
        return f"{time_ms} ms"
    return moment.isoformat(timespec="milliseconds")


def parse_time(text: str, now_ms: int) -> int:
    """Milliseconds since 1970 from ISO 8601, a bare number of milliseconds, "now", or a span ago ("10m").

    A time without an offset is local. Raises ValueError.
    """
    text = text.strip()
    if text == "now":
        return now_ms
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return now_ms - parse_span(text.removesuffix("ago").strip().removeprefix("-"))
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.astimezone()
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            f"{clean(text)!r} is no time: write it as 2026-11-21T04:50:12Z, 2026-11-21 04:50 (local), in milliseconds "
            "since 1970, or as a span ago such as 10m"
        ) from None
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def parse_span(text: str) -> int:
    """Milliseconds from "90s", "5m", "1h30m", "250ms". Raises ValueError."""
    compact = text.strip().lower()
    parts = _SPAN.findall(compact)
    if not parts or _SPAN.sub("", compact).strip():
        raise ValueError(f"{clean(text)!r} is no span of time: write it as 30s, 5m, 1h30m or 250ms")
    return round(sum(float(amount) * _UNITS[unit] for amount, unit in parts))


def span(ms: float) -> str:
    """A span of time in the two units that matter: "0.3 s", "42 s", "4 min 12 s", "3 h 2 min", "2 d 3 h"."""
    if ms < 0:
        return f"-{span(-ms)}"
    if ms < 10_000:
        return f"{ms / 1000:.1f} s"
    seconds = round(ms / 1000)
    for unit, size, lower, lower_size in (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            rest = seconds % size // lower_size
            return f"{seconds // size} {unit} {rest} {lower}" if rest else f"{seconds // size} {unit}"
    return f"{seconds} s"


def number(value: int | None) -> str:
    """A number without separators, so that it can be pasted; "-" for none."""
    return "-" if value is None else str(value)


def count(amount: int, one: str, many: str | None = None) -> str:
    """An amount of something: 1 lease, 3 leases, 12,345 records."""
    return f"{amount:,} {one if amount == 1 else many or one + 's'}"
