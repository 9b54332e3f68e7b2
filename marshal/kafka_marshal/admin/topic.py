"""The coordination topic with its log of snapshots: created, raised to a level, pruned, archived (L1, L2, S2, E4)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kafka_marshal import arguments
from kafka_marshal.admin.base import AdminBase
from kafka_marshal.admin.session import Session, caught_up
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
from kafka_marshal.node.kept import check_keep, keep_of, keep_settings
from kafka_marshal.node.replica import Replica
from kafka_marshal.node.serving import have_done
from kafka_marshal.ports import Cluster, TopicConfig
from kafka_marshal.snapshots import prune
from kafka_marshal.topic_names import DEFAULT_PARTITIONS, snapshots_topic
from rationalizer import Upgrade, World
from rationalizer.levels import GROUPS_LEVEL, SUPPORTED_LEVEL, added_above

if TYPE_CHECKING:
    from kafka_marshal.archive import Archived

#: Of a coordination topic.
MAX_PARTITIONS = 10_000


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


class CoordinationLog(AdminBase):
    """Methods of :class:`~kafka_marshal.admin.Admin` about the coordination topic."""

    def init(self, partitions: int | None = None, timeout: float = 30.0, *, keep: float | None = None) -> TopicReport:
        """Create the coordination topic with its log of snapshots, or check the existing one; returns what was done.

        It may be called again at any time, and continues where it stopped.

        ``partitions``: of a new topic (8); an existing one must have that number.

        ``timeout`` (seconds): how long Kafka may be silent.

        ``keep`` (seconds): as for ``keep_log``; None: as it is, and a new one for ever.

        A new topic is at the newest level of the protocol; one of an older release keeps its level, with a warning
        (``upgrade``).

        Raises CoordinationTopicError if the topic is not fit for use, ConfigurationError if it has another number of
        partitions.
        """
        if partitions is not None and not 1 <= partitions <= MAX_PARTITIONS:
            raise ConfigurationError(
                f"partitions must be from 1 to {MAX_PARTITIONS}, not {partitions!r}. Nothing was changed"
            )
        keep_ms = None if keep is None else _keep_ms(keep)
        cluster = self._open_cluster()
        return have_done(cluster.runtime, lambda: prepare(cluster, self.topic, partitions, timeout, keep_ms))

    def keep_log(self, keep: float | None) -> None:
        """Have members keep the log for ``keep`` seconds, at least an hour; None: for ever.

        They remove what is older by themselves, one at a time, behind checked snapshots, within a tenth of that time.
        They need the right DELETE on the topic and its log of snapshots. It stands in the topic's settings, and may be
        changed at any time. Raises ConfigurationError if it is too short.
        """
        keep_ms = None if keep is None else _keep_ms(keep)

        def set_keep(cluster: Cluster) -> None:
            check_topic(cluster, self.topic, self._timeout_s)
            cluster.alter_topic(self.topic, keep_settings(keep_ms), self._timeout_s)

        self._have(set_keep)

    def upgrade(self) -> list[int]:
        """Raise the coordination topic to the newest level of the protocol; returns its partitions that were raised.

        Coordinated groups need level 2. It can't be undone, and members of a release that does not know the level stop
        there for good: kafka-marshal upgrade names them first. A new topic is at the newest level already.
        Raises AdminError if the log did not show all of it in time; call it again to finish.
        """
        return self._act("upgrade", _upgrade)

    def prune(
        self,
        *,
        keep: int = prune.DEFAULT_KEEP,
        older_than: float | None = None,
        dry_run: bool = False,
        force: bool = False,
        timeout: float = 30.0,
        progress: Callable[[int, int], None] | None = None,
    ) -> prune.PrunePlan:
        """Remove old log and old snapshots, up to a snapshot that agrees with a replay of the whole log.

        ``keep`` (at least 2): checked snapshots of each partition of the log that stay.

        ``older_than`` (seconds): only what is older goes, and no more is replayed than that takes.

        ``dry_run``: only return what would be removed.

        ``force``: also remove log that contradicts a snapshot; else it stays (see the plan's ``differences``).

        ``timeout`` (seconds): how long Kafka may be silent.

        ``progress`` is called with (records replayed, records in all).

        Raises TopicMissingError if there are no snapshots, LogCutError, AdminError if not all could be removed.
        """
        arguments.a_whole("keep", keep)
        timeout = arguments.seconds("timeout", timeout, above=0)
        old = None
        if older_than is not None:
            old = prune.OlderThan(arguments.seconds("older_than", older_than) * 1000, time.time() * 1000)
        if progress is not None:
            arguments.a_function("progress", progress, "records replayed, records there are")
        with self._connected() as cluster:
            plan = prune.make_plan(
                cluster, self.topic, timeout, keep=keep, force=force, older_than=old, progress=progress
            )
            if not dry_run:
                prune.carry_out(cluster, plan, timeout)
            return plan

    def archive(
        self,
        place: str,
        *,
        verify: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        timeout: float = 30.0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Archived:
        """Write what the archive in this folder, or at this URL such as ``s3://bucket/log``, does not have of the log.

        Call it before ``prune``, as often as you like: only what is new is written, in files that appear whole.

        ``verify``: also replay all that is there, and compare.

        ``storage_options``: of the store's package for fsspec (extra ``[bucket]``).

        ``timeout`` (seconds): how long Kafka may be silent.

        ``progress`` is called with (offsets done, offsets in all).

        What could not be archived, as it was pruned first or a file is damaged, is in the result (``is_whole``).

        Raises ArchiveError if the archive is of another log or can't be written, ConfigurationError.
        """
        from kafka_marshal.archive import Archive, write_archive

        arguments.text("place", place, "a folder, or a URL such as 's3://bucket/folder'")
        timeout = arguments.seconds("timeout", timeout, above=0)
        if progress is not None:
            arguments.a_function("progress", progress, "offsets done, offsets there are")
        kept = Archive.at(place, make=True, storage_options=storage_options)
        with self._connected() as cluster:
            return write_archive(cluster, self.topic, kept, timeout, verify=verify, progress=progress)


def _keep_ms(keep: float) -> int:
    return check_keep(int(arguments.seconds("keep", keep, above=0) * 1000))


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


def refuse_groups_below_level(low: Sequence[int]) -> None:
    """Raise AdminError if there are CPs below the level of coordinated groups."""
    if low:
        raise AdminError(
            f"partition(s) {low} of the coordination topic are below level {GROUPS_LEVEL} of the protocol, which "
            "coordinated groups need. Nothing was changed. Raise the topic first: kafka-marshal upgrade"
        )


def _upgrade(session: Session) -> list[int]:
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
