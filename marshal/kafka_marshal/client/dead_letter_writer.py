"""Puts aside what ``consumer.run`` could not handle: it writes a dead letter, and then the message is done."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.dead_letter_topic import Call, check_topic
from kafka_marshal.client.dead_letters import headers_of
from kafka_marshal.client.failures import Failures
from kafka_marshal.client.fetching import FetchingConsumer
from kafka_marshal.engine.work.lane import Lane
from kafka_marshal.errors import KafkaUnavailableError, ProduceError
from kafka_marshal.logs import log

#: How long one wait for acks lasts (s).
ACK_WAIT_S = 0.1


class Settling(Protocol):
    """What receives the result of a dead letter."""

    @property
    def call(self) -> Call: ...

    @property
    def failures(self) -> Failures: ...

    def put_aside(self, lane: Lane, attempt: Attempt, error: BaseException, topic: str) -> None:
        """The cluster has the letter: the message is done."""

    def given_back(self, lane: Lane) -> None:
        """The run is over, or the partition may be another member's: the message comes again."""

    def give_up(self, lane: Lane, attempt: Attempt, error: BaseException) -> None:
        """The letter can't be written."""

    def secured(self, lane: Lane) -> AbstractContextManager[None]:
        """What is raised in here ends the run."""

    def end(self, error: BaseException) -> None:
        """The run ends with this error."""


class DeadLetterWriter:
    """Produces dead letters, and reports the result of each. Its lane waits until the cluster has it."""

    def __init__(self, consumer: FetchingConsumer[Any], topic: str, tries: Settling) -> None:
        """Raises what check_topic raises (*blocking*)."""
        self.topic = topic
        self._tries = tries
        check_topic(consumer, topic, tries.call)
        cluster = consumer._driver.cluster
        self._producer = cluster.producer(consumer._fetcher.config)
        #: Guards what is in flight.
        self._news = cluster.runtime.condition()
        #: Letters in flight, each with the lane that waits for its ack.
        self._under_way: dict[Attempt, Lane] = {}
        self._is_over = False
        cluster.runtime.start(self._serve, "kafka-marshal-dead-letters")

    def send(self, lane: Lane, attempt: Attempt, error: Exception, with_trace: bool = True) -> None:
        """Put a message aside, as it is in Kafka; its lane continues when that is acknowledged (any thread)."""
        if not attempt.is_held:  # another member may have the partition now, and decides about the message
            self._tries.given_back(lane)
            return
        headers = headers_of(
            attempt.message,
            attempt.group_id,
            attempt.epoch,
            attempt.number,
            error,
            own=attempt._headers or (),
            secrets=self._tries.failures.secrets,
            with_trace=with_trace,
        )
        with self._news:
            self._under_way[attempt] = lane
            self._news.notify_all()
        acked = partial(self._acked, attempt, error, with_trace)
        try:
            self._producer.send(self.topic, attempt._value, attempt._key, headers, acked)
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
            self._tries.put_aside(lane, attempt, error, self.topic)
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
