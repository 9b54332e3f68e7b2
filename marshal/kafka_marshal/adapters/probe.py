"""The few questions that starting and tidying up a local Kafka needs to ask, apart from the client proper."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from kafka_marshal.errors import ConfigurationError, KafkaUnavailableError

#: librdkafka logs every refused connection while a broker starts; here that is expected.
_SILENT = logging.Logger("kafka_marshal.probe", level=logging.CRITICAL + 1)


class Probe:
    """A connection to a cluster, to check that it answers, and to make and remove topics for tests."""

    def __init__(self, bootstrap_servers: str, config: Mapping[str, object] | None = None) -> None:
        """config: librdkafka properties that the connection needs (TLS, SASL)."""
        settings: dict[str, Any] = {
            **(config or {}),
            "bootstrap.servers": bootstrap_servers,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 200,
            "allow.auto.create.topics": False,
            "error_cb": lambda _error: None,
        }
        self._admin = AdminClient(settings, logger=_SILENT)

    def broker_ids(self, timeout_s: float) -> set[int] | None:
        """Ids of the brokers that are up, as the one asked knows them; None if none answers in time."""
        try:
            return set(self._admin.list_topics(timeout=timeout_s).brokers)
        except KafkaException:
            return None

    def create_topic(
        self,
        name: str,
        partitions: int,
        replication_factor: int,
        settings: Mapping[str, str],
        timeout_s: float = 30.0,
    ) -> None:
        """Make a topic and wait until all its partitions have a leader.

        Raises:
            ConfigurationError: no topic can be called so, or have these settings.
            KafkaUnavailableError: the broker said no, or the time is up; the message says which.
        """
        topic = NewTopic(name, num_partitions=partitions, replication_factor=replication_factor, config=dict(settings))
        until = time.monotonic() + timeout_s
        try:
            self._admin.create_topics([topic], request_timeout=timeout_s)[name].result(timeout_s)
        except (KafkaException, TimeoutError) as error:
            why = error.args[0].code() if isinstance(error, KafkaException) else None
            if why in (KafkaError.TOPIC_EXCEPTION, KafkaError.INVALID_CONFIG, KafkaError.INVALID_PARTITIONS):
                raise ConfigurationError(f"The broker refuses topic {name!r}: {error}. Nothing was made") from error
            raise KafkaUnavailableError(
                f"Could not create topic {name!r}: {error}. Nothing was changed. Check that the brokers run and that "
                "the settings are ones that Kafka knows."
            ) from error
        while not self._led(name, partitions):
            if time.monotonic() >= until:
                raise KafkaUnavailableError(
                    f"Topic {name!r} was created, but its partitions had no leaders within {timeout_s:.0f} s. Look "
                    "into the brokers' logs."
                )
            time.sleep(0.02)

    def delete_topics(self, names: list[str], timeout_s: float = 30.0) -> None:
        """Ask for topics to be removed; those that are gone already, or can't be reached, are passed over."""
        if names:
            for answer in self._admin.delete_topics(names, request_timeout=timeout_s).values():
                try:
                    answer.result(timeout_s)
                except (KafkaException, TimeoutError):
                    continue

    def _led(self, name: str, partitions: int) -> bool:
        try:
            topic = self._admin.list_topics(name, timeout=5.0).topics[name]
        except (KafkaException, KeyError):
            return False
        return len(topic.partitions) == partitions and all(each.leader >= 0 for each in topic.partitions.values())
