"""The clock by which a client protects itself (T4), and the range of timestamps that people can be shown."""

from __future__ import annotations

import time

__all__ = ["CLOCK_ID", "LEAST_STAMP_MS", "MOST_STAMP_MS", "is_moment", "now_ms"]

#: CLOCK_BOOTTIME where there is one (Linux). Elsewhere the monotonic clock, which may stop in suspend.
CLOCK_ID: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

#: A record's timestamp is any 64-bit number. Within these (years 1 to 9999, less a day for time zones) Python's
#: datetime and Spark have a moment for it.
LEAST_STAMP_MS = -62_135_510_400_000
MOST_STAMP_MS = 253_402_214_399_999


def is_moment(stamp_ms: int) -> bool:
    """Whether a record's timestamp (ms) is a moment that datetime and Spark can represent."""
    return LEAST_STAMP_MS <= stamp_ms <= MOST_STAMP_MS


def now_ms() -> float:
    """Milliseconds since some fixed point in the past."""
    return time.clock_gettime(CLOCK_ID) * 1000.0
