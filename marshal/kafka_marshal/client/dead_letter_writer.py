"""Puts aside what ``consumer.run`` could not handle: it writes a dead letter, and then the message is done.

Whether the topic can take dead letters is checked once, before ``run`` calls a handler.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable
from functools import partial
from math import inf
from typing import Any, Final

from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.dead_letters import MOST_ADDED
from kafka_marshal.client.fetching import FetchingConsumer
from kafka_marshal.client.tries import Letters, RunCall, Tries
from kafka_marshal.engine.work.lane import Lane
from kafka_marshal.errors import (
    AuthenticationError,
    AuthorizationError,
    ConfigurationError,
    KafkaUnavailableError,
    ProduceError,
    grant,
)
from kafka_marshal.logs import log
from kafka_marshal.node.topics import LOOKUP_TIMEOUT_S
from kafka_marshal.ports import Cluster, TopicConfig
from kafka_marshal.topic_names import snapshots_topic

#: If a pattern matches many topics, the settings of this number are compared: each costs a request to the brokers.
MOST_SOURCES: Final = 20

#: How long to wait for Kafka before it is asked again (s).
AGAIN_S: Final = 0.5

#: Letters that are removed sooner than this (ms) may be gone before they are read.
SHORT_MS: Final = 86_400_000


def check_topic(consumer: FetchingConsumer[Any], topic: str, call: RunCall) -> None:
    """Warn if dead letters may be too large, or will soon be removed (*blocking*).

    While no broker answers it waits, until the run is to end: nothing is delivered meanwhile. Raises
    ConfigurationError if they would be lost or come back, AuthorizationError if none may be written.
    """
    news, is_told = consumer._driver.cluster.runtime.condition(), False
    while True:
        try:
            _check(consumer, topic)
            return
        except (AuthenticationError, AuthorizationError):
            raise
        except KafkaUnavailableError as error:
            if not is_told:
                text = "run() waits: nothing is delivered before Kafka has said whether %r can take dead letters: %s"
                log(logging.WARNING, "dead_letters_unchecked", text, topic, error)
        is_told = True
        if call.is_ending or consumer.stopping or consumer._driver.is_over:
            return
        with news:
            news.wait(AGAIN_S)


def _check(consumer: FetchingConsumer[Any], topic: str) -> None:
    driver, subscription = consumer._driver, consumer._engine.subscription
    if topic in (driver.replica.topic, snapshots_topic(driver.replica.topic)):
        raise ConfigurationError(
            f"dead_letters={topic!r} is a topic of kafka-marshal itself: members read it. Nothing was handed out. Name "
            "another topic"
        )
    info = driver.cluster.topic_info([topic], LOOKUP_TIMEOUT_S).get(topic)
    if info is None:
        raise ConfigurationError(
            f"dead_letters={topic!r}: there is no such topic. Nothing was handed out. Create it (kafka-topics --create "
            f"--topic {topic}), with a retention that leaves time to look at what is in it"
        )
    if subscription.matches(info):
        raise ConfigurationError(
            f"dead_letters={topic!r} is a topic that this consumer reads: its dead letters would come back to it for "
            "ever. Nothing was handed out. Name another topic, or a pattern that leaves it out"
        )
    allowed = driver.cluster.operations(topic, LOOKUP_TIMEOUT_S)
    if allowed is not None and not allowed & {"WRITE", "ALL"}:
        raise AuthorizationError(
            f"dead_letters={topic!r}: the cluster forbids writing to it. Nothing was handed out. "
            f"{grant('WRITE', 'topic', [topic])}."
        )
    sources = sorted({source for source, _ in subscription.partitions})[:MOST_SOURCES]
    _check_settings(driver.cluster, topic, sources)


def _check_settings(cluster: Cluster, topic: str, sources: Iterable[str]) -> None:
    try:
        found = [cluster.topic_config(name, LOOKUP_TIMEOUT_S) for name in (topic, *sources)]
    except AuthorizationError as error:  # a worker need not have this right
        log(logging.INFO, "dead_letters_unchecked", "the settings of %r are not checked: %s", topic, error)
        return
    letters, *others = found
    if letters is None:
        return  # deleted in between: the first letter will fail
    if "compact" in letters.settings.get("cleanup.policy", ""):
        raise ConfigurationError(
            f"dead_letters={topic!r} is compacted: of the dead letters with one key only the last would be kept, and "
            "of a message without a value none. Nothing was handed out. Name another topic, or set it right: "
            f"kafka-configs --alter --entity-type topics --entity-name {shlex.quote(topic)} --add-config "
            "cleanup.policy=delete"
        )
    if there := [source for source in others if source is not None]:
        _compare_sizes(letters, max(there, key=lambda x: _number(x, "max.message.bytes") or 0))
        _compare_retention(letters, max(there, key=lambda x: _kept(x) or 0))


def _compare_sizes(letters: TopicConfig, source: TopicConfig) -> None:
    name, of = letters.info.name, source.info.name
    room, largest = _number(letters, "max.message.bytes"), _number(source, "max.message.bytes")
    if room is not None and largest is not None and room < largest + MOST_ADDED:
        log(
            logging.WARNING if room < largest else logging.INFO,
            "dead_letters_small",
            "topic %s takes messages of up to %d bytes, %s for dead letters of up to %d. A larger letter can't be "
            "written: its message would end run(…), and come again. kafka-configs --alter --entity-type topics "
            "--entity-name %s --add-config max.message.bytes=%d",
            of,
            largest,
            name,
            room,
            shlex.quote(name),
            largest + MOST_ADDED,
            topic=name,
        )


def _compare_retention(letters: TopicConfig, source: TopicConfig) -> None:
    name, of = letters.info.name, source.info.name
    kept, theirs = _kept(letters), _kept(source)
    if kept is not None and theirs is not None and kept < min(SHORT_MS, theirs):
        log(
            logging.WARNING,
            "dead_letters_short",
            "dead letters are removed from %s after %.1f h, sooner than messages from %s: they may be gone before "
            "anybody looks. kafka-configs --alter --entity-type topics --entity-name %s --add-config retention.ms=…",
            name,
            kept / 3_600_000,
            of,
            shlex.quote(name),
            topic=name,
        )


def _kept(config: TopicConfig) -> float | None:
    """The retention (ms), inf: without a limit; None: the brokers do not say."""
    kept = _number(config, "retention.ms")
    return inf if kept is not None and kept < 0 else kept


def _number(config: TopicConfig, name: str) -> int | None:
    """A number in the settings; None: the brokers do not say."""
    value = config.settings.get(name, "")
    return int(value) if value.lstrip("-").isdigit() else None


#: How long one wait for acks lasts (s).
ACK_WAIT_S = 0.1


class DeadLetterWriter(Letters):
    """Produces dead letters, and reports the result of each. Its lane waits until the cluster has it."""

    def __init__(self, consumer: FetchingConsumer[Any], topic: str, tries: Tries) -> None:
        """Raises what check_topic raises (*blocking*)."""
        super().__init__(topic, tries)
        check_topic(consumer, topic, tries.call)
        cluster = consumer._driver.cluster
        self._producer = cluster.producer(consumer._fetcher.config)
        #: Guards what is in flight.
        self._news = cluster.runtime.condition()
        #: Letters in flight, each with the lane that waits for its ack.
        self._under_way: dict[Attempt, Lane] = {}
        self._is_over = False
        cluster.runtime.start(self._serve, "kafka-marshal-dead-letters")

    def _send(self, lane: Lane, attempt: Attempt, error: Exception, with_trace: bool) -> None:
        made = self.letter(attempt, error, with_trace)
        with self._news:
            self._under_way[attempt] = lane
            self._news.notify_all()
        acked = partial(self._acked, attempt, error, with_trace)
        try:
            self._producer.send(made.topic, made.value, made.key, made.headers, acked)
        except BaseException:
            with self._news:
                self._under_way.pop(attempt, None)
            raise

    def _acked(self, attempt: Attempt, error: Exception, with_trace: bool, failure: Exception | None) -> None:
        lane = self._under_way.get(attempt)
        if lane is not None:
            with self._tries.secured(lane):
                with self._news:
                    self._under_way.pop(attempt, None)
                self._answered(lane, attempt, error, with_trace, failure)

    def _answered(
        self, lane: Lane, attempt: Attempt, error: Exception, with_trace: bool, failure: Exception | None
    ) -> None:
        if self._is_over:
            self._tries.given_back(lane)
        elif failure is None:
            self._tries.note_letter(attempt, error, self.topic)
            self._tries.settled(lane, attempt.message)
        elif with_trace and isinstance(failure, ProduceError) and not failure.retry:
            self.send(lane, attempt, error, with_trace=False)  # perhaps only the traceback makes it too large
        elif isinstance(failure, KafkaUnavailableError) and not self._tries.call.is_ending:
            log(
                logging.WARNING,
                "dead_letter_delayed",
                "a dead letter is not known to be in %r: %s. Its message is not done, and later ones of its key wait; "
                "it is sent again, and may be there twice then",
                self.topic,
                failure,
            )
            self.send(lane, attempt, error, with_trace)
        else:
            failure.__context__ = error  # the run raises both
            self._tries.give_up(lane, attempt, failure)

    def _serve(self) -> None:
        """Wait for acks while letters are in flight (a thread of the library). If it fails, their lanes continue."""
        try:
            self._await_acks()
        except BaseException as error:  # noqa: BLE001 - the run ends with it
            self._tries.end(error)
        try:
            self._producer.close()
        except BaseException as error:  # noqa: BLE001
            self._tries.end(error)
        for lane in list(self._under_way.values()):
            with self._tries.secured(lane):
                self._tries.given_back(lane)

    def _await_acks(self) -> None:
        while True:
            with self._news:
                while not (self._under_way or self._is_over):
                    self._news.wait()
                if self._is_over:
                    break
            self._producer.poll(ACK_WAIT_S)

    def close(self) -> None:
        """Fail what is in flight: its message is not done."""
        with self._news:
            self._is_over = True
            self._news.notify_all()
