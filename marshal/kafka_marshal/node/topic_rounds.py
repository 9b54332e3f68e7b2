"""When a member describes topics, and how it uses the result (*blocking*, on look-up threads)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf

from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.errors import AuthenticationError, KafkaUnavailableError, MarshalError
from kafka_marshal.logs import log
from kafka_marshal.node.engine_lock import EngineLock
from kafka_marshal.node.events import Events
from kafka_marshal.node.replica import Replica
from kafka_marshal.node.topics import (
    FEW_PARTITIONS,
    IDS_WITHIN_MS,
    METADATA_INTERVAL_MS,
    METADATA_JITTER,
    CountPartitions,
    Interest,
    TopicWatch,
)
from kafka_marshal.ports import Cluster, TopicInfo
from kafka_marshal.rate_limit import RateLimitedLog

#: A consumer's first look-up is tried again this often (s), for as long as a start waits for Kafka: if a whole fleet
#: starts at once, a broker may be too busy for the first one.
AGAIN_S = 0.1


class TopicRounds:
    """The regular checks of topics by one driver."""

    def __init__(
        self,
        cluster: Cluster,
        replica: Replica,
        lock: EngineLock,
        events: Events,
        rate_limited: RateLimitedLog,
        find_snapshots: Callable[[], object],
        timeout_s: float,
    ) -> None:
        """find_snapshots: called after each successful check (it may block).

        timeout_s: how long a consumer's start waits for Kafka.
        """
        self._replica = replica
        self._lock = lock
        self._events = events
        self._rate_limited = rate_limited
        self._find_snapshots = find_snapshots
        self._timeout_s = timeout_s
        self._watch = TopicWatch(cluster, replica.topic)
        self._runtime = cluster.runtime
        self._rng = cluster.runtime.random()
        self._now_ms = cluster.runtime.now_ms
        #: When the next check is due (own clock, ms), and whether one is in progress.
        self.next_at: float = 0.0
        self.is_running: bool = False

    def is_due(self, now: float) -> bool:
        """Whether :meth:`run` has to be called now; the lock is held."""
        if self._lock.engine.topic_ids.wanted:
            self._lock.engine.take(None, self._lock.engine.topic_ids.take_wanted)
            self._watch.describe_next()
            self.next_at = min(self.next_at, now)
        if now < self.next_at or self.is_running:
            return False
        self.is_running = True
        self.next_at = inf
        return True

    def add(self, number: int, subscription: Subscription, count: CountPartitions | None = None) -> None:
        """Check a consumer's topics regularly; the first check happens now (*blocking*).

        count: a cheap count of partitions, for the first consumer. Their ids come with the next regular check, soon.
        """
        with self._lock.condition:
            self._watch.add(number, subscription)
            engine = self._lock.engine
            if engine.topic_ids.has_marks(subscription.names, engine.consumers[number].source.view.progress):
                count = None  # nothing begins before the ids are known (P12)
        has_passed_on = False
        until = self._runtime.monotonic() + self._timeout_s
        while not has_passed_on:
            interest = self._watch.interest
            try:
                counted = self._watch.count(interest, count)
                topics = counted or self._watch.check(interest)
            except KafkaUnavailableError as error:
                left_s = until - self._runtime.monotonic()
                if left_s <= 0:
                    raise
                text = f"the consumer waits for its topics, asking again for {left_s:.0f} s: {error}"
                self._rate_limited.warn("topics_not_found", "first topics", text)
                self._runtime.box().get(AGAIN_S)
                continue
            with self._lock.locked():
                has_passed_on = self._pass_on(interest, topics)
                if counted:
                    are_few = sum(info.partitions for info in counted.values()) <= FEW_PARTITIONS
                    self._look_again_within(0.0 if are_few else IDS_WITHIN_MS)

    def remove(self, number: int) -> None:
        """A consumer has ended: its topics need not be checked for it any more."""
        with self._lock.condition:
            self._watch.remove(number)

    def _pass_on(self, interest: Interest, topics: dict[str, TopicInfo]) -> bool:
        """Pass the result to the engine, unless a consumer came meanwhile: its topics would seem deleted."""
        if interest is not self._watch.interest:
            return False
        if interest:
            self._lock.engine.take(None, self._lock.engine.metadata, topics, self._now_ms())
        return True

    def run(self) -> None:
        """Check, and pass the result to the engine; no caller sees what this raises."""
        lock, events = self._lock, self._events
        try:
            interest = self._watch.interest
            topics = self._watch.check(interest)
            with lock.condition:
                if lock.life.ended or lock.engine.failure is not None:
                    return
                self._replica.check(topics.get(self._replica.topic))
                events.heard(self._now_ms())
                self._pass_on(interest, topics)
                lock.settle()
            self._find_snapshots()
        except (KafkaUnavailableError, AuthenticationError) as error:
            # A refusal may look like an outage, and a broker that stops may look like a refusal: neither is final.
            events.trouble(str(error), self._now_ms())
            self._rate_limited.unanswered("topics_not_found", "topics", f"topics not looked up this time: {error}")
        except MarshalError as error:
            lock.fail(error)
        except Exception as error:  # noqa: BLE001 - logged with its traceback
            # On a separate thread, whose end is not observed: logged here or nowhere.
            text = "looking up topics failed; it is tried again"
            log(logging.ERROR, "topics_failed", text, error=error)
        finally:
            self.is_running = False
            self._look_again_within(METADATA_INTERVAL_MS)

    def _look_again_within(self, interval_ms: float) -> None:
        jitter = self._rng.uniform(1 - METADATA_JITTER, 1 + METADATA_JITTER)
        self.next_at = min(self.next_at, self._now_ms() + interval_ms * jitter)
