"""Admin: pauses, repositions and cleans up groups while they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar, overload

from kafka_marshal import arguments
from kafka_marshal.adapters.opening import open_cluster
from kafka_marshal.admin import coordinated, groups
from kafka_marshal.admin.archiving import LogArchive
from kafka_marshal.admin.checkpoints import GroupCheckpoints
from kafka_marshal.admin.dead_letters import DeadLetterTopics
from kafka_marshal.admin.group_moves import GroupMoves
from kafka_marshal.admin.members import find_consuming, refuse_living
from kafka_marshal.admin.move_plans import MovePlan
from kafka_marshal.admin.pause import Pause
from kafka_marshal.admin.positions import (
    Keep,
    Move,
    check_name,
    check_targets,
    lost_positions,
    moves_to,
    resolve,
    stands_at,
)
from kafka_marshal.admin.session import Session, group_in, kind_in, progress_in
from kafka_marshal.admin.setting_aside import OpenMessages
from kafka_marshal.admin.stored_message import StoredMessages
from kafka_marshal.admin.topic import TopicReport, prepare, set_keep, upgrade
from kafka_marshal.client.options import check_log_name
from kafka_marshal.errors import AdminError, ConfigurationError
from kafka_marshal.node.config import (
    MOST_START_S,
    START_TIMEOUT_S,
    check_bootstrap,
    check_ids,
    check_threads,
    new_client_id,
)
from kafka_marshal.node.kept import check_keep
from kafka_marshal.node.replica import Replica
from kafka_marshal.node.serving import have_done
from kafka_marshal.ports import Cluster, TopicPartition
from kafka_marshal.snapshots import prune
from kafka_marshal.topic_names import DEFAULT_TOPIC
from kafka_marshal.types import LeaseInfo, Target
from rationalizer import Progress, Settings

T = TypeVar("T")

DEFAULT_HEARTBEAT_INTERVAL_MS = 3_000

#: Of a coordination topic.
MAX_PARTITIONS = 10_000

#: A pause of more than a year is a mistake.
MAX_PAUSE_S = 366 * 86_400


class Admin(GroupMoves, GroupCheckpoints, DeadLetterTopics, StoredMessages, OpenMessages, LogArchive):
    """Steers groups from outside, through the log. It holds nothing open between calls.

    ``client_id`` names the pausing client. By default it is unique (see the attribute): an Admin created later with it
    can continue, or end, a pause that this process could not end. It must not be the client_id of a consumer in the
    group. ``bootstrap_servers`` and ``config`` go to librdkafka as they are. ``heartbeat_interval_ms``:
    that of the leases it claims while it moves positions. ``timeout`` (seconds): how long a call waits for Kafka while
    it reads the log; progress restarts the wait.

    All calls may block. Besides AdminError they raise KafkaUnavailableError if no broker answers,
    CoordinationTopicError if the topic can't be trusted, ConfigurationError for invalid arguments.

    Attributes:
        topic: the coordination topic.
        client_id: as given, or a unique one.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        topic: str = DEFAULT_TOPIC,
        client_id: str | None = None,
        heartbeat_interval_ms: int = DEFAULT_HEARTBEAT_INTERVAL_MS,
        config: Mapping[str, object] | None = None,
        timeout: float = START_TIMEOUT_S,
    ) -> None:
        check_bootstrap(bootstrap_servers)
        settings = arguments.a_mapping("config", config)
        check_threads()
        self._set_up(
            lambda: open_cluster(bootstrap_servers, settings), topic, client_id, heartbeat_interval_ms, timeout
        )

    @classmethod
    def on_cluster(
        cls,
        open_cluster: Callable[[], Cluster],
        *,
        topic: str = DEFAULT_TOPIC,
        client_id: str | None = None,
        heartbeat_interval_ms: int = DEFAULT_HEARTBEAT_INTERVAL_MS,
        timeout: float = START_TIMEOUT_S,
    ) -> Self:
        """An Admin on any implementation of Cluster; each call opens one, and closes it."""
        admin = cls.__new__(cls)
        admin._set_up(open_cluster, topic, client_id, heartbeat_interval_ms, timeout)
        return admin

    def _set_up(
        self,
        open_cluster: Callable[[], Cluster],
        topic: str,
        client_id: str | None,
        heartbeat_interval_ms: int,
        timeout: float,
    ) -> None:
        self.topic: str = check_log_name(topic)
        self._timeout_s = arguments.seconds("timeout", timeout, above=0, below=MOST_START_S)
        #: Unique for this Admin unless it was given.
        self.client_id: str = f"admin-{new_client_id()}" if client_id is None else client_id
        self._is_new = client_id is None
        self._heartbeat_interval_ms = heartbeat_interval_ms
        self._open_cluster = open_cluster
        check_ids("group", self.client_id, heartbeat_interval_ms)

    def init(self, partitions: int | None = None, timeout: float = 30.0, *, keep: float | None = None) -> TopicReport:
        """Create the coordination topic with its log of snapshots, or check the existing one; returns what was done.

        It may be called again at any time, and continues where it stopped. ``partitions``: of a new topic (8); an
        existing one must have that number. ``timeout`` (seconds): how long Kafka may be silent. ``keep`` (seconds): as
        for ``keep_log``; None: as it is, and a new one for ever. A new topic is at the newest level of the protocol;
        one of an older release keeps its level, with a warning (``upgrade``).
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
        cluster = self._open_cluster()
        have_done(cluster.runtime, lambda: set_keep(cluster, self.topic, keep_ms, self._timeout_s))

    def upgrade(self) -> list[int]:
        """Raise the coordination topic to the newest level of the protocol; returns its partitions that were raised.

        Coordinated groups need level 2. It can't be undone, and members of a release that does not know the level stop
        there for good: kafka-marshal upgrade names them first. A new topic is at the newest level already.
        Raises AdminError if the log did not show all of it in time; call it again to finish.
        """
        return self._act("upgrade", upgrade)

    # With a pause.

    def pause(self, group: str, expires_in: float = 300) -> Pause:
        """A pause of the group, for a ``with`` block; entering it pauses.

        ``expires_in`` (seconds): how long the group stays paused after this process has died or been idle.
        """
        self._check_group(group)
        expires_in = arguments.seconds("expires_in", expires_in, above=0, below=MAX_PAUSE_S)
        return Pause(lambda: self._open_to_pause(group), group, self.client_id, expires_in)

    def forget(self, group: str, timeout: float = 30.0, *, force: bool = False) -> int:
        """Drop all that the log knows of a group that has ended: leases and progress; returns the number of leases.

        Its members must be silent for long enough within timeout seconds. Then the group is paused, and every
        coordination partition forgets it. Raises AdminError if a member is alive, without a pause; if one answers the
        pause, the group is resumed. ``force``: even if members are alive; they commit what they have done, and begin
        from their ``start=`` again.
        """
        timeout = arguments.seconds("timeout", timeout)
        self._check_group(group)
        if not force:
            remedy = "End its members first; forced, they would begin from their start= again"
            self._act(group, lambda session: refuse_living(session, timeout, "Nothing was forgotten", remedy))
        with self.pause(group, max(60.0, 2 * timeout)) as pause:
            try:
                pause.wait_released(timeout)
            except AdminError as error:
                raise AdminError(
                    f"group {group!r} is at work; nothing was forgotten, and it goes on. {error}", in_hand=error.in_hand
                ) from error
            alive = sorted(pause.signs_of_life)
            if alive and not force:
                raise AdminError(
                    f"group {group!r} is alive: {', '.join(map(repr, alive))} answered the pause. Nothing was "
                    "forgotten, and it goes on. End its members first; forced, they would begin from their start= "
                    "again"
                )
            return pause.forget()

    # Without one.

    def plan(
        self,
        group: str,
        positions: Mapping[TopicPartition, Target] | MovePlan,
        *,
        force: bool = False,
        keep_done: bool = False,
    ) -> list[Move]:
        """What ``Pause.reposition`` or ``Pause.undo`` would move now; nothing is paused or appended."""
        self._check_group(group)
        is_undo = isinstance(positions, MovePlan)
        wanted: Mapping[TopicPartition, Target]
        if isinstance(positions, MovePlan):
            positions.check(group, self.topic)
            wanted, keeps = positions.targets, positions.keeps
        else:
            check_targets(positions)
            wanted, keeps = positions, dict.fromkeys(positions, Keep()) if keep_done else {}

        def planned(cluster: Cluster, replica: Replica) -> list[Move]:
            def progress_of(key: TopicPartition) -> Progress | None:
                return progress_in(replica.worlds, group, key)

            targets = resolve(cluster, wanted, lambda key: stands_at(progress_of(key)), force=force)
            lost = lost_positions(cluster, targets, progress_of)
            if kind_in(replica.worlds, group) != "coordinated":
                return moves_to(targets, progress_of, lost, keeps)
            if not is_undo:
                coordinated.refuse_kept(group, moves_to(targets, progress_of, lost, keeps))
            known = group_in(replica.worlds, group)
            takes_some = known is not None and known.checkpoints is not None
            return [replace(move, keeps_state=takes_some) for move in moves_to(targets, progress_of, lost)]

        return self._look(planned)

    @overload
    def evict(
        self, group: str, topic: str, partition: int, *, force: bool = False, dry_run: bool = False
    ) -> LeaseInfo: ...
    @overload
    def evict(
        self, group: str, client_id: str, /, *, force: bool = False, dry_run: bool = False
    ) -> list[LeaseInfo]: ...
    def evict(
        self, group: str, topic: str, partition: int | None = None, *, force: bool = False, dry_run: bool = False
    ) -> LeaseInfo | list[LeaseInfo]:
        """Release a lease in its dead holder's name, without an offset; returns the lease as it was.

        ``evict(group, client_id)`` releases all that a member holds, and returns the list; a member of a coordinated
        group leaves it. The holder's messages in flight are repeated by the next one. A holder that is alive
        (``force``) claims nothing, or does not join again, until its handler has returned, and not this partition for
        three heartbeat intervals (three sessions). The log names the client that evicted it.
        ``dry_run``: only check, and return what would be released.

        Raises AdminError if the lease is free, if the holder beat within the last heartbeat interval (``force`` takes
        the lease from a live holder), and if another client was faster.
        """
        self._check_group(group)
        if partition is None:
            arguments.text("client_id", topic)
            return self._act(group, lambda session: groups.evict_member(session, topic, force=force, dry_run=dry_run))
        check_name((topic, partition))
        return self._act(group, lambda session: groups.evict(session, topic, partition, force=force, dry_run=dry_run))

    def drain(self, group: str, client_id: str, *, timeout: float | None = None) -> list[LeaseInfo]:
        """Ask a live member to finish its messages in flight, to release, and to claim no more; returns what it held.

        ``timeout`` (seconds): wait until it holds nothing; None: don't wait. Only a restart of the member undoes it.
        Members of a release before this one ignore it. Raises AdminError if it holds nothing, or still holds something
        after the timeout.
        """
        self._check_group(group)
        return self._act(group, lambda session: groups.drain(session, client_id, timeout))

    def configure_group(self, group: str, **settings: object) -> Settings:
        """Set these settings of a coordinated group while it runs; returns all of its settings.

        ``accept_individual_commit`` (bool), ``accept_range_fetch`` (topics whose partitions may be shared by key),
        ``max_session_timeout_ms``, ``max_individual_commits``. An unknown group is created as a coordinated one.
        Members need no restart, and keep the session that they joined with.
        Raises ConfigurationError for invalid settings, WrongKindError for a claimed group, GroupPausedError, and
        AdminError if the topic is at level 1 of the protocol (``upgrade``).
        """
        self._check_group(group)
        coordinated.check_settings(settings)
        return self._act(group, lambda session: coordinated.configure(session, settings))

    def resume(self, group: str, client_id: str | None = None) -> list[groups.PausedPartition]:
        """End a dead admin's pause, in its name; returns what was paused, [] for nothing.

        ``client_id``: end the pause of this client only (None: of any). What that admin still holds is released, too.
        If it is alive, its next step fails. Raises AdminError if it is another client's pause.
        """
        self._check_group(group)
        if client_id is not None:
            arguments.text("client_id", client_id)
        return self._act(group, lambda session: groups.end_pause(session, client_id))

    def pauses(self, group: str) -> list[groups.PausedPartition]:
        """The coordination partitions where the group is paused, by which client, until when; nothing is appended."""
        self._check_group(group)
        return self._look(lambda _, replica: groups.pauses(replica, group))

    def progress(self, group: str) -> list[LeaseInfo]:
        """All leases or pieces of the group with their positions, sorted by topic, partition and keys.

        Nothing is appended.
        """
        self._check_group(group)
        return self._look(lambda _, replica: groups.progress(replica, group))

    def held_by(self, client_id: str) -> list[LeaseInfo]:
        """All leases and pieces of members with this client_id, in every group, sorted; nothing is appended."""
        return self._look(lambda _, replica: groups.held_by(replica, client_id))

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

        ``keep`` (at least 2): checked snapshots of each partition of the log that stay. ``older_than`` (seconds): only
        what is older goes, and no more is replayed than that takes. ``dry_run``: only return what would be removed.
        ``force``: also remove log that contradicts a snapshot; else it stays (see the plan's
        ``differences``). ``timeout`` (seconds): how long Kafka may be silent. ``progress`` is called with (records
        replayed, records in all).
        Raises TopicMissingError if there are no snapshots, LogCutError, AdminError if not all could be removed.
        """
        arguments.a_whole("keep", keep)
        timeout = arguments.seconds("timeout", timeout, above=0)
        old = None
        if older_than is not None:
            old = prune.OlderThan(arguments.seconds("older_than", older_than) * 1000, time.time() * 1000)
        if progress is not None:
            arguments.a_function("progress", progress, "records replayed, records there are")
        cluster = self._open_cluster()
        try:
            plan = prune.make_plan(
                cluster, self.topic, timeout, keep=keep, force=force, older_than=old, progress=progress
            )
            if not dry_run:
                prune.carry_out(cluster, plan, timeout)
            return plan
        finally:
            cluster.close()

    # Inside.

    def _look(self, look: Callable[[Cluster, Replica], T]) -> T:
        """Call a function with a replica that has read the whole log."""
        cluster = self._open_cluster()

        def looked() -> T:
            with groups.caught_up(cluster, self.topic, self._timeout_s) as replica:
                return look(cluster, replica)

        return have_done(cluster.runtime, looked)

    def _check_group(self, group: str) -> None:
        check_ids(group, self.client_id, self._heartbeat_interval_ms)

    def _act(self, group: str, act: Callable[[Session], T]) -> T:
        """Call a function with its own session, on another thread; an interrupt ends the wait only."""
        cluster = self._open_cluster()
        return have_done(cluster.runtime, lambda: self._open(group, cluster).run(act))

    def _open(self, group: str, cluster: Cluster, client_id: str | None = None) -> Session:
        return Session(
            cluster, self.topic, group, client_id or self.client_id, self._heartbeat_interval_ms, self._timeout_s
        )

    def _open_to_pause(self, group: str) -> Session:
        if not self._is_new:
            self._refuse_consumer(group)
        return self._open(group, self._open_cluster())

    def _refuse_consumer(self, group: str) -> None:
        cluster = self._open_cluster()

        def found() -> str | None:
            try:
                return find_consuming(cluster, self.topic, group, self.client_id, self._timeout_s)
            finally:
                cluster.close()

        deed = have_done(cluster.runtime, found)
        if deed is not None:
            raise ConfigurationError(
                f"client_id {self.client_id!r} is a consumer's in group {group!r}: it {deed}. Paused by it, the "
                "group's beats from that consumer would move positions. Nothing was changed. Leave client_id away, "
                "and a unique one is made"
            )

    def __repr__(self) -> str:
        return f"Admin(topic={self.topic!r}, client_id={self.client_id!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Nothing is open between calls."""


def _keep_ms(keep: float) -> int:
    return check_keep(int(arguments.seconds("keep", keep, above=0) * 1000))
