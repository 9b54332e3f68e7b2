"""When a member looks at topics, and what it does with what it sees (*blocking* looks, on look-up threads)."""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING

from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.errors import AuthenticationError, KafkaUnavailableError, MarshalError
from kafka_marshal.logs import log
from kafka_marshal.node.topics import (
    FEW_PARTITIONS,
    IDS_WITHIN_MS,
    METADATA_INTERVAL_MS,
    METADATA_JITTER,
    CountPartitions,
    Interest,
    TopicWatch,
)
from kafka_marshal.ports import TopicInfo

if TYPE_CHECKING:
    from kafka_marshal.node.driver import Driver

__all__ = ["TopicRounds"]


class TopicRounds:
    """The regular looks of one driver."""

    def __init__(self, driver: Driver, coordination: str) -> None:
        self._driver = driver
        self._coordination = coordination
        self._watch = TopicWatch(driver.cluster, coordination)
        self._rng = driver.runtime.random()
        #: When the next look is due (own clock, ms), and whether one is under way.
        self.next_at = 0.0
        self.is_running = False

    def is_due(self, now: float) -> bool:
        """Whether somebody has to look now, who calls :meth:`look`; the lock is held."""
        if self._driver.engine.take_ids_wanted():
            self._watch.describe_next()
            self.next_at = min(self.next_at, now)
        if now < self.next_at or self.is_running:
            return False
        self.is_running = True
        self.next_at = inf
        return True

    def add(self, number: int, subscription: Subscription, count: CountPartitions | None = None) -> None:
        """Keep a consumer's topics in view; the first look happens now (*blocking*).

        count: a cheap look at the topics, for the first consumer. Their ids come with the next regular look, soon.
        """
        driver = self._driver
        with driver.condition:
            self._watch.add(number, subscription)
            if driver.engine.has_marks(subscription.names):
                count = None  # nothing begins before the ids are known (P12)
        told = False
        while not told:
            interest = self._watch.interest
            counted = self._watch.count(interest, count)
            topics = counted or self._watch.look(interest)
            with driver.locked():
                told = self._tell(interest, topics)
                if counted:
                    are_few = sum(info.partitions for info in counted.values()) <= FEW_PARTITIONS
                    self._look_again_within(0.0 if are_few else IDS_WITHIN_MS)

    def remove(self, number: int) -> None:
        """A consumer has ended: its topics need not be looked at for it any more."""
        with self._driver.condition:
            self._watch.remove(number)

    def _tell(self, interest: Interest, topics: dict[str, TopicInfo]) -> bool:
        """Tell the engine, unless a consumer came since the look-up: topics not asked for would look deleted."""
        if interest is not self._watch.interest:
            return False
        if interest:
            self._driver.engine.metadata(topics, self._driver.now_ms())
        return True

    def look(self) -> None:
        """Look, and tell the engine; nobody sees what this raises."""
        driver = self._driver
        try:
            interest = self._watch.interest
            topics = self._watch.look(interest)
            with driver.condition:
                if driver.is_over or driver.engine.failure is not None:
                    return
                driver.replica.check(topics.get(self._coordination))
                driver.events.heard(driver.now_ms())
                self._tell(interest, topics)
                driver.settle()
            driver.find_snapshots()
        except (KafkaUnavailableError, AuthenticationError) as error:
            # Refused looks like an outage, and a broker that goes down may look like a refusal: neither is final.
            driver.events.trouble(str(error), driver.now_ms())
            driver.told.warn("topics_not_found", "topics", f"topics not looked up this time: {error}")
        except MarshalError as error:
            driver.fail(error)
        except Exception as error:  # noqa: BLE001 - logged with its traceback
            # On a thread of its own, whose end nobody looks at: here or nowhere.
            text = "looking up topics failed; it is tried again"
            log(logging.ERROR, "topics_failed", text, error=error)
        finally:
            self.is_running = False
            self._look_again_within(METADATA_INTERVAL_MS)

    def _look_again_within(self, interval_ms: float) -> None:
        jitter = self._rng.uniform(1 - METADATA_JITTER, 1 + METADATA_JITTER)
        self.next_at = min(self.next_at, self._driver.now_ms() + interval_ms * jitter)
