"""Tells people of records that could not be appended, without drowning everything else in their log."""

from __future__ import annotations

import logging

__all__ = ["SAID_EVERY_MS", "AppendFailures"]

logger = logging.getLogger("kafka_marshal")

#: While a broker is away every beat fails, for the same reason: it is said this often.
SAID_EVERY_MS = 10_000.0


class AppendFailures:
    """Of each new reason a line at once, of the same one a line every SAID_EVERY_MS, with how many there were."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._reason = ""
        self._untold = 0
        self._say_at = 0.0

    def say(self, reason: str, now: float) -> None:
        """One more has failed, at now (our own clock, ms)."""
        if reason == self._reason and now < self._say_at:
            self._untold += 1
            return
        more = f" ({self._untold} more since this was said last)" if self._untold else ""
        logger.warning("an append to %s failed: %s%s", self._topic, reason, more)
        self._reason, self._untold, self._say_at = reason, 0, now + SAID_EVERY_MS
