"""The methods of an Admin that move groups from Kafka, to Kafka, and from one kind to the other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kafka_marshal import arguments
from kafka_marshal.admin.conversion import Conversion, Plan, convert, file_of, plan_conversion, saved_in
from kafka_marshal.admin.members import refuse_living
from kafka_marshal.admin.pause import Pause
from kafka_marshal.admin.positions import Move
from kafka_marshal.admin.session import GroupKind, Session, kind_in
from kafka_marshal.admin.topic import below_level
from kafka_marshal.admin.transfer import (
    Open,
    empty_kafka_group,
    export_positions,
    import_positions,
    planned_export,
    planned_import,
)
from kafka_marshal.client.one_process import OneProcess
from kafka_marshal.node.log_guard import progress_of_all
from kafka_marshal.node.replica import Replica
from kafka_marshal.ports import Cluster
from rationalizer import route_group
from rationalizer.levels import GROUPS_LEVEL

T = TypeVar("T")

#: A pause lasts at least this long (seconds); it is extended while there is work.
PAUSE_S = 60.0


class GroupMoves(OneProcess):
    """Base of :class:`~kafka_marshal.admin.Admin`: these calls pause the group while they run."""

    topic: str
    client_id: str
    _look: Callable[..., Any]
    _check_group: Callable[[str], None]
    pause: Callable[[str, float], Pause]
    _open: Callable[[str, Cluster, str], Session]
    _open_cluster: Callable[[], Cluster]
    _act: Callable[[str, Callable[[Session], None]], None]

    def import_group(
        self, group: str, *, force: bool = False, dry_run: bool = False, timeout: float = 30.0
    ) -> list[Move]:
        """Import the committed offsets of Kafka's own consumer group of that name into a coordinated group.

        Neither the Kafka group (classic or KIP-848) nor the coordinated group may have members; the latter is created
        if it is missing. Metadata of up to 255 bytes is kept. If members wrote the offsets (``mirror_offsets``, or
        since the log was harmed), open messages come along (``restored``). ``force``: replace positions it has
        already. ``dry_run``: only return what would be set. ``timeout`` (seconds): how long to wait until dead members
        are silent for long enough. Returns the moves: ``after`` is the offset to read next.
        Raises AdminError if there is nothing to import or one side is not empty, WrongKindError for a claimed group.
        """

        def planned(cluster: Cluster, replica: Replica) -> list[Move]:
            kafka = empty_kafka_group(cluster, group)
            found = progress_of_all(replica.worlds, group)
            level = replica.worlds[route_group(group, len(replica.worlds))].level
            return planned_import(group, kind_in(replica.worlds, group), kafka, found.get, level, force=force)

        return self._planned_or_done(group, planned, import_positions, force, dry_run, timeout)

    def export_group(
        self,
        group: str,
        *,
        force: bool = False,
        dry_run: bool = False,
        timeout: float = 30.0,
        open_messages: Open = None,
    ) -> list[Move]:
        """Commit the group's positions to Kafka's own consumer group of that name: stable + 1, never above.

        Claimed groups can be exported, too. Neither side may have members. ``force``: even if Kafka's offsets move
        back. ``open_messages``: Kafka's group has no place for open messages: with ``"repeat"`` they come again there,
        and all above them; with ``"drop"`` they count as done; None: AdminError if there are some. Lost positions
        (``lost``) are skipped. Returns the moves: ``before`` is Kafka's offset, ``done_ahead`` the
        number of done offsets above ``after``, which will be repeated.
        Raises AdminError if there is nothing to export or one side is not empty.
        """

        def planned(cluster: Cluster, replica: Replica) -> list[Move]:
            kafka = empty_kafka_group(cluster, group)
            found = progress_of_all(replica.worlds, group)
            return planned_export(cluster, group, kafka, found, force=force, open_messages=open_messages)

        _check_open(open_messages)
        return self._planned_or_done(group, planned, export_positions, force, dry_run, timeout, open_messages)

    def convert_group(
        self,
        group: str,
        to: GroupKind,
        *,
        file: str | os.PathLike[str] | None = None,
        force: bool = False,
        dry_run: bool = False,
        timeout: float = 30.0,
        open_messages: Open = None,
    ) -> Conversion:
        """Make a claimed group a coordinated one, or the other way round, with its positions.

        Stop its workers first. All progress is saved to ``file`` (default: kafka-marshal-convert-GROUP.json in the
        working directory) before anything is changed; the group is paused until all positions are set. After a kill at
        any point, the same call continues. Only positions are carried over: messages done above them are repeated, and
        named in ``repeats``. Messages that were set aside stay so. ``open_messages``: of other open messages: with
        ``"repeat"`` they come again, and all above them; with ``"drop"`` they count as done; None: AdminError if there
        are some. Convert sinks, too: ``sink.convert(group, to)``.
        ``force``: set the saved positions although the group was at work after an earlier, interrupted run.
        Raises AdminError if the group is unknown, of that kind already, or alive, and if it was not finished: then call
        it again. Raises ConfigurationError if the file is another one, or can't be written.
        """
        arguments.one_of("to", to, ("claimed", "coordinated"))
        _check_open(open_messages)
        path = file_of(group) if file is None else Path(file)
        timeout = arguments.seconds("timeout", timeout)
        self._check_group(group)
        plan = Plan.read(path)
        if plan is not None:
            plan.check(path, group, self.topic, to)
        if dry_run and plan is not None and plan.phase == "changing":
            return plan.conversion(path, resumed=True)
        if dry_run:
            return self._look(lambda _, replica: self._planned(replica, group, to, path, open_messages))  # type: ignore[no-any-return]
        # The pause of a killed admin may still be in force: it is continued in its name.
        client_id = self.client_id if plan is None or plan.phase == "done" else plan.client_id
        if client_id == self.client_id:
            remedy = "Stop its workers first: those of the other kind take their place"
            self._act(group, lambda session: refuse_living(session, timeout, "Nothing was changed", remedy))
        with self._pause_as(group, client_id, max(PAUSE_S, 2 * timeout)) as pause:
            pause.wait_released(timeout)
            return pause.carry_out("convert", convert, self.topic, to, path, force, open_messages)

    def _pause_as(self, group: str, client_id: str, expires_in: float) -> Pause:
        """A pause in the name of this admin, or of an earlier one that it continues."""
        if client_id == self.client_id:
            return self.pause(group, expires_in)
        return Pause(lambda: self._open(group, self._open_cluster(), client_id), group, client_id, expires_in)

    def _planned(self, replica: Replica, group: str, to: GroupKind, path: Path, open_messages: Open) -> Conversion:
        kind, too_low = kind_in(replica.worlds, group), below_level(replica.worlds, GROUPS_LEVEL)
        saved = saved_in(replica.worlds, group, open_messages)
        plan = plan_conversion(group, self.topic, self.client_id, kind, to, saved, too_low)
        return plan.conversion(path, resumed=False)

    def _planned_or_done(
        self,
        group: str,
        planned: Callable[[Cluster, Replica], list[Move]],
        do: Callable[..., list[Move]],
        force: bool,
        dry_run: bool,
        timeout: float,
        *more: object,
    ) -> list[Move]:
        self._check_group(group)
        timeout = arguments.seconds("timeout", timeout)
        moves: list[Move] = self._look(planned)
        if dry_run:
            return moves
        remedy = "Stop its members first"
        self._act(group, lambda session: refuse_living(session, timeout, "Nothing was changed", remedy))
        with self._pause_as(group, self.client_id, max(PAUSE_S, 2 * timeout)) as pause:
            pause.wait_released(timeout)
            return pause.carry_out("move positions", do, force, *more)


def _check_open(open_messages: object) -> None:
    if open_messages is not None:
        arguments.one_of("open_messages", open_messages, ("repeat", "drop"))
