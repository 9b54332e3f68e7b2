"""Commits a group's positions to the Kafka group of the same name, on separate threads: ``mirror_offsets=True``."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.engine.groups.mirror import Mirror, Position
from kafka_marshal.engine.work.assignment import live_stable
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.topic_mark import counts_in, kafka_counts
from kafka_marshal.errors import MarshalError
from kafka_marshal.logs import log
from kafka_marshal.node.driver import Driver
from kafka_marshal.ports import TopicInfo
from kafka_marshal.rate_limit import RateLimit
from kafka_marshal.types import Key
from rationalizer import Progress

#: How long one commit may take (s).
COMMIT_TIMEOUT_S = 10.0

#: How long the last commit, which close() waits for, may take (s).
LAST_TIMEOUT_S = 1.0

#: A failure that continues is logged this often (ms).
SAID_EVERY_MS = 3_600_000.0


class OffsetMirror:
    """A job of the driver's upkeep (see there), until ``end``."""

    def __init__(self, driver: Driver, member: Membership, consumer: ConsumerEngine) -> None:
        self._driver = driver
        self._group_id = member.settings.group_id
        self._mirror = Mirror(member, lambda key: _live(consumer, key))
        self._repeats = RateLimit(SAID_EVERY_MS)
        #: One request at a time: an older one must not arrive after a newer one.
        self._is_running = False
        with driver.condition:
            driver.upkeep.jobs.append(self)

    def is_due(self, now: float) -> bool:
        """Whether a look-up thread has to call :meth:`run` now; the lock is held."""
        if self._is_running or now < self._mirror.next_at:
            return False
        self._is_running = True
        return True

    def run(self) -> None:
        """Commit what is due (*blocking*); what this raises is only logged."""
        try:
            self._commit(COMMIT_TIMEOUT_S)
        finally:
            with self._driver.condition:
                self._is_running = False
                self._driver.condition.notify_all()

    def before_release(self) -> None:
        """Note what is owned now: it is released next, and ``last`` commits it; the lock is held."""
        self._mirror.note_owned()

    def last(self, timeout_s: float) -> None:
        """Commit what is due after the release, and end (*blocking*, for about timeout_s at most)."""
        until = self._driver.monotonic() + min(LAST_TIMEOUT_S, timeout_s)
        with self._driver.condition:
            self.end()
            self._driver.wait_for(lambda: not self._is_running, min(LAST_TIMEOUT_S, timeout_s))
            if self._is_running:
                return
            self._is_running = True
        left_s = until - self._driver.monotonic()
        if left_s > 0:
            self._commit(left_s)

    def end(self) -> None:
        """Leave the driver's upkeep; a second call does nothing. The lock is held."""
        jobs = self._driver.upkeep.jobs
        jobs[:] = [job for job in jobs if job is not self]

    def _commit(self, timeout_s: float) -> None:
        positions: Mapping[Key, Position] = {}
        until = self._driver.monotonic() + timeout_s
        try:
            if due := self._due():
                infos = self._driver.cluster.topic_info({topic for topic, _ in due}, timeout_s)
                positions = self._still_due(due, infos)
                left_s = max(0.001, until - self._driver.monotonic())
                self._driver.cluster.commit_for_group(self._group_id, positions, left_s)
            self._succeeded(positions)
        except MarshalError as error:
            self._failed(positions, error)
        except Exception as error:  # noqa: BLE001 - logged with its traceback; a fault here must not end the mirror
            log(logging.ERROR, "mirror_failed", "mirroring offsets failed; it is tried again", error=error)
            self._note_failure(positions)

    def _due(self) -> Collection[Key]:
        with self._driver.condition:
            return self._mirror.due(self._driver.now_ms())

    def _still_due(self, keys: Collection[Key], infos: Mapping[str, TopicInfo]) -> dict[Key, Position]:
        """The positions of these keys that are still due: they may have changed during the look-up of topics."""

        def counts(key: Key, progress: Progress) -> bool:
            """Whether the topic is still the one that the position is of (P12), and the log's position counts (M3)."""
            info = infos.get(key[0])
            is_there = info is not None and key[1] < info.partitions and counts_in(info.topic_id, progress)
            return is_there and not kafka_counts(progress)

        with self._driver.condition:
            return self._mirror.due(self._driver.now_ms(), keys, counts)

    def _succeeded(self, positions: Mapping[Key, Position]) -> None:
        with self._driver.condition:
            was_failing = self._mirror.is_failing
            self._mirror.committed(positions, self._driver.now_ms())
        if was_failing and positions:
            self._repeats = RateLimit(SAID_EVERY_MS)  # the next failure is logged
            text = "offsets of group %r are committed to Kafka's consumer group of that name again"
            log(logging.INFO, "mirror_back", text, self._group_id)

    def _failed(self, positions: Mapping[Key, Position], error: MarshalError) -> None:
        self._note_failure(positions)
        if self._driver.is_over or self._repeats.due(type(error).__name__, self._driver.now_ms()) is None:
            return
        log(
            logging.WARNING,
            "mirror_failed",
            "offsets of group %r are not committed to Kafka's consumer group of that name (mirror_offsets): %s "
            "Nothing is lost, and the members go on: their progress is in the coordination topic. The lag that other "
            "tools show for this group is stale. It is tried again, at least once a minute. If consumers of Kafka's "
            "own are in that group, stop them: Kafka takes no offsets from outside while it has members",
            self._group_id,
            error,
        )

    def _note_failure(self, positions: Mapping[Key, Position]) -> None:
        with self._driver.condition:
            self._mirror.failed(positions, self._driver.now_ms())


def _live(consumer: ConsumerEngine, key: Key) -> int | None:
    """Up to where all is done, if the log shows it only at the next checkpoint."""
    checkpoints = consumer.source.checkpoints
    return None if checkpoints is None or checkpoints.newest is None else live_stable(consumer, key)
