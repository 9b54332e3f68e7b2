"""Admin: pauses, repositions and cleans up groups while they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kafka_marshal import arguments
from kafka_marshal.admin.base import PAUSE_S
from kafka_marshal.admin.checkpoints import GroupCheckpoints
from kafka_marshal.admin.conversion import GroupConversion
from kafka_marshal.admin.dead_letters import DeadLetterTopics
from kafka_marshal.admin.forking import GroupForks
from kafka_marshal.admin.groups import Groups
from kafka_marshal.admin.open_messages import GroupOpenMessages
from kafka_marshal.admin.positions import (
    Keep,
    Move,
    MovePlan,
    check_targets,
    lost_positions,
    moves_to,
    resolve,
    stands_at,
)
from kafka_marshal.admin.redo import GroupRedo
from kafka_marshal.admin.repositioning import refuse_kept
from kafka_marshal.admin.session import group_in, kind_in, progress_in
from kafka_marshal.admin.stored_message import StoredMessages
from kafka_marshal.admin.topic import CoordinationLog
from kafka_marshal.admin.transfer import GroupTransfers
from kafka_marshal.errors import AdminError
from kafka_marshal.node.replica import Replica
from kafka_marshal.ports import Cluster, TopicPartition
from kafka_marshal.types import Target
from rationalizer import Progress


class Admin(
    CoordinationLog,
    Groups,
    GroupTransfers,
    GroupConversion,
    GroupCheckpoints,
    GroupForks,
    GroupOpenMessages,
    GroupRedo,
    DeadLetterTopics,
    StoredMessages,
):
    """Steers groups from outside, through the log. It holds nothing open between calls.

    ``client_id`` names the pausing client. By default it is unique (see the attribute): an Admin created later with it
    can continue, or end, a pause that this process could not end. It must not be the client_id of a consumer in the
    group. ``bootstrap_servers`` and ``config`` go to librdkafka as they are.

    ``heartbeat_interval`` (seconds): that of the leases it claims while it moves positions.

    ``timeout`` (seconds): how long a call waits for Kafka while it reads the log; progress restarts the wait.

    All calls may block. Besides AdminError they raise KafkaUnavailableError if no broker answers,
    CoordinationTopicError if the topic can't be trusted, ConfigurationError for invalid arguments.

    Attributes:
        topic: the coordination topic.
        client_id: as given, or a unique one.
    """

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
            self._refuse_living(group, timeout, "Nothing was forgotten", remedy)
        with self.pause(group, max(PAUSE_S, 2 * timeout)) as pause:
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
                refuse_kept(group, moves_to(targets, progress_of, lost, keeps))
            known = group_in(replica.worlds, group)
            takes_some = known is not None and known.checkpoints is not None
            return [replace(move, keeps_state=takes_some) for move in moves_to(targets, progress_of, lost)]

        return self._look(planned)
