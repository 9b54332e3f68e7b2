"""How long the log is kept: it stands in the settings of the coordination topic, where every member reads it (Q52).

Kafka itself never removes anything of the log (L1), so it is no retention, but two settings that brokers use for
compacted topics only, set to the same value. Members of releases that do not know it ignore them.
"""

from __future__ import annotations

from collections.abc import Mapping

from kafka_marshal.errors import ConfigurationError

#: A setting alone may come from a template for all topics; both with one value do not.
_SETTINGS = ("min.compaction.lag.ms", "max.compaction.lag.ms")

#: The shortest time. A start, `who`, `log`, a dump or an audit may read for minutes, and must not lose what it is about
#: to read; and members take turns within a tenth of it, which must leave one the time to check what goes (6 min).
LEAST_KEEP_MS = 3_600_000

#: More than a century is a mistake, or "forever".
MOST_KEEP_MS = 100 * 366 * 86_400_000

#: One member prunes within this part of the time after something can go.
TURNS = 10


def keep_of(settings: Mapping[str, str]) -> int | None:
    """How long the log of this topic is kept (ms), at least the shortest time; None: for ever."""
    least, most = (settings.get(name, "") for name in _SETTINGS)
    if least != most or not (least.isascii() and least.isdigit()) or not 0 < int(least) <= MOST_KEEP_MS:
        return None
    return max(int(least), LEAST_KEEP_MS)


def keep_settings(keep_ms: int | None) -> dict[str, str | None]:
    """The settings with which the log is kept for this long; None: for ever."""
    return dict.fromkeys(_SETTINGS, None if keep_ms is None else str(keep_ms))


def check_keep(keep_ms: int) -> int:
    """Raise ConfigurationError if a log can't be kept for this long only (ms)."""
    if not LEAST_KEEP_MS <= keep_ms <= MOST_KEEP_MS:
        raise ConfigurationError(
            f"the log can be kept for an hour at least, and for a hundred years at most, not for {keep_ms / 1000:g} s. "
            "With less than an hour, a member that starts, who, log or a dump could lose the records that it is about "
            "to read. Nothing was changed"
        )
    return keep_ms


def turn_ms(keep_ms: int) -> float:
    """Within this time after something can go, one of the members removes it (ms)."""
    return keep_ms / TURNS


def removable(log_start: int, log_end: int, old_below: int, every: int, keep: int) -> bool:
    """Whether snapshots may be there with which some of a CP can go, by their distance alone.

    old_below: the first offset that is not too old. every: offsets between snapshots (S2). keep: checked
    snapshots that stay.
    """
    first = (log_start // every + 1) * every
    return first <= old_below and log_end // every * every >= first + (keep - 1) * every
