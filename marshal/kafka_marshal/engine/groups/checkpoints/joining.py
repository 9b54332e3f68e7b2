"""Whether a member joins with checkpoints, without, or not at all (X11)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from shlex import quote

from kafka_marshal.engine.effects import Outbox
from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.engine.groups.refusals import below_level
from kafka_marshal.engine.settings import CheckpointOptions
from kafka_marshal.engine.work.topic_mark import kafka_counts
from kafka_marshal.errors import ConfigurationError, MarshalError
from rationalizer import BeginCheckpoint, Group, Tick, World
from rationalizer.levels import CHECKPOINTS_LEVEL


class JoinGate:
    """Compares a member's policy with what its group does, and begins the first checkpoint."""

    def __init__(
        self,
        member: Membership,
        policy: CheckpointOptions | None,
        worlds: Mapping[int, World],
        outbox: Outbox,
        fail: Callable[[MarshalError], object],
    ) -> None:
        """policy: None: it takes no checkpoints. fail: it will not be a member, for this reason."""
        self._member = member
        self._policy = policy
        self._worlds = worlds
        self._outbox = outbox
        self._fail = fail
        #: The home's next offset when we asked for its log time: members may have been silent for long (T3).
        self._ticked_at: int | None = None

    @property
    def _group_id(self) -> str:
        return self._member.settings.group_id

    def may_join(self, now: float) -> bool:
        """Whether to append a JoinGroup now. Every CP has the group's mark (G2)."""
        group, policy = self._member.group, self._policy
        found = None if group is None else group.checkpoints
        if policy is None:
            if found is not None:
                self._fail(_no_policy(self._group_id))
            return found is None
        if found is not None:
            if found.hold != policy.hold and not policy.adopt:
                self._fail(_other_kind(self._group_id, hold=found.hold))
                return False
            return True
        if policy.adopt:
            return True
        if (level := min(world.level for world in self._worlds.values())) < CHECKPOINTS_LEVEL:
            self._fail(below_level(self._member.settings, level))
            return False
        if group is None:
            return False
        return self._may_bury(group) if group.members else self._begin(group)

    def _may_bury(self, group: Group) -> bool:
        """Whether all members are silent: we join, which buries them, leave, and begin.

        Our replica may be behind the clock, as no member writes: so ask for log time first.
        """
        world = self._worlds[self._member.home]
        if len(group.overdue(world.log_time)) == len(group.members):
            return True
        if self._ticked_at is None:
            self._ticked_at = world.next_offset
            self._outbox.append(self._member.home, Tick(*self._member.settings.ids))
        elif world.next_offset > self._ticked_at:
            self._fail(_members_there(self._group_id))
        return False

    def _begin(self, group: Group) -> bool:
        """Begin the first checkpoint; once it is there, we join."""
        for topic, partition, kept in group.all_progress():
            if kafka_counts(kept.progress):
                self._fail(_in_transactions(self._group_id, topic, partition))
                return False
            if kept.progress.holes is not None:
                self._fail(ConfigurationError(open_messages_text(self._group_id, topic, partition)))
                return False
        policy = self._policy
        assert policy is not None
        record = BeginCheckpoint(*self._member.settings.ids, 0, policy.timeout_ms, policy.keep, policy.hold)
        self._outbox.append(self._member.home, record)
        return False

    def is_misfit(self) -> bool:
        """Whether our JoinGroup was accepted while the group had another mode than we meant: leave, and begin again."""
        group, policy = self._member.group, self._policy
        found = None if group is None else group.checkpoints
        if policy is None:
            return found is not None
        if policy.adopt:
            return False
        return found is None or found.hold != policy.hold

    def forget(self) -> None:
        """Ask again before the next join."""
        self._ticked_at = None


def _members_there(group_id: str) -> ConfigurationError:
    return ConfigurationError(
        f"group {group_id!r} takes no checkpoints, and has members: all take part, or none. This member "
        "was given nothing, and the others continue. Give all members a policy with adopt=True, restart them one by "
        f"one, and then let the group begin: kafka-marshal checkpoints {quote(group_id)} --start"
    )


def _no_policy(group_id: str) -> ConfigurationError:
    return ConfigurationError(
        f"group {group_id!r} takes checkpoints, and this member has no policy for them: all take part, or none. "
        "This member was given nothing, and the others continue. Pass checkpoints=CheckpointPolicy(…), and save "
        f"its state in on_checkpoint; or end them for the group: kafka-marshal checkpoints {quote(group_id)} --end"
    )


def _other_kind(group_id: str, *, hold: bool) -> ConfigurationError:
    return ConfigurationError(
        f"group {group_id!r} takes checkpoints with hold={hold}, and this member's policy has hold={not hold}. This "
        "member was given nothing, and the others continue. Give all members the same; to change it, end them "
        f"first: kafka-marshal checkpoints {quote(group_id)} --end"
    )


def _in_transactions(group_id: str, topic: str, partition: int) -> ConfigurationError:
    return ConfigurationError(
        f"group {group_id!r} processes {topic} [{partition}] in transactions: Kafka's committed offset counts, and "
        "can't go back with a checkpoint. Nothing was changed. To give that up, set its position: "
        "kafka-marshal release-group "
        f"{quote(group_id)} --partition {topic}:{partition}=OFFSET"
    )


def open_messages_text(group_id: str, topic: str, partition: int) -> str:
    """Why a group with such messages begins no checkpoints (X4)."""
    return (
        f"group {group_id!r} has messages of {topic} [{partition}] that wait for another try, or are set aside: "
        "checkpoints can't hold them. Nothing was changed. See them: kafka-marshal open-messages "
        f"{quote(group_id)}. Let workers without checkpoints handle them (kafka-marshal redrive {quote(group_id)} "
        f"--all frees those that are set aside), or give them up: kafka-marshal discard {quote(group_id)} --all"
    )
