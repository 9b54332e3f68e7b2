"""Kafka's own consumer groups, from outside: members, what it has committed, and commits in its name."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient

from kafka_marshal.adapters import transactions
from kafka_marshal.adapters.kafka.errors import (
    RETRY_CODES,
    DebugLines,
    ForbiddenError,
    Troubles,
    configuration_error,
    is_forbidden,
    is_of_groups,
    is_refusal,
    kafka_error,
    marshal_error,
)
from kafka_marshal.adapters.kafka.questions import Questions
from kafka_marshal.adapters.kafka.settings import Role
from kafka_marshal.errors import ClosedError, MarshalError, grant
from kafka_marshal.ports import KafkaGroup, TopicInfo, TopicPartition

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


#: Wait between two tries of what passes by itself.
RETRY_S = 0.05

#: The longest one call to librdkafka: it waits on if the group's coordinator can't be asked for lack of a right.
SLICE_S = 1.0

#: librdkafka's own limit of a slice, and what passes by itself.
_PASSING_CODES = RETRY_CODES | {KafkaError._TIMED_OUT, KafkaError.UNSTABLE_OFFSET_COMMIT}


_OFFERED = re.compile(r"ApiKey (?P<name>\w+) \(\d+\) Versions \d+\.\.(?P<newest>\d+)")

#: Request → the version that exactly once needs: OffsetFetch waits for pending offsets from 7 on (Kafka 2.5).
NEEDED = {"OffsetFetch": 7}


class ApiVersions(DebugLines):
    """What the brokers that one client has connected to lack: which versions of Kafka's requests they know."""

    #: Some lines for each new connection.
    category = "feature"

    #: Why they are too old; None: nothing is known to be missing.
    lacking: str | None = None

    def _read(self, line: str) -> None:
        if (found := _OFFERED.search(line)) is not None:
            needed, newest = NEEDED.get(found["name"], 0), int(found["newest"])
            if newest < needed:
                self.lacking = f"they know {found['name']} up to version {newest}, and {needed} is needed"


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
    """Asks for committed offsets, from any thread, by consumers that never join; keeps the last call's for the next."""

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
