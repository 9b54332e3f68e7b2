"""Look-ups at the brokers, Kafka's own consumer groups, and the factory of tails, appenders and data readers."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
)
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    OffsetSpec,
    TopicDescription,
)
from confluent_kafka.cimpl import NewTopic

from kafka_marshal.adapters import transactions
from kafka_marshal.adapters.kafka import settings
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
from kafka_marshal.adapters.kafka.questions import (
    GRACE_S,
    RETRY_S,
    SAFE_TIMEOUT_S,
    AddressCheck,
    Questions,
    SharedAdmin,
    has_leader,
    looks_with,
)
from kafka_marshal.adapters.kafka.readers import KafkaDataReader, KafkaTail
from kafka_marshal.adapters.kafka.settings import Role
from kafka_marshal.adapters.kafka.writers import BatchSize, KafkaAppender, KafkaProducer, KafkaTransactionalProducer
from kafka_marshal.errors import (
    ClosedError,
    ConfigurationError,
    CoordinationTopicError,
    MarshalError,
    TopicMissingError,
    grant,
)
from kafka_marshal.ports import DELIVERY_TIMEOUT_MS, KafkaGroup, TopicConfig, TopicInfo, TopicPartition
from kafka_marshal.runtime import THREADS, Runtime
from kafka_marshal.secret import values_of
from kafka_marshal.types import T

#: How long offsets are asked for once more, to say that others are pending (s).
UNSTABLE_S = 2.0

#: The longest time-out that librdkafka takes: for what ends with its client.
ENDLESS_S = 3600.0

NOTHING_MORE: Mapping[str, object] = MappingProxyType({})


class GroupCalls:
    """What of a cluster is about consumer groups; each question through a client that ends with it."""

    topics: Callable[[float], Mapping[str, TopicInfo]]
    _bootstrap: str
    _properties: Callable[..., dict[str, Any]]
    _new_troubles: Callable[[object, object], Troubles]
    _questions: Questions
    _admin: SharedAdmin

    def _ask_coordinator(
        self, doing: str, timeout_s: float, ask: Callable[[Questions, AdminClient, float], T], **options: Any
    ) -> T:
        """By a new client, closed with the question.

        A request that is over before the coordinator is reached ends the process when it is (librdkafka 2.x:
        rd_kafka_coord_req has no time-out), and keeps later ones from it. So none is over before its client.
        """
        self._admin.check_open()
        troubles = self._new_troubles(None, None)
        admin = SharedAdmin({**self._properties(Role.ADMIN), "logger": troubles, "error_cb": troubles})
        try:
            questions = Questions(admin, self._bootstrap, troubles)
            return questions.ask(doing, timeout_s, partial(ask, questions), **options)
        finally:
            admin.close()

    def kafka_group(self, group_id: str, timeout_s: float) -> KafkaGroup:
        """As in ``ports.Cluster``."""

        def members(questions: Questions, admin: AdminClient, left_s: float) -> tuple[str, ...]:
            answer = admin.describe_consumer_groups([group_id], request_timeout=ENDLESS_S)[group_id]
            try:
                return tuple(sorted(each.client_id for each in questions.result(answer, left_s - GRACE_S).members))
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
            self._ask_coordinator(doing, timeout_s, members, needs=needs),
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

        def ask(questions: Questions, admin: AdminClient, left_s: float) -> list[str]:
            request = [ConsumerGroupTopicPartitions(group_id, wanted)]
            answer = admin.alter_consumer_group_offsets(request, request_timeout=ENDLESS_S)[group_id]
            found = questions.result(answer, left_s - GRACE_S).topic_partitions
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
        failed = self._ask_coordinator(
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
        kept = False
        try:
            yield asker
            kept = self._keeps(group_id, asker)
        finally:
            if not kept:
                asker.consumer.close()

    def _keeps(self, group_id: str, asker: _Asker) -> bool:
        """Whether it is for the next call."""
        with self._lock:
            return self._idle is not None and self._idle.setdefault(group_id, asker) is asker

    def close(self) -> None:
        """Close what is not in use; the rest is closed when it is no longer used. Idempotent."""
        with self._lock:
            idle, self._idle = self._idle, None
        for asker in (idle or {}).values():
            asker.consumer.close()


K = TypeVar("K")

#: Kafka's own topics; a listing of all topics does not mark them.
INTERNAL_TOPICS = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})


class KafkaCluster(GroupCalls):
    """A Kafka cluster, reached through confluent-kafka.

    All methods may be called from any thread. Blocking ones raise KafkaUnavailableError when their time is up
    (AuthenticationError, AuthorizationError if that is why), ClosedError after close().
    """

    def __init__(self, bootstrap_servers: str, config: Mapping[str, object] | None = None) -> None:
        """Connect in the background; nothing is requested yet.

        Args:
            bootstrap_servers: host:port, several separated by commas.
            config: librdkafka properties, handed on as they are: TLS, SASL, client.id … What the protocol fixes can't
                be set otherwise (see :mod:`kafka_marshal.adapters.kafka.settings`). "logger": where librdkafka's own
                lines go instead of the logger "kafka_marshal.librdkafka".

        Raises:
            ConfigurationError: a setting is unknown, wrong, or not the user's to make.
        """
        if not str(bootstrap_servers).strip():
            raise ConfigurationError(
                f"bootstrap_servers must be text like 'localhost:9092', not {bootstrap_servers!r}. Nothing was sent."
            )
        self.runtime: Runtime = THREADS
        settings.check_addresses(str(bootstrap_servers))
        self._bootstrap = bootstrap_servers
        self._config = dict(config or {})
        settings.check(self._config)
        self._secrets = values_of(self._config)
        self._logger = logger = self._config.pop("logger", None)
        self._forward = self._config.pop("error_cb", None)
        self._troubles = self._new_troubles(self._forward, logger)
        self._looks = looks_with(bootstrap_servers, self._config)
        self._addresses: AddressCheck | None = None
        #: What connects, and was not asked for yet.
        self._expected_tails: dict[str, KafkaTail] = {}
        self._expected_appenders: dict[tuple[str, int], KafkaAppender] = {}
        admin = {**self._properties(Role.ADMIN), "logger": self._troubles, "error_cb": self._troubles}
        try:
            self._admin = SharedAdmin(admin)
        except (KafkaException, ValueError, TypeError) as error:
            raise configuration_error(error) from error
        self._questions = Questions(self._admin, bootstrap_servers, self._troubles)
        self._batches = BatchSize()
        self._committed = CommittedOffsets(
            bootstrap_servers, lambda: (self._properties(Role.DATA), self._new_troubles(None, self._logger))
        )

    def _properties(self, role: Role, more: Mapping[str, object] | None = None) -> dict[str, object]:
        return settings.properties(role, self._bootstrap, {**self._config, **(more or {})})

    def _new_troubles(self, forward: object, logger: object) -> Troubles:
        if forward is not None and not callable(forward):
            raise ConfigurationError("config's error_cb is not callable. Nothing was sent; give a function.")
        if logger is not None and not isinstance(logger, logging.Logger):
            raise ConfigurationError("config's logger is no logging.Logger. Nothing was sent; give one.")
        return Troubles(forward, logger, self._secrets)

    # Look-ups.

    def cluster_ids(self, wait_s: float) -> dict[str, str]:
        addresses = settings.addresses(self._bootstrap)
        if len(addresses) < 2:
            return {}
        if self._addresses is None:
            self._addresses = AddressCheck(addresses, self._properties(Role.ADMIN))
        return self._addresses.ids(wait_s)

    def topics(self, timeout_s: float, max_age_s: float = 0.0) -> dict[str, TopicInfo]:
        self._admin.check_open()
        if (known := self._looks.topics(max_age_s)) is not None:
            return known
        asked_at = time.monotonic()

        def ask(admin: AdminClient, left_s: float) -> dict[str, TopicInfo]:
            return {
                name: TopicInfo(
                    name,
                    len(topic.partitions),
                    "",
                    name in INTERNAL_TOPICS,
                    frozenset(number for number, partition in topic.partitions.items() if partition.leader < 0),
                )
                for name, topic in sorted(admin.list_topics(timeout=left_s).topics.items())
                if topic.error is None and topic.partitions
            }

        found = self._questions.ask("listing the topics", timeout_s, ask)
        self._questions.forget_leaders(name for name, info in found.items() if info.leaderless)
        self._looks.record_topics(found, asked_at)
        return found

    def topic_info(self, names: Iterable[str], timeout_s: float, max_age_s: float = 0.0) -> dict[str, TopicInfo]:
        self._admin.check_open()
        wanted = sorted(set(names))
        if (known := self._looks.topic_info(wanted, max_age_s)) is not None:
            return known
        asked_at = time.monotonic()
        found = {
            name: TopicInfo(
                name,
                len(topic.partitions),
                str(topic.topic_id),
                topic.is_internal,
                frozenset(partition.id for partition in topic.partitions if not has_leader(partition)),
            )
            for name, topic in self._questions.describe(wanted, timeout_s).items()
        }
        self._looks.record_topic_info(wanted, found, asked_at)
        return found

    def topic_config(self, name: str, timeout_s: float) -> TopicConfig | None:
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)

        def ask(admin: AdminClient, left_s: float) -> tuple[dict[str, TopicDescription], dict[ConfigResource, Any]]:
            # Both questions are out before either answer is awaited.
            described = admin.describe_topics(TopicCollection([name]), request_timeout=left_s)
            configured = admin.describe_configs([resource], request_timeout=left_s)
            topics = self._questions.known(described, left_s)
            return topics, self._questions.known(configured, left_s, "DESCRIBE_CONFIGS") if topics else {}

        topics, found = self._questions.ask(f"looking up {name} and its settings", timeout_s, ask)
        if not found:  # not there, or deleted in between
            return None
        topic = topics[name]
        (entries,) = found.values()
        info = TopicInfo(name, len(topic.partitions), str(topic.topic_id), topic.is_internal)
        values = {key: entry.value for key, entry in sorted(entries.items()) if entry.value is not None}
        replicas = min((len(partition.replicas) for partition in topic.partitions), default=0)
        return TopicConfig(info, replicas, values)

    def operations(self, topic: str, timeout_s: float) -> frozenset[str] | None:
        def ask(admin: AdminClient, left_s: float) -> dict[str, TopicDescription]:
            names = TopicCollection([topic])
            described = admin.describe_topics(names, request_timeout=left_s, include_authorized_operations=True)
            return self._questions.known(described, left_s)

        found = self._questions.ask(f"asking what is allowed with {topic}", timeout_s, ask).get(topic)
        allowed = None if found is None else found.authorized_operations
        return None if allowed is None else frozenset(each.name for each in allowed)

    def broker_count(self, timeout_s: float) -> int:
        return self._questions.ask(
            "counting the brokers", timeout_s, lambda admin, s: len(admin.list_topics(timeout=s).brokers)
        )

    def create_topic(
        self, name: str, partitions: int, replication_factor: int, settings: Mapping[str, str], timeout_s: float
    ) -> None:
        deadline = time.monotonic() + timeout_s
        new = NewTopic(name, num_partitions=partitions, replication_factor=replication_factor, config=dict(settings))
        while True:
            left_s = max(RETRY_S, deadline - time.monotonic())
            try:
                with self._admin.use() as admin:
                    answer = admin.create_topics([new], request_timeout=left_s, operation_timeout=left_s)[name]
                    self._questions.result(answer, left_s)
                break
            except (KafkaException, ValueError, TypeError) as error:
                if not _is_fenced(error) or time.monotonic() >= deadline:
                    raise self._not_created(error, name, f"creating topic {name}") from error
            time.sleep(RETRY_S)
        # The controller has decided; wait until the brokers know and every partition has a leader.
        while not self._ready(name, partitions, deadline):
            if time.monotonic() >= deadline:
                raise CoordinationTopicError(
                    f"Topic {name!r} was created, but its partitions had no leaders within {timeout_s:g} s. Nothing "
                    "was written to it. Check the brokers, then continue: the topic is there."
                )
            time.sleep(RETRY_S)

    def _not_created(self, error: Exception, name: str, doing: str) -> Exception:
        if not isinstance(error, KafkaException):
            return CoordinationTopicError(f"Topic {name!r} can't be created: {error}. Nothing was changed.")
        self._questions.serve()
        needs = grant("CREATE", "topic", [name])
        ours = marshal_error(error, doing, self._bootstrap, self._troubles, changing=True, needs=needs)
        cause = kafka_error(error)
        if type(ours).__name__ != "MarshalError":  # refused, or unreachable
            return ours
        if cause.code() == KafkaError.TOPIC_ALREADY_EXISTS:
            return CoordinationTopicError(
                f"Topic {name!r} is there already; it was not touched. Use it, or choose another name."
            )
        return CoordinationTopicError(
            f"The cluster did not create topic {name!r}: {cause.str()}. Nothing was changed. "
            "Correct what it names (replication factor, settings, name), or ask the cluster's admins."
        )

    def _ready(self, name: str, partitions: int, deadline: float) -> bool:
        topic = self._questions.describe([name], max(RETRY_S, deadline - time.monotonic())).get(name)
        return (
            topic is not None
            and len(topic.partitions) >= partitions
            and all(partition.leader is not None for partition in topic.partitions)
        )

    def alter_topic(self, name: str, settings: Mapping[str, str | None], timeout_s: float) -> None:
        resource = ConfigResource(
            ConfigResource.Type.TOPIC,
            name,
            incremental_configs=[
                ConfigEntry(
                    setting,
                    value or "",
                    incremental_operation=AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET,
                )
                for setting, value in settings.items()
            ],
        )

        def ask(admin: AdminClient, left_s: float) -> dict[ConfigResource, Any]:
            answers = admin.incremental_alter_configs([resource], request_timeout=left_s)
            return self._questions.known(answers, left_s, "ALTER_CONFIGS")

        if not self._questions.ask(f"changing settings of {name}", timeout_s, ask, changing=True):
            raise TopicMissingError(f"Topic {name!r} does not exist on this cluster. Nothing was changed.")

    def watermarks(
        self, partitions: Iterable[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, tuple[int, int]]:
        return self._starts_and_ends(partitions, timeout_s, IsolationLevel.READ_UNCOMMITTED)

    def committed_watermarks(
        self, partitions: Iterable[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, tuple[int, int]]:
        return self._starts_and_ends(partitions, timeout_s, IsolationLevel.READ_COMMITTED)

    def _starts_and_ends(
        self, partitions: Iterable[TopicPartition], timeout_s: float, isolation: IsolationLevel
    ) -> dict[TopicPartition, tuple[int, int]]:
        def ask(admin: AdminClient, keys: list[TopicPartition], left_s: float) -> dict[TopicPartition, tuple[int, int]]:
            # Both questions are out before either answer is awaited.
            starts = _offsets(admin, keys, OffsetSpec.earliest(), left_s)
            ends = _offsets(admin, keys, OffsetSpec.latest(), left_s, isolation)
            low, high = self._questions.known_offsets(starts, left_s), self._questions.known_offsets(ends, left_s)
            return {_key(at): (low[at], high[at]) for at in high if at in low}

        return self._questions.ask_leaders("asking for the log ends of", partitions, timeout_s, ask)

    def offsets_for_time(
        self, partitions: Iterable[TopicPartition], timestamp_ms: int, timeout_s: float
    ) -> dict[TopicPartition, int]:
        def ask(admin: AdminClient, keys: list[TopicPartition], left_s: float) -> dict[TopicPartition, int]:
            # The end is asked for first: a record appended in between is at or after it, so none is skipped.
            ends = self._questions.known_offsets(_offsets(admin, keys, OffsetSpec.latest(), left_s), left_s)
            times = _offsets(admin, keys, OffsetSpec.for_timestamp(max(0, timestamp_ms)), left_s)
            found = self._questions.known_offsets(times, left_s, or_none=True)
            return {_key(at): found[at] if found[at] >= 0 else ends[at] for at in found if at in ends}

        return self._questions.ask_leaders("asking for offsets by time of", partitions, timeout_s, ask)

    def delete_records(self, before: Mapping[TopicPartition, int], timeout_s: float) -> dict[TopicPartition, int]:
        def ask(admin: AdminClient, keys: list[TopicPartition], left_s: float) -> dict[TopicPartition, int]:
            wanted = [KafkaPartition(*key, before[key]) for key in keys]
            safe_s = max(left_s, SAFE_TIMEOUT_S)
            answers = admin.delete_records(wanted, request_timeout=safe_s, operation_timeout=left_s)
            found = self._questions.known(answers, left_s, "DELETE")
            return {_key(at): each.low_watermark for at, each in found.items()}

        # What is there already would be out of range for the broker.
        starts = {key: low for key, (low, _) in self.watermarks(before, timeout_s).items()}
        found = {key: start for key, start in starts.items() if start >= before[key]}
        wanted = [key for key in starts if key not in found]
        if wanted:
            found |= self._questions.ask_leaders("deleting records of", wanted, timeout_s, ask, changing=True)
        return found

    def committed_offset(self, group_id: str, key: TopicPartition, timeout_s: float) -> tuple[int, str] | None:
        self._admin.check_open()
        return self._committed.ask(group_id, key, timeout_s)

    # Factory.

    def expect(self, topic: str, *, delivery_timeout_ms: int | None = None) -> None:
        # What takes longest to be of use comes first: a producer has to ask for its id, too.
        if delivery_timeout_ms is not None and (topic, delivery_timeout_ms) not in self._expected_appenders:
            self._expected_appenders[topic, delivery_timeout_ms] = self._new_appender(topic, delivery_timeout_ms)
        if topic not in self._expected_tails:
            tail = self._expected_tails[topic] = self._new_tail(topic)
            tail.warm_up()

    def tail(self, topic: str, positions: Mapping[int, int]) -> KafkaTail:
        tail = self._expected_tails.pop(topic, None) or self._new_tail(topic)
        tail.begin(positions)
        return tail

    def _new_tail(self, topic: str) -> KafkaTail:
        self._admin.check_open()
        return KafkaTail(topic, self._properties(Role.TAIL), self._new_troubles(self._forward, self._logger))

    def appender(self, topic: str, *, delivery_timeout_ms: int) -> KafkaAppender:
        expected = self._expected_appenders.pop((topic, delivery_timeout_ms), None)
        return expected or self._new_appender(topic, delivery_timeout_ms)

    def _new_appender(self, topic: str, delivery_timeout_ms: int) -> KafkaAppender:
        self._admin.check_open()
        properties = self._properties(Role.APPENDER)
        troubles = self._new_troubles(self._forward, self._logger)
        return KafkaAppender(topic, properties, troubles, delivery_timeout_ms=delivery_timeout_ms)

    def data_reader(self, group_id: str, config: Mapping[str, object]) -> KafkaDataReader:
        opened = self._for_user(Role.DATA, config)
        # Others may connect as another user, who sees other topics.
        known = None if config.keys() - {"error_cb", "logger"} else self._admin.list_topics
        return KafkaDataReader(group_id, *opened, known)

    def _for_user(self, role: Role, config: Mapping[str, object]) -> tuple[dict[str, object], Troubles]:
        """Properties of a client with the user's on top of the cluster's own, and what takes its errors."""
        self._admin.check_open()
        settings.check(config)
        more = dict(config)
        troubles = self._new_troubles(more.pop("error_cb", self._forward), more.pop("logger", self._logger))
        return self._properties(role, more), troubles

    def way_of_reading(self, config: Mapping[str, object]) -> Hashable | None:
        found = (self._bootstrap, *sorted(self._config.items()), self._forward, self._logger, *sorted(config.items()))
        try:
            hash(found)
        except TypeError:
            return None
        return found

    def producer(
        self, config: Mapping[str, object], *, delivery_timeout_ms: int = DELIVERY_TIMEOUT_MS
    ) -> KafkaProducer:
        return KafkaProducer(*self._for_user(Role.PRODUCER, config), delivery_timeout_ms=delivery_timeout_ms)

    def transactional_producer(
        self, transactional_id: str, config: Mapping[str, object], *, transaction_timeout_ms: int
    ) -> KafkaTransactionalProducer:
        return KafkaTransactionalProducer(
            transactional_id,
            *self._for_user(Role.TRANSACTION, config),
            transaction_timeout_ms=transaction_timeout_ms,
            group_metadata=self._committed.group_metadata,
            batches=self._batches,
        )

    def close(self) -> None:
        self._admin.close()
        self._committed.close()
        while self._expected_tails:
            self._expected_tails.popitem()[1].close()
        while self._expected_appenders:
            self._expected_appenders.popitem()[1].close()


def _offsets(
    admin: AdminClient,
    keys: list[TopicPartition],
    spec: OffsetSpec,
    timeout_s: float,
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> Mapping[KafkaPartition, Future[Any]]:
    """Ask the leaders; L4: of the log the high watermark, never the last stable offset (that is for data only)."""
    wanted = {KafkaPartition(*key): spec for key in keys}
    return admin.list_offsets(wanted, isolation_level=isolation, request_timeout=max(timeout_s, SAFE_TIMEOUT_S))


def _key(partition: KafkaPartition) -> TopicPartition:
    return (partition.topic, partition.partition)


def _is_fenced(error: Exception) -> bool:
    """Whether no broker could take a topic just now: they are, for a moment, after a stall or a restart."""
    if not isinstance(error, KafkaException):
        return False
    cause = kafka_error(error)
    return cause.code() == KafkaError.INVALID_REPLICATION_FACTOR and "currently fenced" in cause.str()
