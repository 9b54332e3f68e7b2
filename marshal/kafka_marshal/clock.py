"""The clock by which a client protects itself (T4): monotonic, and counting the time a machine was suspended."""

from __future__ import annotations

import time

__all__ = ["CLOCK_ID", "now_ms"]

#: CLOCK_BOOTTIME where there is one (Linux). Elsewhere the monotonic clock, which may stand still in suspend.
CLOCK_ID: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_ms() -> float:
    """Milliseconds since some fixed point in the past."""
    return time.clock_gettime(CLOCK_ID) * 1000.0
