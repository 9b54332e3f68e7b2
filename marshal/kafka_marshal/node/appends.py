"""Appends records for the engine, and collects the results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kafka_marshal.engine.effects import Append
from kafka_marshal.errors import AuthorizationError
from kafka_marshal.node.engine_lock import EngineLock
from kafka_marshal.node.events import Events
from kafka_marshal.node.pacing import Pacing
from kafka_marshal.ports import Ack, Appender, Cluster
from kafka_marshal.rate_limit import RateLimitedLog
from kafka_marshal.rights import grant
from rationalizer import encode


class AppendFailures:
    """Logs failures, rate-limited by reason, and keeps the result of the last append."""

    def __init__(self, topic: str, rate_limited: RateLimitedLog) -> None:
        self._topic = topic
        self._rate_limited = rate_limited
        #: Why appends fail, and since when (own clock, ms); None: the last one succeeded. Read without a lock.
        self.failing: tuple[str, float] | None = None
        #: When the last one failed (own clock, ms).
        self.failed_at: float = 0.0

    def hear(self, reason: str | None, now: float) -> None:
        """The result of an append: why it failed, None: it did not. now: own clock, ms."""
        if reason is None:
            self.failing = None
            return
        self.failed_at = now
        self.failing = (reason, now if self.failing is None else self.failing[1])
        # "… (after 3ms in state CONNECT)": the time does not make it another reason.
        text = f"an append to {self._topic} failed: {reason}"
        self._rate_limited.unanswered("append_failed", ("append", reason.partition(" (after ")[0]), text)


class Appends:
    """The appender of one driver; it is replaced if it has failed for good (C17)."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        lock: EngineLock,
        pacing: Pacing,
        events: Events,
        failures: AppendFailures,
        written: Callable[[int, int], object],
    ) -> None:
        """written: called with the CP and the offset of each of our records that is in the log."""
        self.failures = failures
        self._cluster = cluster
        self._topic = topic
        self._lock = lock
        self._pacing = pacing
        self._events = events
        self._written = written
        self._appender = self._new()
        self._retired: list[Appender] = []
        self._is_broken = False

    def _new(self) -> Appender:
        interval_ms = self._lock.engine.settings.heartbeat_interval_ms
        return self._cluster.appender(self._topic, delivery_timeout_ms=interval_ms)

    def append(self, wanted: Append) -> None:
        """Append a record; the lock is held."""
        self._pacing.appended(wanted)
        self._appender.append(wanted.cp, encode(wanted.record), partial(self._acked, wanted.cp, wanted.token))

    def _acked(self, cp: int, token: int, ack: Ack) -> None:
        now_ms = self._cluster.runtime.now_ms
        self.failures.hear(ack.error, now := now_ms())
        self._is_broken = self._is_broken or ack.fatal
        if ack.forbidden:
            self._lock.fail(
                AuthorizationError(
                    f"appending to {self._topic!r} is forbidden: {ack.error}. Without it nothing can be claimed, kept "
                    f"or changed; leases of this process end. {grant('WRITE', 'topic', [self._topic])}"
                )
            )
        with self._lock.condition:
            self._pacing.answered()
            if ack.error is None:
                self._events.heard(now)
                if ack.offset is not None:
                    self._written(cp, ack.offset)
            else:
                self._events.trouble(ack.error, now)
            self._lock.engine.take(None, self._lock.engine.acked, token, ack.offset, now_ms())

    def poll(self) -> None:
        """Collect acknowledgements; the lock is held."""
        self._appender.poll()

    def replace_broken(self) -> None:
        """Continue with another appender if this one has failed for good; the lock is held."""
        if self._is_broken:
            self._is_broken = False
            self._retired.append(self._appender)
            self._appender = self._new()

    def flush(self, timeout_s: float) -> None:
        """Wait until what was appended is acknowledged (*blocking*)."""
        self._appender.flush(timeout_s)

    def close(self) -> None:
        """Drop what is not acknowledged; free the connections."""
        for appender in (*self._retired, self._appender):
            appender.close()
