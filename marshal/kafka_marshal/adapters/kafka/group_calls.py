"""Kafka's own consumer groups, from outside: its members, what it has committed, and commits in its name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient

from kafka_marshal.adapters import transactions
from kafka_marshal.adapters.kafka.errors import (
    RETRY_CODES,
    ForbiddenError,
    Troubles,
    is_forbidden,
    is_of_groups,
    kafka_error,
)
from kafka_marshal.adapters.kafka.questions import Questions
from kafka_marshal.adapters.kafka.settings import Role
from kafka_marshal.errors import MarshalError
from kafka_marshal.ports import KafkaGroup, TopicInfo, TopicPartition
from kafka_marshal.rights import grant

#: How long offsets are asked for once more, to say that others are pending (s).
UNSTABLE_S = 2.0

NOTHING_MORE: Mapping[str, object] = MappingProxyType({})


class GroupCalls:
    """What of a cluster is about consumer groups; asked through the cluster's own questions."""

    topics: Callable[[float], Mapping[str, TopicInfo]]
    _properties: Callable[..., dict[str, Any]]
    _new_troubles: Callable[[object, object], Troubles]
    _questions: Questions

    def kafka_group(self, group_id: str, timeout_s: float) -> KafkaGroup:
        """As in ``ports.Cluster``."""

        def members(admin: AdminClient, left_s: float) -> tuple[str, ...]:
            answer = admin.describe_consumer_groups([group_id], request_timeout=left_s)[group_id]
            try:
                return tuple(sorted(each.client_id for each in self._questions.result(answer, left_s).members))
            except KafkaException as error:
                if kafka_error(error).code() != KafkaError.GROUP_ID_NOT_FOUND:
                    raise
                return ()

        def committed(_: AdminClient, left_s: float) -> dict[TopicPartition, tuple[int, str]]:
            # By a consumer that never joins: list_consumer_group_offsets of confluent-kafka 2.16 ends the process by
            # SIGSEGV if the answer is an error, as on a new cluster.
            begun, left_s = time.monotonic(), max(left_s / 2, left_s - UNSTABLE_S)
            infos = self.topics(left_s)
            asked = [KafkaPartition(name, number) for name, info in infos.items() for number in range(info.partitions)]
            try:
                found = self._offsets_of(group_id, asked, max(0.001, left_s - (time.monotonic() - begun)))
            except KafkaException as error:
                if kafka_error(error).code() not in (KafkaError._TIMED_OUT, KafkaError.UNSTABLE_OFFSET_COMMIT):
                    raise
                with suppress(KafkaException):  # the first error says what is wrong
                    self._offsets_of(group_id, asked, UNSTABLE_S, {"isolation.level": "read_uncommitted"})
                    raise transactions.offsets_pending(group_id) from error
                raise
            if failed := [each.error for each in found if each.error is not None]:
                raise KafkaException(failed[0])
            return {(x.topic, x.partition): (x.offset, x.metadata or "") for x in found if x.offset >= 0}

        doing = f"asking for the consumer group {group_id!r}"
        needs = grant("DESCRIBE", "group", [group_id])
        return KafkaGroup(
            self._questions.ask(doing, timeout_s, members, needs=needs),
            self._questions.ask(doing, timeout_s, committed, needs=needs),
        )

    def _offsets_of(
        self, group_id: str, asked: list[KafkaPartition], timeout_s: float, more: Mapping[str, object] = NOTHING_MORE
    ) -> list[KafkaPartition]:
        """Committed offsets; with read_uncommitted also those that an open transaction may replace."""
        troubles = self._new_troubles(None, None)
        settings = {"group.id": group_id, "logger": troubles, "error_cb": troubles, **more}
        consumer = Consumer({**self._properties(Role.DATA), **settings})
        try:
            return consumer.committed(asked, timeout=timeout_s)
        finally:
            consumer.close()

    def commit_for_group(
        self, group_id: str, offsets: Mapping[TopicPartition, tuple[int, str]], timeout_s: float
    ) -> None:
        """As in ``ports.Cluster``."""
        wanted = [
            KafkaPartition(topic, partition, offset, metadata)
            for (topic, partition), (offset, metadata) in sorted(offsets.items())
        ]

        def ask(admin: AdminClient, left_s: float) -> list[str]:
            request = [ConsumerGroupTopicPartitions(group_id, wanted)]
            answer = admin.alter_consumer_group_offsets(request, request_timeout=left_s)[group_id]
            found = self._questions.result(answer, left_s).topic_partitions
            failed = [each for each in found if each.error is not None]
            if group_forbidden := [each.error for each in failed if is_of_groups(each.error)]:
                raise KafkaException(group_forbidden[0])
            if forbidden := {each.topic: each.error for each in failed if is_forbidden(each.error)}:
                raise ForbiddenError(next(iter(forbidden.values())), grant("READ", "topic", forbidden))
            if passing := [each.error for each in failed if each.error.code() in RETRY_CODES]:
                raise KafkaException(passing[0])
            return [f"{each.topic} [{each.partition}]: {each.error.str()}" for each in failed]

        if not wanted:
            return
        failed = self._questions.ask(
            f"committing offsets for the consumer group {group_id!r}",
            timeout_s,
            ask,
            changing=True,
            needs=grant("READ", "group", [group_id]),
        )
        if failed:
            raise MarshalError(
                f"Kafka did not take all offsets of the consumer group {group_id!r}: {'; '.join(failed[:4])}. Others "
                "were committed, and the coordination log is unchanged. Try again when the reason is gone."
            )
