"""Logs which records could not be appended, rate limited."""

from __future__ import annotations

from kafka_marshal.rate_limit import RateLimitedLog

__all__ = ["AppendFailures"]


class AppendFailures:
    """Of each reason a line now and then, and what the last append came to."""

    def __init__(self, topic: str, rate_limited: RateLimitedLog) -> None:
        self._topic = topic
        self._rate_limited = rate_limited
        #: Why appends fail, and since when (own clock, ms); None: the last one succeeded. Read without a lock.
        self.failing: tuple[str, float] | None = None

    def hear(self, reason: str | None, now: float) -> None:
        """The result of an append, at now (own clock, ms): why it failed, None if it did not."""
        if reason is None:
            self.failing = None
            return
        self.failing = (reason, now if self.failing is None else self.failing[1])
        # "… (after 3ms in state CONNECT)": the same but for how long it took.
        text = f"an append to {self._topic} failed: {reason}"
        self._rate_limited.unanswered("append_failed", ("append", reason.partition(" (after ")[0]), text)
