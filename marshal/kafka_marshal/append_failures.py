"""Tells people of records that could not be appended, without drowning everything else in their log."""

from __future__ import annotations

import logging

from kafka_marshal.repeats import Repeats

__all__ = ["SAID_EVERY_MS", "AppendFailures"]

logger = logging.getLogger("kafka_marshal")

#: While a broker is away every beat fails, for the same reason: it is said this often.
SAID_EVERY_MS = 10_000.0


class AppendFailures:
    """Of each new reason a line at once, of the same one a line every SAID_EVERY_MS, with how many there were."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._repeats = Repeats(SAID_EVERY_MS)
        #: Why appends fail, and since when (own clock, ms); None: the last one succeeded. Read without a lock.
        self.failing: tuple[str, float] | None = None

    def hear(self, reason: str | None, now: float) -> None:
        """What became of an append: why it failed, None where it did not."""
        if reason is None:
            self.failing = None
        else:
            self.failing = (reason, now if self.failing is None else self.failing[1])
            self.say(reason, now)

    def say(self, reason: str, now: float) -> None:
        """One more has failed, at now (our own clock, ms)."""
        # "… (after 3ms in state CONNECT)": the same but for how long it took.
        held_back = self._repeats.due(reason.partition(" (after ")[0], now)
        if held_back is not None:
            more = f" ({held_back} more since this was said last)" if held_back else ""
            logger.warning("an append to %s failed: %s%s", self._topic, reason, more)
