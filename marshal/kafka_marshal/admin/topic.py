"""The coordination topic with its log of snapshots: created, completed, raised to a level (L1, L2, S2, E4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kafka_marshal.admin.groups import caught_up
from kafka_marshal.admin.session import Session
from kafka_marshal.errors import AdminError, ConfigurationError, CoordinationTopicError
from kafka_marshal.node.coordination_topic import (
    ADDRESSES_S,
    append_first_records,
    check_one_cluster,
    check_topic,
    create_snapshots_topic,
    create_topic,
    find_snapshot_problems,
    required_settings,
)
from kafka_marshal.node.kept import keep_of, keep_settings
from kafka_marshal.node.replica import Replica
from kafka_marshal.ports import Cluster, TopicConfig
from kafka_marshal.topic_names import DEFAULT_PARTITIONS, snapshots_topic
from rationalizer import Upgrade, World
from rationalizer.levels import SUPPORTED_LEVEL, added_above


@dataclass(frozen=True, slots=True)
class TopicReport:
    """The result of :meth:`Admin.init`. The topic is fit for use."""

    topic: str
    partitions: int
    replication_factor: int
    #: What was done, one sentence each; empty: nothing was necessary.
    done: tuple[str, ...]
    #: Settings that workers accept, but that should be changed.
    warnings: tuple[str, ...]
    #: How long members keep the log (s); None: for ever.
    keep: float | None = None


def prepare(
    cluster: Cluster, topic: str, partitions: int | None, timeout_s: float, keep_ms: int | None = None
) -> TopicReport:
    """Create the topic, or check the existing one and add what it lacks (*blocking*). Closes the cluster.

    keep_ms: how long members keep the log from now on; None: as before.

    Raises CoordinationTopicError (or a subclass) if the topic is not fit for use, ConfigurationError if it has another
    number of partitions than requested.
    """
    try:
        check_one_cluster(cluster)
        done: list[str] = []
        config = cluster.topic_config(topic, timeout_s)
        check_one_cluster(cluster, ADDRESSES_S)
        if config is None:
            _, done = create(cluster, topic, partitions or DEFAULT_PARTITIONS, timeout_s)
        config, problems = check_topic(cluster, topic, timeout_s)
        count = config.info.partitions
        if partitions is not None and partitions != count:
            raise ConfigurationError(
                f"the coordination topic {topic!r} has {count} partitions, not {partitions}, and their number is fixed "
                f"when it is created. Nothing was changed. Leave partitions out, or create a topic of another name"
            )
        done += _complete(cluster, config, topic, timeout_s)
        snapshots = cluster.topic_config(snapshots_topic(topic), timeout_s)
        problems += find_snapshot_problems(snapshots, count) if snapshots is not None else []
        if keep_ms is not None:
            cluster.alter_topic(topic, keep_settings(keep_ms), timeout_s)
            done.append(f"members remove log that is older than {keep_ms / 1000:g} s, behind checked snapshots")
        kept = keep_ms or keep_of(config.settings)
    except BaseException:
        cluster.close()
        raise
    with caught_up(cluster, topic, timeout_s) as replica:  # a replica refuses an unsafe topic
        notes = [*map(str, problems), *(": ".join(low) for low in low_levels(replica))]
        return TopicReport(topic, count, config.replication_factor, tuple(done), tuple(notes), kept and kept / 1000)


def set_keep(cluster: Cluster, topic: str, keep_ms: int | None, timeout_s: float) -> None:
    """Have members keep the log for this long; None: for ever (*blocking*). Closes the cluster."""
    try:
        check_topic(cluster, topic, timeout_s)
        cluster.alter_topic(topic, keep_settings(keep_ms), timeout_s)
    finally:
        cluster.close()


def low_levels(replica: Replica) -> list[tuple[str, str]]:
    """The CPs below the level of this release, and why it matters; "" for none."""
    low = below_level(replica.worlds)
    if not low:
        return []
    where = ", ".join(map(str, low))
    added = added_above(min(replica.worlds[cp].level for cp in low))
    return [
        (
            f"partition(s) {where} are below level {SUPPORTED_LEVEL} of the protocol",
            f"what is there works as ever; {added} need it (kafka-marshal upgrade)",
        )
    ]


def below_level(worlds: Mapping[int, World], level: int = SUPPORTED_LEVEL) -> list[int]:
    """The CPs that an Upgrade to this level (default: the highest of this release) would raise."""
    return sorted(cp for cp, world in worlds.items() if world.level < level and world.required_level is None)


def upgrade(session: Session) -> list[int]:
    """Raise every CP to the level of this release; those that were raised (*blocking*)."""
    with session.locked():
        low = below_level(session.worlds)
    answers = session.ask(*((cp, Upgrade(*session.ids, SUPPORTED_LEVEL)) for cp in low))
    silent = [x.cp for x in answers if not x.accepted]
    if silent:
        raise AdminError(
            f"partition(s) {silent} of the coordination topic did not show the upgrade to level {SUPPORTED_LEVEL} in "
            "time; it may be written or not. Nothing is lost: what is there works at either level. Do it again"
        )
    return low


def create(cluster: Cluster, topic: str, partitions: int, timeout_s: float) -> tuple[TopicConfig, list[str]]:
    """Create the topic; what was done: nothing, if another program was faster (*blocking*)."""
    try:
        create_topic(cluster, topic, partitions, timeout_s)
    except CoordinationTopicError:
        config = cluster.topic_config(topic, timeout_s)
        if config is None:
            raise
        return config, []
    config = cluster.topic_config(topic, timeout_s)
    if config is None:
        raise CoordinationTopicError(
            f"{topic!r} was created, and is gone again: another client deletes it. Find out which, then run init again."
        )
    settings = required_settings(min(3, config.replication_factor))
    return config, [
        f"created {topic!r}: {partitions} partitions, {config.replication_factor} replica(s), "
        + ", ".join(f"{name}={value}" for name, value in sorted(settings.items())),
        f"appended to each partition the record that fixes their number at {partitions}; level {SUPPORTED_LEVEL}",
        f"created {snapshots_topic(topic)!r}, the log of snapshots: {partitions} partitions",
    ]


def _complete(cluster: Cluster, config: TopicConfig, topic: str, timeout_s: float) -> list[str]:
    """Add missing first records (of an interrupted creation) and the log of snapshots; what was done."""
    done = []
    partitions = config.info.partitions
    marks = cluster.watermarks([(topic, cp) for cp in range(partitions)], timeout_s)
    ends = {cp: high for (_, cp), (_, high) in sorted(marks.items())}
    empty = [cp for cp, end in ends.items() if end == 0]
    if empty:
        append_first_records(cluster, topic, ends, timeout_s)
        done.append(f"appended to partition(s) {', '.join(map(str, empty))} the record that fixes their number")
    name = snapshots_topic(topic)
    if cluster.topic_config(name, timeout_s) is None:
        create_snapshots_topic(cluster, topic, partitions, config.replication_factor, timeout_s)
        done.append(f"created {name!r}, the log of snapshots: {partitions} partitions")
    return done
