"""Committed offsets of Kafka's own groups, asked by consumers that never join them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from kafka_marshal.adapters import transactions
from kafka_marshal.adapters.kafka.api_versions import ApiVersions
from kafka_marshal.adapters.kafka.errors import (
    RETRY_CODES,
    Troubles,
    configuration_error,
    is_forbidden,
    is_of_groups,
    is_refusal,
    kafka_error,
    marshal_error,
)
from kafka_marshal.errors import ClosedError
from kafka_marshal.ports import TopicPartition
from kafka_marshal.rights import grant

#: Wait between two tries of what passes by itself.
RETRY_S = 0.05

#: The longest one call to librdkafka: it waits on if the group's coordinator can't be asked for lack of a right.
SLICE_S = 1.0

#: librdkafka's own limit of a slice, and what passes by itself.
_PASSING_CODES = RETRY_CODES | {KafkaError._TIMED_OUT, KafkaError.UNSTABLE_OFFSET_COMMIT}


class _Refusal:
    """Notes that the group's coordinator can't be looked up: librdkafka reports that as an event of the client only."""

    def __init__(self, troubles: Troubles) -> None:
        self._troubles = troubles
        self.error: KafkaError | None = None

    def __call__(self, error: KafkaError) -> None:
        if is_of_groups(error):
            self.error = error
        self._troubles(error)


class _Asker:
    """A consumer of one group that never joins it; one thread uses it at a time."""

    def __init__(self, group_id: str, properties: dict[str, object], troubles: Troubles) -> None:
        # A user's own isolation.level is for messages. Here it decides whether the answer is exact.
        settings: dict[str, Any] = {
            **properties,
            "group.id": group_id,
            "isolation.level": "read_committed",
            "logger": troubles,
            "error_cb": (refusal := _Refusal(troubles)),
        }
        self.refusal = refusal
        self.versions = ApiVersions(settings)
        troubles.takes_line = self.versions.take
        self.troubles = troubles
        try:
            self.consumer = Consumer(settings)
        except (KafkaException, ValueError, TypeError) as error:
            raise configuration_error(error) from error

    def committed(self, key: TopicPartition, timeout_s: float) -> KafkaPartition:
        """The answer for one partition; raises KafkaException."""
        try:
            (found,) = self.consumer.committed([KafkaPartition(*key)], timeout=timeout_s)
        finally:
            event = self.consumer.poll(0)  # has its errors and log lines passed on
            if event is not None and (error := event.error()) is not None:
                self.refusal(error)  # librdkafka's queue has it, or its error_cb
        if found.error is not None:
            raise KafkaException(found.error)
        return found


class CommittedOffsets:
    """Asks for committed offsets, from any thread; keeps the consumer of the last call for the next."""

    def __init__(self, bootstrap: str, opened: Callable[[], tuple[dict[str, object], Troubles]]) -> None:
        """opened: properties of a new consumer, and what takes its errors."""
        self._bootstrap = bootstrap
        self._opened = opened
        self._lock = threading.Lock()
        #: group_id → a consumer that no thread uses; None: closed.
        self._idle: dict[str, _Asker] | None = {}
        self._metadata: dict[str, Any] = {}

    def group_metadata(self, group_id: str) -> Any:
        """The metadata of a consumer that never joined: the broker checks no member and no generation."""
        if group_id not in self._metadata:
            with self._use(group_id) as asker:
                self._metadata[group_id] = asker.consumer.consumer_group_metadata()
        return self._metadata[group_id]

    def ask(self, group_id: str, key: TopicPartition, timeout_s: float) -> tuple[int, str] | None:
        """As ``ports.Cluster.committed_offset``."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.001, min(SLICE_S, deadline - time.monotonic()))
            with self._use(group_id) as asker:
                try:
                    found = asker.committed(key, left_s)
                except KafkaException as error:
                    is_over = asker.refusal.error is not None or deadline - time.monotonic() < RETRY_S
                    if is_over or kafka_error(error).code() not in _PASSING_CODES:
                        raise self._error(error, group_id, key, asker) from error
                else:
                    if asker.versions.lacking is not None:
                        raise transactions.old_brokers(asker.versions.lacking)
                    return None if found.offset < 0 else (found.offset, found.metadata or "")
            time.sleep(RETRY_S)

    def _error(self, error: KafkaException, group_id: str, key: TopicPartition, asker: _Asker) -> Exception:
        cause = asker.refusal.error or kafka_error(error)
        doing = f"asking for the committed offset of {key[0]} [{key[1]}] of the consumer group {group_id!r}"
        needs = grant("DESCRIBE", "topic", [key[0]]) if is_forbidden(cause) else grant("READ", "group", [group_id])
        reason = asker.troubles.recent()
        if cause.code() == KafkaError._TIMED_OUT and not (reason is not None and is_refusal(reason)):
            why = cause.str() if reason is None else f"{cause.str()}; {reason.str()}"
            return transactions.pending(group_id, key, why)
        return marshal_error(cause, doing, self._bootstrap, asker.troubles, needs=needs)

    @contextmanager
    def _use(self, group_id: str) -> Iterator[_Asker]:
        """A consumer for this thread alone."""
        with self._lock:
            if self._idle is None:
                raise ClosedError("The cluster was closed; nothing was asked. Open a new one.")
            asker = self._idle.pop(group_id, None)
        if asker is None:
            asker = _Asker(group_id, *self._opened())
        try:
            yield asker
        except BaseException:
            asker.consumer.close()
            raise
        self._keep(group_id, asker)

    def _keep(self, group_id: str, asker: _Asker) -> None:
        """For the next call, if there is one."""
        with self._lock:
            kept = self._idle is not None and self._idle.setdefault(group_id, asker) is asker
        if not kept:
            asker.consumer.close()

    def close(self) -> None:
        """Close what is not in use; the rest is closed when it is no longer used. Idempotent."""
        with self._lock:
            idle, self._idle = self._idle, None
        for asker in (idle or {}).values():
            asker.consumer.close()
