"""Puts aside what ``consumer.run`` could not handle: a record in a topic of dead letters, and the message is done."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Protocol

from kafka_marshal.adapters.message import Message
from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.dead_letters import headers_of
from kafka_marshal.client.fetching import FetchingConsumer
from kafka_marshal.engine.work.lanes import Lane
from kafka_marshal.errors import ConfigurationError, KafkaUnavailableError
from kafka_marshal.logs import log
from kafka_marshal.node.topics import LOOKUP_TIMEOUT_S

__all__ = ["DeadLetterWriter"]

#: How long one wait for acks lasts (s).
ACK_WAIT_S = 0.1


class Call(Protocol):
    """The run that it is about."""

    @property
    def is_ending(self) -> bool: ...


class Settling(Protocol):
    """What is told what became of a dead letter."""

    @property
    def call(self) -> Call: ...

    def put_aside(self, lane: Lane, message: Message) -> None:
        """The cluster has it: the message is done."""

    def given_back(self, lane: Lane) -> None:
        """The run is over: the message comes again."""

    def give_up(self, lane: Lane, attempt: Attempt, error: BaseException) -> None:
        """It can't be written."""


class DeadLetterWriter:
    """Produces dead letters, and says what became of each. Its lane stands still until the cluster has it."""

    def __init__(self, consumer: FetchingConsumer[Any], topic: str, tries: Settling) -> None:
        """Raises ConfigurationError where there is no such topic, or the consumer reads it (*blocking*)."""
        self.topic = topic
        self._tries = tries
        _check(consumer, topic)
        cluster = consumer._driver.cluster
        self._producer = cluster.producer(consumer._fetcher.config)
        #: Guards the count of what is under way.
        self._news = cluster.runtime.condition()
        self._under_way = 0
        self._is_over = False
        cluster.runtime.start(self._serve, "kafka-marshal-dead-letters")

    def send(self, lane: Lane, attempt: Attempt, error: Exception) -> None:
        """Put a message aside; its lane goes on when that is acknowledged (any thread)."""
        message = attempt.message
        headers = headers_of(message, attempt.group_id, attempt.epoch, attempt.number, error)
        with self._news:
            self._under_way += 1
            self._news.notify_all()
        again = partial(self.send, lane, attempt, error)
        key, value = message.key(), message.value()
        self._producer.send(self.topic, value, key, headers, lambda failure: self._acked(lane, attempt, failure, again))

    def _acked(self, lane: Lane, attempt: Attempt, failure: Exception | None, again: partial[None]) -> None:
        with self._news:
            self._under_way -= 1
        if self._is_over:
            self._tries.given_back(lane)
        elif failure is None:
            self._tries.put_aside(lane, attempt.message)
        elif isinstance(failure, KafkaUnavailableError) and not self._tries.call.is_ending:
            log(
                logging.WARNING,
                "dead_letter_delayed",
                "a dead letter is not known to be in %r: %s. Its message is not done, and later ones of its key wait; "
                "it is sent again, and may be there twice then",
                self.topic,
                failure,
            )
            again()
        else:
            self._tries.give_up(lane, attempt, failure)

    def _serve(self) -> None:
        """Wait for acks while some are under way (a thread of ours)."""
        while True:
            with self._news:
                while not (self._under_way or self._is_over):
                    self._news.wait()
                if self._is_over:
                    break
            self._producer.poll(ACK_WAIT_S)
        self._producer.close()

    def close(self) -> None:
        """Fail what is under way: its message is not done."""
        with self._news:
            self._is_over = True
            self._news.notify_all()


def _check(consumer: FetchingConsumer[Any], topic: str) -> None:
    info = consumer._driver.cluster.topic_info([topic], LOOKUP_TIMEOUT_S).get(topic)
    if info is None:
        raise ConfigurationError(
            f"dead_letters={topic!r}: there is no such topic. Nothing was handed out. Create it (kafka-topics --create "
            f"--topic {topic}), with a retention that leaves time to look at what is in it"
        )
    if consumer._engine.subscription.matches(info):
        raise ConfigurationError(
            f"dead_letters={topic!r} is a topic that this consumer reads: its dead letters would come back to it for "
            "ever. Nothing was handed out. Name another topic, or a pattern that leaves it out"
        )
