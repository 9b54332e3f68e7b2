"""Times, spans and amounts as text, and times and spans parsed.

Any client that may append to the topic can write ids. So all text from the log goes through
:func:`~kafka_marshal.secret.visible` before it is printed (JSON escapes by itself).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from kafka_marshal.secret import visible

if TYPE_CHECKING:
    from rationalizer import World

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

#: Milliseconds in each unit, as people write them.
_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}

_SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|min|s|m|h|d|w)")

#: A time of day without a day may be yesterday's if it is at most this long ago.
_WRAPPED_MS = 12 * 3_600_000

_CLOCK = re.compile(
    r"(?:(?P<day>today|yesterday)(?:\s+|$))?(?P<time>[0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,6})?)?)?"
)


def local_ms() -> float:
    """This machine's time (ms since 1970)."""
    return time.time() * 1000


def time_text(time_ms: int) -> str:
    """ISO 8601 in local time with its offset, to the millisecond; the number itself outside of the calendar."""
    try:
        moment = (_EPOCH + timedelta(milliseconds=time_ms)).astimezone()
    except (OverflowError, ValueError, OSError):
        return f"{time_ms} ms"
    return moment.isoformat(timespec="milliseconds")


def clock_text(time_ms: int, now_ms: int) -> str:
    """A short local time: 14:03:21 today, 11-24 14:03:21 on another day, else the date."""
    try:
        moment = (_EPOCH + timedelta(milliseconds=time_ms)).astimezone()
        today = (_EPOCH + timedelta(milliseconds=now_ms)).astimezone()
    except (OverflowError, ValueError, OSError):
        return time_text(time_ms)
    if moment.date() == today.date():
        return f"{moment:%H:%M:%S}"
    return f"{moment:%m-%d %H:%M:%S}" if abs(today - moment) < timedelta(days=180) else f"{moment:%Y-%m-%d}"


def parse_time(text: str, now_ms: int, *, moves: bool = False) -> int:
    """Milliseconds since 1970 of a time as the commands take it.

    ISO 8601, a time of day ("03:14", the last one; "yesterday 03:14"), a span ago ("10m"), "now", or
    a number of milliseconds. Times without an offset are local. With ``moves``, a position goes there: yesterday's time
    of day then has to be named as such if it is over 12 hours ago. Raises ValueError.
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
        of_day = _time_of_day(text.lower(), now_ms)
        moment = of_day or datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.astimezone()
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            f"{visible(text)!r} is no time: write it as 03:14, yesterday 03:14, 2026-11-21T04:50:12Z, 2026-11-21 04:50 "
            "(local), in milliseconds since 1970, or as a span ago such as 10m"
        ) from None
    found = (moment - _EPOCH) // timedelta(milliseconds=1)
    # 14:00 entered at 13:55 hardly means yesterday: a move to that time would repeat a day's work.
    is_wrapped = of_day is not None and text[0].isdigit() and _is_yesterdays(moment, now_ms)
    if moves and is_wrapped and now_ms - found > _WRAPPED_MS:
        raise ValueError(
            f"{visible(text)!r} is still to come today, and yesterday's is {span(now_ms - found)} ago "
            f"({time_text(found)}). If that is meant, write yesterday {visible(text)}"
        )
    return found


def _is_yesterdays(moment: datetime, now_ms: int) -> bool:
    today = (_EPOCH + timedelta(milliseconds=now_ms)).astimezone().date()
    return moment.astimezone().date() < today


def is_absolute(text: str) -> bool:
    """Whether a time depends neither on this machine's zone nor on now: milliseconds, or ISO 8601 with an offset."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        return True
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _time_of_day(text: str, now_ms: int) -> datetime | None:
    """A time of day, with or without a day, as a local moment; None: it is not one."""
    found = _CLOCK.fullmatch(text)
    if found is None or not text:
        return None
    hour, minute, second = [*(found["time"] or "0:0").split(":"), "0"][:3]
    now = (_EPOCH + timedelta(milliseconds=now_ms)).astimezone()
    moment = datetime.combine(now.date(), datetime.min.time()).replace(
        hour=int(hour), minute=int(minute), second=int(float(second)), microsecond=round(float(second) % 1 * 1e6)
    )
    yesterday = moment - timedelta(days=1)
    if found["day"] == "yesterday":
        return yesterday
    return yesterday if found["day"] is None and moment.astimezone() > now else moment


def parse_span(text: str) -> int:
    """Milliseconds from "90s", "5m", "1h30m", "250ms". Raises ValueError."""
    compact = text.strip().lower()
    parts = _SPAN.findall(compact)
    if not parts or _SPAN.sub("", compact).strip():
        raise ValueError(f"{visible(text)!r} is no span of time: write it as 30s, 5m, 1h30m or 250ms")
    return round(sum(float(amount) * _UNITS[unit] for amount, unit in parts))


def span(ms: float) -> str:
    """A span of time in its two largest units: "0.3 s", "42 s", "4 min 12 s", "3 h 2 min", "2 d 3 h"."""
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
    """A number without separators, to be pasted; "-": there is none."""
    return "-" if value is None else str(value)


def count(amount: int, one: str, many: str | None = None) -> str:
    """An amount with its noun: 1 lease, 3 leases, 12,345 records."""
    return f"{amount:,} {one if amount == 1 else many or one + 's'}"


def listed(names: Sequence[str], most: int = 5, between: str = ", ") -> str:
    """The first names, and how many more there are."""
    more = len(names) - most
    return between.join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


# -- names: which a log knows, and which of them a mistyped one may mean -------------------------------------

#: The least similarity of a name that is offered, and the most names.
_ALIKE, _OFFERED = 0.6, 4

#: group → topic → clients that hold something of it
LogNames = dict[str, dict[str, set[str]]]


def near(name: str, known: Iterable[str]) -> str:
    """The similar known name as the end of a sentence; "" if no known name is similar. Ties are all named."""
    from difflib import SequenceMatcher

    likeness = {each: SequenceMatcher(None, each, name).ratio() for each in known}
    best = max(likeness.values(), default=0.0)
    found = [each for each in sorted(likeness) if likeness[each] == best] if best >= _ALIKE else []
    if len(found) > _OFFERED:
        found = [*found[:_OFFERED], "…"]
    return f"; did you mean {' or '.join(each if each == '…' else repr(each) for each in found)}?" if found else ""


def no_group(group: str, known: Iterable[str]) -> str:
    """A message: the log knows no such group, with the similar name."""
    return f"no group {group!r}" + (near(group, known) or ": the log knows no lease and no member of it.")


def names_of(worlds: Iterable[World]) -> LogNames:
    """All groups that have leases, are coordinated or paused."""
    found: LogNames = {}
    for world in worlds:
        for lease in world.leases():
            clients = found.setdefault(lease.group_id, {}).setdefault(lease.topic, set())
            if lease.client_id is not None:
                clients.add(lease.client_id)
        for group in world.groups():
            topics = found.setdefault(group.group_id, {})
            for topic in {*group.counts, *(topic for topic, _ in group.partitions())}:
                topics.setdefault(topic, set())
            for member in group.members.values():
                for topic in member.topics:
                    topics.setdefault(topic, set()).add(member.client_id)
        for pause in world.pauses():
            found.setdefault(pause.group_id, {})
    return found


def clients_of(known: LogNames, group: str | None) -> set[str]:
    """The clients that hold partitions, of that group if it is known, else of all."""
    chosen = [known[group]] if group in known else list(known.values())
    return {client for topics in chosen for clients in topics.values() for client in clients}
