"""The methods of an Admin about checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

from kafka_marshal import arguments
from kafka_marshal.admin import checkpoint_work, rollback
from kafka_marshal.admin.checkpoint_work import KeptCheckpoint, TakenCheckpoint
from kafka_marshal.admin.pause import Pause
from kafka_marshal.admin.rollback import RolledBack
from kafka_marshal.admin.session import Session
from kafka_marshal.checkpoints import Restore
from kafka_marshal.client.one_process import OneProcess
from kafka_marshal.errors import ConfigurationError

#: A pause to begin or end checkpoints lasts at least this long (s); it is extended while there is work.
PAUSE_S = 60.0

#: Checkpoints take 0.1 s … an hour.
_LEAST_S, _MOST_S = 0.1, 3_600.0

#: Periodic checkpoints that a group may keep.
_MOST_KEPT = 64


class GroupCheckpoints(OneProcess):
    """Base of :class:`~kafka_marshal.admin.Admin`: checkpoints of a group, and the way back to one."""

    _look: Callable[..., Any]
    _check_group: Callable[[str], None]
    _act: Callable[[str, Callable[[Session], Any]], Any]
    pause: Callable[[str, float], Pause]

    def checkpoint(self, group: str, pin: bool = False, timeout: float = 60.0) -> TakenCheckpoint:
        """Take a checkpoint of the group now, and wait until it is complete.

        ``pin``: keep it until it is retired. ``timeout`` (seconds): after it, the checkpoint is complete with those
        members that have answered. ``older`` of the result: pieces with messages waiting that kept an
        older cut, and why.
        Raises CheckpointEndedError, which names the members that refused or have not answered, if there is none.
        """
        self._check_group(group)
        timeout = arguments.seconds("timeout", timeout, above=0)
        if not _LEAST_S <= timeout <= _MOST_S:
            raise ConfigurationError(
                f"timeout must be {_LEAST_S} to {_MOST_S:g} s, not {timeout:g}. Nothing was changed"
            )
        arguments.a_flag("pin", pin)
        return self._act(group, lambda session: checkpoint_work.take(session, timeout, pin))  # type: ignore[no-any-return]

    def checkpoints(self, group: str) -> list[KeptCheckpoint]:
        """The checkpoints that the group keeps, ascending; nothing is appended.

        Raises AdminError if the group takes none.
        """
        self._check_group(group)
        return self._look(  # type: ignore[no-any-return]
            lambda _, replica: checkpoint_work.kept_by(checkpoint_work.takes_some(replica.worlds, group)[0])
        )

    def pin(self, group: str, checkpoint: int) -> None:
        """Keep this checkpoint until it is retired. Raises AdminError if it is not kept, or if 16 are pinned."""
        self._check_group(group)
        arguments.a_whole("checkpoint", checkpoint)
        self._act(group, lambda session: checkpoint_work.pin(session, checkpoint))

    def retire(self, group: str, checkpoint: int) -> None:
        """Drop this checkpoint, pinned or not. Raises AdminError if it is the newest, or not kept."""
        self._check_group(group)
        arguments.a_whole("checkpoint", checkpoint)
        self._act(group, lambda session: checkpoint_work.retire(session, checkpoint))

    def start_checkpoints(self, group: str, hold: bool = False, keep: int = 16, *, timeout: float = 30.0) -> int:
        """Let a group with progress take checkpoints from now on; returns the id of the first, which is pinned.

        All of its members need a CheckpointPolicy with ``adopt=True`` first. The group is paused until they have left;
        then they join again. ``hold``, ``keep``: as in CheckpointPolicy. ``timeout`` (seconds): how long to wait for
        them. Raises AdminError if they do not leave, if it takes checkpoints, or if it processes in transactions.
        """
        self._check_group(group)
        arguments.a_flag("hold", hold)
        arguments.a_whole("keep", keep, 1, _MOST_KEPT)
        timeout = arguments.seconds("timeout", timeout)
        self._look(lambda _, replica: rollback.check_start(replica.worlds, group))  # before anybody is paused
        with self.pause(group, max(PAUSE_S, 2 * timeout)) as pause:
            pause.wait_released(timeout)
            return pause.carry_out("start checkpoints", rollback.start, hold, keep)

    def end_checkpoints(self, group: str, *, timeout: float = 30.0) -> None:
        """Let a group take no checkpoints any more. It continues at what the newest has; its states are not needed.

        All of its members need ``adopt=True``, or no CheckpointPolicy, first. Else as :meth:`start_checkpoints`.
        """
        self._check_group(group)
        timeout = arguments.seconds("timeout", timeout)
        self._look(lambda _, replica: checkpoint_work.takes_some(replica.worlds, group))
        with self.pause(group, max(PAUSE_S, 2 * timeout)) as pause:
            pause.wait_released(timeout)
            pause.carry_out("end checkpoints", rollback.end)

    def rollback(
        self,
        group: str,
        to: int | str | datetime,
        dry_run: bool = False,
        stay_paused: float | None = None,
        undo: Callable[[Restore], object] | None = None,
        *,
        force: bool = False,
        timeout: float = 60.0,
    ) -> RolledBack:
        """Put the group back to a checkpoint: its progress, and the states of its members.

        ``to``: an id, ``"initial"`` (before any state was saved), or a datetime (the newest complete by then). It is
        pinned first; later ones are dropped. Members that are at work restore from it and continue.
        ``stay_paused`` (seconds): pause the group first, wait until all members have left (``timeout``, seconds), and
        leave the pause in force for that long; ``release-group --resume`` ends it. ``undo``: is called then with a
        Restore whose token is the rollback's generation, to rewind sinks (``sink.restore``).
        ``dry_run``: only return what would change. ``force``: even if retention has deleted what would come again.
        Raises AdminError if there is no such checkpoint, or if another client put the group back or set its positions
        meanwhile; KafkaUnavailableError if the log did not show the result in time.
        """
        self._check_group(group)
        _check_target(to)
        if undo is not None:
            arguments.a_function("undo", undo, "restore")
            if stay_paused is None:
                raise ConfigurationError(
                    "undo= rewinds sinks while no member writes to them: it goes with stay_paused=. Nothing was changed"
                )
        if dry_run:
            return self._look(  # type: ignore[no-any-return]
                lambda cluster, replica: rollback.plan(cluster, replica.worlds, group, to)
            )
        if stay_paused is None:
            return self._act(group, lambda session: rollback.go_back(session, to, force))  # type: ignore[no-any-return]
        length = arguments.seconds("stay_paused", stay_paused, above=0)
        timeout = arguments.seconds("timeout", timeout)
        planned = self._look(lambda cluster, replica: rollback.plan(cluster, replica.worlds, group, to))
        if not force:
            rollback.refuse_gone(planned)
        with self.pause(group, length) as pause:
            pause.wait_released(timeout)
            done, restore = pause.carry_out("rollback", rollback.go_back_paused, planned.to, force)
            try:
                if undo is not None:
                    undo(restore)
            except BaseException as error:
                pause.leave_in_force()
                error.add_note(
                    f"Group {group!r} is at checkpoint {done.to}, and stays paused by {pause.client_id!r}. Its sinks "
                    "may not be at it yet: do it again with this client_id (--client-id)."
                )
                raise
            until = pause.leave_in_force()
            return replace(done, paused_by=pause.client_id, paused_until=until)


def _check_target(to: int | str | datetime) -> None:
    if isinstance(to, datetime):
        if to.tzinfo is None:
            raise ConfigurationError(f"to={to} has no time zone; say which moment is meant. Nothing was changed")
    elif to != "initial":
        if isinstance(to, str):
            raise ConfigurationError(f"to={to!r} is no checkpoint's id, 'initial' or datetime. Nothing was changed")
        arguments.a_whole("to", to)
