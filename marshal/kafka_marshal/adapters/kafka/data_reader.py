"""Fetches the user's messages from the partitions we hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from confluent_kafka import KafkaException
from confluent_kafka import Message as KafkaMessage
from confluent_kafka import TopicPartition as KafkaPartition

from kafka_marshal.adapters.interface import DataFault, Message, TopicPartition
from kafka_marshal.adapters.kafka.errors import LOGGER, Troubles, fault_kind, marshal_error
from kafka_marshal.adapters.kafka.reading import Reading

__all__ = ["KafkaDataReader"]

_ERROR = KafkaMessage.error


@dataclass(slots=True)
class _Assigned:
    """One partition being fetched."""

    #: Where it was assigned.
    start: int
    #: The change (counted over the reader) that assigned it.
    change: int


class KafkaDataReader:
    """A data reader over one librdkafka consumer that never joins a group and never commits."""

    def __init__(self, group_id: str, settings: dict[str, object], troubles: Troubles) -> None:
        """Open it; nothing is fetched before assign()."""
        settings = {"logger": LOGGER, **settings, "group.id": group_id, "error_cb": troubles}
        self._bootstrap = str(settings["bootstrap.servers"])
        self._reading = Reading("data reader", settings, troubles)
        self._assigned: dict[TopicPartition, _Assigned] = {}
        #: When each partition was last taken away, by count of changes.
        self._removed: dict[TopicPartition, int] = {}
        self._changes = 0
        self._changes_before_wait = 0

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        if not positions:
            return
        with self._reading.steering:
            self._reading.check_open()
            self._remove([key for key in positions if key in self._assigned])
            self._add(positions)

    def unassign(self, partitions: Iterable[TopicPartition]) -> None:
        with self._reading.steering:
            self._reading.check_open()
            self._remove([key for key in dict.fromkeys(partitions) if key in self._assigned])

    def _add(self, positions: Mapping[TopicPartition, int]) -> None:
        self._changes += 1
        try:
            self._reading.consumer.incremental_assign(
                [KafkaPartition(topic, partition, offset) for (topic, partition), offset in positions.items()]
            )
        except KafkaException as error:
            raise marshal_error(error, f"assigning {_names(positions)}", self._bootstrap) from error
        for key, offset in positions.items():
            self._assigned[key] = _Assigned(offset, self._changes)

    def _remove(self, partitions: list[TopicPartition]) -> None:
        if not partitions:
            return
        self._changes += 1
        for key in partitions:
            del self._assigned[key]
            self._removed[key] = self._changes
        self._reading.consumer.incremental_unassign([KafkaPartition(*key) for key in partitions])

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        with self._reading.steering:
            self._reading.check_open()
            self._reading.consumer.pause(self._known(partitions))

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        with self._reading.steering:
            self._reading.check_open()
            self._reading.consumer.resume(self._known(partitions))

    def _known(self, partitions: Iterable[TopicPartition]) -> list[KafkaPartition]:
        return [KafkaPartition(*key) for key in dict.fromkeys(partitions) if key in self._assigned]

    def read(self, max_messages: int, timeout_s: float) -> tuple[list[Message], list[DataFault]]:
        self._changes_before_wait = self._changes
        messages = self._reading.read(max_messages, timeout_s, self._keep)
        faults: list[DataFault] = []
        if any(map(_ERROR, messages)):
            messages = _without_errors(messages, faults)
        if self._reading.troubles.pending:
            faults.extend(DataFault(kind, None, None, text) for kind, text in self._reading.troubles.take_faults())
        return cast("list[Message]", messages), faults

    def _keep(self, message: KafkaMessage) -> bool:
        """Whether a message that came while others may have steered still belongs to the assignment."""
        before, self._changes_before_wait = self._changes_before_wait, self._changes
        if self._changes == before:
            return True
        key = (cast("str", message.topic()), cast("int", message.partition()))
        if self._removed.get(key, 0) <= before:
            return True
        assigned = self._assigned.get(key)
        if assigned is not None:
            # Taken away and assigned again during the wait: whether it was fetched before or after can't be told.
            # So it is dropped, and fetched anew.
            self._remove([key])
            self._add({key: assigned.start})
        return False

    def high_watermark(self, topic: str, partition: int) -> int | None:
        with self._reading.steering:
            self._reading.check_open()
            if (topic, partition) not in self._assigned:
                return None
            try:
                marks = self._reading.consumer.get_watermark_offsets(KafkaPartition(topic, partition), cached=True)
            except KafkaException:  # it never asked a broker about this partition
                return None
        return marks[1] if marks[1] >= 0 else None

    def close(self) -> None:
        self._reading.close()


def _without_errors(messages: list[KafkaMessage], faults: list[DataFault]) -> list[KafkaMessage]:
    real = []
    for message in messages:
        error = message.error()
        if error is None:
            real.append(message)
        else:
            kind, topic, partition = fault_kind(error), message.topic(), message.partition()
            if partition is not None and partition < 0:  # of the whole topic
                partition = None
            faults.append(DataFault(kind, topic, partition, error.str()))
    return real


def _names(partitions: Iterable[TopicPartition]) -> str:
    return ", ".join(f"{topic} [{partition}]" for topic, partition in sorted(partitions))
