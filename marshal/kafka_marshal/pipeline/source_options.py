"""Options of the stream source, checked before anything is claimed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType

from kafka_marshal.adapters.kafka import settings
from kafka_marshal.arguments import near
from kafka_marshal.client.options import checked_topics
from kafka_marshal.engine.policies import Balanced, Greedy, Policy
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.node.config import check_ids, new_client_id
from kafka_marshal.topic_names import DEFAULT_TOPIC
from kafka_marshal.types import Start, WhenStuck

_POLICIES: Mapping[str, type[Policy]] = MappingProxyType({"balanced": Balanced, "greedy": Greedy})

_KNOWN = (
    *("bootstrap_servers", "group_id", "client_id", "topics", "coordination_topic", "heartbeat_interval_ms"),
    *("max_records_per_batch", "min_partitions", "start", "policy", "include_headers", "read_timeout_s"),
    "position_lost",
)

#: Options of Spark's Kafka source (lower case) → the equivalent here.
_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "subscribe": "topics (the same value)",
        "subscribepattern": "topics, with ^ before the regular expression",
        "assign": "topics: which partitions a query reads is decided by the claims",
        "startingoffsets": "start (earliest, latest or a time; kafka-marshal release-group sets single offsets)",
        "startingtimestamp": "start (a time such as 2013-01-31T06:00:00Z)",
        "startingoffsetsbytimestamp": "start (a time such as 2013-01-31T06:00:00Z)",
        "maxoffsetspertrigger": "max_records_per_batch",
        "minpartitions": "min_partitions",
        "includeheaders": "include_headers",
        "failondataloss": "position_lost: no offset is ever skipped silently",
        "groupidprefix": "group_id",
        "kafka.group.id": "group_id",
    }
)

#: Options of a member of a coordinated group, which a stream can't be.
_OF_GROUPS = ("checkpoints", "group", "strategy", "session_timeout_ms")

#: Options that Spark adds for every source.
_SPARKS = ("path", "__")


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options of ``spark.readStream.format("kafka_marshal")``; as text, in any case."""

    #: As for librdkafka.
    bootstrap_servers: str
    group_id: str
    #: Unique in the group; with the same id, a restarted query takes over its partitions at once.
    client_id: str
    #: Names, or regular expressions starting with ``^``; separated by commas.
    topics: tuple[str, ...]
    #: librdkafka properties: the options that start with ``kafka.``, without that.
    config: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    coordination_topic: str = DEFAULT_TOPIC
    heartbeat_interval_ms: int = 3_000
    #: Most offsets of one micro-batch, shared fairly over the partitions held.
    max_records_per_batch: int = 1_000_000
    #: Minimum number of tasks if there are enough records: ranges are cut for it. 0: one task per partition.
    min_partitions: int = 0
    #: Where the group begins on partitions it never held: "earliest", "latest", or an ISO 8601 time (no zone: UTC).
    start: str = "earliest"
    policy: str = "balanced"
    include_headers: bool = False
    #: Time-out of a task's reads (s).
    read_timeout_s: float = 60.0
    #: For a partition whose position is lost: "raise" ends the query, "leave" skips the partition.
    position_lost: WhenStuck = "raise"

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Raises ConfigurationError for options that are missing, unknown or can't work."""
        given = {name.lower(): value for name, value in options.items()}
        config = {name[6:]: value for name, value in given.items() if name.startswith("kafka.")}
        if "bootstrap.servers" in config:
            servers = config.pop("bootstrap.servers")
            if given.setdefault("bootstrap_servers", servers) != servers:
                raise ConfigurationError(
                    f"bootstrap_servers is {given['bootstrap_servers']!r}, but kafka.bootstrap.servers is {servers!r}: "
                    "records would come from the first only. Nothing was claimed; leave one out"
                )
        unknown = [name for name in given if name not in _KNOWN and not name.startswith(("kafka.", *_SPARKS))]
        sparks = [name for name in given if name in _INSTEAD]
        if sparks:
            raise ConfigurationError(
                f"{sparks[0]!r} is an option of Spark's own Kafka source. The source kafka_marshal has "
                f"{_INSTEAD[sparks[0]]}. Nothing was claimed"
            )
        if coordinated := [name for name in unknown if name in _OF_GROUPS]:
            raise ConfigurationError(
                f"the source kafka_marshal has no option {coordinated[0]!r}: a stream claims its partitions, and takes "
                "no checkpoints of a group, as Spark keeps the state of its operators under its own batch numbers, "
                "which can't go back with the group's positions. Nothing was claimed. Use ClaimedBatches(spark, "
                "marshal, topics, group=True, checkpoints=CheckpointPolicy()) of kafka_marshal.pipeline.claimed"
            )
        if unknown:
            raise ConfigurationError(
                f"the source kafka_marshal has no option {unknown[0]!r}{near(unknown[0], _KNOWN)} It has: "
                f"{', '.join(_KNOWN)}, and kafka.… for librdkafka's properties. Nothing was claimed"
            )
        for name in ("bootstrap_servers", "group_id", "topics"):
            if not given.get(name, "").strip():
                raise ConfigurationError(f"the source kafka_marshal needs the option {name!r}. Nothing was claimed")
        made = cls(
            bootstrap_servers=given["bootstrap_servers"],
            group_id=given["group_id"],
            client_id=given.get("client_id") or new_client_id(),
            topics=tuple(topic.strip() for topic in given["topics"].split(",") if topic.strip()),
            config=tuple(sorted(config.items())),
            coordination_topic=given.get("coordination_topic", DEFAULT_TOPIC),
            heartbeat_interval_ms=_number(given, "heartbeat_interval_ms", 3_000, 100),
            max_records_per_batch=_number(given, "max_records_per_batch", 1_000_000, 1),
            min_partitions=_number(given, "min_partitions", 0, 0),
            start=given.get("start", "earliest"),
            policy=given.get("policy", "balanced").lower(),
            include_headers=_yes(given, "include_headers"),
            read_timeout_s=float(_number(given, "read_timeout_s", 60, 1)),
            position_lost=_when_lost(given),
        )
        check_ids(made.group_id, made.client_id, made.heartbeat_interval_ms)
        settings.check(dict(made.config))
        checked_topics(made.topics, made.coordination_topic)
        made.start_position()
        if made.policy not in _POLICIES:
            raise ConfigurationError(
                f"policy must be one of {', '.join(_POLICIES)}, not {made.policy!r}. Nothing was claimed"
            )
        return made

    def start_position(self) -> Start:
        """``start`` as Marshal.ranges takes it."""
        if self.start == "earliest":
            return "earliest"
        if self.start == "latest":
            return "latest"
        try:
            moment = datetime.fromisoformat(self.start)
        except ValueError:
            raise ConfigurationError(
                f"start must be earliest, latest or a time like 2013-01-31T06:00:00Z, not {self.start!r}. Nothing was "
                "claimed"
            ) from None
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)

    def new_policy(self) -> Policy:
        """The policy asked for."""
        return _POLICIES[self.policy]()


def _number(given: Mapping[str, str], name: str, default: int, least: int) -> int:
    text = given.get(name, str(default))
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ConfigurationError(f"{name} must be a whole number, at least {least}, not {text!r}. Nothing was claimed")
    return number


def _when_lost(given: Mapping[str, str]) -> WhenStuck:
    text = given.get("position_lost", "raise").strip().lower()
    if text == "raise":
        return "raise"
    if text == "leave":
        return "leave"
    raise ConfigurationError(f"position_lost must be raise or leave, not {text!r}. Nothing was claimed")


def _yes(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "false").strip().lower()
    if text not in ("true", "false"):
        raise ConfigurationError(f"{name} must be true or false, not {text!r}. Nothing was claimed")
    return text == "true"
